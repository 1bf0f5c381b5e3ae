"""Trains a folder in a process of its own, and is killed with SIGKILL while it writes the checkpoint of one step.

python -m tests.integration.train_process FOLDER OUT STEP
"""

from __future__ import annotations

import io
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from reranker.recipe import Recipe
from reranker.train import train_release

RECIPE = replace(Recipe(), batch_size=32, max_passes=2)


def train(folder: Path, out: Path, *, said: io.StringIO | None = None, **more: Any) -> Any:
    """The training that is killed, and the one that goes on."""
    return train_release(
        str(folder),
        out,
        cache=out.parent,
        seed=5,
        recipe=RECIPE,
        checkpoint_every_s=0.0,
        console=Console(file=said or io.StringIO(), soft_wrap=True),
        **more,
    )


def main(folder: Path, out: Path, step: int) -> None:
    """Train, and die in the middle of the checkpoint after `step` steps."""
    save, saved = torch.save, 0

    def dying(whole: object, file: Any) -> None:
        nonlocal saved
        saved += 1
        if saved == step:
            file.write(b"the beginning of a checkpoint")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        save(whole, file)

    torch.save = dying
    train(folder, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
