"""``quiver index export``: an index as files, or in another store."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from quiver.cli.output import JsonOption, OverwriteOption, ProgressOption, VerifyOption, print_json, say, show_progress
from quiver.encoder import InputError
from quiver.retrieval.index import open_index
from quiver.retrieval.index.export import export_index
from quiver.retrieval.integrations import export_to


class VectorFormat(str, Enum):
    """How exported vectors are written."""

    NPY = "npy"
    SAFETENSORS = "safetensors"


TO_HELP = (
    "Or a store: qdrant://FOLDER, qdrant://http://HOST:6333 (its key in QDRANT_API_KEY) or lancedb://FOLDER. What is there of this state "
    "of the index is not sent again."
)


def export(
    folder: Annotated[Path, typer.Argument(help="An index.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write; it must be new or empty.")] = None,
    vectors: Annotated[VectorFormat, typer.Option("--vectors", help="How the vectors are written, with --out.")] = VectorFormat.NPY,
    to: Annotated[str | None, typer.Option("--to", help=TO_HELP)] = None,
    collection: Annotated[
        str | None, typer.Option("--collection", help="Of --to: name of the collection or table; by default the index's.")
    ] = None,
    overwrite: Annotated[bool, OverwriteOption] = False,
    verify: Annotated[bool, VerifyOption] = True,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Write the documents (ids alone where no texts are kept) with their vectors: as JSON lines and arrays, or to Qdrant or LanceDB.

    Examples: quiver index export indexes/scifact --out exported --vectors safetensors

    quiver index export indexes/scifact --to lancedb://stores/lance --collection scifact
    """
    if (out is None) == (to is None):
        raise InputError("give either --out FOLDER, for files, or --to STORE")
    shown = show_progress(progress)
    if to is not None:
        stored = export_to(open_index(folder, verify=verify), to, collection=collection, overwrite=overwrite, progress=shown)
        if as_json:
            print_json(asdict(stored))
        else:
            say(f"{to}: {stored.documents:,} documents in {stored.collection}, {stored.written:,} of them written now")
        return
    if collection is not None or overwrite:
        raise InputError("--collection and --overwrite are for --to; --out names a new folder")
    described = export_index(open_index(folder, verify=verify), Path(out or ""), vectors=vectors.value, progress=shown)
    if as_json:
        print_json({"folder": str(out), **described})
        return
    count = described["arrays"]["vectors"][0]
    say(f"{out}: {described['documents']:,} documents, {count:,} vectors in {', '.join(described['files'])}")
