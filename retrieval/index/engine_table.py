"""The table of engines: how a codec is trained and opened, and how an engine is named with its settings.

A new engine is one entry of `ENGINES`. A codec's files are opened only after their checksums were verified.
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
    """How the codec of an engine is made."""

    def __call__(
        self, sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
    ) -> AnyCodec:
        """See `train_codec`."""


@dataclass(frozen=True)
class Engine:
    """One engine of the table.

    Attributes:
        kind: Which models it indexes: one vector a text, or one a token.
        train: Makes its codec.
        open: Opens a codec's folder, whose files are known to be whole.
        sample: Vectors that the codec wants to be trained on, at most, for an index of so many; 0 where nothing is learned.
        settings: Names of its settings.
        check: Refuses settings that the engine does not take, before anything is encoded.
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
"""Name -> engine."""

AUTO = "auto"
"""The engine that suits the number of documents."""

EXACT = "exact"
"""The exact engine for the model's kind of vectors."""

# Up to so many documents, 100,000 tokens or so, exact MaxSim takes no longer than a search of lists.
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
    """The engine that is meant by a name.

    Args:
        name: An engine; ``exact``, the exact one for the model's kind of vectors; or ``auto``, the one that suits the size.
        card: The model.
        documents: Documents that the index will have.
    """
    if name == AUTO:
        if card.kind == "dense":
            return dense_settings.sizes(documents).engine
        # Vectors of a width that it cannot code are kept as they are.
        return exact.TOKENS if documents <= _EXACT_TOKENS or card.dim % tokens.MULTIPLE else tokens_settings.NAME
    return {"dense": exact.DENSE, "colbert": exact.TOKENS}[card.kind] if name == EXACT else name


def engine(name: str, card: ModelCard) -> Engine:
    """The engine of a name, for the vectors of a model.

    Raises:
        InputError: There is no such engine (lists those there are for the model), or it is for the other kind of vectors.
    """
    found = ENGINES.get(name)
    if found is None or found.kind != card.kind:
        known = ", ".join(key for key, each in ENGINES.items() if each.kind == card.kind)
        raise InputError(f"index engine {name!r} does not exist for a {card.kind} model; choose one of {known}")
    return found


def check_engine(text: str, card: ModelCard) -> EngineSpec:
    """Read an engine with settings and refuse one that does not fit a model, before anything is encoded.

    Raises:
        InputError: As `parse_engine`; or the engine, a setting or the width of the vectors does not fit the model.
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
        name: The engine.
        sample: Vectors of documents chosen at random; at least one vector.
        card: The model they come from.
        documents: Documents that the index will have, as far as that is known now.
        vectors: Vectors that these documents will have.
        settings: The engine's settings; what is not named is chosen from the sizes.
        seed: Of all that is random; equal input and seed give equal codecs.

    Raises:
        InputError: There is no such engine or setting, or the codec cannot be trained on this sample.
    """
    return engine(name, card).train(sample, card, documents=documents, vectors=vectors, settings=settings, seed=seed)


def open_codec(name: str, folder: Path) -> AnyCodec:
    """Open what a codec's ``save`` wrote, after the checksums of its files have been compared.

    Raises:
        InputError: There is no such engine, or a file is missing or damaged.
    """
    if name not in ENGINES:
        raise InputError(f"{folder}: made by the index engine {name!r}; this Quiver knows {', '.join(sorted(ENGINES))}")
    return ENGINES[name].open(folder)
