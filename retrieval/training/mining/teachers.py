"""Teachers: models that score pairs of a query and a document, for a student to learn the scores.

A bi-encoder or ColBERT model encodes each distinct text once; a cross-encoder reads every pair. Scores are raw: a cross-encoder's are its
logits, since a sigmoid saturates near 1.

Shapes: B pairs, T teachers, n documents of a row.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from quiver.encoder.checkpoints.folder import has_safetensors, local_folder, read_weights, weight_files
from quiver.encoder.config import Precision
from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256, read_json
from quiver.retrieval.data.embedding_store import EmbeddingStore, open_embedding_store
from quiver.retrieval.models.loading import default_device, load_model
from quiver.retrieval.records import IN_PROCESS, DenseModel, Executor, TokenModel
from quiver.retrieval.training.mining.searchers import PairScores

if TYPE_CHECKING:
    from quiver.retrieval.training.mining.scoring import ScoringData


# Pairs per forward pass of a cross-encoder.
_BATCH = {"cpu": 32, "cuda": 256}

# Files besides the weights that transformers and sentence-transformers read of a cross-encoder: configurations and tokenizers.
_SETTINGS = ("*.json", "*/config.json", "*.txt", "*.model")


class Scorer(Protocol):
    """Scores the rows that it was made for."""

    def __call__(self, parts: Mapping[int, slice]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield each part's number and the scores of its B pairs, (B,), in any order.

        Args:
            parts: Slices of rows by number.
        """


class Teacher(Protocol):
    """A model that scores pairs."""

    @property
    def description(self) -> Mapping[str, Any]:
        """Description for ``scoring.json``; teachers of equal ``fingerprint`` give equal scores."""

    def scorer(self, data: ScoringData, *, cache: Path | None, progress: bool) -> Any:
        """Return a context manager that yields a `Scorer` of the rows."""


class VectorTeacher:
    """A bi-encoder or ColBERT model; the score is the similarity used for search.

    ColBERT vectors take 4 bytes times width times tokens on disk: 80 GB for 2 million passages of 80 tokens and width 128.

    Args:
        model: The model.
        executor: Where documents are encoded.
    """

    def __init__(self, model: DenseModel | TokenModel, executor: Executor = IN_PROCESS) -> None:
        self._model = model
        self._executor = executor
        card = model.card
        self.description: Mapping[str, Any] = {"kind": card.kind, "source": card.source, "fingerprint": card.fingerprint}

    @contextmanager
    def scorer(self, data: ScoringData, *, cache: Path | None, progress: bool) -> Iterator[Scorer]:
        """Encode the texts of the rows.

        Args:
            data: The rows.
            cache: Folder of the embedding store; None for a temporary one.
            progress: Show progress bars.
        """
        with open_embedding_store(cache, self._executor) as store:
            yield _VectorScorer(store, self._model, data, progress=progress).score


class _VectorScorer:
    """Scores pairs from the vectors of the rows' distinct texts."""

    def __init__(self, store: EmbeddingStore, model: DenseModel | TokenModel, data: ScoringData, *, progress: bool) -> None:
        self._data = data
        self._queries, self._documents = np.unique(data.queries), np.unique(data.documents)
        queries = (data.texts[number] for number in self._queries.tolist())
        encoded = store.encode(model, queries, "query", total=len(self._queries), progress=progress)
        documents = (data.texts[number] for number in self._documents.tolist())
        found = store.encode(model, documents, "document", total=len(self._documents), progress=progress)
        self._scores = PairScores(encoded, found)

    def score(self, parts: Mapping[int, slice]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        for number, part in parts.items():
            queries, documents = self._data.pairs(part)
            yield number, self._scores(np.searchsorted(self._queries, queries), np.searchsorted(self._documents, documents))


class CrossEncoderTeacher:
    """A cross-encoder, run by sentence-transformers.

    Args:
        source: Folder or Hub id.
        device: Device in this process.
        executor: Where pairs are scored.

    Raises:
        InputError: sentence-transformers is not installed or cannot load the model, or the model returns several scores per pair.
    """

    def __init__(self, source: str, *, device: str, executor: Executor = IN_PROCESS) -> None:
        folder = local_folder(source)
        self._source, self._executor = source, executor
        self._model = _cross_encoder(source, device)
        labels = int(self._model.config.num_labels)
        if labels != 1:
            raise InputError(f"{source}: the cross-encoder has {labels} classes; a teacher must return one score per pair")
        length = self._model.max_length
        self.description: Mapping[str, Any] = {
            "kind": "cross-encoder",
            "source": source,
            "max_length": length,
            "fingerprint": _fingerprint(source, folder, length),
        }

    @contextmanager
    def scorer(self, data: ScoringData, *, cache: Path | None, progress: bool) -> Iterator[Scorer]:
        """Score the pairs of the rows; nothing is cached."""
        del cache, progress
        threads = self._executor.threads(torch.get_num_threads())
        here = Path(self._source)
        source = str(here.resolve()) if here.is_dir() else self._source  # a worker may have another working directory
        task = _Reading(source, str(self.description["fingerprint"]), threads) if self._executor.remote else _ReadingHere(self._model)

        def score(parts: Mapping[int, slice]) -> Iterator[tuple[int, NDArray[np.float32]]]:
            pairs = (_Pairs(number, *(tuple(data.texts.take(side)) for side in data.pairs(part))) for number, part in parts.items())
            with closing(self._executor.run(task, pairs, threads=threads)) as results:
                for read, scores in results:
                    yield read.number, scores

        yield score


@dataclass(frozen=True)
class _Pairs:
    """Texts of a part's B pairs."""

    number: int
    queries: tuple[str, ...]
    documents: tuple[str, ...]


@dataclass(frozen=True)
class _ReadingHere:
    """Score pairs with a loaded cross-encoder."""

    model: Any

    def open(self) -> Callable[[_Pairs], NDArray[np.float32]]:
        return partial(_read, self.model)


@dataclass(frozen=True)
class _Reading:
    """Score pairs with a cross-encoder that the worker loads."""

    source: str
    fingerprint: str
    threads: int

    def open(self) -> Callable[[_Pairs], NDArray[np.float32]]:
        torch.set_num_threads(self.threads)
        model = _cross_encoder(self.source, default_device())
        found = _fingerprint(self.source, local_folder(self.source), model.max_length)
        if found != self.fingerprint:
            raise InputError(
                f"{self.source}: the model on {platform.node()} has other files than on the first machine; all machines need the same files"
            )
        return partial(_read, model)


def _cross_encoder(source: str, device: str) -> Any:
    try:
        library = importlib.import_module("sentence_transformers")
    except ModuleNotFoundError as error:
        raise InputError("a cross-encoder needs sentence-transformers: pip install 'quiver-retrieval[train]'") from error
    folder = local_folder(source)
    if not has_safetensors(folder):
        read_weights(folder)  # explains in one line why a pickle is refused
    try:
        with _no_bars():
            return library.CrossEncoder(str(folder), device=device)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{source}: sentence-transformers cannot load this model ({str(error).strip().splitlines()[0]})") from error


def _read(model: Any, pairs: _Pairs) -> NDArray[np.float32]:
    """Scores of pairs by a cross-encoder, (B,)."""
    texts = list(zip(pairs.queries, pairs.documents, strict=True))
    # Pairs of similar length share a batch, since the library pads a batch to its longest pair.
    order = np.argsort([len(query) + len(document) for query, document in texts], kind="stable")
    scores = np.empty(len(texts), np.float32)
    scores[order] = model.predict(
        [texts[row] for row in order.tolist()],
        batch_size=_BATCH.get(torch.device(model.device).type, _BATCH["cpu"]),
        activation_fn=torch.nn.Identity(),
        show_progress_bar=False,
    )
    return scores


def load_teacher(source: str, *, precision: Precision = "float", executor: Executor = IN_PROCESS) -> Teacher:
    """Load a teacher from a folder or the Hub; its configuration decides the kind.

    Args:
        source: Folder or Hub id of a cross-encoder, bi-encoder or ColBERT model.
        precision: ``int8`` quantizes the weight matrices of bi-encoders and ColBERT models (CPU only).
        executor: Where documents are encoded, or a cross-encoder's pairs are scored.

    Raises:
        InputError: The folder is not a supported model.
    """
    folder = local_folder(source)
    if not _is_cross_encoder(folder):
        return VectorTeacher(load_model(source, precision=precision), executor)
    if precision != "float":
        raise InputError(f"{source}: is a cross-encoder, which does not support {precision}; use a bi-encoder or a ColBERT model")
    return CrossEncoderTeacher(source, device=default_device(), executor=executor)


def _fingerprint(source: str, folder: Path, max_length: int | None) -> str:
    """Hash of everything that affects a cross-encoder's scores: weights, configuration, tokenizer and maximum length."""
    weights = set(weight_files(folder))
    if missing := sorted(path.name for path in weights if not path.is_file()):
        raise InputError(f"{source}: {', '.join(missing)} is missing")
    files = sorted(weights | {path for pattern in _SETTINGS for path in folder.glob(pattern)})
    sums = {str(path.relative_to(folder)): file_sha256(path) for path in files}
    return hashlib.sha256(json.dumps([sums, max_length]).encode()).hexdigest()


@contextmanager
def _no_bars() -> Iterator[None]:
    """Disable the progress bars of transformers while it loads."""
    bars = importlib.import_module("transformers.utils.logging")
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _is_cross_encoder(folder: Path) -> bool:
    settings, config = folder / "config_sentence_transformers.json", folder / "config.json"
    if settings.is_file() and read_json(settings).get("model_type") == "CrossEncoder":
        return True
    names = read_json(config).get("architectures") if config.is_file() else None
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


class Ensemble:
    """Teachers whose scores are combined.

    Teachers of different kinds have different scales: cosines up to 1, ColBERT scores up to the number of query tokens, logits. Scores are
    summed with given weights, or averaged after min-max normalization per row. For teachers that were trained with a softmax over
    documents, suitable weights are the scale of that softmax divided by the number of teachers: the sum is the mean of their logits.

    Args:
        members: T teachers, at least two.
        weights: T weights of the sum; None for the mean of min-max normalized scores.

    Attributes:
        members: The teachers.
        weights: The weights, or None.
        description: Description for ``scoring.json``; the ``fingerprint`` depends on the members in their order, not on the weights.

    Raises:
        InputError: The weights are invalid (see `check_weights`), or two teachers are the same.
    """

    def __init__(self, members: Sequence[Teacher], weights: Sequence[float] | None = None) -> None:
        check_weights(len(members), weights)
        described = [dict(member.description) for member in members]
        prints = [member["fingerprint"] for member in described]
        for place, one in enumerate(prints):
            if one in prints[:place]:
                raise InputError(f"{described[place]['source']}: is given twice as a teacher; use weights to increase its share")
        self.members = tuple(members)
        self.weights = None if weights is None else tuple(weights)
        fingerprint = hashlib.sha256(json.dumps(prints).encode()).hexdigest()
        self.description: Mapping[str, Any] = {
            "kind": "ensemble",
            "members": described,
            "weights": self.weights,
            "fingerprint": fingerprint,
        }

    def together(self, scores: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        """Combine the teachers' scores of a row, T finite arrays (n,), to (n,); infinite if the weights are too large."""
        if self.weights is None:
            together: NDArray[np.float64] = np.mean([min_max(one) for one in scores], axis=0)
        else:
            with np.errstate(over="ignore"):  # the caller refuses infinite scores
                together = np.array(self.weights) @ np.array(scores, np.float64)
        return together


def check_weights(teachers: int, weights: Sequence[float] | None) -> None:
    """Check the weights of an ensemble.

    Raises:
        InputError: There are fewer than two teachers, or not one positive, finite weight per teacher.
    """
    if teachers < 2:
        raise InputError(f"an ensemble needs at least two teachers, got {teachers}")
    if weights is not None and len(weights) != teachers:
        raise InputError(f"got {len(weights)} weights for {teachers} teachers; pass one weight per teacher, in their order")
    if weights is not None and not all(isfinite(weight) and weight > 0 for weight in weights):
        raise InputError(f"weights of teachers must be positive numbers, got {', '.join(f'{weight:g}' for weight in weights)}")


def min_max(scores: NDArray[np.float32] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale the scores of a row, (n,), to 0..1; all zero if they are equal.

    Example:
        >>> min_max(np.array([1.0, 3.0, 2.0], np.float32)).tolist()
        [0.0, 1.0, 0.5]
    """
    exact = scores.astype(np.float64)  # the difference may overflow float32
    low, high = exact.min(), exact.max()
    return (exact - low) / (high - low) if high > low else np.zeros_like(exact)
