"""The command line both peers share."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse(description: str | None) -> argparse.Namespace:
    """`release` (Path) and `port` (int)."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--release", type=Path, required=True)
    options.add_argument("--port", type=int, required=True)
    return options.parse_args()
