from __future__ import annotations

from pathlib import Path

import pytest

from edge_ranker.rank_server import MAX_SOCKET_PATH, RankServer, RankServerConfig, bind_address
from edge_ranker.recorded import recorded_inputs
from edge_ranker.verify import Role, verify, warm_up
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.rank import RankHandler
from infra.errors import PeerGone, ReleaseRefused
from infra.release import Release
from tests.tiny_release import SCHEMA, write_tiny_release


def handler(release: Release, role: Role) -> RankHandler:
    engine = OnnxEngine(release.edge_model if role == "edge" else release.rerank_model)
    return RankHandler(engine, release.manifest.name, token_dim=SCHEMA.token_dim, user_dim=SCHEMA.user_dim)


@pytest.mark.parametrize("role", ["edge", "rerank"])
def test_a_release_that_scores_as_recorded_is_served(tmp_path: Path, role: Role) -> None:
    release = write_tiny_release(tmp_path / "r")

    verify(handler(release, role), recorded_inputs(release), role)
    warm_up(handler(release, role), SCHEMA)


@pytest.mark.parametrize("role", ["edge", "rerank"])
def test_a_release_that_scores_otherwise_is_refused(tmp_path: Path, role: Role) -> None:
    release = write_tiny_release(tmp_path / "r", wrong_by=2e-3)

    with pytest.raises(ReleaseRefused, match=f"{role}: scores differ .* 0.002"):
        verify(handler(release, role), recorded_inputs(release), role)


def test_the_other_tiers_model_is_noticed(tmp_path: Path) -> None:
    release = write_tiny_release(tmp_path / "r")

    with pytest.raises(ReleaseRefused):
        verify(handler(release, "edge"), recorded_inputs(release), "rerank")


def test_a_replica_of_a_refused_release_never_listens(tmp_path: Path) -> None:
    release = write_tiny_release(tmp_path / "r", wrong_by=1.0)
    server = RankServer(RankServerConfig("edge", str(release.path), "redis://127.0.0.1:1", "s", str(tmp_path / "run")))

    with pytest.raises(ReleaseRefused):
        server.start()
    with pytest.raises(PeerGone):
        server.check()
    server.stop()
    assert not (tmp_path / "run").exists()


def test_a_socket_path_that_is_too_long_becomes_a_loopback_port(tmp_path: Path) -> None:
    assert bind_address(tmp_path / ("x" * MAX_SOCKET_PATH), "edge-1") == "tcp://127.0.0.1:*"
