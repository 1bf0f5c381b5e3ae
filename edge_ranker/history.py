"""The histories of a training batch in parts: distinct items, gaps, and where each stands.

A batch repeats few distinct items in many histories. A layer that is linear in the token is therefore made once per
distinct item and once per gap and added up (`projected`), which is what an architecture with a training path of its
own is for; all others are given the tokens laid out one by one. Refuses nothing. Invariant:
`projected(layer)` equals `layer(laid_out())` to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

# Without gradients, a model that lays out the history for each candidate sees so many of these tokens at once: as many
# as a training batch has. All candidates of an evaluation would take gigabytes.
_TOKENS_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class HistoryParts:
    """`tokens` f32[M, item + category] of the distinct items and `gap_rows` f32[G, gap]; `items` i64[B, L] and `gaps`
    i64[B, L] say which of them make a token; `mask` f32[B, L] is 1 where it is real."""

    tokens: Tensor
    gap_rows: Tensor
    items: Tensor
    gaps: Tensor
    mask: Tensor

    def laid_out(self) -> Tensor:
        """Tokens f32[B, L, T]."""
        own = functional.embedding(self.items, self.tokens)
        return torch.cat((own, functional.embedding(self.gaps, self.gap_rows)), dim=2)

    def projected(self, layer: nn.Linear) -> Tensor:
        """`layer` of every token, f32[B, L, out]."""
        split = self.tokens.shape[1]
        of_items = functional.linear(self.tokens, layer.weight[:, :split], layer.bias)
        of_gaps = functional.linear(self.gap_rows, layer.weight[:, split:])
        return functional.embedding(self.items, of_items) + functional.embedding(self.gaps, of_gaps)


@runtime_checkable
class TrainsOnParts(Protocol):
    """An architecture with a training path of its own, the same function as its `forward`."""

    def forward_parts(self, history: HistoryParts, target: Tensor, user: Tensor) -> Tensor:
        """Logits f32[B, N] of target f32[B, N, T] and user f32[B, U]."""
        ...


def logits_of(model: nn.Module, history: HistoryParts, target: Tensor, user: Tensor) -> Tensor:
    """Logits f32[B, N] by the model's own training path, or by its `forward` over laid-out tokens."""
    if isinstance(model, TrainsOnParts):
        return model.forward_parts(history, target, user)
    hist = history.laid_out()
    if torch.is_grad_enabled():
        return model(hist, target, history.mask, user)  # type: ignore[no-any-return]
    at_once = max(1, _TOKENS_AT_ONCE // history.mask.numel())
    pieces = torch.split(target, at_once, dim=1)
    return torch.cat([model(hist, some, history.mask, user) for some in pieces], dim=1)
