"""A recipe refuses what means nothing, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.errors import InvalidInput
from reranker.recipe import Recipe


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("batch_size", 0, "batch_size: 0 is too small; give 1 or more"),
        ("accumulate", 0, "accumulate: 0 is too small"),
        ("patience", -1, "patience: -1 is too small; give 0 or more"),
        ("prefetch", 0, "prefetch: 0 is too small"),
        ("pooling", "sum", "pooling: 'sum' is unknown; give one of bag, mean"),
        ("amp", "fp8", "amp: 'fp8' is unknown; give one of auto, on, off"),
        ("device", "tpu", "device: 'tpu' is unknown; give one of cpu, cuda"),
        ("sparse", "gap", "sparse: 'gap' is no table with sparse gradients; give auto, none, or tables of item, user"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(field: str, value: object, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        replace(Recipe(), **{field: value}).checked()
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("sparse", "tables"), [("auto", None), ("none", ()), ("user", ("user",)), ("item, user", ("item", "user"))]
)
def test_tables_with_sparse_gradients_are_named(sparse: str, tables: object) -> None:
    assert replace(Recipe(), sparse=sparse).checked().sparse_tables() == tables
