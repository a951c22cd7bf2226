"""``quiver export``: models for other libraries; like bench.py beside it, a file of retrieval that may import eval."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from quiver.cli.output import JsonOption, OverwriteOption, print_json, say
from quiver.eval.report.hub import render_model_index
from quiver.eval.results_folder import read_results
from quiver.retrieval.models.export.export import Scores, export_model


class Layout(str, Enum):
    """For which library."""

    SENTENCE_TRANSFORMERS = "sentence-transformers"
    PYLATE = "pylate"
    HF = "hf"
    STANFORD = "stanford"
    ONNX = "onnx"


LAYOUT_HELP = (
    "sentence-transformers: bi-encoders for 5 and 6, ColBERT models for 6; pylate: ColBERT models for PyLate 1.6 and "
    "sentence-transformers 6; hf: the encoder alone, for transformers; stanford: ColBERT models for Stanford's ColBERT; "
    "onnx: a graph for onnxruntime and others, compared with our own vectors."
)


def export(
    model: Annotated[str, typer.Argument(help="Any model that Quiver opens: a folder, or a hub id.")],
    layout: Annotated[Layout, typer.Option(help=LAYOUT_HELP)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; its name is the model's in the card.")],
    run: Annotated[Path | None, typer.Option(help="The training that made it, a folder with run.json: for the card.")] = None,
    results: Annotated[list[Path] | None, typer.Option(help="A folder of quiver evaluate, its scores for the card. Repeatable.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="A language by its ISO 639 code, like en: for the card. Repeatable.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model on the hub.")] = None,
    overwrite: Annotated[bool, OverwriteOption] = False,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Write a model so that other libraries open it with the same vectors, with a card that tells how it was made.

    Example: quiver export runs/mine/model --layout sentence-transformers --out my-model --run runs/mine --results results/mine
    """
    exported = export_model(
        model,
        out,
        layout=layout.value,
        revision=revision,
        run=run,
        scores=[_scores(folder) for folder in results or []],
        languages=language or [],
        overwrite=overwrite,
    )
    if as_json:
        print_json(
            {
                "folder": str(exported.folder),
                "layout": exported.layout,
                "kind": exported.kind,
                "fingerprint": exported.fingerprint,
                "bytes": exported.bytes,
                "left_out": list(exported.left_out),
            }
        )
        return
    say(f"model: {exported.folder} ({exported.layout}, {exported.bytes / 1e6:,.1f} MB)")


def _scores(folder: Path) -> Scores:
    """A folder of results as entries of the Hub's ``model-index``."""
    found = read_results(folder)
    metadata: dict[str, Any] = next(yaml.safe_load_all(render_model_index(found)))
    [index] = metadata["model-index"]
    return Scores(str(folder), found.system.fingerprint, index["results"])
