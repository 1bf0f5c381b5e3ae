"""Which machines engines are built for, and who can build for them. Pure.

A target is a name (`t4`) for one compute capability, or for several that share one engine (`rtx`). TensorRT builds on
the GPU it builds for, because it measures there; TensorRT-RTX compiles ahead of time, needs no GPU, and knows only the
capabilities it lists. Refuses a name nobody knows, and a builder that cannot build for it.
"""

from __future__ import annotations

from typing import Literal, get_args

from infra.errors import InvalidInput

Builder = Literal["tensorrt", "tensorrt-rtx"]
BUILDERS: tuple[Builder, ...] = get_args(Builder)

# TensorRT-RTX 1.7 compiles for these; there is no SM90 or SM100 among them.
RTX_SMS = (75, 80, 86, 89, 120, 121)

TARGET_SMS: dict[str, tuple[int, ...]] = {
    "t4": (75,),
    "a30": (80,),
    "a100": (80,),
    "a2": (86,),
    "a10": (86,),
    "a40": (86,),
    "l4": (89,),
    "l40s": (89,),
    "h100": (90,),
    "h200": (90,),
    "b200": (100,),
    "rtx20": (75,),
    "rtx30": (86,),
    "rtx40": (89,),
    "rtx50": (120,),
    # One engine for all of them.
    "rtx": (75, 80, 86, 89, 120),
}


def target_sms(target: str, builder: Builder) -> tuple[int, ...]:
    """Compute capabilities of a target. Raises InvalidInput when the builder cannot build for it."""
    if target not in TARGET_SMS:
        raise InvalidInput("targets", f"{target!r} is no GPU; there are {', '.join(TARGET_SMS)}")
    sms = TARGET_SMS[target]
    if builder == "tensorrt-rtx" and (unknown := [sm for sm in sms if sm not in RTX_SMS]):
        raise InvalidInput(
            "targets",
            f"tensorrt-rtx does not build for {target} (SM{unknown[0]}), only for SM "
            f"{', '.join(map(str, RTX_SMS))}: build with --builder tensorrt on the {target}, or serve with cuda-graph",
        )
    if builder == "tensorrt" and len(sms) > 1:
        raise InvalidInput(
            "targets",
            f"{target} stands for several GPUs, and tensorrt builds for one: name it, or --builder tensorrt-rtx",
        )
    return sms


def usual_builder(target: str) -> Builder:
    """Who builds for a target when nobody is named: TensorRT for one GPU, TensorRT-RTX for several at once."""
    return "tensorrt" if len(TARGET_SMS.get(target, ())) == 1 else "tensorrt-rtx"


def check_builder(name: str) -> Builder:
    """The same name. Raises InvalidInput that lists the builders."""
    for builder in BUILDERS:
        if name == builder:
            return builder
    raise InvalidInput("builder", f"{name!r} builds no engine for a GPU; there are {', '.join(BUILDERS)}")
