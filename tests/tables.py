"""Every implementation of an embedding table, for suites that run on all of them."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from infra.clock import SystemClock
from param_server.holding import TierRules
from param_server.residents import Residents
from param_server.table import EmbeddingTable
from param_server.table.cpu import CpuTable
from param_server.table.evicting import EvictingTable
from param_server.table.image import Shape, build, load
from param_server.tiers import TieredTable

DIM = 3
DEFAULT = np.array([9.0, 8.0, 7.0], np.float32)

# Triton's interpreter computes with numpy, which warns where a GPU does not.
NUMPY_MAY_OVERFLOW = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

Factory = Callable[[int], EmbeddingTable]


def cpu_table(capacity_rows: int) -> EmbeddingTable:
    """A table in host memory."""
    return CpuTable(dim=DIM, capacity_rows=capacity_rows, default_row=DEFAULT)


def mapped_table(capacity_rows: int) -> EmbeddingTable:
    """A table in a private mapping of an image without rows, whose file is gone already."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image"
        shape = Shape(DIM, capacity_rows, DEFAULT)
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        build(file, "empty", shape, 0, lambda table: None)
        os.close(file)
        return load(path, "empty", shape)[0]


def gpu_table(capacity_rows: int) -> EmbeddingTable:
    """A table on the GPU, or in Triton's interpreter where there is none."""
    need_triton()
    from param_server.table.gpu import GpuTable

    return GpuTable(dim=DIM, capacity_rows=capacity_rows, default_row=DEFAULT)


def tiered_table(capacity_rows: int) -> EmbeddingTable:
    """A third of the rows hot, the rest warm, no cold tier: what does not fit is refused, as in the others."""
    hot_rows = max(1, capacity_rows // 3)
    rules = TierRules()
    hot, *warm = (
        EvictingTable(dim=DIM, capacity_rows=n, default_row=DEFAULT, policy=rules.policy)
        for n in (hot_rows, capacity_rows - hot_rows)
        if n
    )
    return TieredTable(Residents(hot, warm[0] if warm else None), rules, None, SystemClock())


def need_triton() -> None:
    """Skip where Triton is not installed; choose its interpreter where there is no GPU, before kernels are imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
