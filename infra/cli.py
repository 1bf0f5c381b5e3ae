"""The command line: `trirank up|down|status|train|release|updates|snapshot|bench`.

Thin: each command reads settings, calls one function of the tier that does the work and prints. Errors are one
sentence on stderr that says what to do, and exit status 2 (wrong input or settings) or 1 (it failed).
"""

from __future__ import annotations

import sys

import typer

from infra.commands import bench, release, snapshot, stack, train, updates
from infra.errors import ConfigurationError, InvalidInput, ReleaseRefused, TrirankError

app = typer.Typer(
    name="trirank",
    help="A three-tier recommender serving stack: train a release, serve it, feed it updates.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(stack.up)
app.command("down")(stack.down)
app.command("status")(stack.status)
app.command("train")(train.train)
app.add_typer(release.app, name="release")
app.add_typer(updates.app, name="updates")
app.add_typer(snapshot.app, name="snapshot")
app.add_typer(bench.app, name="bench")
app.command("supervise", hidden=True)(stack.supervise)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except (ConfigurationError, InvalidInput, ReleaseRefused) as error:
        print(f"trirank: {error}", file=sys.stderr)
        sys.exit(2)
    except TrirankError as error:
        print(f"trirank: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        # A file that cannot be read or written is the user's to mend; anything else is a bug and shows its trace.
        if error.filename is None:
            raise
        print(f"trirank: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
