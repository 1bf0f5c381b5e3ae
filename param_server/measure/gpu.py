"""The GPU table on a CUDA card, beside copies and gathers: lookup, apply, topk (`gpu_stall.py` has stall).

Keys are uniform over all resident rows, eight sets take turns, outputs are written, times are medians on the device.
Every answer that is timed is checked once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from param_server.contract import Op
from param_server.measure import gpu_timing as timing
from param_server.measure.gpu_timing import rows_line
from param_server.measure.lines import Line, check
from param_server.table.gpu import GpuTable
from param_server.table.gpu_arrays import Dtype
from param_server.table.gpu_launch import Staged
from param_server.table.gpu_topk import Scorer
from param_server.table.gpu_write import Writer

SLOTS = 64 << 20
LOAD = 0.9
MANY = 1 << 20
FEW = 4096
SETS = 8
REPEATS = 40
ROUNDS = 10
LOOKUPS: list[tuple[int, Dtype, str]] = [(64, "f32", ">= 6.3"), (64, "f16", ">= 10"), (128, "f16", ">= 6.5")]


def lookup(slots: int, load: float) -> list[Line]:
    """Lookups of resident keys, and what reading the same rows costs without an index."""
    lines: list[Line] = []
    for dim, dtype, target in LOOKUPS:
        table, keys = timing.filled_table(slots, load, dim, dtype)
        lines += _lookups(table, keys, f"dim {dim} {dtype}", target)
        if (dim, dtype) == (64, "f32"):
            lines += _memory(table)
            lines += _few(table, keys)
        del table, keys
        torch.cuda.empty_cache()
    return lines


def _lookups(table: GpuTable, keys: torch.Tensor, name: str, target: str) -> list[Line]:
    rows = table.arrays.rows
    out = torch.empty((MANY, table.dim), dtype=rows.dtype, device="cuda")
    found = torch.empty(MANY, dtype=torch.uint8, device="cuda")
    sets = timing.sample(keys, MANY, SETS)
    slots = [table.find_device(some) for some in sets]

    def looks(some: torch.Tensor) -> Callable[[], None]:
        return lambda: table.lookup_device(some, out, found)

    looks(sets[0])()
    check(bool(found.all()) and bool((out[:, 0].float() == (sets[0] & 1023).float()).all()), "lookup")
    misses = [timing.random_keys(MANY) for _ in range(SETS)]
    reads: list[tuple[str, list[Callable[[], object]]]] = [
        (f"lookup {name}", [looks(some) for some in sets]),
        ("  every key missing", [looks(some) for some in misses]),
        ("  gather, slots known", [(lambda some=some: table.gather_device(some, out)) for some in slots]),  # type: ignore[misc]
        ("  torch.index_select", [(lambda some=some: torch.index_select(rows, 0, some, out=out)) for some in slots]),  # type: ignore[misc]
    ]
    lines = [rows_line(what, MANY, timing.graph_us(calls, REPEATS)) for what, calls in reads]
    lines[0] = replace(lines[0], target=target)
    half = rows.view(-1)[: 1 << 29]
    copy = torch.empty_like(half)
    # Not in a graph: there a copy is a node of another, slower kind.
    spent = median(timing.device_us([lambda: copy.copy_(half)], REPEATS))
    lines.append(Line("  device copy", round(spent, 2), round(2 * half.nbytes / spent / 1e6, 2), "TB/s"))
    return lines


def _few(table: GpuTable, keys: torch.Tensor) -> list[Line]:
    out = torch.empty((FEW, table.dim), dtype=torch.float32, device="cuda")
    found = torch.empty(FEW, dtype=torch.uint8, device="cuda")
    calls = [(lambda some=some: table.lookup_device(some, out, found)) for some in timing.sample(keys, FEW, 40)]
    spent = median(timing.graph_us(calls, 40))
    return [Line(f"lookup of {FEW} keys, dim 64 f32, CUDA graph", round(spent, 2), FEW / spent, "M rows/s", "<= 8 us")]


def _memory(table: GpuTable) -> list[Line]:
    payload = table.arrays.rows.nbytes
    live = table.size * table.dim * table.arrays.rows.element_size()
    return [
        Line("memory over place for rows, dim 64 f32", 0.0, round(table.bytes / payload, 3), "x", "<= 1.15"),
        Line(
            f"memory over live rows at load {table.size / table.arrays.n_slots:.2f}",
            0.0,
            round(table.bytes / live, 3),
            "x",
        ),
    ]


def apply(slots: int, load: float) -> list[Line]:
    """Assign to resident rows, and upsert with eviction at load 1.0; dim 64 f32, batches of 1 Mi rows."""
    table, keys = timing.filled_table(slots, load, 64, "f32")
    lines = []
    for n, target, first_version in ((MANY, ">= 3.5", 2), (1 << 16, "", 2000)):
        # Disjoint: a key that is in two sets of one round is stale in the second.
        sets = list(keys[torch.randperm(keys.numel(), device="cuda")[: n * SETS]].split(n))  # type: ignore[no-untyped-call]
        lines.append(rows_line(f"assign of {n} resident rows", n, _assigns(table, sets, first_version), target))
    del table, keys, sets
    torch.cuda.empty_cache()
    full = _evicting(slots)
    for keep, name in ((True, "upsert, load 1.0, evicted rows returned"), (False, "  evicted keys and versions only")):
        lines.append(rows_line(name, MANY, _upserts(full, keep), ">= 2.0"))
    return lines


def _assigns(table: GpuTable, sets: list[torch.Tensor], first_version: int) -> list[float]:
    writer = table.writer
    rows = [timing.rows_for(some, 64) for some in sets]
    version = torch.full_like(sets[0], first_version)
    counters = writer.new_counters()

    def assigns(some: torch.Tensor, new: torch.Tensor) -> Callable[[], None]:
        def call() -> None:
            staged = Staged(Op.ASSIGN, some, version, new)
            codes, mark = writer.put(staged, counters, None, insert=True)
            writer.settle(staged, codes, mark, counters)

        return call

    calls = [assigns(*pair) for pair in zip(sets, rows, strict=True)]
    times: list[float] = []
    for _ in range(ROUNDS):
        # Every round needs a newer version; it is made outside of what is timed.
        version += 1
        times += timing.timed(calls)
    out, found = torch.empty_like(rows[0]), torch.empty(sets[0].numel(), dtype=torch.uint8, device="cuda")
    table.lookup_device(sets[-1], out, found)
    check(torch.equal(out, rows[-1]) and bool(found.all()), "assign")
    return times[SETS:]


def _evicting(slots: int) -> GpuTable:
    table = GpuTable(dim=64, capacity_rows=slots, default_row=np.zeros(64, np.float32), dtype="f32", evicting=True)
    rows = torch.randn((timing.CHUNK, 64), device="cuda")
    writer, counters = table.writer, table.writer.new_counters()
    turn = 0
    while int(counters.sum(1)[2]) < 0.99999 * table.capacity_rows and turn < 8 * slots // timing.CHUNK:
        turn += 1
        keys = timing.random_keys(timing.CHUNK)
        score = torch.full((timing.CHUNK,), turn, dtype=torch.int32, device="cuda")
        _upsert(writer, Staged(Op.ASSIGN, keys, torch.ones_like(keys), rows), score, counters, keep_rows=False)
    return table


def _upsert(writer: Writer, staged: Staged, scores: torch.Tensor, counters: torch.Tensor, *, keep_rows: bool) -> None:
    codes, mark = writer.put(staged, counters, None, insert=False, scores=scores)
    writer.replace(staged, codes, mark, scores, counters, keep_rows=keep_rows)
    writer.settle(staged, codes, mark, counters, scores)


def _upserts(table: GpuTable, keep_rows: bool) -> list[float]:
    rows = [torch.randn((MANY, 64), device="cuda") for _ in range(SETS)]
    counters = table.writer.new_counters()
    version = torch.ones(MANY, dtype=torch.int64, device="cuda")
    score = torch.full((MANY,), 1 << 20, dtype=torch.int32, device="cuda")

    def upserts(keys: torch.Tensor, new: torch.Tensor) -> Callable[[], object]:
        staged = Staged(Op.ASSIGN, keys, version, new)
        return lambda: _upsert(table.writer, staged, score, counters, keep_rows=keep_rows)

    times: list[float] = []
    for _ in range(ROUNDS):
        score += 1
        keys = [timing.random_keys(MANY) for _ in range(SETS)]
        times += timing.timed([upserts(*pair) for pair in zip(keys, rows, strict=True)])
    out, found = torch.empty_like(rows[0]), torch.empty(MANY, dtype=torch.uint8, device="cuda")
    table.lookup_device(keys[-1], out, found)
    present = found.bool()
    check(float(present.float().mean()) > 0.999 and torch.equal(out[present], rows[-1][present]), "upsert")
    return times[SETS:]


def topk(slots: int, load: float) -> list[Line]:
    """Eight queries over 10 M live rows, dim 64 f16, k 500."""
    del slots
    live = 10_000_000
    table, _ = timing.filled_table(int(live / load), load, 64, "f16")
    queries = torch.randn((8, 64), device="cuda")
    asked = queries.cpu().numpy()
    times = timing.device_us([lambda: Scorer(table.arrays, asked).best(500)], 40)
    lines = [
        Line(
            "topk, 8 queries, 10 M rows, dim 64 f16, k 500",
            round(median(times), 1),
            1e6 / median(times),
            "/s",
            "<= 1 ms",
        )
    ]
    rows = table.arrays.rows

    def plain() -> object:
        return torch.topk(queries.half() @ rows.T, 500, dim=1)

    beside = timing.device_us([plain], 10)
    lines.append(Line("  torch: matrix product, then topk", round(median(beside), 1), 1e6 / median(beside), "/s"))
    read = timing.device_us([lambda: rows.sum(dtype=torch.float32)], 10)
    lines.append(
        Line("  reading the rows once (torch.sum)", round(median(read), 1), rows.nbytes / median(read) / 1e6, "TB/s")
    )
    best = table.topk(asked, 500)
    state = table.arrays.words >> 62 & 3
    for i, one in enumerate(best):
        exact = rows.double() @ queries[i].double()
        exact[state != 1] = -torch.inf
        top = torch.topk(exact, 500).values.cpu().numpy()
        check(np.allclose(one.scores, top, rtol=1e-5, atol=1e-5), "topk")
        del exact
    return lines
