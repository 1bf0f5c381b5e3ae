"""One fetch: rows of several tables, and a recall over one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from infra.errors import Permanent
from infra.wire.messages import Request
from param_server.contract import Op
from param_server.fetch import fetch_all, fetch_tensors, pooled_query
from param_server.generation import Generation
from param_server.table import RowBatch
from param_server.table.cpu import CpuTable

DEFAULT = np.array([-1.0, -2.0], np.float32)


@pytest.fixture
def generation() -> Generation:
    tables = {}
    for name in ("user", "item"):
        table = CpuTable(dim=2, capacity_rows=8, default_row=DEFAULT)
        rows = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
        table.apply(RowBatch(Op.ASSIGN, np.arange(3), np.ones(3, np.uint64), rows))
        tables[name] = table
    return Generation(7, "r", "abc", 0, tables, {})


def fetch(generation: Generation, args: dict[str, Any], **tensors: Any) -> dict[str, np.ndarray]:
    arrays = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    request = Request("fetch", args={"generation": 7, **args}, tensors=arrays)
    return fetch_tensors({7: generation}, request)


def test_rows_come_per_lookup_with_defaults_for_the_missing(generation: Generation) -> None:
    got = fetch(generation, {"tables": ["user", "item"], "topk": None}, k0=[2, 99], k1=[0])
    assert got["r0"].tolist() == [[1.0, 1.0], [-1.0, -2.0]]
    assert got["f0"].tolist() == [1, 0]
    assert got["f0"].dtype == np.uint8
    assert got["r1"].tolist() == [[1.0, 0.0]]
    assert "tk_keys" not in got


def test_recall_with_a_given_query(generation: Generation) -> None:
    topk = {"table": "item", "k": 2, "pool": None}
    query = np.array([1.0, 0.5], np.float32)
    got = fetch(generation, {"tables": [], "topk": topk}, query=query, exclude=np.array([0]))
    assert got["tk_keys"].tolist() == [2, 1]
    assert got["tk_scores"].tolist() == [1.5, 0.5]
    assert got["tk_rows"].tolist() == [[1.0, 1.0], [0.0, 1.0]]


def test_recall_with_a_pooled_query(generation: Generation) -> None:
    pool = [[0, "sum", -1], [1, "mean", -1]]
    topk = {"table": "item", "k": 1, "pool": pool}
    got = fetch(generation, {"tables": ["user", "item"], "topk": topk}, k0=[0], k1=[0, 2])
    assert got["tk_keys"].tolist() == [2]
    assert got["tk_scores"].tolist() == [2.5]


@pytest.mark.parametrize(
    ("own_found", "expected"), [(True, [1.0, 0.0]), (False, [10.0, 20.0])], ids=["own row", "bucket"]
)
def test_of_two_rows_that_stand_in_for_each_other_exactly_one_counts(own_found: bool, expected: list[float]) -> None:
    own = np.array([[1.0, 0.0]], np.float32) if own_found else DEFAULT[None]
    bucket = np.array([[10.0, 20.0]], np.float32)
    pool = [[0, "sum", -1], [1, "sum", 0]]
    got = pooled_query(pool, [own, bucket], [np.array([own_found]), np.array([True])], 2)
    assert got.tolist() == expected


def test_an_empty_lookup_adds_nothing_and_lets_the_other_stand_in() -> None:
    empty, bucket = np.empty((0, 2), np.float32), np.array([[3.0, 4.0]], np.float32)
    pool = [[0, "sum", -1], [1, "sum", 0], [0, "mean", -1]]
    got = pooled_query(pool, [empty, bucket], [np.empty(0, np.bool_), np.array([False])], 2)
    assert got.tolist() == [3.0, 4.0]


def test_a_mean_counts_missing_rows_as_defaults() -> None:
    rows = np.array([[1.0, 1.0], [-1.0, -2.0]], np.float32)
    assert pooled_query([[0, "mean", -1]], [rows], [np.array([True, False])], 2).tolist() == [0.0, -0.5]


@pytest.mark.parametrize(
    ("args", "tensors", "says"),
    [
        ({"generation": 8, "tables": []}, {}, "generation 8"),
        ({"tables": ["nothing"]}, {"k0": [1]}, "no table 'nothing'"),
        ({"tables": ["item"]}, {}, "k0"),
        ({"tables": ["item"]}, {"k0": [1.0]}, "k0"),
        ({"tables": ["item"]}, {"k0": [[1]]}, "k0"),
        ({"tables": [], "topk": {"table": "item", "k": 0, "pool": []}}, {}, "k is 0"),
        ({"tables": [], "topk": {"table": "item", "k": 1, "pool": None}}, {}, "query"),
        ({"tables": [], "topk": {"table": "item", "k": 1, "pool": [[0, "sum", -1]]}}, {}, "pool term"),
        ({"tables": ["item"], "topk": {"table": "item", "k": 1, "pool": [[0, "max", -1]]}}, {"k0": [1]}, "pool term"),
        (
            {"tables": [], "topk": {"table": "item", "k": 1, "pool": None}},
            {"query": np.ones(3, np.float32)},
            "3 numbers",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    generation: Generation, args: dict[str, Any], tensors: dict[str, Any], says: str
) -> None:
    with pytest.raises(Permanent, match=says):
        fetch(generation, args, **tensors)


def test_fetches_are_answered_together_as_if_each_came_alone(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(tables: list[str], number: int = 7, **keys: list[int]) -> Request:
        tensors = {name: np.array(some, np.int64) for name, some in keys.items()}
        return Request("fetch", args={"generation": number, "tables": tables, "topk": None}, tensors=tensors)

    requests = [
        request(["user", "item"], k0=[2, 99], k1=[0]),
        request(["item"], number=8, k0=[0]),
        request(["item", "item"], k0=[1, 1], k1=[]),
        request(["nothing"], k0=[0]),
        request(["item"]),
        request(["user"], k0=[0]),
    ]
    alone = [fetch_all({7: generation}, [one])[0] for one in requests]
    lookups: list[int] = []
    right = CpuTable.lookup
    monkeypatch.setattr(CpuTable, "lookup", lambda self, keys: lookups.append(keys.size) or right(self, keys))
    together = fetch_all({7: generation}, requests)
    assert sorted(lookups) == [3, 3]
    for one, other in zip(alone, together, strict=True):
        if isinstance(one, Permanent):
            assert str(other) == str(one)
        else:
            assert isinstance(other, dict)
            assert {name: array.tolist() for name, array in other.items()} == {
                name: array.tolist() for name, array in one.items()
            }
    assert [isinstance(one, Permanent) for one in together] == [False, True, False, True, True, False]
