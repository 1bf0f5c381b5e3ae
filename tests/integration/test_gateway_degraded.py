"""What a user gets while parts of the stack are dead, late or talking nonsense: always a 200, and the reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.wire.messages import Reply
from tests.gateway_stack import Answer, GatewayStack, broken, not_finite, too_few
from tests.support import eventually
from tests.tiny_release import HISTORY

SEEN = {item for item, _ in HISTORY}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayStack]:
    made = GatewayStack(tmp_path_factory.mktemp("stack"), max_in_flight=8)
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def stack(running: GatewayStack) -> Iterator[GatewayStack]:
    """The stack, whole again after each test."""
    yield running
    for server in (running.redis, running.broker):
        if not server.alive():
            server.restart()
            server.wait_ready()
    for tier in running.tiers.values():
        tier.revive()
    running.wait_ready()


def told(answer: Answer) -> tuple[list[str], set[str]]:
    """Reasons, and the stages that placed the items."""
    assert answer.status == 200, answer.body
    reasons = answer.body["degraded"]["reasons"]
    assert answer.body["degraded"]["value"] == bool(reasons)
    return reasons, {item["stage"] for item in answer.body["items"]}


def ids(answer: Answer) -> list[str]:
    return [item["item_id"] for item in answer.body["items"]]


def in_stage_order(answer: Answer, stage: str) -> bool:
    ranks = [item["stages"][stage]["rank"] for item in answer.body["items"]]
    return ranks == list(range(1, len(ranks) + 1))


def test_a_dead_reranker_leaves_the_edges_order(stack: GatewayStack) -> None:
    stack.tiers["rerank"].die()

    answer = stack.recommend(k=20, explain=True)

    assert told(answer) == (["rerank"], {"edge"})
    assert in_stage_order(answer, "edge")
    assert "edge_engine" in answer.body["versions"]
    assert "rerank_engine" not in answer.body["versions"]
    assert eventually(lambda: stack.get("/readyz").status == 503)
    assert stack.get("/readyz").body["dependencies"]["rerank"]["ok"] is False


def test_a_reranker_that_comes_back_is_used_again(stack: GatewayStack) -> None:
    stack.tiers["rerank"].die()
    assert told(stack.recommend())[0] == ["rerank"]

    stack.tiers["rerank"].revive()

    eventually(lambda: told(stack.recommend())[0] == [])


@pytest.mark.parametrize("damage", [broken, not_finite, too_few])
def test_a_reranker_that_fails_or_talks_nonsense_is_not_believed(
    stack: GatewayStack, damage: Callable[[Reply], Reply]
) -> None:
    stack.tiers["rerank"].damage = damage

    assert told(stack.recommend()) == (["rerank"], {"edge"})


@pytest.mark.parametrize("damage", [broken, not_finite, too_few])
def test_an_edge_that_fails_or_talks_nonsense_leaves_recalls_order(
    stack: GatewayStack, damage: Callable[[Reply], Reply]
) -> None:
    stack.tiers["edge"].damage = damage

    answer = stack.recommend(k=20, explain=True)

    assert told(answer) == (["edge"], {"recall"})
    assert in_stage_order(answer, "recall")


def test_a_dead_edge_leaves_recalls_order_for_given_candidates_too(stack: GatewayStack) -> None:
    stack.tiers["edge"].die()

    answer = stack.rank(candidates=["i1", "i2", "i9", "i30"], explain=True)

    assert told(answer) == (["edge"], {"recall"})
    assert in_stage_order(answer, "recall")
    assert answer.body["coverage"]["scored"] == 0


@pytest.mark.parametrize(("role", "stage"), [("edge", "recall"), ("rerank", "edge")])
def test_a_late_ranker_is_not_waited_for_beyond_the_deadline(stack: GatewayStack, role: str, stage: str) -> None:
    stack.tiers[role].hold.clear()

    # The ranker answers nobody before the test ends: that there is an answer shows that it was not waited for.
    answer = stack.recommend(deadline_ms=300)

    assert told(answer) == ([role], {stage})
    assert answer.body["timing_ms"]["total"] > 200


def test_a_late_shard_leaves_time_to_answer_from_memory(stack: GatewayStack) -> None:
    stack.tiers["shard"].hold.clear()

    answer = stack.recommend(deadline_ms=3000)

    assert told(answer) == (["embeddings"], {"popular"})
    assert answer.body["timing_ms"]["total"] < 3000


def test_without_a_shard_popular_items_are_recommended(stack: GatewayStack) -> None:
    stack.tiers["shard"].die()

    answer = stack.recommend(k=5, explain=True, exclude=["i1"])

    assert told(answer) == (["embeddings"], {"popular"})
    assert ids(answer) == ["i0", "i2", "i4", "i6", "i7"]
    assert answer.body["items"][0]["title"] == "Title 0"
    assert answer.body["coverage"]["scored"] == 0


def test_without_a_shard_given_candidates_are_ranked_with_default_rows(stack: GatewayStack) -> None:
    stack.tiers["shard"].die()

    answer = stack.rank(candidates=["i9", "i1", "i2"])

    assert told(answer) == (["embeddings"], {"rerank"})
    assert ids(answer) == ["i9", "i1", "i2"]
    assert answer.body["coverage"]["missing_ids"] == ["i9", "i1", "i2"]


def test_without_redis_a_known_user_loses_his_history_only(stack: GatewayStack) -> None:
    before = stack.recommend(k=40)
    stack.redis.stop()

    answer = stack.recommend(k=40)

    assert told(answer) == (["history"], {"rerank", "edge"})
    assert answer.body["coverage"]["user"] == "known"
    assert SEEN & set(ids(answer))
    assert not SEEN & set(ids(before))
    assert stack.get("/readyz").body["dependencies"]["redis"]["ok"] is False
    assert told(stack.post("/v1/recommend", {}))[0] == []


def test_redis_that_comes_back_brings_the_history_back(stack: GatewayStack) -> None:
    stack.redis.stop()
    assert told(stack.recommend())[0] == ["history"]

    stack.redis.restart()

    answer = eventually(lambda: (a := stack.recommend(k=500)) and told(a)[0] == [] and a)
    assert not SEEN & set(ids(answer))


def test_without_anything_behind_it_a_gateway_still_answers(stack: GatewayStack) -> None:
    for tier in stack.tiers.values():
        tier.die()
    stack.redis.stop()
    stack.broker.stop()

    for _ in range(50):
        answer = stack.recommend(k=7)
        assert told(answer) == (["history", "embeddings"], {"popular"})
        assert len(ids(answer)) == 7
    given = stack.rank(candidates=["x", "i5", "i3"])
    assert told(given) == (["history", "embeddings", "edge"], {"recall"})
    assert ids(given) == ["x", "i5", "i3"]


def test_without_a_broker_recommendations_go_on_and_feedback_is_refused(stack: GatewayStack) -> None:
    stack.broker.stop()
    event = {"events": [{"user_id": "1", "item_id": "i1", "event": "click"}]}

    refused = stack.post("/v1/feedback", event)

    assert (refused.status, refused.body["type"]) == (503, "/problems/log-unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert told(stack.recommend()) == ([], {"rerank", "edge"})

    stack.broker.restart()
    eventually(lambda: stack.post("/v1/feedback", event).status == 202, timeout_s=20)


def test_a_full_gateway_refuses_at_once_and_keeps_those_it_admitted(stack: GatewayStack) -> None:
    stack.tiers["rerank"].hold.clear()
    with ThreadPoolExecutor(8) as callers:
        admitted = [callers.submit(stack.recommend, deadline_ms=20_000) for _ in range(8)]
        eventually(lambda: stack.get("/v1/status").body["gateway"]["in_flight"] == 8)

        began_s = time.monotonic()
        refused = stack.recommend()
        took_s = time.monotonic() - began_s
        stack.tiers["rerank"].hold.set()

        assert [told(one.result())[0] for one in admitted] == [[]] * 8
    assert (refused.status, refused.body["type"]) == (503, "/problems/overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    # Those it admitted wait for 20 s.
    assert took_s < 5.0
    assert stack.recommend().status == 200


def test_a_second_replica_takes_over_when_one_dies(stack: GatewayStack) -> None:
    other = stack.tier("rerank", 1)
    other.start()
    try:
        eventually(lambda: stack.get("/readyz").body["dependencies"]["rerank"]["detail"] == "2 of 2 replicas")
        answers: list[Answer] = []
        done = threading.Event()

        def ask() -> None:
            while not done.is_set():
                answers.append(stack.recommend())

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: len(answers) > 20)
        stack.tiers["rerank"].die()
        seen = len(answers)
        eventually(lambda: len(answers) > seen + 20)
        done.set()
        asking.join()
        assert {tuple(told(answer)[0]) for answer in answers} == {()}
    finally:
        other.stop()
