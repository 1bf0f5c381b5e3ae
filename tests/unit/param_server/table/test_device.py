"""Which device a shard's tables lie on: what was asked for, or an error that says what to do."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

from infra.errors import ConfigurationError
from param_server.contract import TableSpec
from param_server.table import device as devices
from param_server.table.device import HOST, open_device
from tests.tables import need_triton

SPEC = TableSpec("item", 4, 4, 100, np.zeros(4, np.float32))


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with Triton and no GPU, whatever this one has."""

    def no_gpu() -> None:
        raise ConfigurationError("shard_device: there is none")

    module = ModuleType("gpu")
    module.Gpu = no_gpu  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)


def test_the_cpu_and_auto_without_a_gpu_are_host_memory() -> None:
    assert open_device("cpu", given=True, environment={}) is HOST
    assert open_device("auto", given=False, environment={}) is HOST


def test_auto_stays_in_host_memory_when_the_gpu_it_was_given_cannot_be_used(without_gpu: None) -> None:
    assert open_device("auto", given=True, environment={}) is HOST


@pytest.mark.parametrize("setting", ["cuda", "cuda:0"])
def test_cuda_without_a_gpu_is_refused(without_gpu: None, setting: str) -> None:
    with pytest.raises(ConfigurationError, match="there is none"):
        open_device(setting, given=True, environment={})


def test_cuda_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"shard_device: .*Triton.*set shard_device to cpu"):
        open_device("cuda", given=False, environment={})


@pytest.mark.parametrize("setting", ["gpu", "cuda:x", "cuda:-1", ""])
def test_a_device_that_is_none_is_refused(setting: str) -> None:
    with pytest.raises(ConfigurationError, match="is not auto, cpu, cuda or cuda:n"):
        open_device(setting, given=True, environment={})


def test_a_numbered_gpu_is_counted_among_those_the_process_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpu", lambda environment: HOST)
    for before, number, after in ((None, 2, "2"), ("5,7", 1, "7"), ("GPU-a,GPU-b", 0, "GPU-a")):
        environment = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
        open_device(f"cuda:{number}", given=False, environment=environment)
        assert environment["CUDA_VISIBLE_DEVICES"] == after
    with pytest.raises(ConfigurationError, match="cuda:2, but CUDA_VISIBLE_DEVICES shows 2 GPUs"):
        open_device("cuda:2", given=False, environment={"CUDA_VISIBLE_DEVICES": "5,7"})
    with pytest.raises(ConfigurationError, match="shows 0 GPUs"):
        open_device("cuda:0", given=False, environment={"CUDA_VISIBLE_DEVICES": ""})


def test_a_machine_without_cuda_says_so_and_what_to_do() -> None:
    code = (
        "from param_server.table.device import open_device\n"
        "from infra.errors import ConfigurationError\n"
        "try:\n    open_device('cuda', given=True)\n"
        "except ConfigurationError as error:\n    print(error)\n"
    )
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    need_triton()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert said.stdout.startswith("shard_device: ")
    assert "set shard_device to cpu" in said.stdout


def test_a_table_is_no_larger_than_its_budget_on_a_gpu() -> None:
    need_triton()
    from param_server.table.gpu_arrays import bytes_for, slots_within

    for dim, budget in ((4, 10**6), (64, 10**8), (64, 3 * 10**10), (512, 10**9)):
        slots = slots_within(budget, dim, evicting=True)
        assert 0.99 * budget < bytes_for(slots, dim, evicting=True) <= budget


def test_an_empty_budget_gives_the_smallest_hot_tier_on_a_gpu() -> None:
    need_triton()
    from param_server.eviction import Policy

    gpu = open_device("cuda", given=False)
    hot = gpu.hot(SPEC, 1, Policy())
    assert 8192 <= hot.capacity_rows <= 8300
    assert gpu.bytes_for(SPEC) == gpu.plain(SPEC).bytes
