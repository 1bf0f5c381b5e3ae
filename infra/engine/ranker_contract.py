"""What every ranking model keeps, checked before it is trained or released, with the difference spelled out.

A model maps `hist` f32[B, L, T], `target` f32[B, N, T], `mask` f32[B, L] (1 = real) and `user` f32[B, U] to logits
f32[B, N], for every B, L and N. Serving pads histories, batches strangers together and asks for any candidates, so:
masked tokens change nothing, an empty history is no accident, candidates do not see each other, a request scores in a
batch as alone, and the same question has the same answer.
Needs torch; never imported while serving. Refuses at the first promise that is broken, simplest first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from infra.engine.run import INPUT_NAMES
from infra.errors import ReleaseRefused

# (batch, history length, candidates); 1 and 100 are the ends that serving has.
SHAPES = ((3, 7, 5), (1, 1, 1), (2, 50, 20), (1, 100, 3))
# What float32 summed in another order may differ by, at logits of this size.
_RELATIVE, _ABSOLUTE = 1e-4, 1e-4

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class ModelRefused(ReleaseRefused):
    """A model that does not keep the contract; says which promise and by how much. Action: change the model."""


@torch.no_grad()
def check_ranker(model: nn.Module, name: str, *, token_dim: int, user_dim: int) -> None:
    """Raises ModelRefused, beginning with `name`. The model is in eval mode afterwards."""
    model.eval()
    _check_signature(model, name)
    for seed, shape in enumerate(SHAPES):
        _check_output(model, name, example(shape, token_dim, user_dim, seed=seed))
    inputs = example(SHAPES[0], token_dim, user_dim, seed=len(SHAPES))
    logits = model(*inputs)
    for promise, others in _PROMISES.items():
        for mine, theirs in others(model, inputs, logits):
            _check_same(name, promise, mine, theirs)


def example(shape: tuple[int, int, int], token_dim: int, user_dim: int, *, seed: int) -> Inputs:
    """Random inputs; the first request has no history, and masked tokens are not zero."""
    batch, length, candidates = shape
    random = torch.Generator().manual_seed(seed)
    mask = (torch.rand(batch, length, generator=random) < 0.7).float()
    mask[0] = 0.0
    mask[1:, 0] = 1.0
    return (
        torch.randn(batch, length, token_dim, generator=random),
        torch.randn(batch, candidates, token_dim, generator=random),
        mask,
        torch.randn(batch, user_dim, generator=random),
    )


def _check_signature(model: nn.Module, name: str) -> None:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    names = tuple(p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty)
    if names != INPUT_NAMES:
        raise ModelRefused(f"{name}: forward takes ({', '.join(names)}); it must take ({', '.join(INPUT_NAMES)})")


def _check_output(model: nn.Module, name: str, inputs: Inputs) -> None:
    """One tensor of the right shape and type, all of it numbers."""
    given = ", ".join(f"{n} f32{list(t.shape)}" for n, t in zip(INPUT_NAMES, inputs, strict=True))
    try:
        # Whatever the user's code raises is why it is refused.
        logits = model(*inputs)
    except Exception as error:
        raise ModelRefused(f"{name}: forward fails for {given}: {type(error).__name__}: {error}") from error
    wanted = inputs[1].shape[:2]
    if not isinstance(logits, Tensor):
        raise ModelRefused(f"{name}: forward returns {type(logits).__name__}; it must return one tensor of logits")
    if logits.shape != wanted or logits.dtype != torch.float32:
        kind = str(logits.dtype).removeprefix("torch.")
        raise ModelRefused(
            f"{name}: the logits are {kind}{list(logits.shape)}; they must be float32{list(wanted)} for {given}"
        )
    empty = not bool(inputs[2][0].any())
    for finite, what in (
        (logits[1:].isfinite(), "a request"),
        (logits[:1].isfinite(), "an empty history (mask all 0)" if empty else "a request"),
    ):
        if not bool(finite.all()):
            raise ModelRefused(f"{name}: {int((~finite).sum())} of {finite.numel()} logits of {what} are not finite")


Pairs = list[tuple[Tensor, Tensor]]


def _asked_again(model: nn.Module, inputs: Inputs, logits: Tensor) -> Pairs:
    return [(logits, model(*inputs))]


def _masked_changed(model: nn.Module, inputs: Inputs, logits: Tensor) -> Pairs:
    hist, target, mask, user = inputs
    other = torch.where(mask.unsqueeze(2) > 0, hist, 3.0 - 2.0 * hist)
    return [(logits, model(other, target, mask, user))]


def _masked_added(model: nn.Module, inputs: Inputs, logits: Tensor) -> Pairs:
    hist, target, mask, user = inputs
    longer = torch.cat((hist, torch.ones_like(hist)), dim=1)
    return [(logits, model(longer, target, torch.cat((mask, torch.zeros_like(mask)), dim=1), user))]


def _candidates_alone(model: nn.Module, inputs: Inputs, logits: Tensor) -> Pairs:
    hist, target, mask, user = inputs
    alone = [model(hist, target[:, i : i + 1], mask, user) for i in range(target.shape[1])]
    turned = model(hist, target.flip(1), mask, user).flip(1)
    return [(logits, torch.cat(alone, dim=1)), (logits, turned)]


def _requests_alone(model: nn.Module, inputs: Inputs, logits: Tensor) -> Pairs:
    return [(logits[i : i + 1], model(*(tensor[i : i + 1] for tensor in inputs))) for i in range(logits.shape[0])]


_PROMISES: dict[str, Callable[[nn.Module, Inputs, Tensor], Pairs]] = {
    "asked the same twice, the logits differ (is there dropout or noise outside of training?)": _asked_again,
    "what stands at masked history tokens changes the logits (is `mask` used?)": _masked_changed,
    "more masked history tokens at the end change the logits (is `mask` in every mean and softmax?)": _masked_added,
    "a candidate's logit depends on the other candidates": _candidates_alone,
    "a request's logits depend on the other requests of the batch": _requests_alone,
}


def _check_same(name: str, promise: str, mine: Tensor, theirs: Tensor) -> None:
    difference = (mine - theirs).abs()
    if not bool((difference <= _ABSOLUTE + _RELATIVE * mine.abs()).all()):
        worst = float(difference.nan_to_num(torch.inf).max())
        raise ModelRefused(f"{name}: {promise}: by up to {worst:.2g}")
