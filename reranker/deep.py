"""The BST with several blocks, or with a read-out of more than the candidate's row (arXiv 1905.06874).

With a second block, or when the history's rows are read too, the history looks at the candidate: nothing of it can be
shared, and every candidate brings its own copy of L + 1 tokens through the blocks. That is the price: about ten times
the operations of the one-block form at 200 candidates for the first block, as much again for each further one.
Read-outs: `target` takes the candidate's row (of the last block only that row is computed), `mean` the mean of all real
rows, `concat` all rows side by side, as in the paper: the candidate's and the newest `max_history`, each with weights
for its place counted from the newest. With `concat` alone the order of the history matters.
Takes rows, not ids. Invariant: masked tokens change nothing, wherever they stand; an empty history gives finite logits.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from reranker.model import FEED_FORWARD, HEAD_WIDTHS, HEADS, MASKED

Readout = Literal["target", "mean", "concat"]


class Block(nn.Module):
    """One post-norm transformer block with `HEADS` heads over the rows of each candidate."""

    def __init__(self, token_dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(token_dim, token_dim)
        self.key_value = nn.Linear(token_dim, 2 * token_dim)
        self.mixed = nn.Linear(token_dim, token_dim)
        self.norm1 = nn.LayerNorm(token_dim)
        self.widen = nn.Linear(token_dim, FEED_FORWARD)
        self.narrow = nn.Linear(FEED_FORWARD, token_dim)
        self.norm2 = nn.LayerNorm(token_dim)

    def forward(self, asking: Tensor, rows: Tensor, hidden: Tensor) -> Tensor:
        """What the rows `asking` [B, N, Q, T] become in view of all `rows` [B, N, R, T]; hidden [B, 1, 1, 1, R] is
        added to the scores."""
        width = rows.shape[3] // HEADS
        query, key, value = (
            part.unflatten(3, (HEADS, width)).transpose(2, 3)
            for part in (self.query(asking), *torch.split(self.key_value(rows), rows.shape[3], dim=3))
        )
        weights = torch.softmax(query @ key.transpose(3, 4) * width**-0.5 + hidden, dim=4)
        attended = (weights @ value).transpose(2, 3).flatten(3)
        first = self.norm1(asking + self.mixed(attended))
        return self.norm2(first + self.narrow(functional.leaky_relu(self.widen(first))))  # type: ignore[no-any-return]


class DeepBST(nn.Module):
    """`blocks` transformer blocks, a read-out, then an MLP with LeakyReLU."""

    def __init__(self, token_dim: int, user_dim: int, *, blocks: int, readout: Readout, max_history: int) -> None:
        super().__init__()
        self.readout = readout
        self.max_history = max_history
        self.blocks = nn.ModuleList(Block(token_dim) for _ in range(blocks))
        read = (max_history + 1) * token_dim if readout == "concat" else token_dim
        self.head_block = nn.Linear(read, HEAD_WIDTHS[0])
        self.head_target = nn.Linear(token_dim, HEAD_WIDTHS[0], bias=False)
        self.head_user = nn.Linear(user_dim, HEAD_WIDTHS[0], bias=False)
        self.second = nn.Linear(HEAD_WIDTHS[0], HEAD_WIDTHS[1])
        self.out = nn.Linear(HEAD_WIDTHS[1], 1)

    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        """Logits [B, N] of hist [B, L, T], target [B, N, T], mask [B, L] (1 = real), user [B, U]."""
        copies = hist.unsqueeze(1).expand(-1, target.shape[1], -1, -1)
        rows = torch.cat((copies, target.unsqueeze(2)), dim=2)
        real = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        hidden = ((real - 1.0) * -MASKED)[:, None, None, None, :]
        *earlier, last = self.blocks
        for block in earlier:
            rows = block(rows, rows, hidden)
        rows = last(rows[:, :, -1:] if self.readout == "target" else rows, rows, hidden)
        first = self.head_block(self._read(rows, mask, real)) + self.head_target(target)
        second = functional.leaky_relu(self.second(functional.leaky_relu(first + self.head_user(user).unsqueeze(1))))
        return self.out(second).squeeze(-1)  # type: ignore[no-any-return]

    def _read(self, rows: Tensor, mask: Tensor, real: Tensor) -> Tensor:
        """What the head sees of the rows [B, N, R, T]; the candidate's is the last."""
        if self.readout == "target":
            return rows.squeeze(2)
        if self.readout == "mean":
            share = (real / real.sum(dim=1, keepdim=True))[:, None, None, :]
            return (share @ rows).squeeze(2)
        return torch.cat((self._newest(rows[:, :, :-1], mask), rows[:, :, -1]), dim=2)

    def _newest(self, rows: Tensor, mask: Tensor) -> Tensor:
        """The newest `max_history` real rows of [B, N, L, T] side by side, newest first, zeros where there are none."""
        newer = mask.sum(dim=1, keepdim=True) - mask.cumsum(dim=1)
        places = torch.arange(self.max_history, dtype=mask.dtype, device=mask.device)
        chosen = (newer.unsqueeze(1) == places[None, :, None]).to(mask.dtype) * mask.unsqueeze(1)
        return (chosen.unsqueeze(1) @ rows).flatten(2)
