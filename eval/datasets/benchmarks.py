"""Benchmarks: a collection, its split, and the policy that its published results follow; found by folder or by registered name.

A policy is data. Only ``cut`` applies it, and ``cut`` returns a new run: evaluation code that removes ids from the caller's run would
score that run differently the second time.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home
from quiver.eval.datasets.cache import Cache, CachedCollection, Record
from quiver.eval.datasets.catalogue import BEIR_FOLDERS, Entry, Metadata, beir, coir, mldr, mteb, nanobeir
from quiver.eval.datasets.sources import Source, is_offline
from quiver.eval.metrics import Part
from quiver.retrieval.data.corpus import (
    GRADES,
    JUDGED_DOCUMENTS,
    JUDGED_QUERIES,
    NO_NAMES,
    QUERY_IDS,
    QUERY_TEXTS,
    Collection,
    DuplicateJudgements,
    Judgement,
    assemble,
    check_names,
    check_names_of,
    check_one_table,
    describe_missing,
    has_corpus,
    have_ids,
    load_collection,
    merged_judgements,
    name_of,
    ranked,
    renamed,
    stem,
    table_judgements,
    table_queries,
    telling_name,
    with_numbers,
)
from quiver.retrieval.data.entries import EntryPosition, checked_document
from quiver.retrieval.data.tables import read_rows, rows_of_frame
from quiver.retrieval.records import Document, Run

logger = logging.getLogger(__name__)


@cache
def registry() -> Mapping[str, Entry]:
    """Key -> entry, in listing order."""
    return {entry.key: entry for entry in (*beir(), *mldr(), *coir(), *mteb(), *nanobeir())}


def find(name: str) -> tuple[Entry, ...]:
    """Entries with a name: one for ``beir/scifact``, the forums for ``beir/cqadupstack``, the whole family for ``beir``.

    Example:
        >>> [entry.name for entry in find("beir/scifact")], len(find("beir/cqadupstack")), find("beir/sci")
        (['scifact'], 12, ())
    """
    wanted = name.strip("/").lower()
    return tuple(entry for key, entry in registry().items() if key == wanted or key.startswith(f"{wanted}/"))


def require(name: str) -> tuple[Entry, ...]:
    """Entries with a name, which must exist."""
    entries = find(name)
    if not entries:
        raise InputError(f"unknown collection {name!r}; {near(name)}")
    return entries


def shortest(entries: Sequence[Entry]) -> list[str]:
    """Shortest list of names that covers these entries and no others, in their order.

    Example:
        >>> shortest([*find("beir/cqadupstack"), *find("mldr/en")])
        ['beir/cqadupstack', 'mldr/en']
    """
    keys = {entry.key for entry in entries}
    names: dict[str, None] = {}
    for entry in entries:
        groups = ["/".join(entry.key.split("/")[:depth]) for depth in range(1, entry.key.count("/") + 1)]
        whole = (group for group in groups if all(member.key in keys for member in find(group)))
        names[next(whole, entry.key)] = None
    return list(names)


def near(name: str) -> str:
    """Names similar to an unknown name, as text for an error message."""
    wanted, names = name.strip("/").lower(), _list_names()
    ends = [key for key in names if key.rpartition("/")[2] == wanted.rpartition("/")[2]]
    found = dict.fromkeys([*ends, *difflib.get_close_matches(wanted, names, n=3)])
    return f"did you mean {' or '.join(found)}?" if found else "run quiver collections list to see all names"


def held(entry: Entry, cache: Cache) -> tuple[Source, Record] | None:
    """The first source of an entry that is in the cache, with its record; None if there is none.

    A source with a damaged record counts as missing, and a warning is logged.
    """
    for source in entry.sources.values():
        record = cache.record(source)
        if record is not None:
            return source, record
    return None


def local_source(entry: Entry) -> Source | None:
    """The first source of an entry that ``QUIVER_HUB`` holds, which is read before the cache, as in training; None if there is none."""
    return next((source for source in entry.sources.values() if source.is_local), None)


def missing(entries: Sequence[Entry], cache: Cache) -> list[Entry]:
    """Entries that ``QUIVER_HUB`` does not hold, and that are not in the cache or whose record is damaged."""
    return [entry for entry in entries if local_source(entry) is None and held(entry, cache) is None]


def _list_names() -> list[str]:
    """All keys, and all groups and families of keys."""
    groups = {"/".join(key.split("/")[:depth]) for key in registry() for depth in range(1, key.count("/") + 1)}
    return [*registry(), *sorted(groups)]


@dataclass(frozen=True)
class Policy:
    """Rules for ranking and scoring a collection."""

    exclude_self: bool = False  # drop the document whose id equals the query's id before the run is cut
    use_title: bool = True


class CollectionReader(Protocol):
    """Reads a collection from its source."""

    def load(self, *, needs_corpus: bool = True, duplicates: DuplicateJudgements = "error") -> Collection:
        """Read and check the collection.

        Args:
            needs_corpus: Refuse a collection without a corpus; see `Collection.has_corpus`.
            duplicates: What several judgements of one pair give, see `quiver.retrieval.data.corpus.merged_judgements`.

        Raises:
            InputError: The collection is missing or malformed; names file and line.
        """

    def __str__(self) -> str:
        """Folder of the collection, for messages."""


@dataclass(frozen=True)
class LocalFolder:
    """A BEIR folder: ``corpus.jsonl[.gz]``, ``queries.jsonl[.gz]`` and ``qrels/<split>.tsv``."""

    folder: Path | None
    split: str
    queries: Path | None = None  # file instead of the folder's
    qrels: Path | None = None  # file instead of the folder's
    rename: Mapping[str, str] = field(default_factory=dict)  # field of these files -> name that it is read by

    def load(self, *, needs_corpus: bool = True, duplicates: DuplicateJudgements = "error") -> Collection:
        """Read and check the collection.

        Raises:
            InputError: Files are missing (names all of them) or malformed; names file and line.
        """
        if needs_corpus and self.folder is None:
            raise InputError(f"{self.queries}: {_NEEDS_CORPUS}")
        try:
            check_names_of(self.rename, (self.queries, self.qrels))
            return load_collection(
                self.folder,
                self.split,
                queries=self.queries,
                qrels=self.qrels,
                rename=self.rename,
                needs_corpus=needs_corpus,
                duplicates=duplicates,
            )
        except InputError as error:
            if needs_corpus and self.folder is not None and self.folder.is_dir() and not has_corpus(self.folder):
                raise InputError(f"{error}; {_NEEDS_CORPUS}") from error
            given = (self.queries, "id,query"), (self.qrels, "query_id,document_id,grade")
            for file, names in given if not self.rename else ():
                if file is not None and str(error).startswith(f"{file}:2: ") and not _has_known_field(file):
                    header = f"the first line of {file.name} is read as the names of its columns"
                    raise InputError(f"{error}; {header}: if it is data, put a line such as {names} before it") from error
            raise

    def __str__(self) -> str:
        return str(self.folder or self.queries)


def _has_known_field(file: Path) -> bool:
    """Whether a column of a CSV file has a name by which queries or judgements are read; True for other files, which have no header."""
    if not file.name.endswith((".csv", ".csv.gz")):
        return True
    known = {*QUERY_IDS, *QUERY_TEXTS, *JUDGED_QUERIES, *JUDGED_DOCUMENTS, *GRADES}
    return any(name.lower() in known for _, row in islice(read_rows(file), 1) for name in row)


@dataclass(frozen=True)
class GivenQuestions:
    """Queries and judgements in memory, and documents if there are some."""

    queries: Any
    qrels: Any
    rename: Mapping[str, str] = field(default_factory=dict)
    documents: Any = None

    def load(self, *, needs_corpus: bool = True, duplicates: DuplicateJudgements = "error") -> Collection:
        """Check the collection.

        Raises:
            InputError: A field is missing or has the wrong type, an id is repeated, or a judged query has no text.
        """
        if needs_corpus and self.documents is None:
            raise InputError(f"queries: {_NEEDS_CORPUS}")
        given = self._rows(_QUERIES, _query_rows(self.queries)), self._rows(_QRELS, _judgement_rows(self.qrels))
        check_names(self.rename, given)
        queries, qrels = ([(position, renamed(row, self.rename)) for position, row in rows] for rows in given)
        if self.queries is self.qrels:
            check_one_table(queries)
        judgements: Iterable[Judgement] = merged_judgements(table_judgements(_QRELS, qrels), duplicates)
        if not have_ids(queries):
            judgements = with_numbers(list(judgements), _QUERIES, table_queries(_QUERIES, queries))
        documents = None if self.documents is None else _read_documents(self.documents)
        return assemble("queries", "", documents=documents, queries=lambda: table_queries(_QUERIES, queries), judgements=judgements)

    @staticmethod
    def _rows(what: Path, given: Any) -> Sequence[tuple[EntryPosition, Mapping[str, object]]]:
        rows = []
        for number, row in enumerate(rows_of_frame(given, str(what)), start=1):
            if not isinstance(row, Mapping):
                raise InputError(f"{what}:{number}: must be a mapping from field to value, got a {type(row).__name__}")
            rows.append((EntryPosition(what, number), row))
        return rows

    def __str__(self) -> str:
        return "queries"


_QUERIES, _QRELS, _DOCUMENTS = Path("queries"), Path("qrels"), Path("documents")


def _read_documents(given: Any) -> Callable[[], Iterable[tuple[EntryPosition, Document]]]:
    """A pass over documents in memory: documents, mappings, a data frame, or ``{id: text}``."""
    rows = _query_rows(given)
    if isinstance(rows, Sequence) and all(isinstance(each, Document) for each in rows):
        documents = list(map(checked_document, rows))
    else:
        from quiver.retrieval.data.source import open_corpus  # opens sources of every kind, which a folder of a collection is not

        documents = list(open_corpus(rows))
    return lambda: ((EntryPosition(_DOCUMENTS, number), document) for number, document in enumerate(documents, start=1))


def _query_rows(given: Any) -> Any:
    """Rows of ``{id: text}``; other values are returned unchanged."""
    texts = isinstance(given, Mapping) and all(isinstance(text, str) for text in given.values())
    return [{"_id": key, "text": text} for key, text in given.items()] if texts else given


def _judgement_rows(given: Any) -> Any:
    """Rows of ``{query id: {document id: grade}}`` or ``{query id: [document id]}``; other values are returned unchanged."""
    if not isinstance(given, Mapping) or any(hasattr(split, "column_names") for split in given.values()):
        return given
    rows = []
    for query, judged in given.items():
        judged = judged.tolist() if isinstance(judged, np.ndarray) else judged
        if not isinstance(judged, Mapping | str | Sequence | Set) or any(isinstance(each, Mapping) for each in judged):
            raise InputError(f"qrels: {query!r} must have {{document id: grade}} or ids of relevant documents, got {type(judged).__name__}")
        relevant = [judged] if isinstance(judged, str) else judged
        grades = judged.items() if isinstance(judged, Mapping) else [(document, 1) for document in relevant]
        rows += [{"query_id": query, "document_id": document, "grade": grade} for document, grade in grades]
    return rows


_NEEDS_CORPUS = (
    "a model and BM25 rank the texts of a folder with corpus.jsonl (--data); an index (--index) and a run (--run) need no corpus, because"
    " they name the documents"
)


@dataclass(frozen=True)
class Benchmark:
    """One split of a collection, with the policy for scoring it."""

    name: str
    split: str
    policy: Policy
    metadata: Metadata
    source: CollectionReader

    @classmethod
    def of_folder(
        cls,
        folder: Path,
        split: str | None = None,
        *,
        name: str | None = None,
        policy: Policy | None = None,
        queries: Path | None = None,
        qrels: Path | None = None,
        rename: Mapping[str, str] = NO_NAMES,
    ) -> Benchmark:
        """The benchmark of a local BEIR folder.

        A folder with the name of a BEIR collection (``msmarco``, ``cqadupstack/android``; case does not matter) is assumed to hold that
        collection. It gets the collection's name, policy, licence and group, and the split of the published results. Its revision stays
        unknown. A folder with any other name has no metadata, and its name is that of `quiver.retrieval.data.corpus.telling_name`.
        """
        files = queries, qrels, rename
        split = split if qrels is None else stem(qrels)
        # Use the path as given: a link called arguana may point to a folder with any name, and the policy belongs to the collection.
        own = Path(os.path.abspath(folder))  # noqa: PTH100 - Path.resolve would follow the link
        entry = _find_beir_entry(own)
        if entry is None:
            split = "test" if split is None else split
            return cls(name or telling_name(own), split, policy or Policy(), Metadata(), LocalFolder(folder, split, *files))
        if split is None:
            split = entry.split if (folder / "qrels" / f"{entry.split}.tsv").is_file() else "test"
            logger.info("%s: has the name of the collection %s and is evaluated as such; split %s", folder, entry.key, split)
        metadata = Metadata(entry.metadata.licence, group=entry.metadata.group, group_size=entry.metadata.group_size)
        return cls(name or entry.name, split, policy or _policy_of(entry), metadata, LocalFolder(folder, split, *files))

    @classmethod
    def of_files(cls, queries: Path, qrels: Path, rename: Mapping[str, str] = NO_NAMES) -> Benchmark:
        """The benchmark of a file of queries, which names it, and a file of judgements. It has no split and no corpus."""
        return cls(name_of(queries), "", Policy(), Metadata(), LocalFolder(None, stem(qrels), queries, qrels, rename))

    @classmethod
    def of_questions(cls, queries: Any, qrels: Any, rename: Mapping[str, str] = NO_NAMES, documents: Any = None) -> Benchmark:
        """The benchmark of queries, judgements and documents in memory, see `GivenQuestions`."""
        return cls("queries", "", Policy(), Metadata(), GivenQuestions(queries, qrels, rename, documents))

    @property
    def key(self) -> str:
        """Collection and split, as in files and tables, see `quiver.eval.metrics.Part`."""
        return Part(self.name, self.split).key

    def load(self, *, needs_corpus: bool = True, duplicates: DuplicateJudgements = "error") -> Collection:
        """Read and check the collection.

        Args:
            needs_corpus: Refuse a collection without a corpus; see `Collection.has_corpus`.
            duplicates: What several judgements of one pair give, see `quiver.retrieval.data.corpus.merged_judgements`.

        Raises:
            InputError: The collection or a file is missing, or a file is malformed; names file and line.
        """
        found = self.source.load(needs_corpus=needs_corpus, duplicates=duplicates)
        if found.missing:
            logger.warning("%s: %s; counted as not found", self.name, describe_missing(found))
        if not any(grade > 0 for grades in found.qrels.values() for grade in grades.values()):
            logger.warning("%s: no judgement has a grade above 0, so nothing is relevant and every score is 0", self.name)
        return found


def resolve(
    data: str | Path, split: str | None = None, *, offline: bool = False, cache: Path | None = None, progress: bool = False
) -> list[Benchmark]:
    """The benchmarks of a folder or of a registered name; a named collection that is not in the cache is downloaded first."""
    if split is not None and not split.strip():
        raise InputError("the split is empty; name one, such as test, or omit it")
    folder = expand_home(data)
    if any((folder / f"corpus.jsonl{end}").is_file() for end in ("", ".gz")) or (folder.is_dir() and not find(str(data))):
        return [Benchmark.of_folder(folder, split)]
    entries = find(str(data))
    if not entries and folder.is_file():
        raise InputError(
            f"{data}: a file, where data (--data) is a BEIR folder with corpus.jsonl, queries.jsonl and qrels/{split or 'test'}.tsv, or"
            f" a registered name; for a file of documents type: quiver index build {data} --model MODEL --out DIR, and then:"
            " quiver evaluate --index DIR --queries FILE --qrels FILE --out RESULTS"
        )
    if not entries:
        raise InputError(
            f"unknown collection {str(data)!r}: it is neither a folder nor a registered name; pass a BEIR folder with corpus.jsonl, "
            f"queries.jsonl and qrels/{split or 'test'}.tsv, or a registered name ({near(str(data))}); queries and judgements in"
            " other files or in memory are given as queries= and qrels= (--queries, --qrels)"
        )
    for entry in entries:
        if split is not None and split not in entry.splits:
            raise InputError(f"{entry.key}: no split '{split}'; existing splits: {', '.join(entry.splits)}")
    here = Cache.usual() if cache is None else Cache(cache)
    if offline or is_offline():
        refuse_missing(entries, here)
    for entry in missing(entries, here):
        if held(entry, here) is None:  # one archive may hold several collections
            here.fetch(entry.source, progress=progress)
    return [_open_published(entry, split or entry.split, here) for entry in entries]


def refuse_missing(entries: Sequence[Entry], cache: Cache) -> None:
    """Refuse entries that would have to be downloaded, all in one line with the command that downloads them."""
    if absent := missing(entries, cache):
        raise InputError(
            f"{cache.root} lacks {', '.join(entry.key for entry in absent)}, and offline mode is on; download them on a "
            f"machine with network access: quiver collections fetch {' '.join(shortest(absent))}"
        )


def _open_published(entry: Entry, split: str, cache: Cache) -> Benchmark:
    if local := local_source(entry):
        metadata = replace(entry.metadata, revision=None, url=local.url, queries=None, bytes=None)
        return Benchmark(entry.name, split, _policy_of(entry), metadata, CachedCollection(cache, local, entry.name, split))
    found = held(entry, cache)
    if found is None:
        raise InputError(f"{entry.key}: disappeared from {cache.root} while it was being read; download it again")
    source, record = found
    queries = entry.metadata.queries if split == entry.split else None
    size = entry.metadata.bytes if source == entry.source else None
    metadata = replace(entry.metadata, revision=record.revision, url=record.url, queries=queries, bytes=size)
    return Benchmark(entry.name, split, _policy_of(entry), metadata, CachedCollection(cache, source, entry.name, split))


def _find_beir_entry(folder: Path) -> Entry | None:
    """The BEIR collection that a folder is named after, by its own name or (forums of CQADupStack) its parent's name and its own."""
    *_, group, own = ("", *folder.parts)
    if own.lower() not in BEIR_FOLDERS:
        return None
    names = (f"beir/{own}", f"beir/{group}/{own}")
    return next((registry()[name.lower()] for name in names if name.lower() in registry()), None)


def _policy_of(entry: Entry) -> Policy:
    return Policy(exclude_self=entry.exclude_self, use_title=entry.use_title)


def depth(k: int, policy: Policy) -> int:
    """Number of documents to retrieve so that ``cut`` can keep k."""
    return k + policy.exclude_self


def cut(run: Run, k: int, policy: Policy) -> dict[str, dict[str, float]]:
    """The first k documents of every query after applying the policy, best first; the given run is not changed.

    Example:
        >>> run = {"a": {"a": 3.0, "b": 2.0, "c": 1.0}}
        >>> cut(run, 1, Policy(exclude_self=True)), cut(run, 1, Policy())
        ({'a': {'b': 2.0}}, {'a': {'a': 3.0}})
    """
    kept = {}
    for query, scores in run.items():
        order = [document for document in ranked(scores) if not (policy.exclude_self and document == query)]
        kept[query] = {document: scores[document] for document in order[:k]}
    return kept
