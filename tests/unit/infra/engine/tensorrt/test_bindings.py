"""Every call of TensorRT, pycuda and the CUDA driver, against what each of them says of its own interface.

TensorRT-RTX is asked itself; TensorRT 10 and 11 and pycuda are compared as recorded from their bindings and source
(tests/bindings.py), because neither can be installed without a GPU or CUDA's compiler; the driver's prototypes are
those of the cuda.h that Triton brings.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from infra.engine.tensorrt import api, pycuda_api
from infra.engine.tensorrt.capture import SIGNATURES
from tests.bindings import ENUMERATIONS, SEVERITIES, describe

GOLDEN = Path(__file__).parents[4] / "golden"
# What only some of them have; the code asks before it calls.
ONLY: dict[tuple[str, str], set[str]] = {
    ("IBuilderConfig", "num_compute_capabilities"): {"rtx"},
    ("IBuilderConfig", "set_compute_capability"): {"rtx"},
    ("ICudaEngine", "create_runtime_config"): {"rtx", "11"},
    ("IRuntimeConfig", "dynamic_shapes_kernel_specialization_strategy"): {"rtx"},
}
ENUMERATIONS_ONLY = {"ComputeCapability": {"rtx"}, "DynamicShapesKernelSpecializationStrategy": {"rtx"}}


@pytest.fixture(params=["10", "11", "rtx"])
def package(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    if request.param == "rtx":
        return "rtx", describe(pytest.importorskip("tensorrt_rtx"))
    return request.param, json.loads((GOLDEN / f"tensorrt_{request.param}.json").read_text())


def members(protocol: type) -> dict[str, Any]:
    """Methods (as functions) and attributes (as None) of a protocol."""
    methods = {name: value for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"}
    return {**dict.fromkeys(protocol.__annotations__), **methods}


def called_with(method: Any) -> list[inspect.Parameter]:
    """What our calls give."""
    return list(inspect.signature(method).parameters.values())[1:]


def test_every_member_we_use_is_there_and_takes_what_we_give(package: tuple[str, dict[str, Any]]) -> None:
    which, found = package
    checked = 0
    for name, protocol in api.CLASSES.items():
        for member, ours in members(protocol).items():
            if which not in ONLY.get((name, member), {which}):
                continue
            theirs = (found["classes"][name] or {}).get(member)
            assert theirs is not None, f"{name}.{member} is not in TensorRT {found['version']}"
            if ours is None:
                assert theirs == "attribute", f"{name}.{member} is no attribute"
            elif not any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in called_with(ours)):
                assert any(takes(overload, called_with(ours)) for overload in theirs), f"{name}.{member}{theirs}"
            checked += 1
    assert checked > 28


def takes(overload: list[str], given: list[inspect.Parameter]) -> bool:
    """Whether an overload takes these arguments by position, under these names where a name is ours to use."""
    needed = [name for name in overload if not name.endswith("?")]
    names = [name.rstrip("?") for name in overload]
    return len(needed) <= len(given) <= len(names) and all(
        ours.kind is inspect.Parameter.POSITIONAL_ONLY or ours.name == theirs
        for ours, theirs in zip(given, names, strict=False)
    )


def test_a_call_with_other_arguments_would_be_noticed() -> None:
    wrong = called_with(lambda self, network, settings: None)
    assert not takes(["network", "config"], wrong)
    assert not takes(["network", "config"], wrong[:1])
    assert takes(["network", "config?"], wrong[:1])


def test_an_execution_context_is_made_with_nothing_or_with_a_runtime_config(
    package: tuple[str, dict[str, Any]],
) -> None:
    which, found = package
    overloads = found["classes"]["ICudaEngine"]["create_execution_context"]
    assert any(all(name.endswith("?") for name in overload) for overload in overloads)
    assert (["runtime_config?"] in overloads) == (which in ("11", "rtx"))


def test_classes_are_made_from_what_we_give(package: tuple[str, dict[str, Any]]) -> None:
    classes = package[1]["classes"]
    assert classes["Builder"]["__init__"] == [["logger"]]
    assert classes["Runtime"]["__init__"] == [["logger"]]
    assert classes["OnnxParser"]["__init__"] == [["network", "logger"]]


def test_the_names_of_enumerations_are_there(package: tuple[str, dict[str, Any]]) -> None:
    which, found = package
    for name, wanted in ENUMERATIONS.items():
        if which in ENUMERATIONS_ONLY.get(name, {which}):
            assert set(wanted) <= set(found["enumerations"][name]), name
        else:
            assert found["enumerations"][name] is None, f"TensorRT {found['version']} has {name} now"
    assert set(SEVERITIES) <= set(found["severities"])


def test_no_calibrator_or_weakly_typed_flag_is_left_to_use_in_tensorrt_11() -> None:
    recorded = json.loads((GOLDEN / "tensorrt_11.json").read_text())
    assert "int8_calibrator" not in recorded["classes"]["IBuilderConfig"]
    assert "int8_calibrator" in json.loads((GOLDEN / "tensorrt_10.json").read_text())["classes"]["IBuilderConfig"]


def test_pycuda_has_what_we_call_under_the_names_we_use() -> None:
    found = json.loads((GOLDEN / "pycuda_2026.json").read_text())
    for name, protocol in pycuda_api.CLASSES.items():
        for member, ours in members(protocol).items():
            theirs = found["classes"][name][member]
            if ours is None:
                assert theirs == "attribute", f"{name}.{member}"
            else:
                assert theirs is None or takes(theirs, called_with(ours)), f"{name}.{member}"
    for function in pycuda_api.FUNCTIONS:
        theirs = found["functions"][function]
        assert theirs is None or takes(theirs, called_with(getattr(pycuda_api.Driver, function))), function


CTYPES = {
    "CUstream": ctypes.c_void_p,
    "CUgraph": ctypes.c_void_p,
    "CUgraphExec": ctypes.c_void_p,
    "CUgraph *": ctypes.POINTER(ctypes.c_void_p),
    "CUgraphExec *": ctypes.POINTER(ctypes.c_void_p),
    "CUstreamCaptureMode": ctypes.c_int,
    "CUresult": ctypes.c_int,
    "unsigned long long": ctypes.c_ulonglong,
    "const char **": ctypes.POINTER(ctypes.c_char_p),
}


def test_the_drivers_prototypes_are_those_we_declare() -> None:
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        pytest.skip("cuda.h comes with Triton, which has wheels for Linux on x86-64 only")
    header = (Path(triton.origin).parent / "backends/nvidia/include/cuda.h").read_text()
    for name, declared in SIGNATURES.items():
        # The header gives a symbol with a suffix to the library under the plain name of the documentation.
        plain = re.search(rf"#define (\w+)\s+(?:__CUDA_API_PTSZ\()?{name}\b", header)
        prototype = re.search(rf"CUresult CUDAAPI {plain[1] if plain else name}\(([^)]*)\)", header)
        assert prototype is not None, name
        types = [re.sub(r"\w+$", "", argument.strip()).strip() for argument in prototype[1].split(",")]
        assert [CTYPES[kind] for kind in types] == list(declared), name
    assert "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1," in header
