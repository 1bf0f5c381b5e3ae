"""Bytes and numbers that live longer than a process. The files beside this one are never edited, only added to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest

from feature_service import hashing
from param_server.contract import Op, UpdateBatch, decode_batch, encode_batch
from param_server.routing import partition_of, shard_of, shard_of_partition

HERE = Path(__file__).parent


def golden(name: str) -> Any:
    return json.loads((HERE / name).read_text(encoding="utf-8"))


EMBU = golden("embu_v1.json")
ROUTING = golden("routing.json")
HASHING = golden("hashing.json")


def batch_of(case: dict[str, Any]) -> UpdateBatch:
    return UpdateBatch(
        Op[case["op"]],
        case["table_id"],
        case["generation"],
        case["dim"],
        case["base_version"],
        case["event_time_us"],
        np.array(case["keys"], np.int64),
        None if case["versions"] is None else np.array(case["versions"], np.uint64),
        np.array(case["rows"], np.float32).reshape(-1, case["dim"]),
    )


@pytest.mark.parametrize("case", EMBU, ids=lambda case: case["name"])
def test_embu_is_written_as_it_always_was(case: dict[str, Any]) -> None:
    assert encode_batch(batch_of(case)).hex() == case["hex"]


@pytest.mark.parametrize("case", EMBU, ids=lambda case: case["name"])
def test_embu_is_read_as_it_always_was(case: dict[str, Any]) -> None:
    got, expected = decode_batch(bytes.fromhex(case["hex"])), batch_of(case)
    for field in ("op", "table_id", "generation", "dim", "base_version", "event_time_us"):
        assert getattr(got, field) == getattr(expected, field)
    for field in ("keys", "versions", "rows"):
        np.testing.assert_array_equal(getattr(got, field), getattr(expected, field))


def test_embu_has_the_layout_the_design_gives() -> None:
    value = bytes.fromhex(EMBU[0]["hex"])
    assert value[:4] == b"EMBU"
    assert [int.from_bytes(value[a:b], "little") for a, b in ((4, 6), (6, 8), (8, 12), (12, 16))] == [
        1, 1, 4, 0xDEADBEEF,
    ]  # fmt: skip
    assert value[16:18] == bytes([1, 0])
    assert [int.from_bytes(value[a:b], "little") for a, b in ((18, 20), (20, 24), (24, 32), (32, 40))] == [
        2, 4, 0, 893286638000000,
    ]  # fmt: skip
    assert int.from_bytes(value[40:44], "little") == crc32c.crc32c(value[:40] + value[44:])
    assert np.frombuffer(value, "<i8", 4, 44).tolist() == EMBU[0]["keys"]
    assert len(value) == 44 + 4 * 8 + 4 * 2 * 4


@pytest.mark.parametrize("n_partitions", [int(n) for n in ROUTING["partition_of"]])
def test_a_key_stays_in_its_partition(n_partitions: int) -> None:
    got = partition_of(np.array(ROUTING["keys"], np.int64), n_partitions)
    assert got.tolist() == ROUTING["partition_of"][str(n_partitions)]


@pytest.mark.parametrize("sharding", ROUTING["shard_of_partition"])
def test_a_partition_stays_with_its_shard(sharding: str) -> None:
    n_partitions, n_shards = map(int, sharding.split("/"))
    expected = ROUTING["shard_of_partition"][sharding]
    assert [shard_of_partition(p, n_partitions, n_shards) for p in range(n_partitions)] == expected
    keys = np.array(ROUTING["keys"], np.int64)
    assert shard_of(keys, n_partitions, n_shards).tolist() == [
        expected[partition] for partition in partition_of(keys, n_partitions)
    ]


def test_a_raw_id_keeps_its_key() -> None:
    assert HASHING["hash_name"] == hashing.HASH_NAME
    for vector in HASHING["keys"]:
        assert hashing.key_of(vector["namespace"], vector["raw"]) == vector["key"]
        assert hashing.keys_of(vector["namespace"], [vector["raw"]]).tolist() == [vector["key"]]


def test_a_user_keeps_his_bucket() -> None:
    for vector in HASHING["buckets"]:
        assert hashing.bucket_of(vector["user"], vector["n_buckets"]) == vector["bucket"]
