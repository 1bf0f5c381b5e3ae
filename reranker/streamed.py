"""A log too large for memory as training takes it: batches streamed from its spill, trials of a few users in memory.

Refuses what `feature_service.spill` refuses. Invariant: the same cuts, the same test protocol and the same report as a
log in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_ranker.samples import BatchSource
from edge_ranker.streamed import StreamedSamples
from edge_ranker.tables import Log
from feature_service.dataset import Dataset, Known
from feature_service.schema import FeatureSchema
from feature_service.spill import Spill
from feature_service.timeline import Occurring, Timeline
from infra.release import User
from reranker.evaluate import Trial, make_trial, spread_over_users
from reranker.recipe import Recipe
from reranker.source import TEST_EVENTS, VALIDATION_EVENTS, moment, ranked, user_state

I64 = NDArray[np.int64]
BOOL = NDArray[np.bool_]


class _Occurs:
    """What tables need to know of a period of the log."""

    def __init__(self, known: Known, occurring: Occurring) -> None:
        self.dataset = known
        self._occurring = occurring

    def item_counts(self) -> I64:
        return self._occurring.items

    def trained_users(self) -> BOOL:
        return self._occurring.users


class StreamedLog:
    """A spilled log."""

    def __init__(self, spill: Spill) -> None:
        self.spilled = spill

    @property
    def known(self) -> Known:
        """Who and what it speaks of."""
        return self.spilled.known

    @property
    def n_train(self) -> int:
        """Events that are trained on."""
        return int(self.spilled.shard_events.sum())

    def n_users(self) -> int:
        """Users before the test period."""
        return int(self.spilled.trained.users.sum())

    def fitted(self) -> Log:
        """What occurs in the events that are trained on."""
        return _Occurs(self.spilled.known, self.spilled.fitted)

    def samples(self, schema: FeatureSchema, recipe: Recipe, rng: np.random.Generator) -> BatchSource:
        """Training batches."""
        return StreamedSamples(
            self.spilled,
            schema,
            rng=rng,
            batch_size=recipe.batch_size,
            negatives_per_kind=recipe.negatives_per_kind,
            bucket_share=recipe.bucket_share,
            buffer_events=recipe.buffer_events,
            workers=recipe.workers,
        )

    def validation(self, rng: np.random.Generator) -> tuple[Timeline, Trial]:
        """What the best pass is chosen by."""
        spill = self.spilled
        return self._trial(
            spill.validation_events, VALIDATION_EVENTS, spill.validation_from_us, spill.test_from_us, rng
        )

    def test(self, rng: np.random.Generator) -> tuple[Timeline, Trial]:
        """What the release is judged by. Raises InvalidInput when there is nothing to rank."""
        spill = self.spilled
        timeline, trial = self._trial(spill.test_events, TEST_EVENTS, spill.test_from_us, spill.last_us + 1, rng)
        return timeline, ranked(timeline, trial)

    def users(self, max_history: int) -> Iterator[User]:
        """Every user with his newest history at the end of the training period."""
        known, shards = self.spilled.known, self.spilled.shards
        for shard in range(shards.n):
            log = shards.read([shard], self.spilled.test_from_us)
            for user in shards.users(shard):
                begin, end = int(log.first[user]), int(log.first[user + 1])
                yield user_state(known, log, user, max(begin, end - max_history), end)

    def split(self) -> dict[str, Any]:
        """The cut, for the report."""
        spill = self.spilled
        n_validation, n_test = int(spill.validation_events.sum()), int(spill.test_events.sum())
        test_users = spill.test_events > 0
        return {
            "kind": "one cut in time for all users",
            "train_from": moment(spill.first_us),
            "validation_from": moment(spill.validation_from_us),
            "test_from": moment(spill.test_from_us),
            "test_until": moment(spill.last_us),
            "train_events": self.n_train,
            "validation_events": n_validation,
            "test_events": n_test,
            "test_users": int(test_users.sum()),
            "test_users_without_row": int((test_users & ~spill.fitted.users).sum()),
        }

    def _trial(
        self, of_users: I64, most: int, from_us: int, until_us: int, rng: np.random.Generator
    ) -> tuple[Timeline, Trial]:
        """At most `most` events of a period, evenly from users drawn at random, in a timeline of these users alone."""
        users = rng.permutation(np.flatnonzero(of_users))[:most]
        log = self.spilled.shards.of_users(users)
        data = Dataset(
            **{name: getattr(self.spilled.known, name) for name in Known.__dataclass_fields__},
            user=log.user.astype(np.int64),
            item=log.item.astype(np.int64),
            ts_us=log.ts_us,
            first=log.first,
        )
        period = (data.ts_us >= from_us) & (data.ts_us < until_us)
        occurring = self.spilled.trained if until_us > self.spilled.test_from_us else self.spilled.fitted
        timeline = Timeline(data, from_us, np.flatnonzero(data.ts_us < from_us), np.flatnonzero(period), occurring)
        events = spread_over_users(timeline, timeline.test, most, rng)
        return timeline, make_trial(timeline, self.spilled.fitted.items, events, rng)
