"""What a decision is made of, and what it consists of: windows of figures in, findings out. Pure values.

A window is one span of time in five samples. Invariant: the baseline of a sample is as large as the sample, and of the
same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from reranker.gray.measures import Figures
from reranker.gray.state import Verdict

# A short span is looked at again every second for days: its chance of a false alarm has to be far below the gate's.
RECENT_ALPHA = 1e-6
RECENT_S = (10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Window:
    """One span of time: everything the candidate release answered, the two samples of equal size, and shadow traffic:
    what the candidate release would have answered, and what was answered to the same requests."""

    candidate: Figures = field(default_factory=Figures)
    compared: Figures = field(default_factory=Figures)
    baseline: Figures = field(default_factory=Figures)
    shadow: Figures = field(default_factory=Figures)
    shadowed: Figures = field(default_factory=Figures)

    def in_shadow(self) -> Window:
        """The window as if shadow traffic were all there is."""
        return Window(self.shadow, self.shadow, self.shadowed, self.shadow, self.shadowed)


@dataclass(frozen=True, slots=True)
class Readings:
    """What a decision is made of: the last `RECENT_S` seconds, this step, and everything since the start."""

    recent: tuple[Window, ...]
    step: Window
    total: Window

    def in_shadow(self) -> Readings:
        """The readings while the candidate release is shown to nobody."""
        recent = tuple(window.in_shadow() for window in self.recent)
        return Readings(recent, self.step.in_shadow(), self.total.in_shadow())

    def spans(self, alpha: float, step: Window) -> tuple[tuple[Window, float, str], ...]:
        """Where faults are looked for: the window, the chance of a false alarm, its name."""
        recent = zip(self.recent, RECENT_S, strict=True)
        return (*((window, RECENT_ALPHA, f"the last {s:.0f} s") for window, s in recent), (step, alpha, "this step"))


@dataclass(frozen=True, slots=True)
class Finding:
    """One gate's verdict. `candidate` and `baseline` are the metric's values, None where there is no sample; `waits`:
    it is about answers that are shown, and none is yet."""

    metric: str
    verdict: Verdict
    sentence: str
    dry_run: bool = False
    candidate: float | None = None
    baseline: float | None = None
    waits: bool = False
