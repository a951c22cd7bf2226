"""The corpus of a run as token ids on the disk: tokenised once, split into train and held-out documents, read by memory map.

corpus/corpus.json       what it is made of: tokenizer, sources and their counts, size and sha256 of the files
corpus/train.ids         the ids of all documents, end to end, without special tokens: uint16, or uint32 for more than 65,536 ids
corpus/train.ends        where each document ends, int64
corpus/held_out.*        the same for documents that are never trained on
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from encoder.data_files import file_sha256
from encoder.errors import InputError
from encoder.files import read_json, sync_folder, write_json
from encoder.pretraining.sections import DataSection, SourceSection
from encoder.pretraining.text_sources import read_documents
from encoder.tokens import Tokenizer

logger = logging.getLogger(__name__)

Side = Literal["train", "held_out"]
SIDES: tuple[Side, ...] = ("train", "held_out")

MANIFEST = "corpus.json"
SCHEMA = "quiver-pretraining-corpus/1"

_CHARACTERS = 1 << 20
"""Text that is tokenised in one call, at least."""


@dataclass(frozen=True)
class Documents:
    """One side of the corpus.

    Attributes:
        ids: Token ids end to end, memory-mapped.
        ends: Where each document ends.
        sources: For each source how many of the documents, in order, are its.
    """

    ids: NDArray[Any]
    ends: NDArray[np.int64]
    sources: dict[str, int]

    def __len__(self) -> int:
        return len(self.ends)


@dataclass(frozen=True)
class Corpus:
    """What a run is trained and evaluated on.

    Attributes:
        train: Documents to learn from.
        held_out: Documents for the held-out loss; there may be none.
        facts: The manifest without paths: what two equal corpora share.
    """

    train: Documents
    held_out: Documents
    facts: dict[str, Any]


def side_of(text: str, held_out: float) -> Side:
    """Which side a document is on: its text decides, so that copies are on the same.

    Args:
        text: Of the document.
        held_out: Share of the documents that are held out.
    """
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "held_out" if int.from_bytes(digest[:8], "big") < held_out * 2**64 else "train"


def train_texts(data: DataSection) -> Iterator[str]:
    """The documents that are trained on, as text: what a vocabulary is learnt from.

    Raises:
        InputError: As `read_documents`, or there are none.
    """
    found = False
    for source in data.sources:
        for text in read_documents(source):
            if side_of(text, data.held_out) == "train":
                found = True
                yield text
    if not found:
        raise InputError(_empty(data))


def prepare_corpus(data: DataSection, tokenizer: Tokenizer, folder: Path) -> Corpus:
    """Tokenise the sources into a folder, unless they are there already.

    Args:
        data: Sources and split.
        tokenizer: Of the model.
        folder: Appears when it is whole.

    Raises:
        InputError: A source cannot be read, there is nothing to train on or nothing is held out that should be; or what is in the folder is
            damaged, or of other sources.
    """
    made_of = {
        "tokenizer": hashlib.sha256(tokenizer.to_json().encode("utf-8")).hexdigest(),
        "held_out": data.held_out,
        "sources": [asdict(source) | {"fields": list(source.fields)} for source in data.sources],
    }
    if not folder.is_dir():
        unfinished = folder.with_name(f".{folder.name}-unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write(data, tokenizer, unfinished, made_of)
        unfinished.rename(folder)
        sync_folder(folder.parent)
    return _open(data, folder, made_of)


def _write(data: DataSection, tokenizer: Tokenizer, folder: Path, made_of: dict[str, Any]) -> None:
    dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
    counts: dict[str, dict[str, dict[str, int]]] = {}
    with ExitStack() as files:
        sides = {side: _Side(files.enter_context((folder / f"{side}.ids").open("wb")), dtype) for side in SIDES}
        for source in data.sources:
            before = {side: (len(sides[side].ends), sides[side].tokens) for side in SIDES}
            _tokenise(source, tokenizer, sides, data.held_out)
            counts[source.name] = {
                side: {"documents": len(sides[side].ends) - before[side][0], "tokens": sides[side].tokens - before[side][1]}
                for side in SIDES
            }
            logger.info("%s: %s", source.name, counts[source.name])
    for side in SIDES:
        np.asarray(sides[side].ends, "<i8").tofile(folder / f"{side}.ends")
    if not sides["train"].ends:
        raise InputError(_empty(data))
    if data.held_out and not sides["held_out"].ends:
        raise InputError(f"data.held_out: none of {len(sides['train'].ends)} documents is held out at a share of {data.held_out}; raise it")
    sealed = {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {"schema": SCHEMA, **made_of, "dtype": dtype.str, "counts": counts, "files": sealed})


class _Side:
    """A side that is being written."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self.ends: list[int] = []
        self.tokens = 0
        self._file = file
        self._dtype = dtype

    def add(self, ids: list[int]) -> None:
        self._file.write(np.asarray(ids, self._dtype).tobytes())
        self.tokens += len(ids)
        self.ends.append(self.tokens)


def _tokenise(source: SourceSection, tokenizer: Tokenizer, sides: dict[Side, _Side], held_out: float) -> None:
    for texts in _blocks(read_documents(source)):
        for text, ids in zip(texts, tokenizer.encode_bare(texts), strict=True):
            if ids:  # a text of nothing but what the vocabulary drops
                sides[side_of(text, held_out)].add(ids)


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts that are worth a call together."""
    block: list[str] = []
    size = 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size >= _CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def _open(data: DataSection, folder: Path, made_of: dict[str, Any]) -> Corpus:
    manifest = read_json(folder / MANIFEST)
    if manifest.get("schema") != SCHEMA:
        raise InputError(f"{folder / MANIFEST}: its schema is {manifest.get('schema')}, this version reads {SCHEMA}; remove the folder")
    if changed := [key for key, value in made_of.items() if manifest.get(key) != value]:
        raise InputError(f"{folder}: was made of another {', '.join(changed)}; remove it, and it is made again")
    for name, seal in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != seal["bytes"] or file_sha256(path) != seal["sha256"]:
            raise InputError(f"{path}: missing or damaged; remove {folder}, and it is made again")
    sides = {side: _documents(folder, side, manifest) for side in SIDES}
    facts = {key: manifest[key] for key in ("tokenizer", "counts")} | {"sha256": {n: s["sha256"] for n, s in manifest["files"].items()}}
    return Corpus(sides["train"], sides["held_out"], facts)


def _documents(folder: Path, side: Side, manifest: dict[str, Any]) -> Documents:
    ends = np.fromfile(folder / f"{side}.ends", "<i8")
    dtype = np.dtype(manifest["dtype"])
    ids = np.memmap(folder / f"{side}.ids", dtype, "r") if len(ends) else np.empty(0, dtype)  # nothing cannot be mapped
    return Documents(ids, ends, {name: counts[side]["documents"] for name, counts in manifest["counts"].items()})


def _empty(data: DataSection) -> str:
    return f"data.sources: the corpus is empty, {', '.join(source.path for source in data.sources)} hold no text to train on"
