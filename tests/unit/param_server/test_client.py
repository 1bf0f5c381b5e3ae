"""The client: which peer it asks, and what it answers when there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from infra.deadline import Deadline
from infra.errors import DeadlineExceeded, Overloaded, PeerGone, Permanent, TrirankError
from infra.wire.client import PeerState
from infra.wire.messages import Reply
from param_server.client import FetchResult, ParameterClient, PoolTerm, TopkQuery
from param_server.contract import TableSpec
from param_server.routing import shard_of

DEFAULT = np.array([-1.0, -2.0], np.float32)
SPECS = {"item": TableSpec("item", 4, 2, 8, DEFAULT)}
N_PARTITIONS = 8


class FakeWire:
    """Every shard holds every key: the row of key k is (k, shard)."""

    def __init__(self, *peers: PeerState, failing: dict[str, TrirankError] | None = None) -> None:
        self._peers = list(peers)
        self._failing = failing or {}
        self.calls: list[tuple[str | None, dict[str, Any], dict[str, np.ndarray]]] = []

    def peers(self) -> list[PeerState]:
        return self._peers

    async def call(self, method: str, *, args: Any, tensors: Any, deadline: Any, trace_id: str, peer: str) -> Reply:
        self.calls.append((peer, args, tensors))
        if peer in self._failing:
            raise self._failing[peer]
        shard = next(p.meta["shard"] for p in self._peers if p.name == peer)
        reply: dict[str, np.ndarray] = {}
        for i in range(len(args["tables"])):
            keys = tensors[f"k{i}"]
            reply[f"r{i}"] = np.stack((keys, np.full(keys.size, shard)), axis=1).astype(np.float32)
            reply[f"f{i}"] = np.ones(keys.size, np.uint8)
        if args["topk"]:
            keys = np.array([10 + shard, 20 + shard, 30])
            reply |= {
                "tk_keys": keys,
                "tk_scores": np.array([3.0 + shard, 1.0, 0.5], np.float32),
                "tk_rows": np.stack((keys, keys), axis=1).astype(np.float32),
            }
        return Reply({"watermark_us": 100 - shard, "generation": 7, "applied_us": 0}, reply)


def peer(name: str, shard: int, *, live: bool = True, in_flight: int = 0) -> PeerState:
    return PeerState(name, "ipc://x", "r", live, in_flight, {"shard": shard})


def topk() -> TopkQuery:
    def combine(rows: Any, found: Any) -> np.ndarray:
        total: np.ndarray = rows[0].sum(axis=0)
        return total

    return TopkQuery("item", 3, np.array([99]), (PoolTerm(0, "sum"), PoolTerm(1, "mean", 0)), combine)


def fetch(wire: FakeWire, n_shards: int, *keys: list[int], recall: bool = False, left_s: float = 1.0) -> FetchResult:
    client = ParameterClient(wire, n_shards, N_PARTITIONS, SPECS)  # type: ignore[arg-type]
    lookups = [("item", np.array(k, np.int64)) for k in keys]
    deadline = Deadline.after(left_s)
    return asyncio.run(client.fetch(generation=7, lookups=lookups, topk=topk() if recall else None, deadline=deadline))


def test_one_shard_is_asked_once_for_everything() -> None:
    wire = FakeWire(peer("a", 0))
    got = fetch(wire, 1, [1, 2], [3], recall=True)
    ((_, args, tensors),) = wire.calls
    assert args == {
        "generation": 7,
        "tables": ["item", "item"],
        "topk": {"table": "item", "k": 3, "pool": [[0, "sum", -1], [1, "mean", 0]]},
    }
    assert tensors["exclude"].tolist() == [99]
    assert got.rows[0][:, 0].tolist() == [1.0, 2.0]
    assert got.found[1].dtype == np.bool_
    assert got.topk is not None
    assert got.topk.keys.tolist() == [10, 20, 30]
    assert got.watermark_us == 100


def test_many_shards_are_asked_for_their_own_keys_then_for_the_recall() -> None:
    wire = FakeWire(peer("a", 0), peer("b", 1))
    keys = [5, 6, 7, 8, 5]
    got = fetch(wire, 2, keys, recall=True)
    owners = shard_of(np.array(keys), N_PARTITIONS, 2)
    assert got.rows[0].tolist() == [[k, s] for k, s in zip(keys, owners.tolist(), strict=True)]
    assert len(wire.calls) == 4
    queries = [tensors["query"].tolist() for _, args, tensors in wire.calls if args["topk"]]
    assert queries == [got.rows[0].sum(axis=0).tolist()] * 2
    assert got.topk is not None
    assert got.topk.keys.tolist() == [11, 10, 20]
    assert got.topk.scores.tolist() == [4.0, 3.0, 1.0]
    assert got.topk.rows[:, 0].tolist() == [11.0, 10.0, 20.0]
    assert got.watermark_us == 99


def test_after_a_restart_the_live_peer_with_less_to_do_is_asked() -> None:
    wire = FakeWire(peer("dead", 0, live=False), peer("busy", 0, in_flight=5), peer("new", 0, in_flight=1))
    fetch(wire, 1, [1])
    assert [name for name, _, _ in wire.calls] == ["new"]


@pytest.mark.parametrize("error", [PeerGone("x"), DeadlineExceeded("x"), Overloaded("x"), Permanent("x")])
def test_a_shard_that_fails_is_answered_for_with_defaults(error: TrirankError) -> None:
    wire = FakeWire(peer("a", 0), failing={"a": error})
    got = fetch(wire, 1, [1, 2], [], recall=True)
    assert got.rows[0].tolist() == [DEFAULT.tolist()] * 2
    assert got.rows[1].shape == (0, 2)
    assert not got.found[0].any()
    assert (got.topk, got.watermark_us, got.missing_shards) == (None, 0, (0,))


def test_the_shards_that_answer_still_count() -> None:
    wire = FakeWire(peer("a", 0), peer("b", 1), failing={"b": PeerGone("x")})
    keys = list(range(20))
    got = fetch(wire, 2, keys, recall=True)
    assert got.found[0].tolist() == (shard_of(np.array(keys), N_PARTITIONS, 2) == 0).tolist()
    assert got.topk is not None
    assert got.topk.keys.tolist() == [10, 20, 30]
    assert got.missing_shards == (1,)


def test_only_a_deadline_that_is_already_over_is_an_error() -> None:
    wire = FakeWire(peer("a", 0))
    with pytest.raises(DeadlineExceeded):
        fetch(wire, 1, [1], left_s=-0.001)
    assert wire.calls == []


def test_no_peer_at_all_is_a_missing_shard() -> None:
    assert fetch(FakeWire(), 1, [1]).missing_shards == (0,)
