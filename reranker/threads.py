"""How many threads torch computes with. Its own would wait for each other at every small operation of a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Torch's operations stay in the thread that calls them; as before afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
