from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_ranker.rank_server import MAX_SOCKET_PATH, RankServer, RankServerConfig, bind_address
from edge_ranker.recorded import recorded_inputs
from edge_ranker.verify import RecordedCheck
from infra.engine.choose import EngineDisagrees
from infra.engine.onnx_cpu import OnnxEngine
from infra.errors import PeerGone, Permanent, ReleaseRefused
from infra.release import Release, Role
from tests.tiny_release import SCHEMA, write_tiny_release

F32 = np.ndarray


def check(release: Release, role: Role) -> RecordedCheck:
    return RecordedCheck(role, SCHEMA, recorded_inputs(release))


def engine(release: Release, role: Role) -> OnnxEngine:
    return OnnxEngine(release.edge_model if role == "edge" else release.rerank_model)


@pytest.mark.parametrize("role", ["edge", "rerank"])
def test_an_engine_that_scores_as_recorded_is_served(tmp_path: Path, role: Role) -> None:
    release = write_tiny_release(tmp_path / "r")

    check(release, role).whole(engine(release, role))
    assert check(release, role).seconds(engine(release, role)) > 0


@pytest.mark.parametrize("role", ["edge", "rerank"])
def test_an_engine_that_scores_otherwise_is_refused(tmp_path: Path, role: Role) -> None:
    release = write_tiny_release(tmp_path / "r", wrong_by=0.1)

    for test in (check(release, role).whole, check(release, role).quick):
        with pytest.raises(EngineDisagrees, match=f"{role}: scores differ .* of the largest"):
            test(engine(release, role))


def test_an_engine_that_cannot_run_a_shape_of_the_tiers_is_refused(tmp_path: Path) -> None:
    release = write_tiny_release(tmp_path / "r")

    class Short(OnnxEngine):
        """Built for fewer candidates than requests have."""

        def run(self, hist: F32, target: F32, mask: F32, user: F32) -> F32:
            if target.shape[1] > 100:
                raise Permanent("not built for so many")
            return super().run(hist, target, mask, user)

    check(release, "edge").quick(Short(release.edge_model))
    with pytest.raises(EngineDisagrees, match="1 x 1 x 200 cannot be run: not built for so many"):
        check(release, "edge").whole(Short(release.edge_model))


def test_a_release_without_recorded_requests_cannot_be_disagreed_with(tmp_path: Path) -> None:
    release = write_tiny_release(tmp_path / "r", wrong_by=1.0)
    unrecorded = RecordedCheck("edge", SCHEMA, [])

    unrecorded.whole(engine(release, "edge"))
    unrecorded.quick(engine(release, "edge"))
    assert unrecorded.seconds(engine(release, "edge")) > 0


def test_the_other_tiers_model_is_noticed(tmp_path: Path) -> None:
    release = write_tiny_release(tmp_path / "r")

    with pytest.raises(EngineDisagrees):
        check(release, "rerank").quick(engine(release, "edge"))


def test_a_replica_of_a_refused_release_never_listens(tmp_path: Path) -> None:
    release = write_tiny_release(tmp_path / "r", wrong_by=1.0)
    server = RankServer(RankServerConfig("edge", str(release.path), "redis://127.0.0.1:1", "s", str(tmp_path / "run")))

    with pytest.raises(ReleaseRefused):
        server.start()
    with pytest.raises(PeerGone):
        server.check()
    server.stop()
    assert not (tmp_path / "run/sock").exists()
    assert list((tmp_path / "run/engines").iterdir()) == []


def test_a_socket_path_that_is_too_long_becomes_a_loopback_port(tmp_path: Path) -> None:
    assert bind_address(tmp_path / ("x" * MAX_SOCKET_PATH), "edge-1") == "tcp://127.0.0.1:*"
