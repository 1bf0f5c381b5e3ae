"""The reranker: a behaviour sequence transformer (Chen et al., DLP-KDD 2019, arXiv 1905.06874) with one block.

The candidate joins the history, the block's output at the candidate is read and goes through an MLP with the user.
Two forms of the same function:
`full`    the paper's: every candidate brings its own copy of the history; L + 1 queries per candidate.
`shared`  with ONE block and read-out at the candidate only that row of the attention is needed, so keys and values of
          the history are made once per user and every candidate adds one key and one value, its own. Ten times fewer
          operations at 200 candidates; the numbers agree to rounding.
Position is time: a token carries the row of its age (`gap`), so history tokens may stand in any order.
Takes rows, not ids. Invariant: masked tokens change nothing; an empty history gives finite logits.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_ranker.history import HistoryParts

HEADS = 4
FEED_FORWARD = 128
HEAD_WIDTHS = (256, 128)
# Not -1e9: that is -inf in half precision, and 0 * -inf is NaN.
MASKED = -1e4

Mode = Literal["shared", "full"]


class BST(nn.Module):
    """One post-norm transformer block with `HEADS` heads, then an MLP with LeakyReLU."""

    def __init__(self, token_dim: int, user_dim: int, mode: Mode = "shared") -> None:
        super().__init__()
        self.mode = mode
        self.query = nn.Linear(token_dim, token_dim)
        self.key_value = nn.Linear(token_dim, 2 * token_dim)
        self.mixed = nn.Linear(token_dim, token_dim)
        self.norm1 = nn.LayerNorm(token_dim)
        self.widen = nn.Linear(token_dim, FEED_FORWARD)
        self.narrow = nn.Linear(FEED_FORWARD, token_dim)
        self.norm2 = nn.LayerNorm(token_dim)
        self.head_block = nn.Linear(token_dim, HEAD_WIDTHS[0])
        self.head_target = nn.Linear(token_dim, HEAD_WIDTHS[0], bias=False)
        self.head_user = nn.Linear(user_dim, HEAD_WIDTHS[0], bias=False)
        self.second = nn.Linear(HEAD_WIDTHS[0], HEAD_WIDTHS[1])
        self.out = nn.Linear(HEAD_WIDTHS[1], 1)

    def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        """Logits [B, N] of hist [B, L, T], target [B, N, T], mask [B, L] (1 = real), user [B, U]."""
        if self.mode == "full":
            return self._full(hist, target, mask, user)
        return self.score(self.key_value(hist), target, mask, user)

    def forward_parts(self, history: HistoryParts, target: Tensor, user: Tensor) -> Tensor:
        """Logits [B, N]; keys and values are linear in the token and made once per distinct item."""
        return self.score(history.projected(self.key_value), target, history.mask, user)

    def score(self, key_value: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        """Logits [B, N] from the keys and values of the history [B, L, 2T]: keys first, then values."""
        length, dim = key_value.shape[1], target.shape[2]
        width = dim // HEADS
        query = self.query(target) * width**-0.5
        own = self.key_value(target)
        own_key, own_value = torch.split(own, dim, dim=2)
        hidden = ((mask - 1.0) * -MASKED).unsqueeze(1)
        # Head by head on strided views: no copy of the history is made in another order.
        parts = zip(
            torch.split(query, width, dim=2),
            torch.split(query * own_key, width, dim=2),
            torch.split(own_value, width, dim=2),
            torch.split(key_value, width, dim=2)[:HEADS],
            torch.split(key_value, width, dim=2)[HEADS:],
            strict=True,
        )
        heads = []
        for asked, self_products, self_value, key, value in parts:
            scores = torch.bmm(asked, key.transpose(1, 2)) + hidden
            weights = torch.softmax(torch.cat((scores, self_products.sum(2, keepdim=True)), dim=2), dim=2)
            on_history, on_self = torch.split(weights, [length, 1], dim=2)
            heads.append(torch.bmm(on_history, value) + on_self * self_value)
        return self._head(self._rest_of_block(torch.cat(heads, dim=2), target), target, user)

    def _full(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
        """The paper's form, B * N sequences of L + 1 tokens; all rows are computed, the last is read."""
        batch, n, dim = target.shape
        length = hist.shape[1]
        width = dim // HEADS
        copies = hist.unsqueeze(1).expand(batch, n, length, dim)
        tokens = torch.cat((copies, target.unsqueeze(2)), dim=2).reshape(batch * n, length + 1, dim)
        real = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        hidden = ((real - 1.0) * -MASKED).repeat_interleave(n, dim=0)[:, None, None, :]
        query, key, value = (
            part.reshape(batch * n, length + 1, HEADS, width).transpose(1, 2)
            for part in (self.query(tokens), *torch.split(self.key_value(tokens), dim, dim=2))
        )
        weights = torch.softmax(query @ key.transpose(2, 3) * width**-0.5 + hidden, dim=3)
        mixed = (weights @ value).transpose(1, 2).reshape(batch * n, length + 1, dim)
        block = self._rest_of_block(mixed, tokens)
        return self._head(block[:, -1].reshape(batch, n, dim), target, user)

    def _rest_of_block(self, attended: Tensor, tokens: Tensor) -> Tensor:
        """What follows the attention, token by token: output layer, residuals, norms, feed-forward."""
        first = self.norm1(tokens + self.mixed(attended))
        return self.norm2(first + self.narrow(functional.leaky_relu(self.widen(first))))  # type: ignore[no-any-return]

    def _head(self, block: Tensor, target: Tensor, user: Tensor) -> Tensor:
        first = self.head_block(block) + self.head_target(target) + self.head_user(user).unsqueeze(1)
        second = functional.leaky_relu(self.second(functional.leaky_relu(first)))
        return self.out(second).squeeze(-1)  # type: ignore[no-any-return]
