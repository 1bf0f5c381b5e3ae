"""What a capture forbids, looked for on fake CUDA tensors: PyTorch propagates shapes, types and devices through them,
and refuses operations over two devices, on a machine without a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from infra.engine.torch_graph import module_of
from infra.release import Role
from tests.quantised_models import TOKEN, USER, exported

# They wait for the GPU, or bring host memory to it.
FORBIDDEN = {"_local_scalar_dense", "nonzero", "_to_copy", "item", "masked_select", "lift_fresh"}


class Operations(TorchDispatchMode):
    """Counts what is run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run_on_fake_cuda(module: torch.nn.Module) -> tuple[torch.Tensor, Counter[str]]:
    """Logits of 2 requests, and the operations that made them."""
    with FakeTensorMode(), torch.no_grad():

        def on_gpu(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.float16, device="cuda")

        for name, buffer in list(module.named_buffers()):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda"))
        inputs = on_gpu(2, 50, TOKEN), on_gpu(2, 200, TOKEN), on_gpu(2, 50), on_gpu(2, USER)
        with Operations() as operations:
            return module(*inputs), operations.found


@pytest.mark.parametrize("role", ["edge", "rerank"])
def test_a_ranker_waits_for_nothing_and_stays_on_the_gpu_in_half_precision(role: Role) -> None:
    logits, found = run_on_fake_cuda(module_of(exported(role), role, half=True))
    assert (logits.device.type, logits.dtype, tuple(logits.shape)) == ("cuda", torch.float16, (2, 200))
    assert found["matmul"] + found["mm"] + found["linear"] + found["bmm"] > 3
    assert not FORBIDDEN & set(found)


def test_an_operation_that_waits_for_the_gpu_is_noticed() -> None:
    class Waits(torch.nn.Module):
        def forward(self, hist: torch.Tensor, target: torch.Tensor, mask: torch.Tensor, user: torch.Tensor) -> Any:
            return user.sum().cpu()

    assert FORBIDDEN & set(run_on_fake_cuda(Waits())[1])
