"""`python -m tests.bench.architectures`: the rerankers beside one another on the same log, by the same recipe.

Trains each on the data, prints AUC against uniform and popularity negatives, CPU time of the training, and what one
request costs in ONNX Runtime on one thread. The latencies are taken in turns, so that a machine that is busy for a
moment favours nobody; CPU time leaves out what neighbours took. `--samples` shortens every training alike;
`--latency` trains nothing and measures requests only, which the weights do not change.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console

from feature_service.schema import FeatureSchema
from infra.engine.export import export_ranker
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.ranker_contract import example
from infra.release import Release
from reranker.architectures import Architecture, build_rerank, rerank_architecture
from reranker.recipe import Recipe
from reranker.train import train_release

SHIPPED = {
    "bst": rerank_architecture("bst"),
    "din": rerank_architecture("din"),
    "bst-mean": rerank_architecture("bst", readout="mean"),
    "bst-concat": rerank_architecture("bst", readout="concat"),
    "bst-2": rerank_architecture("bst", blocks=2),
}
LENGTH, CANDIDATES, ROUNDS = 50, 100, 60


@dataclass(frozen=True, slots=True)
class Trained:
    """One training: seed, AUCs of the reranker, CPU seconds of the fit, and its ONNX file."""

    seed: int
    auc_uniform: float
    auc_popularity: float
    training_cpu_s: float
    model_bytes: int


def main() -> int:
    """Print the table, or JSON; the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.architectures", description=__doc__)
    options.add_argument("--data", default="movielens-100k")
    options.add_argument("--only", nargs="+", choices=SHIPPED, default=list(SHIPPED))
    options.add_argument("--seeds", nargs="+", type=int, default=[7])
    options.add_argument("--samples", type=int, default=Recipe().samples, help="samples seen by each training")
    options.add_argument("--cache", type=Path, default=Path(".trirank/cache"))
    options.add_argument("--latency", action="store_true", help="train nothing")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    if given.latency:
        return _latency_alone(given.only)
    found: dict[str, list[Trained]] = {}
    engines: dict[str, OnnxEngine] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only:
            for seed in given.seeds:
                release = _train(SHIPPED[name], seed, given, Path(folder) / f"{name}-{seed}")
                found.setdefault(name, []).append(_trained(release, seed))
                engines[name] = OnnxEngine(release.rerank_model)
                print(f"{SHIPPED[name]}: {asdict(found[name][-1])}", file=sys.stderr, flush=True)
        latency_ms = _latencies(engines)
    if given.json:
        about = {"load": os.getloadavg()[0], "candidates": CANDIDATES, "length": LENGTH, "samples": given.samples}
        runs = {n: {"runs": [asdict(t) for t in all_], "request_ms": latency_ms[n]} for n, all_ in found.items()}
        print(json.dumps({**about, "architectures": runs}, indent=2))
        return 0
    print(f"{given.data}, {given.samples:,} samples, seeds {given.seeds}, load {os.getloadavg()[0]:.1f}")
    print(f"{'':<38}{'AUC uniform':>14}{'popularity':>14}{'train CPU s':>13}{'request ms':>12}{'bytes':>12}")
    for name, runs_ in found.items():
        uniform, popularity = ([getattr(t, f"auc_{k}") for t in runs_] for k in ("uniform", "popularity"))
        seconds, size = median(t.training_cpu_s for t in runs_), runs_[-1].model_bytes
        print(
            f"{SHIPPED[name]!s:<38}{_spread(uniform):>14}{_spread(popularity):>14}{seconds:>13.0f}"
            f"{latency_ms[name]:>12.2f}{size:>12,}"
        )
    return 0


def _latency_alone(names: list[str]) -> int:
    schema = FeatureSchema(n_user_buckets=1)
    with tempfile.TemporaryDirectory() as folder:
        engines, sizes = {}, {}
        for name in names:
            file = Path(folder) / f"{name}.onnx"
            export_ranker(
                build_rerank(SHIPPED[name], schema), file, token_dim=schema.token_dim, user_dim=schema.user_dim
            )
            engines[name], sizes[name] = OnnxEngine(file), file.stat().st_size
        for name, took_ms in _latencies(engines).items():
            print(f"{SHIPPED[name]!s:<38}{took_ms:>10.2f} ms of CPU{sizes[name]:>12,} bytes")
    print(f"1 user, {CANDIDATES} candidates, history {LENGTH}, one thread, load {os.getloadavg()[0]:.1f}")
    return 0


def _train(architecture: Architecture, seed: int, given: argparse.Namespace, out: Path) -> Release:
    quiet = Console(file=io.StringIO())
    recipe = replace(Recipe(), rerank=architecture, samples=given.samples)
    return train_release(given.data, out, cache=given.cache, seed=seed, recipe=recipe, console=quiet)


def _trained(release: Release, seed: int) -> Trained:
    report = release.manifest.report
    auc = {kind: measures["auc"] for kind, measures in report["models"]["rerank"].items()}
    size = release.rerank_model.stat().st_size
    return Trained(seed, auc["uniform"], auc["popularity"], report["seconds"]["training_cpu"], size)


def _latencies(engines: dict[str, OnnxEngine]) -> dict[str, float]:
    """Median ms of CPU time of one request, taken in turns."""
    schema = FeatureSchema(n_user_buckets=1)
    inputs = example((2, LENGTH, CANDIDATES), schema.token_dim, schema.user_dim, seed=0)
    hist, target, mask, user = (tensor[1:].numpy() for tensor in inputs)
    mask = np.ones_like(mask)
    took_ms: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.run(hist, target, mask, user)
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            begun_s = time.process_time()
            engine.run(hist, target, mask, user)
            took_ms[name].append((time.process_time() - begun_s) * 1e3)
    return {name: median(times) for name, times in took_ms.items()}


def _spread(values: list[float]) -> str:
    half = (max(values) - min(values)) / 2
    return f"{np.mean(values):.4f}" + (f" +-{half:.4f}" if len(values) > 1 else "")


if __name__ == "__main__":
    sys.exit(main())
