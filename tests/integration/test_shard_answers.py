"""Shards asked over the real wire: one or many give the same answer, and one that is gone is answered for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from infra.embedded import EmbeddedBroker
from infra.errors import DeadlineExceeded
from infra.release import Release
from param_server.config import ShardConfig
from param_server.routing import partition_of
from tests.integration.shards import (
    DEFAULT,
    DIM,
    N_ITEMS,
    N_PARTITIONS,
    Topics,
    asking,
    item_row,
    recall,
    running,
    shard_config,
)


@contextmanager
def shards(configs: Sequence[ShardConfig], release: Release) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running(config, release)) for config in configs]


@pytest.mark.parametrize("n_shards", [1, 3])
def test_any_number_of_shards_gives_the_same_answer(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path, n_shards: int
) -> None:
    configs = [shard_config(tmp_path, broker.bootstrap, topics, i, n_shards) for i in range(n_shards)]
    with shards(configs, release) as addresses, asking(release, *addresses) as caller:
        got = caller.fetch(("user", [7]), ("item", [1, 2, 2, -5, 49]), topk=recall(5, [49, 47]), timeout_s=30.0)
        assert got.missing_shards == ()
        assert got.rows[0][:, 0].tolist() == [7.0]
        assert got.rows[1][:, 0].tolist() == [1.0, 2.0, 2.0, 9.0, 49.0]
        assert got.found[1].tolist() == [True, True, True, False, True]
        assert got.topk is not None
        assert got.topk.keys.tolist() == [48, 46, 45, 44, 43]
        query = item_row(7) + got.rows[1].mean(axis=0)
        np.testing.assert_allclose(got.topk.scores, [query.sum() * key for key in got.topk.keys], rtol=1e-5)
        assert got.topk.rows[:, 0].tolist() == [48.0, 46.0, 45.0, 44.0, 43.0]


def test_a_shard_that_is_gone_is_answered_for_with_defaults(
    broker: EmbeddedBroker, release: Release, topics: Topics, tmp_path: Path
) -> None:
    configs = [shard_config(tmp_path, broker.bootstrap, topics, i, 2) for i in range(2)]
    keys = list(range(N_ITEMS))
    owner = partition_of(np.array(keys), N_PARTITIONS) * 2 // N_PARTITIONS
    with ExitStack() as gone, running(configs[0], release) as first:
        second = gone.enter_context(running(configs[1], release))
        with asking(release, first, second) as caller:
            assert caller.fetch(("item", keys)).found[0].all()
            gone.close()
            got = caller.fetch(("user", [0]), ("item", keys), topk=recall(5, []))
    assert got.missing_shards == (1,)
    assert got.topk is not None
    assert (owner[got.topk.keys] == 0).all()
    assert got.found[1].tolist() == (owner == 0).tolist()
    np.testing.assert_array_equal(got.rows[1][owner == 1], np.tile(DEFAULT, (int((owner == 1).sum()), 1)))


def test_without_any_shard_there_are_defaults_and_no_recall(release: Release) -> None:
    with asking(release) as caller:
        caller.client._n_shards = 1
        got = caller.fetch(("item", [1, 2]), ("user", []), topk=recall(5, []))
        assert got.rows[0].tolist() == [DEFAULT.tolist()] * 2
        assert got.rows[1].shape == (0, DIM)
        assert (got.topk, got.watermark_us, got.missing_shards) == (None, 0, (0,))
        with pytest.raises(DeadlineExceeded):
            caller.fetch(("item", [1]), timeout_s=-1.0)
