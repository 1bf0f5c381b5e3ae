"""The edge ranker: an MLP over the pooled history, the candidate and the user. Cheap enough for hundreds of candidates.

Takes rows, not ids; all tables live in the parameter server. Invariant: masked history tokens change nothing, and an
empty history gives finite logits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTHS = (256, 128, 64)


class EdgeMLP(nn.Module):
    """256-128-64 with ReLU. The first layer is split: what does not depend on the candidate is computed once."""

    def __init__(self, token_dim: int, user_dim: int) -> None:
        super().__init__()
        self.shared = nn.Linear(token_dim + user_dim, WIDTHS[0])
        self.own = nn.Linear(token_dim, WIDTHS[0], bias=False)
        self.crossed = nn.Linear(token_dim, WIDTHS[0], bias=False)
        self.second = nn.Linear(WIDTHS[0], WIDTHS[1])
        self.third = nn.Linear(WIDTHS[1], WIDTHS[2])
        self.out = nn.Linear(WIDTHS[2], 1)

    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        """Logits [B, N] of hist [B, L, T], target [B, N, T], mask [B, L] (1 = real), user [B, U].

        `own(t) + crossed(t * pooled)` is one product with `own + crossed diag(pooled)`: for hundreds of candidates that
        matrix costs less than the second product, and half of the widest layer's memory is never written.
        """
        real = mask.unsqueeze(1)
        pooled = torch.bmm(real, hist).squeeze(1) / mask.sum(1, keepdim=True).clamp(min=1.0)
        of_request = self.own.weight + self.crossed.weight * pooled.unsqueeze(1)
        return self._rest(self._shared(pooled, user) + torch.bmm(target, of_request.transpose(1, 2)))

    def score(self, pooled: Tensor, target: Tensor, user: Tensor) -> Tensor:
        """The same from the masked mean history [B, T]; cheaper for the few candidates of a training sample."""
        return self._rest(self._shared(pooled, user) + self.own(target) + self.crossed(target * pooled.unsqueeze(1)))

    def _shared(self, pooled: Tensor, user: Tensor) -> Tensor:
        return self.shared(torch.cat((pooled, user), dim=1)).unsqueeze(1)  # type: ignore[no-any-return]

    def _rest(self, first: Tensor) -> Tensor:
        # Flat, so that exported layers are plain products of matrices.
        rows = torch.relu(first).flatten(0, 1)
        third = torch.relu(self.third(torch.relu(self.second(rows))))
        return self.out(third).reshape(first.shape[:2])  # type: ignore[no-any-return]
