"""Shadow traffic through a real gateway: scored by the candidate release for nobody, judged, dropped under load."""

from __future__ import annotations

from itertools import count, islice
from typing import Any

from tests.gateway_stack import broken
from tests.support import eventually
from tests.two_releases import HARD, TwoReleases, versions

QUALITY = [
    {"metric": "overlap_at_k", "kind": "minimum", "limit": 0.5, "min_samples": 20},
    {"metric": "rank_correlation", "kind": "minimum", "limit": 0.2, "min_samples": 20},
    {"metric": "score_drift", "limit": 0.2, "min_samples": 20},
    {"metric": "catalogue_share", "kind": "minimum", "limit": 0.5, "min_samples": 20, "dry_run": True},
]
STEPS = [
    {"weight_ppm": 0, "shadow_ppm": 1_000_000, "hold_s": 0, "min_samples": 30},
    {"weight_ppm": 300_000, "shadow_ppm": 500_000, "hold_s": 600, "min_samples": 30},
]


def findings(two: TwoReleases) -> dict[str, Any]:
    analysis = two.control("GET", "/g/analysis").body
    return {one["metric"]: one for one in analysis["decision"]["findings"]} if analysis else {}


def test_a_release_that_is_as_good_in_the_shadow_is_then_shown(two: TwoReleases) -> None:
    two.started(steps=STEPS, gates=[*HARD, *QUALITY])
    shown: set[str] = set()
    users = count()

    def stepped() -> bool:
        answers = two.ask(islice(users, 40))
        if two.control("GET", "/g").body["step"] == 2:
            return True
        shown.update(versions(answer)[0] for answer in answers)
        return False

    eventually(stepped, timeout_s=30)
    assert shown == {"tiny"}
    assert two.tiers["rerank"].requests
    assert "gateway_shadow_total" in two.stack.get("/metrics").body

    def judged() -> bool:
        two.ask(islice(users, 60))
        found = findings(two)
        return bool(found) and all(one["verdict"] == "healthy" for one in found.values())

    eventually(judged, timeout_s=30)
    assert findings(two)["overlap_at_k"]["candidate"] == 1.0


def test_a_release_that_fails_in_the_shadow_is_aborted_before_anybody_has_seen_it(two: TwoReleases) -> None:
    two.tiers["rerank"].damage = broken
    two.started(steps=STEPS)
    seen: set[str] = set()

    def aborted() -> bool:
        seen.update(versions(answer)[0] for answer in two.ask(range(40)))
        return bool(two.control("GET", "/g").body["state"] == "aborted")

    eventually(aborted, timeout_s=30)
    assert seen == {"tiny"}
    assert two.control("GET", "/g").body["reason"].startswith("degraded_share: ")


def test_copies_are_dropped_and_counted_while_answers_need_the_gateway(two: TwoReleases) -> None:
    two.started(steps=STEPS)
    asked, dropped = len(two.tiers["edge"].requests), two.counted("gateway_shadow_total", "busy")
    with two.stuck():
        eventually(lambda: two.ask(range(3), deadline_ms=50) and two.counted("gateway_shadow_total", "busy") > dropped)
        assert len(two.tiers["edge"].requests) == asked
    eventually(lambda: two.ask(range(3)) and len(two.tiers["edge"].requests) > asked)
