"""Which arm serves a request: a pure function of the plan and the unit (a user, or whatever stands for him).

The bucket of a unit is `(xxh3_64(salt NUL unit) * 1_000_000) >> 64`, in parts per million: the same in every
gateway and after every restart. Reads no clock, holds no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import xxhash

PPM = 1_000_000

Arm = Literal["stable", "candidate"]
Reason = Literal["no_gray_release"]


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What the gateways know of the gray release. Without one, `stable` serves everybody."""

    stable: str
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The release that serves one request, and why."""

    release: str
    arm: Arm
    bucket_ppm: int
    reason: Reason


def bucket_ppm(salt: str, unit: str) -> int:
    """The unit's place in [0, 1_000_000); uniform over units and independent between salts."""
    return xxhash.xxh3_64_intdigest(f"{salt}\0{unit}".encode()) * PPM >> 64


def assign(plan: SplitPlan, unit: str) -> Assignment:
    """The arm of this unit under this plan."""
    return Assignment(plan.stable, "stable", bucket_ppm(plan.salt, unit), "no_gray_release")
