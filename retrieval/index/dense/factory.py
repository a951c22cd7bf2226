"""FAISS indexes by factory string: what one is made of, how it is trained, and which settings its search takes.

Here is what the index in memory (`quiver.retrieval.index.faiss_dense`) and the engine ``faiss-dense`` share.

Shapes: n vectors, d width.
Source: https://github.com/facebookresearch/faiss/wiki/The-index-factory; FAISS, arXiv:2401.08281.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.protocols import Rows

logger = logging.getLogger(__name__)

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss

# Vectors that a coarse quantizer learns from, a centroid: FAISS wants 39 at least and uses 256 at most.
_TRAINING_A_CENTROID = 64
# Vectors that anything else learns from, such as product quantizers and rotations: 256 centroids times 256 vectors.
_TRAINING = 65_536


def make_index(factory: str, dim: int) -> Any:
    """An empty index that ranks by inner product.

    Raises:
        InputError: FAISS does not know the factory string, or cannot rank by inner product with it.
    """
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise InputError(f"index {factory!r}: FAISS cannot make it for width {dim} ({_reason(error)}); see its index factory") from error
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise InputError(f"index {factory!r}: it cannot rank by inner product; choose another")
    return index


def train_index(index: Any, rows: Rows, factory: str, *, seed: int) -> None:
    """Train an index on a sample of the vectors, the same in every run; one that learns nothing stays as it is.

    Raises:
        InputError: FAISS has too few vectors to train it.
    """
    if index.is_trained:
        return
    size = min(rows.shape[0], max(_TRAINING, _TRAINING_A_CENTROID * lists_of(index)))
    chosen = np.sort(np.random.default_rng(seed).choice(rows.shape[0], size, replace=False))
    if any(getattr(part, "do_polysemous_training", False) for part in parts_of(index)):
        logger.warning("index %r trains polysemous codes, which takes minutes; with 'np' behind PQ it does not", factory)
    logger.info("index %r: training on %d of %d vectors", factory, size, rows.shape[0])
    try:
        index.train(rows.take(chosen))
    except RuntimeError as error:
        raise InputError(
            f"index {factory!r}: FAISS cannot train it on {size} vectors ({_reason(error)}); choose one with fewer lists or codes"
        ) from error


def add_vectors(index: Any, vectors: NDArray[np.float32], factory: str) -> None:
    """Append vectors, (n, d), to a trained index.

    Raises:
        InputError: FAISS cannot add vectors to such an index.
    """
    try:
        index.add(np.ascontiguousarray(vectors))
    except RuntimeError as error:
        raise InputError(f"index {factory!r}: FAISS cannot add vectors to it ({_reason(error)}); choose another") from error


def parts_of(index: Any) -> list[Any]:
    """An index and the one that it wraps, and so on, from the outside in."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return [index, *parts_of(index.index)]
    if isinstance(index, faiss.IndexRefine):
        return [index, *parts_of(index.base_index)]
    return [index]


def lists_of(index: Any) -> int:
    """How many inverted lists an index has; 0 for one that has none."""
    return max((part.nlist for part in parts_of(index) if isinstance(part, faiss.IndexIVF)), default=0)


def search_settings(index: Any) -> dict[str, float]:
    """Every setting of an index's search, with FAISS's own value."""
    settings: dict[str, float] = {}
    for part in parts_of(index):
        if isinstance(part, faiss.IndexIVF):
            settings["nprobe"] = part.nprobe
            quantizer = faiss.downcast_index(part.quantizer)
            if isinstance(quantizer, faiss.IndexHNSW):
                settings["quantizer_efSearch"] = quantizer.hnsw.efSearch
        elif isinstance(part, faiss.IndexHNSW):
            settings["efSearch"] = part.hnsw.efSearch
        elif isinstance(part, faiss.IndexRefine):
            settings["k_factor"] = part.k_factor
    return settings


def search_parameters(index: Any, settings: Mapping[str, float], selector: Any = None) -> Any:
    """The settings as FAISS takes them with a search, for each wrapped index inside those of its wrapper; None where there are none.

    Args:
        index: The index.
        settings: A value for each of its ``search_settings``.
        selector: FAISS's selector of the rows that may be found, which not every index takes; None for all rows.
    """
    chosen = {} if selector is None else {"sel": selector}
    parameters = _faiss.SearchParameters(**chosen) if chosen else None
    for part in reversed(parts_of(index)):
        if isinstance(part, faiss.IndexIVF):
            inner = settings.get("quantizer_efSearch")
            quantizer = {} if inner is None else {"quantizer_params": _faiss.SearchParametersHNSW(efSearch=inner)}
            parameters = _faiss.SearchParametersIVF(nprobe=settings["nprobe"], **quantizer, **chosen)
        elif isinstance(part, faiss.IndexHNSW):
            parameters = _faiss.SearchParametersHNSW(efSearch=settings["efSearch"], **chosen)
        elif isinstance(part, faiss.IndexRefine):
            parameters = _faiss.IndexRefineSearchParameters(k_factor=settings["k_factor"], base_index_params=parameters)
        elif isinstance(part, faiss.IndexPreTransform) and parameters is not None:
            parameters = _faiss.SearchParametersPreTransform(index_params=parameters)
    return parameters


def _reason(error: RuntimeError) -> str:
    """What FAISS says, without the place in its source."""
    return re.sub(r"^Error in .* at \S+:\d+: (Error: )?", "", " ".join(str(error).split()))
