"""Settings: what is refused names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import ConfigurationError
from infra.settings import load_settings


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in [n for n in os.environ if n.startswith("TRIRANK_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_the_command_line_beats_the_environment_beats_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trirank.toml").write_text("port = 1001\nshards = 2\ngateways = 3\n")
    monkeypatch.setenv("TRIRANK_PORT", "1002")
    monkeypatch.setenv("TRIRANK_SHARDS", "4")
    settings = load_settings(port=1003, redis=None)
    assert (settings.port, settings.shards, settings.gateways) == (1003, 4, 3)


def test_an_unknown_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIRANK_PROT", "8000")
    with pytest.raises(ConfigurationError, match="TRIRANK_PROT"):
        load_settings()


def test_an_unknown_key_of_the_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "trirank.toml").write_text("prot = 1\n")
    with pytest.raises(ConfigurationError, match="prot"):
        load_settings()


def test_a_file_that_is_no_toml_is_refused_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "trirank.toml").write_text("shards = = 2\n")
    with pytest.raises(ConfigurationError, match=r"trirank\.toml is no TOML: .*line 1"):
        load_settings()


def test_a_config_file_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIRANK_CONFIG", "elsewhere.toml")
    with pytest.raises(ConfigurationError, match=r"elsewhere\.toml"):
        load_settings()


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"port": 0}, "port"),
        ({"port": "many"}, "port"),
        ({"deadline_ms": -1}, "deadline_ms"),
        ({"stack": "Not A Name"}, "stack"),
        ({"shards": 9, "partitions": 8}, "partitions"),
        ({"shard_replicas": 0}, "shard_replicas"),
        ({"shard_device": "gpu"}, "shard_device"),
        ({"gpus_per_shard": 2.0}, "gpus_per_shard"),
        ({"shard_device": "cpu", "gpus_per_shard": 0.5}, "gpus_per_shard"),
        ({"edge_engines": ["tensort"]}, "edge_engines.*no engine 'tensort'"),
        ({"rerank_engines": "torch-cpu:int8"}, "rerank_engines.*no precision 'int8'"),
        ({"rerank_engines": 3}, "rerank_engines"),
    ],
)
def test_an_impossible_value_is_refused_by_key(given: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        load_settings(**given)


def test_engines_are_named_in_a_list_or_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIRANK_EDGE_ENGINES", "onnxruntime-cpu:fp32, torch-cpu")
    settings = load_settings(rerank_engines=["aotinductor"])
    assert settings.edge_engines == ("onnxruntime-cpu:fp32", "torch-cpu")
    assert settings.rerank_engines == ("aotinductor",)
