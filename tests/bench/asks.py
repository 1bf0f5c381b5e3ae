"""The requests of the benchmark, and the check that every system answers them alike.

Each asks for 20 of 100 reranked of 500 recalled films. Nine in ten users are known, with the history the release has of
them; the others are nobody has seen. The deadline is long on purpose: a system may be slow, but not skip a stage.
"""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from infra.release import read_release
from tests.bench.load import PATH

N_REQUESTS = 2000
N_CHECKED = 20
SCORE_TOLERANCE = 1e-3
K = 20
DEADLINE_MS = 30_000
_SEED = 20


def bodies(release: Path) -> list[bytes]:
    """JSON bodies, always the same ones for the same release."""
    pick = random.Random(_SEED)
    users = [user.user_id for user in read_release(release).users()]
    chosen = [pick.choice(users) if i % 10 else f"newcomer-{i}" for i in range(N_REQUESTS)]
    return [msgspec.json.encode({"user_id": user, "k": K, "deadline_ms": DEADLINE_MS}) for user in chosen]


def ask(url: str, requests: Sequence[bytes]) -> list[dict[str, Any]]:
    """Complete replies to the first requests. Raises RuntimeError for one that is no full answer."""
    replies = []
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_MS / 1000)
    try:
        for body in requests[:N_CHECKED]:
            connection.request("POST", PATH, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            raw = answer.read()
            reply = json.loads(raw) if answer.status == 200 else {}
            if not reply or reply["degraded"]["value"] or len(reply["items"]) != K:
                raise RuntimeError(f"{url}: {body.decode()} was answered {answer.status} {raw.decode()[:500]}")
            replies.append(reply)
    finally:
        connection.close()
    return replies


def differences(expected: Sequence[dict[str, Any]], got: Sequence[dict[str, Any]]) -> list[str]:
    """Where two systems disagree: other scores, users or numbers of candidates, or items that are not near-ties."""
    found = []
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        covered, also = one["coverage"], other["coverage"]
        found += [
            f"request {number}: {field} {covered[field]!r} and {also[field]!r}"
            for field in ("user", "candidates", "scored")
            if covered[field] != also[field]
        ]
        found += [f"request {number}: {text}" for text in _other_items(one["items"], other["items"])]
    return found


def _other_items(expected: Sequence[dict[str, Any]], got: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    scores = {item["item_id"]: item["score"] for item in got}
    lowest = min(scores.values())
    for one, other in zip(expected, got, strict=True):
        if abs(one["score"] - other["score"]) > SCORE_TOLERANCE:
            found.append(f"place {one['rank']} has scores {one['score']:.5f} and {other['score']:.5f}")
        # An item may have changed places with one of the same score, at the end also with one that is not shown.
        if abs(scores.get(one["item_id"], lowest) - one["score"]) > SCORE_TOLERANCE:
            found.append(f"item {one['item_id']} of place {one['rank']} is scored differently or missing")
    return found
