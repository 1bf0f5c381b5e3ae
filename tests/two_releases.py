"""The gateway's stack with a second release beside it, and an operator who shows the control token."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.release import Release
from tests.gateway_stack import TOKEN, Answer, GatewayStack
from tests.support import eventually
from tests.tiny_release import write_tiny_release

OPERATOR = {"authorization": f"Bearer {TOKEN}", "x-operator": "ann"}
HARD = [{"metric": "error_share", "limit": 0.01}, {"metric": "degraded_share", "limit": 0.05}]


class TwoReleases:
    """Release `tiny` serves, `tiny-b` is ready beside it; `tiers` are those of `tiny-b`."""

    def __init__(self, directory: Path, **changed: Any) -> None:
        (directory / "a").mkdir()
        self.stack = GatewayStack(directory / "a", **changed)
        (directory / "b").mkdir()
        self.other: Release = write_tiny_release(directory / "b" / "release", name="tiny-b", poison=True)

    def start(self) -> TwoReleases:
        """Start all tiers of both releases."""
        self.stack.start()
        self.tiers = {role: self.stack.tier(role, 7, self.other, shard=0) for role in ("shard", "edge", "rerank")}
        self.stack.more += self.tiers.values()
        for tier in self.tiers.values():
            tier.start()
        return self

    def plan(self, **changed: Any) -> dict[str, Any]:
        """A plan of two steps named `g`."""
        return {
            "name": "g", "stable": "tiny", "candidate": "tiny-b", "path": str(self.other.path), "gates": HARD,
            "steps": [{"weight_ppm": w, "hold_s": 0, "min_samples": 30} for w in (300_000, 500_000)], **changed,
        }  # fmt: skip

    def control(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        """A call of the release API; a change has a key of its own and takes the version as it is, unless told."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if method != "GET":
            named = {"if-match": "*", "idempotency-key": uuid.uuid4().hex, **named}
        return self.stack.ask(
            method, f"/v1/releases{path}", None if body is None else json.dumps(body).encode(), {**OPERATOR, **named}
        )

    def started(self, **changed: Any) -> Answer:
        """Create and start the plan; the reply to the start."""
        created = self.control("POST", "", self.plan(**changed))
        assert created.status == 201, created.body

        def start() -> Answer | None:
            answer = self.control("POST", "/g:start", {"why": "go"})
            return answer if answer.status == 200 else None

        return eventually(start)  # type: ignore[return-value]

    def ask(self, users: Iterable[int], **body: Any) -> list[Answer]:
        """One recommend request per user."""
        return [self.stack.recommend(user_id=f"v{i}", **body) for i in users]

    def mixed(self, answer: Answer) -> bool:
        """Whether parts of two releases made this answer."""
        release = self.other if answer.body["release"]["id"] == "tiny-b" else self.stack.release
        found, manifest = answer.body["versions"], release.manifest
        return not (
            found["generation"] == manifest.generation
            and manifest.files["edge/mlp.fp32.onnx"].startswith(found["edge"])
            and manifest.files["rerank/bst.fp32.onnx"].startswith(found["rerank"])
        )

    def counted(self, metric: str, label: str) -> float:
        """The sum of a counter's children with this label value."""
        lines = self.stack.get("/metrics").body.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(metric) and f'"{label}"' in line)

    @contextmanager
    def stuck(self) -> Iterator[None]:
        """While the block runs the gateway waits for stable's reranker with a request of a long deadline."""
        rerank = self.stack.tiers["rerank"]
        before = len(rerank.requests)
        rerank.hold.clear()
        waiting = threading.Thread(target=self.stack.recommend, kwargs={"deadline_ms": 15_000})
        waiting.start()
        try:
            eventually(lambda: len(rerank.requests) > before)
            yield
        finally:
            rerank.hold.set()
            waiting.join()


def versions(answer: Answer) -> tuple[str, str, int]:
    """Release, arm and generation of an answer."""
    body = answer.body
    return body["release"]["id"], body["release"]["arm"], body["versions"]["generation"]
