"""The corpus of a run: documents read from files, tokenized once, split into training and held-out documents, and memory-mapped.

Sources are JSON lines, Parquet files, plain text and BEIR folders. Memory does not grow with the corpus, neither in writing nor in reading;
on disk it takes two bytes per token and eight per document.

corpus/corpus.json       tokenizer, sources and their counts, size and sha256 of the files
corpus/train.ids         token ids of all documents, concatenated, without special tokens: uint16, or uint32 for more than 65,536 ids
corpus/train.ends        end of each document, int64
corpus/held_out.*        the same for documents that are never trained on
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from quiver.encoder.errors import InputError, first_line
from quiver.encoder.files import expand_home, naming, read_json, read_json_lines, read_lines, read_whole
from quiver.encoder.pretraining.recipe import DataSection, SourceSection
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.work_folder import SealedFolders

logger = logging.getLogger(__name__)

JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz")  # the last is what many corpora of the Hub call JSON lines
PLAIN_TEXT = (".txt", ".txt.gz")
PARQUET = ".parquet"
SUFFIXES = (*JSON_LINES, *PLAIN_TEXT, PARQUET)  # suffixes of the files that can be read

Side = Literal["train", "held_out"]
SIDES: tuple[Side, ...] = ("train", "held_out")

MANIFEST = "corpus.json"
SCHEMA = "quiver-pretraining-corpus/1"

_ROWS = 512  # number of rows of a Parquet file in memory at a time
BLOCK_CHARACTERS = 1 << 20  # minimum number of characters per call of the tokenizer
_COUNTED = 1 << 22  # number of token ids per call of ``bincount``


def read_documents(source: SourceSection) -> Iterator[str]:
    """Read the documents of a source; blank documents are skipped."""
    path = expand_home(source.path)
    if not path.is_dir():
        yield from _read_source_file(path, source)
        return
    if corpus := next((path / f"corpus{suffix}" for suffix in JSON_LINES if (path / f"corpus{suffix}").is_file()), None):
        wanted = None if source.split is None else _documents_judged_only_in(path, source.split)
        for number, row in read_json_lines(corpus):
            if wanted is None or row.get("_id") in wanted:
                yield from _join_row_fields(row, source.fields, f"{corpus}:{number}")
        return
    if source.split is not None:
        raise InputError(f"{path}: split {source.split!r} requires a BEIR folder, but this folder has no corpus.jsonl; remove split")
    files = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
    if not files:
        raise InputError(f"{path}: contains no file with a suffix of {', '.join(SUFFIXES)}")
    for file in files:
        yield from _read_source_file(file, source)


def _read_source_file(path: Path, source: SourceSection) -> Iterator[str]:
    if not path.is_file():
        raise InputError(f"{path}: there is no such file or folder")
    if path.name.endswith(JSON_LINES):
        for number, row in read_json_lines(path):
            yield from _join_row_fields(row, source.fields, f"{path}:{number}")
    elif path.name.endswith(PLAIN_TEXT) and source.lines:
        yield from (line for _, line in read_lines(path))
    elif path.name.endswith(PLAIN_TEXT):
        if (text := read_whole(path)).strip():
            yield text
    elif path.suffix == PARQUET:
        yield from _read_parquet(path, source.fields)
    else:
        raise InputError(f"{path}: the suffix must be one of {', '.join(SUFFIXES)}")


def _join_row_fields(row: Mapping[str, object], fields: Sequence[str], where: str) -> Iterator[str]:
    """Join the fields of a row to one document; yields nothing if all of them are null or blank."""
    if row.keys().isdisjoint(fields):
        raise InputError(f"{where}: has none of the fields {', '.join(fields)}; it has {', '.join(map(str, row))}")
    found = [(name, row[name]) for name in fields if row.get(name) is not None]
    for name, value in found:
        if not isinstance(value, str):
            raise InputError(f"{where}: '{name}' must be text, got {type(value).__name__}")
    text = "\n\n".join(str(value) for _, value in found if str(value).strip())
    if text:
        yield text


def _read_parquet(path: Path, fields: Sequence[str]) -> Iterator[str]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as table:
            names = table.schema_arrow.names
            if not (columns := [name for name in fields if name in names]):
                raise InputError(f"{path}: has none of the columns {', '.join(fields)}; it has {', '.join(names)}")
            for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield from _join_row_fields(row, fields, f"{path}:{number}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: damaged Parquet file after row {number} ({first_line(error)}); download the file again") from error


def _documents_judged_only_in(folder: Path, split: str) -> set[str]:
    """Ids of the documents that are judged in this split and in no other."""
    splits = {path.stem: path for path in sorted((folder / "qrels").glob("*.tsv"))}
    if split not in splits:
        raise InputError(f"{folder}: has no qrels/{split}.tsv; its splits are {', '.join(splits) or 'none'}")
    judged: dict[str, set[str]] = {name: set() for name in splits}
    for name, path in splits.items():
        for number, line in read_lines(path):
            parts = line.split("\t")
            if len(parts) < 3:
                raise InputError(f"{path}:{number}: a line must hold query, document and grade, separated by tabs")
            if number > 1:
                judged[name].add(parts[1])
    return judged.pop(split).difference(*judged.values())


@dataclass(frozen=True)
class Documents:
    """Training or held-out documents of a corpus."""

    ids: NDArray[Any]  # token ids of all documents, concatenated, memory-mapped
    ends: NDArray[np.int64]  # end of each document in ``ids``, memory-mapped
    sources: dict[str, int]  # number of documents per source, in the order of the documents

    def __len__(self) -> int:
        return len(self.ends)

    def shares(self, vocab_size: int) -> NDArray[np.float64]:
        """Relative frequency of each token id, (V,); each count is increased by one, so that none is zero."""
        counts = np.ones(vocab_size, np.int64)
        for start in range(0, len(self.ids), _COUNTED):
            counts += np.bincount(self.ids[start : start + _COUNTED], minlength=vocab_size)
        shares: NDArray[np.float64] = counts / counts.sum()
        return shares


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text."""

    train: Documents  # documents to train on
    held_out: Documents  # documents for the held-out loss; may be empty
    identity: dict[str, Any]  # tokenizer, counts and checksums of the manifest; equal for equal corpora


def side_of(text: str, held_out: float) -> Side:
    """Decide whether a document is trained on or held out. Copies of a document are on the same side, because only the text decides."""
    return "held_out" if _is_drawn(text, held_out, draw=0) else "train"


def _is_drawn(text: str, share: float, *, draw: int) -> bool:
    """Whether a document belongs to a random sample of the given share, drawn by a hash of its text; draws 0..3 are independent."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return int.from_bytes(digest[8 * draw : 8 * draw + 8], "big") < share * 2**64


def first_documents(source: SourceSection, characters: int | None) -> Iterator[str]:
    """The documents of a source up to the one that reaches a number of characters; all of them for None."""
    read = 0
    for text in read_documents(source):
        yield text
        read += len(text)
        if characters is not None and read >= characters:
            return


def train_texts(data: DataSection, *, share: float, characters: int | None = None) -> Iterator[str]:
    """Texts of the training documents, to train a tokenizer on."""
    documents = found = 0
    for source in data.sources:
        for text in first_documents(source, characters):
            if side_of(text, data.held_out) == "train":
                documents += 1
                if _is_drawn(text, share, draw=1):
                    found += 1
                    yield text
    if not documents:
        raise InputError(_describe_empty(data))
    if not found:
        raise InputError(f"model.vocabulary.share: a share of {share} selects none of the {documents} documents; raise it")


def prepare_corpus(
    data: DataSection, tokenizer: Tokenizer, folder: Path, *, block_characters: int = BLOCK_CHARACTERS, characters: int | None = None
) -> None:
    """Tokenize the sources into a folder, unless an intact one was made with the same sources and settings."""
    made_of = {
        "tokenizer": hashlib.sha256(tokenizer.to_json().encode("utf-8")).hexdigest(),
        "held_out": data.held_out,
        "sources": [source.model_dump(exclude={"revision", "licence"}) | {"fields": list(source.fields)} for source in data.sources],
    }
    sealed = SealedFolders(folder.parent, SCHEMA, MANIFEST)
    found = sealed.finished(folder.name, "tokenizing the sources again")
    if found is not None:
        if changed := [key for key, value in made_of.items() if found.about.get(key) != value]:
            raise InputError(f"{folder}: was made with other settings ({', '.join(changed)}); delete it to make the corpus again")
        return
    dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
    counts: dict[str, dict[Side, dict[str, int]]] = {}
    with naming(folder), sealed.writing(folder.name) as part:
        with ExitStack() as files:
            sides = {side: _Side(part.folder / side, files, dtype=dtype) for side in SIDES}
            for source in data.sources:
                before = {side: (sides[side].documents, sides[side].tokens) for side in SIDES}
                for texts in _group_texts(first_documents(source, characters), block_characters):
                    for text, ids in zip(texts, tokenizer.encode_bare(texts), strict=True):
                        if ids:  # no ids if the text consists of characters that the vocabulary drops
                            sides[side_of(text, data.held_out)].add(ids)
                counts[source.name] = {
                    side: {"documents": sides[side].documents - documents, "tokens": sides[side].tokens - tokens}
                    for side, (documents, tokens) in before.items()
                }
                logger.info("%s: %s", source.name, counts[source.name])
        _check_counts(data, counts)
        part.about |= {**made_of, "dtype": dtype.str, "counts": counts}


def open_corpus(folder: Path) -> Corpus:
    """Memory-map a corpus that `prepare_corpus` has made or verified."""
    manifest = read_json(folder / MANIFEST)
    sides = {side: _map_side(folder, side, manifest) for side in SIDES}
    identity = {key: manifest[key] for key in ("tokenizer", "counts")} | {"sha256": {n: s["sha256"] for n, s in manifest["files"].items()}}
    return Corpus(sides["train"], sides["held_out"], identity)


def _check_counts(data: DataSection, counts: Mapping[str, Mapping[Side, Mapping[str, int]]]) -> None:
    train, held_out = (sum(sides[side]["documents"] for sides in counts.values()) for side in SIDES)
    if not train:
        raise InputError(_describe_empty(data))
    for source in data.sources:
        if not counts[source.name]["train"]["documents"]:
            raise InputError(f"data.sources: {source.name} has no text to train on ({source.path}); remove it")
    if data.held_out and not held_out:
        raise InputError(f"data.held_out: a share of {data.held_out} holds out none of the {train} documents; raise it")


class _Side:
    """Writes the documents of one side, and counts them and their tokens."""

    def __init__(self, stem: Path, files: ExitStack, *, dtype: np.dtype[Any]) -> None:
        self.documents = self.tokens = 0
        self._ids, self._ends = (files.enter_context(stem.with_suffix(f".{kind}").open("wb")) for kind in ("ids", "ends"))
        self._dtype = dtype

    def add(self, ids: list[int]) -> None:
        self._ids.write(np.asarray(ids, self._dtype).tobytes())
        self.documents += 1
        self.tokens += len(ids)
        self._ends.write(self.tokens.to_bytes(8, "little", signed=True))


def _group_texts(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Group texts into lists of at least this many characters; the last list may have fewer."""
    block: list[str] = []
    size = 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size >= characters:
            yield block
            block, size = [], 0
    if block:
        yield block


def _map_side(folder: Path, side: Side, manifest: dict[str, Any]) -> Documents:
    counts = {name: sides[side]["documents"] for name, sides in manifest["counts"].items()}
    kinds = {"ids": np.dtype(manifest["dtype"]), "ends": np.dtype("<i8")}
    if not any(counts.values()):  # an empty file cannot be mapped
        return Documents(np.empty(0, kinds["ids"]), np.empty(0, kinds["ends"]), counts)
    try:
        ids, ends = (np.memmap(folder / f"{side}.{kind}", dtype, "r") for kind, dtype in kinds.items())
    except OSError as error:
        raise InputError(
            f"{folder}: the {side} files cannot be read ({error.strerror}); delete the folder to make the corpus again"
        ) from error
    return Documents(ids, ends, counts)


def _describe_empty(data: DataSection) -> str:
    return f"data.sources: the corpus is empty, there is no text to train on in {', '.join(source.path for source in data.sources)}"
