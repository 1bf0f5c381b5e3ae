"""The contract of a ranking model: one model per broken promise, each refused with what is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from infra.engine.ranker_contract import ModelRefused, check_ranker

TOKEN, USER = 8, 4


class Sound(nn.Module):
    """Keeps the contract; the others are this with one thing wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(TOKEN, 1)
        self.of_user = nn.Linear(USER, 1)

    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        pooled = self.pooled(hist, mask)
        return self.own(target * pooled.unsqueeze(1) + target).squeeze(2) + self.of_user(user)

    def pooled(self, hist: Tensor, mask: Tensor) -> Tensor:
        return (hist * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True).clamp(min=1.0)


class OtherNames(Sound):
    def forward(self, history: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(history, target, mask, user)


class OneMoreInput(Sound):
    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hist, target, mask, user) + context


class OtherWidth(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(TOKEN + 1, 1)


class OneLogitPerRequest(Sound):
    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        return super().forward(hist, target, mask, user).mean(1)


class OneMoreAxis(Sound):
    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        return super().forward(hist, target, mask, user).unsqueeze(2)


class DoublePrecision(Sound):
    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        return super().forward(hist, target, mask, user).double()


class TwoOutputs(Sound):
    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        logits = super().forward(hist, target, mask, user)
        return logits, logits  # type: ignore[return-value]


class DividesByTheLength(Sound):
    def pooled(self, hist: Tensor, mask: Tensor) -> Tensor:
        return (hist * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)


class IgnoresTheMask(Sound):
    def pooled(self, hist: Tensor, mask: Tensor) -> Tensor:
        return hist.mean(1)


class CountsPadding(Sound):
    def pooled(self, hist: Tensor, mask: Tensor) -> Tensor:
        return (hist * mask.unsqueeze(2)).mean(1)


class SeesOtherCandidates(Sound):
    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        return torch.log_softmax(super().forward(hist, target, mask, user), dim=1)


class SeesOtherRequests(Sound):
    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        return super().forward(hist, target, mask, user) + user.mean()


class RollsDice(Sound):
    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        return super().forward(hist, nn.functional.dropout(target, 0.5, training=True), mask, user)


class FixedLength(Sound):
    def pooled(self, hist: Tensor, mask: Tensor) -> Tensor:
        assert hist.shape[1] == 7, "made for histories of 7"
        return super().pooled(hist, mask)


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        (OtherNames, r"forward takes \(history, target, mask, user\); it must take \(hist, target, mask, user\)"),
        (OneMoreInput, r"forward takes \(hist, target, mask, user, context\); it must take"),
        (
            OtherWidth,
            r"forward fails for hist f32\[3, 7, 8\], target f32\[3, 5, 8\], .* user f32\[3, 4\]: RuntimeError",
        ),
        (OneLogitPerRequest, r"the logits are float32\[3\]; they must be float32\[3, 5\]"),
        (OneMoreAxis, r"the logits are float32\[3, 5, 1\]; they must be float32\[3, 5\]"),
        (DoublePrecision, r"the logits are float64\[3, 5\]; they must be float32\[3, 5\]"),
        (TwoOutputs, r"forward returns tuple; it must return one tensor"),
        (DividesByTheLength, r"5 of 5 logits of an empty history \(mask all 0\) are not finite"),
        (IgnoresTheMask, r"what stands at masked history tokens changes the logits .*: by up to [0-9.]+"),
        (CountsPadding, r"more masked history tokens at the end change the logits .*: by up to [0-9.]+"),
        (SeesOtherCandidates, r"a candidate's logit depends on the other candidates: by up to [0-9.]+"),
        (SeesOtherRequests, r"a request's logits depend on the other requests of the batch: by up to [0-9.]+"),
        (RollsDice, r"asked the same twice, the logits differ .*: by up to [0-9.]+"),
        (FixedLength, r"forward fails for hist f32\[1, 1, 8\].*: AssertionError: made for histories of 7"),
    ],
)
def test_a_model_that_breaks_one_promise_is_refused_with_the_difference(kind: type[Sound], difference: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelRefused, match=f"^my model: {difference}"):
        check_ranker(kind(), "my model", token_dim=TOKEN, user_dim=USER)


def test_a_model_that_keeps_the_contract_is_taken_and_put_in_eval_mode() -> None:
    class WithDropout(Sound):
        def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(hist, target, mask, user), 0.5, training=self.training)

    torch.manual_seed(0)
    model = WithDropout()
    check_ranker(model, "my model", token_dim=TOKEN, user_dim=USER)
    assert not model.training
