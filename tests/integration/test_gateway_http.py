"""The HTTP interface of a gateway: every bad request, feedback, and what operators ask."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from feature_service.events import FeedbackEvent, decode_event, events_in
from infra.kafka import LogConsumer
from tests.gateway_stack import FEEDBACK, PARTITIONS, Answer, GatewayStack
from tests.support import eventually


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


def field(answer: Answer) -> tuple[int, str | None]:
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.body["status"] == answer.status
    assert answer.body["type"].startswith("/problems/")
    assert answer.body["title"]
    assert answer.body["detail"]
    return answer.status, answer.body.get("field")


# --- bad requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/recommend", "/v1/rank"])
@pytest.mark.parametrize(
    ("body", "status", "name"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"user_id=196", 400, None),
        (b"[1]", 422, "$"),
        (b'{"user_id": true, "candidates": []}', 422, "user_id"),
        (b'{"user_id": 1.5, "candidates": []}', 422, "user_id"),
        (b'{"user_id": "", "candidates": []}', 422, "user_id"),
        (json.dumps({"user_id": "a" * 257, "candidates": []}).encode(), 422, "user_id"),
        (json.dumps({"user_id": "ü" * 129, "candidates": []}).encode(), 422, "user_id"),
        (b'{"who": "196", "candidates": []}', 422, "who"),
        (b'{"k": 0, "candidates": []}', 422, "k"),
        (b'{"k": 501, "candidates": []}', 422, "k"),
        (b'{"k": NaN, "candidates": []}', 422, "k"),
        (b'{"deadline_ms": Infinity, "candidates": []}', 422, "deadline_ms"),
        (b'{"deadline_ms": 0.5, "candidates": []}', 422, "deadline_ms"),
        (b'{"deadline_ms": 60001, "candidates": []}', 422, "deadline_ms"),
        (b'{"context": {"a": -Infinity}, "candidates": []}', 422, "context.a"),
        (b'{"candidates": [1, null]}', 422, "candidates[1]"),
        (json.dumps({"candidates": ["ü" * 129]}).encode(), 422, "candidates[0]"),
        (b'{"exclude": "i1", "candidates": []}', 422, "exclude"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_the_field(
    stack: GatewayStack, path: str, body: bytes, status: int, name: str | None
) -> None:
    assert field(stack.post(path, body)) == (status, name)


def test_more_than_two_thousand_candidates_are_refused(stack: GatewayStack) -> None:
    assert field(stack.rank(candidates=list(range(2001)))) == (422, "candidates")


def test_rank_without_candidates_names_them(stack: GatewayStack) -> None:
    assert field(stack.rank()) == (422, "candidates")


def test_a_body_over_a_mebibyte_is_refused(stack: GatewayStack) -> None:
    assert field(stack.post("/v1/recommend", b" " * (1024 * 1024 + 1))) == (413, None)
    assert len(ids(stack.post("/v1/recommend", b"{}" + b" " * (1024 * 1024 - 2)))) == 20


def test_a_body_in_chunks_over_a_mebibyte_is_refused_too(stack: GatewayStack) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=10)
    try:
        connection.request("POST", "/v1/recommend", iter([b" " * 400_000] * 3), encode_chunked=True)
        reply = connection.getresponse()
        assert (reply.status, json.loads(reply.read())["type"]) == (413, "/problems/too-large")
    finally:
        connection.close()


def test_a_caller_that_leaves_half_way_harms_nobody(stack: GatewayStack) -> None:
    with socket.create_connection(("127.0.0.1", stack.port)) as caller:
        caller.sendall(b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")

    assert stack.recommend().status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/recommend", 405),
        ("PUT", "/v1/rank", 405),
        ("DELETE", "/v1/feedback", 405),
        ("POST", "/livez", 405),
        ("GET", "/", 404),
        ("POST", "/v1/recommend/", 404),
        ("GET", "/v1/nothing", 404),
    ],
)
def test_a_wrong_method_or_path_is_a_problem_too(stack: GatewayStack, method: str, path: str, status: int) -> None:
    answer = stack.ask(method, path)

    assert field(answer) == (status, None)
    assert ("allow" in answer.headers) == (status == 405)


# --- feedback --------------------------------------------------------------------------------------------------------


def records(stack: GatewayStack) -> list[FeedbackEvent]:
    consumer = LogConsumer(stack.broker.bootstrap, FEEDBACK, range(PARTITIONS), positions={})
    consumer.start()
    try:
        found: list[FeedbackEvent] = []
        while batch := consumer.poll(0.3):
            found += [decode_event(part.value) for record in batch for part in events_in(record)]
        return found
    finally:
        consumer.close()


def test_accepted_feedback_is_in_the_log(stack: GatewayStack) -> None:
    now_s = time.time()
    events = [
        {"user_id": 7, "item_id": 50, "event": "click", "ts": now_s, "recommendation_id": "rec-7"},
        {"user_id": "7", "item_id": "i2", "event": "impression"},
    ]

    answer = stack.post("/v1/feedback", {"events": events})

    assert (answer.status, answer.body) == (202, {"accepted": 2})
    click, shown = [event for event in records(stack) if event.user_id == "7"][-2:]
    assert (click.item_id, click.event, click.recommendation_id) == ("50", "click", "rec-7")
    assert click.ts_us == int(now_s * 1e6)
    assert (shown.item_id, shown.event) == ("i2", "impression")
    assert abs(shown.ts_us / 1e6 - now_s) < 10


def test_what_was_recommended_is_in_the_log_as_an_impression(stack: GatewayStack) -> None:
    answer = stack.recommend(k=3)

    [shown] = eventually(lambda: [e for e in records(stack) if e.recommendation_id == answer.body["recommendation_id"]])
    assert (shown.user_id, shown.event, shown.item_id) == ("u1", "impression", ids(answer)[0])


@pytest.mark.parametrize(
    ("events", "name"),
    [
        ([], "events"),
        ([{"user_id": "1", "item_id": "2", "event": "click"}] * 1001, "events"),
        ([{"user_id": "1", "item_id": "2", "event": "sneeze"}], "events[0].event"),
        ([{"item_id": "2", "event": "click"}], "events[0].user_id"),
        ([{"user_id": "1", "item_id": "ü" * 129, "event": "click"}], "events[0].item_id"),
        ([{"user_id": "1", "item_id": "2", "event": "click", "ts": time.time() + 86400}], "events[0].ts"),
        ([{"user_id": "1", "item_id": "2", "event": "click", "ts": time.time() * 1000}], "events[0].ts"),
    ],
)
def test_bad_feedback_is_refused_whole_by_the_name_of_the_field(
    stack: GatewayStack, events: list[dict[str, Any]], name: str
) -> None:
    assert field(stack.post("/v1/feedback", {"events": events})) == (422, name)


def test_a_thousand_events_are_accepted_at_once(stack: GatewayStack) -> None:
    events = [{"user_id": str(n), "item_id": "i1", "event": "click"} for n in range(1000)]

    assert stack.post("/v1/feedback", {"events": events}).body == {"accepted": 1000}


# --- for operators ---------------------------------------------------------------------------------------------------


def test_a_gateway_says_that_it_lives_and_is_ready(stack: GatewayStack) -> None:
    assert stack.get("/livez").body == {"alive": True}
    ready = stack.get("/readyz")
    assert ready.status == 200
    assert set(ready.body["dependencies"]) == {"shards", "edge", "rerank", "redis", "kafka"}


def test_status_names_every_process_and_what_the_shards_say(stack: GatewayStack) -> None:
    body = stack.get("/v1/status").body

    assert sorted({p["role"] for p in body["processes"]}) == ["edge", "gateway", "rerank", "shard"]
    assert all(p["pid"] and p["address"] for p in body["processes"])
    assert body["shards"][0]["positions"] == {"0": 5}
    assert body["release"]["id"] == "tiny"
    assert body["quality"]["edge"]["uniform"]["auc"] == 0.9
    assert body["redis"]["embedded"] is True
    assert body["kafka"]["ok"] is True


def test_metrics_count_requests_by_route_status_and_arm(stack: GatewayStack) -> None:
    stack.recommend()

    text = stack.get("/metrics").body
    assert 'gateway_requests_total{arm="stable",route="/v1/recommend",status="200"}' in text
    assert 'gateway_stage_seconds_bucket{arm="stable",le="0.001",stage="rerank"}' in text


def test_the_interface_is_described(stack: GatewayStack) -> None:
    document = stack.get("/openapi.json").body

    assert {"/v1/recommend", "/v1/rank", "/v1/feedback", "/livez", "/readyz", "/metrics", "/v1/status"} <= set(
        document["paths"]
    )
    schemas = document["components"]["schemas"]
    assert schemas["RecommendRequest"]["properties"]["k"]["maximum"] == 500
    assert set(schemas["RecommendReply"]["required"]) >= {"items", "release", "versions", "degraded", "coverage"}
    assert stack.get("/docs").status == 200
