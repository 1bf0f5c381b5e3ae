from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from edge_ranker.recorded import recorded_inputs
from edge_ranker.verify import RecordedCheck
from infra.engine.choose import Refusal, open_engine
from infra.engine.names import KINDS
from infra.engine.offers import MAKERS, engine_folder, offers_of
from infra.release import Release
from tests.tiny_release import SCHEMA, write_tiny_release

SERVE = """
import sys
from pathlib import Path
from edge_ranker.recorded import recorded_inputs
from edge_ranker.verify import RecordedCheck
from feature_service.schema import schema_of
from infra.engine.chain import EngineChain
from infra.engine.offers import engine_folder, offers_of
from infra.release import read_release

release = read_release(Path(sys.argv[1]))
schema = schema_of(release.manifest.schema, release.manifest.schema_fingerprint)
check = RecordedCheck("edge", schema, recorded_inputs(release))
chain = EngineChain("edge", offers_of(release, engine_folder(release.path), "edge"), check)
chain.start()
print(chain.kind, chain.precision, "torch" in sys.modules)
chain.close()
"""


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return write_tiny_release(tmp_path / "r")


def test_without_a_setting_every_kind_is_offered_in_order(release: Release) -> None:
    offers = offers_of(release, engine_folder(release.path), "edge")

    assert list(dict.fromkeys(offer.kind for offer in offers)) == list(KINDS) == list(MAKERS)


def test_only_what_is_named_is_offered(release: Release) -> None:
    offers = offers_of(release, engine_folder(release.path), "edge", ("torch-cpu", "onnxruntime-cpu:fp32"))

    assert [offer.name for offer in offers] == ["torch-cpu:fp32", "onnxruntime-cpu:fp32"]


def test_a_model_changed_after_the_release_was_read_is_damaged_though_its_scores_agree(release: Release) -> None:
    model = release.model("edge")
    assert model is not None
    graph = onnx.load(model)
    graph.doc_string = "changed"
    onnx.save(graph, model)
    (offer,) = offers_of(release, engine_folder(release.path), "edge", ("onnxruntime-cpu:fp32",))

    result = open_engine("edge", offer, RecordedCheck("edge", SCHEMA, recorded_inputs(release)))

    assert isinstance(result, Refusal)
    assert (result.cause, "its sha256 differs from the manifest's" in result.reason) == ("damaged", True)


def test_what_is_offered_is_what_is_made(release: Release) -> None:
    check = RecordedCheck("edge", SCHEMA, recorded_inputs(release))
    found = {}
    for offer in offers_of(release, engine_folder(release.path), "edge"):
        result = open_engine("edge", offer, check)
        if isinstance(result, Refusal):
            found[offer.name] = result.cause
            continue
        assert (result.engine.kind, result.engine.precision) == (offer.kind, offer.precision)
        found[offer.name] = "serves"
        result.engine.close()

    assert found["onnxruntime-cpu:fp32"] == found["torch-cpu:fp32"] == "serves"
    assert found["onnxruntime-cpu:int8"] == found["aotinductor:fp32"] == "unavailable"
    on_gpus = ("tensorrt:fp16", "tensorrt-rtx:int8", "cuda-kernel:fp16", "cuda-graph:fp16")
    assert {found[name] for name in on_gpus} == {"unavailable"}


def test_a_replica_of_the_usual_engines_never_imports_torch(release: Release) -> None:
    done = subprocess.run([sys.executable, "-c", SERVE, str(release.path)], capture_output=True, text=True, check=False)

    assert done.stdout.split() == ["onnxruntime-cpu", "fp32", "False"], done.stderr
