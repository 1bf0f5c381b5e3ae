"""Changes of a gray release over HTTP: made once, on the version they were decided on, and every refusal."""

from __future__ import annotations

import hashlib
import http.client
import json
import re

from infra.redis import connect
from tests.gateway_stack import STACK, TOKEN, Answer
from tests.support import eventually
from tests.two_releases import OPERATOR, TwoReleases


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
