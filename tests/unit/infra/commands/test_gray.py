"""`trirank release start` before and around what the gateway does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.commands import gray
from infra.errors import InvalidInput


class _Gateway:
    """Answers as the release API does, and notes what it was asked."""

    def __init__(self, releases: list[dict[str, Any]], refusals: list[str]) -> None:
        self.releases = releases
        self.refusals = refusals
        self.asked: list[str] = []

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        self.asked.append(method)
        return {"releases": self.releases} if method == "GET" else {"name": body["name"]}

    def change(self, action: str, why: str) -> dict[str, Any]:
        self.asked.append(action)
        if self.refusals:
            raise gray._Refused(self.refusals.pop(0), "not yet")
        return {"name": "g"}


def _start(monkeypatch: pytest.MonkeyPatch, gateway: _Gateway, **given: Any) -> None:
    release = SimpleNamespace(manifest=SimpleNamespace(name="b"))
    monkeypatch.setattr(gray, "_Api", lambda home: gateway)
    monkeypatch.setattr(gray, "read_release", lambda path: release)
    monkeypatch.setattr(gray, "_line", lambda now: now["name"])
    monkeypatch.setattr(gray, "_serving", lambda home: "a")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    gray.start(Path("/releases/b"), **given)


def _draft(path: str) -> dict[str, Any]:
    plan = {"stable": "a", "candidate": "b", "path": path}
    return {"name": "g", "state": "draft", "serving": "a", "plan": plan}


def test_a_start_waits_while_the_tiers_or_redis_are_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = _Gateway([], ["/problems/release-not-ready", "/problems/redis-unavailable"])
    _start(monkeypatch, gateway)
    assert gateway.asked == ["GET", "POST", "start", "start", "start"]


def test_any_other_refusal_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gray._Refused, match="not yet"):
        _start(monkeypatch, _Gateway([], ["/problems/conflict"]))


def test_a_draft_of_the_same_release_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = _Gateway([_draft("/releases/b")], [])
    _start(monkeypatch, gateway)
    assert gateway.asked == ["GET", "start"]


def test_a_draft_of_another_directory_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = _Gateway([_draft("/elsewhere/b")], [])
    _start(monkeypatch, gateway)
    assert gateway.asked == ["GET", "POST", "start"]


@pytest.mark.parametrize(("text", "says"), [(None, "No such file"), ("{steps", "no JSON"), ("[1]", "no JSON object")])
def test_a_plan_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, says: str
) -> None:
    plan = tmp_path / "plan.json"
    if text is not None:
        plan.write_text(text)
    with pytest.raises(InvalidInput, match=says):
        _start(monkeypatch, _Gateway([], []), plan=plan)
