"""Both rankers over one set of tables, and the losses they are trained by.

Refuses nothing. Invariant: `rank_logits` here, and the released models over `feature_service.schema.assemble`, are the
same function.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from edge_ranker.model import EdgeMLP
from edge_ranker.samples import Batch
from edge_ranker.tables import Tables
from edge_ranker.train import Encoded, Pooling, edge_logits, encode, ranking_loss, recall_loss
from reranker.model import BST


class Rankers(nn.Module):
    """Tables and both models."""

    def __init__(self, tables: Tables, *, pooling: Pooling = "bag") -> None:
        super().__init__()
        schema = tables.schema
        self.tables = tables
        self.pooling = pooling
        self.edge = EdgeMLP(schema.token_dim, schema.user_dim)
        self.rerank = BST(schema.token_dim, schema.user_dim)

    def encode(self, batch: Batch) -> Encoded:
        """What all losses share."""
        return encode(self.tables, batch, self.pooling)

    def edge_logits(self, encoded: Encoded) -> Tensor:
        """Edge logits f32[B, N]."""
        return edge_logits(self.edge, encoded)

    def rank_logits(self, batch: Batch, encoded: Encoded) -> Tensor:
        """BST logits f32[B, N].

        Keys and values are linear in the token, and a token is `item | category | gap`: they are made once per
        distinct item and once per gap, then added up.
        """
        weight, bias = self.rerank.key_value.weight, self.rerank.key_value.bias
        split = encoded.tokens.shape[1]
        of_items = functional.linear(encoded.tokens, weight[:, :split], bias)
        of_gaps = functional.linear(self.tables.gap, weight[:, split:])
        key_value = functional.embedding(batch.hist, of_items) + functional.embedding(batch.gaps, of_gaps)
        return self.rerank.score(key_value, encoded.target, batch.mask, encoded.user)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Losses of edge ranker, reranker and recall."""
        encoded = self.encode(batch)
        return (
            ranking_loss(self.edge_logits(encoded), batch),
            ranking_loss(self.rank_logits(batch, encoded), batch),
            recall_loss(self.tables, batch, encoded),
        )
