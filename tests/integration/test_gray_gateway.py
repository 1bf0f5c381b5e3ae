"""Two releases behind a real gateway: the whole life of a gray release over HTTP."""

from __future__ import annotations

import json
from typing import Any

from infra.redis import connect
from tests.gateway_stack import STACK, broken
from tests.support import eventually
from tests.two_releases import HARD, OPERATOR, TwoReleases, versions


def test_a_release_goes_from_draft_to_everybody_and_back(two: TwoReleases) -> None:
    assert two.control("GET", "").body == {"releases": []}
    started = two.started()
    assert (started.body["state"], started.body["weight_ppm"]) == ("running", 300_000)
    assert started.body["acknowledged"]["acked"] == started.body["acknowledged"]["gateways"] == 1
    assert started.headers["etag"] == '"2"'

    answers = two.ask(range(60))
    assert all(answer.status == 200 for answer in answers)
    assert not any(two.mixed(answer) for answer in answers)
    arms = {answer.body["release"]["arm"] for answer in answers}
    assert arms == {"stable", "candidate"}
    one = next(answer for answer in answers if answer.body["release"]["arm"] == "candidate")
    assert one.headers["x-release-arm"] == "candidate"

    def ramped() -> bool:
        two.ask(range(60, 160))
        return bool(two.control("GET", "/g").body["step"] == 2)

    eventually(ramped, timeout_s=30)

    def ready() -> bool:
        two.ask(range(100))
        return "ready to promote" in two.control("GET", "/g/analysis").body["decision"]["sentence"]

    eventually(ready, timeout_s=30)
    promoted = two.control("POST", "/g:promote")
    assert promoted.status == 200, promoted.body
    assert promoted.body["serving"] == "tiny-b"
    assert {versions(answer)[0] for answer in two.ask(range(40))} == {"tiny-b"}

    back = two.control("POST", "/g:rollback", {"why": "regret"})
    assert (back.body["state"], back.body["acknowledged"]["missing"]) == ("aborted", [])
    assert {versions(answer)[0] for answer in two.ask(range(40))} == {"tiny"}
    events = two.control("GET", "/g/events").body["events"]
    assert [e["action"] for e in events] == ["create", "start", "step", "promote", "rollback"]
    assert [e["who"] for e in events] == ["ann", "ann", "controller", "ann", "ann"]


def test_a_broken_release_is_aborted_by_itself_and_nobody_sees_it_again(two: TwoReleases) -> None:
    two.tiers["rerank"].damage = broken
    two.started()

    def aborted() -> bool:
        assert all(answer.status == 200 for answer in two.ask(range(80)))
        return bool(two.control("GET", "/g").body["state"] == "aborted")

    eventually(aborted, timeout_s=30)
    shown = two.control("GET", "/g").body
    assert shown["reason"].startswith("degraded_share: ")
    eventually(lambda: {versions(answer)[0] for answer in two.ask(range(20))} == {"tiny"})
    before = len(two.tiers["edge"].requests)
    two.ask(range(80))
    assert len(two.tiers["edge"].requests) == before


def test_after_an_abort_has_returned_the_candidate_release_answers_nothing(two: TwoReleases) -> None:
    two.started()
    two.ask(range(20))
    aborted = two.control("POST", "/g:abort", {"why": "enough"})

    assert aborted.body["acknowledged"]["acked"] == 1
    assert aborted.body["acknowledged"]["inflight"] == 0
    assert aborted.body["acknowledged"]["propagation_ms"] < 1000
    asked = len(two.tiers["edge"].requests)
    assert {versions(answer)[:2] for answer in two.ask(range(60))} == {("tiny", "stable")}
    assert len(two.tiers["edge"].requests) == asked


def test_feedback_counts_for_the_arm_that_showed_the_item(two: TwoReleases) -> None:
    two.started(gates=[*HARD, {"metric": "click_through", "kind": "non_inferiority", "limit": 0.2, "dry_run": True}])
    answers = two.ask(range(60))
    for answer in answers:
        item = answer.body["items"][0]["item_id"]
        ids = (answer.body["recommendation_id"], "forged" * 7, None)
        events = [{"user_id": "u", "item_id": item, "event": "click", "recommendation_id": i} for i in ids]
        assert two.stack.post("/v1/feedback", {"events": events}).status == 202

    def clicks() -> Any:
        with connect(two.stack.redis.url) as redis:
            raw = [value for key in redis.scan_iter(f"{STACK}:gray:told:*") for value in redis.hvals(key)]
        told = [sample for one in raw for sample in json.loads(one)["samples"]]
        return sum(figures["events"].get("click", 0) for _, figures in told) == 60 and told

    told = eventually(clicks)
    by_arm = {"stable": 0, "candidate": 0}
    for (arm, _), figures in told:
        by_arm[arm] += figures["events"].get("click", 0)
    assert by_arm["candidate"] == sum(answer.body["release"]["arm"] == "candidate" for answer in answers)


def test_a_caller_with_the_token_may_choose_his_arm_and_others_may_not(two: TwoReleases) -> None:
    two.started()
    body = json.dumps({"user_id": "someone"}).encode()
    arms = {}
    for arm in ("candidate", "stable"):
        forced = two.stack.ask("POST", "/v1/recommend", body, {**OPERATOR, "x-trirank-arm": arm})
        arms[arm] = forced.body["release"]
    assert {arm: found["arm"] for arm, found in arms.items()} == {"candidate": "candidate", "stable": "stable"}
    assert arms["candidate"]["reason"] == "override"

    own = two.stack.ask("POST", "/v1/recommend", body, {"x-trirank-arm": "candidate"}).body["release"]
    assert own["reason"] == "split"


def test_the_arm_of_a_user_is_told_with_the_reason(two: TwoReleases) -> None:
    two.started(overrides=[{"user_ids": ["vip"], "arm": "candidate"}])
    told = two.control("GET", "/g/assignment?user_id=vip").body

    assert (told["arm"], told["release"], told["reason"]) == ("candidate", "tiny-b", "override")
    for user in ("v1", "v2", "v3"):
        asked = two.control("GET", f"/g/assignment?user_id={user}").body
        assert asked["arm"] == two.stack.recommend(user_id=user).body["release"]["arm"]
    assert two.control("GET", "/g/assignment").status == 422


def test_while_redis_is_away_the_split_stands_still_and_requests_go_on(two: TwoReleases) -> None:
    two.started()
    before = {i: two.stack.recommend(user_id=f"v{i}").body["release"]["arm"] for i in range(30)}
    two.stack.redis.stop()

    found = {i: two.stack.recommend(user_id=f"v{i}") for i in range(30)}
    assert all(answer.status == 200 for answer in found.values())
    assert {i: answer.body["release"]["arm"] for i, answer in found.items()} == before
    refused = two.control("POST", "/g:abort")
    assert (refused.status, refused.body["type"]) == (503, "/problems/redis-unavailable")
