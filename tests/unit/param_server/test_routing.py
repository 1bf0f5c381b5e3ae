"""Keys are spread evenly, and every shard owns a range of partitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from param_server.routing import partition_of, partitions_of_shard, shard_of, shard_of_partition


@pytest.mark.parametrize("first", [0, -5000, 2**40])
def test_neighbouring_keys_are_spread_evenly(first: int) -> None:
    counts = np.bincount(partition_of(np.arange(first, first + 80_000), 8), minlength=8)
    assert counts.min() > 9_600
    assert counts.max() < 10_400


@given(n_partitions=st.integers(1, 300), data=st.data())
def test_partitions_are_shared_out_whole_and_nearly_equally(n_partitions: int, data: st.DataObject) -> None:
    n_shards = data.draw(st.integers(1, n_partitions))
    owned = [partitions_of_shard(shard, n_partitions, n_shards) for shard in range(n_shards)]
    assert [p for part in owned for p in part] == list(range(n_partitions))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1)), n_partitions=st.integers(1, 1024), data=st.data())
def test_a_key_belongs_to_the_shard_of_its_partition(keys: list[int], n_partitions: int, data: st.DataObject) -> None:
    n_shards = data.draw(st.integers(1, n_partitions))
    array = np.array(keys, np.int64)
    assert shard_of(array, n_partitions, n_shards).tolist() == [
        shard_of_partition(int(p), n_partitions, n_shards) for p in partition_of(array, n_partitions)
    ]
