"""Every precision of both rankers, made from their FP32 graphs and compared with them; what loses too much stays out.

FP16 and INT8 over FP16 for GPUs, measured in FP16 arithmetic, which a CPU emulates; INT8 over FP32 for ONNX Runtime.
Calibrated on the newest requests of the training period, judged on requests of the test period: what sets the scales
never judges them.
Refuses no training: a precision that cannot be made or loses too much is left out, and the report says why.
Invariant: a file that is returned has passed its limits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from feature_service.timeline import Timeline
from infra.engine.batch import Features
from infra.engine.calibrate import Method, Scales, calibrate, read_scales
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.precision import activations, check_scales, tidied, to_int8
from infra.engine.precision_emulated import emulated
from infra.engine.precision_fp16 import to_fp16
from infra.engine.quality import Limits, Scored, compare, refusals
from infra.errors import Permanent, ReleaseRefused
from infra.release import ROLES, Precision, Role
from reranker.evaluate import Trial
from reranker.rankers import Rankers
from reranker.replay import replay
from reranker.source import moment

I64 = NDArray[np.int64]

# Candidates of one calibration request besides the item that was taken, half of them popular.
CALIBRATION_CANDIDATES = 50
# What the negatives of a request weigh together in the log-loss: as many as training draws by default.
LOG_LOSS_NEGATIVES = 4.0
# Negatives of each kind that a compared request keeps: together with the taken item about what serving reranks.
COMPARED_NEGATIVES = 99
_US_PER_DAY = 86_400_000_000
_MADE: tuple[Precision, ...] = ("fp16", "int8", "int8-cpu")
# Measured as a GPU computes them.
GPU_PRECISIONS: tuple[Precision, ...] = ("fp16", "int8")


FP16_LIMITS = Limits(max_auc_loss_pct=0.05, max_log_loss_rise_pct=0.05, max_logit_rmse=0.02, min_overlap_at_20=0.99)
INT8_LIMITS = Limits(max_auc_loss_pct=0.05, max_log_loss_rise_pct=1.0, max_logit_rmse=0.15, min_overlap_at_20=0.97)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a release's precisions are made from and have to keep. `scales` of an earlier release are used instead of
    calibrating anew."""

    fp16: Limits = FP16_LIMITS
    int8: Limits = INT8_LIMITS
    method: Method = "percentile"
    calibration_days: float = 7.0
    calibration_requests: int = 256
    compared_requests: int = 1000
    scales: Mapping[Role, Scales] = field(default_factory=dict)

    def limits(self, precision: Precision) -> Limits:
        """The limits of one precision."""
        return self.fp16 if precision == "fp16" else self.int8


RULES = Rules()


@dataclass(frozen=True, slots=True)
class Precisions:
    """Files that passed, FP32 among them; scales of the INT8 graphs; what the release's report says."""

    models: dict[Role, dict[Precision, Path]]
    scales: dict[Role, Path]
    report: dict[str, Any]


def make_precisions(
    rankers: Rankers,
    timeline: Timeline,
    trial: Trial,
    fp32: Mapping[Role, Path],
    *,
    rules: Rules,
    log_loss_negatives: float,
    rng: np.random.Generator,
) -> Precisions:
    """Make them beside the FP32 files and compare them on requests of the trial."""
    begun_cpu_s = time.process_time()
    events = calibration_events(timeline, rules, rng)
    batches = calibration_batches(rankers, timeline, events, rng)
    made = {role: _Made.of(role, fp32[role], rules, batches, _described(timeline, events)) for role in ROLES}
    calibrated_cpu_s = time.process_time()
    scored = _score(rankers, timeline, trial, made, rules)
    models: dict[Role, dict[Precision, Path]] = {}
    report: dict[str, Any] = {}
    for role in ROLES:
        models[role] = {"fp32": fp32[role]}
        report[role] = {"fp32": {"released": True, "bytes": fp32[role].stat().st_size}}
        for precision in _MADE:
            entry = _judged(made[role], precision, scored[role], rules, log_loss_negatives)
            report[role][precision] = entry
            if entry["released"]:
                models[role][precision] = made[role].files[precision]
    report["limits"] = {"fp16": asdict(rules.fp16), "int8": asdict(rules.int8)}
    report["calibration"] = {**_described(timeline, events), "methods": _methods(made)}
    report["seconds_cpu"] = {
        "made": round(calibrated_cpu_s - begun_cpu_s, 2),
        "compared": round(time.process_time() - calibrated_cpu_s, 2),
    }
    scales = {role: made[role].scales for role in ROLES if {"int8", "int8-cpu"} & models[role].keys()}
    return Precisions(models, {role: file for role, file in scales.items() if file is not None}, report)


def calibration_events(timeline: Timeline, rules: Rules, rng: np.random.Generator) -> I64:
    """Requests of the last days of the training period; where those hold too few, the newest there are."""
    data, train = timeline.dataset, timeline.train
    newest = train[np.argsort(data.ts_us[train], kind="stable")]
    week = newest[data.ts_us[newest] >= timeline.test_from_us - rules.calibration_days * _US_PER_DAY]
    if week.size < rules.calibration_requests:
        return np.sort(newest[-rules.calibration_requests :])
    return np.sort(rng.permutation(week)[: rules.calibration_requests])


def calibration_batches(rankers: Rankers, timeline: Timeline, events: I64, rng: np.random.Generator) -> list[Features]:
    """Their inputs: the item that was taken, and as many uniform as popular others."""
    counts = timeline.item_counts().astype(np.float64)
    items = np.flatnonzero(counts)
    shape, n = (events.size, CALIBRATION_CANDIDATES // 2), counts[items]
    taken = timeline.dataset.item[events][:, None]
    candidates = np.concatenate((taken, rng.choice(items, shape), rng.choice(items, shape, p=n / n.sum())), axis=1)
    return [features for _, features in replay(rankers, timeline, events, candidates)]


@dataclass(frozen=True, slots=True)
class _Made:
    """The precisions of one ranker: their files, or why there are none."""

    role: Role
    fp32: Path
    files: dict[Precision, Path]
    # What this machine runs to measure each of them.
    measured: dict[Precision, Path]
    scales: Path | None
    unmade: dict[Precision, str]

    @classmethod
    def of(
        cls, role: Role, fp32: Path, rules: Rules, batches: list[Features], described: Mapping[str, str | int | float]
    ) -> _Made:
        model = onnx.load(fp32)
        files: dict[Precision, Path] = {}
        measured: dict[Precision, Path] = {}
        unmade: dict[Precision, str] = {}
        scales: Path | None = None

        def keep(precision: Precision, converted: onnx.ModelProto) -> None:
            files[precision] = fp32.with_suffix(f".{precision}.onnx")
            onnx.save(converted, files[precision])
            measured[precision] = files[precision]
            if precision in GPU_PRECISIONS:
                measured[precision] = fp32.with_suffix(f".{precision}.emulated.onnx")
                onnx.save(emulated(converted), measured[precision])

        try:
            keep("fp16", to_fp16(model))
        except ReleaseRefused as refused:
            unmade["fp16"] = str(refused)
        try:
            found = rules.scales.get(role) or calibrate(
                model, batches, role=role, method=rules.method, calibration=described
            )
            check_scales(found.steps, activations(tidied(model)))
            scales = fp32.with_suffix(".scales.json")
            found.write(scales)
            keep("int8-cpu", to_int8(model, found.steps, unsigned=True))
            keep("int8", to_fp16(to_int8(model, found.steps)))
        except ReleaseRefused as refused:
            unmade |= {precision: str(refused) for precision in ("int8", "int8-cpu") if precision not in files}
        return cls(role, fp32, files, measured, scales, unmade)


def _methods(made: Mapping[Role, _Made]) -> dict[Role, str]:
    """How the scales of each ranker were chosen."""
    return {role: read_scales(of.scales).method for role, of in made.items() if of.scales is not None}


def _described(timeline: Timeline, events: I64) -> dict[str, str | int | float]:
    """The calibration set, for the report and the file of scales."""
    data = timeline.dataset
    times = data.ts_us[events]
    known: dict[str, str | int | float] = {
        "data": data.name,
        "data_fingerprint": data.fingerprint,
        "requests": int(events.size),
        "candidates_per_request": 1 + CALIBRATION_CANDIDATES,
    }
    if events.size:
        known |= {"from": moment(int(times.min())), "until": moment(int(times.max()))}
    return known


def compared_requests(timeline: Timeline, trial: Trial, most: int) -> tuple[I64, dict[str, I64], I64]:
    """Events of the trial i64[R], R about `most`; their negatives i64[R, n] of each kind; all candidates of each, the
    item that was taken first."""
    # The trial is in order of user, and its events come evenly from all of them: every n-th keeps that.
    every = max(1, -(-trial.events.size // most))
    events = trial.events[::every]
    negatives: dict[str, I64] = {kind: items[::every, :COMPARED_NEGATIVES] for kind, items in trial.negatives.items()}
    candidates: I64 = np.concatenate((timeline.dataset.item[events][:, None], *negatives.values()), axis=1)
    return events, negatives, candidates


def _score(
    rankers: Rankers, timeline: Timeline, trial: Trial, made: Mapping[Role, _Made], rules: Rules
) -> dict[Role, dict[Precision, Scored | str]]:
    """Logits of every file on the first requests of the trial, or why it gave none."""
    events, negatives, candidates = compared_requests(timeline, trial, rules.compared_requests)
    engines = {
        (role, precision): OnnxEngine(file)
        for role in ROLES
        for precision, file in {"fp32": made[role].fp32, **made[role].measured}.items()
    }
    logits = {name: np.empty(candidates.shape, np.float32) for name in engines}
    failed: dict[tuple[Role, str], str] = {}
    for rows, features in replay(rankers, timeline, events, candidates):
        for name, engine in engines.items():
            if name not in failed:
                try:
                    logits[name][rows] = engine.run(features.hist, features.target, features.mask, features.user)
                except (Permanent, ReleaseRefused) as error:
                    failed[name] = str(error)
    bounds = np.cumsum([1, *(items.shape[1] for items in negatives.values())])
    found: dict[Role, dict[Precision, Scored | str]] = {role: {} for role in ROLES}
    for (role, precision), scores in logits.items():
        found[role][precision] = failed.get((role, precision)) or Scored(
            scores[:, 0], {kind: scores[:, bounds[i] : bounds[i + 1]] for i, kind in enumerate(negatives)}, candidates
        )
    return found


def _judged(
    made: _Made, precision: Precision, scored: Mapping[Precision, Scored | str], rules: Rules, log_loss_negatives: float
) -> dict[str, Any]:
    """What the report says of one precision."""
    if precision in made.unmade:
        return {"released": False, "refused": [made.unmade[precision]]}
    size, fp32, own = {"bytes": made.files[precision].stat().st_size}, scored["fp32"], scored[precision]
    if isinstance(fp32, str) or isinstance(own, str):
        reason = own if isinstance(own, str) else f"FP32: {fp32}"
        return {"released": False, "refused": [reason], **size}
    comparison = compare(fp32, own, log_loss_negatives)
    reasons = refusals(comparison, rules.limits(precision))
    return {"released": not reasons, "refused": reasons, **size, **comparison.as_dict()}
