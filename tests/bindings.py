"""What the classes of a TensorRT package say of themselves: methods with their arguments, and attributes.

`python -m tests.bindings tensorrt_bindings` prints it as JSON, for tests/golden/tensorrt_bindings.json. The bindings'
extension module can be read on a machine without TensorRT: it needs libnvinfer, libnvonnxparser and libnvinfer_plugin
only by name until something is called, so empty libraries of these names do (`gcc -shared -Wl,-soname,...`).
`python -m tests.bindings wrap_cudadrv.cpp` does the same for pycuda, from the source of its driver module.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any

from infra.engine.tensorrt.api import CLASSES

ENUMERATIONS = {
    "NetworkDefinitionCreationFlag": ("STRONGLY_TYPED",),
    "DataType": ("FLOAT",),
    "TensorIOMode": ("INPUT", "OUTPUT"),
    "ComputeCapability": ("SM75", "SM80", "SM86", "SM89", "SM120"),
    "DynamicShapesKernelSpecializationStrategy": ("EAGER",),
}
SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING")


def describe(package: Any) -> dict[str, Any]:
    """Classes and enumerations of an imported package; an absent one is null."""
    classes = {name: _class(getattr(package, name, None)) for name in CLASSES}
    enumerations = {
        name: sorted(getattr(package, name).__members__) if hasattr(package, name) else None for name in ENUMERATIONS
    }
    return {
        "version": package.__version__,
        "classes": classes,
        "enumerations": enumerations,
        "severities": sorted(package.ILogger.Severity.__members__),
    }


def _class(found: Any) -> dict[str, Any] | None:
    if found is None:
        return None
    names = [name for name in dir(found) if not name.startswith("_")] + ["__init__"]
    return {name: _member(name, getattr(found, name)) for name in sorted(names)}


def _member(name: str, member: Any) -> list[list[str]] | str:
    """Names of the arguments of each overload, optional ones with a "?" behind; "attribute" for what is not called."""
    if not callable(member):
        return "attribute"
    lines = (member.__doc__ or "").splitlines()
    found = [match[1] for line in lines if (match := re.match(rf"\s*(?:\d+\. )?{name}\((self.*)\)(?: -> .*)?$", line))]
    return [_arguments(text) for text in found] or [["..."]]


def _arguments(text: str) -> list[str]:
    """`self: A, x: B, y: C = <D>` -> ["x", "y?"]; commas inside brackets do not separate."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "[(<{") - (letter in "])>}")
        if letter == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return [part.split(":")[0].strip() + ("?" if "=" in part else "") for part in parts][1:]


def describe_pycuda(source: str) -> dict[str, Any]:
    """Classes and functions that pycuda's wrap_cudadrv.cpp defines for Python."""
    blocks = re.split(r"py::class_<", source)
    classes: dict[str, dict[str, Any]] = {}
    for block in blocks[1:]:
        if name := re.search(r'^[^;]*?\(?\s*"(\w+)"', block):
            classes[name[1]] = _cpp_members(block.split("py::def(")[0])
    functions = {
        match[1]: _cpp_arguments(match[2]) for match in re.finditer(r'py::def\("(\w+)",(.*?)\);', source, re.DOTALL)
    }
    simple = dict.fromkeys(re.findall(r"DEF_SIMPLE_FUNCTION\((\w+)\)", source))
    return {"classes": classes, "functions": {**simple, **functions}}


def _cpp_members(block: str) -> dict[str, Any]:
    members: dict[str, Any] = {name: [] for name in re.findall(r"DEF_SIMPLE_METHOD\((\w+)\)", block)}
    members |= dict.fromkeys(re.findall(r'\.add_property\("(\w+)"', block), "attribute")
    for match in re.finditer(r'\.def\("(\w+)",(.*?)\)\s*(?=\.|;|#)', block, re.DOTALL):
        members[match[1]] = _cpp_arguments(match[2])
    return members


def _cpp_arguments(text: str) -> list[str] | None:
    """Names in order, optional ones with a "?" behind; None when the source names none."""
    found: list[str] = []
    for names, default in re.findall(r"py::args?\(([^)]*)\)(\s*=)?", text):
        parts = re.findall(r'"(\w+)"', names)
        found += [*parts[:-1], parts[-1] + ("?" if default else "")] if parts else []
    return [name for name in found if name != "self"] or None


def _print(target: str) -> None:
    if target.endswith(".cpp"):
        with open(target, encoding="utf-8") as source:
            found = describe_pycuda(source.read())
    else:
        found = describe(importlib.import_module(target))
    lines = [f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in found.items()]
    print("{" + ",\n".join(lines) + "}")


if __name__ == "__main__":
    _print(sys.argv[1])
