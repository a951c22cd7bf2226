"""Texts, queries and positives that hard negatives are mined for and from.

Texts are written once to a folder as Arrow files and found by number, id or content. Two texts are equal if they differ only in case and
white space, so that a copy of the positive does not become a negative. The corpus of pairs in files is their distinct positives, preceded
by another corpus if one is given; with an index, its documents are the corpus.

Shapes: Q queries, P documents, of which the first ones are searched, B texts of a call.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import load_collection, read_documents
from quiver.retrieval.data.embedding_store import KEY, Keys, KeyTable, text_keys
from quiver.retrieval.index import IndexReader
from quiver.retrieval.records import Document
from quiver.retrieval.training.data.prepare import BLOCK, ArrowWriter, TextColumn, blocks
from quiver.retrieval.training.data.sources import read_whole
from quiver.retrieval.training.recipe import DataSection

logger = logging.getLogger(__name__)


class TextTable:
    """Texts written by a `TextTableWriter`."""

    def __init__(self, stem: Path, identities: Keys, sha256: str, *, index: IndexReader | None) -> None:
        """Open a table; ``identities`` are (P,) keys that equal texts share."""
        self.ids = TextColumn(stem.with_name("ids.arrow"))
        self.sha256 = sha256
        self._documents = None if index is None else index.documents  # once: each access lists the documents that are not deleted
        self._use_title = index is None or index.manifest.policy.use_title
        self._written = TextColumn(stem)
        self._first = KeyTable()
        self._first.add(identities, np.arange(len(identities)))
        self.same: NDArray[np.int64] = np.empty(len(identities), np.int64)
        for start in range(0, len(identities), BLOCK):  # in blocks, to save memory
            self.same[start : start + BLOCK] = self._first.find(identities[start : start + BLOCK])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> str:
        of_index = len(self.ids) - len(self._written)
        if self._documents is not None and number < of_index:
            return self._documents[number].content(use_title=self._use_title)
        return self._written[number - of_index]

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))

    def find_same(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Return the number of the first equal text for each of B texts, (B,); -1 if there is none."""
        return self._first.find(identity_keys(texts))

    def find_ids(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the number of the text with each of B ids, (B,); -1 if there is none."""
        positions = KeyTable()
        wanted, which = np.unique(text_keys(ids), return_inverse=True)
        positions.add(wanted, np.arange(len(wanted)))
        numbers = np.full(len(wanted), -1, np.int64)
        first = 0
        for block in blocks(self.ids):
            found = positions.find(text_keys(block))
            known = np.flatnonzero(found >= 0)
            numbers[found[known]] = first + known
            first += len(block)
        return numbers[which]


class TextTableWriter:
    """Writes a table of texts. Use it as a context manager, and call `table` afterwards."""

    def __init__(self, folder: Path, *, index: IndexReader | None = None, by_content: bool = True) -> None:
        self._stem = folder / "texts.arrow"
        self._index = index
        self._texts, self._ids = ArrowWriter(self._stem), ArrowWriter(folder / "ids.arrow")
        self._identities = bytearray()
        self._digest = hashlib.sha256()
        self._known = KeyTable() if by_content else None
        if index is not None:
            if not index.manifest.policy.store_text:
                raise InputError(f"{index.path}: built without texts, which mining needs; build the index with texts")
            for block in blocks(zip(index.ids, index.documents, strict=True)):
                texts = [document.content(use_title=index.manifest.policy.use_title) for _, document in block]
                self._remember([key for key, _ in block], texts)

    def __len__(self) -> int:
        return len(self._ids)

    def __enter__(self) -> TextTableWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._texts.close()
        self._ids.close()

    def table(self) -> TextTable:
        """Return the table, after the ``with`` block; the writer cannot be used any more."""
        self._known = None  # frees its memory
        identities = np.frombuffer(self._identities, KEY) if self._identities else np.empty(0, KEY)
        return TextTable(self._stem, identities, self._digest.hexdigest(), index=self._index)

    def add(self, documents: Sequence[Document]) -> None:
        """Append documents under their ids, even if their texts are already in the table."""
        for text in (document.text.encode("utf-8") for document in documents):
            self._texts.add(text, size=len(text))
        self._remember([document.id for document in documents], [document.text for document in documents])

    def number(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Return the numbers of B texts, (B,). New texts are appended, with a hash of the content as id. Outer white space is ignored."""
        if self._known is None:
            raise ValueError("number() needs a writer with by_content=True")
        keys = _content_keys(texts)
        numbers = self._known.find(keys)
        unknown = np.flatnonzero(numbers < 0)
        _, first, which = np.unique(keys[unknown], return_index=True, return_inverse=True)
        order = np.argsort(first)
        numbers[unknown] = len(self) + np.argsort(order)[which]
        new = unknown[first[order]].tolist()
        self.add([Document(content_id(texts[position]), texts[position]) for position in new])
        return numbers

    def _remember(self, ids: list[str], texts: list[str]) -> None:
        keys = _content_keys(texts)
        if self._known is not None:
            self._known.add(keys, np.arange(len(self), len(self) + len(ids)))
        self._identities += identity_keys(texts).tobytes()
        for key in ids:
            self._ids.add(key.encode("utf-8"))
        self._digest.update(text_keys(ids).tobytes() + keys.tobytes())


def identity_keys(texts: Sequence[str]) -> Keys:
    """Hash texts without case and with single spaces: equal texts have equal keys."""
    return text_keys([" ".join(text.split()).casefold() for text in texts])


def content_id(text: str) -> str:
    """Return an id for a text without one: 16 hexadecimal digits of its sha256, outer white space aside."""
    return hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _content_keys(texts: Sequence[str]) -> Keys:
    return text_keys([text.strip() for text in texts])


@dataclass(frozen=True)
class PairSource:
    """Rows of which the query and the positives are read."""

    sources: tuple[str, ...]
    query_field: str = "query"
    positive_field: str = "positive"
    corpus: Path | None = None
    use_title: bool = True


@dataclass(frozen=True)
class BeirSource:
    """A BEIR folder: the queries of a split, their relevant documents and the corpus."""

    folder: Path
    split: str = "train"
    use_title: bool = True


@dataclass(frozen=True)
class MiningData:
    """Queries, documents and positives."""

    queries: TextTable  # Q texts, each with at least one positive
    documents: TextTable  # P texts
    searchable: int  # number of documents, from the first, that are searched and may become negatives
    positives: NDArray[np.int64]  # numbers of the positives, query by query, in their original order
    starts: NDArray[np.int64]  # the positives of query q are ``positives[starts[q]:starts[q + 1]]``, (Q + 1,)
    without_positive: int  # number of queries without a positive, which are excluded
    missing_positives: int = 0  # number of judgements that name a relevant document without a text, which are excluded

    @property
    def sha256(self) -> str:
        """Checksum of all data."""
        digest = hashlib.sha256(f"{self.queries.sha256} {self.documents.sha256} {self.searchable}".encode())
        digest.update(self.positives.tobytes() + self.starts.tobytes())
        return digest.hexdigest()

    def positives_of(self, query: int) -> NDArray[np.int64]:
        """Return the positives of a query."""
        return self.positives[self.starts[query] : self.starts[query + 1]]

    def excluded(self, query: int) -> NDArray[np.int64]:
        """Return the documents that cannot be negatives of a query, as values of `TextTable.same`.

        They are the positives of the query and of other queries with the same text, copies of these and of the query, and blank texts.
        """
        positives, starts = self._relevant
        group = self.queries.same[query]
        relevant = self.documents.same[positives[starts[group] : starts[group + 1]]]
        copies = self._query_copies[[query, -1]]
        return np.unique(np.append(relevant, copies[copies >= 0]))

    @cached_property
    def _query_copies(self) -> NDArray[np.int64]:
        """For each query, and at the end for a blank text, the first equal document, (Q + 1,); -1 if there is none."""
        return np.concatenate([self.documents.find_same(chunk) for chunk in blocks(chain(self.queries, [""]))])

    @cached_property
    def _relevant(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        owners = self.queries.same[np.repeat(np.arange(len(self.queries)), np.diff(self.starts))]
        return _grouped(owners, self.positives, len(self.queries))


def read_mining_data(source: PairSource | BeirSource, folder: Path, *, index: IndexReader | None = None) -> MiningData:
    """Read a source; texts are streamed to a folder, numbers stay in memory."""
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
        named = str(source.folder) if isinstance(source, BeirSource) else ", ".join(source.sources)
        raise InputError(f"{named}: no query has a positive")
    logger.info("%d queries, %d positives, %d documents", len(data.queries), len(data.positives), len(data.documents))
    return data


def _read_beir(source: BeirSource, queries: TextTableWriter, documents: TextTableWriter, index: IndexReader | None) -> MiningData:
    # A document that one row of a click log calls relevant and another does not is a positive.
    collection = load_collection(source.folder, source.split, duplicates="max")
    with documents:
        if index is None:
            for block in blocks(collection.documents):
                documents.add([Document(document.id, document.content(use_title=source.use_title)) for document in block])
    table = documents.table()
    relevant = [(query, key) for query, grades in collection.qrels.items() for key, grade in grades.items() if grade > 0]
    numbers: dict[str, list[int]] = {query: [] for query in collection.qrels}
    missing = []
    for (query, key), number in zip(relevant, table.find_ids([key for _, key in relevant]).tolist(), strict=True):
        if number < 0:
            missing.append(key)
        else:
            numbers[query].append(number)
    if missing:
        where = f"{collection.name}: {len(missing):,} of {len(relevant):,} relevant judgements name documents that are not in"
        place = f"{where} {'the corpus' if index is None else index.path}, such as {missing[0]!r}"
        if len(missing) == len(relevant):
            raise InputError(f"{place}; {'add the documents' if index is None else 'build the index from the corpus of that collection'}")
        logger.warning("%s; they are left out", place)
    judged = [query for query in collection.queries if numbers[query.id]]
    with queries:
        for some in blocks(judged):
            queries.add([Document(query.id, query.text) for query in some])
    owners = np.repeat(np.arange(len(judged)), [len(numbers[query.id]) for query in judged])
    positives = np.array([number for query in judged for number in numbers[query.id]], np.int64)
    rows, starts = _grouped(owners, positives, len(judged))
    return MiningData(queries.table(), table, len(table), rows, starts, len(collection.queries) - len(judged), len(missing))


def _read_pairs(source: PairSource, queries: TextTableWriter, documents: TextTableWriter, index: IndexReader | None) -> MiningData:
    section = DataSection(train=source.sources, query_field=source.query_field, document_fields=(source.positive_field,))
    owners, positives = array("q"), array("q")
    with queries, documents:
        if source.corpus is not None:
            for block in blocks(read_documents(source.corpus)):
                documents.add([Document(document.id, document.content(use_title=source.use_title)) for document in block])
        remedy = "leave such rows out, or rename or remove the field if it says something else"
        for examples in blocks(example for example, _ in read_whole(section, all_columns=False, label_remedy=remedy)):
            for example in examples:
                if not all(text.strip() for text in example.documents):
                    raise InputError(f"{example.location}: the field '{source.positive_field}' holds a blank positive")
            numbers = queries.number([example.query for example in examples])
            owners.extend(np.repeat(numbers, [len(example.documents) for example in examples]).tolist())
            positives.extend(documents.number([text for example in examples for text in example.documents]).tolist())
    texts, table = queries.table(), documents.table()
    rows, starts = _grouped(np.array(owners, np.int64), np.array(positives, np.int64), len(texts))
    return MiningData(texts, table, len(table) if index is None else len(index), rows, starts, 0)


def _grouped(owners: NDArray[np.int64], positives: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positives query by query without repetitions, in their order, and the start of each query's positives."""
    order = np.argsort(owners, kind="stable")
    owners, positives = owners[order], positives[order]
    pairs = np.stack([owners, positives], axis=1)
    kept = np.sort(np.unique(pairs, axis=0, return_index=True)[1])
    owners, positives = owners[kept], positives[kept]
    return positives, np.searchsorted(owners, np.arange(count + 1))
