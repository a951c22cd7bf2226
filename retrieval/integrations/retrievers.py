"""LangChain and LlamaIndex retrievers over an index. The framework is imported on first use.

In both frameworks the metadata of a result are the fields of the document, unchanged, and its title, unless it has a field ``title``. The
id and the score are where the framework has a place for them: the score of LangChain's documents, which have none, is the metadata
``quiver_score``, unless the document has a field of that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quiver.encoder.errors import InputError
from quiver.retrieval.index.documents import FilterLike, as_filter
from quiver.retrieval.index.engines import Setting, check_k
from quiver.retrieval.index.index import Index, open_index
from quiver.retrieval.records import DenseModel, Document, Query, TokenModel
from quiver.retrieval.search.retrievers import OpenIndexes

SCORE = "quiver_score"
"""Name of a document's score in the metadata of LangChain."""


class ScoredDocument(NamedTuple):
    """A document and its score."""

    document: Document
    score: float


@dataclass(frozen=True)
class RetrieverOptions:
    """Options of a retriever.

    Attributes:
        k: Number of documents.
        filter: Condition on the documents.
        effort: Preset or search parameters; None for ``balanced``.
        target_recall: Target recall, instead of an effort.
        fuse: Rankings to fuse with by reciprocal ranks: ``"bm25"``, or folders of other indexes of the same documents.
        rerank: ColBERT model, or index of one, that re-ranks the best 100 documents.

    Raises:
        InputError: A condition is malformed.
        ValueError: k < 1.
    """

    k: int = 10
    filter: FilterLike = None
    effort: str | Mapping[str, Setting] | None = None
    target_recall: float | None = None
    fuse: str | Path | Sequence[str | Path] = ()
    rerank: str | Path | TokenModel | None = None

    def __post_init__(self) -> None:
        check_k(self.k)
        as_filter(self.filter)


class TextSearcher:
    """An open index with its model, searched with a text; the base of the retriever classes. Thread-safe; texts are encoded one at a time.

    Args:
        index: An index, or its folder.
        model: The model. Default: the one that built the index.
        options: How it is searched.

    Raises:
        InputError: An index or a model cannot be opened, or another model built the index.
    """

    def __init__(self, index: Index | Path | str, *, model: DenseModel | TokenModel | None, options: RetrieverOptions) -> None:
        self.index = index if isinstance(index, Index) else open_index(index)
        if model is not None:
            self.index.model = model
        self._options = options
        self._opened = OpenIndexes()  # its models are shared by threads
        self._opened.add(self.index)
        fuse = [options.fuse] if isinstance(options.fuse, str | Path) else options.fuse
        self._retriever = self._opened.fused([self.index.path, *fuse])
        if options.rerank is not None:
            self._retriever = self._opened.reranked(self._retriever, options.rerank)

    def ask(self, text: str, *, k: int | None = None, filter: FilterLike = None) -> list[ScoredDocument]:
        """Return the best documents for a text, best first; with ids only if no index stores texts.

        Args:
            text: The query.
            k: Number of documents; None for that of the options.
            filter: Condition on the documents; None for that of the options.
        """
        chosen = self._options
        found = self._retriever.search(
            [Query("query", text)],
            chosen.k if k is None else k,
            filter=as_filter(chosen.filter if filter is None else filter),
            effort=chosen.effort,
            target_recall=chosen.target_recall,
        )
        return [ScoredDocument(self._opened.document(key) or Document(key, ""), score) for key, score in found.run["query"].items()]

    def text_of(self, document: Document) -> str:
        """Text of a document for a prompt, with the title if the index was built with titles."""
        return document.content(use_title=self.index.manifest.policy.use_title)


def metadata_of(document: Document) -> dict[str, object]:
    """Metadata of a result: the fields of the document, and its title unless a field has that name."""
    return ({"title": document.title} if document.title else {}) | dict(document.metadata or {})


def langchain_retriever(
    index: Index | Path | str,
    *,
    model: DenseModel | TokenModel | None = None,
    k: int = 10,
    filter: FilterLike = None,
    effort: str | Mapping[str, Setting] | None = None,
    target_recall: float | None = None,
    fuse: str | Path | Sequence[str | Path] = (),
    rerank: str | Path | TokenModel | None = None,
) -> Any:
    """Make a LangChain ``BaseRetriever`` over an index.

    A document has the id of the document and its fields as metadata, unchanged; the score is ``metadata["quiver_score"]``, and a title
    ``metadata["title"]``, unless the document has fields of these names. ``invoke(text, k=..., filter=...)`` overrides both options.

    Args:
        index: An index, or its folder.
        model: The model. Default: the one that built the index.
        k: Number of documents.
        filter: Condition on the documents, such as ``"year>=2015"``, or several.
        effort: Preset or search parameters; None for ``balanced``.
        target_recall: Target recall, instead of an effort.
        fuse: Rankings to fuse with by reciprocal ranks: ``"bm25"``, or folders of other indexes of the same documents.
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
    options = RetrieverOptions(k, filter, effort, target_recall, fuse, rerank)
    return LangChainRetriever(searcher=TextSearcher(index, model=model, options=options))


def llama_index_retriever(
    index: Index | Path | str,
    *,
    model: DenseModel | TokenModel | None = None,
    k: int = 10,
    filter: FilterLike = None,
    effort: str | Mapping[str, Setting] | None = None,
    target_recall: float | None = None,
    fuse: str | Path | Sequence[str | Path] = (),
    rerank: str | Path | TokenModel | None = None,
) -> Any:
    """Make a LlamaIndex ``BaseRetriever`` over an index; arguments, metadata and errors as `langchain_retriever`.

    The id of a node is that of the document, and the score is the node's own.
    """
    try:
        from quiver.retrieval.integrations.llama_index import LlamaIndexRetriever
    except ImportError as error:
        raise _name_missing_library("a LlamaIndex retriever", "llama-index-core", error) from error
    options = RetrieverOptions(k, filter, effort, target_recall, fuse, rerank)
    return LlamaIndexRetriever(TextSearcher(index, model=model, options=options))


def _name_missing_library(what: str, library: str, error: ImportError) -> InputError:
    return InputError(f"{what} needs {library}, which is not installed ({error.name}): pip install 'quiver-retrieval[interop]'")
