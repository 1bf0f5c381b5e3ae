"""Whether a ranker's PyTorch graph computes a known formula, and with which weights.

A formula is written as nested calls of ONNX operators over inputs, weights and numbers. Pure. Refuses nothing: a graph
that computes something else is not found to match. Invariant: what matches computes the formula; the order in which a
graph lists its nodes, and that of the two operands of an addition or product, does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from infra.engine.torch_operators import OPERATORS, nth

# torch types the arguments of an fx.Node as a union of everything; here they are what torch_graph put there.
Node = Any
_COMMUTATIVE = ("Add", "Mul")


@dataclass(frozen=True)
class Input:
    """An input of the graph."""

    name: str


@dataclass(frozen=True)
class Weight:
    """A constant tensor of so many axes; the same name twice is an equal tensor."""

    name: str
    rank: int


@dataclass(frozen=True)
class Number:
    """A constant of one element."""

    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """An operator on operands, which are formulas or literal values. `attributes` have to be as given; an attribute in
    `kept` may be any number and is found under the name given there."""

    operator: str
    operands: tuple[Any, ...]
    attributes: dict[str, Any]
    kept: dict[str, str]


@dataclass(frozen=True, eq=False)
class Part:
    """One output of an operator that has several."""

    call: Call
    at: int


# An operand that says nothing, because the others leave no choice.
ANYTHING = object()


def call(operator: str, *operands: Any, kept: dict[str, str] | None = None, **attributes: Any) -> Call:
    """A `Call`. One that is used twice in a formula stands for one value, computed once or twice."""
    return Call(operator, operands, attributes, kept or {})


def linear(x: Any, weight: str, bias: str) -> Call:
    """`x @ weight + bias`."""
    return call("Add", call("MatMul", x, Weight(weight, 2)), Weight(bias, 1))


@dataclass
class Found:
    """What a formula's names stand for in a graph."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


def match(module: fx.GraphModule, formula: Call) -> Found | None:
    """The weights and numbers with which the module computes the formula; None when it does not."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    found = Found()
    return found if _fits(module, output.args[0], formula, found) else None


def _fits(module: fx.GraphModule, node: Any, formula: Any, found: Found) -> bool:
    if formula is ANYTHING:
        return True
    if not isinstance(node, fx.Node):
        return bool(node == formula)
    match formula:
        case Input():
            return bool(node.op == "placeholder" and node.target == formula.name)
        case Weight() | Number():
            tensor = _tensor(module, node)
            return tensor is not None and _constant(tensor, formula, found)
        case Part():
            same = node.target is nth and node.args[1] == formula.at
            return bool(same) and _fits(module, node.args[0], formula.call, found)
        case Call():
            return _call(module, node, formula, found)
    return False


def _call(module: fx.GraphModule, node: Node, formula: Call, found: Found) -> bool:
    if node.target is not OPERATORS[formula.operator]:
        return False
    attributes, *operands = node.args
    if any(attributes.get(name) != wanted for name, wanted in formula.attributes.items()):
        return False
    orders = [operands, operands[::-1]] if formula.operator in _COMMUTATIVE else [operands]
    for order in orders:
        # A failed attempt leaves what it found behind; it must not bind the next one.
        attempt = Found(dict(found.weights), dict(found.numbers))
        if len(order) == len(formula.operands) and all(
            _fits(module, one, wanted, attempt) for one, wanted in zip(order, formula.operands, strict=True)
        ):
            kept = {name: float(attributes[attribute]) for attribute, name in formula.kept.items()}
            if any(attempt.numbers.get(name, value) != value for name, value in kept.items()):
                return False
            found.weights, found.numbers = attempt.weights, attempt.numbers | kept
            return True
    return False


def _tensor(module: fx.GraphModule, node: Node) -> Tensor | None:
    """The constant at a node. An exporter transposes small weights, and leaves it to the graph for large ones."""
    if node.target is OPERATORS["Transpose"] and isinstance(node.args[1], fx.Node):
        weight = _tensor(module, node.args[1])
        return None if weight is None or list(node.args[0].get("perm", ())) != [1, 0] else weight.t()
    if node.op != "get_attr":
        return None
    found: Tensor = getattr(module, str(node.target))
    return found


def _constant(tensor: Tensor, formula: Weight | Number, found: Found) -> bool:
    if isinstance(formula, Number):
        return tensor.numel() == 1 and found.numbers.setdefault(formula.name, tensor.item()) == tensor.item()
    # An exporter may keep a weight twice, once for each product it is in.
    return tensor.dim() == formula.rank and torch.equal(found.weights.setdefault(formula.name, tensor), tensor)
