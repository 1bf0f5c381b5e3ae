"""`trirank release`: look at a release directory, and put it in front of users as a gray release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from infra.commands import gray
from infra.commands.build import build
from infra.release import read_release

app = typer.Typer(help="Verify and show release directories; start and steer a gray release.", no_args_is_help=True)
Directory = Annotated[Path, typer.Argument(help="Release directory.")]


@app.command()
def verify(directory: Directory) -> None:
    """Check that a release is complete, undamaged and made for this version; exit status 2 and the reason if not."""
    from feature_service.schema import schema_of

    release = read_release(directory)
    schema_of(release.manifest.schema, release.manifest.schema_fingerprint)
    print(f"{directory}: release {release.manifest.name}, {len(release.manifest.files)} files, all sound")


@app.command()
def show(directory: Directory) -> None:
    """Print the manifest, with the quality report, as JSON."""
    print(msgspec.json.format(msgspec.json.encode(read_release(directory).manifest), indent=2).decode())


for name, command in (
    ("build", build),
    ("start", gray.start),
    ("status", gray.status),
    ("watch", gray.watch),
    ("pause", gray.pause),
    ("resume", gray.resume),
    ("promote", gray.promote),
    ("abort", gray.abort),
    ("rollback", gray.rollback),
    ("history", gray.history),
    ("why", gray.why_user),
):
    app.command(name)(command)
