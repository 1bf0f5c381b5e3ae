"""What a training does differently when its rows are in a parameter server.

Refuses options that have no meaning there. Invariant: the tables hold rows only after `fit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from edge_ranker.samples import BatchSource
from edge_ranker.tables import Log, Tables
from feature_service.schema import FeatureSchema
from infra.clock import Clock
from infra.errors import InvalidInput
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from reranker.remote.fit import RemoteFit
from reranker.remote.rows import RowService

STALENESS = 2
MOST_STALENESS = 64


@dataclass(frozen=True, slots=True)
class RemoteRows:
    """Rows in `service`; a step's rows may lack the changes of the `staleness` steps before the last one."""

    service: RowService
    staleness: int = STALENESS

    def check(self, recipe: Recipe, *, resume: bool) -> None:
        """Raises InvalidInput for options that mean nothing here."""
        if not 0 <= self.staleness <= MOST_STALENESS:
            raise InvalidInput("staleness", f"{self.staleness} is out of range; give 0 to {MOST_STALENESS}")
        if resume:
            raise InvalidInput("resume", "with rows in a stack there are no checkpoints to go on from; leave it out")
        for name, value, only in (
            ("device", recipe.device, "cpu"),
            ("amp", recipe.amp, "auto"),
            ("sparse", recipe.sparse, "auto"),
            ("patience", recipe.patience, 0),
            ("workers", recipe.workers, 0),
        ):
            if value != only:
                raise InvalidInput(name, f"{value} cannot be had with rows in a stack; leave it out")

    def tables(self, schema: FeatureSchema, log: Log) -> Tables:
        """Tables that know which rows there are and hold none. Raises RowsRefused when the service is not for them."""
        with torch.device("meta"):
            tables = Tables(schema, log, sparse=())
        sizes = {
            "user": len(tables.user_names),
            "user_bucket": schema.n_user_buckets,
            "user_attribute": int(tables.has_attribute_row.sum()),
            "item": len(tables.item_names),
            "category": int(tables.has_category_row.sum()),
            "gap": schema.n_gaps,
        }
        self.service.check(schema.fingerprint(), sizes)
        return tables

    def fit(
        self,
        rankers: Rankers,
        samples: BatchSource,
        recipe: Recipe,
        *,
        passes: int,
        seed: int,
        on_step: Callable[[], None],
        clock: Clock,
    ) -> list[dict[str, float]]:
        """Fit, and fill the tables; the log of the passes. Raises RowsUnavailable, RowsRefused."""
        run = RemoteFit(rankers, recipe, self.service, seed=seed, staleness=self.staleness, clock=clock)
        return run.run(samples, passes=passes, on_step=on_step)
