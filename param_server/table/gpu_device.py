"""Tables on the one GPU that this process uses; or in Triton's interpreter, where that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from infra.errors import ConfigurationError
from param_server.contract import TableSpec
from param_server.eviction import Policy
from param_server.table import EmbeddingTable
from param_server.table.gpu import GpuTable, slots_for
from param_server.table.gpu_arrays import bytes_for, slots_within
from param_server.table.gpu_host import device_of_process
from param_server.table.gpu_tier import GpuTierTable
from param_server.table.tier import TierTable

T = TypeVar("T")
_GIB = 1 << 30


class Gpu:
    """`device.TableDevice`. Raises ConfigurationError when there is no GPU."""

    takes_any_row = False

    def __init__(self) -> None:
        self._device = device_of_process()

    @property
    def name(self) -> str:
        """The GPU's name."""
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "triton-interpreter"

    def plain(self, spec: TableSpec) -> EmbeddingTable:
        """An empty table. Raises ConfigurationError when the GPU has not the memory."""
        return self._made(
            spec,
            lambda: GpuTable(dim=spec.dim, capacity_rows=spec.capacity_rows, default_row=spec.default_row),
            self.bytes_for(spec),
        )

    def hot(self, spec: TableSpec, budget_bytes: int, policy: Policy) -> TierTable:
        """An empty hot tier. Raises ConfigurationError when the GPU has not the memory."""
        slots = min(slots_within(budget_bytes, spec.dim, evicting=True), slots_for(spec.capacity_rows))
        return self._made(
            spec,
            lambda: GpuTierTable(dim=spec.dim, slots=slots, default_row=spec.default_row, policy=policy),
            bytes_for(slots, spec.dim, evicting=True),
        )

    def bytes_for(self, spec: TableSpec) -> int:
        """Memory of a table that holds all rows."""
        return bytes_for(slots_for(spec.capacity_rows), spec.dim, evicting=False)

    def prepare(self) -> None:
        """Kernels are compiled for each table, in `warm`."""

    def warm(self, tables: Iterable[EmbeddingTable]) -> None:
        """Compile kernels and capture lookups; takes seconds."""
        for table in tables:
            if isinstance(table, GpuTable | GpuTierTable):
                table.warm()

    def _made(self, spec: TableSpec, make: Callable[[], T], wanted_bytes: int) -> T:
        try:
            return make()
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(self._device)[0]
            raise ConfigurationError(
                f"shard_device: table {spec.name} needs {wanted_bytes / _GIB:.2f} GiB on {self.name}, {free / _GIB:.2f}"
                " are free; set tier_hot_bytes to keep only its hot rows there, add shards, or lower table_headroom"
            ) from error
        except ValueError as error:
            raise ConfigurationError(
                f"shard_device: table {spec.name} cannot lie on a GPU ({error}); set shard_device to cpu"
            ) from error
