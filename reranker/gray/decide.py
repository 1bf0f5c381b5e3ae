"""What to do with a gray release now: hold, step, promote, pause or abort, and the sentence why. Pure.

While the candidate release is shown to nobody (weight 0) shadow traffic is judged; gates it says nothing about wait.
Precedence: a failed gate wins over everything, a sample ratio mismatch over every healthy gate, missing samples over
time that has passed. Invariant: no step and no promotion without the samples of the step and every gate healthy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from reranker.gray.gates import judge, mismatch, not_shown
from reranker.gray.readings import Finding, Readings
from reranker.gray.split import PPM
from reranker.gray.state import GrayRelease, Verdict

Act = Literal["hold", "step", "promote", "pause", "abort"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The act, the diagnosis behind it, and one finding per gate (the sample ratio last)."""

    act: Act
    verdict: Verdict
    sentence: str
    findings: tuple[Finding, ...]


def decide(release: GrayRelease, readings: Readings, now_us: int) -> Decision:
    """The decision for a running release; one that is not running is diagnosed and held."""
    if unseen := release.weight_ppm == 0:
        readings = readings.in_shadow()
    judged = ((not_shown(gate) if unseen else None) or judge(gate, readings) for gate in release.plan.gates)
    findings = (*judged, mismatch(readings.total))
    verdict, sentence = _diagnosis(release, readings, findings)
    act: Act = "hold"
    if release.state != "running":
        sentence = f"{release.state}; {sentence}"
    elif verdict == "unhealthy":
        act = release.plan.on_fail
    elif verdict == "healthy":
        act, sentence = _forward(release, now_us, sentence)
    return Decision(act, verdict, sentence, findings)


def _diagnosis(release: GrayRelease, readings: Readings, findings: Sequence[Finding]) -> tuple[Verdict, str]:
    acted = [finding for finding in findings[:-1] if not finding.dry_run and not finding.waits]
    if failed := next((finding for finding in acted if finding.verdict == "unhealthy"), None):
        return "unhealthy", failed.sentence
    if findings[-1].verdict == "unhealthy":
        return "inconclusive", findings[-1].sentence
    needed, found = release.plan.steps[release.step].min_samples, _samples(release, readings)
    if found < needed:
        return "inconclusive", f"{found} of {needed} requests of this step"
    if unclear := next((finding for finding in acted if finding.verdict == "inconclusive"), None):
        return "inconclusive", unclear.sentence
    return "healthy", f"all {len(acted)} gates are healthy after {found} requests of this step"


def _samples(release: GrayRelease, readings: Readings) -> int:
    """Requests of the smaller sample; where everybody has the candidate release, its own."""
    step = readings.step
    if release.weight_ppm == 0:
        return step.shadow.requests
    if 2 * release.weight_ppm > PPM - release.plan.holdout_ppm and not step.baseline.requests:
        return step.candidate.requests
    return min(step.compared.requests, step.baseline.requests)


def _forward(release: GrayRelease, now_us: int, sentence: str) -> tuple[Act, str]:
    left_s = release.plan.steps[release.step].hold_s - (now_us - release.since_us) / 1e6
    if left_s > 0:
        return "hold", f"{sentence}; the step is held for another {left_s:.0f} s"
    if not release.at_last_step:
        return "step", sentence
    if release.plan.auto_promote:
        return "promote", sentence
    return "hold", f"{sentence}; ready to promote"
