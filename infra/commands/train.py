"""`trirank train`: from a log of interactions to a release directory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from infra.commands.precision_rules import precision_rules
from infra.errors import InvalidInput
from infra.settings import load_settings

_MODELS, _FIT, _SPEED, _INTERRUPTED, _ROWS = (
    "Models",
    "How it is fitted",
    "Speed and memory",
    "Interrupted trainings",
    "Rows in a parameter server",
)
_REPORT = "Report"


def train(
    data: Annotated[str, typer.Option(help="`movielens-100k`, or a folder with interactions.parquet|csv.")],
    out: Annotated[Path, typer.Option(help="Release directory to write; must not exist.")],
    name: Annotated[str | None, typer.Option(help="Name of the release (default: the folder's name).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.", min=0)] = 7,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the training period (default: what the data needs).")
    ] = None,
    edge: Annotated[
        str, typer.Option(help="Edge ranker: mlp, or package.module:factory of your own.", rich_help_panel=_MODELS)
    ] = "mlp",
    reranker: Annotated[
        str, typer.Option(help="Reranker: bst, din, or package.module:factory of your own.", rich_help_panel=_MODELS)
    ] = "bst",
    blocks: Annotated[
        int | None,
        typer.Option(
            help="Transformer blocks of bst (default 1); more than one cost about ten times as much to serve.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    readout: Annotated[
        str | None,
        typer.Option(
            help="What bst's MLP sees: target (default), mean or concat; the last two cost like a second block.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    patience: Annotated[
        int,
        typer.Option(
            help="Stop after so many passes that are no better on validation; 0: never.", rich_help_panel=_FIT
        ),
    ] = 0,
    batch_size: Annotated[
        int, typer.Option(help="Events per batch; a step takes two batches.", rich_help_panel=_FIT)
    ] = 128,
    accumulate: Annotated[
        int,
        typer.Option(
            help="Add up the gradients of so many steps' batches before each step: the effect of larger batches "
            "without their memory.",
            rich_help_panel=_FIT,
        ),
    ] = 1,
    amp: Annotated[
        str,
        typer.Option(
            help="Half precision, auto|on|off: fp16 with a scaled loss on CUDA, bf16 on the CPU (auto: where the "
            "processor has instructions for it, from batches of 256 on).",
            rich_help_panel=_SPEED,
        ),
    ] = "auto",
    sparse: Annotated[
        str,
        typer.Option(
            help="Tables with sparse gradients: auto (from 100,000 rows on), none, or item,user.",
            rich_help_panel=_SPEED,
        ),
    ] = "auto",
    pooling: Annotated[
        str,
        typer.Option(help="How histories are averaged, bag (EmbeddingBag)|mean (laid out).", rich_help_panel=_SPEED),
    ] = "bag",
    workers: Annotated[
        int, typer.Option(help="Processes that make batches; 0: the training makes them.", rich_help_panel=_SPEED)
    ] = 0,
    prefetch: Annotated[
        int | None, typer.Option(help="Batches that each worker makes ahead (default 4).", rich_help_panel=_SPEED)
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Read the log (interactions*.parquet, one file or many) part by part instead of into memory.",
            rich_help_panel=_SPEED,
        ),
    ] = False,
    buffer_events: Annotated[
        int | None,
        typer.Option(
            help="With --stream: events in memory, and shuffled there, at a time (default 2,000,000, 40 bytes each).",
            rich_help_panel=_SPEED,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel=_SPEED)] = "cpu",
    rows_from_stack: Annotated[
        bool,
        typer.Option(
            "--rows-from-stack",
            help="Keep the rows in the parameter server of the stack running in --home while they are trained: looked "
            "up for each step, changed through the stream. That stack must serve a release made with --empty-tables.",
            rich_help_panel=_ROWS,
        ),
    ] = False,
    staleness: Annotated[
        int | None,
        typer.Option(
            help="With --rows-from-stack: steps whose changes a step's rows may lack (default 2); 0 waits for each.",
            rich_help_panel=_ROWS,
        ),
    ] = None,
    empty_tables: Annotated[
        bool,
        typer.Option(
            "--empty-tables",
            help="Train nothing: write a release with empty tables for this data, to start such a stack with.",
            rich_help_panel=_ROWS,
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with an unfinished training of the same release, data and options; it ends with the same bits.",
            rich_help_panel=_INTERRUPTED,
        ),
    ] = False,
    checkpoint_s: Annotated[
        float,
        typer.Option(help="Seconds between checkpoints; each pass ends with one too.", rich_help_panel=_INTERRUPTED),
    ] = 60.0,
    scales: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of INT8 scales of an earlier release (edge/mlp.scales.json, rerank/bst.scales.json) to use "
            "instead of calibrating; once for each ranker.",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            help="A release that ranks the same test events; the differences are printed, with an interval each.",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(help="Folder to write pictures of the report into (.svg).", rich_help_panel=_REPORT),
    ] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of the download cache (default .trirank).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the quality report as JSON.")] = False,
) -> None:
    """Train both rankers together with their tables and write a release."""
    import msgspec

    from reranker.architectures import edge_architecture, rerank_architecture
    from reranker.recipe import Recipe
    from reranker.remote.training import STALENESS
    from reranker.train import train_release

    settings, usual = load_settings(home=home), Recipe()
    lag = _only_with("staleness", staleness, "rows-from-stack", rows_from_stack, STALENESS)
    if empty_tables and rows_from_stack:
        raise InvalidInput("empty-tables", "it trains nothing; leave --rows-from-stack out")
    if empty_tables:
        from reranker.remote.empty import empty_release

        empty_release(data, out, cache=settings.home / "cache", seed=seed, name=name)
        print(f"release with empty tables in {out}; start a stack with it, then train with --rows-from-stack")
        return
    with ExitStack() as stack:
        rows = None
        if rows_from_stack:
            from infra.commands.train_rows import rows_of_stack

            rows = stack.enter_context(rows_of_stack(settings, lag))
        release = train_release(
            data,
            out,
            cache=settings.home / "cache",
            seed=seed,
            name=name,
            epochs=epochs,
            recipe=Recipe(
                batch_size=batch_size,
                pooling=pooling,  # type: ignore[arg-type]  # `Recipe.checked` refuses what is unknown
                sparse=sparse,
                amp=amp,
                accumulate=accumulate,
                patience=patience,
                workers=workers,
                prefetch=_only_with("prefetch", prefetch, "workers", workers > 0, usual.prefetch),
                device=device,
                buffer_events=_only_with("buffer-events", buffer_events, "stream", stream, usual.buffer_events),
                edge=edge_architecture(edge),
                rerank=rerank_architecture(reranker, blocks, readout),
            ),
            resume=resume,
            stream=stream,
            compare_with=compare,
            plots=plots,
            checkpoint_every_s=checkpoint_s,
            rules=precision_rules(settings, scales or ()),
            rows=rows,
        )
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(release.manifest.report), indent=2).decode())


def _only_with(name: str, value: int | None, other: str, given: bool, usual: int) -> int:
    """The value of an option that means nothing without another. Raises InvalidInput."""
    if value is not None and not given:
        raise InvalidInput(name, f"it means nothing without --{other}; leave it out, or give --{other} too")
    return usual if value is None else value
