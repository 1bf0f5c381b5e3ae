"""Bodies of the release API beside the plan itself: what comes in, and what goes out."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from reranker.gray.audit import Entry
from reranker.gray.control import Acknowledged
from reranker.gray.plan import Plan
from reranker.gray.split import PPM, Arm, Reason
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
    """A gray release as operators see it; `version` is what If-Match takes, `generation` that of the split.
    `acknowledged` comes with the reply to a change that every gateway has to follow."""

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
    acknowledged: Acknowledged | UnsetType = UNSET

    @classmethod
    def of(cls, current: Current, acknowledged: Acknowledged | UnsetType = UNSET) -> ReleaseView:
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
            acknowledged=acknowledged,
        )


class ReleaseList(msgspec.Struct, frozen=True):
    """The current gray release, or none."""

    releases: list[ReleaseView]


class EventList(msgspec.Struct, frozen=True):
    """The audit log of one gray release, oldest first."""

    events: list[Entry]


class AssignmentView(msgspec.Struct, frozen=True, kw_only=True):
    """Which arm a user has and why; the candidate release has the buckets below `weight_ppm`. `compared`: his requests
    are in one of the two samples of the gates."""

    user_id: str
    release: str
    arm: Arm
    bucket_ppm: int
    reason: Reason
    compared: bool
    weight_ppm: int
    version: int
