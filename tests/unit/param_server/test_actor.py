"""Where shards are put: GPUs that are not there are refused, and no two processes share a name or a socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import ConfigurationError
from infra.settings import Settings
from param_server import actor


@pytest.mark.parametrize(
    ("per_shard", "n", "there", "fits"),
    [
        (0.0, 100, 0.0, True),
        (1.0, 2, 2.0, True),
        (1.0, 3, 2.0, False),
        (0.25, 8, 2.0, True),
        (0.25, 9, 2.0, False),
        # Two of 0.6 are more than one GPU, and a GPU cannot be made of two halves.
        (0.6, 2, 2.0, True),
        (0.6, 3, 2.0, False),
        (0.5, 1, 0.9, False),
    ],
)
def test_shards_that_do_not_fit_on_the_gpus_there_are_refused(
    per_shard: float, n: int, there: float, fits: bool
) -> None:
    if fits:
        actor._check_gpus(per_shard, n, there)
        return
    with pytest.raises(ConfigurationError, match=rf"gpus_per_shard: {n} shard processes .* lower it"):
        actor._check_gpus(per_shard, n, there)


@pytest.fixture(autouse=True)
def long_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of tests are deep; nobody binds these sockets."""
    monkeypatch.setattr(actor, "_MOST_SOCKET_PATH", 1000)


def test_every_process_has_a_name_and_a_socket_of_its_own(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, shards=2, shard_replicas=2)
    configs = [
        actor._config(settings, "redis://", "kafka:1", index, side, replica)
        for index in range(2)
        for replica in range(2)
        for side in ("", "0000beef")
    ]
    assert len({config.name for config in configs}) == len({config.bind for config in configs}) == 8
    assert [config.replica for config in configs[:4]] == [0, 0, 1, 1]


def test_a_new_process_takes_away_the_socket_of_its_predecessor_and_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "sock"
    folder.mkdir(parents=True)
    old = ["shard-1-77.sock", "r1-shard-1-77.sock", "shard-11-77.sock", "beside-1-1-77.sock"]
    for name in old:
        (folder / name).touch()
    settings = Settings(home=tmp_path, shards=12, partitions=16, shard_replicas=2)
    actor._config(settings, "redis://", "kafka:1", 1, "", 0)
    assert {path.name for path in folder.iterdir()} == set(old[1:])
    actor._config(settings, "redis://", "kafka:1", 1, "", 1)
    assert {path.name for path in folder.iterdir()} == set(old[2:])
