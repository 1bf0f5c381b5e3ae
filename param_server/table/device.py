"""Where the tables of a shard lie: in host memory, or on a GPU. One choice for a process, made before the first table.

`auto` takes the GPU that the process was given, if PyTorch can use it, and host memory else; the choice is in the
shard's health and log. `cuda` and `cuda:n` (the n-th GPU that the process may see) are refused where there is none.
PyTorch is imported only for a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Iterable, MutableMapping
from typing import Protocol, cast

from infra.errors import ConfigurationError
from param_server.contract import TableSpec
from param_server.eviction import Policy
from param_server.table import EmbeddingTable, cpu, evicting
from param_server.table.tier import TierTable

logger = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CUDA = re.compile(r"cuda(?::(\d+))?")


class TableDevice(Protocol):
    """Makes tables."""

    @property
    def name(self) -> str:
        """For people: `cpu`, or the GPU's name."""
        ...

    @property
    def takes_any_row(self) -> bool:
        """Whether a hot tier takes any row while it has room."""
        ...

    def plain(self, spec: TableSpec) -> EmbeddingTable:
        """An empty table that holds `spec.capacity_rows` rows. Raises ConfigurationError when memory is too small."""
        ...

    def hot(self, spec: TableSpec, budget_bytes: int, policy: Policy) -> TierTable:
        """An empty hot tier within a budget, no larger than the table. Raises ConfigurationError."""
        ...

    def bytes_for(self, spec: TableSpec) -> int:
        """Memory of a table that holds all rows."""
        ...

    def prepare(self) -> None:
        """Compile what tables in host memory will call."""
        ...

    def warm(self, tables: Iterable[EmbeddingTable]) -> None:
        """Make filled tables ready to answer at full speed."""
        ...


class HostMemory:
    """Tables in host memory."""

    name = "cpu"
    takes_any_row = True

    def plain(self, spec: TableSpec) -> EmbeddingTable:
        """An empty table."""
        return cpu.CpuTable(dim=spec.dim, capacity_rows=spec.capacity_rows, default_row=spec.default_row)

    def hot(self, spec: TableSpec, budget_bytes: int, policy: Policy) -> TierTable:
        """An empty hot tier."""
        return tier_in_host_memory(spec, budget_bytes, policy)

    def bytes_for(self, spec: TableSpec) -> int:
        """Memory of a table that holds all rows."""
        return evicting.bytes_for(spec.capacity_rows, spec.dim)

    def prepare(self) -> None:
        """Compile what the tables will call, or load it from numba's cache."""
        cpu.warm()

    def warm(self, tables: Iterable[EmbeddingTable]) -> None:
        """Nothing is left to do."""


HOST = HostMemory()


def tier_in_host_memory(spec: TableSpec, budget_bytes: int, policy: Policy) -> TierTable:
    """An empty tier within a budget, no larger than the table."""
    rows = min(evicting.rows_within(budget_bytes, spec.dim), spec.capacity_rows)
    return evicting.EvictingTable(dim=spec.dim, capacity_rows=rows, default_row=spec.default_row, policy=policy)


def open_device(setting: str, *, given: bool, environment: MutableMapping[str, str] = os.environ) -> TableDevice:
    """The device for `auto`, `cpu`, `cuda` or `cuda:n`; `given` says whether a GPU was given to this process.

    Raises ConfigurationError, with what to do, when the device is not there.
    """
    if setting == "cpu" or (setting == "auto" and not given):
        return HOST
    match = _CUDA.fullmatch(setting)
    if setting != "auto" and match is None:
        raise ConfigurationError(f"shard_device: {setting!r} is not auto, cpu, cuda or cuda:n")
    if match is not None and match[1] is not None:
        _choose(int(match[1]), environment)
    try:
        return _gpu(environment)
    except ConfigurationError as error:
        if setting != "auto":
            raise
        logger.warning("tables lie in host memory, the GPU that was given cannot be used", extra={"reason": error})
        return HOST


def _choose(number: int, environment: MutableMapping[str, str]) -> None:
    """Let this process see one GPU, before CUDA starts: every thread then means the same one."""
    seen = environment.get(_VISIBLE)
    devices = None if seen is None else [name for name in seen.split(",") if name]
    if devices is not None and number >= len(devices):
        raise ConfigurationError(f"shard_device: cuda:{number}, but {_VISIBLE} shows {len(devices)} GPUs")
    environment[_VISIBLE] = str(number) if devices is None else devices[number]


def _gpu(environment: MutableMapping[str, str]) -> TableDevice:
    if importlib.util.find_spec("triton") is None:
        raise ConfigurationError(
            "shard_device: tables on a GPU need Triton, which comes with the CUDA build of PyTorch; install that, or "
            "set shard_device to cpu"
        )
    if environment.get("TRITON_INTERPRET", "0") not in ("", "0"):
        logger.warning("GPU tables run in Triton's interpreter: right, and thousands of times slower")
    # By name: nothing but this choice brings PyTorch in.
    module = importlib.import_module("param_server.table.gpu_device")
    return cast(TableDevice, module.Gpu())
