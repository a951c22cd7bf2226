"""Teachers: models that score pairs of a query and a document, for a student to learn the scores.

A bi-encoder or a ColBERT encodes each distinct text once, and its vectors are kept; a cross-encoder reads every pair. Scores are raw:
a cross-encoder's are its logits, since what a sigmoid has pressed against 1 cannot be told apart any more.

Shapes: B pairs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from encoder.config import Precision
from encoder.data_files import file_sha256
from encoder.errors import InputError
from encoder.files import read_json
from encoder.hub import local_folder
from retrieval.executors import HERE, Executor
from retrieval.models import default_device, load_model
from retrieval.protocols import DenseModel, TokenModel
from retrieval.training.mining.pair_scores import PairScores
from retrieval.training.mining.scoring_data import ScoringData
from retrieval.vectors import VectorStore, vector_store

# Pairs of one forward pass of a cross-encoder.
_BATCH = {"cpu": 32, "cuda": 256}

# What transformers and sentence-transformers read of a cross-encoder: its weights, in one file or several; configurations and
# tokenizers, of which old ones are lists of words or a SentencePiece model.
_WEIGHTS = ("*.safetensors", "*/model.safetensors", "pytorch_model*.bin")
_SETTINGS = ("*.json", "*/config.json", "*.txt", "*.model")


class Scorer(Protocol):
    """Scores pairs of the data that it was made for."""

    def __call__(self, queries: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores of B pairs by the numbers of their texts, (B,)."""


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

    def __init__(self, model: DenseModel | TokenModel, executor: Executor = HERE) -> None:
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
        with vector_store(cache, self._executor) as store:
            yield _VectorScorer(store, self._model, data, progress=progress)


class _VectorScorer:
    """Numbers of texts to places among those that were encoded."""

    def __init__(self, store: VectorStore, model: DenseModel | TokenModel, data: ScoringData, *, progress: bool) -> None:
        self._queries, self._documents = np.unique(data.queries), np.unique(data.documents)
        queries = (data.texts[number] for number in self._queries.tolist())
        asked = store.encode(model, queries, "query", total=len(self._queries), progress=progress)
        documents = (data.texts[number] for number in self._documents.tolist())
        found = store.encode(model, documents, "document", total=len(self._documents), progress=progress)
        self._scores = PairScores(asked, found)

    def __call__(self, queries: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._scores(np.searchsorted(self._queries, queries), np.searchsorted(self._documents, documents))


class CrossEncoderTeacher:
    """A cross-encoder, run by sentence-transformers.

    Args:
        source: Folder or hub id.
        device: Where it runs.

    Raises:
        InputError: sentence-transformers is not installed, it cannot load the model, or the model gives more than one score a pair.
    """

    def __init__(self, source: str, *, device: str) -> None:
        try:
            library = importlib.import_module("sentence_transformers")
        except ModuleNotFoundError as error:
            raise InputError("a cross-encoder needs sentence-transformers: pip install 'quiver-retrieval[train]'") from error
        folder = local_folder(source)
        try:
            with _no_bars():
                self._model = library.CrossEncoder(str(folder), device=device)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise InputError(f"{source}: sentence-transformers cannot load it ({str(error).strip().splitlines()[0]})") from error
        labels = int(self._model.config.num_labels)
        if labels != 1:
            raise InputError(f"{source}: it tells {labels} classes apart; a teacher gives one score a pair")
        self._batch = _BATCH.get(torch.device(device).type, _BATCH["cpu"])
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

        def score(queries: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.float32]:
            pairs = list(zip(data.texts.take(queries), data.texts.take(documents), strict=True))
            # Pairs of like length share a batch: the library pads a batch to its longest pair.
            order = np.argsort([len(query) + len(document) for query, document in pairs], kind="stable")
            scores = np.empty(len(pairs), np.float32)
            scores[order] = self._model.predict(
                [pairs[place] for place in order.tolist()],
                batch_size=self._batch,
                activation_fn=torch.nn.Identity(),
                show_progress_bar=False,
            )
            return scores

        yield score


def load_teacher(source: str, *, precision: Precision = "float", executor: Executor = HERE) -> Teacher:
    """A teacher from a folder or the hub; its configuration says which kind it is.

    Args:
        source: Folder or hub id of a cross-encoder, a bi-encoder or a ColBERT.
        precision: ``int8`` quantises the matrices of Quiver's own models, on a CPU.
        executor: Who encodes documents; a cross-encoder encodes none.

    Raises:
        InputError: It is no model, or one that cannot be used; one line says why.
    """
    folder = local_folder(source)
    if not _is_cross_encoder(folder):
        return VectorTeacher(load_model(source, precision=precision), executor)
    if precision != "float":
        raise InputError(f"{source}: a cross-encoder; {precision} is of bi-encoders and ColBERTs alone")
    if executor.remote:
        raise InputError(f"{source}: a cross-encoder, which scores in this process alone; leave --executor and --workers away")
    return CrossEncoderTeacher(source, device=default_device())


def _fingerprint(source: str, folder: Path, max_length: int | None) -> str:
    """Of all that decides a cross-encoder's scores: its weights in any format, its configuration, its tokenizer, where texts are cut.

    Raises:
        InputError: There is no file of weights.
    """
    weights = {path for pattern in _WEIGHTS for path in folder.glob(pattern)}
    if not weights:
        raise InputError(f"{source}: no weights in this folder ({', '.join(_WEIGHTS)})")
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
