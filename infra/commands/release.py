"""`trirank release`: look at a release directory, and put it in front of users as a gray release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from infra.commands import gray
from infra.commands.build import build
from infra.commands.release_diff import difference, in_words
from infra.commands.release_show import describe
from infra.commands.replace_model import model
from infra.release import read_release

app = typer.Typer(help="Verify and show release directories; start and steer a gray release.", no_args_is_help=True)
Directory = Annotated[Path, typer.Argument(help="Release directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


@app.command()
def verify(directory: Directory) -> None:
    """Check that a release is complete, undamaged and made for this version; exit status 2 and the reason if not."""
    from feature_service.schema import schema_of

    release = read_release(directory)
    schema_of(release.manifest.schema, release.manifest.schema_fingerprint)
    print(f"{directory}: release {release.manifest.name}, {len(release.manifest.files)} files, all sound")


@app.command()
def show(directory: Directory, as_json: AsJson = False) -> None:
    """Print what a release is, what it was made from, how good it is, and which precisions it has and why."""
    manifest = read_release(directory).manifest
    print(_json(manifest) if as_json else describe(manifest))


@app.command()
def diff(
    directory: Directory,
    other: Annotated[Path, typer.Argument(help="The release to compare it with.")],
    as_json: AsJson = False,
) -> None:
    """Print what differs between two releases: schema, tables, data, models, quality, versions."""
    one, two = read_release(directory).manifest, read_release(other).manifest
    print(_json(difference(one, two)) if as_json else in_words(one, two))


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


for name, command in (
    ("build", build),
    ("model", model),
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
