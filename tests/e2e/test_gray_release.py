"""The whole story on a running stack: a broken release is taken back by itself, a good one goes up and back."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.release import Release, read_release
from tests.clients import clients
from tests.derived_release import derived_release
from tests.running_stack import RunningStack, trirank
from tests.support import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

CLIENTS = 2
PLAN: dict[str, Any] = {
    "steps": [{"weight_ppm": weight, "hold_s": 2, "min_samples": 30} for weight in (200_000, 500_000)],
    "gates": [
        {"metric": "error_share", "limit": 0.01},
        {"metric": "degraded_share", "limit": 0.2},
    ],
}

# The same, tried in the shadow before anybody sees it; the same models show the same items in the same order.
SHADOWED = {
    "steps": [{"weight_ppm": 0, "shadow_ppm": 1_000_000, "hold_s": 0, "min_samples": 20}, *PLAN["steps"]],
    "gates": [
        *PLAN["gates"],
        {"metric": "overlap_at_k", "kind": "minimum", "limit": 0.9, "min_samples": 20},
        {"metric": "rank_correlation", "kind": "minimum", "limit": 0.9, "min_samples": 20},
    ],
}


@pytest.fixture(scope="module")
def first(release_dir: Path) -> Release:
    return read_release(release_dir)


@pytest.fixture(scope="module")
def running(release_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    stack = RunningStack(release_dir, tmp_path_factory.mktemp("gray"))
    yield stack.start()
    assert stack.stop() == 0, stack.log


class Traffic:
    """Clients that ask without a pause; every reply is checked."""

    def __init__(self, stack: RunningStack, releases: dict[str, Release]) -> None:
        self._stack = stack
        self._releases = releases
        self._stopping = threading.Event()
        self.releases: Counter[str] = Counter()
        self.failed: list[object] = []
        self.mixed: list[object] = []

    def ask(self, user: str) -> str:
        answer = self._stack.post("/v1/recommend", {"user_id": user, "k": 5, "deadline_ms": 2000})
        if answer.status != 200:
            self.failed.append(answer)
            return ""
        body = answer.body
        manifest = self._releases[body["release"]["id"]].manifest
        found = body["versions"]
        if not (
            found["generation"] == manifest.generation
            and manifest.files["edge/mlp.fp32.onnx"].startswith(found["edge"])
            and manifest.files["rerank/bst.fp32.onnx"].startswith(found["rerank"])
        ):
            self.mixed.append(body)
        self.releases[body["release"]["id"]] += 1
        return str(body["release"]["id"])

    @contextmanager
    def flowing(self) -> Iterator[Traffic]:
        """While the block runs."""
        with clients(self._stopping, (partial(self._client, n) for n in range(CLIENTS))):
            yield self

    def _client(self, number: int) -> None:
        at = number
        while not self._stopping.is_set():
            self.ask(f"someone-{at}")
            at += CLIENTS


def command(stack: RunningStack, *arguments: str) -> str:
    done = trirank("release", *arguments, "--home", str(stack.home))
    assert done.returncode == 0, done.stderr
    return done.stdout


def state(stack: RunningStack) -> str:
    return str(json.loads(command(stack, "status", "--json"))["state"])


def test_a_release_with_a_broken_head_is_aborted_by_itself(
    running: RunningStack, first: Release, tmp_path: Path
) -> None:
    broken = derived_release(first, tmp_path / "broken", broken=True)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    traffic = Traffic(running, {first.manifest.name: first, "broken": broken})
    with traffic.flowing():
        started = command(running, "start", str(broken.path), "--plan", str(tmp_path / "plan.json"), "--name", "bad")
        assert "bad: running, step 1 of 2, 20 %" in started
        eventually(lambda: state(running) == "aborted", timeout_s=120, every_s=0.5)
        before = traffic.releases["broken"]
        eventually(lambda: traffic.releases[first.manifest.name] > 50, timeout_s=60)
        assert traffic.releases["broken"] - before <= CLIENTS

    assert (traffic.failed, traffic.mixed) == ([], [])
    history = command(running, "history")
    assert "abort" in history
    assert "degraded_share: " in history


def test_a_good_release_goes_to_everybody_and_back_without_a_failed_request(
    running: RunningStack, first: Release, tmp_path: Path
) -> None:
    good = derived_release(first, tmp_path / "good")
    (tmp_path / "plan.json").write_text(json.dumps(SHADOWED))
    traffic = Traffic(running, {first.manifest.name: first, "good": good})
    with traffic.flowing():
        command(running, "start", str(good.path), "--plan", str(tmp_path / "plan.json"), "--name", "better")
        told = command(running, "why", "someone-1")
        assert traffic.ask("someone-1") in told
        eventually(lambda: "ready to promote" in command(running, "status"), timeout_s=180, every_s=0.5)
        promoted = command(running, "promote", "--why", "all gates healthy")
        assert "better: promoted" in promoted
        assert "2 of 2 gateways" in promoted
        assert {traffic.ask(f"u{i}") for i in range(20)} == {"good"}
        back = command(running, "rollback", "--why", "to see that it works")
        assert "2 of 2 gateways" in back
        assert {traffic.ask(f"u{i}") for i in range(20)} == {first.manifest.name}

    assert (traffic.failed, traffic.mixed) == ([], [])
    assert traffic.releases["good"] > 20
    actions = [line.split()[3] for line in command(running, "history").splitlines()]
    assert actions == ["create", "start", "step", "step", "promote", "rollback"]
