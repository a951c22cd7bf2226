"""The corpus of a run as token ids on the disk: tokenised once, split into train and held-out documents, read by memory map.

Nothing that grows with it is held in memory, neither while it is written nor while it is read; on the disk are two bytes a token and
eight a document.

corpus/corpus.json       what it is made of: tokenizer, sources and their counts, size and sha256 of the files
corpus/train.ids         the ids of all documents, end to end, without special tokens: uint16, or uint32 for more than 65,536 ids
corpus/train.ends        where each document ends, int64
corpus/held_out.*        the same for documents that are never trained on
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256, read_json, sync_folder, write_json
from quiver.encoder.pretraining.sections import DataSection, SourceSection
from quiver.encoder.pretraining.text_sources import read_documents
from quiver.encoder.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Side = Literal["train", "held_out"]
SIDES: tuple[Side, ...] = ("train", "held_out")

MANIFEST = "corpus.json"
SCHEMA = "quiver-pretraining-corpus/1"

_CHARACTERS = 1 << 20
"""Text that is tokenised in one call, at least."""

_COUNTED = 1 << 22
"""Token ids that are counted at a time."""


@dataclass(frozen=True)
class Documents:
    """One side of the corpus.

    Attributes:
        ids: Token ids end to end, memory-mapped.
        ends: Where each document ends, memory-mapped.
        sources: For each source how many of the documents, in order, are its.
    """

    ids: NDArray[Any]
    ends: NDArray[np.int64]
    sources: dict[str, int]

    def __len__(self) -> int:
        return len(self.ends)

    def shares(self, vocab_size: int) -> NDArray[np.float64]:
        """How often each token id stands among all, (V,); one more of each is counted, so that none is zero."""
        counts = np.ones(vocab_size, np.int64)
        for start in range(0, len(self.ids), _COUNTED):
            counts += np.bincount(self.ids[start : start + _COUNTED], minlength=vocab_size)
        shares: NDArray[np.float64] = counts / counts.sum()
        return shares


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
    return "held_out" if _drawn(text, held_out, draw=0) else "train"


def _drawn(text: str, share: float, *, draw: int) -> bool:
    """Whether a document is among a share of all, by its text; draws 0..3 are independent."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return int.from_bytes(digest[8 * draw : 8 * draw + 8], "big") < share * 2**64


def train_texts(data: DataSection, *, share: float) -> Iterator[str]:
    """The documents that are trained on, as text: what a vocabulary is learnt from.

    Args:
        data: Sources and split.
        share: Of these documents, told by their text; 1 for all.

    Raises:
        InputError: As `read_documents`, or there are none.
    """
    documents = found = 0
    for source in data.sources:
        for text in read_documents(source):
            if side_of(text, data.held_out) == "train":
                documents += 1
                if _drawn(text, share, draw=1):
                    found += 1
                    yield text
    if not documents:
        raise InputError(_empty(data))
    if not found:
        raise InputError(f"model.vocabulary.share: none of {documents} documents is drawn at a share of {share}; raise it")


def prepare_corpus(data: DataSection, tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenise the sources into a folder; where they are there already, read every byte of them to know that they are sound.

    Args:
        data: Sources and split.
        tokenizer: Of the model.
        folder: Appears when it is whole.

    Raises:
        InputError: A source cannot be read or has nothing to train on, or nothing is held out that should be; or what is in the folder is
            damaged, or of other sources.
    """
    if folder.is_dir():
        _verify(data, tokenizer, folder)
        return
    unfinished = folder.with_name(f".{folder.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    _write(data, tokenizer, unfinished)
    unfinished.rename(folder)
    sync_folder(folder.parent)


def open_corpus(folder: Path) -> Corpus:
    """Map a corpus that `prepare_corpus` has made or found sound.

    Raises:
        InputError: A file is missing or cannot be read.
    """
    manifest = read_json(folder / MANIFEST)
    sides = {side: _documents(folder, side, manifest) for side in SIDES}
    facts = {key: manifest[key] for key in ("tokenizer", "counts")} | {"sha256": {n: s["sha256"] for n, s in manifest["files"].items()}}
    return Corpus(sides["train"], sides["held_out"], facts)


def _made_of(data: DataSection, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer": hashlib.sha256(tokenizer.to_json().encode("utf-8")).hexdigest(),
        "held_out": data.held_out,
        "sources": [source.model_dump() | {"fields": list(source.fields)} for source in data.sources],
    }


def _write(data: DataSection, tokenizer: Tokenizer, folder: Path) -> None:
    dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
    counts: dict[str, dict[str, dict[str, int]]] = {}
    with ExitStack() as files:
        sides = {side: _Side(*_files(folder, side, files), dtype=dtype) for side in SIDES}
        for source in data.sources:
            before = {side: (sides[side].documents, sides[side].tokens) for side in SIDES}
            _tokenise(source, tokenizer, sides, data.held_out)
            counts[source.name] = {
                side: {"documents": sides[side].documents - before[side][0], "tokens": sides[side].tokens - before[side][1]}
                for side in SIDES
            }
            logger.info("%s: %s", source.name, counts[source.name])
    _refuse_empty(data, counts)
    sealed = {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(folder.iterdir())}
    made_of = _made_of(data, tokenizer)
    write_json(folder / MANIFEST, {"schema": SCHEMA, **made_of, "dtype": dtype.str, "counts": counts, "files": sealed})


def _files(folder: Path, side: Side, files: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    """Where a side's ids and ends are written, open until the stack is closed."""
    ids, ends = (files.enter_context((folder / f"{side}.{kind}").open("wb")) for kind in ("ids", "ends"))
    return ids, ends


def _refuse_empty(data: DataSection, counts: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
    train, held_out = (sum(sides[side]["documents"] for sides in counts.values()) for side in SIDES)
    if not train:
        raise InputError(_empty(data))
    for source in data.sources:
        if not counts[source.name]["train"]["documents"]:
            raise InputError(f"data.sources: {source.name} holds no text to train on ({source.path}); leave it out")
    if data.held_out and not held_out:
        raise InputError(f"data.held_out: none of {train} documents is held out at a share of {data.held_out}; raise it")


class _Side:
    """A side that is being written.

    Attributes:
        documents: Written so far.
        tokens: Written so far.
    """

    def __init__(self, ids: BinaryIO, ends: BinaryIO, *, dtype: np.dtype[Any]) -> None:
        self.documents = self.tokens = 0
        self._ids, self._ends = ids, ends
        self._dtype = dtype

    def add(self, ids: list[int]) -> None:
        self._ids.write(np.asarray(ids, self._dtype).tobytes())
        self.documents += 1
        self.tokens += len(ids)
        self._ends.write(self.tokens.to_bytes(8, "little", signed=True))


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


def _verify(data: DataSection, tokenizer: Tokenizer, folder: Path) -> None:
    manifest = read_json(folder / MANIFEST)
    if manifest.get("schema") != SCHEMA:
        raise InputError(f"{folder / MANIFEST}: its schema is {manifest.get('schema')}, this version reads {SCHEMA}; remove the folder")
    if changed := [key for key, value in _made_of(data, tokenizer).items() if manifest.get(key) != value]:
        raise InputError(f"{folder}: was made of another {', '.join(changed)}; remove it, and it is made again")
    for name, seal in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != seal["bytes"] or file_sha256(path) != seal["sha256"]:
            raise InputError(f"{path}: missing or damaged; remove {folder}, and it is made again")


def _documents(folder: Path, side: Side, manifest: dict[str, Any]) -> Documents:
    counts = {name: sides[side]["documents"] for name, sides in manifest["counts"].items()}
    kinds = {"ids": np.dtype(manifest["dtype"]), "ends": np.dtype("<i8")}
    if not any(counts.values()):  # nothing cannot be mapped
        return Documents(np.empty(0, kinds["ids"]), np.empty(0, kinds["ends"]), counts)
    try:
        ids, ends = (np.memmap(folder / f"{side}.{kind}", dtype, "r") for kind, dtype in kinds.items())
    except OSError as error:
        raise InputError(f"{folder}: {side} cannot be read ({error.strerror}); remove the folder, and it is made again") from error
    return Documents(ids, ends, counts)


def _empty(data: DataSection) -> str:
    return f"data.sources: the corpus is empty, {', '.join(source.path for source in data.sources)} hold no text to train on"
