"""The edge MLP."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_ranker.model import EdgeMLP

TOKEN, USER = 64, 32


def _model() -> EdgeMLP:
    torch.manual_seed(3)
    return EdgeMLP(TOKEN, USER).double().eval()


def _inputs(batch: int, length: int, candidates: int, seed: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, length, TOKEN, generator=random).double(),
        torch.randn(batch, candidates, TOKEN, generator=random).double(),
        (torch.rand(batch, length, generator=random) < 0.7).double(),
        torch.randn(batch, USER, generator=random).double(),
    )


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 60), st.integers(1, 30), st.integers(0, 2**31), st.integers(1, 20))
def test_padding_changes_no_logit_whatever_it_holds(b: int, length: int, n: int, seed: int, extra: int) -> None:
    hist, target, mask, user = _inputs(b, length, n, seed)
    padded_hist = torch.cat((hist, 100 * torch.ones(b, extra, TOKEN).double()), dim=1)
    padded_mask = torch.cat((mask, torch.zeros(b, extra).double()), dim=1)
    with torch.no_grad():
        torch.testing.assert_close(_model()(padded_hist, target, padded_mask, user), _model()(hist, target, mask, user))


def test_it_scores_from_the_mean_of_the_real_history_tokens() -> None:
    hist, target, mask, user = _inputs(3, 8, 4, 1)
    mean = torch.stack([h[m > 0].mean(dim=0) for h, m in zip(hist, mask, strict=True)])
    with torch.no_grad():
        torch.testing.assert_close(_model()(hist, target, mask, user), _model().score(mean, target, user))


def test_an_empty_history_gives_finite_logits() -> None:
    hist, target, mask, user = _inputs(2, 50, 5, 0)
    with torch.no_grad():
        assert torch.isfinite(_model().float()(hist.float(), target.float(), 0 * mask.float(), user.float())).all()


def test_history_candidate_and_user_change_the_logits() -> None:
    hist, target, mask, user = _inputs(2, 20, 9, 1)
    model = _model()
    with torch.no_grad():
        base = model(hist, target, mask, user)
        for other in ((hist + 1, target, mask, user), (hist, target + 1, mask, user), (hist, target, mask, user + 1)):
            assert (model(*other) - base).abs().min() > 0
