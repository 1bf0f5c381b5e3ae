"""The edge MLP in one kernel: a program computes a few candidates of one request from their rows to their logits.

The history is pooled, and the first layer's matrix of the request made, by every program anew. Products take FP16 and
add up in FP32. Refuses nothing: another formula than `edge_ranker.model.EdgeMLP`'s is not found to be this one.
"""

# Triton compiles these functions for the types they are called with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, fx, nn

from infra.engine.fused_tile import WIDEST, block_of, padded, power_of_two
from infra.engine.pattern import ANYTHING, Call, Found, Input, Number, Weight, call, match

_HIST, _TARGET, _MASK, _USER = (Input(name) for name in ("hist", "target", "mask", "user"))
# Columns of the widest layer that are in registers at once.
_CHUNK = 128
_ARGUMENTS = (
    "own", "crossed", "shared", "shared_bias", "second", "second_bias", "third", "third_bias", "out", "out_bias",
)  # fmt: skip


def formula() -> Call:
    """What the model computes, as ONNX writes it."""
    total = call("Squeeze", call("MatMul", call("Unsqueeze", _MASK, [1]), _HIST), [1])
    pooled = call("Div", total, call("Clip", call("ReduceSum", _MASK, [1], keepdims=1), Number("least")))
    of_request = call("Add", Weight("own", 2), call("Mul", Weight("crossed", 2), call("Unsqueeze", pooled, [1])))
    shared = call("Unsqueeze", _gemm(call("Concat", pooled, _USER, axis=1), "shared"), [1])
    first = call("Add", shared, call("MatMul", _TARGET, call("Transpose", of_request, perm=[0, 2, 1])))
    # To rows of the width that the next product takes.
    rows = call("Reshape", call("Relu", first), ANYTHING)
    third = call("Relu", _gemm(call("Relu", _gemm(rows, "second")), "third"))
    sizes = call("Concat", call("Shape", _MASK, start=0, end=1), call("Shape", _TARGET, start=1, end=2), axis=0)
    return call("Reshape", _gemm(third, "out"), sizes)


def _gemm(x: Call, name: str) -> Call:
    return call("Gemm", x, Weight(name, 2), Weight(f"{name}_bias", 1), transA=0, transB=1, alpha=1.0, beta=1.0)


def fused_edge(module: fx.GraphModule) -> FusedEdge | None:
    """The module as one kernel when it is an edge MLP whose sizes the kernel takes, else None."""
    found = match(module, formula())
    if found is None:
        return None
    weights = found.weights
    token, user = weights["own"].shape[1], weights["shared"].shape[1] - weights["own"].shape[1]
    inner = (weights[name].shape[0] for name in ("own", "second", "third"))
    return FusedEdge(found) if max(token, user) <= WIDEST and all(map(power_of_two, inner)) else None


class FusedEdge(nn.Module):
    """forward(hist, target, mask, user) f32 -> logits f32[B, N], of contiguous inputs."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self._least = found.numbers["least"]
        for name in _ARGUMENTS:
            tensor = found.weights[name]
            if tensor.dim() == 1 or name == "out":
                tensor = tensor.float().flatten()
            elif name in ("second", "third"):
                # As the product reads it.
                tensor = tensor.half().t()
            else:
                tensor = tensor.half()
            self.register_buffer(name, tensor.contiguous())

    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        batch, candidates, dim = target.shape
        logits = torch.empty((batch, candidates), dtype=torch.float32, device=target.device)
        rows, warps = block_of(batch, candidates)
        held = dict(self.named_buffers(remove_duplicate=False))
        edge_kernel[(triton.cdiv(candidates, rows), batch)](
            hist, target, mask, user, logits, *(held[name] for name in _ARGUMENTS),
            candidates, hist.shape[1], self._least,
            T=dim, TP=padded(dim), LP=padded(hist.shape[1], 64), U=user.shape[1], UP=padded(user.shape[1]),
            W1=held["own"].shape[0], C=min(held["own"].shape[0], _CHUNK), W2=held["second"].shape[1],
            W3=held["third"].shape[1], M=rows, num_warps=warps,
        )  # fmt: skip
        return logits


@triton.jit(do_not_specialize=["candidates", "length"])
def edge_kernel(
    hist, target, mask, user, logits,
    own, crossed, shared, shared_bias, second, second_bias, third, third_bias, out, out_bias,
    candidates, length, least,
    T: tl.constexpr, TP: tl.constexpr, LP: tl.constexpr, U: tl.constexpr, UP: tl.constexpr,
    W1: tl.constexpr, C: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Logits of candidates [M * program 0, + M) of request `program 1`. A name ending in P is the padded size."""
    request = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * M + tl.arange(0, M)
    t = tl.arange(0, TP)
    x = tl.load(
        target + (request * candidates + n)[:, None] * T + t[None, :],
        mask=(n < candidates)[:, None] & (t < T)[None, :], other=0.0,
    ).to(tl.float16)  # fmt: skip
    at = tl.arange(0, LP)
    tokens = tl.load(
        hist + (request * length + at)[:, None] * T + t[None, :],
        mask=(at < length)[:, None] & (t < T)[None, :], other=0.0,
    )  # fmt: skip
    seen = tl.load(mask + request * length + at, mask=at < length, other=0.0)
    pooled = tl.sum(tokens * seen[:, None], axis=0) / tl.maximum(tl.sum(seen, axis=0), least)
    u = tl.arange(0, UP)
    who = tl.load(user + request * U + u, mask=u < U, other=0.0)
    c2 = tl.arange(0, W2)
    c3 = tl.arange(0, W3)
    deep = tl.zeros((M, W2), tl.float32)
    for start in tl.range(0, W1, C, num_stages=1):
        c = start + tl.arange(0, C)
        in_token = (t < T)[None, :]
        in_user = (u < U)[None, :]
        w_pooled = tl.load(shared + c[:, None] * (T + U) + t[None, :], mask=in_token, other=0.0).to(tl.float32)
        w_user = tl.load(shared + c[:, None] * (T + U) + T + u[None, :], mask=in_user, other=0.0).to(tl.float32)
        of_request = tl.sum(w_pooled * pooled[None, :], axis=1) + tl.sum(w_user * who[None, :], axis=1)
        w_own = tl.load(own + c[:, None] * T + t[None, :], mask=in_token, other=0.0).to(tl.float32)
        w_crossed = tl.load(crossed + c[:, None] * T + t[None, :], mask=in_token, other=0.0).to(tl.float32)
        matrix = (w_own + w_crossed * pooled[None, :]).to(tl.float16)
        first = tl.dot(x, tl.trans(matrix)) + (of_request + tl.load(shared_bias + c))[None, :]
        deep += tl.dot(relu(first).to(tl.float16), tl.load(second + c[:, None] * W2 + c2[None, :]))
    deep = relu(deep + tl.load(second_bias + c2)[None, :]).to(tl.float16)
    deepest = tl.dot(deep, tl.load(third + c2[:, None] * W3 + c3[None, :])) + tl.load(third_bias + c3)[None, :]
    logit = tl.sum(relu(deepest) * tl.load(out + c3)[None, :], axis=1) + tl.load(out_bias)
    tl.store(logits + request * candidates + n, logit, mask=n < candidates)


@triton.jit
def relu(x):
    """NaN stays NaN, which a maximum would make 0."""
    return tl.where(x < 0, 0.0, x)
