"""The pieces of `tests.bench.stream`: a release of one table, a shard, and processes of their own for both sides."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from infra.release import Release, TableRows, read_release, write_release
from param_server.config import ShardConfig
from param_server.keeper import Keeping
from param_server.shard import Shard

ITEM = 4
N_ROWS = 200_000
N_PARTITIONS = 8
spawn = multiprocessing.get_context("spawn")


def make_release(path: Path, dim: int) -> Release:
    """One table of 200,000 rows of `dim` numbers."""
    model = path.with_suffix(".onnx")
    model.write_bytes(b"not read here")
    keys = np.arange(N_ROWS, dtype=np.int64)
    rows = np.random.default_rng(0).standard_normal((N_ROWS, dim), np.float32)
    table = TableRows(keys, rows, np.ones(N_ROWS, np.uint64), np.zeros(dim, np.float32))
    return write_release(
        path, name="r", parent=None, created_us=1, schema={}, schema_fingerprint="s", tables={"item": (ITEM, table)},
        models={"edge": {"fp32": model}, "rerank": {"fp32": model}},
        catalogue=[], users=[], requests=[], report={}, made_with={},
    )  # fmt: skip


class Apart:
    """A function in a process of its own, which says that it is ready and is ended with it."""

    def __init__(self, work: Any, *given: Any) -> None:
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=work, args=(theirs, *given), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self._process.pid or 0)

    def hear(self, timeout_s: float = 120.0) -> Any:
        """What it says next."""
        if not self._ours.poll(timeout_s):
            raise RuntimeError("the other process says nothing")
        return self._ours.recv()

    def end(self) -> None:
        """SIGTERM, and wait."""
        self._process.terminate()
        self._process.join(20)


def cpu_s() -> float:
    """Processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(say: Connection, config: ShardConfig, release: str) -> None:
    """A shard until ended."""
    shard = Shard(config, read_release(Path(release)))
    say.send(shard.start())
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    while not ended:
        signal.pause()
    shard.stop()


def shard_config(folder: Path, bootstrap: str, topic: str) -> ShardConfig:
    """One shard with everything as the product sets it, but snapshots out of the way."""
    folder.mkdir(parents=True, exist_ok=True)
    return ShardConfig(
        index=0, n_shards=1, n_partitions=N_PARTITIONS, name="shard-0", bind=f"ipc://{folder}/s.sock",
        snapshot_root=folder / "snapshots", bootstrap=bootstrap, topic=topic, deadletter_topic="dead",
        snapshots=Keeping(3600.0), table_headroom=2.0, table_min_capacity_rows=1,
    )  # fmt: skip
