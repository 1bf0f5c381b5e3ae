"""`python -m tests.bench.gpu_table lookup|apply|topk|stall`: as `trirank bench ... --device cuda`, from a checkout.

For machines that have PyTorch and Triton but not the rest of what the command line needs.
"""

from __future__ import annotations

import argparse

import torch

from param_server.measure import gpu
from param_server.measure.gpu_stall import stall
from param_server.measure.gpu_timing import card
from param_server.measure.lines import as_json, text

PARTS = {"lookup": gpu.lookup, "apply": gpu.apply, "topk": gpu.topk, "stall": stall}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_table", description=__doc__)
    parser.add_argument("what", choices=list(PARTS), nargs="+")
    parser.add_argument("--slots", type=int, default=gpu.SLOTS, help="places of the big tables (default 64 Mi)")
    parser.add_argument("--load", type=float, default=0.9, help="part of the places that is taken (default 0.9)")
    given = parser.parse_args()
    torch.manual_seed(1)
    for what in given.what:
        lines = PARTS[what](given.slots, given.load)
        print(text(lines))
        print(as_json(card(), lines))


if __name__ == "__main__":
    main()
