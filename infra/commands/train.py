"""`trirank train`: from a log of interactions to a release directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infra.settings import load_settings


def train(
    data: Annotated[str, typer.Option(help="`movielens-100k`, or a folder with interactions.parquet|csv.")],
    out: Annotated[Path, typer.Option(help="Release directory to write; must not exist.")],
    name: Annotated[str | None, typer.Option(help="Name of the release (default: the folder's name).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 7,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the training period (default: what the data needs).")
    ] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of the download cache (default .trirank).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the quality report as JSON.")] = False,
) -> None:
    """Train the edge MLP and the BST together with their tables and write a release."""
    import msgspec

    from reranker.train import train_release

    settings = load_settings(home=home)
    release = train_release(data, out, cache=settings.home / "cache", seed=seed, name=name, epochs=epochs)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(release.manifest.report), indent=2).decode())
