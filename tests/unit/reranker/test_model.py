"""The behaviour sequence transformer: both forms are one function, and nothing masked matters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reranker.model import BST

TOKEN, USER = 64, 32
sizes = st.tuples(st.integers(1, 4), st.integers(1, 60), st.integers(1, 30), st.integers(0, 2**31))


def _model(mode: str = "shared") -> BST:
    torch.manual_seed(3)
    return BST(TOKEN, USER, mode).double().eval()  # type: ignore[arg-type]


def _inputs(batch: int, length: int, candidates: int, seed: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    mask = (torch.rand(batch, length, generator=random) < 0.7).double()
    mask[0] *= seed % 2
    return (
        torch.randn(batch, length, TOKEN, generator=random).double(),
        torch.randn(batch, candidates, TOKEN, generator=random).double(),
        mask,
        torch.randn(batch, USER, generator=random).double(),
    )


@settings(deadline=None, max_examples=25)
@given(sizes)
def test_the_shared_form_equals_the_papers_form(size: tuple[int, int, int, int]) -> None:
    inputs = _inputs(*size)
    with torch.no_grad():
        difference = (_model("shared")(*inputs) - _model("full")(*inputs)).abs().max()
    assert difference <= 1e-6


def test_the_forms_agree_in_single_precision_too() -> None:
    inputs = tuple(x.float() for x in _inputs(4, 50, 200, 1))
    with torch.no_grad():
        difference = (_model("shared").float()(*inputs) - _model("full").float()(*inputs)).abs().max()
    assert difference <= 1e-6


@settings(deadline=None, max_examples=25)
@given(sizes, st.integers(1, 20))
def test_padding_changes_no_logit_whatever_it_holds(size: tuple[int, int, int, int], extra: int) -> None:
    hist, target, mask, user = _inputs(*size)
    padded_hist = torch.cat((hist, 100 * torch.ones(hist.shape[0], extra, TOKEN).double()), dim=1)
    padded_mask = torch.cat((mask, torch.zeros(mask.shape[0], extra).double()), dim=1)
    model = _model()
    with torch.no_grad():
        torch.testing.assert_close(
            model(padded_hist, target, padded_mask, user), model(hist, target, mask, user), rtol=0, atol=1e-9
        )


@pytest.mark.parametrize("mode", ["shared", "full"])
@pytest.mark.parametrize("length", [1, 50, 100])
def test_an_empty_history_gives_finite_logits_in_half_precision_too(mode: str, length: int) -> None:
    hist, target, mask, user = _inputs(2, length, 5, 0)
    with torch.no_grad():
        for kind in (torch.float32, torch.bfloat16):
            inputs = (x.to(kind) for x in (hist, target, torch.zeros_like(mask), user))
            assert torch.isfinite(_model(mode).to(kind)(*inputs)).all()


def test_the_history_is_a_set_because_age_is_in_the_token() -> None:
    hist, target, mask, user = _inputs(2, 20, 5, 1)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            _model()(hist[:, order], target, mask[:, order], user), _model()(hist, target, mask, user)
        )


def test_a_candidate_is_scored_the_same_whoever_stands_beside_it() -> None:
    hist, target, mask, user = _inputs(2, 20, 9, 1)
    with torch.no_grad():
        torch.testing.assert_close(
            _model()(hist, target[:, 3:5], mask, user), _model()(hist, target, mask, user)[:, 3:5]
        )


def test_history_and_user_change_the_logits() -> None:
    hist, target, mask, user = _inputs(2, 20, 9, 1)
    model = _model()
    with torch.no_grad():
        base = model(hist, target, mask, user)
        assert (model(hist + 1, target, mask, user) - base).abs().min() > 0
        assert (model(hist, target, mask, user + 1) - base).abs().min() > 0
