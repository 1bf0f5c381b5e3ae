"""Where calibration requests come from, that replayed inputs are those of serving, and what one bad model costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from edge_ranker.tables import Tables
from feature_service.recorded import RecordedFeatures
from feature_service.schema import FeatureSchema
from feature_service.timeline import Timeline, cut, hold_out
from infra.engine.calibrate import Scales, read_scales
from infra.release import RecordedRequest, Role
from reranker.evaluate import make_trial
from reranker.precisions import Rules, calibration_batches, calibration_events, make_precisions
from reranker.rankers import Rankers
from reranker.replay import replay
from reranker.source import user_state
from tests.logs_of_events import DAY_US, small_dataset
from tests.onnx_models import write_ranker
from tests.quantised_models import plain

SCHEMA = FeatureSchema(n_user_buckets=8, max_history=10)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return cut(small_dataset())


@pytest.fixture(scope="module")
def rankers(timeline: Timeline) -> Rankers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Rankers(Tables(SCHEMA, hold_out(timeline))).eval()
    made.tables.finish()
    return made


def test_replayed_inputs_are_those_that_serving_assembles(timeline: Timeline, rankers: Rankers) -> None:
    data = timeline.dataset
    events = np.concatenate((data.first[:3], timeline.test[:20]))
    candidates = np.random.default_rng(0).integers(0, len(data.item_ids), (events.size, 6))
    tables = {name: rows for name, (_, rows) in rankers.tables.release_tables().items()}
    categories = {i: facts.categories for i, facts in zip(data.item_ids, data.facts, strict=True)}
    features = RecordedFeatures(SCHEMA, tables, categories)
    seen = []
    for rows, batch in replay(rankers, timeline, events, candidates, chunk=3):
        for place, row in enumerate(rows.tolist()):
            event = int(events[row])
            user = int(data.user[event])
            begin = max(int(data.first[user]), event - SCHEMA.max_history)
            state = user_state(data, data.interactions, user, begin, event)
            items = [data.item_ids[i] for i in candidates[row].tolist()]
            expected = features.inputs(
                RecordedRequest(
                    state.user_id, state.attributes, state.history_items, state.history_ts_us, items, [], []
                )
            )
            for name in ("hist", "target", "mask", "user"):
                np.testing.assert_allclose(
                    getattr(batch, name)[place], getattr(expected, name), atol=1e-6, err_msg=f"{name} of {event}"
                )
            seen.append(row)
    assert sorted(seen) == list(range(events.size))


def test_calibration_requests_are_of_the_last_days_before_the_test_period(timeline: Timeline) -> None:
    rules = Rules(calibration_days=20, calibration_requests=16)
    events = calibration_events(timeline, rules, np.random.default_rng(0))
    times = timeline.dataset.ts_us[events]
    assert events.size == np.unique(events).size == 16
    assert times.max() < timeline.test_from_us
    assert times.min() >= timeline.test_from_us - 20 * DAY_US
    others = calibration_events(timeline, rules, np.random.default_rng(1))
    assert set(others.tolist()) != set(events.tolist())


def test_where_the_last_days_hold_too_few_the_newest_requests_are_taken(timeline: Timeline) -> None:
    events = calibration_events(
        timeline, Rules(calibration_days=0.01, calibration_requests=50), np.random.default_rng(0)
    )
    times = timeline.dataset.ts_us
    assert events.size == 50
    rest = np.setdiff1d(timeline.train, events)
    assert times[events].min() >= times[rest].max()
    everything = calibration_events(timeline, Rules(calibration_requests=10_000), np.random.default_rng(0))
    assert sorted(everything.tolist()) == timeline.train.tolist()


def test_a_model_that_int8_cannot_do_costs_int8_and_nothing_else(
    timeline: Timeline, rankers: Rankers, tmp_path: Path
) -> None:
    rules = Rules(int8=replace(Rules().int8, max_logit_rmse=9, min_overlap_at_20=0, max_log_loss_rise_pct=1e3))
    trial = make_trial(timeline, timeline.item_counts(), timeline.test, np.random.default_rng(0), 5)
    files: dict[Role, Path] = {"edge": tmp_path / "mlp.onnx", "rerank": tmp_path / "bst.onnx"}
    onnx.save(plain(), files["edge"])
    write_ranker(files["rerank"], SCHEMA.token_dim, SCHEMA.user_dim, scale=float("nan"))
    made = make_precisions(
        rankers, timeline, trial, files, rules=rules, log_loss_negatives=4.0, rng=np.random.default_rng(0)
    )
    assert made.models["edge"].keys() == {"fp32", "fp16", "int8", "int8-cpu"}
    assert made.scales.keys() == {"edge"}
    assert made.models["rerank"].keys() == {"fp32"}
    assert "FP16 cannot" in made.report["rerank"]["fp16"]["refused"][0]
    assert "no MatMul or Gemm with a constant weight" in made.report["rerank"]["int8"]["refused"][0]


def test_given_scales_are_used_and_kept_and_those_of_another_graph_refused(
    timeline: Timeline, rankers: Rankers, tmp_path: Path
) -> None:
    def scales(role: Role, *activations: str) -> Scales:
        return Scales(1, role, "by hand", {}, dict.fromkeys(activations, 0.5), dict.fromkeys(activations, 63.5))

    trial = make_trial(timeline, timeline.item_counts(), timeline.test, np.random.default_rng(0), 5)
    files: dict[Role, Path] = {"edge": tmp_path / "mlp.onnx", "rerank": tmp_path / "bst.onnx"}
    for file in files.values():
        onnx.save(plain(), file)
    given: dict[Role, Scales] = {"edge": scales("edge", "target", "user", "relu"), "rerank": scales("rerank", "query")}
    anything = replace(Rules().int8, max_auc_loss_pct=1e3, max_log_loss_rise_pct=1e6, max_logit_rmse=1e6)
    made = make_precisions(
        rankers,
        timeline,
        trial,
        files,
        rules=Rules(int8=replace(anything, min_overlap_at_20=0), scales=given),
        log_loss_negatives=4.0,
        rng=np.random.default_rng(0),
    )
    assert read_scales(made.scales["edge"]) == given["edge"]
    for precision in ("int8", "int8-cpu"):
        graph = onnx.load(made.models["edge"][precision]).graph
        steps = [numpy_helper.to_array(t) for t in graph.initializer if t.name in ("target_scale", "relu_scale")]
        assert [float(step) for step in steps] == [0.5, 0.5]
    assert "no scale for 'target'" in made.report["rerank"]["int8"]["refused"][0]
    assert "rerank" not in made.scales


def overflowing(file: Path) -> None:
    """A ranker whose logits are right in FP32 and pass through a number that FP16 does not have."""
    write_ranker(file, SCHEMA.token_dim, SCHEMA.user_dim)
    model = onnx.load(file)
    last = model.graph.node[-1]
    last.output[0] = "small"
    model.graph.initializer.append(helper.make_tensor("large", TensorProto.FLOAT, [], [4e4]))
    for kind, given, made in (
        ("Add", "small", "more"),
        ("Add", "more", "most"),
        ("Sub", "most", "less"),
        ("Sub", "less", "scores"),
    ):
        model.graph.node.append(helper.make_node(kind, [given, "large"], [made]))
    onnx.save(model, file)


def test_scores_that_are_not_finite_in_one_precision_are_the_reason_against_it(
    timeline: Timeline, rankers: Rankers, tmp_path: Path
) -> None:
    trial = make_trial(timeline, timeline.item_counts(), timeline.test, np.random.default_rng(0), 5)
    files: dict[Role, Path] = {"edge": tmp_path / "mlp.onnx", "rerank": tmp_path / "bst.onnx"}
    onnx.save(plain(), files["edge"])
    overflowing(files["rerank"])
    made = make_precisions(
        rankers, timeline, trial, files, rules=Rules(), log_loss_negatives=4.0, rng=np.random.default_rng(0)
    )
    assert made.report["rerank"]["fp16"]["released"] is False
    assert "not finite" in made.report["rerank"]["fp16"]["refused"][0]
    assert "fp16" not in made.models["rerank"]
    assert "fp16" in made.models["edge"]


def test_calibration_ranks_the_taken_item_among_others(timeline: Timeline, rankers: Rankers) -> None:
    events = timeline.train[-8:]
    batches = calibration_batches(rankers, timeline, events, np.random.default_rng(0))
    assert sum(batch.target.shape[0] for batch in batches) == events.size
    assert {batch.target.shape[1] for batch in batches} == {51}
    assert all((batch.mask == 1).all() or batch.mask.shape[1] == 1 for batch in batches)
