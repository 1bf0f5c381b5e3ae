"""The engine folder: what is found, what is refused and why."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from infra.engine.run import EngineDamaged, EngineUnavailable
from infra.engine.store import INDEX, EngineEntry, EngineStore, sha256_of, why_unfit

T4 = {"role": "edge", "precision": "int8", "builder": "tensorrt", "version": "11.4", "sm": 75, "driver": "580.1"}


@pytest.fixture
def onnx(tmp_path: Path) -> Path:
    file = tmp_path / "release" / "edge" / "mlp.int8.onnx"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"graph")
    return file


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    return EngineStore(tmp_path / "release.engines")


def entry(onnx: Path, **changes: object) -> EngineEntry:
    made = EngineEntry(
        file="edge-int8-t4.plan",
        role="edge",
        precision="int8",
        target="t4",
        builder="tensorrt",
        builder_version="11.4",
        sms=[75],
        driver="580.1",
        onnx_sha256=sha256_of(onnx),
        sha256="",
        shapes={"batch": 32},
    )
    return msgspec.structs.replace(made, **changes)


def refusal(store: EngineStore, onnx: Path, **changes: object) -> str:
    with pytest.raises(EngineUnavailable) as caught:
        store.find(**{**T4, **changes}, onnx=onnx)  # type: ignore[arg-type]
    return str(caught.value)


def test_an_engine_comes_back_as_it_was_written(store: EngineStore, onnx: Path) -> None:
    path = store.add(entry(onnx), b"engine")
    found, engine = store.find(**T4, onnx=onnx)  # type: ignore[arg-type]
    assert (engine, path.read_bytes(), found.shapes) == (b"engine", b"engine", {"batch": 32})


def test_without_a_folder_the_refusal_says_how_to_build(store: EngineStore, onnx: Path) -> None:
    assert store.entries() == []
    assert "trirank release build" in refusal(store, onnx)


def test_a_damaged_engine_is_refused(store: EngineStore, onnx: Path) -> None:
    path = store.add(entry(onnx), b"engine")
    path.write_bytes(b"engimes")
    with pytest.raises(EngineDamaged, match="damaged"):
        store.find(**T4, onnx=onnx)  # type: ignore[arg-type]


def test_a_missing_engine_file_is_refused(store: EngineStore, onnx: Path) -> None:
    store.add(entry(onnx), b"engine").unlink()
    assert "No such file" in refusal(store, onnx)


def test_an_engine_of_another_onnx_file_is_stale(store: EngineStore, onnx: Path) -> None:
    store.add(entry(onnx), b"engine")
    onnx.write_bytes(b"trained again")
    assert "stale" in refusal(store, onnx)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sm": 89}, "built by tensorrt for SM75; this machine is SM89"),
        ({"sm": None}, "this machine is the CPU"),
        ({"version": "11.5"}, "built by tensorrt 11.4, 11.5 is installed"),
        ({"driver": "590.2"}, "built under driver 580.1, this machine has 590.2"),
        ({"driver": None}, "this machine has none"),
        ({"precision": "fp16"}, "holds no tensorrt engine of edge in fp16"),
        ({"builder": "tensorrt-rtx"}, "holds no tensorrt-rtx engine"),
    ],
)
def test_a_foreign_engine_is_refused_with_what_differs(
    store: EngineStore, onnx: Path, changes: dict[str, object], why: str
) -> None:
    store.add(entry(onnx), b"engine")
    assert why in refusal(store, onnx, **changes)


def test_an_engine_built_without_a_gpu_serves_under_any_driver(onnx: Path) -> None:
    assert why_unfit(entry(onnx, driver=None), version="11.4", driver="x", onnx_sha256=sha256_of(onnx)) == ""


def test_building_again_replaces_the_engine_and_keeps_the_others(store: EngineStore, onnx: Path) -> None:
    store.add(entry(onnx, builder_version="11.3"), b"old")
    store.add(entry(onnx, role="rerank", file="rerank-int8-t4.plan"), b"other")
    store.add(entry(onnx), b"new")
    assert [e.file for e in store.entries()] == ["edge-int8-t4.plan", "rerank-int8-t4.plan"]
    assert store.find(**T4, onnx=onnx)[1] == b"new"  # type: ignore[arg-type]


def test_the_engine_for_this_gpu_alone_is_preferred_to_one_for_many(store: EngineStore, onnx: Path) -> None:
    store.add(entry(onnx, file="edge-int8-rtx.rtx", target="rtx", sms=[75, 80, 86]), b"many")
    store.add(entry(onnx), b"one")
    assert store.find(**T4, onnx=onnx)[1] == b"one"  # type: ignore[arg-type]


def test_a_stale_engine_does_not_hide_a_good_one(store: EngineStore, onnx: Path) -> None:
    store.add(entry(onnx, onnx_sha256="another"), b"stale")
    store.add(entry(onnx, file="edge-int8-rtx.rtx", target="rtx", sms=[75, 80]), b"good")
    assert store.find(**T4, onnx=onnx)[1] == b"good"  # type: ignore[arg-type]


def test_a_builder_killed_between_engine_and_list_leaves_no_engine_that_passes_for_another(
    store: EngineStore, onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(entry(onnx), b"old")
    replace, calls = Path.replace, []

    def killed_at_the_second(self: Path, target: Path) -> Path:
        calls.append(target.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        store.add(entry(onnx), b"new")
    assert calls == ["edge-int8-t4.plan", INDEX]
    assert "damaged" in refusal(store, onnx)


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 1}', b'{"format": 1, "engines": [{"file": "x"}]}'])
def test_a_damaged_list_is_refused_and_says_so(store: EngineStore, onnx: Path, content: bytes) -> None:
    path = store.add(entry(onnx), b"engine")
    path.with_name(INDEX).write_bytes(content)
    assert "damaged" in refusal(store, onnx)


def test_a_list_of_another_format_is_refused(store: EngineStore, onnx: Path) -> None:
    index = store.add(entry(onnx), b"engine").with_name(INDEX)
    index.write_text(json.dumps({**json.loads(index.read_text()), "format": 2}))
    assert "format 2, this version reads 1" in refusal(store, onnx)


def test_a_list_that_names_a_file_elsewhere_is_refused(store: EngineStore, onnx: Path, tmp_path: Path) -> None:
    index = store.add(entry(onnx), b"engine").with_name(INDEX)
    (tmp_path / "edge-int8-t4.plan").write_bytes(b"engine")
    index.write_text(index.read_text().replace("edge-int8-t4.plan", "../edge-int8-t4.plan"))
    assert "is not in" in refusal(store, onnx)


def test_nothing_but_engines_and_the_list_is_left_in_the_folder(store: EngineStore, onnx: Path) -> None:
    folder = store.add(entry(onnx), b"engine").parent
    assert {name for name in os.listdir(folder) if not name.endswith(".lock")} == {INDEX, "edge-int8-t4.plan"}
