"""`trirank bench` of a table: it prints peers beside us, checks what it times, and refuses what it cannot do."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from infra.commands.bench import app
from infra.errors import ConfigurationError, TrirankError
from param_server.measure import lines
from param_server.table.cpu import CpuTable


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None:
        raise done.exception
    return str(done.stdout)


@pytest.mark.parametrize(
    ("what", "peer"),
    [("lookup", "  a dict of arrays"), ("apply", "  numpy, rows known"), ("topk", "  numpy: product, partition, sort")],
)
def test_every_measurement_stands_beside_a_peer(what: str, peer: str) -> None:
    said = json.loads(run(what, "--rows", "800", "--dim", "8", "--seconds", "0.2", "--json"))
    assert "800 rows of 8 f32" in said["device"]
    timed = [line for line in said["lines"] if line["cpu_us"] is not None]
    assert peer in {line["name"] for line in timed}
    assert any(not line["name"].startswith(" ") for line in timed)
    assert all(line["median_us"] > 0 and line["rate"] > 0 for line in timed)


def test_a_stall_is_measured_beside_an_idle_table() -> None:
    said = json.loads(run("stall", "--rows", "800", "--dim", "8", "--seconds", "0.4", "--json"))
    named = {line["name"]: line for line in said["lines"]}
    assert named["rows applied meanwhile"]["rate"] > 50
    idle, busy = (named[f"lookup of 2000 keys, {when}, p99"] for when in ("idle", "100000 rows/s applied"))
    assert named["p99, applied over idle"]["rate"] == pytest.approx(busy["median_us"] / idle["median_us"])


def test_people_get_a_table() -> None:
    said = run("topk", "--rows", "800", "--dim", "8", "--seconds", "0.2").splitlines()
    assert said[0].startswith("cpu, ")
    assert said[1].startswith("topk 500 of 800 rows, one query")


def test_times_of_wrong_answers_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CpuTable.lookup

    def wrong(self: CpuTable, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows, found = right(self, keys)
        return rows + 1, found

    monkeypatch.setattr(CpuTable, "lookup", wrong)
    with pytest.raises(TrirankError, match="bench lookup: the answer is wrong"):
        run("lookup", "--rows", "800", "--dim", "8", "--seconds", "0.2")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("lookup", "--device", "tpu"), "device: 'tpu' is not cpu or cuda"),
        (("lookup", "--rows", "0"), "rows: 0 is not 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        run(*arguments)


def test_times_of_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tests.tables import need_triton

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    need_triton()
    with pytest.raises(ConfigurationError, match="interpreter mean nothing"):
        run("lookup", "--device", "cuda")


def test_calls_take_turns() -> None:
    order: list[str] = []
    spent = lines.in_turns({"a": lambda i: order.append(f"a{i}"), "b": lambda i: order.append(f"b{i}")}, 0.0)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]
    assert list(spent) == ["a", "b"]
