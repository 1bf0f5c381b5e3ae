"""A rank replica, TensorRT runner included, in a process that ends when torch or anything else not in its image is
imported: `infra/deploy/rank-replica.requirements.txt` is all it needs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from infra.deadline import Deadline
from infra.embedded import EmbeddedRedis
from infra.wire.client import WireClient
from infra.wire.connection import Peer
from infra.wire.messages import Reply
from tests.tiny_release import SCHEMA, write_tiny_release

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "infra/deploy"
NOT_IN_THE_IMAGE = ("torch", "triton", "onnx", "onnxscript", "polars", "numba", "kafka", "crc32c", "typer", "rich")


def requirements(file: Path) -> dict[str, Requirement]:
    lines = (line.split("#")[0].strip() for line in file.read_text().splitlines())
    return {r.name: r for r in (Requirement(line) for line in lines if line and not line.startswith("-"))}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    server.wait_ready()
    yield server.url
    server.stop()


def test_an_edge_replica_gets_as_far_as_the_gpu_and_answers_from_onnx_runtime_without_torch(
    tmp_path: Path, redis: str
) -> None:
    pytest.importorskip("tensorrt_rtx")
    release = write_tiny_release(tmp_path / "r", fp16=True)
    config = {
        "role": "edge",
        "release_dir": str(release.path),
        "redis_url": redis,
        "stack": "without",
        "run_dir": str(tmp_path / "run"),
        "engine_dir": str(tmp_path / "engines"),
        "engines": ["tensorrt-rtx:fp16", "onnxruntime-cpu:fp32"],
    }
    command = [sys.executable, "-m", "tests.integration.replica_process", json.dumps(config), *NOT_IN_THE_IMAGE]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    ) as replica:  # fmt: skip
        assert replica.stdout is not None
        line = replica.stdout.readline()
        assert line, (tmp_path / "log").read_text()
        serving = json.loads(line)
        reply, expected = asyncio.run(ask(serving["address"]))
        replica.communicate(timeout=60)

    assert replica.returncode == 0
    assert reply.args == {"engine": "onnxruntime-cpu:fp32"}
    np.testing.assert_allclose(reply.tensors["scores"], expected, atol=1e-3)
    assert serving["engines_ready"] == ["onnxruntime-cpu:fp32"]
    assert any(word in serving["engines_refused"]["tensorrt-rtx:fp16"] for word in ("pycuda", "no GPU", "not built"))


async def ask(address: str) -> tuple[Reply, np.ndarray]:
    """One request, and the scores that the formula of the tiny edge ranker gives it."""
    rng = np.random.default_rng(0)
    hist, target = (rng.standard_normal((size, SCHEMA.token_dim), np.float32) for size in (7, 30))
    user = rng.standard_normal(SCHEMA.user_dim, np.float32)
    client = WireClient(role="edge")
    client.set_peers([Peer("edge-0", address, "", {})])
    await client.wait_live(deadline=Deadline.after(30))
    tensors = {"hist": hist, "target": target, "mask": np.ones(7, np.float32), "user": user}
    reply = await client.call("rank", tensors=tensors, deadline=Deadline.after(30))
    await client.close()
    return reply, target @ (hist.sum(0) / 8) + user.sum()


def test_a_forbidden_import_ends_the_process_even_inside_an_except() -> None:
    code = (
        "import sys; from tests.integration.replica_process import Forbidden; "
        "sys.meta_path.insert(0, Forbidden(['torch']))\n"
        "try:\n    import torch\nexcept Exception:\n    print('hidden')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "torch was imported" in done.stderr


def test_the_image_has_the_versions_of_the_package_and_none_of_what_is_forbidden() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    of_package = {r.name: r.specifier for r in map(Requirement, known)}
    replica, gpu = (
        requirements(DEPLOY / "rank-replica.requirements.txt"),
        requirements(DEPLOY / "edge-t4.requirements.txt"),
    )

    assert {n: r.specifier for n, r in (replica | gpu).items()} == {n: of_package[n] for n in replica | gpu}
    assert set(gpu) == {Requirement(r).name for r in project["optional-dependencies"]["gpu"]}
    assert not set(NOT_IN_THE_IMAGE) & set(replica | gpu)
