"""The life of one gray release: draft -> running <-> paused -> promoted | aborted. Pure.

Refuses every change that is not in the table, a promotion whose gates have not just been found healthy, and a weight
over the plan's maximum. Invariant: `aborted` is final; a release that was promoted can only be rolled back, and then
is aborted too.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from infra.errors import Permanent
from reranker.gray.plan import Plan, check_weight, overrides_of
from reranker.gray.split import IdleReason, SplitPlan

State = Literal["draft", "running", "paused", "promoted", "aborted"]
Action = Literal["create", "start", "step", "weight", "pause", "resume", "promote", "abort", "rollback"]
Verdict = Literal["healthy", "unhealthy", "inconclusive"]

ALLOWED: dict[Action, dict[State, State]] = {
    "start": {"draft": "running"},
    "step": {"running": "running"},
    "weight": {"running": "running", "paused": "paused"},
    "pause": {"running": "paused"},
    "resume": {"paused": "running"},
    "promote": {"running": "promoted"},
    "abort": {"draft": "aborted", "running": "aborted", "paused": "aborted"},
    "rollback": {"promoted": "aborted"},
}

# How long an aborted release stays ready to come back.
KEEP_S = 60.0


class TransitionRefused(Permanent):
    """The release is in a state, or its gates have a verdict, that does not allow the change."""


class GrayRelease(msgspec.Struct, frozen=True, kw_only=True):
    """A gray release now. `version` grows with every change (it is the ETag); `since_us` is when the step began;
    `epoch` is the version of the split with which it was started; `stable_path` is the directory of the stable release
    when it came by a gray release itself, else empty: the stack was started with it. `base` is the release the stack
    was started with: to one started with another, this gray release means nothing."""

    plan: Plan
    state: State = "draft"
    step: int = 0
    weight_ppm: int = 0
    version: int = 1
    since_us: int = 0
    changed_us: int = 0
    reason: str = ""
    epoch: int = 0
    stable_path: str = ""
    base: str = ""

    @property
    def paths(self) -> dict[str, str]:
        """Directories of the releases that have to be served beside the one the stack was started with."""
        stable = {self.plan.stable: self.stable_path} if self.stable_path else {}
        return {**stable, self.plan.candidate: self.plan.path}

    @property
    def at_last_step(self) -> bool:
        """Whether only a promotion is left."""
        return self.step == len(self.plan.steps) - 1


def change(
    release: GrayRelease,
    action: Action,
    *,
    at_us: int,
    why: str,
    verdict: Verdict = "inconclusive",
    weight_ppm: int | None = None,
) -> GrayRelease:
    """The release after `action`. `verdict` is the newest diagnosis of its gates.

    Raises TransitionRefused, or InvalidInput for a weight over the maximum.
    """
    target = ALLOWED.get(action, {}).get(release.state)
    if target is None:
        raise TransitionRefused(f"a release that is {release.state} cannot {action}")
    step, weight, since_us = release.step, release.weight_ppm, release.since_us
    if action == "start":
        step, weight, since_us = 0, release.plan.steps[0].weight_ppm, at_us
    elif action == "step":
        step, weight, since_us = _next_step(release, verdict), release.plan.steps[release.step + 1].weight_ppm, at_us
    elif action == "weight":
        weight, since_us = _asked_weight(release, weight_ppm), at_us
    elif action == "resume":
        since_us = at_us  # the hold of a step begins again
    elif action == "promote":
        _check_promotion(release, verdict)
    if target in ("promoted", "aborted"):
        weight = 0
    return msgspec.structs.replace(
        release,
        state=target,
        step=step,
        weight_ppm=weight,
        version=release.version + 1,
        since_us=since_us,
        changed_us=at_us,
        reason=why,
    )


def split_of(release: GrayRelease, version: int) -> SplitPlan:
    """What the gateways have to do while the release is in this state."""
    plan = release.plan
    salt = plan.salt or plan.candidate
    if release.state in ("running", "paused"):
        return SplitPlan(
            stable=plan.stable,
            salt=salt,
            candidate=plan.candidate,
            weight_ppm=release.weight_ppm,
            holdout_ppm=plan.holdout_ppm,
            overrides=overrides_of(plan),
            unit=plan.unit,
            version=version,
            epoch=release.epoch or version,
            shadow_ppm=plan.steps[release.step].shadow_ppm,
        )
    serves = plan.candidate if release.state == "promoted" else plan.stable
    reasons: dict[State, IdleReason] = {"promoted": "promoted", "aborted": "aborted"}
    return SplitPlan(
        stable=serves,
        salt=salt,
        unit=plan.unit,
        idle_reason=reasons.get(release.state, "no_gray_release"),
        version=version,
    )


def wanted(release: GrayRelease | None, base: str, now_us: int) -> dict[str, str]:
    """Directories of the releases to be served beside `base`, by name."""
    if release is None:
        return {}
    paths = {name: path for name, path in release.paths.items() if name != base}
    if release.state == "aborted" and now_us - release.changed_us > KEEP_S * 1e6:
        paths.pop(release.plan.candidate, None)
    return paths


def _next_step(release: GrayRelease, verdict: Verdict) -> int:
    if verdict != "healthy":
        raise TransitionRefused(f"a step needs healthy gates; they are {verdict}")
    if release.at_last_step:
        raise TransitionRefused("this is the last step; what is left is to promote")
    return release.step + 1


def _asked_weight(release: GrayRelease, weight_ppm: int | None) -> int:
    if weight_ppm is None:
        raise TransitionRefused("no weight is given")
    check_weight(release.plan, weight_ppm)
    return weight_ppm


def _check_promotion(release: GrayRelease, verdict: Verdict) -> None:
    if verdict != "healthy":
        raise TransitionRefused(f"a promotion needs healthy gates; they are {verdict}")
    if not release.at_last_step:
        raise TransitionRefused(f"step {release.step + 1} of {len(release.plan.steps)}: the ramp is not at its end")
