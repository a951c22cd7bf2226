"""Our models in mteb: a model with an index of ours behind mteb's SearchProtocol, for retrieval and re-ranking tasks.

mteb decides what a task is: which split, how many documents to find, which candidates to re-rank, and whether the document with a
query's own id is dropped afterwards. Texts are put together by mteb's rules: the title before the text, an instruction behind a
query, the turns of a conversation joined.

Source: mteb 2.26, models/models_protocols.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiver.encoder.errors import InputError
from quiver.eval.baselines.vector_search import VectorSearch
from quiver.retrieval.data.embedding_store import open_embedding_store
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.protocols import DenseModel, TokenModel
from quiver.retrieval.records import Document, ModelCard, Query

if TYPE_CHECKING:
    from mteb import TaskMetadata
    from mteb.models import ModelMeta
    from mteb.types import CorpusDatasetType, EncodeKwargs, QueryDatasetType, RetrievalOutputType, TopRankedDocumentsType

# A model card's names -> mteb's.
_SIMILARITIES = {"cosine": "cosine", "dot": "dot", "maxsim": "MaxSim"}
_FRAMEWORKS = {"quiver": ["PyTorch"], "sentence-transformers": ["Sentence Transformers", "PyTorch"], "pylate": ["PyLate", "PyTorch"]}
_KINDS = {"dense": "dense", "colbert": "late-interaction"}


class QuiverSearch:
    """A model and an index, as mteb evaluates them.

    Args:
        model: A model of either kind.
        index: ``exact``, or a FAISS factory string with its settings; see ``quiver.retrieval.index.build.index_vectors``. Re-ranking
            scores its candidates exactly whatever this is.
        cache: Folder that keeps vectors by model and text, as in ``evaluate``; None keeps the vectors of one corpus at a time.
        name: What mteb calls the model, ``organisation/model``; by default the hub id, or ``local/`` and the folder's name.

    Raises:
        InputError: The name has no ``/``.

    Example::

        model = load_model("my-model")
        result = mteb.evaluate(QuiverSearch(model), mteb.get_tasks(["SciFact"]))
        result.task_results[0].scores["test"][0]["ndcg_at_10"]
    """

    def __init__(
        self, model: DenseModel | TokenModel, *, index: str = "exact", cache: str | Path | None = None, name: str | None = None
    ) -> None:
        self._model = model
        self._index = index
        self._cache = None if cache is None else Path(cache)
        self._name = name or _name(model.card)
        if "/" not in self._name:
            raise InputError(f"mteb wants names like organisation/model, got {self._name!r}")
        self._corpus: VectorSearch | None = None
        self._stack = ExitStack()

    @cached_property
    def mteb_model_meta(self) -> ModelMeta:
        """What is known of the model; what only its makers could say is None.

        The revision is the fingerprint, so that mteb's cache of results never takes one model for another; an index that is not exact
        is an experiment of its own there.
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
            experiment_kwargs=None if self._index == "exact" else {"index": self._index},
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
        """Encode a corpus; mteb searches it next.

        Args:
            corpus: Rows with ``id``, ``text`` and perhaps ``title``; read once, in order.
            task_metadata: Names the task in errors.
            hf_split: Not used.
            hf_subset: Not used.
            encode_kwargs: ``show_progress_bar`` is followed; our batches hold as many tokens as the device likes.
            num_proc: Not used.
            **reserved: mteb's, for what it may pass one day.

        Raises:
            InputError: A document has no text, such as one of an image task.
        """
        del hf_split, hf_subset, num_proc, reserved
        self._stack.close()
        if "text" not in corpus.column_names:
            raise InputError(f"{task_metadata.name}: documents without a text, which is all this model reads")
        store = self._stack.enter_context(open_embedding_store(self._cache))
        ids = list(corpus["id"])
        self._corpus = VectorSearch(self._model, store, ids, _contents(corpus), index=self._index, progress=_progress(encode_kwargs))

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
        """The first documents of every query; the corpus is let go afterwards.

        Args:
            queries: Rows with ``id``, ``text`` and perhaps ``instruction``.
            task_metadata: Not used.
            hf_split: Not used.
            hf_subset: Not used.
            top_k: Documents found for a query.
            encode_kwargs: As for ``index``.
            top_ranked: Of a re-ranking task the candidates, query id -> document ids: only these are scored, and a query without any
                gets none.
            num_proc: Not used.
            **reserved: mteb's, for what it may pass one day.

        Returns:
            Query id -> document id -> score, for every query.

        Raises:
            InputError: A candidate is not in the corpus, or the index cannot be built.
            ValueError: No corpus was indexed since the last search.
        """
        del task_metadata, hf_split, hf_subset, num_proc, reserved
        if self._corpus is None:
            raise ValueError("index a corpus before searching; a search lets go of it")
        asked = [Query(row["id"], query_text(row)) for row in queries]
        corpus, self._corpus = self._corpus, None
        with self._stack.pop_all():
            if top_ranked is not None:
                return corpus.rerank(asked, top_ranked, top_k, progress=_progress(encode_kwargs))
            return corpus.search(asked, top_k, progress=_progress(encode_kwargs))


def query_text(row: Mapping[str, Any]) -> str:
    """The text of a query of mteb, put together as mteb does it for its own models.

    Args:
        row: ``text`` is a string, or the turns of a conversation: strings, or mappings with ``role`` and ``content``. ``instruction``
            goes behind a text and before a conversation.

    Example:
        >>> query_text({"text": "bird wings", "instruction": "Find pictures."})
        'bird wings Find pictures.'
        >>> query_text({"text": [{"role": "user", "content": "birds?"}, {"role": "assistant", "content": "Which?"}]})
        'user: birds?; assistant: Which?'
    """
    text, instruction = row["text"], row.get("instruction")
    if isinstance(text, str):
        return text if instruction is None else f"{text} {instruction}"
    turns = [turn if isinstance(turn, str) else f"{turn['role']}: {turn['content']}" for turn in text]
    return "; ".join(turns) if instruction is None else f"{instruction} {'; '.join(turns)}"


def _size(model: DenseModel | TokenModel) -> tuple[int | None, float | None]:
    """Parameters and megabytes of a model of ours; of a peer's model nothing is known."""
    if not isinstance(model, BiEncoder | ColBERT):
        return None, None
    tensors = [*model.encoder.state_dict().values(), *model.projections.state_dict().values()]
    # int8 keeps scales beside its weights, so that its tensors are not its parameters.
    parameters = sum(tensor.numel() for tensor in tensors) if model.card.precision == "float" else None
    return parameters, sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20


def _name(card: ModelCard) -> str:
    source = Path(card.source)
    return f"local/{source.name or card.kind}" if source.is_dir() or "/" not in card.source else card.source


def _contents(corpus: Any) -> Iterator[str]:
    return (Document(row["id"], row["text"], row.get("title") or "").content() for row in corpus)


def _progress(encode_kwargs: Mapping[str, Any]) -> bool:
    return bool(encode_kwargs.get("show_progress_bar", True))
