"""Which arm serves a request: a pure function of the split and the unit (a user, or whatever stands for him).

The bucket of a unit is `(xxh3_64(salt NUL unit) * 1_000_000) >> 64`, in parts per million: the same in every
gateway and after every restart. The candidate release holds the buckets [0, weight): a growing weight only adds units,
so nobody flips back and forth. The holdout is at the other end and never sees the candidate release; the baseline lies
before it. Baseline and the compared part of the candidate release are of equal size at every weight, so that a change
of weight never mixes different hours of the day into one of the two samples only. Reads no clock, holds no state.

    0            compared         weight            baseline       holdout     1_000_000
    |--candidate, compared--|--candidate--|--stable--|--stable, compared--|--stable--|
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import xxhash

PPM = 1_000_000

Arm = Literal["stable", "candidate"]
# How metrics tell requests apart: those of an arm, and those the candidate release scores for nobody.
Lane = Literal["stable", "candidate", "shadow"]
IdleReason = Literal["no_gray_release", "aborted", "promoted"]
Reason = Literal["no_gray_release", "aborted", "promoted", "split", "override", "holdout", "shadow", "fenced"]

_hash = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What the gateways know of the gray release. Without `candidate`, `stable` serves everybody.

    `shadow_ppm` of the requests stable answers are scored by the candidate release too, afterwards. `overrides` names
    users and the arm they have; `version` grows with every change of this stack's split; `epoch` is
    the version with which this gray release began, 0 without one.
    """

    stable: str
    salt: str = ""
    candidate: str | None = None
    weight_ppm: int = 0
    holdout_ppm: int = 0
    overrides: dict[str, Arm] = field(default_factory=dict)
    unit: str = "user_id"
    idle_reason: IdleReason = "no_gray_release"
    version: int = 0
    epoch: int = 0
    shadow_ppm: int = 0

    @property
    def compared_ppm(self) -> int:
        """Size of the baseline, and of the part of the candidate release it is compared with."""
        return min(self.weight_ppm, PPM - self.holdout_ppm - self.weight_ppm)


class Assignment(NamedTuple):
    """The release that serves one request, and why. `compared`: it belongs to one of the two samples of the gates.
    `epoch` is the gray release it counts for; 0: none, because there is none or the arm was forced. `shadow`: the
    answer is for nobody."""

    release: str
    arm: Arm
    bucket_ppm: int
    reason: Reason
    compared: bool = False
    epoch: int = 0
    shadow: bool = False

    @property
    def lane(self) -> Lane:
        """What metrics count the request as."""
        return "shadow" if self.shadow else self.arm


def bucket_ppm(salt: str, unit: str) -> int:
    """The unit's place in [0, 1_000_000); uniform over units and independent between salts."""
    return _hash(f"{salt}\0{unit}".encode()) * PPM >> 64


def assign(plan: SplitPlan, unit: str, user_id: str | None = None, forced: Arm | None = None) -> Assignment:
    """The arm of this unit under this plan.

    `forced` is the arm a caller with the control token asked for; it wins over the list of users, which wins over the
    split. Neither can bring back a candidate release that was aborted.
    """
    bucket = _hash(f"{plan.salt}\0{unit}".encode()) * PPM >> 64
    candidate = plan.candidate
    if candidate is None:
        return Assignment(plan.stable, "stable", bucket, plan.idle_reason)
    if forced is None and plan.overrides and user_id is not None:
        forced = plan.overrides.get(user_id)
    if forced is not None:
        return Assignment(candidate if forced == "candidate" else plan.stable, forced, bucket, "override")
    weight, end = plan.weight_ppm, PPM - plan.holdout_ppm
    size = end - weight if weight > end - weight else weight
    if bucket < weight:
        return Assignment(candidate, "candidate", bucket, "split", bucket < size, plan.epoch)
    if bucket >= end:
        return Assignment(plan.stable, "stable", bucket, "holdout", False, plan.epoch)
    return Assignment(plan.stable, "stable", bucket, "split", bucket >= end - size, plan.epoch)


def unit_of(
    kind: str, *, user_id: str | None, session_id: str | None, request_id: str, header: str | None = None
) -> str:
    """What the split is keyed by: what `kind` (user_id, session_id or header:NAME) says, else what there is.

    Without a user and a session only this one request is left.
    """
    if kind.startswith("header:") and header:
        return header
    first, second = (session_id, user_id) if kind == "session_id" else (user_id, session_id)
    return first or second or request_id
