"""What engines are called, in settings, labels and replies: `kind` or `kind:precision`. Pure, and light to import.

Refuses a name that no engine has. Invariant: the order of `KINDS`, and of the precisions within, is the order in which
engines are tried when no setting says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

KINDS: dict[str, tuple[str, ...]] = {
    "tensorrt": ("int8", "fp16"),
    "tensorrt-rtx": ("int8", "fp16"),
    "cuda-kernel": ("fp16",),
    "cuda-graph": ("fp16", "fp32"),
    "aotinductor": ("fp32",),
    "onnxruntime-cpu": ("int8", "fp32"),
    "torch-cpu": ("fp32",),
}


_ON_GPU = frozenset({"tensorrt", "tensorrt-rtx", "cuda-kernel", "cuda-graph"})


def engine_name(kind: str, precision: str) -> str:
    """The full name of an engine."""
    return f"{kind}:{precision}"


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The same names. Raises ValueError that says which ones there are."""
    names = tuple(names)
    for name in names:
        kind, _, precision = name.partition(":")
        if kind not in KINDS:
            raise ValueError(f"there is no engine {name!r}; there are {', '.join(KINDS)}")
        if precision and precision not in KINDS[kind]:
            raise ValueError(f"{kind} has no precision {precision!r}; it has {', '.join(KINDS[kind])}")
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{min(twice)!r} is named twice")
    return names


def full_names(names: Iterable[str]) -> list[str]:
    """Every engine that `names` stands for, in order, each once; of no name, every engine there is."""
    found: dict[str, None] = {}
    for name in tuple(names) or KINDS:
        kind, _, precision = name.partition(":")
        for one in (precision,) if precision else KINDS[kind]:
            found[engine_name(kind, one)] = None
    return list(found)


def on_gpu(names: Iterable[str]) -> bool:
    """Whether any of the engines that `names` stand for runs on a GPU."""
    return any(name.partition(":")[0] in _ON_GPU for name in full_names(names))
