"""Our models in beir's EvaluateRetrieval: as the model of beir's own search, or as the search itself.

beir joins titles as we do and drops the document that has the query's own id. What it does besides is beir's: it leaves judged
queries that the run does not answer out of the mean, where we count 0, and its ``evaluate`` takes ids out of the run it is given.

Shapes: B texts, d vector width.
Source: beir 2.2, retrieval/evaluation.py, retrieval/search/dense/exact_search.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from quiver.eval.baselines.vector_search import VectorSearch
from quiver.eval.benchmark import Policy, cut, depth
from quiver.retrieval.data.embedding_store import open_embedding_store
from quiver.retrieval.protocols import DenseModel, TokenModel
from quiver.retrieval.records import DenseVectors, Document, Query

# beir never lets a query find the document of its own id.
_POLICY = Policy(exclude_self=True)


class DenseRetriever:
    """A dense model as beir's own DenseRetrievalExactSearch wants one.

    Pass ``score_function="dot"`` to EvaluateRetrieval for a model whose card says so; the default there is cosine similarity.

    Args:
        model: One vector a text.

    Raises:
        ValueError: The model has one vector a token.

    Example::

        search = DenseRetrievalExactSearch(DenseRetriever(model))
        EvaluateRetrieval(search, score_function="cos_sim").retrieve(corpus, queries)
    """

    def __init__(self, model: DenseModel) -> None:
        if model.card.kind != "dense":
            raise ValueError(f"{model.card.source} has one vector a token; search with IndexRetriever")
        self._model = model

    def encode_queries(
        self,
        queries: Sequence[str],
        batch_size: int = 128,
        *,
        show_progress_bar: bool = False,
        convert_to_tensor: bool = False,
    ) -> DenseVectors:
        """Queries to (B, d) float32.

        Args:
            queries: B texts.
            batch_size: Not used: our batches hold as many tokens as the device likes.
            show_progress_bar: Show how far the encoding is.
            convert_to_tensor: Not used: beir makes a tensor of an array itself.
        """
        del batch_size, convert_to_tensor
        return self._model.encode(list(queries), "query", progress=show_progress_bar).vectors

    def encode_corpus(
        self,
        corpus: Sequence[Mapping[str, str]],
        batch_size: int = 128,
        *,
        show_progress_bar: bool = False,
        convert_to_tensor: bool = False,
    ) -> DenseVectors:
        """Documents, ``{"title": ..., "text": ...}``, to (B, d) float32; the arguments are those of ``encode_queries``."""
        del batch_size, convert_to_tensor
        texts = [_document("", fields).content() for fields in corpus]
        return self._model.encode(texts, "document", progress=show_progress_bar).vectors


class IndexRetriever:
    """A model of either kind and one of our indexes, in the place of beir's search.

    The model's own similarity decides, and beir's score_function is not asked. Every document found is one of the corpus, and no
    argument is changed.

    Args:
        model: Encodes queries and documents.
        index: ``exact``, or a FAISS factory string with its settings; see ``quiver.retrieval.index.build.index_vectors``.
        cache: Folder that keeps vectors by model and text, as in ``evaluate``; None keeps the vectors for one search.
        progress: Show how far the encoding is.

    Example::

        results = EvaluateRetrieval(IndexRetriever(model)).retrieve(corpus, queries)
    """

    def __init__(
        self, model: DenseModel | TokenModel, *, index: str = "exact", cache: str | Path | None = None, progress: bool = False
    ) -> None:
        self._model = model
        self._index = index
        self._cache = None if cache is None else Path(cache)
        self._progress = progress

    def search(
        self, corpus: Mapping[str, Mapping[str, str]], queries: Mapping[str, str], top_k: int, score_function: str | None = None
    ) -> dict[str, dict[str, float]]:
        """The first documents of every query, best first.

        Args:
            corpus: Document id -> its ``title``, if it has one, and ``text``.
            queries: Query id -> its text.
            top_k: Documents kept for a query, after the one with its own id is dropped.
            score_function: beir's; not used.

        Raises:
            InputError: There are no documents, or the index cannot be built for this model.
        """
        del score_function
        texts = (_document(key, fields).content() for key, fields in corpus.items())
        asked = [Query(key, text) for key, text in queries.items()]
        with open_embedding_store(self._cache) as store:
            search = VectorSearch(self._model, store, list(corpus), texts, index=self._index, progress=self._progress)
            run = search.search(asked, depth(top_k, _POLICY), progress=self._progress)
        return cut(run, top_k, _POLICY)


def _document(key: str, fields: Mapping[str, str]) -> Document:
    return Document(key, fields["text"], fields.get("title") or "")
