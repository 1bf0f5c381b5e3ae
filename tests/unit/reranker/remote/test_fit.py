"""The fit over rows that are elsewhere: the same function as over tables, the bound on staleness, rows that vanish."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch

from edge_ranker.samples import Batch
from edge_ranker.tables import Tables
from feature_service.schema import TABLE_IDS
from feature_service.timeline import Timeline, cut
from infra.clock import SystemClock
from infra.errors import InvalidInput
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from reranker.remote.fit import RemoteFit
from reranker.remote.rows import Rows, RowsRefused
from reranker.remote.training import RemoteRows
from reranker.remote.working import RowIndex, WorkingSet
from tests.logs_of_events import small_dataset
from tests.rows_in_memory import RowsInMemory
from tests.unit.reranker.small_log import RECIPE, SCHEMA, small_samples

pytestmark = pytest.mark.usefixtures("one_thread_per_operation")
DIMS = {name: SCHEMA.table_dim(name) for name in TABLE_IDS}


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return cut(small_dataset())


def _index_only(timeline: Timeline) -> Rankers:
    torch.manual_seed(0)
    with torch.device("meta"):
        tables = Tables(SCHEMA, timeline, sparse=())
    return Rankers(tables)


def _fit(timeline: Timeline, service: RowsInMemory, *, staleness: int = 0, passes: int = 1) -> tuple[Rankers, list]:
    rankers = _index_only(timeline)
    run = RemoteFit(rankers, RECIPE, service, seed=3, staleness=staleness, clock=SystemClock())
    return rankers, run.run(small_samples(timeline), passes=passes, on_step=lambda: None)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_working_set_gives_the_losses_and_gradients_of_whole_tables(timeline: Timeline, sampled: bool) -> None:
    torch.manual_seed(1)
    whole = Rankers(Tables(SCHEMA, timeline, sparse=()))
    index = RowIndex(whole.tables)
    batch: Batch = next(small_samples(timeline).batches(0, 0, 1, 1))
    if sampled:
        batch = replace(batch, recall_sample=torch.tensor([3, 0, 3, 5]))
    numbers = index.touched([batch])
    rows = {name: getattr(whole.tables, name).detach().numpy()[chosen].copy() for name, chosen in numbers.items()}
    working = WorkingSet(index, numbers, rows)
    if sampled:
        assert numbers["item"].size < len(whole.tables.item_names) or numbers["user"].size < 20
    run = RemoteFit(whole, RECIPE, RowsInMemory(DIMS), seed=0, staleness=0, clock=SystemClock())
    losses, gradients = run._of_one(working, batch, list(working.rows().values()))
    expected = torch.stack(whole.losses(batch))
    torch.testing.assert_close(losses, expected.detach(), atol=1e-5, rtol=1e-5)
    names = list(TABLE_IDS)
    wanted = torch.autograd.grad(expected.sum(), [getattr(whole.tables, name) for name in names], allow_unused=True)
    for name, gradient, of_table in zip(names, gradients, wanted, strict=True):
        if of_table is None:
            assert gradient is None
            continue
        torch.testing.assert_close(gradient, of_table[torch.from_numpy(numbers[name])], atol=1e-5, rtol=1e-4)
        untouched = np.setdiff1d(np.arange(of_table.shape[0]), numbers[name])
        assert not of_table[torch.from_numpy(untouched)].any()


def test_the_rows_are_in_the_service_and_the_tables_hold_them_at_the_end(timeline: Timeline) -> None:
    service = RowsInMemory(DIMS)
    rankers, log = _fit(timeline, service, passes=2)
    assert service.published == 2 * (small_samples(timeline).n_batches // 2)
    assert [entry["pass"] for entry in log] == [1, 2]
    assert log[1]["recall_loss"] < log[0]["recall_loss"]
    assert [entry["rows_begun"] for entry in log] == [sum(len(rows) for rows in service.held().values()), 0]
    keys = {"item": RowIndex(rankers.tables).keys["item"]}
    held = service.fetch(keys, service.published).result()["item"]
    assert held.found.all()
    np.testing.assert_array_equal(rankers.tables.item.detach().numpy(), held.rows)


class _Watching(RowsInMemory):
    """Notes which steps each fetch waits for, and how many were published then."""

    def __init__(self, late: int) -> None:
        super().__init__(DIMS, late=late)
        self.asked: list[tuple[int, int]] = []

    def fetch(self, keys: Mapping[str, np.ndarray], applied: int) -> Future[Mapping[str, Rows]]:
        self.asked.append((applied, self.published))
        return super().fetch(keys, applied)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_step_never_lacks_more_than_the_allowed_steps_and_fetches_run_ahead(
    timeline: Timeline, staleness: int
) -> None:
    service = _Watching(late=10)
    _fit(timeline, service, staleness=staleness)
    steps = small_samples(timeline).n_batches // 2
    of_steps, of_pull = service.asked[:steps], service.asked[steps:]
    assert [applied for applied, _ in of_steps] == [step - 1 - staleness for step in range(steps)]
    # The rows of step t are asked for when step t - staleness - 1 has just been published.
    assert [published for _, published in of_steps] == [max(0, step - staleness) for step in range(steps)]
    assert {applied for applied, _ in of_pull} == {steps - 1}


def test_rows_that_lag_within_the_bound_are_learnt_as_well(timeline: Timeline) -> None:
    _, at_once = _fit(timeline, RowsInMemory(DIMS), staleness=0, passes=4)
    _, lagging = _fit(timeline, RowsInMemory(DIMS, late=1), staleness=1, passes=4)
    for loss in ("edge_loss", "rerank_loss", "recall_loss"):
        gain = at_once[0][loss] - at_once[-1][loss]
        assert gain > 0
        assert lagging[0][loss] - lagging[-1][loss] > 0.4 * gain


class _NoRoom(RowsInMemory):
    """Takes changes to one table and forgets them, as a full shard does."""

    def _apply(self, changes):  # type: ignore[no-untyped-def]
        super()._apply([change for change in changes if change.table != "user"])


def test_rows_that_find_no_room_stop_the_training(timeline: Timeline) -> None:
    with pytest.raises(RowsRefused, match=r"rows of table user were published and applied, and are missing"):
        _fit(timeline, _NoRoom(DIMS), staleness=1)


@pytest.mark.parametrize(
    ("recipe", "staleness", "resume", "error"),
    [
        (RECIPE, -1, False, "staleness: -1 is out of range; give 0 to 64"),
        (RECIPE, 65, False, "staleness: 65 is out of range"),
        (RECIPE, 1, True, "resume: with rows in a stack there are no checkpoints"),
        (replace(RECIPE, device="cuda"), 1, False, "device: cuda cannot be had with rows in a stack"),
        (replace(RECIPE, amp="on"), 1, False, "amp: on cannot be had"),
        (replace(RECIPE, sparse="item"), 1, False, "sparse: item cannot be had"),
        (replace(RECIPE, patience=2), 1, False, "patience: 2 cannot be had"),
        (replace(RECIPE, workers=2), 1, False, "workers: 2 cannot be had"),
    ],
)
def test_options_that_mean_nothing_there_are_refused(recipe: Recipe, staleness: int, resume: bool, error: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        RemoteRows(RowsInMemory(DIMS), staleness).check(recipe, resume=resume)
    assert str(refused.value).startswith(error)
