"""How fast a model encodes, beside other libraries that run the same checkpoint.

All encoders run in one process on the same threads and the same texts, in turns: a machine that slows down slows all of
them, so that the ratio of a round means something where its seconds do not. How far the vectors are apart is part of the
result, since speed at other vectors is no speed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.biencoder import BiEncoder
from retrieval.models import load_model

Encode = Callable[[list[str]], NDArray[np.float32]]
"""Documents to (B, d) vectors."""


@dataclass(frozen=True)
class Timing:
    """What one library needed to encode the texts.

    Attributes:
        name: ``quiver`` or the peer.
        seconds: Wall clock of each round, tokenising included, loading and a first round to warm up not.
        ratios: Its seconds divided by Quiver's, round by round: 2 means twice as slow as Quiver.
        texts: Texts of a round.
        tokens: Tokens of a round after truncation, as Quiver's tokenizer counts them.
        max_difference: Largest absolute difference of its vectors from Quiver's.
    """

    name: str
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]
    texts: int
    tokens: int
    max_difference: float

    @property
    def texts_per_second(self) -> float:
        """Texts per second of the median round."""
        return self.texts / median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the median round."""
        return self.tokens / median(self.seconds)

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return median(self.ratios)


def _sentence_transformers(model: str, device: str) -> Encode:
    try:
        library = importlib.import_module("sentence_transformers")
    except ModuleNotFoundError as error:
        raise InputError("comparing with sentence-transformers needs it: pip install 'quiver-retrieval[train]'") from error
    encoder = library.SentenceTransformer(model, device=device)

    def encode(texts: list[str]) -> NDArray[np.float32]:
        return np.asarray(encoder.encode_document(texts, show_progress_bar=False), dtype=np.float32)

    return encode


PEERS: Mapping[str, Callable[[str, str], Encode]] = {"sentence-transformers": _sentence_transformers}
"""Library -> how it loads a model, by folder and device, to encode documents at its own default batch size."""


def bench_encoding(
    model: str | Path, texts: Sequence[str], *, peers: Sequence[str] = tuple(PEERS), rounds: int = 5, device: str = "cpu"
) -> list[Timing]:
    """Time the encoding of documents by Quiver and by its peers.

    Args:
        model: Folder or hub id of a bi-encoder.
        texts: Documents.
        peers: Names in ``PEERS``.
        rounds: Timed rounds; each encodes all texts once with every library.
        device: Where all of them run.

    Returns:
        Quiver first, then the peers in the order given.

    Raises:
        InputError: No texts, an unknown or missing peer, or a model that is no bi-encoder.
        ValueError: rounds < 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    if not texts:
        raise InputError("there is nothing to encode: the list of texts is empty")
    if unknown := [name for name in peers if name not in PEERS]:
        raise InputError(f"unknown peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    own = load_model(model, device=device)
    if not isinstance(own, BiEncoder):
        raise InputError(f"{model}: not a bi-encoder; only one vector a text can be compared")
    others = {name: PEERS[name](str(model), device) for name in peers}
    batch = list(texts)
    # Everyone's first round warms up and gives the vectors.
    reference = own.encode(batch, "document")
    vectors = {"quiver": reference.vectors, **{name: encode(batch) for name, encode in others.items()}}
    encoders: dict[str, Encode] = {"quiver": lambda batch: own.encode(batch, "document").vectors, **others}
    seconds = _rounds(encoders, batch, rounds)
    return [
        Timing(
            name=name,
            seconds=tuple(seconds[name]),
            ratios=tuple(each / quiver for each, quiver in zip(seconds[name], seconds["quiver"], strict=True)),
            texts=len(batch),
            tokens=reference.counts.tokens,
            max_difference=float(np.abs(vectors[name] - reference.vectors).max()),
        )
        for name in encoders
    ]


def _rounds(encoders: Mapping[str, Encode], batch: list[str], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in encoders}
    for number in range(rounds):
        # Every other round runs backwards, so that nobody always follows the same neighbour.
        for name in list(encoders)[:: -1 if number % 2 else 1]:
            started = perf_counter()
            encoders[name](batch)
            seconds[name].append(perf_counter() - started)
    return seconds
