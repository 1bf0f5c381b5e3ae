"""`trirank bench`: measure parts of the product beside what one would use without them."""

from __future__ import annotations

import typer

from infra.commands.bench_models_cli import models
from infra.commands.bench_table import COMMANDS

app = typer.Typer(help="Measure parts beside what one would use without them.", no_args_is_help=True)
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
app.command("models")(models)
