"""The reranker's second architecture: a deep interest network (Zhou et al., KDD 2018, arXiv 1706.06978).

A local activation unit weighs every history token for every candidate; the weighted sum is the user's interest in that
candidate and goes through an MLP with the candidate, their product and the user. As in the paper the weights are not
normalised, so that a strong interest stays stronger than a weak one. PReLU throughout, not the paper's Dice: Dice
normalises by the batch, and a score here may not depend on who else is asked about. The first layer of the unit is
split: history and candidate are projected once each, only their product is per pair.
Takes rows, not ids. Invariant: masked tokens change nothing; an empty history gives finite logits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

UNIT_WIDTH = 36
HEAD_WIDTHS = (200, 80)
_SLOPE = 0.25


class PReLU(nn.Module):
    """x where positive, else x times a learnt slope per feature of the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((width,), _SLOPE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) - self.slope * torch.relu(-x)


class DIN(nn.Module):
    """Local activation unit of `UNIT_WIDTH`, then an MLP of `HEAD_WIDTHS`."""

    def __init__(self, token_dim: int, user_dim: int) -> None:
        super().__init__()
        self.unit_hist = nn.Linear(token_dim, UNIT_WIDTH)
        self.unit_target = nn.Linear(token_dim, UNIT_WIDTH, bias=False)
        self.unit_product = nn.Linear(token_dim, UNIT_WIDTH, bias=False)
        self.unit_bend = PReLU(UNIT_WIDTH)
        self.unit_out = nn.Linear(UNIT_WIDTH, 1)
        self.head_interest = nn.Linear(token_dim, HEAD_WIDTHS[0])
        self.head_target = nn.Linear(token_dim, HEAD_WIDTHS[0], bias=False)
        self.head_product = nn.Linear(token_dim, HEAD_WIDTHS[0], bias=False)
        self.head_user = nn.Linear(user_dim, HEAD_WIDTHS[0], bias=False)
        self.head_bend = PReLU(HEAD_WIDTHS[0])
        self.second = nn.Linear(HEAD_WIDTHS[0], HEAD_WIDTHS[1])
        self.second_bend = PReLU(HEAD_WIDTHS[1])
        self.out = nn.Linear(HEAD_WIDTHS[1], 1)

    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        """Logits [B, N] of hist [B, L, T], target [B, N, T], mask [B, L] (1 = real), user [B, U]."""
        product = self.unit_product(hist.unsqueeze(1) * target.unsqueeze(2))
        first = product + self.unit_hist(hist).unsqueeze(1) + self.unit_target(target).unsqueeze(2)
        weights = self.unit_out(self.unit_bend(first)).squeeze(-1) * mask.unsqueeze(1)
        interest = torch.bmm(weights, hist)
        own = self.head_interest(interest) + self.head_target(target) + self.head_product(interest * target)
        head = self.head_bend(own + self.head_user(user).unsqueeze(1))
        return self.out(self.second_bend(self.second(head))).squeeze(-1)  # type: ignore[no-any-return]
