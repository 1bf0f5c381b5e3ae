"""A stranger asks a running stack for films."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from feature_service.hashing import ITEM, key_of
from infra.release import Release, read_release
from tests.running_stack import Answer, RunningStack, trirank
from tests.support import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def release(release_dir: Path) -> Release:
    return read_release(release_dir)


def _items(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    return [item["item_id"] for item in answer.body["items"]]


def test_the_printed_curl_line_works_as_pasted(stack: RunningStack) -> None:
    line = re.search(r"^\s*(curl .*)$", stack.log, re.MULTILINE)
    assert line is not None, stack.log
    done = subprocess.run(shlex.split(line[1]), capture_output=True, text=True, timeout=10, check=True)
    assert '"items":[{' in done.stdout


def test_a_known_user_gets_ten_films_with_everything_a_reader_wants_to_know(
    stack: RunningStack, release: Release
) -> None:
    answer = stack.post("/v1/recommend", {"user_id": "196", "k": 10, "explain": True})
    body = answer.body
    titles = {item.item_id: item.title for item in release.catalogue()}
    assert [item["rank"] for item in body["items"]] == list(range(1, 11))
    assert all(item["title"] == titles[item["item_id"]] for item in body["items"])
    assert all(item["stage"] == "rerank" for item in body["items"])
    scores = [item["score"] for item in body["items"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert body["degraded"] == {"value": False, "reasons": []}
    assert body["release"]["id"] == release.manifest.name
    assert body["release"]["arm"] == "stable"
    assert body["versions"]["generation"] == release.manifest.generation
    assert body["versions"]["schema"] == release.manifest.schema_fingerprint
    assert body["coverage"]["user"] == "known"
    assert body["coverage"]["candidates"] == 500
    assert body["coverage"]["missing_ids"] == []
    assert body["timing_ms"]["total"] > 0


def test_the_same_id_as_a_number_is_the_same_user(stack: RunningStack) -> None:
    assert _items(stack.post("/v1/recommend", {"user_id": 196, "k": 5})) == _items(
        stack.post("/v1/recommend", {"user_id": "196", "k": 5})
    )


def test_an_unknown_user_gets_a_bucket_answer_and_an_anonymous_one_an_answer(stack: RunningStack) -> None:
    unknown = stack.post("/v1/recommend", {"user_id": "nobody has this id", "k": 7})
    anonymous = stack.post("/v1/recommend", {"k": 7})
    assert unknown.body["coverage"]["user"] == "bucket"
    assert anonymous.body["coverage"]["user"] == "anonymous"
    assert len(_items(unknown)) == len(_items(anonymous)) == 7


def test_nothing_from_the_history_or_the_exclude_list_is_recommended(stack: RunningStack, release: Release) -> None:
    user = next(u for u in release.users() if len(u.history_items) > 10)
    first = _items(stack.post("/v1/recommend", {"user_id": user.user_id, "k": 50}))
    second = _items(stack.post("/v1/recommend", {"user_id": user.user_id, "k": 50, "exclude": first[:10]}))
    newest = set(user.history_items[-50:])
    assert not newest & set(first)
    assert not set(first[:10]) & set(second)


def test_the_served_scores_are_the_trained_models_scores_for_200_recorded_requests(
    stack: RunningStack, release: Release
) -> None:
    from tests.e2e.histories import put_history

    requests = release.requests()
    assert len(requests) == 200
    worst = 0.0
    for index, recorded in enumerate(requests):
        put_history(stack, release, recorded)
        body = {
            "user_id": recorded.user_id, "candidates": recorded.candidates, "k": len(recorded.candidates),
            "context": recorded.attributes, "deadline_ms": 5000,
        }  # fmt: skip
        answer = stack.post("/v1/rank", body)
        assert answer.status == 200, answer.body
        assert answer.body["degraded"]["value"] is False, (index, answer.body["degraded"])
        expected = {c: 1 / (1 + math.exp(-x)) for c, x in zip(recorded.candidates, recorded.rerank_logits, strict=True)}
        assert len(answer.body["items"]) == len(recorded.candidates)
        worst = max(worst, *(abs(item["score"] - expected[item["item_id"]]) for item in answer.body["items"]))
    print(f"largest difference over {len(requests)} requests: {worst:.2e}")
    assert worst < 1e-4


def test_a_published_item_row_changes_the_ranking_and_the_delay_is_printed(
    stack: RunningStack, release: Release, tmp_path: Path
) -> None:
    before = stack.post("/v1/recommend", {"user_id": "196", "k": 20})
    moved = _items(before)[0]
    rows = release.table("item")
    row = rows.rows[rows.keys == key_of(ITEM, moved)][0]
    np.savez(tmp_path / "moved.npz", ids=np.array([moved]), rows=-4 * row[None])
    done = trirank(
        "updates", "publish", str(tmp_path / "moved.npz"), "--table", "item", "--home", str(stack.home), "--wait"
    )
    try:
        assert done.returncode == 0, done.stderr
        assert re.search(r"visible after [\d.]+ ms", done.stdout), done.stdout
        after = stack.post("/v1/recommend", {"user_id": "196", "k": 20})
        assert _items(after) != _items(before)
        assert after.body["versions"]["watermark_ms"] > (before.body["versions"]["watermark_ms"] or 0)
    finally:
        np.savez(tmp_path / "back.npz", ids=np.array([moved]), rows=row[None])
        back = trirank(
            "updates", "publish", str(tmp_path / "back.npz"), "--table", "item", "--home", str(stack.home), "--wait"
        )
        assert back.returncode == 0, back.stderr
    assert _items(stack.post("/v1/recommend", {"user_id": "196", "k": 20})) == _items(before)


def test_feedback_changes_the_history_and_the_next_ranking(stack: RunningStack, release: Release) -> None:
    user = f"newcomer-{time.time_ns()}"
    candidates = [item.item_id for item in release.catalogue()[:100]]
    rank = {"user_id": user, "candidates": candidates, "k": 100}
    before = stack.post("/v1/rank", rank)
    children = [i.item_id for i in release.catalogue() if "Children's" in i.categories][:5]
    events = [{"user_id": user, "item_id": item, "event": "click"} for item in children]
    accepted = stack.post("/v1/feedback", {"events": events})
    assert accepted.status == 202, accepted.body
    asked_s = time.monotonic()
    after = eventually(lambda: (a := stack.post("/v1/rank", rank)) and _items(a) != _items(before) and a)
    print(f"feedback accepted -> different ranking: {(time.monotonic() - asked_s) * 1e3:.0f} ms")
    assert after.body["degraded"]["value"] is False


def test_an_item_that_arrives_by_the_stream_is_recommended_with_its_title(
    stack: RunningStack, release: Release, tmp_path: Path
) -> None:
    rows = release.table("item")
    best = _items(stack.post("/v1/recommend", {"user_id": "1", "k": 1}))[0]
    twin = rows.rows[rows.keys == key_of(ITEM, best)][0]
    new_id = f"premiere-{time.time_ns()}"
    np.savez(tmp_path / "new.npz", ids=np.array([new_id]), rows=twin[None] * 1.2, titles=np.array(["The Premiere"]))
    done = trirank(
        "updates", "publish", str(tmp_path / "new.npz"), "--table", "item", "--home", str(stack.home), "--wait"
    )
    assert done.returncode == 0, done.stderr

    def recommended() -> dict[str, object] | None:
        items = stack.post("/v1/recommend", {"user_id": "1", "k": 500, "explain": True}).body["items"]
        return next((item for item in items if item["item_id"] == new_id), None)

    assert eventually(recommended)["title"] == "The Premiere"
