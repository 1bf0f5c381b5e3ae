"""How the edge ranker and the recall are trained: the shared part of every training step.

A batch is encoded once (`encode`) and serves three losses: the edge MLP's, the recall's, and that of whoever ranks
after it. Invariant: what is encoded here equals what `feature_service.schema` assembles from the finished tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_ranker.history import HistoryParts, logits_of
from edge_ranker.model import EdgeMLP
from edge_ranker.samples import Batch
from edge_ranker.tables import Tables

# How histories are pooled: by EmbeddingBag, or token by token and averaged.
Pooling = Literal["bag", "mean"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch as vectors. `tokens` f32[M, item + category] of the distinct items, `pooled` f32[B, T] the mean history
    token, `target` f32[B, N, T], `user` f32[B, U], `query` f32[B, item_dim] for the recall; `history` has the tokens
    one by one, for models that want them."""

    tokens: Tensor
    pooled: Tensor
    target: Tensor
    user: Tensor
    query: Tensor
    history: HistoryParts


def encode(tables: Tables, batch: Batch, pooling: Pooling = "bag") -> Encoded:
    """Look up and pool; with `bag`, history tokens are never laid out one by one, which is most of the speed."""
    tokens = tables.tokens(batch.items)
    share = batch.mask / batch.mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    pool = _pool_bag if pooling == "bag" else _pool_mean
    pooled_tokens = pool(tokens, batch.hist, share)
    pooled_gaps = pool(tables.gap, batch.gaps, share)
    own = functional.embedding(batch.candidates, tokens)
    gap = tables.target_gap().expand(*batch.candidates.shape, -1)
    user = tables.users(batch.users, batch.as_bucket)
    return Encoded(
        tokens=tokens,
        pooled=torch.cat((pooled_tokens, pooled_gaps), dim=1),
        target=torch.cat((own, gap), dim=2),
        user=user,
        query=user + pooled_tokens[:, : tables.schema.item_dim],
        history=HistoryParts(tokens, tables.gap, batch.hist, batch.gaps, batch.mask),
    )


def _pool_bag(rows: Tensor, numbers: Tensor, share: Tensor) -> Tensor:
    return functional.embedding_bag(numbers, rows, per_sample_weights=share, mode="sum")


def _pool_mean(rows: Tensor, numbers: Tensor, share: Tensor) -> Tensor:
    return (functional.embedding(numbers, rows) * share.unsqueeze(2)).sum(dim=1)


def edge_logits(model: nn.Module, encoded: Encoded) -> Tensor:
    """Logits f32[B, N]."""
    if isinstance(model, EdgeMLP):
        return model.score(encoded.pooled, encoded.target, encoded.user)
    return logits_of(model, encoded.history, encoded.target, encoded.user)


def ranking_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of "taken or not" over the candidates that are any; column 0 was taken."""
    # Losses in full precision, whatever the models computed in.
    logits = logits.float()
    labels = torch.zeros_like(logits)
    labels[:, 0] = 1.0
    total = functional.binary_cross_entropy_with_logits(logits, labels, weight=batch.weight, reduction="sum")
    return total / batch.weight.sum()


def recall_loss(tables: Tables, batch: Batch, encoded: Encoded) -> Tensor:
    """Cross-entropy of the taken item among all items by dot product, or among a uniform sample that stands for all.

    The sample's share of the partition sum is scaled up to the number of items (sampled softmax, Jean et al. 2015).
    """
    taken = tables.item_row[batch.items[batch.candidates[:, 0]]]
    sample = batch.recall_sample
    if sample is None:
        return functional.cross_entropy((encoded.query @ tables.item.T).float(), taken)
    sparse = tables.is_sparse(tables.item)
    others = (encoded.query @ functional.embedding(sample, tables.item, sparse=sparse).T).float()
    others = others + math.log(tables.n_items / sample.shape[0])
    others = others.masked_fill(sample.unsqueeze(0) == taken.unsqueeze(1), -torch.inf)
    own = (encoded.query * functional.embedding(taken, tables.item, sparse=sparse)).sum(dim=1, keepdim=True)
    return functional.cross_entropy(torch.cat((own, others), dim=1), torch.zeros_like(taken))
