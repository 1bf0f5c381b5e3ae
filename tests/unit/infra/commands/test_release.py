"""`trirank release show` and `diff`: what a person and what a script is told of a release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from infra.commands.release import app
from infra.commands.release_diff import difference, in_words
from infra.commands.release_show import describe
from infra.errors import ReleaseRefused
from infra.release import Manifest, Release
from tests.tiny_release import write_tiny_release

CHANGE = {"auc_fp32": 0.9, "auc": 0.8999, "auc_loss_pct": 0.011, "auc_noise_pct": 0.02, "log_loss_rise_pct": 0.3}
COMPARED = {
    "requests": 1000,
    "by_negatives": {"uniform": CHANGE, "popularity": {**CHANGE, "auc_noise_pct": None}},
    "logit_rmse": 0.0441,
    "overlap_at_20": 0.9866,
}
PRECISIONS = {
    role: {
        "fp32": {"released": True, "bytes": 1000},
        "fp16": {"released": True, "refused": [], "bytes": 505, **COMPARED},
        "int8": {"released": False, "refused": ["logits move by 0.2 (rms), more than 0.15"], "bytes": 280, **COMPARED},
        "int8-cpu": {"released": False, "refused": ["cat is zero on every calibration request"]},
    }
    for role in ("edge", "rerank")
} | {"calibration": {"requests": 256, "from": "a", "until": "b", "methods": {"edge": "min-max", "rerank": "min-max"}}}


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return write_tiny_release(tmp_path / "one")


def with_report(release: Release, **report: Any) -> Manifest:
    return msgspec.structs.replace(release.manifest, report={**release.manifest.report, **report})


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def test_show_prints_tables_quality_and_where_it_comes_from(release: Release) -> None:
    text = describe(with_report(release, data="own", data_fingerprint="f" * 64, seed=7))
    assert "release tiny, made 1970-01-01T00:00:00+00:00" in text
    assert "from own (sha256 ffffffffffff), seed 7" in text
    assert any(line.split()[:3] == ["item", "60", "32"] for line in text.splitlines())
    assert any(line.split() == ["edge", "uniform", "0.9000"] for line in text.splitlines())


def test_show_prints_every_precision_with_what_it_costs_and_why_one_is_missing(release: Release) -> None:
    text = describe(with_report(release, precisions=PRECISIONS))
    assert "on 1,000 held-out requests" in text
    assert "INT8 by min-max of 256 requests, a to b" in text
    lines = [line.split() for line in text.splitlines()]
    costs = ["+0.011", "(0.020)", "+0.011", "(-)", "+0.300", "0.0441", "0.9866"]
    assert ["edge", "fp16", "yes", "505", "0.51", *costs] in lines
    assert ["rerank", "int8-cpu", "no", *["-"] * 7] in lines
    assert "rerank int8 is not released: logits move by 0.2 (rms), more than 0.15" in text
    assert "edge int8-cpu is not released: cat is zero on every calibration request" in text
    assert not any("fp16 is not released" in line for line in text.splitlines())


def test_a_release_from_before_there_were_precisions_is_shown_without(release: Release) -> None:
    assert "precision" not in run("show", str(release.path))


def test_show_prints_the_whole_manifest_for_scripts(release: Release) -> None:
    shown = json.loads(run("show", str(release.path), "--json"))
    assert shown == json.loads((release.path / "manifest.json").read_text())


def test_a_release_does_not_differ_from_itself(release: Release) -> None:
    assert difference(release.manifest, release.manifest) == {}
    assert in_words(release.manifest, release.manifest) == "tiny and tiny hold the same"
    assert json.loads(run("diff", str(release.path), str(release.path), "--json")) == {}


def test_every_section_names_what_differs_and_nothing_else(release: Release) -> None:
    one = with_report(release, data_fingerprint="a" * 64, seconds={"training": 1}, passes=[{"pass": 1}])
    files = {**one.files, one.models["edge"]["fp32"]: "b" * 64}
    tables = [msgspec.structs.replace(t, rows=t.rows + 2) if t.name == "item" else t for t in one.tables]
    other = msgspec.structs.replace(
        with_report(
            release,
            data_fingerprint="c" * 64,
            seconds={"training": 9},
            passes=[{"pass": 1}, {"pass": 2}],
            models={"edge": {"uniform": {"auc": 0.91}}},
            precisions=PRECISIONS,
        ),
        name="other",
        schema={**one.schema, "max_history": 20},
        tables=tables,
        files=files,
        made_with={"torch": "2"},
    )
    found = difference(one, other)
    assert found["schema"] == {"max_history": (10, 20)}
    assert found["tables"].keys() == {"item"}
    assert found["data"]["data_fingerprint"] == ("a" * 64, "c" * 64)
    assert {what.split(".")[0] for what in found["data"]} == {"data_fingerprint", "calibration", "passes"}
    assert found["data"]["passes"] == (1, 2)
    assert found["models"] == {"edge fp32": (one.files[one.models["edge"]["fp32"]], "b" * 64)}
    assert found["quality"]["edge.uniform.auc"] == (0.9, 0.91)
    assert found["quality"]["edge int8 refused"] == (None, ["logits move by 0.2 (rms), more than 0.15"])
    assert found["versions"] == {"torch": (None, "2")}
    words = in_words(one, other)
    for part in (
        "tiny -> other",
        "max_history",
        "10 -> 20 (+10)",
        "aaaaaaaaaaaa -> cccccccccccc",
        "0.9 -> 0.91 (+0.01)",
    ):
        assert part in words, part


def test_only_what_can_be_verified_is_compared(release: Release, tmp_path: Path) -> None:
    other = write_tiny_release(tmp_path / "two", name="two")
    next((other.path / "tables").iterdir()).write_bytes(b"")
    done = CliRunner().invoke(app, ["diff", str(release.path), str(other.path)])
    assert isinstance(done.exception, ReleaseRefused)
