"""``quiver extend-positions``; like bench.py beside it, a file of retrieval that may import eval."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quiver.cli.output import JsonOption, OverwriteOption, print_json, say
from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.files import check_target
from quiver.eval.report.positions import check_format, write_position_plot
from quiver.retrieval.models.export.longer import lengthen_model


def extend_positions(
    model: Annotated[str, typer.Argument(help="A model with absolute positions (BERT, RoBERTa, MiniLM, ...): a folder, or a hub id.")],
    factor: Annotated[int, typer.Option(help="How many times as many positions it gets: 2, 4, 8, ...", min=1)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write, in the layout that the model has.")],
    max_length: Annotated[int | None, typer.Option(help="Tokens that texts are cut to from now on; by default all positions.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw old and new embeddings by position; .svg or .png.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model on the hub.")] = None,
    overwrite: Annotated[bool, OverwriteOption] = False,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Give a model with absolute positions more of them, by interpolation, so that it reads longer texts.

    A short fine-tuning should follow: what stood at position p now stands at factor * p.

    Example: quiver extend-positions sentence-transformers/all-MiniLM-L6-v2 --factor 2 --out minilm-1024
    """
    if plot is not None:
        check_format(plot)
        check_target(plot)
    folder = local_folder(model, revision=revision)
    done = lengthen_model(folder, out, factor=factor, max_length=max_length, overwrite=overwrite)
    if plot is not None:
        write_position_plot(folder, done.folder, plot)
    if as_json:
        print_json({**asdict(done), "folder": str(done.folder), "plot": None if plot is None else str(plot)})
        return
    (positions, more), (length, longer) = done.positions, done.max_length
    cut = f"{'' if length is None else f'{length:,} -> '}{longer:,}"
    say(f"model: {done.folder} ({positions:,} -> {more:,} positions; texts are cut to {cut} tokens)")
    if plot is not None:
        say(f"plot: {plot}")
