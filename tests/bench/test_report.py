"""The benchmark's arithmetic, and what it calls the same answer."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.bench.asks import differences
from tests.bench.load import Measured
from tests.bench.report import document, faults, ratios, summary, table


def _measured(requests_per_s: float, p50_ms: float, *, degraded: int = 0) -> Measured:
    return Measured(
        clients=8,
        seconds=1.0,
        requests=int(requests_per_s),
        requests_per_s=requests_per_s,
        p50_ms=p50_ms,
        p99_ms=2 * p50_ms,
        max_ms=3 * p50_ms,
        non_200=0,
        degraded=degraded,
        broken=0,
        replies=int(requests_per_s),
        generator_cores=0.1,
        cpu_ms=p50_ms / 2,
    )


ROUNDS = [
    {"ours": {8: _measured(1000.0, 8.0)}, "peer": {8: _measured(200.0, 40.0)}},
    {"ours": {8: _measured(100.0, 80.0)}, "peer": {8: _measured(20.0, 400.0)}},
]


def _reply(*items: tuple[str, float], user: str = "known") -> dict[str, Any]:
    placed = [{"item_id": item, "score": score, "rank": rank} for rank, (item, score) in enumerate(items, start=1)]
    return {"items": placed, "coverage": {"user": user, "candidates": 500, "scored": 500}}


def test_ratios_are_taken_within_a_round_so_that_a_slow_round_favours_nobody() -> None:
    assert ratios(ROUNDS, "ours") == {"peer": {8: {"requests_per_s": 5.0, "p50": 5.0, "cpu": 5.0}}}


def test_the_summary_is_the_median_of_the_rounds() -> None:
    assert summary(ROUNDS)["ours"][8]["requests_per_s"] == 550.0


def test_a_single_system_is_reported_without_ratios() -> None:
    alone = [{"ours": {8: _measured(1000.0, 8.0)}}]
    assert ratios(alone, "ours") == {}
    assert "x" not in table(alone, "ours").splitlines()[-1]


def test_degraded_replies_are_faults() -> None:
    assert faults(ROUNDS) == 0
    assert faults([{"ours": {8: _measured(10.0, 1.0, degraded=3)}}]) == 3


def test_the_document_is_json_with_everything_measured() -> None:
    read = json.loads(document(ROUNDS, "ours", release="dir"))
    assert read["ratios"]["peer"]["8"]["requests_per_s"] == 5.0
    assert len(read["rounds"]) == 2
    assert read["release"] == "dir"
    assert read["cores"] >= 1


def test_a_run_without_a_reply_is_shown_as_such() -> None:
    dead = _measured(0.0, 1.0)
    dead = Measured(**{f: None if f.endswith("_ms") else getattr(dead, f) for f in dead.__struct_fields__})
    assert "nan" in table([{"ours": {8: _measured(10.0, 1.0)}, "peer": {8: dead}}], "ours")


def test_equal_answers_and_near_ties_in_another_order_are_the_same() -> None:
    one = _reply(("a", 0.9), ("b", 0.5000), ("c", 0.4999))
    assert differences([one], [copy.deepcopy(one)]) == []
    assert differences([one], [_reply(("a", 0.9), ("c", 0.4999), ("b", 0.4999))]) == []
    assert differences([one], [_reply(("a", 0.9), ("b", 0.5000), ("d", 0.4998))]) == []


@pytest.mark.parametrize(
    "other",
    [
        _reply(("a", 0.9), ("b", 0.5), ("d", 0.3)),
        _reply(("a", 0.9), ("d", 0.5), ("c", 0.4)),
        _reply(("b", 0.9), ("a", 0.5), ("c", 0.4)),
        _reply(("a", 0.9), ("b", 0.5), ("c", 0.4), user="bucket"),
    ],
)
def test_other_scores_items_or_users_are_differences(other: dict[str, Any]) -> None:
    assert differences([_reply(("a", 0.9), ("b", 0.5), ("c", 0.4))], [other])
