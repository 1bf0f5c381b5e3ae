"""What a gateway answers, with real Redis, broker and sockets behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from feature_service.hashing import ITEM, key_of
from feature_service.store import register_items
from infra.release import Item, RecordedRequest
from param_server.contract import Op
from param_server.table import RowBatch
from tests.gateway_stack import STACK, Answer, GatewayStack
from tests.support import eventually
from tests.tiny_release import HISTORY, N_ITEMS

KNOWN = [f"i{n}" for n in range(N_ITEMS)]
SEEN = [item for item, _ in HISTORY]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayStack]:
    running = GatewayStack(tmp_path_factory.mktemp("stack"))
    try:
        yield running.start()
    finally:
        running.stop()


def ids(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    return [item["item_id"] for item in answer.body["items"]]


# --- what a whole answer is -------------------------------------------------------------------------------------------


def test_a_recommendation_has_every_field_of_the_interface(stack: GatewayStack) -> None:
    answer = stack.recommend(k=20, request_id="q1")

    body, manifest = answer.body, stack.release.manifest
    assert len(ids(answer)) == 20
    assert [item["rank"] for item in body["items"]] == list(range(1, 21))
    assert [item["stage"] for item in body["items"]] == ["rerank"] * 10 + ["edge"] * 10
    assert all(set(item) == {"item_id", "score", "rank", "stage"} for item in body["items"])
    assert all(0 < item["score"] < 1 for item in body["items"])
    assert body["request_id"] == "q1"
    assert body["release"]["id"] == manifest.name
    assert body["release"]["arm"] == "stable"
    assert 0 <= body["release"]["bucket_ppm"] < 1_000_000
    assert body["release"]["reason"] == "no_gray_release"
    assert body["versions"]["generation"] == manifest.generation
    assert body["versions"]["schema"] == manifest.schema_fingerprint
    assert body["versions"]["watermark_ms"] == 7000
    assert manifest.files["edge/mlp.fp32.onnx"].startswith(body["versions"]["edge"])
    assert manifest.files["rerank/bst.fp32.onnx"].startswith(body["versions"]["rerank"])
    assert body["versions"]["edge_engine"] == body["versions"]["rerank_engine"] == "onnxruntime-cpu:fp32"
    assert body["degraded"] == {"value": False, "reasons": []}
    assert body["coverage"] == {
        "candidates": 40, "scored": 40, "features_found": 40, "missing": 0, "missing_ids": [], "user": "known",
    }  # fmt: skip
    assert set(body["timing_ms"]) == {"features", "embeddings", "edge", "rerank", "total"}
    assert answer.headers["x-release-arm"] == "stable"
    assert answer.headers["x-request-id"] == "q1"
    assert "rerank;dur=" in answer.headers["server-timing"]


def test_each_recommendation_has_an_id_of_its_own(stack: GatewayStack) -> None:
    found = {stack.recommend().body["recommendation_id"] for _ in range(20)}

    assert len(found) == 20


def test_the_same_request_has_the_same_answer(stack: GatewayStack) -> None:
    assert ids(stack.recommend(k=40)) == ids(stack.recommend(k=40))


def test_an_explanation_names_the_item_and_its_place_in_every_stage(stack: GatewayStack) -> None:
    items = stack.recommend(k=12, explain=True).body["items"]

    first, last = items[0], items[-1]
    assert first["title"] == f"Title {first['item_id'][1:]}"
    assert set(first["stages"]) == {"recall", "edge", "rerank"}
    assert first["stages"]["rerank"] == {"score": first["score"], "rank": 1}
    assert set(last["stages"]) == {"recall", "edge"}
    assert last["stages"]["edge"]["rank"] == 12


@pytest.mark.parametrize("number", [0, 1])
def test_served_scores_are_those_of_the_recorded_requests(stack: GatewayStack, number: int) -> None:
    recorded: RecordedRequest = stack.release.requests()[number]

    answer = stack.post(
        "/v1/rank",
        {
            "user_id": recorded.user_id,
            "candidates": recorded.candidates,
            "context": recorded.attributes,
            "explain": True,
        },
    )

    by_id = {item["item_id"]: item for item in answer.body["items"]}
    for candidate, edge, rerank in zip(recorded.candidates, recorded.edge_logits, recorded.rerank_logits, strict=True):
        assert by_id[candidate]["score"] == pytest.approx(1 / (1 + math.exp(-rerank)), abs=1e-5)
        assert by_id[candidate]["stages"]["edge"]["score"] == pytest.approx(1 / (1 + math.exp(-edge)), abs=1e-5)
    assert answer.body["coverage"]["user"] == ("known", "bucket")[number]
    assert answer.body["coverage"]["missing_ids"] == ["no such item"]


@pytest.mark.parametrize(
    ("user", "kind"), [("u1", "known"), ("stranger", "bucket"), (7, "bucket"), (None, "anonymous")]
)
def test_the_answer_says_whether_the_user_is_known(stack: GatewayStack, user: str | int | None, kind: str) -> None:
    answer = stack.post("/v1/recommend", {"user_id": user, "k": 5})

    assert len(ids(answer)) == 5
    assert answer.body["coverage"]["user"] == kind
    assert answer.body["degraded"]["value"] is False


def test_an_empty_body_of_json_is_an_anonymous_request(stack: GatewayStack) -> None:
    assert len(ids(stack.post("/v1/recommend", {}))) == 20


def test_a_number_and_its_text_are_the_same_id(stack: GatewayStack) -> None:
    as_number = stack.post("/v1/rank", {"user_id": 7, "candidates": [1, 2]})
    as_text = stack.post("/v1/rank", {"user_id": "7", "candidates": ["1", "2"]})

    assert as_number.body["items"] == as_text.body["items"]
    assert ids(as_number) == ["1", "2"]


def test_curls_own_content_type_is_fine(stack: GatewayStack) -> None:
    answer = stack.post("/v1/recommend", {"k": 3}, {"content-type": "application/x-www-form-urlencoded"})

    assert len(ids(answer)) == 3


def test_a_trace_is_carried_on_and_back(stack: GatewayStack) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    answer = stack.post("/v1/recommend", {}, {"traceparent": trace})

    assert answer.headers["traceparent"] == trace
    assert stack.tiers["rerank"].requests[-1].trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert "traceparent" not in stack.post("/v1/recommend", {}, {"traceparent": "nonsense"}).headers


def test_an_id_that_is_no_header_value_stays_in_the_body(stack: GatewayStack) -> None:
    answer = stack.recommend(request_id="a\r\nset-cookie: b")

    assert answer.body["request_id"] == "a\r\nset-cookie: b"
    assert not {"x-request-id", "set-cookie"} & set(answer.headers)
    assert stack.recommend(request_id="ü").status == 200


# --- candidates ------------------------------------------------------------------------------------------------------


def test_items_of_the_history_are_not_recommended_but_can_be_ranked(stack: GatewayStack) -> None:
    given = [*SEEN, "i1", "i2"]

    assert not set(SEEN) & set(ids(stack.recommend(k=500)))
    assert set(ids(stack.recommend(candidates=given))) == {"i1", "i2"}
    assert set(ids(stack.rank(candidates=given))) == set(given)


def test_excluded_items_are_neither_recommended_nor_ranked(stack: GatewayStack) -> None:
    first = ids(stack.recommend(k=10))

    assert not set(first) & set(ids(stack.recommend(k=500, exclude=first)))
    assert set(ids(stack.rank(candidates=["i1", "i2", "i3"], exclude=["i2"]))) == {"i1", "i3"}


def test_recall_is_as_deep_as_the_answer_needs(stack: GatewayStack) -> None:
    everything = ids(stack.recommend(k=500))

    assert sorted(everything) == sorted(set(KNOWN) - set(SEEN))


def test_more_places_than_candidates_are_all_candidates(stack: GatewayStack) -> None:
    answer = stack.rank(candidates=["i1", "i2"], k=500)

    assert len(ids(answer)) == 2


def test_no_candidates_have_an_empty_answer(stack: GatewayStack) -> None:
    for answer in (stack.rank(candidates=[]), stack.rank(candidates=["i1"], exclude=["i1"])):
        assert ids(answer) == []
        assert answer.body["degraded"]["value"] is False


def test_a_candidate_named_twice_has_one_place(stack: GatewayStack) -> None:
    answer = stack.rank(candidates=["i1", "i2", "i1", "i2", "i1"])

    assert sorted(ids(answer)) == ["i1", "i2"]
    assert answer.body["coverage"]["candidates"] == 2


def test_a_candidate_without_a_row_is_ranked_and_named(stack: GatewayStack) -> None:
    strangers = [f"x{n}" for n in range(150)]

    answer = stack.rank(candidates=["i1", *strangers], k=200)

    assert len(ids(answer)) == 151
    coverage = answer.body["coverage"]
    assert (coverage["candidates"], coverage["features_found"], coverage["missing"]) == (151, 1, 150)
    assert coverage["missing_ids"] == strangers[:100]
    equal = [item for item in ids(answer) if item in set(strangers)]
    assert equal[-50:] == [item for item in strangers if item in set(equal[-50:])]


def test_two_thousand_candidates_are_ranked(stack: GatewayStack) -> None:
    assert stack.rank(candidates=list(range(2000)), k=500).body["coverage"]["scored"] == 2000


def test_an_item_that_came_later_is_recommended_once_the_registry_has_its_name(stack: GatewayStack) -> None:
    table = stack.generation.tables["item"]
    best = ids(stack.recommend(k=1))[0]
    row, _ = table.lookup(np.array([key_of(ITEM, best)], np.int64))
    late = key_of(ITEM, "late")

    table.apply(RowBatch(Op.ASSIGN, np.array([late], np.int64), np.array([2], np.uint64), row * 1.01))
    assert "late" not in ids(stack.recommend(k=500))
    register_items(stack.redis.url, STACK, [Item("late", late, "A late arrival", ["comedy"], 0)])

    found: Any = eventually(
        lambda: [i for i in stack.recommend(k=500, explain=True).body["items"] if i["item_id"] == "late"]
    )
    assert (found[0]["title"], found[0]["categories"]) == ("A late arrival", ["comedy"])
    table.apply(
        RowBatch(Op.DELETE, np.array([late], np.int64), np.array([3], np.uint64), np.empty((0, 32), np.float32))
    )


def test_a_row_that_is_not_finite_is_replaced_by_the_default(stack: GatewayStack) -> None:
    table = stack.generation.tables["item"]
    key = np.array([key_of(ITEM, "i20")], np.int64)
    before, _ = table.lookup(key)

    table.apply(RowBatch(Op.ASSIGN, key, np.array([2], np.uint64), np.full_like(before, np.nan)))
    answer = stack.rank(candidates=["i20", "i21"])
    table.apply(RowBatch(Op.ASSIGN, key, np.array([3], np.uint64), before))

    assert answer.body["degraded"]["value"] is False
    assert answer.body["coverage"]["missing_ids"] == ["i20"]
