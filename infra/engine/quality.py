"""Whether a precision may be released: its scores on held-out requests beside those of FP32. Pure numpy.

One row per request: the item that was taken, against items that were not, by kind of negatives. An AUC loss is refused
when it is over its limit and cannot be chance: more than two standard errors of the paired difference, which the
same requests give (DeLong et al. 1988 with requests as clusters, Obuchowski 1997). What a test set of this size cannot
tell is therefore not refused by AUC, but logits, log-loss and the first 20 are compared request by request, and their
limits hold at any size. Refuses scores that are not finite. Invariant: FP32 beside itself differs by nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
BOOL = NDArray[np.bool_]

DEPTH = 20
# Standard errors of a difference that chance alone seldom reaches.
CERTAIN = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a precision may lose against FP32. `max_auc_loss_pct` and `max_log_loss_rise_pct` are relative."""

    max_auc_loss_pct: float
    max_log_loss_rise_pct: float
    max_logit_rmse: float
    min_overlap_at_20: float


@dataclass(frozen=True, slots=True)
class Scored:
    """Logits of one model: of the taken items f32[R], and of the others f32[R, n] per kind of negatives. `items`
    i64[R, 1 + n of all kinds] tells candidates of a request that are the same item: they are one in its first 20."""

    taken: F32
    negatives: Mapping[str, F32]
    items: I64 | None = None

    def by_request(self) -> F32:
        """All logits, f32[R, 1 + n of all kinds]."""
        return np.concatenate((self.taken[:, None], *self.negatives.values()), axis=1)


@dataclass(frozen=True, slots=True)
class Change:
    """One kind of negatives: AUC in FP32 and in this precision, the relative loss and what chance reaches of it
    (`CERTAIN` standard errors), and the relative rise of the log-loss; percentages."""

    auc_fp32: float
    auc: float
    auc_loss_pct: float
    auc_noise_pct: float
    log_loss_rise_pct: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One precision of one model beside FP32. `overlap_at_20`: share of the first 20 that is among FP32's first 20."""

    requests: int
    candidates: int
    finite: bool
    by_negatives: Mapping[str, Change]
    logit_rmse: float
    largest_logit_difference: float
    overlap_at_20: float

    def as_dict(self) -> dict[str, Any]:
        """For the report; 6 digits."""
        rounded: dict[str, Any] = _rounded(asdict(self))
        return rounded


def compare(fp32: Scored, other: Scored, log_loss_negatives: float) -> Comparison:
    """Compare the same requests; in the log-loss the negatives of a request weigh `log_loss_negatives` together."""
    before, after = fp32.by_request(), other.by_request()
    finite = bool(np.isfinite(after).all())
    difference = after.astype(np.float64) - before if finite else np.full(before.shape, np.inf)
    return Comparison(
        requests=before.shape[0],
        candidates=before.shape[1],
        finite=finite,
        by_negatives={
            kind: change(fp32.taken, negatives, other.taken, other.negatives[kind], log_loss_negatives)
            for kind, negatives in fp32.negatives.items()
            if finite
        },
        logit_rmse=float(np.sqrt((difference**2).mean())),
        largest_logit_difference=float(np.abs(difference).max()),
        overlap_at_20=overlap(before, after, DEPTH, fp32.items) if finite else 0.0,
    )


def refusals(comparison: Comparison, limits: Limits) -> list[str]:
    """Why this precision is not released; empty when it is."""
    if not comparison.finite:
        return ["scores are not finite on held-out requests"]
    found = []
    for kind, c in comparison.by_negatives.items():
        if c.auc_loss_pct > max(limits.max_auc_loss_pct, c.auc_noise_pct):
            found.append(
                f"AUC ({kind}) falls by {c.auc_loss_pct:.3f} % from {c.auc_fp32:.4f}, more than "
                f"{limits.max_auc_loss_pct:g} % and than chance ({c.auc_noise_pct:.3f} %)"
            )
        if c.log_loss_rise_pct > limits.max_log_loss_rise_pct:
            found.append(
                f"log-loss ({kind}) rises by {c.log_loss_rise_pct:.3f} %, more than {limits.max_log_loss_rise_pct:g} %"
            )
    if comparison.logit_rmse > limits.max_logit_rmse:
        found.append(f"logits move by {comparison.logit_rmse:.4f} (rms), more than {limits.max_logit_rmse:g}")
    if comparison.overlap_at_20 < limits.min_overlap_at_20:
        found.append(
            f"{comparison.overlap_at_20:.4f} of the first {DEPTH} are those of FP32, fewer than "
            f"{limits.min_overlap_at_20:g}"
        )
    return found


def refused_in(report: Mapping[str, Any]) -> list[str]:
    """One sentence for each precision that the `precisions` of a release's report leave out."""
    return [
        f"{role} {precision} is not released: {'; '.join(entry['refused'])}"
        for role, by_precision in report.items()
        for precision, entry in by_precision.items()
        if isinstance(entry, Mapping) and entry.get("refused")
    ]


def change(taken: F32, negatives: F32, other_taken: F32, other_negatives: F32, log_loss_negatives: float) -> Change:
    """One kind of negatives, FP32 first."""
    auc_fp32, influence_fp32 = _auc(taken, negatives)
    auc, influence = _auc(other_taken, other_negatives)
    n = taken.size
    error = float((influence - influence_fp32).std(ddof=1) / np.sqrt(n)) if n > 1 else np.inf
    loss_fp32 = _log_loss(taken, negatives, log_loss_negatives)
    rise = _log_loss(other_taken, other_negatives, log_loss_negatives) - loss_fp32
    return Change(
        auc_fp32=auc_fp32,
        auc=auc,
        auc_loss_pct=100 * (auc_fp32 - auc) / auc_fp32 if auc_fp32 else 0.0,
        auc_noise_pct=100 * CERTAIN * error / auc_fp32 if auc_fp32 else np.inf,
        log_loss_rise_pct=100 * rise / loss_fp32 if loss_fp32 else 0.0,
    )


def overlap(before: F32, after: F32, depth: int, items: I64 | None = None) -> float:
    """Mean share of the `depth` highest of each row that are among the `depth` highest of the other's; of candidates
    that are the same of `items`, the first counts."""
    depth = min(depth, before.shape[1])
    if items is not None:
        repeated = _repeated(items)
        before, after = np.where(repeated, -np.inf, before), np.where(repeated, -np.inf, after)
    first = np.argsort(-before, axis=1, kind="stable")[:, :depth]
    second = np.argsort(-after, axis=1, kind="stable")[:, :depth]
    chosen = np.zeros(before.shape, np.bool_)
    np.put_along_axis(chosen, first, True, axis=1)
    return float(np.take_along_axis(chosen, second, axis=1).mean())


def _repeated(items: I64) -> BOOL:
    """Whether the same item stands further to the left in its row."""
    order = np.argsort(items, axis=1, kind="stable")
    ordered = np.take_along_axis(items, order, axis=1)
    same = np.zeros(items.shape, np.bool_)
    same[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    repeated = np.empty(items.shape, np.bool_)
    np.put_along_axis(repeated, order, same, axis=1)
    return repeated


def _auc(taken: F32, negatives: F32) -> tuple[float, F64]:
    """AUC over all pairs, and how much each request [R] pulls on it."""
    above = _share_below(taken, negatives.ravel())
    below = 1.0 - _share_below(negatives.ravel(), taken).reshape(negatives.shape)
    auc = float(above.mean())
    return auc, (above - auc) + (below.mean(axis=1) - auc)


def _share_below(values: F32, others: F32) -> F64:
    """For each value the share of `others` below it, ties half."""
    ordered = np.sort(others)
    both = np.searchsorted(ordered, values, side="left") + np.searchsorted(ordered, values, side="right")
    share: F64 = both / (2 * ordered.size)
    return share


def _log_loss(taken: F32, negatives: F32, weight: float) -> float:
    own = np.logaddexp(0, -taken.astype(np.float64)).mean()
    others = np.logaddexp(0, negatives.astype(np.float64)).mean()
    return float((own + weight * others) / (1 + weight))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if np.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return value
