"""What hard negatives are mined for and from: queries with their positives, and the documents that may become negatives.

They come from a BEIR folder (its judgements and its corpus), or from pairs in files (the corpus is their distinct positives, before
them another corpus if one is given). With an index at hand its documents are the corpus.

Shapes: Q queries, P documents, of which the first ones are searched.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.corpus import Collection, load_collection, read_documents
from retrieval.indexes import IndexFolder
from retrieval.records import Document
from retrieval.text_keys import KeyTable, text_keys
from retrieval.training.data.fields import FieldReader
from retrieval.training.data.sources import iter_source
from retrieval.training.mining.text_table import TextTable, TextTableWriter
from retrieval.training.sections import DataSection

logger = logging.getLogger(__name__)

# Rows whose texts are numbered together.
_CHUNK = 4096

Item = TypeVar("Item")


@dataclass(frozen=True)
class PairSource:
    """Pairs, or longer rows of which the query and the positive are read.

    Attributes:
        sources: Files, folders or hub data sets, as ``data.train`` of a recipe has them.
        query_field: Field of the query's text.
        positive_field: Field of the positive, or of a list of positives.
        corpus: A BEIR corpus whose documents are searched too.
        use_title: Titles of that corpus are put before the texts.
    """

    sources: tuple[str, ...]
    query_field: str = "query"
    positive_field: str = "positive"
    corpus: Path | None = None
    use_title: bool = True


@dataclass(frozen=True)
class BeirSource:
    """A BEIR folder: the queries of a split, their relevant documents, the corpus.

    Attributes:
        folder: The folder.
        split: Name of the judgements.
        use_title: Titles are put before the texts; an index has done so or not when it was built.
    """

    folder: Path
    split: str = "train"
    use_title: bool = True


@dataclass(frozen=True)
class MiningData:
    """Queries, documents and who is relevant for whom.

    Attributes:
        queries: Q texts, each with one positive at least.
        documents: P texts.
        searchable: Number of documents, from the first, that are searched and may become negatives.
        positives: Numbers of relevant documents, query after query, in the order they were given.
        starts: (Q + 1,) the positives of query q are ``positives[starts[q]:starts[q + 1]]``.
        without_positive: Queries that were left out.
    """

    queries: TextTable
    documents: TextTable
    searchable: int
    positives: NDArray[np.int64]
    starts: NDArray[np.int64]
    without_positive: int

    @property
    def sha256(self) -> str:
        """Of all of it: equal sums, equal data."""
        digest = hashlib.sha256(f"{self.queries.sha256} {self.documents.sha256} {self.searchable}".encode())
        digest.update(self.positives.tobytes() + self.starts.tobytes())
        return digest.hexdigest()

    def positives_of(self, query: int) -> NDArray[np.int64]:
        """The relevant documents of a query."""
        return self.positives[self.starts[query] : self.starts[query + 1]]

    def excluded(self, query: int) -> NDArray[np.int64]:
        """Documents that cannot be negatives of a query: see ``same`` of `TextTable`.

        They are those relevant to it, or to another query with its text, those that are the same as one of these or as the query, and
        those without text.
        """
        positives, starts = self._relevant
        group = self.queries.same[query]
        relevant = self.documents.same[positives[starts[group] : starts[group + 1]]]
        copies = self._query_copies[[query, -1]]
        return np.unique(np.append(relevant, copies[copies >= 0]))

    @cached_property
    def _query_copies(self) -> NDArray[np.int64]:
        """For each query, and behind them for a blank text, the first document that is the same, (Q + 1,); -1 where there is none."""
        return np.concatenate([self.documents.find_same(chunk) for chunk in _chunks(chain(self.queries, [""]))])

    @cached_property
    def _relevant(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        owners = self.queries.same[np.repeat(np.arange(len(self.queries)), np.diff(self.starts))]
        return _grouped(owners, self.positives, len(self.queries))


def read_mining_data(source: PairSource | BeirSource, folder: Path, *, index: IndexFolder | None = None) -> MiningData:
    """Read all of it, streamed; texts go to a folder, numbers stay in memory.

    Args:
        source: Where it lies.
        folder: Takes the texts; must be empty.
        index: Its documents are the corpus.

    Raises:
        InputError: A file or row is malformed (names its place), a judged document is not in the index, the index has no texts, or
            there is no query with a positive.
    """
    for name in ("queries", "documents"):
        (folder / name).mkdir()
    queries, documents = TextTableWriter(folder / "queries"), TextTableWriter(folder / "documents", index=index)
    with queries, documents:
        if isinstance(source, BeirSource):
            owners, positives, without = _read_beir(source, queries, documents, index)
        else:
            owners, positives = _read_pairs(source, queries, documents)
            without = 0
    if not len(owners):
        raise InputError(f"{_named(source)}: no query has a positive")
    table = documents.table()
    rows, starts = _grouped(owners, positives, len(queries.ids))
    logger.info("%d queries, %d positives, %d documents", len(queries.ids), len(rows), len(table))
    return MiningData(queries.table(), table, len(table) if index is None else len(index), rows, starts, without)


def _read_beir(
    source: BeirSource, queries: TextTableWriter, documents: TextTableWriter, index: IndexFolder | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    collection = load_collection(source.folder, source.split)
    if index is None:
        for chunk in _chunks(collection.documents):
            documents.add([Document(document.id, document.content(use_title=source.use_title)) for document in chunk])
    relevant = {query: [key for key, grade in grades.items() if grade > 0] for query, grades in collection.qrels.items()}
    asked = [query for query in collection.queries if relevant[query.id]]
    for some in _chunks(asked):
        queries.add([Document(query.id, query.text) for query in some])
    named = [key for query in asked for key in relevant[query.id]]
    numbers = KeyTable()
    numbers.add(text_keys(documents.ids), np.arange(len(documents.ids)))
    positives = numbers.find(text_keys(named))
    if (missing := np.flatnonzero(positives < 0)).size:
        raise _not_in_index(collection, index, named[int(missing[0])], missing.size)
    owners = np.repeat(np.arange(len(asked)), [len(relevant[query.id]) for query in asked])
    return owners, positives, len(collection.queries) - len(asked)


def _not_in_index(collection: Collection, index: IndexFolder | None, document: str, count: int) -> InputError:
    where = "" if index is None else str(index.path)
    return InputError(
        f"{where}: document '{document}', relevant in {collection.name}, is not in this index ({count} such judgements); "
        "build it from that collection's corpus"
    )


def _read_pairs(source: PairSource, queries: TextTableWriter, documents: TextTableWriter) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if source.corpus is not None:
        for chunk in _chunks(read_documents(source.corpus)):
            documents.add([Document(document.id, document.content(use_title=source.use_title)) for document in chunk])
    section = DataSection(train=source.sources, query_field=source.query_field, document_fields=(source.positive_field,))
    owners, positives = array("q"), array("q")
    for rows in _chunks(_examples(section)):
        asked = queries.number([query for query, _ in rows])
        owners.extend(np.repeat(asked, [len(texts) for _, texts in rows]).tolist())
        positives.extend(documents.number([text for _, texts in rows for text in texts]).tolist())
    return np.array(owners, np.int64), np.array(positives, np.int64)


def _examples(section: DataSection) -> Iterator[tuple[str, list[str]]]:
    """The query and the positives of each row."""
    reader = FieldReader(section)
    for source in section.train:
        for number, (place, row) in enumerate(iter_source(source, reader.columns)):
            if number == 0:
                reader.check(place, row)
            example = reader.example(place, row)
            if example.flaw:
                raise InputError(f"{place}: {example.flaw}")
            if not all(text.strip() for text in example.documents):
                raise InputError(f"{place}: the field '{section.document_fields[0]}' holds a blank positive")
            yield example.query, example.documents


def _grouped(owners: NDArray[np.int64], positives: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positives query after query, each once and in the order given, and where those of each query begin."""
    order = np.argsort(owners, kind="stable")
    owners, positives = owners[order], positives[order]
    pairs = np.stack([owners, positives], axis=1)
    kept = np.sort(np.unique(pairs, axis=0, return_index=True)[1])
    owners, positives = owners[kept], positives[kept]
    return positives, np.searchsorted(owners, np.arange(count + 1))


def _named(source: PairSource | BeirSource) -> str:
    return str(source.folder) if isinstance(source, BeirSource) else ", ".join(source.sources)


def _chunks(items: Iterable[Item]) -> Iterator[Sequence[Item]]:
    stream = iter(items)
    while chunk := list(islice(stream, _CHUNK)):
        yield chunk
