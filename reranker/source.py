"""What a training takes from a log, whether the log is in memory or read again and again from disk.

Refuses data nothing can be learnt from. Invariant: the two kinds differ in memory and time, not in what is trained on
or tested on; nothing of the test period reaches a training batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_ranker.samples import BatchSource, Samples
from edge_ranker.tables import Log
from feature_service.dataset import Dataset, Known
from feature_service.interactions import Interactions
from feature_service.schema import FeatureSchema
from feature_service.timeline import Timeline, cut, hold_out
from infra.errors import InvalidInput
from infra.release import User
from reranker.evaluate import Trial, make_trial, spread_over_users
from reranker.recipe import Recipe

I64 = NDArray[np.int64]

TEST_EVENTS = 2000
VALIDATION_EVENTS = 400


class TrainingLog(Protocol):
    """A log with its cut in time."""

    @property
    def known(self) -> Known:
        """Who and what it speaks of."""
        ...

    @property
    def n_train(self) -> int:
        """Events that are trained on."""
        ...

    def n_users(self) -> int:
        """Users before the test period."""
        ...

    def fitted(self) -> Log:
        """What occurs in the events that are trained on."""
        ...

    def samples(self, schema: FeatureSchema, recipe: Recipe, rng: np.random.Generator) -> BatchSource:
        """Training batches."""
        ...

    def validation(self, rng: np.random.Generator) -> tuple[Timeline, Trial]:
        """What the best pass is chosen by: the newest part of the training period."""
        ...

    def test(self, rng: np.random.Generator) -> tuple[Timeline, Trial]:
        """What the release is judged by. Raises InvalidInput when there is nothing to rank."""
        ...

    def users(self, max_history: int) -> Iterator[User]:
        """Every user with his newest history at the end of the training period."""
        ...

    def split(self) -> dict[str, Any]:
        """The cut, for the report."""
        ...


class LogInMemory:
    """A whole data set."""

    def __init__(self, dataset: Dataset) -> None:
        self._timeline = cut(dataset)
        self._fitted = hold_out(self._timeline)

    @property
    def known(self) -> Known:
        """Who and what it speaks of."""
        return self._timeline.dataset

    @property
    def n_train(self) -> int:
        """Events that are trained on."""
        return int(self._fitted.train.size)

    def n_users(self) -> int:
        """Users before the test period."""
        return int(self._timeline.trained_users().sum())

    def fitted(self) -> Timeline:
        """What occurs in the events that are trained on."""
        return self._fitted

    def samples(self, schema: FeatureSchema, recipe: Recipe, rng: np.random.Generator) -> Samples:
        """Training batches."""
        return Samples(
            self._fitted,
            schema,
            self._fitted.train,
            rng=rng,
            batch_size=recipe.batch_size,
            negatives_per_kind=recipe.negatives_per_kind,
            bucket_share=recipe.bucket_share,
        )

    def validation(self, rng: np.random.Generator) -> tuple[Timeline, Trial]:
        """What the best pass is chosen by."""
        return self._fitted, trial_of(self._fitted, self._fitted, VALIDATION_EVENTS, rng)

    def test(self, rng: np.random.Generator) -> tuple[Timeline, Trial]:
        """What the release is judged by. Raises InvalidInput when there is nothing to rank."""
        return self._timeline, ranked(self._timeline, trial_of(self._timeline, self._fitted, TEST_EVENTS, rng))

    def users(self, max_history: int) -> Iterator[User]:
        """Every user with his newest history at the end of the training period."""
        data = self._timeline.dataset
        n_train = np.bincount(data.user[self._timeline.train], minlength=len(data.user_ids))
        for u in range(len(data.user_ids)):
            end = int(data.first[u] + n_train[u])
            yield user_state(data, data.interactions, u, max(int(data.first[u]), end - max_history), end)

    def split(self) -> dict[str, Any]:
        """The cut, for the report."""
        data, timeline, fitted = self._timeline.dataset, self._timeline, self._fitted
        test_users = np.unique(data.user[timeline.test])
        return {
            "kind": "one cut in time for all users",
            "train_from": moment(int(data.ts_us.min())),
            "validation_from": moment(fitted.test_from_us),
            "test_from": moment(timeline.test_from_us),
            "test_until": moment(int(data.ts_us.max())),
            "train_events": int(fitted.train.size),
            "validation_events": int(fitted.test.size),
            "test_events": int(timeline.test.size),
            "test_users": int(test_users.size),
            "test_users_without_row": int((~fitted.trained_users()[test_users]).sum()),
        }


def user_state(known: Known, log: Interactions, user: int, begin: int, end: int) -> User:
    """One user with his attributes and the history of events `begin`..`end` of the log."""
    items = [known.item_ids[i] for i in log.item[begin:end].tolist()]
    return User(known.user_ids[user], known.attributes[user], items, log.ts_us[begin:end].tolist())


def trial_of(timeline: Timeline, fitted: Timeline, most: int, rng: np.random.Generator) -> Trial:
    """At most `most` events of the test period of `timeline`, among items that `fitted` trains."""
    events = spread_over_users(timeline, timeline.test, most, rng)
    return make_trial(timeline, fitted.item_counts(), events, rng)


def ranked(timeline: Timeline, trial: Trial) -> Trial:
    """The trial. Raises InvalidInput when it is empty."""
    if trial.events.size == 0:
        raise InvalidInput(timeline.dataset.name, "every user of the test period has touched every item")
    return trial


def moment(ts_us: int) -> str:
    """Microseconds since 1970 as people read them."""
    return datetime.fromtimestamp(ts_us / 1e6, UTC).isoformat(timespec="seconds")
