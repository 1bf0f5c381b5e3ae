"""Fewer kernels for the same numbers: a ranker's PyTorch graph, rewritten for GPUs.

A small model on a GPU costs what its kernels cost to start. Two rewrites of graphs of `infra.engine.torch_graph`:
`heads`  the same operations on each of the equal parts of a Split, put together by a Concat, become one operation each
         on all parts, which lie along a new first axis (attention written head by head, as CPUs like it).
`bias`   a product with a constant matrix and the addition of a constant vector become one call.
Refuses nothing: what does not fit the pattern stays as it is. Invariant: the result is the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.nn import functional

from infra.engine.torch_operators import OPERATORS, Attributes, nth

_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Exp")
_ALONG_AN_AXIS = ("Softmax", "Concat", "Split", "ReduceSum", "ReduceMean", "ReduceMax")
_LIFTED = (*_ELEMENTWISE, *_ALONG_AN_AXIS, "MatMul", "Transpose")
# torch types the arguments of an fx.Node as a union of everything; here they are what torch_graph put there.
Node = Any
_NAMES: dict[Callable[..., Any], str] = {OPERATORS[name]: name for name in _LIFTED}


def fewer_kernels(module: fx.GraphModule) -> fx.GraphModule:
    """The module, rewritten in place."""
    for node in list(module.graph.nodes):
        if node.target is OPERATORS["Concat"] and len(node.args) > 2:
            _merge(module.graph, node)
    for node in list(module.graph.nodes):
        if node.target is OPERATORS["Add"]:
            _with_bias(module, node)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module


def _merge(graph: fx.Graph, concat: Node) -> None:
    """Replace a Concat of parts that are made alike by one of parts made together."""
    heads = _Heads(graph, len(concat.args) - 1)
    with graph.inserting_before(concat):
        stacked = heads.stack(concat.args[1:])
        if stacked is not None and heads.lifted:
            concat.replace_all_uses_with(graph.call_function(_joined, (stacked, concat.args[0]["axis"])))


class _Heads:
    """Makes values of many heads one value with the heads along its first axis."""

    def __init__(self, graph: fx.Graph, heads: int) -> None:
        self._graph = graph
        self._heads = heads
        self._made: dict[tuple[Any, ...], Node | None] = {}
        self.lifted = 0

    def stack(self, parts: Sequence[Any]) -> Node | None:
        """One value for the values of all heads; None when they are not made alike."""
        key = tuple(parts)
        if not all(isinstance(part, fx.Node) and part.op == "call_function" for part in key):
            return None
        if key not in self._made:
            self._made[key] = self._stacked(key)
        return self._made[key]

    def _stacked(self, parts: tuple[Node, ...]) -> Node | None:
        first = parts[0]
        if any(part.target is not first.target for part in parts):
            return None
        if first.target is nth:
            return self._outputs(parts)
        name = _NAMES.get(first.target)
        if name is None or any(part.args[0] != first.args[0] or len(part.args) != len(first.args) for part in parts):
            return None
        inputs, stacked = [], []
        for at in range(1, len(first.args)):
            column = [part.args[at] for part in parts]
            shared = all(one is column[0] or (not isinstance(one, fx.Node) and one == column[0]) for one in column)
            value = column[0] if shared else self.stack(column)
            if value is None:
                return None
            inputs.append(value)
            stacked.append(not shared)
        if not any(stacked) or (name == "Concat" and not all(stacked)):
            return None
        self.lifted += 1
        return self._graph.call_function(_together, (name, first.args[0], stacked, *inputs))

    def _outputs(self, parts: tuple[Node, ...]) -> Node | None:
        """Neighbouring outputs of one Split into equal parts; or the same output of Splits that are made alike."""
        splits, numbers = [part.args[0] for part in parts], [part.args[1] for part in parts]
        if all(split is splits[0] for split in splits):
            split = splits[0]
            start = numbers[0]
            neighbours = numbers == list(range(start, start + self._heads))
            if not neighbours or split.target is not OPERATORS["Split"] or len(split.args) != 2:
                return None
            attributes, value = split.args
            axis, count = attributes.get("axis", 0), attributes["outputs"]
            return self._graph.call_function(_taken_apart, (value, axis, count, start, self._heads))
        if any(number != numbers[0] for number in numbers):
            return None
        made = self.stack(splits)
        return None if made is None else self._graph.call_function(nth, (made, numbers[0]))


def _taken_apart(x: Tensor, axis: int, count: int, start: int, heads: int) -> Tensor:
    """Parts [start, start + heads) of `count` equal ones along `axis`, along a new first axis; a view."""
    axis %= x.dim()
    parts = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return parts.movedim(axis, 0).narrow(0, start, heads)


def _joined(stacked: Tensor, axis: int) -> Tensor:
    """The parts one behind the other along `axis`."""
    axis %= stacked.dim() - 1
    return stacked.movedim(0, axis).flatten(axis, axis + 1)


def _together(name: str, attributes: Attributes, stacked: Sequence[bool], *inputs: Any) -> Any:
    """One operation for all heads: the axes of a head move by one."""
    moved = dict(attributes)
    if name in _ALONG_AN_AXIS:
        default = -1 if name == "Softmax" else 0
        moved["axis"] = _moved(attributes.get("axis", default))
        if "axes" in attributes:
            moved["axes"] = [_moved(axis) for axis in attributes["axes"]]
        inputs = (
            inputs[0],
            *([_moved(axis) for axis in inputs[1]] if name[:6] == "Reduce" else one for one in inputs[1:]),
        )
    if name == "Transpose":
        moved["perm"] = [0, *(_moved(axis) for axis in attributes["perm"])]
    return OPERATORS[name](moved, *_aligned(inputs, stacked))


def _moved(axis: int) -> int:
    return axis + 1 if axis >= 0 else axis


def _aligned(inputs: Sequence[Any], stacked: Sequence[bool]) -> list[Any]:
    """The inputs, with axes of size 1 behind the heads' where a head's value has fewer axes than another input."""
    ranks = [x.dim() - int(s) for x, s in zip(inputs, stacked, strict=True) if isinstance(x, Tensor)]
    return [
        x.reshape(x.shape[0], *(1,) * (max(ranks) - x.dim() + 1), *x.shape[1:]) if isinstance(x, Tensor) and s else x
        for x, s in zip(inputs, stacked, strict=True)
    ]


def _with_bias(module: fx.GraphModule, add: Node) -> None:
    """Replace `x @ W + b` when W and b are constants and the product has no other reader."""
    for product, bias in ((add.args[1], add.args[2]), (add.args[2], add.args[1])):
        if not isinstance(product, fx.Node) or product.target is not OPERATORS["MatMul"] or len(product.users) != 1:
            continue
        weight, vector = _buffer(module, product.args[2]), _buffer(module, bias)
        if weight is None or vector is None or weight.dim() != 2 or vector.shape != weight.shape[1:]:
            continue
        with module.graph.inserting_before(add):
            made = module.graph.call_function(_linear, (product.args[1], product.args[2], bias))
        add.replace_all_uses_with(made)
        return


def _buffer(module: fx.GraphModule, node: Any) -> Tensor | None:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    found: Tensor = getattr(module, str(node.target))
    return found


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(x, weight.t(), bias)
