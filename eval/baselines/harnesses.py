"""Quiver's models and indexes inside BEIR's and MTEB's evaluation harnesses.

BEIR joins titles and texts as Quiver does and drops the document with the query's own id. It leaves judged queries without results out of
its averages, where Quiver counts 0, and its ``evaluate`` removes ids from the run that it is given.

MTEB decides the split, the number of documents per query, the candidates to re-rank, and whether the document with a query's own id is
dropped. Texts are joined by MTEB's rules: the title before the text, an instruction after a query, the turns of a conversation joined.

Shapes: B texts, Q queries, P documents, d vector width, n_i token vectors of text i.
Source: beir 2.2, retrieval/evaluation.py, retrieval/search/dense/exact_search.py; mteb 2.26, models/models_protocols.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quiver.encoder.errors import InputError
from quiver.eval.datasets.benchmarks import Policy, cut, depth
from quiver.retrieval.data.embedding_store import EmbeddingStore, open_embedding_store
from quiver.retrieval.index.index import IndexReader
from quiver.retrieval.index.memory import index_vectors
from quiver.retrieval.index.ranking import token_rows
from quiver.retrieval.models.batches import device_of
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.records import DenseModel, DenseVectors, Document, Hits, ModelCard, Query, TokenModel

if TYPE_CHECKING:
    from mteb import TaskMetadata
    from mteb.models import ModelMeta
    from mteb.types import CorpusDatasetType, EncodeKwargs, QueryDatasetType, RetrievalOutputType, TopRankedDocumentsType

# BEIR never returns the document with the query's own id.
_BEIR_POLICY = Policy(exclude_self=True)

# Names on a model card -> MTEB's names.
_SIMILARITIES = {"cosine": "cosine", "dot": "dot", "maxsim": "MaxSim"}
_FRAMEWORKS = {"quiver": ["PyTorch"], "sentence-transformers": ["Sentence Transformers", "PyTorch"], "pylate": ["PyLate", "PyTorch"]}
_KINDS = {"dense": "dense", "colbert": "late-interaction"}


class DenseRetriever:
    """A dense model for BEIR's own ``DenseRetrievalExactSearch``.

    EvaluateRetrieval uses cosine similarity by default. Pass ``score_function="dot"`` for a model whose card says dot product.

    Args:
        model: A model with one vector per text.

    Raises:
        ValueError: The model has one vector per token.

    Example::

        search = DenseRetrievalExactSearch(DenseRetriever(model))
        EvaluateRetrieval(search, score_function="cos_sim").retrieve(corpus, queries)
    """

    def __init__(self, model: DenseModel) -> None:
        if model.card.kind != "dense":
            raise ValueError(f"{model.card.source} has one vector per token; search with IndexRetriever")
        self._model = model

    def encode_queries(
        self, queries: Sequence[str], batch_size: int = 128, *, show_progress_bar: bool = False, convert_to_tensor: bool = False
    ) -> DenseVectors:
        """Encode queries to (B, d) float32."""
        del batch_size, convert_to_tensor
        return self._model.encode_texts(list(queries), "query", progress=show_progress_bar).vectors

    def encode_corpus(
        self,
        corpus: Sequence[Mapping[str, str]],
        batch_size: int = 128,
        *,
        show_progress_bar: bool = False,
        convert_to_tensor: bool = False,
    ) -> DenseVectors:
        """Encode documents ``{"title": ..., "text": ...}`` to (B, d) float32; the arguments are those of ``encode_queries``."""
        del batch_size, convert_to_tensor
        return self._model.encode_texts(list(_contents(corpus)), "document", progress=show_progress_bar).vectors


class IndexRetriever:
    """A model and one of Quiver's indexes in place of BEIR's search.

    Scores use the model's own similarity; BEIR's ``score_function`` is ignored. The arguments of ``search`` are not modified.

    Args:
        model: Encodes queries and documents; dense or ColBERT.
        engine: Index engine with settings; see `quiver.retrieval.index.engines.parse_engine`.
        cache: Folder that keeps vectors by model and text, as in ``evaluate``; None keeps the vectors for one search.
        progress: Show progress of encoding.

    Example::

        results = EvaluateRetrieval(IndexRetriever(model)).retrieve(corpus, queries)
    """

    def __init__(
        self, model: DenseModel | TokenModel, *, engine: str = "exact", cache: str | Path | None = None, progress: bool = False
    ) -> None:
        self._model = model
        self._engine = engine
        self._cache = None if cache is None else Path(cache)
        self._progress = progress

    def search(
        self, corpus: Mapping[str, Mapping[str, str]], queries: Mapping[str, str], top_k: int, score_function: str | None = None
    ) -> dict[str, dict[str, float]]:
        """Return the best documents of every query, best first."""
        del score_function
        wanted = [Query(key, text) for key, text in queries.items()]
        with open_embedding_store(self._cache) as store:
            search = _CorpusSearch(
                self._model, store, list(corpus), _contents(corpus.values()), engine=self._engine, progress=self._progress
            )
            run = search.search(wanted, depth(top_k, _BEIR_POLICY), progress=self._progress)
        return cut(run, top_k, _BEIR_POLICY)


class QuiverSearch:
    """A model and an index behind MTEB's SearchProtocol, for retrieval and re-ranking tasks.

    Args:
        model: Encodes queries and documents; dense or ColBERT.
        engine: Index engine with settings; see `quiver.retrieval.index.engines.parse_engine`. Candidates
            to re-rank are always scored exactly.
        cache: Folder that keeps vectors by model and text, as in ``evaluate``; None keeps the vectors of one corpus at a time.
        name: MTEB's name of the model, ``organisation/model``. Default: the Hub id, or ``local/`` and the folder's name.

    Raises:
        InputError: The name has no ``/``.

    Example::

        model = load_model("my-model")
        result = mteb.evaluate(QuiverSearch(model), mteb.get_tasks(["SciFact"]))
        result.task_results[0].scores["test"][0]["ndcg_at_10"]
    """

    def __init__(
        self, model: DenseModel | TokenModel, *, engine: str = "exact", cache: str | Path | None = None, name: str | None = None
    ) -> None:
        self._model = model
        self._engine = engine
        self._cache = None if cache is None else Path(cache)
        self._name = name or _default_name(model.card)
        if "/" not in self._name:
            raise InputError(f"MTEB model names have the form organisation/model, got {self._name!r}")
        self._corpus: _CorpusSearch | None = None
        self._stack = ExitStack()

    @cached_property
    def mteb_model_meta(self) -> ModelMeta:
        """MTEB's description of the model; unknown fields are None.

        The revision is the fingerprint, so that MTEB's cache of results tells models apart; an approximate index is recorded as an
        experiment.
        """
        from mteb.models import ModelMeta

        card = self._model.card
        parameters, megabytes = _size(self._model)
        return ModelMeta(
            loader=None,
            name=self._name,
            revision=card.fingerprint,
            release_date=None,
            languages=None,
            n_parameters=parameters,
            memory_usage_mb=megabytes,
            max_tokens=card.document_length,
            embed_dim=card.dim,
            license=None,
            open_weights=None,
            public_training_code=None,
            public_training_data=None,
            framework=_FRAMEWORKS[card.library],
            similarity_fn_name=_SIMILARITIES[card.similarity],
            use_instructions=bool(card.query_prompt or card.document_prompt),
            training_datasets=None,
            model_type=[_KINDS[card.kind]],
            experiment_kwargs=None if self._engine == "exact" else {"engine": self._engine},
        )

    def index(
        self,
        corpus: CorpusDatasetType,
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        encode_kwargs: EncodeKwargs,
        num_proc: int | None = None,
        **reserved: Any,
    ) -> None:
        """Encode a corpus, which MTEB searches next."""
        del hf_split, hf_subset, num_proc, reserved
        self._stack.close()
        if "text" not in corpus.column_names:
            raise InputError(f"{task_metadata.name}: the documents have no text, and this model reads only text")
        store = self._stack.enter_context(open_embedding_store(self._cache))
        ids = list(corpus["id"])
        self._corpus = _CorpusSearch(self._model, store, ids, _contents(corpus), engine=self._engine, progress=_progress(encode_kwargs))

    def search(
        self,
        queries: QueryDatasetType,
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        top_k: int,
        encode_kwargs: EncodeKwargs,
        top_ranked: TopRankedDocumentsType | None = None,
        num_proc: int | None = None,
        **reserved: Any,
    ) -> RetrievalOutputType:
        """Return the best documents of every query, and release the corpus."""
        del task_metadata, hf_split, hf_subset, num_proc, reserved
        if self._corpus is None:
            raise ValueError("index a corpus before searching; each search releases it")
        wanted = [Query(row["id"], mteb_query_text(row)) for row in queries]
        corpus, self._corpus = self._corpus, None
        with self._stack.pop_all():
            if top_ranked is not None:
                return corpus.rerank(wanted, top_ranked, top_k, progress=_progress(encode_kwargs))
            return corpus.search(wanted, top_k, progress=_progress(encode_kwargs))


def mteb_query_text(row: Mapping[str, Any]) -> str:
    """Return the text of an MTEB query, joined as MTEB joins it for its own models.

    Example:
        >>> mteb_query_text({"text": "bird wings", "instruction": "Find pictures."})
        'bird wings Find pictures.'
        >>> mteb_query_text({"text": [{"role": "user", "content": "birds?"}, {"role": "assistant", "content": "Which?"}]})
        'user: birds?; assistant: Which?'
    """
    text, instruction = row["text"], row.get("instruction")
    if isinstance(text, str):
        return text if instruction is None else f"{text} {instruction}"
    turns = [turn if isinstance(turn, str) else f"{turn['role']}: {turn['content']}" for turn in text]
    return "; ".join(turns) if instruction is None else f"{instruction} {'; '.join(turns)}"


class _CorpusSearch:
    """An encoded corpus that both harnesses search.

    Documents are encoded once into the store. The index is built at the first search of all documents; re-ranking never needs it.
    """

    def __init__(
        self,
        model: DenseModel | TokenModel,
        store: EmbeddingStore,
        ids: Sequence[str],
        texts: Iterable[str],
        *,
        engine: str,
        progress: bool,
    ) -> None:
        self._model = model
        self._store = store
        self._ids = ids
        self._engine = engine
        self._documents = store.encode(model, texts, "document", total=len(ids), progress=progress)
        lengths = self._documents.lengths
        self._offsets = None if lengths is None else np.cumsum([0, *lengths], dtype=np.int64)

    def search(self, queries: Sequence[Query], k: int, *, progress: bool) -> dict[str, dict[str, float]]:
        """Return the k best documents of each query, best first."""
        hits: Hits = self._index.search(self._query_vectors(queries, progress), k)
        return hits.to_run([query.id for query in queries])

    def rerank(
        self, queries: Sequence[Query], candidates: Mapping[str, Sequence[str]], k: int, *, progress: bool
    ) -> dict[str, dict[str, float]]:
        """Return the k best candidates of each query by exact scores; a query without candidates gets none."""
        vectors = self._query_vectors(queries, progress)
        run: dict[str, dict[str, float]] = {}
        for row, query in enumerate(queries):
            rows = self._candidate_rows(query.id, candidates.get(query.id, ()))
            run[query.id] = {}
            if rows:
                run |= self._exact(rows).search(vectors[row : row + 1], k).to_run([query.id])
        return run

    @cached_property
    def _index(self) -> IndexReader:
        stored = self._documents
        model, device = self._model, device_of(self._model)
        return index_vectors(self._ids, stored.rows, model.card, lengths=stored.lengths, engine=self._engine, device=device)

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {document: row for row, document in enumerate(self._ids)}

    def _query_vectors(self, queries: Sequence[Query], progress: bool) -> Any:
        stored = self._store.encode(self._model, [query.text for query in queries], "query", total=len(queries), progress=progress)
        return stored.as_queries()

    def _candidate_rows(self, query: str, documents: Sequence[str]) -> list[int]:
        """Rows of the candidates that have at least one vector, without repetitions."""
        if unknown := [document for document in documents if document not in self._rows]:
            raise InputError(f"the candidate '{unknown[0]}' of query '{query}' is not in the corpus")
        rows = [self._rows[document] for document in dict.fromkeys(documents)]
        return [row for row in rows if self._offsets is None or self._offsets[row] < self._offsets[row + 1]]

    def _exact(self, rows: Sequence[int]) -> IndexReader:
        """An exact index of some documents."""
        ids, numbers, card = [self._ids[row] for row in rows], np.array(rows, np.int64), self._model.card
        if self._offsets is None:
            return index_vectors(ids, self._documents.rows.take(numbers), card)
        vectors = self._documents.rows.take(token_rows(self._offsets, numbers))
        return index_vectors(ids, vectors, card, lengths=self._offsets[numbers + 1] - self._offsets[numbers])


def _contents(corpus: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Titles and texts, joined as everywhere."""
    return (Document("", row["text"], row.get("title") or "").content() for row in corpus)


def _size(model: DenseModel | TokenModel) -> tuple[int | None, float | None]:
    """Parameters and megabytes of a Quiver model; None for other libraries' models."""
    if not isinstance(model, BiEncoder | ColBERT):
        return None, None
    tensors = [*model.encoder.state_dict().values(), *model.projections.state_dict().values()]
    # int8 models hold scales beside the weights, so that their tensors are not their parameters.
    parameters = sum(tensor.numel() for tensor in tensors) if model.card.dtype != "int8" else None
    return parameters, sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20


def _default_name(card: ModelCard) -> str:
    source = Path(card.source)
    return f"local/{source.name or card.kind}" if source.is_dir() or "/" not in card.source else card.source


def _progress(encode_kwargs: Mapping[str, Any]) -> bool:
    return bool(encode_kwargs.get("show_progress_bar", True))
