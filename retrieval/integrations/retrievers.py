"""LangChain and LlamaIndex retrievers over an index or any retriever. The framework is imported on first use.

In both frameworks the metadata of a result are the fields of the document, unchanged, and its title, unless it has a field ``title``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from quiver.encoder.errors import InputError
from quiver.retrieval.index.engines import Setting, check_k
from quiver.retrieval.index.filters import FilterLike
from quiver.retrieval.index.index import IndexReader, open_index
from quiver.retrieval.records import DenseModel, Document, Hit, Query, TokenModel
from quiver.retrieval.search.index import Ranking
from quiver.retrieval.search.retrievers import OpenIndexes, Retriever, indexes_of, one_effort, search_with

Ask: TypeAlias = Callable[[str, int | None, FilterLike], Sequence[Hit]]
"""Function from a text, a number of documents and a filter, each None for the default, to hits with the texts of prompts. Thread-safe."""


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
    return LangChainRetriever(ask=_open_for_texts(index, model, k, filter, effort, target_recall, fuse, rerank))


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
    return LlamaIndexRetriever(_open_for_texts(index, model, k, filter, effort, target_recall, fuse, rerank))


def _name_missing_library(what: str, library: str, error: ImportError) -> InputError:
    return InputError(f"{what} needs {library}, which is not installed ({error.name}): pip install 'quiver-retrieval[interop]'")


def _open_for_texts(
    index: IndexReader | Retriever | Path | str,
    model: DenseModel | TokenModel | None,
    k: int,
    filter: FilterLike,
    effort: str | Mapping[str, Setting] | None,
    target_recall: float | None,
    fuse: Ranking | Sequence[Ranking],
    rerank: str | Path | TokenModel | IndexReader | None,
) -> Ask:
    chosen, opened, most = one_effort(effort, target_recall), OpenIndexes(), check_k(k)  # its models are shared by threads
    others = [fuse] if isinstance(fuse, str | Path | IndexReader) else list(fuse)
    if isinstance(index, str | Path):
        index = open_index(index)
    if isinstance(index, IndexReader):
        if model is not None:
            index.model = model
        index.check_filter(filter)
        retriever = opened.fused([index, *others])
    elif model is not None or others:
        raise TypeError("model and fuse are for an index; a retriever has its own")
    else:
        retriever, opened = index, OpenIndexes(indexes_of(index))
    if rerank is not None:
        retriever = opened.reranked(retriever, rerank)
    use_title = all(each.manifest.policy.use_title for each in opened.indexes[:1])

    def find_document(key: str) -> Document | None:
        """A document with the text of a prompt; with its id only if no index stores texts."""
        found = opened.document(key)
        if found is None:
            return None
        metadata = ({"title": found.title} if found.title else {}) | dict(found.metadata or {})
        return found._replace(text=found.content(use_title=use_title), metadata=metadata)

    def ask(text: str, k: int | None, condition: FilterLike) -> Sequence[Hit]:
        hits = search_with(retriever, [Query("query", text)], most if k is None else k, filter if condition is None else condition, chosen)
        return list(replace(hits, document=find_document)[0])

    return ask
