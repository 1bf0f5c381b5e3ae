"""`python -m tests.bench.precision --seeds 7,8,9`: what FP16 and INT8 cost, for both rankers, by every calibration.

Trains one release for each seed and compares every precision with FP32 on the same held-out requests, for all three
ways to choose INT8 scales, with no limit, so that what a gate would refuse is seen too. `--layers` then quantises all
activations but one, and one alone, which tells the layer that costs. Nothing here is a time: the machine may be busy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import numpy as np
import onnx
from rich.console import Console

import reranker.train
from infra.commands.release_show import table
from infra.engine.calibrate import METHODS, Method, calibrate
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.precision import products_to_quantise, tidied, to_int8
from infra.engine.quality import Limits, Scored, compare
from infra.release import ROLES, Release
from reranker.package import package_release
from reranker.precisions import (
    COMPARED_NEGATIVES,
    LOG_LOSS_NEGATIVES,
    Rules,
    calibration_batches,
    calibration_events,
    make_precisions,
)
from reranker.replay import replay
from tests.bench.precision_requests import write_requests

ANYTHING = Limits(max_auc_loss_pct=np.inf, max_log_loss_rise_pct=np.inf, max_logit_rmse=np.inf, min_overlap_at_20=0.0)
KINDS = ("uniform", "popularity")
# role -> precision and method -> what one seed measured.
Measured = Mapping[str, Mapping[str, Mapping[str, Any]]]


def main() -> int:
    """Train, compare, print."""
    given = _arguments()
    found: dict[int, Measured] = {}
    layers: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in given.seeds:
            out = (given.keep or Path(folder)) / f"seed-{seed}"
            package = _taking(found, layers, seed, given.layers)
            if given.requests:
                package = _keeping(given.requests, f"seed-{seed}")
            _train(given.data, out, seed, given.cache, package)
            print(f"seed {seed}: trained and compared", file=sys.stderr, flush=True)
    if given.requests:
        return 0
    print(report(list(found.values())))
    for seed, by_role in layers.items():
        print(f"\nseed {seed}, percentile: log-loss (uniform) % / logit rms / AUC loss (popularity) %")
        for role, lines in by_role.items():
            print(table([role, "only this in INT8", "all but this"], lines))
    if given.json:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode({"seeds": found, "layers": layers}), indent=2))
    return 0


def report(seeds: Sequence[Measured]) -> str:
    """One line for each ranker, precision and calibration: mean, and the worst of the seeds."""
    lines = []
    for role in ROLES:
        for name in seeds[0][role]:
            each = [measured[role][name] for measured in seeds]
            losses = {k: [one["by_negatives"][k]["auc_loss_pct"] for one in each] for k in KINDS}
            noise = max(one["by_negatives"][k]["auc_noise_pct"] for one in each for k in KINDS)
            rises = [max(one["by_negatives"][k]["log_loss_rise_pct"] for k in KINDS) for one in each]
            lines.append(
                [
                    role,
                    name,
                    f"{each[0]['bytes'] / each[0]['bytes_fp32']:.3f}",
                    *(f"{mean(losses[k]):+.3f} / {max(losses[k]):+.3f}" for k in KINDS),
                    f"{noise:.3f}",
                    f"{max(rises):+.2f}",
                    f"{max(one['logit_rmse'] for one in each):.4f}",
                    f"{min(one['overlap_at_20'] for one in each):.4f}",
                ]
            )
    head = ["ranker", "precision", "bytes", "AUC loss % uniform: mean / worst", "popularity: mean / worst"]
    return table([*head, "chance %", "log-loss %", "logit rms", "top 20"], lines)


def _taking(found: dict[int, Measured], layers: dict[int, Any], seed: int, with_layers: bool) -> Callable[..., Release]:
    """Packaging that also compares."""

    def package(rankers: Any, timeline: Any, trial: Any, *more: Any, **named: Any) -> Release:
        measured: dict[str, dict[str, Any]] = {role: {} for role in ROLES}
        for method in METHODS:
            with tempfile.TemporaryDirectory() as folder:
                files = {role: _export(rankers, role, Path(folder)) for role in ROLES}
                made = make_precisions(
                    rankers,
                    timeline,
                    trial,
                    files,
                    rules=Rules(fp16=ANYTHING, int8=ANYTHING, method=method),
                    log_loss_negatives=LOG_LOSS_NEGATIVES,
                    rng=np.random.default_rng(seed),
                )
                if method == "percentile" and with_layers:
                    layers[seed] = {r: _layers(rankers, timeline, trial, files[r], r, seed) for r in ROLES}
            for role in ROLES:
                for name, entry in _named(made.report[role], method):
                    measured[role][name] = {**entry, "bytes_fp32": made.report[role]["fp32"]["bytes"]}
        found[seed] = measured
        return package_release(rankers, timeline, trial, *more, **named)

    return package


def _keeping(folder: Path, name: str) -> Callable[..., Release]:
    """Packaging that also writes models and held-out requests for `tests.bench.gpu_precision`."""

    def package(rankers: Any, timeline: Any, trial: Any, *more: Any, **named: Any) -> Release:
        folder.mkdir(parents=True, exist_ok=True)
        for role in ROLES:
            _export(rankers, role, folder).rename(folder / f"{name}.{role}.onnx")
        write_requests(folder / f"{name}.npz", rankers, timeline, trial)
        return package_release(rankers, timeline, trial, *more, **named)

    return package


def _named(by_precision: Mapping[str, Any], method: Method) -> list[tuple[str, Any]]:
    """FP16 once, INT8 under the name of its calibration."""
    named = [(f"{p} {method}", by_precision[p]) for p in ("int8", "int8-cpu")]
    return [("fp16", by_precision["fp16"]), *named] if method == METHODS[0] else named


def _layers(rankers: Any, timeline: Any, trial: Any, file: Path, role: str, seed: int) -> list[list[str]]:
    """One activation alone in INT8, and all but it, over FP32."""
    rng = np.random.default_rng(seed)
    batches = calibration_batches(rankers, timeline, calibration_events(timeline, Rules(), rng), rng)
    model = tidied(onnx.load(file))
    steps = calibrate(model, batches, role=role, calibration={}).steps
    events = trial.events[::4]
    negatives = {kind: items[::4, :COMPARED_NEGATIVES] for kind, items in trial.negatives.items()}
    candidates = np.concatenate((timeline.dataset.item[events][:, None], *negatives.values()), axis=1)
    asked = list(replay(rankers, timeline, events, candidates))

    def scored(graph: onnx.ModelProto) -> Scored:
        onnx.save(graph, file.with_suffix(".layer.onnx"))
        engine, logits = OnnxEngine(file.with_suffix(".layer.onnx")), np.empty(candidates.shape, np.float32)
        for rows, f in asked:
            logits[rows] = engine.run(f.hist, f.target, f.mask, f.user)
        half = 1 + negatives["uniform"].shape[1]
        return Scored(logits[:, 0], {"uniform": logits[:, 1:half], "popularity": logits[:, half:]})

    fp32 = scored(model)

    def cost(kept: Mapping[str, float]) -> str:
        c = compare(fp32, scored(to_int8(model, kept, keep_high=steps.keys() - kept.keys())), LOG_LOSS_NEGATIVES)
        change = c.by_negatives
        return (
            f"{change['uniform'].log_loss_rise_pct:+.2f} / {c.logit_rmse:.4f} / "
            f"{change['popularity'].auc_loss_pct:+.3f}"
        )

    names = {p.activation: f"{p.activation} -> {p.node}" for p in products_to_quantise(model)}
    lines = [[names[a], cost({a: s}), cost({k: v for k, v in steps.items() if k != a})] for a, s in steps.items()]
    return [["all", cost(steps), "-"], *lines]


def _train(data: str, out: Path, seed: int, cache: Path, package: Callable[..., Release]) -> None:
    before = reranker.train.package_release
    reranker.train.package_release = package
    try:
        reranker.train.train_release(data, out, cache=cache, seed=seed, console=Console(stderr=True, quiet=True))
    finally:
        reranker.train.package_release = before


def _export(rankers: Any, role: str, folder: Path) -> Path:
    from infra.engine.export import export_ranker

    schema, file = rankers.tables.schema, folder / f"{role}.onnx"
    export_ranker(getattr(rankers, role), file, token_dim=schema.token_dim, user_dim=schema.user_dim)
    return file


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(prog="python -m tests.bench.precision", description=__doc__)
    options.add_argument("--data", default="movielens-100k", help="as of `trirank train` (movielens-100k)")
    options.add_argument("--seeds", type=_numbers, default=[7, 8, 9], help="seeds to train with (7,8,9)")
    options.add_argument("--layers", action="store_true", help="also tell which layer costs")
    options.add_argument("--cache", type=Path, default=Path(".trirank/cache"), help="download cache (.trirank/cache)")
    options.add_argument("--keep", type=Path, help="keep the releases in this folder")
    options.add_argument("--requests", type=Path, help="only train, and keep here what tests.bench.gpu_precision takes")
    options.add_argument("--json", type=Path, help="also write everything to this file")
    return options.parse_args()


def _numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
