"""Read training rows from any source: files, folders and data sets of the Hugging Face Hub; turn each row into an example.

A source is a table (see `quiver.retrieval.data.tables`), a folder of tables, or a split or file of a data set of the Hugging Face Hub (see
`quiver.retrieval.data.hub`). Rows are streamed. Every error about a row begins with its location, ``file:line``.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.dataset
from pyarrow import parquet

from quiver.encoder.errors import InputError, download_errors, first_line, import_for
from quiver.encoder.files import check_utf8, expand_home, open_binary
from quiver.encoder.progress import Advance
from quiver.retrieval.data.entries import key_of
from quiver.retrieval.data.hub import HUB, LOCAL_HUB, SUFFIXES, HubSource
from quiver.retrieval.data.tables import is_delimited, is_table, read_rows
from quiver.retrieval.training.recipe import DataSection

_BATCH = 256  # Parquet rows held in memory at a time: few enough for documents of a megabyte


def iter_source(source: str, fields: Sequence[str] = (), *, also: Collection[str] = ()) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Read the rows of a source in their order.

    Of Parquet files and data sets of the Hub, only the columns that the dotted paths ``fields`` need are read (all columns if there are
    none), and those whose names in lower case are in ``also``.

    Yields:
        The location of a row, such as ``rows.jsonl:7``, and the row. For Parquet, Arrow and the Hub the number counts rows, from 1. The
        values of CSV and TSV are strings.
    """
    if source.startswith(HUB):
        yield from _hub_rows(source, fields, also)
    else:
        for file in source_files(source):
            yield from _rows_of_local_file(file, fields, also)


def source_files(source: str) -> list[Path]:
    """List the local files of a source, in their order; empty for a data set that is downloaded from the Hub."""
    if source.startswith(HUB):
        hub = _hub(source)
        if hub.local is None:
            return []
        if hub.file is not None:
            return [hub.local / hub.file]
        files = [file.relative_to(hub.local) for file in hub.local.rglob("*") if file.is_file()]
        # The Hub's client keeps metadata in ``.cache``.
        return sorted(hub.local / file for file in files if not any(part.startswith(".") for part in file.parts))
    path = expand_home(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.lower().endswith(SUFFIXES) and file.is_file())
        if not files:
            raise InputError(f"{path}: the folder contains no file with the suffix {', '.join(SUFFIXES)}")
        # CSV beside rows of another kind is often the same rows, or something about them.
        return [file for file in files if not is_delimited(file)] or files
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if not is_table(path):
        raise InputError(
            f"{path}: unsupported type; rows are read from {', '.join(SUFFIXES)}, a folder of them, or {HUB}OWNER/NAME/CONFIG:SPLIT"
        )
    return [path]


def count_rows(sources: Sequence[str], *, sample: int = 1 << 20) -> int | None:
    """Count rows for a progress bar; lines are estimated from the beginning of a file. None if a source is compressed or on the Hub."""
    count = 0.0
    if any(source.startswith(HUB) for source in sources):
        return None
    for file in (file for source in sources for file in source_files(source)):
        if file.suffix.lower() == ".parquet":
            with _parquet_errors(file), parquet.ParquetFile(file) as table:
                count += table.metadata.num_rows
        elif not file.name.lower().endswith((".jsonl", ".csv", ".tsv")):
            return None
        else:
            with open_binary(file) as lines:
                text = lines.read(sample)
            count += text.count(b"\n") * file.stat().st_size / max(len(text), 1) - is_delimited(file)
    return round(count)


def _hub(source: str) -> HubSource:
    """A source on the Hub that names a file or a split."""
    hub = HubSource.parse(source)
    if hub.file is None and hub.split is None:
        raise InputError(f"{source}: must read {HUB}OWNER/NAME[@REVISION][/CONFIG]:SPLIT, or {HUB}OWNER/NAME[@REVISION]/path/to/file")
    return hub


def _rows_of_local_file(file: Path, fields: Sequence[str], also: Collection[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    if file.suffix.lower() != ".parquet":
        for position, row in read_rows(file):
            yield str(position), row
        return
    number = 0
    # With pre_buffer, pyarrow keeps everything that it has read until the file is closed.
    with _parquet_errors(file), parquet.ParquetFile(file, pre_buffer=False) as table:
        for batch in table.iter_batches(batch_size=_BATCH, columns=_columns_of_fields(table.schema_arrow.names, fields, also)):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}:{number}", row
    if number == 0:
        raise InputError(f"{file}: the file is empty")


@contextmanager
def _parquet_errors(file: Path) -> Iterator[None]:
    """Turn errors of pyarrow into one line."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: damaged Parquet file ({first_line(error)}); download it again") from error


def _columns_of_fields(names: Sequence[str], fields: Sequence[str], also: Collection[str]) -> list[str] | None:
    """The columns that fields begin with; None for all columns if one is missing, so that the error can list those that exist."""
    keys = [field if field in names else field.partition(".")[0] for field in fields]
    return [name for name in names if name in keys or name.lower() in also] if keys and set(keys) <= set(names) else None


def _hub_rows(source: str, fields: Sequence[str], also: Collection[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    hub = _hub(source)
    if hub.file is not None:
        if hub.local is not None:
            path = hub.local / hub.file
        else:
            from huggingface_hub import hf_hub_download

            with _hub_errors(source):
                path = Path(hf_hub_download(hub.repository, hub.file, repo_type="dataset", revision=hub.revision))
        yield from _rows_of_local_file(path, fields, also)
        return
    number = 0
    with _hub_errors(source):
        where, revision = (str(hub.local), None) if hub.local else (hub.repository, hub.revision)
        datasets = import_for("this data", "datasets", "'quiver-retrieval[train]'")
        library = logging.getLogger("datasets")
        level = library.level
        library.setLevel(logging.ERROR)  # it warns of every entry of a card that it does not know
        try:
            builder = datasets.load_dataset_builder(where, hub.config, revision=revision)
        finally:
            library.setLevel(level)
        if hasattr(builder.config, "fragment_scan_options") and hasattr(builder.config, "batch_size"):
            # By default the Parquet reader casts columns to the types of the data set card, which fails if the card declares lists and the
            # files store lists as text; and it buffers a gigabyte ahead.
            builder.info.features = None
            builder.config.fragment_scan_options = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)
            builder.config.batch_size = _BATCH
        rows = builder.as_streaming_dataset(split=hub.split)
        if (keys := _columns_of_fields(rows.column_names or (), fields, also)) is not None:
            rows = rows.select_columns(keys)
        for number, row in enumerate(rows, start=1):
            yield f"{source} row {number}", row
    if number == 0:
        raise InputError(f"{source}: the split is empty")


@contextmanager
def _hub_errors(source: str) -> Iterator[None]:
    """Turn errors of the Hub's clients into one line."""
    try:
        yield
    except download_errors(ValueError, TypeError, EOFError) as error:  # such as an unknown split, or files with different columns
        remedy = f"check the name and the network, or set {LOCAL_HUB} to a folder of local copies"
        raise InputError(f"{source}: downloading from the Hub failed ({first_line(error)}); {remedy}") from error


_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:nan|inf|infinity)"
_QUOTED = r"'[^'\\]*'|\"[^\"\\]*\""
_ITEM = re.compile(rf"\s*(?:({_QUOTED})|({_NUMBER}))(?=[\s,]|\Z)\s*,?", re.IGNORECASE)
"""One item of a list as Python or NumPy print it: a number or a quoted string, and the comma or space after it."""


class Example(NamedTuple):
    """A training row; texts may still be ids."""

    location: str  # place in the source, for errors
    query: str  # text or id of the query
    documents: list[str]  # texts or ids of the documents, the positive first
    scores: list[float]  # teacher scores, one per document; empty if the section names no score field
    flaw: str = ""  # why the row cannot be used although its fields are well-formed; empty if it can
    excluded: int = 0  # negatives that are not among the documents because they are other positives of the row
    rank: float = 0.0  # sort key if rows are shuffled
    not_relevant: bool = False  # the label of the row says that none of its documents is relevant


class TextEntry(NamedTuple):
    """A text with its id and its location in the source."""

    location: str
    id: str
    text: str


LABELS = frozenset({"label", "labels", "gold_label", "is_relevant", "relevant", "relevance", "is_duplicate"})
"""Names of fields that say whether a document is relevant, in lower case."""

GRADES = frozenset({"score", "similarity", "similarity_score", "sim", "grade", "rating"})
"""Names of fields that say how relevant the document of a pair is, or something else: votes, the score of a search engine."""

FIRST_ROWS = 1000  # rows among which every field must be found once, so that a misspelt field is not taken for one that rows lack

_MISSING = object()  # value of a field that a row does not have; null fields are None


class FieldReader:
    """Turns rows into examples, by the fields that a data section names."""

    def __init__(self, section: DataSection) -> None:
        self._query = section.query_field
        self._documents = section.document_fields
        self._scores = section.score_fields
        self._each = section.positives == "each"
        self._item = _id if section.format == "ids" else _text
        self._label = section.label_field
        named = {name.lower() for field in (*self.columns, *section.ignore_fields) for name in (field, field.partition(".")[0])}
        # Names in lower case of fields that are not read although they may say that a document is not relevant.
        self.suspected = frozenset() if self._scores or self._label is not None else (LABELS | GRADES) - named

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the fields that are read."""
        return (self._query, *self._documents, *self._scores, *([] if self._label is None else [self._label]))

    def missing(self, location: str, row: Mapping[str, object]) -> set[str]:
        """Return the fields that a row lacks; a null field is there."""
        return {name for name in self.columns if _reach(location, name, row) is _MISSING}

    def misspelt(self, location: str, row: Mapping[str, object], name: str) -> InputError:
        """Make the error for a field that no row has; it lists the fields of the first one."""
        known = ", ".join(map(str, row)) or "none"
        close = difflib.get_close_matches(name, [str(key) for key in row], n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        options = {"query_field": (self._query,), "document_fields": self._documents, "label_field": (self._label,)}
        key = next((option for option, names in options.items() if name in names), "score_fields")
        return InputError(f"{location}: no field '{name}'; {hint}the row's fields are {known}; a recipe names it by data.{key}")

    def refuse_unread_label(self, location: str, row: Mapping[str, object], remedy: str) -> None:
        """Refuse a row whose document may not be relevant, by a field that is not read.

        A label of a single document, or the labels of all, must be 1 (true) of the first and 0 of the others. A score counts as a label of
        a pair, not of a row with negatives, where it can be a margin.
        """
        for name, value in row.items():
            if str(name).lower() not in self.suspected or value in (None, ""):  # CSV has no null
                continue
            is_label, listed = str(name).lower() in LABELS, isinstance(value, list)
            documents = (self._values(location, field, row, parse=self._item is _id) for field in self._documents)
            if not is_label and (listed or sum(map(len, documents)) > 1):
                continue
            first, *others = value or [1] if isinstance(value, list) else [value]
            if _grade(first) != 1 or any(_grade(other) != 0 for other in others):
                raise InputError(
                    f"{location}: the field '{name}' is {_shown(value)}, and the document would be trained as relevant; "
                    + remedy.format(name=name)
                )

    def examples(self, location: str, row: Mapping[str, object]) -> list[Example]:
        """Return the examples of a row: one, or one per positive. An example whose query or positive is blank or missing has a flaw.

        With a label, an example of a row without a relevant document is not relevant.
        """
        whole, positives = self._read(location, row)
        if self._label is not None:
            whole, positives = self._labelled(location, row, whole, positives)
            if whole.not_relevant:
                return [whole]
        if self._each and positives:  # each with the negatives that are not positives
            known = {document.strip() for document in whole.documents[:positives]}
            kept = [place for place in range(positives, len(whole.documents)) if whole.documents[place].strip() not in known]
            excluded = len(whole.documents) - positives - len(kept)
            orders = [(positive, *kept) for positive in range(positives)]
            return [self._reorder(whole, order)._replace(excluded=excluded) for order in orders]
        if positives > 1 and len(self._documents) > 1:
            name = self._documents[0]
            one = name.replace("*", "0") if "*" in name else f"{name}.0"
            raise InputError(
                f"{location}: the field '{name}' holds {positives} documents, but the first of several fields must hold one positive, "
                f"since the others would become its negatives; set data.positives: each, or use one of them: {one}"
            )
        return [whole]

    def _labelled(self, location: str, row: Mapping[str, object], whole: Example, positives: int) -> tuple[Example, int]:
        """The example with its relevant documents first, and their number."""
        label = str(self._label)
        values = self._values(location, label, row, parse=True)
        grades = [_grade(value) for value in values]
        if not grades or not all(math.isfinite(grade) for grade in grades):
            shown = _shown(_reach(location, label, row) if values else None)
            raise InputError(f"{location}: a label in '{label}' must be a number, true or false, got {shown}")
        if not isinstance(_reach(location, label, row), list | str) or len(grades) == 1 != len(whole.documents):
            return whole._replace(not_relevant=grades[0] <= 0), positives  # one label for the row
        if len(grades) != len(whole.documents):
            raise InputError(f"{location}: {len(grades)} labels ({label}) for {len(whole.documents)} documents")
        relevant = [position for position, grade in enumerate(grades) if grade > 0]
        if len(relevant) > 1 and not self._each:
            raise InputError(f"{location}: {len(relevant)} documents are relevant by '{label}'; set data.positives: each")
        order = [*relevant, *(position for position, grade in enumerate(grades) if grade <= 0)]
        return self._reorder(whole, order)._replace(not_relevant=not relevant), len(relevant)

    def _reorder(self, whole: Example, order: Sequence[int]) -> Example:
        documents = [whole.documents[position] for position in order]
        scores = [whole.scores[position] for position in order] if whole.scores else []
        return whole._replace(documents=documents, scores=scores, flaw=self._flaw(whole.query, documents[:1]))

    def whole(self, location: str, row: Mapping[str, object]) -> Example:
        """Return all documents of a row as one example, the positives first."""
        return self._read(location, row)[0]

    def _read(self, location: str, row: Mapping[str, object]) -> tuple[Example, int]:
        """The row as one example, and the number of documents in its first field."""
        query = self._item(location, self._query, _one(location, self._query, row))
        parse = self._item is _id
        values = [(name, self._values(location, name, row, parse=parse)) for name in self._documents]
        fields = [[self._item(location, name, value) for value in own] for name, own in values]
        documents = [document for field in fields for document in field]
        scores = [_score(location, name, value) for name in self._scores for value in self._values(location, name, row, parse=True)]
        if self._scores and len(scores) != len(documents):
            raise InputError(f"{location}: {len(scores)} scores ({', '.join(self._scores)}) for {len(documents)} documents")
        return Example(location, query, documents, scores, self._flaw(query, fields[0])), len(fields[0])

    def _flaw(self, query: str, positives: Sequence[str]) -> str:
        if not positives or not positives[0].strip():
            return f"the field '{self._documents[0]}' has no positive"
        return "" if query.strip() else f"the field '{self._query}' is blank"

    @staticmethod
    def _values(location: str, name: str, row: Mapping[str, object], *, parse: bool) -> Sequence[object]:
        """Values of a field: the items of a list, nothing if the field is missing or null, otherwise the one value."""
        value = _reach(location, name, row)
        if value is _MISSING or value is None:
            return ()
        if parse and isinstance(value, str) and value.lstrip().startswith("["):
            return parse_list(location, name, value)
        return value if isinstance(value, list) else (value,)


def encode_text(location: str, text: str) -> bytes:
    """Encode a text in UTF-8."""
    return check_utf8(text, f"{location}: a text").encode("utf-8")


def read_text_entries(section: DataSection, sources: Sequence[str], id_field: str) -> Iterator[TextEntry]:
    """Read the texts of the queries or documents of a section with their ids, as the rows of `read_examples` and `read_whole` name them."""
    field = section.text_field
    for place, source in enumerate(sources):
        scope = _scope_ids(section, sources, place)
        for location, row in iter_source(source, (id_field, field)):
            key = scope + _id(location, id_field, _one(location, id_field, row))
            yield TextEntry(location, key, _text(location, field, _one(location, field, row)))


def _scope_ids(section: DataSection, sources: Sequence[str] | None, place: int) -> str:
    """Prefix of the ids at a place among the sources: each source of rows may have texts of its own, whose ids others use too."""
    return f"{place + 1}/" if sources is not None and min(len(sources), len(section.train)) > 1 else ""


def _scope_example(section: DataSection, place: int, example: Example) -> Example:
    """The example of a source of rows, with ids that name a text among those of all sources."""
    query, document = (_scope_ids(section, sources, place) for sources in (section.queries, section.documents))
    if not query and not document:
        return example
    return example._replace(query=query + example.query, documents=[document + key for key in example.documents])


def parse_list(location: str, name: str, text: str) -> list[object]:
    """Parse a list that was stored as text: JSON, or numbers and quoted strings as Python or NumPy print them.

    Outside JSON, a number without a fraction stays a string: the ids ``007`` and ``7`` differ.

    Example:
        >>> parse_list("rows.jsonl:1", "scores", "[0.5, 1e-3]"), parse_list("rows.jsonl:1", "ids", "['a' 'b']")
        ([0.5, 0.001], ['a', 'b'])
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        inner, value, position = text.strip()[1:-1].rstrip(), list[object](), 0
        while position < len(inner) and (match := _ITEM.match(inner, position)):
            quoted, number = match.groups()
            value.append(quoted[1:-1] if quoted is not None else number if number.lstrip("+-").isdigit() else float(number))
            position = match.end()
        if position < len(inner) or not text.rstrip().endswith("]"):
            value = None
    if not isinstance(value, list):
        raise InputError(f"{location}: the field '{name}' must hold a list of numbers or ids, got {_shown(text)}")
    return value


def _reach(location: str, name: str, row: Mapping[str, object]) -> object:
    """Value at a dotted path. A key that equals the whole path takes precedence."""
    return row[name] if name in row else _walk(location, name, row, name.split("."))


def _walk(location: str, name: str, value: object, parts: Sequence[str]) -> object:
    for position, part in enumerate(parts):
        if value is None or value is _MISSING:
            return value
        if part == "*":
            rest = parts[position + 1 :]
            if not isinstance(value, list):
                raise InputError(f"{location}: '*' in the path '{name}' needs a list, got {_describe_kind(value)}")
            reached = [_walk(location, name, item, rest) for item in value]
            if any(one is _MISSING for one in reached):
                raise InputError(f"{location}: an item of '{name}' has no '{'.'.join(rest)}'")
            flat = (one if "*" in rest and isinstance(one, list) else [one] for one in reached)  # nested lists
            return list(chain.from_iterable(flat))
        if isinstance(value, Mapping):
            value = value.get(part, _MISSING)
        elif isinstance(value, list) and part.isdigit():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            raise InputError(f"{location}: the path '{name}' needs a mapping or a list with '{part}', got {_describe_kind(value)}")
    return value


def _one(location: str, name: str, row: Mapping[str, object]) -> object:
    value = _reach(location, name, row)
    if value is _MISSING:
        raise InputError(f"{location}: no field '{name}'; the row's fields are {', '.join(map(str, row)) or 'none'}")
    return value


def _text(location: str, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f"{location}: the field '{name}' must hold text, got {_shown(value)}")
    return value


def _id(location: str, name: str, value: object) -> str:
    key = key_of(value)
    if key is None or not key.strip():
        raise InputError(f"{location}: the field '{name}' must hold an id (a string or an integer), got {_shown(value)}")
    return key


def _score(location: str, name: str, value: object) -> float:
    try:
        score = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        score = None
    if score is None or not math.isfinite(score):
        raise InputError(f"{location}: a score in '{name}' must be a finite number, got {_shown(value)}")
    return score


_TRUTH = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}


def _grade(value: object) -> float:
    """A label as a number; NaN if it is none."""
    text = str(value).strip().lower()
    try:
        return _TRUTH[text] if text in _TRUTH else float(text)
    except ValueError:
        return math.nan


def _describe_kind(value: object) -> str:
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, Mapping) else _shown(value)


def _shown(value: object) -> str:
    text = "null" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_examples(section: DataSection, advance: Advance) -> Iterator[Example]:
    """Read the examples of a data section, in the order of the rows."""
    reader = FieldReader(section)
    for place, location, row in _checked_rows(section, reader, reader.columns):
        advance(1)
        reader.refuse_unread_label(location, row, _LABEL_REMEDY)
        yield from (_scope_example(section, place, example) for example in reader.examples(location, row))


_LABEL_REMEDY = "set data.label_field={name} to train on rows above 0 only, or data.ignore_fields=[{name}] to train on all"


def read_whole(
    section: DataSection, *, all_columns: bool, label_remedy: str | None = None
) -> Iterator[tuple[Example, Mapping[str, object]]]:
    """Read each row as one example with all its documents, and the row itself."""
    reader = FieldReader(section)
    for place, location, row in _checked_rows(section, reader, () if all_columns else reader.columns):
        if label_remedy is not None:
            reader.refuse_unread_label(location, row, label_remedy)
        example = reader.whole(location, row)
        if example.flaw:
            raise InputError(f"{location}: {example.flaw}")
        yield _scope_example(section, place, example), row


def _checked_rows(section: DataSection, reader: FieldReader, columns: Sequence[str]) -> Iterator[tuple[int, str, Mapping[str, object]]]:
    """The rows of all sources with the places of these, after a check of each source's first rows for misspelt fields."""
    for place, source in enumerate(section.train):
        rows = iter_source(source, columns, also=reader.suspected)
        first = list(islice(rows, 1))
        missing = {name for location, row in first for name in reader.missing(location, row)}
        while missing and len(first) < FIRST_ROWS and (more := next(rows, None)) is not None:
            first.append(more)
            missing &= reader.missing(*more)
        for name in (name for name in reader.columns if name in missing):
            raise reader.misspelt(*first[0], name)
        yield from ((place, location, row) for location, row in chain(first, rows))
