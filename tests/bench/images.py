"""`python -m tests.bench.images`: stable and a candidate release with an equal table, with and without table images.

Two processes hold the table one after the other, as the shards of the two releases do: what their starts take, and what
memory they have together (proportional set size: a page that n processes map counts one n-th for each; what they had
before is taken off). Then, in one process and in turns, by processor time: lookups and records of updates on a table in
an image and on a private one. The files of the release are in the page cache, as they are after `trirank up` has
verified them.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from infra.release import Release, TableRows, read_release, write_release
from param_server.contract import Op
from param_server.generation import Place, empty_generation, fill_from_release
from param_server.images import Images
from param_server.table import EmbeddingTable, RowBatch
from param_server.table.cpu import warm

PLACE = Place(0, 1, 8)
KEYS, RECORD = 2000, 1024


def make_release(path: Path, rows: int, dim: int) -> Release:
    """One table of random rows."""
    model = path.with_suffix(".onnx")
    model.write_bytes(b"not read here")
    values = np.random.default_rng(0).standard_normal((rows, dim), np.float32)
    table = TableRows(np.arange(rows, dtype=np.int64), values, np.ones(rows, np.uint64), np.zeros(dim, np.float32))
    return write_release(
        path, name="r", parent=None, created_us=1, schema={}, schema_fingerprint="s", tables={"item": (4, table)},
        models={"edge": {"fp32": model}, "rerank": {"fp32": model}},
        catalogue=[], users=[], requests=[], report={}, made_with={},
    )  # fmt: skip


def filled(release: Release, folder: Path | None) -> EmbeddingTable:
    """The table, in an image where there is a folder for it."""
    if folder is None:
        generation = empty_generation(release, PLACE, headroom=1.25, min_capacity_rows=1)
        fill_from_release(generation, release, PLACE)
        return generation.tables["item"]
    images = Images(folder)
    begun = images.begin(release, PLACE, headroom=1.25, min_capacity_rows=1)
    if images.private:
        raise SystemExit(f"there is no image: {images.private}")
    return begun.tables["item"]


def own_mb() -> float:
    """Anonymous memory of this process, after what malloc keeps is given back."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1e3


def batch(rng: np.random.Generator, rows: int, dim: int, version: int) -> RowBatch:
    """A record of updates of rows anywhere."""
    keys = rng.integers(0, rows, RECORD)
    return RowBatch(Op.ASSIGN, keys, np.full(RECORD, version, np.uint64), np.ones((RECORD, dim), np.float32))


def hold(say: Connection, path: str, folder: Path | None) -> None:
    """Hold the table: say what the start took (wall, processor, peak), then memory; update n rows when told."""
    release = read_release(Path(path), verify_files=False)
    warm()
    before_mb, start_s, start_cpu_s = own_mb(), time.perf_counter(), time.process_time()
    table = filled(release, folder)
    table.lookup(np.arange(release.manifest.tables[0].rows, dtype=np.int64)[::16])
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before_mb
    say.send((time.perf_counter() - start_s, time.process_time() - start_cpu_s, peak_mb))
    rng, version = np.random.default_rng(os.getpid()), 1
    while (n := say.recv()) is not None:
        for _ in range(n // RECORD):
            version += 1
            table.apply(batch(rng, release.manifest.tables[0].rows, table.dim, version))
        say.send(own_mb() - before_mb)


def two_processes(release: Release, folder: Path | None, updated: int) -> None:
    """Start stable, then the candidate release; print starts and memory."""
    spawn = multiprocessing.get_context("spawn")
    pipes, children, starts = [], [], []
    for _ in range(2):
        ours, theirs = multiprocessing.Pipe()
        child = spawn.Process(target=hold, args=(theirs, str(release.path), folder), daemon=True)
        child.start()
        starts.append(ours.recv())
        pipes.append(ours)
        children.append(child)

    def memory_mb(n: int) -> list[float]:
        found = []
        for pipe in pipes:
            pipe.send(n)
            found.append(pipe.recv())
        return found

    images = [] if folder is None else [path.stat().st_blocks * 512 / 1e6 for path in folder.iterdir()]
    start, later = memory_mb(0) + images, memory_mb(updated) + images
    name = "private" if folder is None else "images"
    for which, (wall_s, cpu_s, peak_mb) in zip(("first", "second"), starts, strict=True):
        print(f"{name:<8} {which:<6} start {wall_s:6.2f} s, {cpu_s:5.2f} s of processor time, peak {peak_mb:6.0f} MB")
    print(
        f"{name:<8} both together {sum(start):6.0f} MB; {sum(later):6.0f} MB after "
        f"{updated:,} updates of random rows in each"
    )
    for pipe, child in zip(pipes, children, strict=True):
        pipe.send(None)
        child.join()


def turns(works: list[Callable[[], object]], rounds: int) -> list[np.ndarray]:
    """Microseconds of processor time of each call, taken in turns."""
    times = np.zeros((len(works), rounds))
    for i in range(rounds):
        for at in range(len(works)) if i % 2 else reversed(range(len(works))):
            start = time.thread_time_ns()
            works[at]()
            times[at, i] = (time.thread_time_ns() - start) / 1e3
    return list(times)


def show(name: str, private: np.ndarray, image: np.ndarray) -> None:
    """p50 and p99 of both."""
    numbers = [f"p50 {np.percentile(t, 50):7.0f} p99 {np.percentile(t, 99):7.0f} us" for t in (private, image)]
    ratio = np.percentile(image, 50) / np.percentile(private, 50)
    print(f"{name:<44} private {numbers[0]}   image {numbers[1]}   {ratio:.2f} x")


def in_turns(release: Release, folder: Path, rounds: int) -> None:
    """Lookups and updates of both kinds of table in one process."""
    rows, dim = release.manifest.tables[0].rows, release.manifest.tables[0].dim
    tables = [filled(release, None), filled(release, folder)]
    rng = np.random.default_rng(1)

    def lookups(name: str) -> None:
        wanted = [rng.integers(0, rows, KEYS) for _ in range(rounds)]
        at = [iter(wanted), iter(wanted)]
        works = [lambda t=t, a=a: t.lookup(next(a)) for t, a in zip(tables, at, strict=True)]  # type: ignore[misc]
        show(name, *turns(works, rounds))  # type: ignore[arg-type]

    version = 1

    def updates(name: str, n: int) -> None:
        nonlocal version
        records = [batch(rng, rows, dim, version + 1 + i) for i in range(n)]
        version += n
        at = [iter(records), iter(records)]
        works = [lambda t=t, a=a: t.apply(next(a)) for t, a in zip(tables, at, strict=True)]  # type: ignore[misc]
        private, image = turns(works, n)  # type: ignore[arg-type]
        show(name, private, image)
        rates = [f"{RECORD / t.mean():5.2f} M rows/s" for t in (private, image)]
        print(f"{'':<44} private {rates[0]:<30}   image {rates[1]}")

    lookups(f"lookup of {KEYS:,} random keys, nothing updated")
    updates(f"records of {RECORD:,} random rows, the first {100 * RECORD:,}", 100)
    lookups("lookup, a part updated")
    for table in tables:
        for start in range(0, rows, RECORD):
            keys = np.arange(start, min(start + RECORD, rows), dtype=np.int64)
            versions = np.full(keys.size, version + 1, np.uint64)
            table.apply(RowBatch(Op.ASSIGN, keys, versions, np.ones((keys.size, dim), np.float32)))
    version += 1
    updates("records, when every row was updated before", 100)
    lookups("lookup, every row updated")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000, help="4,000,000")
    parser.add_argument("--dim", type=int, default=64, help="64: a gigabyte of rows")
    parser.add_argument("--updated", type=int, default=102_400, help="rows updated in each process (102,400)")
    parser.add_argument("--rounds", type=int, default=1000, help="lookups of each kind (1,000)")
    parser.add_argument("--folder", type=Path, help="where release and images lie; a temporary one")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="trirank-images-", dir=given.folder))
    try:
        release = make_release(folder / "release", given.rows, given.dim)
        print(f"{given.rows:,} rows of {given.dim} f32; load {os.getloadavg()[0]:.1f}")
        two_processes(release, None, given.updated)
        two_processes(release, folder / "images", given.updated)
        warm()
        in_turns(release, folder / "images", given.rounds)
        print(f"load {os.getloadavg()[0]:.1f}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
