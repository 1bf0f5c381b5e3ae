"""Bodies of the release API beside the plan itself."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from reranker.gray.plan import Plan
from reranker.gray.split import PPM
from reranker.gray.state import State
from reranker.gray.store import Current

Why = Annotated[str, Meta(max_length=500)]


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of an action; may be left out."""

    why: Why = ""


class Weight(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of `PATCH /v1/releases/{id}`."""

    weight_ppm: Annotated[int, Meta(ge=0, le=PPM)]
    why: Why = ""


class ReleaseView(msgspec.Struct, frozen=True, kw_only=True):
    """A gray release as operators see it; `version` is what If-Match takes, `generation` that of the split."""

    name: str
    state: State
    version: int
    generation: int
    step: int
    steps: int
    weight_ppm: int
    since_us: int
    reason: str
    serving: str
    plan: Plan

    @classmethod
    def of(cls, current: Current) -> ReleaseView:
        """The view of what is in force; there has to be a release."""
        release, split = current.release, current.split
        if release is None or split is None:
            raise ValueError("there is no gray release")
        return cls(
            name=release.plan.name,
            state=release.state,
            version=release.version,
            generation=current.version,
            step=release.step + 1,
            steps=len(release.plan.steps),
            weight_ppm=release.weight_ppm,
            since_us=release.since_us,
            reason=release.reason,
            serving=split.stable,
            plan=release.plan,
        )
