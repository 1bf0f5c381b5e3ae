"""A fit that was interrupted ends with the bits of one that was not; a fit that no longer improves stops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from edge_ranker.samples import BatchSource, Samples
from edge_ranker.streamed import StreamedSamples
from edge_ranker.tables import Tables
from feature_service.folder import read_folder
from feature_service.parts import LogParts
from feature_service.spill import Spill, spill
from feature_service.timeline import Timeline, cut, hold_out
from infra.clock import SystemClock
from infra.errors import InvalidInput
from reranker.checkpoint import Checkpoints
from reranker.descent import Precision
from reranker.fit import fit, steps_per_pass
from reranker.rankers import Rankers
from reranker.recipe import Recipe
from tests.logs_of_events import small_dataset, write_folder
from tests.unit.reranker.small_log import RECIPE, SCHEMA

pytestmark = pytest.mark.usefixtures("one_thread_per_operation")
PASSES = 3


class Killed(Exception):
    """Stands for the death of the process."""


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return cut(small_dataset(n_events=300))


def _fit(
    timeline: Timeline,
    recipe: Recipe,
    draft: Path,
    *,
    resume: bool = False,
    die_after: int | None = None,
    sparse: tuple[str, ...] = (),
    precision: Precision = "fp32",
    spilled: Spill | None = None,
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], int]:
    """State, log and number of reported steps of a fit whose validation prefers the middle pass."""
    torch.manual_seed(0)
    rankers = Rankers(Tables(SCHEMA, timeline, sparse=sparse))
    rng = np.random.default_rng(0)
    numbers = {"batch_size": recipe.batch_size, "negatives_per_kind": 2, "bucket_share": 0.5}
    samples: BatchSource = Samples(timeline, SCHEMA, timeline.train, rng=rng, **numbers)  # type: ignore[arg-type]
    if spilled is not None:
        samples = StreamedSamples(spilled, SCHEMA, rng=rng, buffer_events=80, **numbers)  # type: ignore[arg-type]
    draft.mkdir(exist_ok=True)
    checkpoints = Checkpoints(draft, {"a": 1}, rng, every_s=0.0, clock=SystemClock())
    checkpoints.open(resume=resume)
    steps = 0

    def on_step() -> None:
        nonlocal steps
        steps += 1
        if steps == die_after:
            raise Killed

    def validate() -> float:
        """Falls with every step but the first: the first pass is the best."""
        return -abs(steps - steps_per_pass(samples, recipe.accumulate))

    log = fit(
        rankers,
        samples,
        recipe,
        passes=PASSES,
        validate=validate,
        on_step=on_step,
        precision=precision,
        checkpoints=checkpoints,
    )
    return rankers.state_dict(), log, steps


@pytest.mark.parametrize(
    ("recipe", "sparse", "precision", "die_after"),
    [
        (RECIPE, (), "fp32", 1),
        (RECIPE, (), "fp32", 7),
        (replace(RECIPE, accumulate=2), ("user",), "bf16", 3),
        (RECIPE, ("user",), "fp16", 6),
    ],
)
def test_an_interrupted_fit_ends_with_the_same_bits(
    timeline: Timeline, tmp_path: Path, recipe: Recipe, sparse: tuple[str, ...], precision: Precision, die_after: int
) -> None:
    expected, log, steps = _fit(timeline, recipe, tmp_path / "a", sparse=sparse, precision=precision)
    with pytest.raises(Killed):
        _fit(timeline, recipe, tmp_path / "b", die_after=die_after, sparse=sparse, precision=precision)
    found, found_log, found_steps = _fit(
        timeline, recipe, tmp_path / "b", resume=True, sparse=sparse, precision=precision
    )
    assert found_steps == steps
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    for entry, found_entry in zip(log, found_log, strict=True):
        for field in ("pass", "edge_loss", "rerank_loss", "recall_loss", "validation_auc"):
            assert entry[field] == found_entry[field]


def test_an_interrupted_fit_from_a_stream_ends_with_the_same_bits(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "log", small_dataset(n_events=300))
    pl.read_csv(folder / "interactions.csv").write_parquet(folder / "interactions.parquet")
    (folder / "interactions.csv").unlink()
    spilled = spill(LogParts(folder), tmp_path / "spill", users_per_shard=4)
    timeline, recipe = hold_out(cut(read_folder(folder))), replace(RECIPE, batch_size=8)
    expected, _, steps = _fit(timeline, recipe, tmp_path / "a", spilled=spilled)
    with pytest.raises(Killed):
        _fit(timeline, recipe, tmp_path / "b", die_after=steps // 2, spilled=spilled)
    found, _, found_steps = _fit(timeline, recipe, tmp_path / "b", resume=True, spilled=spilled)
    assert found_steps == steps
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_a_fit_that_is_no_longer_better_stops_and_keeps_its_best_pass(timeline: Timeline, tmp_path: Path) -> None:
    recipe = replace(RECIPE, patience=1)
    stopped, log, _ = _fit(timeline, recipe, tmp_path / "a")
    whole, whole_log, _ = _fit(timeline, RECIPE, tmp_path / "b")
    assert len(log) == 2
    assert len(whole_log) == PASSES
    for name, value in whole.items():
        assert torch.equal(value, stopped[name])


def test_a_step_larger_than_a_pass_is_refused(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="accumulate: a step takes 200 batches, a pass has 8"):
        _fit(timeline, replace(RECIPE, accumulate=100), tmp_path)


def test_the_log_says_how_long_was_waited_for_data(timeline: Timeline, tmp_path: Path) -> None:
    _, log, _ = _fit(timeline, RECIPE, tmp_path)
    for entry in log:
        assert 0 < entry["data_wait_share"] < 1
        assert entry["events_per_s"] > 0
