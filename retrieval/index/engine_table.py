"""The table of engines: how each engine's codec is trained and opened, and how engine names and settings are parsed.

A new engine needs one entry in `ENGINES`. Callers verify the checksums of a codec's files before opening it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol

from quiver.encoder.errors import InputError
from quiver.retrieval.index import exact
from quiver.retrieval.index.dense import codec as dense
from quiver.retrieval.index.dense import faiss_engine as faiss_dense
from quiver.retrieval.index.dense import settings as dense_settings
from quiver.retrieval.index.engines import AnyCodec, Sample, Setting, check_names, did_you_mean, format_settings, parse_settings
from quiver.retrieval.index.tokens import codec as tokens
from quiver.retrieval.index.tokens import settings as tokens_settings
from quiver.retrieval.records import ModelCard


class Train(Protocol):
    """Function that trains the codec of an engine."""

    def __call__(
        self, sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
    ) -> AnyCodec:
        """See `train_codec`."""


@dataclass(frozen=True)
class Engine:
    """One engine of the table.

    Attributes:
        kind: Kind of model that it indexes: ``dense`` (one vector per text) or ``colbert`` (one vector per token).
        train: Trains its codec.
        open: Opens a codec folder whose checksums have been verified.
        sample: Maximum number of training vectors, given the number of vectors in the index; 0 if nothing is trained.
        settings: Names of its settings.
        check: Validates settings against the model before anything is encoded.
    """

    kind: Literal["dense", "colbert"]
    train: Train
    open: Callable[[Path], AnyCodec]
    sample: Callable[[int], int]
    settings: Sequence[str] = ()
    check: Callable[[Mapping[str, Setting], ModelCard], None] = lambda settings, card: None


def _nothing(vectors: int) -> int:
    del vectors
    return 0


def _names(settings: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(settings))


ENGINES: dict[str, Engine] = {
    exact.DENSE: Engine("dense", exact.train_dense, exact.open_dense, _nothing),
    exact.TOKENS: Engine("colbert", exact.train_tokens, exact.open_tokens, _nothing),
    dense_settings.SCAN: Engine(
        "dense", dense.train_scan, dense.open_scan, dense_settings.sample_size, _names(dense_settings.ScanSettings), dense.check_scan
    ),
    dense_settings.LISTS: Engine(
        "dense", dense.train_lists, dense.open_lists, dense_settings.sample_size, _names(dense_settings.ListSettings), dense.check_lists
    ),
    dense_settings.FACTORY: Engine(
        "dense",
        faiss_dense.train,
        faiss_dense.open_codec,
        dense_settings.sample_size,
        _names(dense_settings.FactorySettings),
        faiss_dense.check_settings,
    ),
    tokens_settings.NAME: Engine(
        "colbert",
        tokens.train,
        tokens.open_tokens,
        tokens_settings.sample_size,
        _names(tokens_settings.TokenSettings),
        tokens.check_settings,
    ),
}
"""Engines by name."""

AUTO = "auto"
"""Engine name that chooses an engine by the number of documents."""

EXACT = "exact"
"""Engine name that chooses the exact engine for the model's kind of vectors."""

# Up to this many documents (about 100,000 tokens), exact MaxSim takes no longer than an IVF search.
_EXACT_TOKENS = 1_000


@dataclass(frozen=True)
class EngineSpec:
    """An engine with settings, as `parse_engine` reads it.

    Attributes:
        name: ``auto``, ``exact`` or a key of `ENGINES`.
        settings: Settings that the user chose; the engine chooses the others from the size of the corpus.
    """

    name: str
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}:{format_settings(self.settings)}" if self.settings else self.name


def parse_engine(text: str) -> EngineSpec:
    """Read ``NAME`` or ``NAME:key=value,key=value``, the form of an engine on every command line and in recipes.

    Args:
        text: ``auto``, ``exact``, or an engine by name, with settings where it has any.

    Raises:
        InputError: The engine or one of its settings is unknown (names the closest one), or a setting is malformed.

    Example:
        >>> parse_engine("ivf-dense:nlist=64,bits=16")
        EngineSpec(name='ivf-dense', settings={'nlist': 64, 'bits': 16})
        >>> str(parse_engine("faiss-dense:factory=IVF64,Flat"))
        'faiss-dense:factory=IVF64,Flat'
    """
    name, _, rest = text.partition(":")
    known = [AUTO, EXACT, *ENGINES]
    if name not in known:
        raise InputError(f"unknown index engine {name!r}{did_you_mean(name, known)}; choose one of {', '.join(known)}")
    settings = parse_settings(rest)
    if name != AUTO:  # the settings of auto are checked when the engine is chosen
        check_names(name, "setting", settings, () if name == EXACT else ENGINES[name].settings)
    return EngineSpec(name, settings)


def engine_name(name: str, card: ModelCard, documents: int) -> str:
    """Resolve ``auto`` and ``exact`` to an engine of the table.

    Args:
        name: ``auto`` chooses by size, ``exact`` by the model's kind of vectors; other names are returned unchanged.
        card: Card of the model.
        documents: Number of documents that the index will have.
    """
    if name == AUTO:
        if card.kind == "dense":
            return dense_settings.sizes(documents).engine
        # ivf-tokens cannot code vectors of every width; those of other widths are stored exactly.
        return exact.TOKENS if documents <= _EXACT_TOKENS or card.dim % tokens.MULTIPLE else tokens_settings.NAME
    return {"dense": exact.DENSE, "colbert": exact.TOKENS}[card.kind] if name == EXACT else name


def engine(name: str, card: ModelCard) -> Engine:
    """Look up an engine for the vectors of a model.

    Raises:
        InputError: The engine does not exist or indexes the other kind of vectors; lists the engines for this model.
    """
    found = ENGINES.get(name)
    if found is None or found.kind != card.kind:
        known = ", ".join(key for key, each in ENGINES.items() if each.kind == card.kind)
        raise InputError(f"index engine {name!r} does not exist for a {card.kind} model; choose one of {known}")
    return found


def check_engine(text: str, card: ModelCard) -> EngineSpec:
    """Parse an engine with settings and check that it fits a model, before anything is encoded.

    Raises:
        InputError: As `parse_engine`; or the engine, a setting or the vector width does not fit the model.
    """
    spec = parse_engine(text)
    if spec.name != AUTO:
        name = engine_name(spec.name, card, 0)
        engine(name, card).check(spec.settings, card)
    return spec


def train_codec(
    name: str, sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
) -> AnyCodec:
    """Train the codec of an engine.

    Args:
        name: Name of the engine.
        sample: Vectors of documents chosen at random; at least one vector.
        card: Card of the model that made them.
        documents: Expected number of documents of the index.
        vectors: Expected number of vectors of these documents.
        settings: Settings of the engine; the others are chosen from the sizes.
        seed: Random seed; equal input and seed give equal codecs.

    Raises:
        InputError: The engine or a setting does not exist, or the codec cannot be trained on this sample.
    """
    return engine(name, card).train(sample, card, documents=documents, vectors=vectors, settings=settings, seed=seed)


def open_codec(name: str, folder: Path) -> AnyCodec:
    """Open a codec folder written by ``Codec.save``; the caller has verified its checksums.

    Raises:
        InputError: The engine does not exist, or a file is missing or damaged.
    """
    if name not in ENGINES:
        raise InputError(f"{folder}: made by the index engine {name!r}; this Quiver knows {', '.join(sorted(ENGINES))}")
    return ENGINES[name].open(folder)
