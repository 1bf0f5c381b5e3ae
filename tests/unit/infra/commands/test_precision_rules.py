"""Settings become the rules of precisions; both have the same defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.commands.precision_rules import precision_rules
from infra.engine.calibrate import Scales
from infra.errors import ConfigurationError, InvalidInput
from infra.settings import load_settings
from reranker.precisions import RULES


def scales(path: Path, role: str) -> Path:
    Scales(1, role, "min-max", {}, {"target": 0.5}, {"target": 63.5}).write(path)
    return path


def test_without_settings_the_rules_are_those_of_a_training_called_from_python() -> None:
    assert precision_rules(load_settings()) == RULES


def test_every_limit_has_its_own_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in type(load_settings()).model_fields if name.startswith("precision_m")]
    for value, name in enumerate(names, 1):
        monkeypatch.setenv(f"TRIRANK_{name.upper()}", str(value / 100))
    rules = precision_rules(load_settings())
    given = {value / 100 for value in range(1, len(names) + 1)}
    assert {getattr(limits, field) for limits in (rules.fp16, rules.int8) for field in limits.__slots__} == given


def test_files_of_scales_are_told_apart_by_the_ranker_they_name(tmp_path: Path) -> None:
    files = [scales(tmp_path / "a", "rerank"), scales(tmp_path / "b", "edge")]
    assert {role: of.role for role, of in precision_rules(load_settings(), files).scales.items()} == {
        "rerank": "rerank",
        "edge": "edge",
    }


def test_scales_of_no_ranker_and_two_of_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is of 'user'; there are edge, rerank"):
        precision_rules(load_settings(), [scales(tmp_path / "a", "user")])
    with pytest.raises(InvalidInput, match="second file of scales of edge"):
        precision_rules(load_settings(), [scales(tmp_path / "b", "edge"), scales(tmp_path / "c", "edge")])


def test_a_limit_that_cannot_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIRANK_PRECISION_MIN_OVERLAP_AT_20_INT8", "1.5")
    with pytest.raises(ConfigurationError, match="precision_min_overlap_at_20_int8"):
        load_settings()
