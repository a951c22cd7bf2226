"""Score the rows of a training file with a teacher: the same rows, each with a score per document.

    OUT/train.jsonl.gz    the rows with the field ``scores``
    OUT/scoring.json      the teacher, the settings and statistics of the scores; written last

Rows are scored in parts that are saved: a killed run resumes and writes the same files. Of several teachers each scores all rows before the
next one starts. In memory a row takes 8 bytes per query and document and 16 bytes for its key; a text takes 24 bytes if rows hold texts.

Shapes: R rows, n_r documents of row r, B pairs of a part, T texts.
Source of min-max normalized teacher scores: JaColBERTv2.5, arXiv:2407.20750.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import atomic_file
from quiver.retrieval.data.embedding_store import KEY, KeyTable, text_keys
from quiver.retrieval.training.data.prepare import IdNumbering, read_text_entries, write_texts_by_id
from quiver.retrieval.training.data.sources import Example, encode_text, iter_source, read_whole
from quiver.retrieval.training.data.table import TableWriter, TextColumn, blocks
from quiver.retrieval.training.mining.teachers import Ensemble, Teacher, min_max
from quiver.retrieval.training.mining.work_folder import JobFolder, open_work
from quiver.retrieval.training.sections import DataSection
from quiver.retrieval.utils import installed_version, progress_bar

SCORES = "scores"
"""Field of the scores; an existing field is replaced."""


@dataclass(frozen=True)
class ScoringData:
    """Rows to score.

    Attributes:
        texts: T texts, on disk.
        queries: Number of each row's query, (R,).
        documents: Numbers of all rows' documents, row by row.
        ends: The documents of row r are ``documents[ends[r]:ends[r + 1]]``, (R + 1,).
        rows: Key of each row with all its fields but the scores, (R,).
        sha256: Checksum of the rows and their texts.
    """

    texts: TextColumn
    queries: NDArray[np.int64]
    documents: NDArray[np.int64]
    ends: NDArray[np.int64]
    rows: NDArray[np.bytes_]
    sha256: str

    def __len__(self) -> int:
        return len(self.queries)

    def pairs(self, rows: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of query and document of every pair of a slice of rows, (B,) each."""
        counts = np.diff(self.ends[rows.start : rows.stop + 1])
        documents = self.documents[self.ends[rows.start] : self.ends[rows.stop]]
        return np.repeat(self.queries[rows], counts), documents


def read_scoring_data(section: DataSection, folder: Path) -> ScoringData:
    """Read the rows of a data section and their texts.

    Args:
        section: Sources and fields; ``format`` is texts or ids.
        folder: Empty folder for the texts.

    Raises:
        InputError: A row is malformed, has no document or a blank query or positive, cannot be written as JSON, or has an id without a text
            (names the place); or there are no rows.
    """
    rows = _RowReader()
    with TableWriter(folder) as writer:
        if section.format == "ids":
            _number_ids(section, rows, writer, folder)
        else:
            _number_texts(section, rows, writer)
        if not len(rows.queries):
            raise InputError(f"{', '.join(section.train)}: no rows")
        return rows.data(writer)


def read_again(section: DataSection, data: ScoringData) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Read the rows a second time, to write them with their scores.

    Raises:
        InputError: The rows have changed since they were scored.
    """
    remedy = "restore the file, or start over with --overwrite"
    found = 0
    for source in section.train:
        for place, row in iter_source(source):
            if found == len(data) or text_keys([row_line(place, row, ())])[0] != data.rows[found]:
                raise InputError(f"{place}: the row has changed since it was scored; {remedy}")
            found += 1
            yield place, row
    if found < len(data):
        raise InputError(f"{', '.join(section.train)}: has {found:,} rows, but {len(data):,} were scored; {remedy}")


def row_line(place: str, row: Mapping[str, object], scores: Sequence[float]) -> str:
    """Return a row with its scores as JSON.

    Raises:
        InputError: A field cannot be written as JSON.
    """
    try:
        return json.dumps({**row, SCORES: scores}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{place}: a field cannot be written as JSON ({error}); remove it from the file") from error


class _RowReader:
    """Collects the numbers and keys of rows."""

    def __init__(self) -> None:
        self.queries, self.documents, self.ends = array("q"), array("q"), array("q", [0])
        self._keys = bytearray()

    def read(self, section: DataSection) -> Iterator[Example]:
        """Yield the rows, and remember their keys."""
        for example, row in read_whole(section, all_columns=True):
            self._keys += text_keys([row_line(example.place, row, ())]).tobytes()
            yield example

    def add(self, query: int, documents: Sequence[int]) -> None:
        """Add the numbers of the next row."""
        self.queries.append(query)
        self.documents.extend(documents)
        self.ends.append(len(self.documents))

    def data(self, writer: TableWriter) -> ScoringData:
        """Return all rows with their texts."""
        queries, documents, ends = (np.array(numbers, np.int64) for numbers in (self.queries, self.documents, self.ends))
        digest = hashlib.sha256(self._keys)
        for numbers in (queries, documents, ends):
            digest.update(numbers.tobytes())
        for block in blocks(np.unique(np.concatenate([queries, documents])).tolist()):
            digest.update(b"".join(writer.digests(block)))
        writer.texts.close()
        keys = np.frombuffer(self._keys, KEY)
        return ScoringData(TextColumn(writer.folder / "texts.arrow"), queries, documents, ends, keys, digest.hexdigest())


def _number_texts(section: DataSection, rows: _RowReader, writer: TableWriter) -> None:
    """Write each distinct text once."""
    known = KeyTable()
    for block in blocks(rows.read(section)):
        places = {text: example.place for example in block for text in (example.query, *example.documents)}
        texts = list(places)
        keys = text_keys(texts)
        numbers = known.find(keys)
        new = np.flatnonzero(numbers < 0)
        numbers[new] = [writer.add_text(encode_text(places[texts[number]], texts[number])) for number in new.tolist()]
        known.add(keys[new], numbers[new])
        of = dict(zip(texts, numbers.tolist(), strict=True))
        for example in block:
            rows.add(of[example.query], [of[text] for text in example.documents])


def _number_ids(section: DataSection, rows: _RowReader, writer: TableWriter, folder: Path) -> None:
    """Write all texts that have an id."""
    if section.queries is None or section.documents is None:
        raise InputError("rows of ids need the sources of their texts; set queries and documents")
    queries, documents = (
        write_texts_by_id(
            read_text_entries(source, id_field, section.text_field),
            writer,
            folder / f"{name}.arrow",
            source=source,
            advance=lambda steps: None,
        )
        for name, source, id_field in (
            ("queries", section.queries, section.query_id_field),
            ("documents", section.documents, section.document_id_field),
        )
    )
    examples = rows.read(section)
    ids = IdNumbering(examples, queries, documents, writer)
    for block in blocks(examples):
        for example, query, numbers in ids.look_up(block):
            if flaw := ids.flaw(example, query, numbers[0]):
                raise InputError(f"{example.place}: {flaw}")
            rows.add(query, numbers)
    ids.close()


SCHEMA = "quiver-scoring/1"
RECORD, ROWS = "scoring.json", "train.jsonl.gz"
"""Files of a finished run."""

PAIRS_PER_PART = 4096
"""Pairs per part: less than a minute of a small cross-encoder on two CPU cores."""


NORMALISERS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {"none": lambda scores: scores, "minmax": min_max}
"""Normalizations of a row's scores."""


def score_rows(
    section: DataSection,
    teacher: Teacher | Ensemble,
    out: Path,
    *,
    normalize: str = "none",
    cache: Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Score the rows of a source into a folder.

    Args:
        section: Sources and fields, as in a recipe; its ``format`` is texts or ids.
        teacher: Teacher, or an ensemble whose members score in turn.
        out: Output folder.
        normalize: A key of `NORMALISERS`.
        cache: Folder of the embedding store; None for a temporary one.
        overwrite: Start over, replacing an unfinished or finished run in ``out``.
        progress: Show progress bars.
        command: Command line to record.

    Returns:
        Content of ``scoring.json``.

    Raises:
        InputError: The rows or the teacher cannot be used, a score is not finite, or ``out`` holds other files.
    """
    started = time.perf_counter()
    if normalize not in NORMALISERS:
        raise InputError(f"normalize must be one of {', '.join(NORMALISERS)}, got {normalize!r}")
    members = teacher.members if isinstance(teacher, Ensemble) else (teacher,)
    # Without the weights: scores are saved before weighting, so that a run can resume with other weights.
    settings = {"teacher": teacher.description["fingerprint"], "normalize": normalize, "rows": _named_fields(section)}
    with open_work(out, RECORD, SCHEMA, settings=settings, overwrite=overwrite) as work:
        data = read_scoring_data(section, work.fresh("texts"))
        work.agree(data=data.sha256)
        parts = _parts(data.ends)
        pairs = int(data.ends[-1])
        sizes = [int(data.ends[part.stop] - data.ends[part.start]) for part in parts]
        for place, member in enumerate(members):
            first = place * len(parts)  # each teacher's parts follow those of the previous one
            missing = {number: part for number, part in enumerate(parts) if not work.has(first + number)}
            if not missing:
                continue
            with member.scorer(data, cache=cache, progress=progress) as score:
                label = "scoring" if len(members) == 1 else f"scoring, teacher {place + 1} of {len(members)}"
                with progress_bar(label, pairs, enabled=progress) as advance:
                    advance(pairs - sum(sizes[number] for number in missing))
                    for number, scores in score(missing):
                        work.write(first + number, _checked(scores, section, parts[number], data.ends).tobytes())
                        advance(sizes[number])
        result = _write(section, data, _row_scores(work, parts, data.ends, teacher, members=len(members)), out, NORMALISERS[normalize])
        record = {
            "schema": SCHEMA,
            "command": command,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {name: installed_version(name) for name in ("quiver-retrieval", "torch", "numpy", "sentence-transformers")},
            **settings,
            "teacher": dict(teacher.description),
            "data": {"sha256": data.sha256},
            "result": result,
            "seconds": round(time.perf_counter() - started, 1),
        }
        work.finish(RECORD, record)
    return record


def _named_fields(section: DataSection) -> dict[str, Any]:
    """Settings of a section that decide which texts are scored."""
    names = (
        "train",
        "format",
        "query_field",
        "document_fields",
        "queries",
        "documents",
        "query_id_field",
        "document_id_field",
        "text_field",
    )
    fields = section.model_dump()
    return {name: fields[name] for name in names}


def _parts(ends: NDArray[np.int64]) -> list[slice]:
    """Slices of rows with at most ``PAIRS_PER_PART`` pairs, but at least one row."""
    parts: list[slice] = []
    first, rows = 0, len(ends) - 1
    while first < rows:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + PAIRS_PER_PART, side="right")) - 1)
        parts.append(slice(first, last))
        first = last
    return parts


def _checked(scores: NDArray[np.float32], section: DataSection, rows: slice, ends: NDArray[np.int64]) -> NDArray[np.float32]:
    if not np.isfinite(scores).all():
        pair = int(ends[rows.start]) + int(np.isfinite(scores).argmin())
        row = int(np.searchsorted(ends, pair, side="right"))
        raise InputError(f"{', '.join(section.train)}: row {row}: the teacher's score is not finite")
    return np.ascontiguousarray(scores, "<f4")


def _row_scores(
    work: JobFolder, parts: list[slice], ends: NDArray[np.int64], teacher: Teacher | Ensemble, *, members: int
) -> Iterator[NDArray[np.float64]]:
    """Scores of each row, in order."""
    for number, part in enumerate(parts):
        inner = ends[part.start + 1 : part.stop] - ends[part.start]
        kept = [np.frombuffer(work.read(place * len(parts) + number), "<f4") for place in range(members)]
        for scores in zip(*(np.split(one, inner) for one in kept), strict=True):
            together = teacher.together(scores) if isinstance(teacher, Ensemble) else scores[0].astype(np.float64)
            if not np.abs(together).max() <= np.finfo(np.float32).max:
                raise InputError("the weighted scores overflow float32; run the command again with smaller weights")
            yield together


def _write(
    section: DataSection,
    data: ScoringData,
    scores: Iterator[NDArray[np.float64]],
    out: Path,
    normalise: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> dict[str, Any]:
    """Write the rows with their scores; return statistics for ``scoring.json``."""
    best, positives, everything, lowest, highest = 0, 0.0, 0.0, np.inf, -np.inf
    rows = read_again(section, data)
    with atomic_file(out / ROWS) as file:
        for (place, row), raw in zip(rows, scores, strict=True):
            values = [float(f"{score:.9g}") for score in normalise(raw).tolist()]
            file.write(row_line(place, row, values).encode("utf-8") + b"\n")
            best += bool(raw.argmax() == 0)
            positives += float(raw[0])
            everything += float(raw.sum(dtype=np.float64))
            lowest, highest = min(lowest, float(raw.min())), max(highest, float(raw.max()))
    count, pairs = len(data), int(data.ends[-1])
    means = {"positive": positives / count, "others": (everything - positives) / max(pairs - count, 1)}
    return {
        "rows": count,
        "pairs": pairs,
        "positive_first": best,
        "mean_scores": {name: round(mean, 6) for name, mean in means.items()},
        "lowest": lowest,
        "highest": highest,
    }
