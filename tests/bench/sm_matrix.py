"""`python -m tests.bench.sm_matrix`: for which GPUs TensorRT-RTX builds which form of both rankers. Needs no GPU.

Engines are built ahead of time and thrown away; a cell is the size of the engine in MB or why there is none. Without
--release the rankers have random weights, which changes nothing that a builder looks at.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from infra.engine.tensorrt.api import TensorRT, load
from infra.engine.tensorrt.build import build_engine
from infra.errors import ReleaseRefused
from infra.release import ROLES, Precision, read_release

TARGETS: dict[str, tuple[int, ...]] = {
    **{f"SM{sm}": (sm,) for sm in (75, 80, 86, 89, 120)},
    "one for all": (75, 80, 86, 89, 120),
}
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8", "int8-cpu")


def main() -> None:
    """Build and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sm_matrix", description=__doc__)
    parser.add_argument("--release", type=Path, help="take the models of this release")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    trt = load("tensorrt-rtx")
    began_s = time.process_time()
    matrix = {
        f"{role} {precision}": {name: built(trt, file, sms) for name, sms in TARGETS.items()}
        for role, precision, file in models(given.release)
    }
    if given.json:
        print(json.dumps({"tensorrt_rtx": trt.__version__, "matrix": matrix}, indent=2))
        return
    print(f"TensorRT-RTX {trt.__version__}; {time.process_time() - began_s:.0f} s of CPU; engine size in MB")
    print(table(matrix))


def models(release: Path | None) -> list[tuple[str, str, Path]]:
    """role, precision and ONNX file of everything there is to build from."""
    if release is None:
        from tests.gpu_release import models as random_models

        return [(role, precision, file) for role, files in random_models().items() for precision, file in files.items()]
    found = read_release(release)
    return [(role, p, file) for role in ROLES for p in PRECISIONS if (file := found.model(role, p)) is not None]


def built(trt: TensorRT, file: Path, sms: tuple[int, ...]) -> dict[str, float | str]:
    """Size of the engine, or the reason that there is none."""
    try:
        engine = build_engine(trt, file.read_bytes(), file.name, sms=sms, timing_cache=None)
    except ReleaseRefused as error:
        return {"refused": str(error)}
    return {"mb": round(len(engine) / 1e6, 2)}


def table(matrix: dict[str, dict[str, dict[str, float | str]]]) -> str:
    """Rows are models; under the table, each reason once."""
    reasons: dict[str, int] = {}
    lines = ["| model | " + " | ".join(TARGETS) + " |", "|---" * (len(TARGETS) + 1) + "|"]
    for name, cells in matrix.items():
        shown = []
        for cell in cells.values():
            if "mb" in cell:
                shown.append(f"{cell['mb']:.2f}")
            else:
                shown.append(f"refused ({reasons.setdefault(str(cell['refused']), len(reasons) + 1)})")
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, *(f"({number}) {reason}" for reason, number in reasons.items())])


if __name__ == "__main__":
    main()
