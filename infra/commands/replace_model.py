"""`trirank release model`: another model over the tables of a release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infra.commands.precision_rules import precision_rules
from infra.release import Role, read_release
from infra.settings import load_settings


def model(
    source: Annotated[Path, typer.Option("--from", help="Release whose tables are taken.")],
    data: Annotated[str, typer.Option(help="What that release was made from: the new model is judged on it.")],
    out: Annotated[Path, typer.Option(help="Release directory to write; must not exist.")],
    rerank: Annotated[
        str | None,
        typer.Option(
            help="Reranker: package.module:factory, .pt2 (torch.export.save; only from one you trust) or .onnx."
        ),
    ] = None,
    edge: Annotated[str | None, typer.Option(help="Edge ranker: the same.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the release (default: the folder's name).")] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of the download cache (default .trirank).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the quality report as JSON.")] = False,
) -> None:
    """Release a model of your own over the tables of a release; refused, with the difference, when it is no ranker."""
    import msgspec

    from reranker.replace import replace_models

    settings = load_settings(home=home)
    given: dict[Role, str | None] = {"edge": edge, "rerank": rerank}
    release = replace_models(
        read_release(source),
        data,
        out,
        models={role: model for role, model in given.items() if model is not None},
        cache=settings.home / "cache",
        name=name,
        rules=precision_rules(settings, ()),
    )
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(release.manifest.report), indent=2).decode())
