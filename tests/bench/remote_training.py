"""`python -m tests.bench.remote_training`: rows in the parameter server against rows in the trainer, the same log.

Starts a broker and shards in processes of their own, trains once with tables that the trainer owns and once with rows
that it looks up in the shards and changes through the stream, and prints the AUCs, their differences, CPU times and
what went over the stream. Ends with status 1 when an AUC falls short by more than `--within`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from infra.clock import SystemClock
from infra.kafka import LogProducer
from infra.release import Release
from infra.wire.connection import Peer
from param_server.specs import table_specs
from reranker.recipe import Recipe
from reranker.remote.empty import empty_release
from reranker.remote.stack import StackRows
from reranker.remote.training import STALENESS, RemoteRows
from reranker.train import train_release
from tests.brokers import make_broker
from tests.integration.shards import N_PARTITIONS, ShardProcess, make_topics, shard_config


def main() -> int:
    """Print what was found; the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.remote_training", description=__doc__)
    options.add_argument("--data", default="movielens-100k")
    options.add_argument("--seeds", nargs="+", type=int, default=[7])
    options.add_argument("--samples", type=int, default=Recipe().samples, help="samples seen by each training")
    options.add_argument("--staleness", type=int, default=STALENESS)
    options.add_argument("--shards", type=int, default=2)
    options.add_argument("--broker", choices=("embedded", "apache"), default="embedded")
    options.add_argument("--within", type=float, default=0.005)
    options.add_argument("--cache", type=Path, default=Path(".trirank/cache"))
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    rounds = []
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as name:
            rounds.append({"seed": seed, **_round(given, seed, Path(name))})
            print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    shortest = min(d for each in rounds for d in each["difference"].values())
    if given.json:
        print(json.dumps({"load": os.getloadavg()[0], "rounds": rounds}, indent=2))
    else:
        print(f"{given.data}, {given.samples:,} samples, {given.shards} shards, staleness {given.staleness}, "
              f"{given.broker} broker, load {os.getloadavg()[0]:.1f}")  # fmt: skip
        for each in rounds:
            for measure, difference in each["difference"].items():
                owned, remote = each["owned"]["auc"][measure], each["remote"]["auc"][measure]
                print(f"  seed {each['seed']}  {measure:<20} owned {owned:.4f}  remote {remote:.4f}  {difference:+.4f}")
            for kind in ("owned", "remote"):
                print(
                    f"  seed {each['seed']}  {kind:<8} {each[kind]['cpu_s']:.0f} s of CPU, {each[kind]['wall_s']:.0f} s"
                )
            print(f"  seed {each['seed']}  stream   {each['stream']}")
    return 0 if shortest >= -given.within else 1


def _round(given: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    owned = _trained(given, seed, folder / "owned", None)
    with _parameter_server(given, seed, folder) as (rows, counters):
        remote = _trained(given, seed, folder / "remote", RemoteRows(rows, given.staleness))
        stream = counters()
    difference = {m: round(remote["auc"][m] - owned["auc"][m], 5) for m in owned["auc"]}
    return {"difference": difference, "owned": owned, "remote": remote, "stream": stream}


def _trained(given: argparse.Namespace, seed: int, out: Path, rows: RemoteRows | None) -> dict[str, Any]:
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    release = train_release(
        given.data, out, cache=given.cache, seed=seed, recipe=replace(Recipe(), samples=given.samples), rows=rows,
        console=Console(file=io.StringIO()),
    )  # fmt: skip
    return {
        "auc": {
            f"{model} {kind}": measures["auc"]
            for model in ("edge", "rerank")
            for kind, measures in release.manifest.report["models"][model].items()
        },
        "seconds": release.manifest.report["seconds"],
        "wall_s": time.monotonic() - begun_s,
        "cpu_s": time.process_time() - begun_cpu_s,
        "waited_share": [entry["data_wait_share"] for entry in release.manifest.report["passes"]],
    }


@contextmanager
def _parameter_server(given: argparse.Namespace, seed: int, folder: Path) -> Iterator[Any]:
    """Rows in shards that follow a broker, and a function that says what they applied."""
    with ExitStack() as stack:
        broker = make_broker(given.broker, folder / "broker")
        stack.callback(broker.stop)
        release = empty_release(given.data, folder / "empty", cache=given.cache, seed=seed)
        topics = make_topics(broker.bootstrap)
        shards = []
        for index in range(given.shards):
            config = shard_config(folder, broker.bootstrap, topics, index, given.shards)
            shard = ShardProcess(replace(config, table_min_capacity_rows=65536), release)
            stack.callback(shard.kill)
            shards.append(shard)
        log = LogProducer(broker.bootstrap)
        log.start()
        stack.callback(log.close)
        rows = stack_rows(release, [shard.address for shard in shards], log, topics.embeddings)
        rows.start()
        stack.callback(rows.close)
        yield rows, rows.counters


def stack_rows(release: Release, addresses: list[str], log: LogProducer, topic: str, **more: Any) -> StackRows:
    """The rows of shards at these addresses."""
    return StackRows(
        lambda: [Peer(f"shard-{i}", address, meta={"shard": i}) for i, address in enumerate(addresses)],
        log,
        topic=topic,
        generation=release.manifest.generation,
        schema_fingerprint=release.manifest.schema_fingerprint,
        specs=table_specs(release),
        n_shards=len(addresses),
        n_partitions=N_PARTITIONS,
        clock=SystemClock(),
        **more,
    )


if __name__ == "__main__":
    sys.exit(main())
