"""The index that users hold: searched by text with fusion and re-ranking, explained, changed and compacted.

`build_index` and `open_index` are those of `quiver.retrieval.index`, whose readers know one generation and no other ranking.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, overload

import numpy as np

from quiver.encoder.errors import InputError
from quiver.retrieval.data.entries import OnTypeError
from quiver.retrieval.index import build, refresh
from quiver.retrieval.index import index as generations
from quiver.retrieval.index.build import add_documents, compact_index, delete_documents
from quiver.retrieval.index.engines import Setting, check_k
from quiver.retrieval.index.filters import Filter, FilterLike, as_filter
from quiver.retrieval.index.index import IndexReader, TextsOrVectors
from quiver.retrieval.index.index import SearchOptions as ReaderOptions
from quiver.retrieval.index.pieces import BuildOptions, Model
from quiver.retrieval.index.repair import CheckReport, check_index
from quiver.retrieval.models import bm25
from quiver.retrieval.records import IN_PROCESS, Document, Executor, Hits, Query, QueryHits, SourceOptions, TokenModel
from quiver.retrieval.search.groups import field_of, search_groups
from quiver.retrieval.search.retrievers import (
    CANDIDATES,
    Explanations,
    IndexSearcher,
    OpenIndexes,
    Retriever,
    identity_of,
    one_effort,
    search_with,
)
from quiver.retrieval.search.search import Fusion, describe_nothing_found

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

Ranking: TypeAlias = str | Path | IndexReader  # ``"bm25"``, the folder of an index, or an index
Corpus: TypeAlias = str | Path | Iterable[Document] | Iterable[str] | Iterable[Mapping[str, object]]  # a corpus, see `build_index`

DEFAULTS = BuildOptions()

_OPENING = Lock()  # held while an index opens what it is fused with, so that several threads open it once


class SearchOptions(TypedDict, total=False):
    """Types of the options of `Index.search`, for type checkers."""

    filter: FilterLike
    ids: Iterable[str] | None
    fuse: Ranking | Sequence[Ranking]
    weights: Sequence[float] | None
    fusion: Fusion | str | None
    rerank: Ranking | TokenModel | None
    candidates: int
    effort: str | Mapping[str, Setting] | None
    target_recall: float | None
    group_by: str | None
    offset: int


class Index(IndexReader):
    """An index, in a folder or in memory; see `build_index` and `open_index`.

    ``add``, ``delete``, ``refresh`` and ``compact`` change the folder and this object; other objects show the generation that they opened.

    Example:
        >>> from quiver import build_index
        >>> rows = [{"id": "owl", "text": "Owls have wings.", "year": 2012}, {"id": "trout", "text": "Trout have fins.", "year": 2008}]
        >>> index = build_index(rows, "sentence-transformers/all-MiniLM-L6-v2")
        >>> len(index), index.kind, list(index.fields)
        (2, 'exact-dense', ['year'])
    """

    _opened: OpenIndexes | None = None

    @classmethod
    def of(cls, reader: IndexReader) -> Index:
        """The index of an opened generation.

        :meta private:
        """
        index = cls.__new__(cls)
        index.__dict__ = dict(reader.__dict__)
        return index

    @property
    def name(self) -> str:
        """Name in tables and reports: that of the folder.

        :meta private:
        """
        return self.path.name

    @overload
    def search(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self, queries: str, k: int = 10, **options: Unpack[SearchOptions]
    ) -> QueryHits: ...
    @overload
    def search(self, queries: TextsOrVectors | Sequence[Query], k: int = 10, **options: Unpack[SearchOptions]) -> Hits: ...
    def search(  # noqa: PLR0913 - the public entry: one option for each choice
        self,
        queries: Any,
        k: int = 10,
        *,
        filter: FilterLike = None,
        ids: Iterable[str] | None = None,
        fuse: Ranking | Sequence[Ranking] = (),
        weights: Sequence[float] | None = None,
        fusion: Fusion | str | None = None,
        rerank: Ranking | TokenModel | None = None,
        candidates: int = CANDIDATES,
        effort: str | Mapping[str, Setting] | None = None,
        target_recall: float | None = None,
        group_by: str | None = None,
        offset: int = 0,
    ) -> Hits | QueryHits:
        """The k best documents of each query; ties go to the greater id.

        One text gives its hits, a list of texts or of vectors gives the hits of each: ``search("a")`` is ``search(["a"])[0]``.

        Args:
            queries: A text or Q texts, which ``model`` encodes as queries; or vectors, (Q, d) for a dense index, Q arrays (n_i, d) for
                token vectors. Similarity is the inner product, computed in float32; texts of a model with cosine similarity are scaled.
                An index of BM25 takes texts, or Q lists of words.
            k: Hits per query; capped at the number of documents that match the filter and have a vector, or with BM25 a positive score.
            filter: Condition on fields as on the command line, such as ``"year >= 2015"``, or several conditions that must all hold. It is
                applied during the search, so that k hits are found if k documents match.
            ids: Search among these documents only; unknown ids are ignored.
            fuse: Rankings to fuse with: ``"bm25"``, or other indexes of the same documents, as folders or opened from one. What is named
                here and in ``rerank`` is opened at its first use, and searched as it was then.
            weights: Weights of the fusion: this index's, and one for each of ``fuse``; None for 1 each.
            fusion: Method and normalization of the fusion, or the method's name: ``rrf`` (reciprocal ranks, the default) or ``weighted``.
            rerank: ColBERT model, or index of one, that re-ranks the best candidates; each by its folder or opened.
            candidates: Documents that each ranking contributes to a fusion or a re-ranking.
            effort: Search effort: a preset, see ``presets``, or search parameters of the engine by name. Default: ``balanced``.
            target_recall: Recall to reach, instead of an effort: the share of the k best documents that a search finds, averaged over
                queries; see ``search_params_for``. It was measured without a filter; filtered searches visit more of the index.
            group_by: Field, such as ``"file"`` or ``"document"``, whose values are ranked, each by its best passage, which is the hit; k
                counts values. Passages are searched until k values are found.
            offset: Hits to leave out at the beginning.

        Raises:
            InputError: An index to fuse or a model cannot be opened, the filter is malformed, it or ``group_by`` names a field that no
                document has, hits are to be grouped and the index stores no texts, the preset or search parameter does not exist, or recall
                was not measured for the target, a vector of a query is not finite, or a text contains half of a surrogate pair.
            ValueError: k or ``candidates`` < 1, the offset is negative, the queries have a wrong width, or both an effort and a target
                recall are given.

        Example:
            >>> from quiver import build_index
            >>> rows = [{"id": "owl", "text": "Owls have wings.", "year": 2012}, {"id": "trout", "text": "Trout have fins.", "year": 2008}]
            >>> index = build_index(rows, "sentence-transformers/all-MiniLM-L6-v2")
            >>> [hit.id for hit in index.search("which animal has wings", k=10, filter="year >= 2010")]
            ['owl']
            >>> index.search(["fins", "wings"], k=1).ids
            [['trout'], ['owl']]
            >>> [hit.id for hit in index.search("which animal has wings", k=1, fuse="bm25")]
            ['owl']
            >>> [(hit.group, hit.id) for hit in index.search("which animal has wings", group_by="year")]
            [('2012', 'owl'), ('2008', 'trout')]
        """
        if not hasattr(queries, "__len__"):
            raise InputError(f"a text, a list of texts or vectors are searched for, got {queries!r}")
        k, given = check_k(k), [queries] if isinstance(queries, str) else queries
        if offset < 0:
            raise ValueError(f"offset must be >= 0, got {offset}")
        if not len(given):
            return Hits([], [])
        listed = not isinstance(given, np.ndarray)
        asked = [each if isinstance(each, Query) else Query(str(number), each) for number, each in enumerate(given)] if listed else []
        by_text = listed and all(isinstance(query.text, str) for query in asked)
        others = [fuse] if isinstance(fuse, str | Path | IndexReader) else list(fuse)
        how = _choose_fusion(fusion, weights, fused=bool(others))
        condition, document = filter, self._document_or_none
        if ids is not None:
            condition = replace(as_filter(filter) or Filter(), ids=frozenset([ids] if isinstance(ids, str) else ids))
        if others or rerank is not None:
            if not by_text:
                raise InputError("fuse and rerank need queries that are texts, which every ranking encodes by itself")
            opened, retriever = self._combine(others, how, rerank, candidates)
            document, chosen = opened.document, one_effort(effort, target_recall)
            find: Callable[[int], Hits] = partial(search_with, retriever, asked, filter=condition, effort=chosen)
        else:
            vectors = self._encode_queries([query.text for query in asked] if by_text else given)
            find = partial(self._find_nearest, vectors, ReaderOptions(condition, effort, target_recall))
        if group_by is None:
            hits = find(offset + k)
        else:
            keys_of = field_of(self, group_by)
            hits = search_groups(find, min(offset + k, keys_of.most) if set(others) <= {bm25.NAME} else offset + k, keys_of)
        groups = None if hits.groups is None else [own[offset:] for own in hits.groups]
        shown, scores = [own[offset:] for own in hits.ids], [own[offset:] for own in hits.scores]
        hits = replace(hits, ids=shown, scores=scores, groups=groups, document=document)
        wordless = bm25.describe_wordless([query.text for query in asked]) if by_text and bm25.NAME in (self.kind, *others) else None
        if wordless is not None:
            logger.warning("%s", wordless)
        elif isinstance(queries, str) and condition is not None and not offset and not len(hits[0]):
            logger.warning("%s", describe_nothing_found(self, as_filter(condition)))
        return hits[0] if isinstance(queries, str) else hits

    def _find_nearest(self, vectors: Any, options: ReaderOptions, k: int) -> Hits:
        return self.answer(self.request(vectors, k, options))

    def explain(
        self,
        query: str,
        documents: Sequence[str] | None = None,
        *,
        fuse: Ranking | Sequence[Ranking] = (),
        rerank: Ranking | TokenModel | None = None,
        k: int = 10,
    ) -> Explanations:
        """Explain the scores of documents for a query: which tokens or words of the query each of them matches.

        Args:
            query: Text of the query.
            documents: Ids of documents; None for the k best.
            fuse: Rankings to explain too; see `search`.
            rerank: ColBERT model, or index of one, whose scores are explained instead; see `search`.
            k: Number of documents to explain, where ``documents`` names none.

        Returns:
            Document id -> name of a ranking -> its explanation.

        Raises:
            InputError: An index or a model cannot be opened, or an index of a ColBERT model stores no texts.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "bm25")
            >>> [word.word for word in index.explain("which wings", ["1"])["1"]["bm25"]]
            ['which', 'wings']
        """
        others = [fuse] if isinstance(fuse, str | Path | IndexReader) else list(fuse)
        documents = [documents] if isinstance(documents, str) else documents
        if documents is None:
            documents = [hit.id for hit in self.search(query, k, fuse=others, rerank=rerank)]
        if not others and rerank is None:
            return IndexSearcher(self, self.model, bm25.NAME if self.kind == bm25.NAME else self.name).explain(query, documents)
        return self._combine(others, None, rerank, CANDIDATES)[1].explain(query, documents)

    def describe(self) -> Mapping[str, object]:
        """What the rankings depend on, as JSON; see `quiver.retrieval.search.retrievers.Retriever`.

        :meta private:
        """
        return {"kind": "index", "name": self.name, **identity_of(self)}

    @property
    def indexes(self) -> Sequence[IndexReader]:
        """This index.

        :meta private:
        """
        return [self]

    def _combine(
        self, others: Sequence[Ranking], fusion: Fusion | None, rerank: Ranking | TokenModel | None, candidates: int
    ) -> tuple[OpenIndexes, Retriever]:
        """A fusion or re-ranking, whose indexes and models are opened at its first use."""
        if candidates < 1:
            raise ValueError(f"candidates must be >= 1, got {candidates}")
        with _OPENING:
            if self._opened is None:
                # A twin: a reference to this index would be a cycle, and keep deleted files mapped until the next garbage collection.
                twin = IndexReader(self.path, self.manifest, self.codec, self.segments, verified=self.verified)
                twin.model = self.model
                self._opened = OpenIndexes()
                self._opened.index(twin)
            opened = self._opened
            retriever = opened.fused([opened.indexes[0], *others], fusion, candidates=candidates)
            return opened, retriever if rerank is None else opened.reranked(retriever, rerank, candidates=candidates)

    def add(
        self,
        corpus: Corpus,
        *,
        model: Model | str | Path | None = None,
        replace_existing: bool = False,
        types: Mapping[str, str] | None = None,
        on_type_error: OnTypeError = "error",
        progress: bool = False,
    ) -> Index:
        """Add documents to the folder and to this object; see `quiver.retrieval.index.add_documents`.

        Args:
            corpus: Documents to add; see `build_index`.
            model: Encodes them; None for the model that built the index.
            replace_existing: Replace documents of the same id.
            types: Types of fields that the index does not have, or wider ones of those that it has.
            on_type_error: ``null`` to store no value for filters where one does not fit its type, instead of an error.
            progress: Show progress bars.

        Raises:
            InputError: The index is in memory, a document exists, or the model or the corpus cannot be used.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings."], "bm25", "animals", overwrite=True)
            >>> len(index.add([{"id": "trout", "text": "Trout have fins."}]))
            2
        """
        used = self.model if model is None else model
        changed = add_documents(
            self._folder(), corpus, used, replace_existing=replace_existing, types=types, on_type_error=on_type_error, progress=progress
        )
        return self._become(changed)

    def delete(self, ids: Iterable[str] = (), *, where: FilterLike = None) -> Index:
        """Delete documents in the folder and in this object; ``compact`` frees their space.

        Args:
            ids: Ids of documents.
            where: Delete all documents that match this filter; see `search`.

        Raises:
            InputError: The index is in memory, a document does not exist, nothing is named, or the filter is malformed or has no condition.

        Example:
            >>> from quiver import build_index
            >>> rows = [{"id": "owl", "text": "Owls have wings.", "year": 2012}, {"id": "trout", "text": "Trout have fins.", "year": 2008}]
            >>> index = build_index(rows, "bm25", "animals", overwrite=True)
            >>> len(index.delete(where="year < 2010"))
            1
        """
        wanted = [ids] if isinstance(ids, str) else list(ids)
        if where is not None:
            chosen = as_filter(where)
            if chosen is None or (not chosen.conditions and chosen.ids is None):  # which every document matches
                raise InputError("the filter (where=) has no condition; to delete all documents, pass their ids")
            wanted += self.ids_matching(chosen)
        elif not wanted:
            raise InputError("pass ids of documents to delete, or a filter (where=)")
        return self._become(delete_documents(self._folder(), wanted)) if wanted else self

    def refresh(self, source: str | Path | None = None, *, options: SourceOptions | None = None, progress: bool = False) -> Index:
        """Read the sources of the index again: encode what is new or changed, delete what is gone.

        Args:
            source: Source to read; None for all that the index was made of. See `quiver.retrieval.index.refresh_index`, which also counts
                the changes and can leave them undone.
            options: How to read ``source``; None as it was read before.
            progress: Show progress bars.

        Raises:
            InputError: The index is in memory, or a source cannot be read.

        Example:
            >>> from quiver import build_index
            >>> index = build_index("docs", "bm25", "manual")  # doctest: +SKIP
            >>> index.refresh()  # doctest: +SKIP
        """
        done = refresh.refresh_index(self._folder(), self.model, source, options=options, progress=progress)
        return self._become(done.index)

    def compact(self, *, progress: bool = False) -> Index:
        """Merge the segments and remove deleted documents; nothing is encoded again. See `quiver.retrieval.index.compact_index`.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings."], "bm25", "animals", overwrite=True)
            >>> len(index.compact())
            1
        """
        return self._become(compact_index(self._folder(), progress=progress))

    def check(self) -> CheckReport:
        """Read every file of the folder and verify its checksum; see `quiver.retrieval.index.check_index`.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings."], "bm25", "animals", overwrite=True)
            >>> index.check().problems
            ()
        """
        return check_index(self._folder())

    def _folder(self) -> Path:
        if not self.path.is_dir():
            raise InputError("an index in memory does not change; build it in a folder (out=DIR)")
        return self.path

    def _become(self, changed: IndexReader) -> Index:
        self.__dict__ = {**changed.__dict__, "_model": self._model}
        return self


def _choose_fusion(fusion: Fusion | str | None, weights: Sequence[float] | None, *, fused: bool) -> Fusion | None:
    if not fused and (fusion is not None or weights is not None):
        raise InputError("weights and fusion are those of rankings that are fused: pass fuse")
    how = Fusion(fusion) if isinstance(fusion, str) else fusion
    return how if weights is None else replace(how or Fusion(), weights=tuple(weights))


def build_index(  # noqa: PLR0913 - the public entry: one option for each choice
    corpus: Corpus,
    model: Model | str | Path,
    out: Path | str | None = None,
    *,
    options: BuildOptions = DEFAULTS,
    executor: Executor = IN_PROCESS,
    overwrite: bool = False,
    wait: float = 0.0,
    progress: bool = False,
    types: Mapping[str, str] | None = None,
    on_type_error: OnTypeError | None = None,
) -> Index:
    """Encode a corpus into a new index and open it. An interrupted build of the same corpus resumes.

    Args:
        corpus: A source of `quiver.retrieval.data.source.open_corpus`, such as a folder or a CSV file; or documents; or texts, which get
            the numbers from 1 as ids; or mappings from field to value, a data set of the datasets library, a pyarrow table, or a data
            frame of pandas or polars, whose fields are found as those of files are. To name the fields of a file, pass
            ``open_corpus(source, SourceOptions(...))``. It is read several times; an iterator is written to the index's folder first.
        model: Encodes the documents: a model, its folder or hub id, or ``"bm25"``, which needs no model (for a folder of that name pass
            ``"./bm25"``).
        out: Folder to write. Until the new index is committed, readers open the previous index, if any. None keeps the index in memory.
        options: Engine, settings and limits.
        executor: Runs the encoding, by default in this process; the index has the same bytes with any executor. Workers load the model
            from its card and need ``out`` on a shared file system.
        overwrite: Replace an existing index at ``out``.
        wait: Seconds to wait for another writer to finish.
        progress: Show progress bars.
        types: Types of fields, such as ``{"created": "date", "tags": "string[]"}``; see `BuildOptions`.
        on_type_error: ``null`` to store no value for filters where one does not fit its type, instead of an error.

    Raises:
        InputError: The corpus is malformed (names file:line) or empty, a document id is repeated, no document has a filter field, a value
            does not fit the type of its field (names document, field and type), a vector is not finite, the options do not fit the model,
            ``out`` exists, or a worker cannot read ``out`` or load the model.
        WorkerError: Workers died repeatedly; run the build again to resume.

    Example:
        >>> from quiver import build_index
        >>> rows = [{"id": "owl", "text": "Owls have wings.", "year": 2012}, {"id": "trout", "text": "Trout have fins.", "year": 2008}]
        >>> index = build_index(rows, "sentence-transformers/all-MiniLM-L6-v2")
        >>> [hit.id for hit in index.search("which animal has wings", k=10, filter="year >= 2010")]
        ['owl']
    """
    built = build.build_index(
        corpus,
        model,
        out,
        options=options,
        executor=executor,
        overwrite=overwrite,
        wait=wait,
        progress=progress,
        types=types,
        on_type_error=on_type_error,
    )
    return Index.of(built)


def open_index(path: Path | str, *, generation: int | None = None, verify: bool = True) -> Index:
    """Open an index; its vectors and texts stay on disk.

    Args:
        path: Folder of the index.
        generation: Number of an older generation that still exists; None for the newest.
        verify: Compare each block of a file with its checksum when it is first read, so that no result is computed from damaged data.
            If false, only files that are parsed are verified.

    Raises:
        DamagedIndexError: A file that every search needs, or the newest manifest, is missing, truncated or changed; names the file.
        InputError: Not an index, another format version, nothing committed yet, no such generation, or an unknown engine.

    Example:
        >>> from quiver import build_index, open_index
        >>> build_index(["Owls have wings.", "Trout have fins."], "bm25", "animals", overwrite=True)  # doctest: +ELLIPSIS
        Index(...)
        >>> index = open_index("animals")
        >>> [hit.text for hit in index.search("wings")]
        ['Owls have wings.']
    """
    return Index.of(generations.open_index(path, generation=generation, verify=verify))
