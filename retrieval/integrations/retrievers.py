"""LangChain and LlamaIndex retrievers over an index or any retriever. The framework is imported on first use.

In both frameworks the metadata of a result are the fields of the document, unchanged, and its title, unless it has a field ``title``. The
id and the score are where the framework has a place for them: the score of LangChain's documents, which have none, is the metadata
``quiver_score``, unless the document has a field of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quiver.encoder.errors import InputError
from quiver.retrieval.index.engines import Setting, check_k
from quiver.retrieval.index.filters import FilterLike
from quiver.retrieval.index.index import IndexReader, open_index
from quiver.retrieval.records import DenseModel, Document, Query, TokenModel
from quiver.retrieval.search.index import Ranking
from quiver.retrieval.search.retrievers import Effort, OpenIndexes, Retriever, indexes_of, one_effort, search_with


class Found(NamedTuple):
    """A document that was found: its id and score, its text for a prompt, and its metadata."""

    id: str
    score: float
    text: str
    metadata: Mapping[str, object]


class TextSearcher:
    """A retriever that is asked with a text; the base of the retriever classes. Thread-safe; texts are encoded one at a time.

    Args:
        retriever: The retriever.
        document: Function from an id to the document; None if no index stores its text.
        use_title: Whether titles are part of texts.
        k: Number of documents.
        filter: Condition on the documents.
        effort: Effort of the search.
    """

    def __init__(
        self,
        retriever: Retriever,
        document: Callable[[str], Document | None],
        *,
        use_title: bool,
        k: int,
        filter: FilterLike,
        effort: Effort,
    ) -> None:
        self._retriever, self._document, self._use_title = retriever, document, use_title
        self._k, self._filter, self._effort = check_k(k), filter, effort

    def ask(self, text: str, *, k: int | None = None, filter: FilterLike = None) -> list[Found]:
        """Return the best documents for a text, best first; with ids only if no index stores texts.

        Args:
            text: The query.
            k: Number of documents; None for that of the options.
            filter: Condition on the documents; None for that of the options.
        """
        chosen = self._filter if filter is None else filter
        hits = search_with(self._retriever, [Query("query", text)], self._k if k is None else k, chosen, self._effort)
        found = []
        for key, score in hits.ranking(0).items():
            document = self._document(key) or Document(key, "")
            metadata = ({"title": document.title} if document.title else {}) | dict(document.metadata or {})
            found.append(Found(key, score, document.content(use_title=self._use_title), metadata))
        return found


def _open_searcher(
    index: IndexReader | Retriever | Path | str,
    model: DenseModel | TokenModel | None,
    fuse: Ranking | Sequence[Ranking],
    rerank: str | Path | TokenModel | IndexReader | None,
    *,
    k: int,
    filter: FilterLike,
    effort: Effort,
) -> TextSearcher:
    opened, others = OpenIndexes(), [fuse] if isinstance(fuse, str | Path | IndexReader) else list(fuse)  # its models are shared by threads
    if isinstance(index, str | Path):
        index = open_index(index)
    if isinstance(index, IndexReader):
        if model is not None:
            index.model = model
        opened.add(index)
        index.check_filter(filter)
        for each in others:
            if isinstance(each, IndexReader):
                if not each.path.is_dir():
                    raise InputError("an index in memory cannot be fused with another one; build it in a folder (out=DIR)")
                opened.add(each)
        retriever = opened.fused([index.path, *(each.path if isinstance(each, IndexReader) else each for each in others)])
    elif model is not None or others:
        raise TypeError("model and fuse are for an index; a retriever has its own")
    else:
        retriever = index
        for each in indexes_of(retriever):
            opened.hold(each)
    if rerank is not None:
        retriever = opened.reranked(retriever, rerank)
    use_title = all(each.manifest.policy.use_title for each in opened.indexes[:1])
    return TextSearcher(retriever, opened.document, use_title=use_title, k=k, filter=filter, effort=effort)


def langchain_retriever(
    index: IndexReader | Retriever | Path | str,
    *,
    model: DenseModel | TokenModel | None = None,
    k: int = 10,
    filter: FilterLike = None,
    effort: str | Mapping[str, Setting] | None = None,
    target_recall: float | None = None,
    fuse: Ranking | Sequence[Ranking] = (),
    rerank: str | Path | TokenModel | IndexReader | None = None,
) -> Any:
    """Make a LangChain ``BaseRetriever`` over an index, or over any `quiver.retrieval.search.retrievers.Retriever`.

    A document has the id of the document and its fields as metadata, unchanged; the score is ``metadata["quiver_score"]``, and a title
    ``metadata["title"]``, unless the document has fields of these names. ``invoke(text, k=..., filter=...)`` overrides both options.

    Args:
        index: An index, its folder, or a retriever, such as a fusion.
        model: The model of the index. Default: the one that built it.
        k: Number of documents.
        filter: Condition on the documents, such as ``"year >= 2015"``, or several.
        effort: Preset or search parameters; None for ``balanced``.
        target_recall: Target recall, instead of an effort.
        fuse: Rankings to fuse an index with by reciprocal ranks: ``"bm25"``, or other indexes of the same documents, opened or by their
            folders.
        rerank: ColBERT model, or index of one, that re-ranks the best 100 documents.

    Raises:
        InputError: langchain-core is not installed, an index or a model cannot be opened, another model built the index, or the filter is
            malformed.
        ValueError: k < 1.
    """
    try:
        from quiver.retrieval.integrations.langchain import LangChainRetriever
    except ImportError as error:
        raise _name_missing_library("a LangChain retriever", "langchain-core", error) from error
    chosen = one_effort(effort, target_recall)
    return LangChainRetriever(searcher=_open_searcher(index, model, fuse, rerank, k=k, filter=filter, effort=chosen))


def llama_index_retriever(
    index: IndexReader | Retriever | Path | str,
    *,
    model: DenseModel | TokenModel | None = None,
    k: int = 10,
    filter: FilterLike = None,
    effort: str | Mapping[str, Setting] | None = None,
    target_recall: float | None = None,
    fuse: Ranking | Sequence[Ranking] = (),
    rerank: str | Path | TokenModel | IndexReader | None = None,
) -> Any:
    """Make a LlamaIndex ``BaseRetriever`` over an index or a retriever; arguments, metadata and errors as `langchain_retriever`.

    The id of a node is that of the document, and the score is the node's own.
    """
    try:
        from quiver.retrieval.integrations.llama_index import LlamaIndexRetriever
    except ImportError as error:
        raise _name_missing_library("a LlamaIndex retriever", "llama-index-core", error) from error
    chosen = one_effort(effort, target_recall)
    return LlamaIndexRetriever(_open_searcher(index, model, fuse, rerank, k=k, filter=filter, effort=chosen))


def _name_missing_library(what: str, library: str, error: ImportError) -> InputError:
    return InputError(f"{what} needs {library}, which is not installed ({error.name}): pip install 'quiver-retrieval[interop]'")
