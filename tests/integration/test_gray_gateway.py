"""Two releases behind a real gateway: the whole life of a gray release over HTTP, and every refusal."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.redis import connect
from tests.gateway_stack import STACK, TOKEN, Answer, broken
from tests.support import eventually
from tests.two_releases import HARD, OPERATOR, TwoReleases, versions


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoReleases]:
    running = TwoReleases(tmp_path)
    try:
        yield running.start()
    finally:
        running.stack.stop()


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


def problem(answer: Answer) -> tuple[int, str, str | None]:
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status, answer.body["type"].removeprefix("/problems/"), answer.body.get("field")


def test_every_refusal_is_a_problem_of_its_own(two: TwoReleases) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}):
        assert problem(two.stack.ask("GET", "/v1/releases", None, headers)) == (401, "unauthorized", None)
    assert problem(two.control("GET", "/nope")) == (404, "unknown-release", None)
    assert problem(two.control("GET", "/nope/events")) == (404, "unknown-release", None)
    assert problem(two.control("GET", "/nope/analysis")) == (404, "unknown-release", None)
    assert problem(two.control("GET", "/nope/assignment?user_id=1")) == (404, "unknown-release", None)
    assert problem(two.control("POST", "/nope:start")) == (404, "unknown-release", None)
    assert problem(two.control("DELETE", "/g")) == (405, "method-not-allowed", None)
    for changed, field in (
        ({"gates": [{"metric": "happiness", "limit": 0.1}]}, "gates[0].metric"),
        ({"gates": [{"metric": "overlap_at_k", "limit": 0.1}]}, "gates[0].kind"),
        ({"max_weight_ppm": 100}, "steps[0].weight_ppm"),
        ({"path": "/nowhere"}, "path"),
        ({"candidate": "tiny-c"}, "path"),
        ({"steps": [{"weight_ppm": -1}]}, "steps[0].weight_ppm"),
        ({"steps": [{"weight_ppm": 0}]}, "steps[0].shadow_ppm"),
        ({"colour": 1}, "colour"),
    ):
        assert problem(two.control("POST", "", two.plan(**changed))) == (422, "invalid-request", field)
    assert problem(two.control("POST", "", two.plan(stable="other"))) == (409, "not-now", None)
    assert two.control("POST", "", two.plan(max_weight_ppm=600_000)).status == 201
    assert problem(two.control("POST", "/g:pause")) == (409, "not-now", None)
    eventually(lambda: two.control("POST", "/g:start").status == 200)
    assert problem(two.control("POST", "", two.plan())) == (409, "not-now", None)
    assert problem(two.control("POST", "/g:pause", {"wy": ""})) == (422, "invalid-request", "wy")
    assert problem(two.control("POST", "/g:promote")) == (409, "not-now", None)
    assert problem(two.control("POST", "/g:rollback")) == (409, "not-now", None)
    assert problem(two.control("PATCH", "/g", {"weight_ppm": 700_000})) == (422, "invalid-request", "weight_ppm")
    assert problem(two.control("PATCH", "/g", {"weight": 7})) == (422, "invalid-request", "weight")


def test_a_start_before_every_tier_has_the_release_is_refused_as_not_ready(two: TwoReleases) -> None:
    for tier in two.tiers.values():
        tier.stop()
    assert two.control("POST", "", two.plan()).status == 201
    eventually(lambda: "edge" in str(two.control("POST", "/g:start").body))

    assert problem(two.control("POST", "/g:start")) == (409, "release-not-ready", None)


CHANGES = [("POST", "/g:start"), ("POST", "/g:abort"), ("PATCH", "/g")]


def test_a_change_names_the_version_it_was_decided_on(two: TwoReleases) -> None:
    bare = {**OPERATOR, "idempotency-key": "k"}
    assert two.control("POST", "", two.plan()).headers["etag"] == '"1"'
    for method, path in CHANGES:
        body = b'{"weight_ppm":1}' if method == "PATCH" else None
        missing = two.stack.ask(method, f"/v1/releases{path}", body, bare)
        assert problem(missing) == (428, "precondition-required", None)
        given = {"weight_ppm": 1} if method == "PATCH" else None
        for stale in ('"7"', "7", "weak"):
            assert problem(two.control(method, path, given, if_match=stale)) == (412, "version-conflict", None)
    assert two.control("POST", "/g:abort", if_match='"1"').headers["etag"] == '"2"'


def test_a_change_has_a_key_of_its_own(two: TwoReleases) -> None:
    plan = json.dumps(two.plan()).encode()
    for method, path, body in (("POST", "", plan), ("POST", "/g:abort", None), ("PATCH", "/g", b"{}")):
        missing = two.stack.ask(method, f"/v1/releases{path}", body, {**OPERATOR, "if-match": "*"})
        assert problem(missing) == (400, "idempotency-key-missing", None)
    long = two.control("POST", "/g:abort", idempotency_key="k" * 257)
    assert problem(long) == (422, "invalid-request", "Idempotency-Key")
    assert two.control("POST", "", two.plan(), idempotency_key="one").status == 201
    assert problem(two.control("POST", "", two.plan(salt="x"), idempotency_key="one")) == (
        422, "idempotency-key-reused", None,
    )  # fmt: skip


def test_the_same_change_asked_twice_is_made_once(two: TwoReleases) -> None:
    created = [two.control("POST", "", two.plan(), idempotency_key="k0") for _ in range(2)]
    assert [answer.status for answer in created] == [201, 201]
    eventually(lambda: two.control("POST", "/g:start").status == 200)
    replies = [two.control("PATCH", "/g", {"weight_ppm": 310_000}, idempotency_key="k1") for _ in range(2)]

    for first, again in (created, replies):
        assert (first.body, first.headers["etag"]) == (again.body, again.headers["etag"])
        assert ("idempotent-replay" in first.headers, again.headers["idempotent-replay"]) == (False, "true")
    assert [e["action"] for e in two.control("GET", "/g/events").body["events"]] == ["create", "start", "weight"]


def test_a_change_that_was_refused_may_be_asked_again_with_the_same_key(two: TwoReleases) -> None:
    refused = two.control("POST", "/g:abort", idempotency_key="k")
    assert problem(refused) == (404, "unknown-release", None)
    two.control("POST", "", two.plan())

    assert two.control("POST", "/g:abort", idempotency_key="k").body["state"] == "aborted"


def test_a_change_that_is_being_made_is_not_made_again_beside_it(two: TwoReleases) -> None:
    with connect(two.stack.redis.url) as redis:
        begun = {"fingerprint": hashlib.sha256(b"").hexdigest() + "*"}
        redis.set(f"{STACK}:gray:reply:POST /v1/releases/g:abort k", json.dumps(begun))
    busy = two.control("POST", "/g:abort", idempotency_key="k")

    assert problem(busy) == (409, "in-progress", None)
    assert busy.headers["retry-after"] == "1"


def test_the_description_has_every_route_with_its_bodies_replies_and_problems(two: TwoReleases) -> None:
    document = two.stack.get("/openapi.json").body
    one = "/v1/releases/{name}"
    actions = [f"{one}:{action}" for action in ("start", "pause", "resume", "promote", "abort", "rollback")]
    for path in ("/v1/releases", one, *actions, f"{one}/analysis", f"{one}/events", f"{one}/assignment"):
        for method, operation in document["paths"][path].items():
            codes = set(operation["responses"])
            assert {"401", "503"} <= codes
            assert all("schema" in next(iter(r["content"].values())) for r in operation["responses"].values())
            headers = {p["name"] for p in operation["parameters"] if p["in"] == "header"}
            if method == "get":
                assert headers == set()
            else:
                assert "requestBody" in operation
                assert ("If-Match" in headers) == ("428" in codes) == (path != "/v1/releases")
                assert "Idempotency-Key" in headers
    schemas = document["components"]["schemas"]
    assert {"Plan", "Step", "Gate", "ReleaseView", "Acknowledged", "Analysis", "Finding", "ProblemBody"} <= set(schemas)
    assert "shadow_ppm" in schemas["Step"]["properties"]
    refs = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert refs <= set(schemas)


def test_changes_are_streamed_to_whoever_watches(two: TwoReleases) -> None:
    two.started()
    connection = http.client.HTTPConnection("127.0.0.1", two.stack.port, timeout=10)
    connection.request("GET", "/v1/releases/g/events", headers={**OPERATOR, "accept": "text/event-stream"})
    reply = connection.getresponse()
    try:
        lines: list[str] = []
        while sum(line == "event: change" for line in lines) < 2:
            lines.append(reply.readline().decode().strip())
        two.control("POST", "/g:pause", {"why": "lunch"})
        while not lines[-1].startswith("data: ") or '"pause"' not in lines[-1]:
            lines.append(reply.readline().decode().strip())
    finally:
        connection.close()

    assert json.loads(lines[-1].removeprefix("data: "))["why"] == "lunch"


def test_while_redis_is_away_the_split_stands_still_and_requests_go_on(two: TwoReleases) -> None:
    two.started()
    before = {i: two.stack.recommend(user_id=f"v{i}").body["release"]["arm"] for i in range(30)}
    two.stack.redis.stop()

    found = {i: two.stack.recommend(user_id=f"v{i}") for i in range(30)}
    assert all(answer.status == 200 for answer in found.values())
    assert {i: answer.body["release"]["arm"] for i, answer in found.items()} == before
    refused = two.control("POST", "/g:abort")
    assert (refused.status, refused.body["type"]) == (503, "/problems/redis-unavailable")
