"""The BST in one kernel: a program computes a few candidates of one request from their rows to their logits.

As separate kernels the model is thirty launches and as many passes over its activations; here they stay in registers,
and keys and values of the history, which every program needs, are computed by every program anew. Products take FP16
and add up in FP32; softmax and norms are FP32. Takes one block, read out at the candidate, with the history's keys and
values shared (`reranker.model`, mode "shared"). Refuses nothing: another formula is not found to be this one.
"""

# Triton compiles these functions for the types they are called with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, fx, nn

from infra.engine.fused_tile import WIDEST, block_of, padded, power_of_two
from infra.engine.pattern import Call, Found, Input, Number, Part, Weight, call, linear, match

_HIST, _TARGET, _MASK, _USER = (Input(name) for name in ("hist", "target", "mask", "user"))
_HEADS = (4, 2, 8, 1)
# Columns of the widest layer that are in registers at once.
_CHUNK = 64


def formula(heads: int) -> Call:
    """What `reranker.model.BST` computes, as ONNX writes it."""
    query = call("Mul", linear(_TARGET, "query", "query_bias"), Number("scale"))
    own = call("Split", linear(_TARGET, "key_value", "key_value_bias"), axis=2, outputs=2)
    of_history = call("Split", linear(_HIST, "key_value", "key_value_bias"), axis=2, outputs=2 * heads)
    queries = call("Split", query, axis=2, outputs=heads)
    products = call("Split", call("Mul", query, Part(own, 0)), axis=2, outputs=heads)
    own_values = call("Split", Part(own, 1), axis=2, outputs=heads)
    hidden = call("Unsqueeze", call("Mul", call("Sub", _MASK, Number("one")), Number("masked")), [1])
    sizes = call("Concat", call("Shape", _HIST, start=1, end=2), [1], axis=0)

    def head(at: int) -> Call:
        key = call("Transpose", Part(of_history, at), perm=[0, 2, 1])
        scores = call("Add", call("MatMul", Part(queries, at), key), hidden)
        own_score = call("ReduceSum", Part(products, at), [2], keepdims=1)
        weights = call("Split", call("Softmax", call("Concat", scores, own_score, axis=2), axis=2), sizes, axis=2)
        on_history = call("MatMul", Part(weights, 0), Part(of_history, heads + at))
        return call("Add", on_history, call("Mul", Part(weights, 1), Part(own_values, at)))

    attended = call("Concat", *(head(at) for at in range(heads)), axis=2) if heads > 1 else head(0)
    first = _norm(call("Add", _TARGET, linear(attended, "mixed", "mixed_bias")), "norm1")
    wide = call("LeakyRelu", linear(first, "widen", "widen_bias"), kept={"alpha": "slope"})
    block = _norm(call("Add", first, linear(wide, "narrow", "narrow_bias")), "norm2")
    of_user = call("Gemm", _USER, Weight("head_user", 2), transA=0, transB=1, alpha=1.0, beta=1.0)
    widest = call(
        "Add",
        call("Add", linear(block, "head_block", "head_bias"), call("MatMul", _TARGET, Weight("head_target", 2))),
        call("Unsqueeze", of_user, [1]),
    )
    second = linear(call("LeakyRelu", widest, kept={"alpha": "slope"}), "second", "second_bias")
    return call("Squeeze", linear(call("LeakyRelu", second, kept={"alpha": "slope"}), "out", "out_bias"), [-1])


def _norm(x: Call, name: str) -> Call:
    return call(
        "LayerNormalization",
        x,
        Weight(name, 1),
        Weight(f"{name}_bias", 1),
        axis=-1,
        kept={"epsilon": f"{name}_epsilon"},
    )


def fused_bst(module: fx.GraphModule) -> FusedBST | None:
    """The module as one kernel when it is a BST whose sizes the kernel takes, else None."""
    for heads in _HEADS:
        found = match(module, formula(heads))
        if found is not None and found.numbers["one"] == 1.0 and _takes(found, heads):
            return FusedBST(found, heads)
    return None


def _takes(found: Found, heads: int) -> bool:
    """Inner widths that are powers of two; those of tokens and users are padded."""
    weights = found.weights
    dim, user = weights["query"].shape[0], weights["head_user"].shape[1]
    inner = (weights["widen"].shape[1], weights["head_block"].shape[1], weights["second"].shape[1])
    return dim % heads == 0 and max(dim, user) <= WIDEST and all(map(power_of_two, inner))


class FusedBST(nn.Module):
    """forward(hist, target, mask, user) f32 -> logits f32[B, N], of contiguous inputs."""

    def __init__(self, found: Found, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self._numbers = found.numbers
        for name, tensor in found.weights.items():
            kind = torch.float16 if tensor.dim() == 2 else torch.float32
            # A column: a product with it is a sum.
            value = tensor.float().flatten() if name == "out" else tensor.to(kind)
            self.register_buffer(name, value.contiguous())

    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        batch, candidates, dim = target.shape
        length = hist.shape[1]
        logits = torch.empty((batch, candidates), dtype=torch.float32, device=target.device)
        rows, warps = block_of(batch, candidates)
        # One tensor may have two names.
        held: dict[str, Any] = dict(self.named_buffers(remove_duplicate=False))
        numbers = self._numbers
        widest = held["head_block"].shape[1]
        bst_kernel[(triton.cdiv(candidates, rows), batch)](
            hist, target, mask, user, logits, *(held[name] for name in _ARGUMENTS),
            candidates, length,
            numbers["scale"], numbers["masked"], numbers["slope"], numbers["norm1_epsilon"], numbers["norm2_epsilon"],
            T=dim, TP=padded(dim), HEADS=self._heads, D=dim // self._heads, DP=padded(dim // self._heads),
            LP=padded(length, 64), U=user.shape[1], UP=padded(user.shape[1]), F=held["widen"].shape[1],
            W1=widest, C=min(widest, _CHUNK), W2=held["second"].shape[1], M=rows, num_warps=warps,
        )  # fmt: skip
        return logits


_ARGUMENTS = (
    "query", "query_bias", "key_value", "key_value_bias", "mixed", "mixed_bias", "norm1", "norm1_bias",
    "widen", "widen_bias", "narrow", "narrow_bias", "norm2", "norm2_bias", "head_block", "head_bias",
    "head_target", "head_user", "second", "second_bias", "out", "out_bias",
)  # fmt: skip


@triton.jit(do_not_specialize=["candidates", "length"])
def bst_kernel(
    hist, target, mask, user, logits,
    query, query_bias, key_value, key_value_bias, mixed, mixed_bias, norm1, norm1_bias,
    widen, widen_bias, narrow, narrow_bias, norm2, norm2_bias, head_block, head_bias,
    head_target, head_user, second, second_bias, out, out_bias,
    candidates, length, scale, masked, slope, epsilon1, epsilon2,
    T: tl.constexpr, TP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, LP: tl.constexpr,
    U: tl.constexpr, UP: tl.constexpr, F: tl.constexpr, W1: tl.constexpr, C: tl.constexpr, W2: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """Logits of candidates [M * program 0, + M) of request `program 1`. A name ending in P is the padded size."""
    request = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * M + tl.arange(0, M)
    t = tl.arange(0, TP)
    x = tl.load(
        target + (request * candidates + n)[:, None] * T + t[None, :],
        mask=(n < candidates)[:, None] & (t < T)[None, :], other=0.0,
    )  # fmt: skip
    xh = x.to(tl.float16)
    at = tl.arange(0, LP)
    tokens = tl.load(
        hist + (request * length + at)[:, None] * T + t[None, :],
        mask=(at < length)[:, None] & (t < T)[None, :], other=0.0,
    ).to(tl.float16)  # fmt: skip
    seen = tl.load(mask + request * length + at, mask=at < length, other=0.0)
    hidden = tl.where(at < length, (seen - 1.0) * masked, float("-inf"))
    attended = tl.zeros((M, TP), tl.float32)
    # Loops, not unrolled: a third of the time to compile, and no slower.
    for head in tl.range(0, HEADS, num_stages=2):
        d = tl.arange(0, DP)
        in_head = d < D
        column = head * D + d
        inside = (t < T)[:, None] & in_head[None, :]
        place = t[:, None] * (2 * T) + column[None, :]
        w_key = tl.load(key_value + place, mask=inside, other=0.0)
        w_value = tl.load(key_value + place + T, mask=inside, other=0.0)
        w_query = tl.load(query + t[:, None] * T + column[None, :], mask=inside, other=0.0)
        b_key = tl.load(key_value_bias + column, mask=in_head, other=0.0)
        b_value = tl.load(key_value_bias + T + column, mask=in_head, other=0.0)
        b_query = tl.load(query_bias + column, mask=in_head, other=0.0)
        asked = (tl.dot(xh, w_query) + b_query[None, :]) * scale
        own_key = tl.dot(xh, w_key) + b_key[None, :]
        own_value = tl.dot(xh, w_value) + b_value[None, :]
        keys = (tl.dot(tokens, w_key) + b_key[None, :]).to(tl.float16)
        values = (tl.dot(tokens, w_value) + b_value[None, :]).to(tl.float16)
        scores = tl.dot(asked.to(tl.float16), tl.trans(keys)) + hidden[None, :]
        own_score = tl.sum(asked * own_key, axis=1)
        top = tl.maximum(tl.max(scores, axis=1), own_score)
        weights = tl.exp(scores - top[:, None])
        own_weight = tl.exp(own_score - top)
        total = tl.sum(weights, axis=1) + own_weight
        mix = tl.dot(weights.to(tl.float16), values) + own_weight[:, None] * own_value
        w_mixed = tl.load(mixed + column[:, None] * T + t[None, :], mask=in_head[:, None] & (t < T)[None, :], other=0.0)
        attended += tl.dot((mix / total[:, None]).to(tl.float16), w_mixed)
    b_mixed = tl.load(mixed_bias + t, mask=t < T, other=0.0)
    first = _normalised(x + attended + b_mixed[None, :], norm1, norm1_bias, epsilon1, T, TP)
    f = tl.arange(0, F)
    w_widen = tl.load(widen + t[:, None] * F + f[None, :], mask=(t < T)[:, None], other=0.0)
    wide = tl.dot(first.to(tl.float16), w_widen) + tl.load(widen_bias + f)[None, :]
    w_narrow = tl.load(narrow + f[:, None] * T + t[None, :], mask=(t < T)[None, :], other=0.0)
    b_narrow = tl.load(narrow_bias + t, mask=t < T, other=0.0)
    narrowed = tl.dot(_leaky(wide, slope).to(tl.float16), w_narrow) + b_narrow[None, :]
    block = _normalised(first + narrowed, norm2, norm2_bias, epsilon2, T, TP).to(tl.float16)
    u = tl.arange(0, UP)
    who = tl.load(user + request * U + u, mask=u < U, other=0.0)
    c2 = tl.arange(0, W2)
    deep = tl.zeros((M, W2), tl.float32)
    for start in tl.range(0, W1, C, num_stages=1):
        c = start + tl.arange(0, C)
        w_user = tl.load(head_user + c[:, None] * U + u[None, :], mask=(u < U)[None, :], other=0.0).to(tl.float32)
        of_request = tl.sum(w_user * who[None, :], axis=1) + tl.load(head_bias + c)
        w_block = tl.load(head_block + t[:, None] * W1 + c[None, :], mask=(t < T)[:, None], other=0.0)
        w_target = tl.load(head_target + t[:, None] * W1 + c[None, :], mask=(t < T)[:, None], other=0.0)
        widest = tl.dot(xh, w_target, tl.dot(block, w_block)) + of_request[None, :]
        deep += tl.dot(_leaky(widest, slope).to(tl.float16), tl.load(second + c[:, None] * W2 + c2[None, :]))
    deep = _leaky(deep + tl.load(second_bias + c2)[None, :], slope)
    logit = tl.sum(deep * tl.load(out + c2)[None, :], axis=1) + tl.load(out_bias)
    tl.store(logits + request * candidates + n, logit, mask=n < candidates)


@triton.jit
def _leaky(x, slope):
    return tl.where(x >= 0, x, x * slope)


@triton.jit
def _normalised(x, weight, bias, epsilon, T: tl.constexpr, TP: tl.constexpr):
    """LayerNorm of rows whose columns from T on are 0, and stay it."""
    t = tl.arange(0, TP)
    mean = tl.sum(x, axis=1) / T
    apart = tl.where((t < T)[None, :], x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(apart * apart, axis=1) / T + epsilon)
    w = tl.load(weight + t, mask=t < T, other=0.0)
    b = tl.load(bias + t, mask=t < T, other=0.0)
    return apart * scale[:, None] * w[None, :] + b[None, :]
