"""`python -m tests.bench.hot_keys`: how uneven hot keys make shards, and whether a cache in the gateway would pay.

skew    rows that the busiest shard is asked for, over the mean, under Zipf
cache   500 keys under Zipf from another process: as it is, and with the hottest rows kept by the client, which then
        asks for the rest only. Processor time of both sides, in turns. What such a cache costs in freshness is not
        in it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import uvloop

from param_server.routing import shard_of
from tests.bench.stream import Asker
from tests.bench.stream_parts import N_PARTITIONS, N_ROWS, Apart, make_release, serve, shard_config

KEYS = 500
REQUESTS = 400
DIM = 64


def zipf(exponent: float, n: int, seed: int) -> np.ndarray:
    """Keys i64[n]; which of them are hot has nothing to do with their number."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, N_ROWS + 1) ** -exponent
    names = np.random.default_rng(7).permutation(N_ROWS)
    return names[np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(n))]


def skew() -> None:
    """Share of the busiest shard."""
    for exponent in (0.8, 1.05, 1.3):
        keys = zipf(exponent, 500_000, 1)
        hottest = np.bincount(keys).max() / keys.size
        busiest = []
        for n_shards in (2, 4, 8):
            per_shard = np.bincount(shard_of(keys, N_PARTITIONS, n_shards), minlength=n_shards)
            busiest.append(f"{n_shards} shards {per_shard.max() / per_shard.mean():.2f} x")
        print(f"Zipf {exponent}: hottest key {100 * hottest:.1f} % of rows; busiest over mean: {', '.join(busiest)}")


def cpu_of(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Cached:
    """The hottest rows beside a client: one binary search tells which keys they are."""

    def __init__(self, asker: Asker, hot: np.ndarray, rows: np.ndarray) -> None:
        order = np.argsort(hot)
        self._asker, self._hot, self._rows = asker, hot[order], rows[order]

    async def rows(self, keys: np.ndarray) -> np.ndarray:
        """One lookup."""
        at = np.minimum(np.searchsorted(self._hot, keys), self._hot.size - 1)
        known = self._hot[at] == keys
        out = np.empty((keys.size, DIM), np.float32)
        out[known] = self._rows[at[known]]
        out[~known] = await self._asker.rows(keys[~known])
        return out


async def cache(folder: Path, rounds: int) -> None:
    """Processor time of a lookup, with and without."""
    release = make_release(folder / "release", DIM)
    shard = Apart(serve, shard_config(folder / "s", "127.0.0.1:1", "t"), str(release.path))
    asker = Asker(release, shard.hear())
    await asker.ready()
    requests = zipf(1.05, KEYS * REQUESTS, 2).reshape(REQUESTS, KEYS)
    counts = np.bincount(zipf(1.05, 500_000, 3), minlength=N_ROWS)
    callers: dict[str, Asker | Cached] = {"as it is": asker}
    for n in (100, 1000, 10_000):
        hot = np.argsort(-counts)[:n]
        known = np.isin(requests, hot).mean()
        callers[f"{n} hottest rows kept, {100 * known:.0f} % known"] = Cached(asker, hot, await asker.rows(hot))
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in callers}
    for _ in range(rounds):
        for name, caller in callers.items():
            ours_s, theirs_s = time.process_time(), cpu_of(shard.pid)
            for keys in requests:
                await caller.rows(keys)
            ours_s, theirs_s = time.process_time() - ours_s, cpu_of(shard.pid) - theirs_s
            spent[name].append((ours_s / REQUESTS * 1e6, theirs_s / REQUESTS * 1e6))
    for name, times in spent.items():
        ours, theirs = np.median(times, axis=0)
        print(
            f"{name:<44} client {ours:6.0f} us, shard {theirs:6.0f} us, together {ours + theirs:6.0f} us of processor"
        )
    await asker.close()
    shard.end()


def main() -> None:
    """Measure both."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.hot_keys", description=__doc__)
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args()
    print(f"{N_ROWS} rows of {DIM} f32, {KEYS} keys a request, load {os.getloadavg()[0]:.1f}")
    skew()
    with tempfile.TemporaryDirectory(prefix="tr-") as name:
        uvloop.run(cache(Path(name), given.rounds))


if __name__ == "__main__":
    main()
