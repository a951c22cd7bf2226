"""Any FAISS index over one vector a document, behind the same search as the exact one.

What is built and how it is searched is one string: a factory string of FAISS, then ``?`` and the settings of the search, such as
``IVF1024,Flat?nprobe=16`` or ``HNSW32,Flat?efSearch=128``. Settings go with every search as arguments and change nothing in the index.
Scores are what the index makes of the inner product: exact for ``Flat``, approximate for codes. The index lives in memory.

Shapes: Q queries, P documents, d vector width.
Source: https://github.com/facebookresearch/faiss/wiki/The-index-factory; FAISS, arXiv:2401.08281.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.dense.factory import add_vectors, make_index, search_parameters, search_settings, train_index
from quiver.retrieval.index.dense.faiss_files import index_bytes
from quiver.retrieval.index.exact.arrays import block_rows, check_new_ids, first_bad_row
from quiver.retrieval.index.exact.ranking import check_k, in_order
from quiver.retrieval.index.exact.walk import MARGIN
from quiver.retrieval.index.queries import dense_queries
from quiver.retrieval.protocols import Rows
from quiver.retrieval.records import DenseVectors, Hits

_SEED = 0


@dataclass(frozen=True)
class FaissKind:
    """A kind of index as the user names it.

    Attributes:
        factory: FAISS's factory string.
        settings: Settings of the search, name -> value.
    """

    factory: str
    settings: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, kind: str) -> FaissKind:
        """Read ``FACTORY[?name=value[&name=value]]``.

        Raises:
            InputError: A setting has no name or no number, or is there twice.

        Example:
            >>> FaissKind.parse("IVF1024,Flat?nprobe=16")
            FaissKind(factory='IVF1024,Flat', settings={'nprobe': 16.0})
        """
        factory, asked, text = kind.partition("?")
        settings: dict[str, float] = {}
        for part in text.split("&") if asked else []:
            name, _, value = part.partition("=")
            try:
                number = float(value)
            except ValueError:
                number = 0.0
            if not name or name in settings or not 0 < number < 1e9:
                raise InputError(f"index {kind!r}: {part!r} is not a setting; write each once, as in IVF1024,Flat?nprobe=16")
            settings[name] = number
        return cls(factory, settings)


def check_factory(kind: str, dim: int) -> None:
    """Say before anything is encoded that there is no such index.

    Args:
        kind: Factory string and settings.
        dim: Width of the vectors.

    Raises:
        InputError: FAISS does not know the factory string or cannot rank by inner product with it, or the index has no such setting.
    """
    parsed = FaissKind.parse(kind)
    _settings(make_index(parsed.factory, dim), parsed)


class FaissDenseIndex:
    """A FAISS index with document ids; built by ``from_rows``."""

    kind = "faiss-dense"

    def __init__(self, ids: Sequence[str], index: Any, kind: FaissKind) -> None:
        self._ids = tuple(ids)
        self._names = np.array(self._ids, dtype=object)
        self._index = index
        self._factory = kind.factory
        self._settings = _settings(index, kind)

    @classmethod
    def from_rows(cls, ids: Sequence[str], rows: Rows, kind: str) -> FaissDenseIndex:
        """Train an index on a sample of the vectors, the same in every run, and add all of them in blocks.

        A graph (HNSW) that several threads build is not the same in every run.

        Args:
            ids: P document ids.
            rows: (P, d); their inner product is the similarity.
            kind: Factory string and settings.

        Raises:
            InputError: FAISS does not know the factory string, cannot rank by inner product with it, or has too few vectors to train it;
                the index has no such setting; no documents, an id twice, or a vector that is not finite.
            ValueError: Not as many rows as ids.
        """
        check_new_ids(ids, rows.shape[0])
        if (bad := first_bad_row(rows)) is not None:
            raise InputError(f"the vector of document '{ids[bad]}' is not finite; the model cannot be used on it")
        parsed = FaissKind.parse(kind)
        index = make_index(parsed.factory, rows.shape[1])
        _settings(index, parsed)  # a setting the index does not have is found before hours of training
        train_index(index, rows, parsed.factory, seed=_SEED)
        for _, block in rows.blocks(block_rows(rows.shape[1])):
            add_vectors(index, block, parsed.factory)
        return cls(ids, index, parsed)

    @property
    def ids(self) -> Sequence[str]:
        """Document ids in the order they were added."""
        return self._ids

    @property
    def dim(self) -> int:
        """Vector width d."""
        return int(self._index.d)

    @property
    def nbytes(self) -> int:
        """Size of the index as FAISS writes it."""
        return index_bytes(self._index)

    @property
    def parameters(self) -> Mapping[str, str | float]:
        """Factory string, the settings of the search, and the seed of the training."""
        return {"factory": self._factory, **self._settings, "seed": _SEED}

    def __len__(self) -> int:
        return len(self._ids)

    def search(self, queries: DenseVectors, k: int) -> Hits:
        """The documents that FAISS finds first for each query, best first; ties go to the greater document id.

        Args:
            queries: (Q, d).
            k: Hits a query, at most; capped at the number of documents, and fewer where the lists probed hold fewer. A graph looks at
                k documents at least, whatever its efSearch.

        Raises:
            ValueError: k < 1, another width than the index, or a query that is not finite.
        """
        k = check_k(k)
        matrix = dense_queries(queries, self.dim)
        if not len(matrix):
            return Hits([], [])
        # A few more than asked for: among equal scores FAISS keeps any, and the ids are to decide. Not from a graph, which would be
        # searched more widely than its efSearch says.
        fetched = min(len(self), k + (0 if "efSearch" in self._settings else MARGIN))
        scores, rows = self._index.search(matrix, fetched, params=search_parameters(self._index, self._settings))
        ids: list[Sequence[str]] = []
        values: list[NDArray[np.float32]] = []
        for row, score in zip(rows, scores, strict=True):
            found = row >= 0  # -1 fills up what was not found
            kept, best = in_order(row[found], score[found], k, ids=self._names)
            ids.append(self._names[kept].tolist())
            values.append(best)
        return Hits(ids, values)


def _settings(index: Any, kind: FaissKind) -> dict[str, float]:
    """Every setting of an index's search: as the kind has it, or FAISS's own value.

    Raises:
        InputError: The kind names a setting that the index does not have, or one is not a whole number that must be.
    """
    settings = search_settings(index)
    for name, value in kind.settings.items():
        if name not in settings:
            takes = f"it takes {', '.join(settings)}" if settings else "it takes none"
            raise InputError(f"index {kind.factory!r}: {name!r} is no setting of its search; {takes}")
        if name != "k_factor" and not value.is_integer():
            raise InputError(f"index {kind.factory!r}: {name} must be a whole number, got {value}")
        settings[name] = value if name == "k_factor" else int(value)
    return settings
