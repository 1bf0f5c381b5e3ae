"""`trirank up` says at once what is in the way, and leaves nothing running."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from infra.lifecycle import alive, descendants
from tests.running_stack import RunningStack, trirank
from tests.support import free_port

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]
AT_ONCE_S = 45.0


def _refused(*options: str) -> str:
    started_s = time.monotonic()
    done = trirank("up", *options, timeout_s=60)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert time.monotonic() - started_s < AT_ONCE_S
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_missing_release_is_refused_and_says_how_to_make_one(tmp_path: Path) -> None:
    message = _refused("--release", str(tmp_path / "none"), "--home", str(tmp_path))
    assert "trirank train" in message


def test_a_damaged_release_is_refused_by_the_name_of_the_file(release_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "damaged"
    shutil.copytree(release_dir, copy)
    model = copy / "rerank/bst.fp32.onnx"
    raw = bytearray(model.read_bytes())
    raw[len(raw) // 2] ^= 1
    model.write_bytes(raw)
    assert "rerank/bst.fp32.onnx" in _refused("--release", str(copy), "--home", str(tmp_path))


def test_a_taken_port_is_refused_and_says_which_option_changes_it(release_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = _refused("--release", str(release_dir), "--home", str(tmp_path), "--port", str(port))
    assert str(port) in message
    assert "--port" in message


def test_a_kafka_that_is_not_there_is_refused(release_dir: Path, tmp_path: Path) -> None:
    options = ("--release", str(release_dir), "--home", str(tmp_path), "--port", str(free_port()))
    message = _refused(*options, "--kafka", f"127.0.0.1:{free_port()}")
    assert "kafka" in message
    assert "--kafka" in message


def test_a_redis_that_is_not_there_is_refused(release_dir: Path, tmp_path: Path) -> None:
    options = ("--release", str(release_dir), "--home", str(tmp_path), "--port", str(free_port()))
    assert "redis" in _refused(*options, "--redis", f"redis://127.0.0.1:{free_port()}")


def test_an_engine_that_cannot_run_here_is_named_with_the_reason(release_dir: Path, tmp_path: Path) -> None:
    options = ("--release", str(release_dir), "--home", str(tmp_path), "--port", str(free_port()))
    # No machine has a TensorRT engine of a release that was just made.
    done = trirank("up", *options, settings={"TRIRANK_RERANK_ENGINES": "tensorrt:fp16"}, timeout_s=300)
    assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
    said = done.stderr.splitlines()[-1]
    assert said.startswith(
        "trirank: rerank does not start: ReleaseRefused: rerank: no engine can serve: tensorrt:fp16: "
    )
    assert "Traceback" not in done.stderr
    assert "Traceback" in (tmp_path / "run" / "ray.log").read_text()


def test_a_second_stack_in_the_same_home_is_refused(stack: RunningStack) -> None:
    message = _refused("--release", str(stack.release), "--home", str(stack.home), "--port", str(free_port()))
    assert "trirank down" in message


def test_status_shows_every_tier(stack: RunningStack) -> None:
    shown = trirank("status", "--home", str(stack.home))
    assert shown.returncode == 0, shown.stderr
    for word in ("shard", "edge", "rerank", "gateway", "events", "redis", "kafka"):
        assert word in shown.stdout, shown.stdout


def test_status_without_a_stack_says_how_to_start_one(tmp_path: Path) -> None:
    done = trirank("status", "--home", str(tmp_path))
    assert done.returncode == 2
    assert "trirank up" in done.stderr


@pytest.fixture
def own_stack(release_dir: Path, tmp_path: Path) -> RunningStack:
    return RunningStack(release_dir, tmp_path / "home", "--gateways", "1").start()


def test_down_stops_everything(own_stack: RunningStack) -> None:
    processes = [own_stack.pid, *descendants(own_stack.pid)]
    assert len(processes) > 8
    done = trirank("down", "--home", str(own_stack.home))
    assert done.returncode == 0, done.stderr
    own_stack.stop()
    assert not [pid for pid in processes if alive(pid)]
    assert not (own_stack.home / "run" / "state.json").exists()


def test_a_supervisor_killed_with_signal_9_leaves_nothing_and_the_stack_starts_again(own_stack: RunningStack) -> None:
    processes = descendants(own_stack.pid)
    os.kill(own_stack.state()["supervisor_pid"], signal.SIGKILL)
    own_stack.wait()
    assert not [pid for pid in processes if alive(pid)]
    again = RunningStack(own_stack.release, own_stack.home, *own_stack.options).start()
    assert again.post("/v1/recommend", {"user_id": "1", "k": 3}).status == 200
    assert again.stop() == 0
