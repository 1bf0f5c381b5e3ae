"""Torch's threads as in training, for the tests that take steps. Imports torch only for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread_per_operation() -> Iterator[None]:
    from reranker.threads import one_thread_per_operation

    with one_thread_per_operation():
        yield
