"""What hard negatives are mined for and from: queries with their positives, and the documents that may become negatives.

They come from a BEIR folder (its judgements and its corpus), or from pairs in files (the corpus is their distinct positives, before
them another corpus if one is given). With an index at hand its documents are the corpus.

Shapes: Q queries, P documents, of which the first ones are searched.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import Collection, load_collection, read_documents
from quiver.retrieval.index import Index
from quiver.retrieval.records import Document
from quiver.retrieval.training.data.sources import Example, read_whole
from quiver.retrieval.training.data.table import blocks
from quiver.retrieval.training.mining.text_table import TextTable, TextTableWriter
from quiver.retrieval.training.sections import DataSection

logger = logging.getLogger(__name__)


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
        return np.concatenate([self.documents.find_same(chunk) for chunk in blocks(chain(self.queries, [""]))])

    @cached_property
    def _relevant(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        owners = self.queries.same[np.repeat(np.arange(len(self.queries)), np.diff(self.starts))]
        return _grouped(owners, self.positives, len(self.queries))


def read_mining_data(source: PairSource | BeirSource, folder: Path, *, index: Index | None = None) -> MiningData:
    """Read all of it, streamed; texts go to a folder, numbers stay in memory.

    Args:
        source: Where it lies.
        folder: Takes the texts; must be empty.
        index: Its documents are the corpus.

    Raises:
        InputError: A file or row is malformed (names its place), a judged document is not in the index, the index has no texts, or
            there is no query with a positive.
    """
    by_content = isinstance(source, PairSource)
    for name in ("queries", "documents"):
        (folder / name).mkdir()
    queries = TextTableWriter(folder / "queries", by_content=by_content)
    documents = TextTableWriter(folder / "documents", index=index, by_content=by_content)
    if isinstance(source, BeirSource):
        data = _read_beir(source, queries, documents, index)
    else:
        data = _read_pairs(source, queries, documents, index)
    if not len(data.positives):
        raise InputError(f"{_named(source)}: no query has a positive")
    logger.info("%d queries, %d positives, %d documents", len(data.queries), len(data.positives), len(data.documents))
    return data


def _read_beir(source: BeirSource, queries: TextTableWriter, documents: TextTableWriter, index: Index | None) -> MiningData:
    collection = load_collection(source.folder, source.split)
    relevant = {query: [key for key, grade in grades.items() if grade > 0] for query, grades in collection.qrels.items()}
    asked = [query for query in collection.queries if relevant[query.id]]
    with queries, documents:
        if index is None:
            for block in blocks(collection.documents):
                documents.add([Document(document.id, document.content(use_title=source.use_title)) for document in block])
        for some in blocks(asked):
            queries.add([Document(query.id, query.text) for query in some])
    table = documents.table()
    named = [key for query in asked for key in relevant[query.id]]
    positives = table.find_ids(named)
    if (missing := np.flatnonzero(positives < 0)).size:
        raise _not_in_index(collection, index, named[int(missing[0])], missing.size)
    owners = np.repeat(np.arange(len(asked)), [len(relevant[query.id]) for query in asked])
    rows, starts = _grouped(owners, positives, len(asked))
    return MiningData(queries.table(), table, len(table), rows, starts, len(collection.queries) - len(asked))


def _not_in_index(collection: Collection, index: Index | None, document: str, count: int) -> InputError:
    where = "" if index is None else str(index.path)
    return InputError(
        f"{where}: document '{document}', relevant in {collection.name}, is not in this index ({count} such judgements); "
        "build it from that collection's corpus"
    )


def _read_pairs(source: PairSource, queries: TextTableWriter, documents: TextTableWriter, index: Index | None) -> MiningData:
    section = DataSection(train=source.sources, query_field=source.query_field, document_fields=(source.positive_field,))
    owners, positives = array("q"), array("q")
    with queries, documents:
        if source.corpus is not None:
            for block in blocks(read_documents(source.corpus)):
                documents.add([Document(document.id, document.content(use_title=source.use_title)) for document in block])
        for examples in blocks(_examples(section)):
            asked = queries.number([example.query for example in examples])
            owners.extend(np.repeat(asked, [len(example.documents) for example in examples]).tolist())
            positives.extend(documents.number([text for example in examples for text in example.documents]).tolist())
    texts, table = queries.table(), documents.table()
    rows, starts = _grouped(np.array(owners, np.int64), np.array(positives, np.int64), len(texts))
    return MiningData(texts, table, len(table) if index is None else len(index), rows, starts, 0)


def _examples(section: DataSection) -> Iterator[Example]:
    """The query and the positives of each row."""
    for example, _ in read_whole(section, all_columns=False):
        if not all(text.strip() for text in example.documents):
            raise InputError(f"{example.place}: the field '{section.document_fields[0]}' holds a blank positive")
        yield example


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
