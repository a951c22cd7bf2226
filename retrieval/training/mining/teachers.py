"""Teachers: models that score pairs of a query and a document, for a student to learn the scores.

A bi-encoder or a ColBERT encodes each distinct text once, and its vectors are kept; a cross-encoder reads every pair. Scores are raw:
a cross-encoder's are its logits, since what a sigmoid has pressed against 1 cannot be told apart any more.

Shapes: B pairs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

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
from quiver.retrieval.protocols import IN_PROCESS, DenseModel, Executor, TokenModel
from quiver.retrieval.training.mining.pair_scores import PairScores
from quiver.retrieval.training.mining.scoring_data import ScoringData

# Pairs of one forward pass of a cross-encoder.
_BATCH = {"cpu": 32, "cuda": 256}

# What transformers and sentence-transformers read of a cross-encoder beside its weights: configurations and tokenizers, of which old
# ones are lists of words or a SentencePiece model.
_SETTINGS = ("*.json", "*/config.json", "*.txt", "*.model")


class Scorer(Protocol):
    """Scores rows of the data that it was made for."""

    def __call__(self, parts: Mapping[int, slice]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Each part's number and the scores of its B pairs, (B,), in any order.

        Args:
            parts: Runs of rows by number.
        """


class Teacher(Protocol):
    """A model that scores pairs."""

    @property
    def description(self) -> Mapping[str, Any]:
        """What the record says of it; teachers of equal ``fingerprint`` give equal scores."""

    def scorer(self, data: ScoringData, *, cache: Path | None, progress: bool) -> Any:
        """A context with a `Scorer` of these rows."""


class VectorTeacher:
    """A bi-encoder or a ColBERT; the score is the similarity that its vectors are searched by.

    A ColBERT's vectors take 4 bytes times width times tokens on the disk: 2 million passages of 80 tokens and width 128, 80 GB.

    Args:
        model: The model.
        executor: Who encodes the documents.
    """

    def __init__(self, model: DenseModel | TokenModel, executor: Executor = IN_PROCESS) -> None:
        self._model = model
        self._executor = executor
        card = model.card
        self.description: Mapping[str, Any] = {"kind": card.kind, "source": card.source, "fingerprint": card.fingerprint}

    @contextmanager
    def scorer(self, data: ScoringData, *, cache: Path | None, progress: bool) -> Iterator[Scorer]:
        """Encode what the rows name.

        Args:
            data: The rows.
            cache: Folder that keeps vectors; None keeps none.
            progress: Show bars.
        """
        with open_embedding_store(cache, self._executor) as store:
            yield _VectorScorer(store, self._model, data, progress=progress).score


class _VectorScorer:
    """Numbers of texts to places among those that were encoded."""

    def __init__(self, store: EmbeddingStore, model: DenseModel | TokenModel, data: ScoringData, *, progress: bool) -> None:
        self._data = data
        self._queries, self._documents = np.unique(data.queries), np.unique(data.documents)
        queries = (data.texts[number] for number in self._queries.tolist())
        asked = store.encode(model, queries, "query", total=len(self._queries), progress=progress)
        documents = (data.texts[number] for number in self._documents.tolist())
        found = store.encode(model, documents, "document", total=len(self._documents), progress=progress)
        self._scores = PairScores(asked, found)

    def score(self, parts: Mapping[int, slice]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        for number, part in parts.items():
            queries, documents = self._data.pairs(part)
            yield number, self._scores(np.searchsorted(self._queries, queries), np.searchsorted(self._documents, documents))


class CrossEncoderTeacher:
    """A cross-encoder, run by sentence-transformers.

    Args:
        source: Folder or hub id.
        device: Where it runs in this process.
        executor: Who reads the pairs.

    Raises:
        InputError: sentence-transformers is not installed, it cannot load the model, or the model gives more than one score a pair.
    """

    def __init__(self, source: str, *, device: str, executor: Executor = IN_PROCESS) -> None:
        folder = local_folder(source)
        self._source, self._executor = source, executor
        self._model = _cross_encoder(source, device)
        labels = int(self._model.config.num_labels)
        if labels != 1:
            raise InputError(f"{source}: it tells {labels} classes apart; a teacher gives one score a pair")
        length = self._model.max_length
        self.description: Mapping[str, Any] = {
            "kind": "cross-encoder",
            "source": source,
            "max_length": length,
            "fingerprint": _fingerprint(source, folder, length),
        }

    @contextmanager
    def scorer(self, data: ScoringData, *, cache: Path | None, progress: bool) -> Iterator[Scorer]:
        """Score what the rows name; nothing is encoded before, and nothing is kept beside the scores."""
        del cache, progress
        threads = self._executor.threads(torch.get_num_threads())
        here = Path(self._source)
        source = str(here.resolve()) if here.is_dir() else self._source  # a worker may stand elsewhere
        task = _Reading(source, str(self.description["fingerprint"]), threads) if self._executor.remote else _ReadingHere(self._model)

        def score(parts: Mapping[int, slice]) -> Iterator[tuple[int, NDArray[np.float32]]]:
            pairs = (_Pairs(number, *(tuple(data.texts.take(side)) for side in data.pairs(part))) for number, part in parts.items())
            with closing(self._executor.run(task, pairs, threads=threads)) as results:
                for read, scores in results:
                    yield read.number, scores

        yield score


@dataclass(frozen=True)
class _Pairs:
    """The texts of a part's B pairs."""

    number: int
    queries: tuple[str, ...]
    documents: tuple[str, ...]


@dataclass(frozen=True)
class _ReadingHere:
    """The task of reading pairs with a cross-encoder that is loaded."""

    model: Any

    def open(self) -> Callable[[_Pairs], NDArray[np.float32]]:
        return partial(_read, self.model)


@dataclass(frozen=True)
class _Reading:
    """The task of reading pairs with a cross-encoder that a worker loads."""

    source: str
    fingerprint: str
    threads: int

    def open(self) -> Callable[[_Pairs], NDArray[np.float32]]:
        torch.set_num_threads(self.threads)
        model = _cross_encoder(self.source, default_device())
        found = _fingerprint(self.source, local_folder(self.source), model.max_length)
        if found != self.fingerprint:
            raise InputError(
                f"{self.source}: another model for a worker on {platform.node()} than where the work was begun; all need the same files"
            )
        return partial(_read, model)


def _cross_encoder(source: str, device: str) -> Any:
    try:
        library = importlib.import_module("sentence_transformers")
    except ModuleNotFoundError as error:
        raise InputError("a cross-encoder needs sentence-transformers: pip install 'quiver-retrieval[train]'") from error
    folder = local_folder(source)
    if not has_safetensors(folder):
        read_weights(folder)  # says in one line why a pickle is refused; its tensors are mapped, not read
    try:
        with _no_bars():
            return library.CrossEncoder(str(folder), device=device)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{source}: sentence-transformers cannot load it ({str(error).strip().splitlines()[0]})") from error


def _read(model: Any, pairs: _Pairs) -> NDArray[np.float32]:
    """A cross-encoder's scores of pairs, (B,)."""
    texts = list(zip(pairs.queries, pairs.documents, strict=True))
    # Pairs of like length share a batch: the library pads a batch to its longest pair.
    order = np.argsort([len(query) + len(document) for query, document in texts], kind="stable")
    scores = np.empty(len(texts), np.float32)
    scores[order] = model.predict(
        [texts[place] for place in order.tolist()],
        batch_size=_BATCH.get(torch.device(model.device).type, _BATCH["cpu"]),
        activation_fn=torch.nn.Identity(),
        show_progress_bar=False,
    )
    return scores


def load_teacher(source: str, *, precision: Precision = "float", executor: Executor = IN_PROCESS) -> Teacher:
    """A teacher from a folder or the hub; its configuration says which kind it is.

    Args:
        source: Folder or hub id of a cross-encoder, a bi-encoder or a ColBERT.
        precision: ``int8`` quantises the matrices of Quiver's own models, on a CPU.
        executor: Who encodes documents, or reads a cross-encoder's pairs.

    Raises:
        InputError: It is no model, or one that cannot be used; one line says why.
    """
    folder = local_folder(source)
    if not _is_cross_encoder(folder):
        return VectorTeacher(load_model(source, precision=precision), executor)
    if precision != "float":
        raise InputError(f"{source}: a cross-encoder; {precision} is of bi-encoders and ColBERTs alone")
    return CrossEncoderTeacher(source, device=default_device(), executor=executor)


def _fingerprint(source: str, folder: Path, max_length: int | None) -> str:
    """Of all that decides a cross-encoder's scores: its weights, its configuration, its tokenizer, where texts are cut.

    Raises:
        InputError: A file of weights is missing.
    """
    weights = set(weight_files(folder))
    if missing := sorted(path.name for path in weights if not path.is_file()):
        raise InputError(f"{source}: {', '.join(missing)} is missing")
    files = sorted(weights | {path for pattern in _SETTINGS for path in folder.glob(pattern)})
    sums = {str(path.relative_to(folder)): file_sha256(path) for path in files}
    return hashlib.sha256(json.dumps([sums, max_length]).encode()).hexdigest()


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without the bars that transformers draws while it loads; they are as they were afterwards."""
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
