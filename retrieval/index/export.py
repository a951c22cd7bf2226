"""Export of an index to common file formats: documents as JSON lines, vectors as NumPy or safetensors arrays.

    OUT/documents.jsonl    one document per line, in the order of addition: _id, and if texts are stored title, text and metadata
    OUT/vectors.npy        vectors in the same order: (P, d) float32, or (T, d) for token vectors, document after document; none of BM25
    OUT/lengths.npy        only for token vectors: number of vectors of each document, (P,) int64
    OUT/export.json        the model, the index and its generation, and a description of the files; written last

With safetensors both arrays are in ``vectors.safetensors``. Vectors are the most precise that the index keeps, as float32.

Shapes: P documents, T vectors of all documents, d width.
Source: numpy.lib.format, version 1.0; https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import atomic_file, write_json
from quiver.encoder.progress import Advance, progress_bar
from quiver.retrieval.index.documents import OpenSegment
from quiver.retrieval.index.engines import WORDS
from quiver.retrieval.index.files import little_endian
from quiver.retrieval.index.index import IndexReader
from quiver.retrieval.index.ranking import document_blocks

FORMATS = ("npy", "safetensors")
"""File formats of the vectors."""


def export_index(index: IndexReader, out: Path, *, vectors: str = "npy", progress: bool = False, numbers: int = 1 << 24) -> dict[str, Any]:
    """Write the documents and vectors of an index, without deleted documents.

    Args:
        index: The index.
        out: Folder to write; it must be empty or not exist.
        vectors: One of `FORMATS`.
        progress: Show a bar over the documents.
        numbers: Numbers of the vectors that are decoded at a time; by default 64 MiB.

    Returns:
        The content of ``export.json``.

    Raises:
        InputError: The format is unknown, or the folder is not empty or cannot be written.
    """
    if vectors not in FORMATS:
        raise InputError(f"vectors must be written as one of {', '.join(FORMATS)}, got {vectors!r}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise InputError(f"{out}: not empty; choose another folder")
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    manifest = index.manifest
    lengths, arrays = np.zeros(0, np.int64), dict[str, tuple[int, ...]]()
    if index.kind != WORDS:
        lengths = np.concatenate([lengths, *(segment.vectors.lengths[segment.kept] for segment in index.segments)])
        arrays = {"lengths": (len(lengths),)} if manifest.model.kind == "colbert" else {}
        arrays["vectors"] = (int(lengths.sum()), manifest.model.dim)
    with _emptied_after_errors(out), progress_bar("documents", len(index), enabled=progress) as advance:
        _write_documents(index, out / "documents.jsonl")
        write = _write_safetensors if vectors == "safetensors" else _write_npy
        files = write(index, out, arrays, lengths, numbers, advance) if arrays else []
    described = {
        "index": str(index.path),
        "kind": index.kind,
        "parameters": dict(index.parameters),
        "generation": manifest.generation,
        "model": asdict(manifest.model),
        "policy": asdict(manifest.policy),
        "documents": len(index),
        "arrays": {name: list(shape) for name, shape in arrays.items()},
        "files": ["documents.jsonl", *files],
    }
    with _emptied_after_errors(out):
        write_json(out / "export.json", described)
    return described


@contextmanager
def _emptied_after_errors(out: Path) -> Iterator[None]:
    """Remove what was exported if the disk is full or fails, so that the export can be repeated into the same folder."""
    try:
        yield
    except (OSError, InputError):
        for path in out.iterdir():
            path.unlink()
        raise


def _write_documents(index: IndexReader, path: Path) -> None:
    with atomic_file(path) as file:
        for segment in index.segments:
            texts, strings = segment.documents.texts, segment.documents.ids.strings
            for row in np.flatnonzero(segment.kept).tolist():
                fields: dict[str, Any] = {"_id": strings[row]}
                if texts is not None:
                    document = texts[row]
                    fields |= {"title": document.title, "text": document.text}
                    fields |= {"metadata": document.metadata} if document.metadata else {}
                file.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")


def _write_npy(
    index: IndexReader, out: Path, arrays: dict[str, tuple[int, ...]], lengths: NDArray[np.int64], numbers: int, advance: Advance
) -> list[str]:
    for name, shape in arrays.items():
        with atomic_file(out / f"{name}.npy") as file:
            kind = "<f4" if name == "vectors" else "<i8"
            np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
            _write_array(index, file, name, lengths, numbers, advance)
    return [f"{name}.npy" for name in arrays]


def _write_safetensors(
    index: IndexReader, out: Path, arrays: dict[str, tuple[int, ...]], lengths: NDArray[np.int64], numbers: int, advance: Advance
) -> list[str]:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in arrays.items():
        kind, size = ("F32", 4) if name == "vectors" else ("I64", 8)
        begin, end = end, end + size * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the array
    with atomic_file(out / "vectors.safetensors") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in arrays:
            _write_array(index, file, name, lengths, numbers, advance)
    return ["vectors.safetensors"]


def _write_array(index: IndexReader, file: BinaryIO, name: str, lengths: NDArray[np.int64], numbers: int, advance: Advance) -> None:
    if name == "lengths":
        file.write(little_endian(lengths).data)
        return
    for segment in index.segments:
        for rows in row_blocks(segment, max(1, numbers // index.manifest.model.dim)):
            vectors, _ = segment.vectors.vectors(rows)
            file.write(little_endian(np.asarray(vectors, np.float32)).data)
            advance(len(rows))


def row_blocks(segment: OpenSegment, vectors: int) -> Iterator[NDArray[np.int64]]:
    """Rows of documents that are not deleted, in ascending order, in blocks of at least one document.

    Args:
        segment: The segment.
        vectors: Maximum number of vectors of a block that has more than one document.
    """
    rows = np.flatnonzero(segment.kept)
    for first, last in document_blocks(np.append(0, np.cumsum(segment.vectors.lengths[rows])), vectors):
        yield rows[first:last]
