"""Both rankers over one set of tables, and the losses they are trained by.

Refuses nothing. Invariant: `rank_logits` here, and the released models over `feature_service.schema.assemble`, are the
same function.
"""

from __future__ import annotations

from torch import Tensor, nn

from edge_ranker.history import logits_of
from edge_ranker.samples import Batch
from edge_ranker.tables import Tables
from edge_ranker.train import Encoded, Pooling, edge_logits, encode, ranking_loss, recall_loss
from infra.release import Role
from reranker.architectures import EDGE, RERANK, Architecture, build_edge, build_rerank


class Rankers(nn.Module):
    """Tables and both models."""

    def __init__(
        self,
        tables: Tables,
        *,
        edge: Architecture = EDGE,
        rerank: Architecture = RERANK,
        pooling: Pooling = "bag",
    ) -> None:
        """Raises InvalidInput or ModelRefused when a model of the user's own cannot be made or trained."""
        super().__init__()
        schema = tables.schema
        self.architectures: dict[Role, Architecture] = {"edge": edge, "rerank": rerank}
        self.tables = tables
        self.pooling = pooling
        self.edge = build_edge(edge, schema)
        self.rerank = build_rerank(rerank, schema)

    def encode(self, batch: Batch) -> Encoded:
        """What all losses share."""
        return encode(self.tables, batch, self.pooling)

    def edge_logits(self, encoded: Encoded) -> Tensor:
        """Edge logits f32[B, N]."""
        return edge_logits(self.edge, encoded)

    def rank_logits(self, encoded: Encoded) -> Tensor:
        """Reranker logits f32[B, N]."""
        return logits_of(self.rerank, encoded.history, encoded.target, encoded.user)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Losses of edge ranker, reranker and recall."""
        encoded = self.encode(batch)
        return (
            ranking_loss(self.edge_logits(encoded), batch),
            ranking_loss(self.rank_logits(encoded), batch),
            recall_loss(self.tables, batch, encoded),
        )
