"""The engine ``ivf-tokens``: the codec of compressed token vectors, trained once per index.

    codec.json        sizes and settings
    centroids.f16     centroids, (K, d)
    groups.i64        first centroid of each group, and K, (G + 1,)
    products.f32      codebooks of the product code, (d / 4, 16, 4)
    pairs.f32         codebook of the pairs of the fine part, (4^bits, 2)
    tokens.u32        vocabulary id of each group, with clustering=tokens
    heads.f32         centre of each group, with clustering=two-level

Shapes: n vectors, K centroids, G groups, d width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.schema import RECORD, Count, Field, Positive, with_config
from quiver.retrieval.index.engines import IVF_TOKENS, TOKEN_WIDTH_MULTIPLE, Bitmap, Engine, Preset, Sample, Setting, setting_names
from quiver.retrieval.index.files import DamagedIndexError, Disk, Files, map_array, read_description, write_array, write_file
from quiver.retrieval.index.kernels import packing
from quiver.retrieval.index.quantization import CODEWORDS, Clustering, cluster, product_quantizer, train_codebooks
from quiver.retrieval.index.tokens.segment import CODED_DIMENSIONS, TokenSegment, TokenWriter, copy, memory
from quiver.retrieval.index.tokens.settings import (
    TokenParams,
    TokenSettings,
    default_centroids,
    default_grouping,
    param_grid,
    preset_params,
    sample_size,
)
from quiver.retrieval.index.tokens.token_quantizer import TOO_LONG, Bits, Coding, learn_pairs, multiple, pool
from quiver.retrieval.records import ModelCard

WIDEST = 4096
"""Maximum width: sums of estimates of wider vectors may not fit into 16 bits (`quiver.retrieval.index.kernels.estimate`)."""

_JSON = "codec.json"
_CENTROIDS, _GROUPS, _PRODUCTS = "centroids.f16", "groups.i64", "products.f32"
_PAIRS, _TOKENS, _HEADS = "pairs.f32", "tokens.u32", "heads.f32"
# Training residuals of the product code; the 16 codewords per codebook need no more.
_RESIDUALS = 65_536


@with_config(RECORD)
@dataclass(frozen=True)
class _Description:
    """Sizes and settings of a codec, as stored with it; ``arrays`` names its array files."""

    bits: Bits
    dim: Annotated[int, Field(ge=1, le=WIDEST)]
    arrays: tuple[str, ...]
    pool_factor: Positive
    vectors: Count


class _TokenCodec:
    """See `quiver.retrieval.index.engines.Codec`; made by `train` or `open_tokens`."""

    name = IVF_TOKENS

    def __init__(self, coding: Coding, *, pool_factor: int, vectors: int) -> None:
        self._coding = coding
        self._pool_factor = pool_factor
        self._vectors = int(vectors)

    @property
    def dim(self) -> int:
        return self._coding.dim

    @property
    def parameters(self) -> Mapping[str, Setting]:
        clustering = self._coding.clustering
        return {
            "bits": self._coding.bits,
            "centroids": len(clustering.centroids),
            "clustering": "tokens" if clustering.tokens is not None else "flat" if clustering.heads is None else "two-level",
            "pool_factor": self._pool_factor,
            "bytes_a_vector": self._coding.coarse_width + self._coding.fine_width,
        }

    def save(self, folder: Path, disk: Disk) -> Mapping[str, str]:
        clustering = self._coding.clustering
        arrays: dict[str, tuple[NDArray[np.generic] | None, str]] = {
            _CENTROIDS: (clustering.centroids.astype(np.float16), "centroids, (K, d) float16"),
            _GROUPS: (clustering.groups, "first centroid of each group, and K, (G + 1,) int64"),
            _PRODUCTS: (self._coding.products, "codebooks of the product code, (d / 4, 16, 4) float32"),
            _PAIRS: (self._coding.pairs, "codebook of pairs of coordinates, (4^bits, 2) float32"),
            _TOKENS: (clustering.tokens, "vocabulary number of each group, (G,) uint32"),
            _HEADS: (clustering.heads, "centre of each group, (G, d) float32"),
        }
        present = {name: (array, holds) for name, (array, holds) in arrays.items() if array is not None}
        for name, (array, _) in present.items():
            write_array(folder / name, array, disk)
        described = _Description(self._coding.bits, self._coding.dim, tuple(sorted(present)), self._pool_factor, self._vectors)
        write_file(folder / _JSON, (json.dumps(asdict(described), indent=2, sort_keys=True) + "\n").encode(), disk)
        return {_JSON: "sizes and settings of the codec"} | {name: holds for name, (_, holds) in present.items()}

    def memory(self, rows: int, vectors: int) -> int:
        """Maximum memory in bytes for writing or merging a segment; it does not depend on the size of the segment."""
        del rows, vectors
        return memory(self._coding, pool_factor=self._pool_factor)

    def writer(self, folder: Path, disk: Disk) -> TokenWriter:
        return TokenWriter(self._coding, pool_factor=self._pool_factor, folder=folder, disk=disk)

    def open(self, files: Files, rows: int) -> TokenSegment:
        return TokenSegment(self._coding, files, rows)

    def merge(self, parts: Sequence[tuple[TokenSegment, Bitmap]], folder: Path, disk: Disk) -> Mapping[str, str]:
        return copy(parts, folder, disk)

    def preset_params(self, preset: Preset, *, k: int) -> TokenParams:
        return preset_params(preset, k=k, vectors=self._vectors // self._pool_factor)

    def param_grid(self, k: int, *, documents: int) -> Sequence[TokenParams]:
        fast, balanced, exact = (self.preset_params(preset, k=k) for preset in ("fast", "balanced", "exact"))
        return param_grid(fast, balanced, exact, k=k, lists=len(self._coding.clustering.centroids), documents=documents)


def check_settings(settings: Mapping[str, Setting], card: ModelCard) -> None:
    """Check settings and vector width before training.

    Raises:
        InputError: A setting is invalid, or the width is above 4,096 or not a multiple of 8 (16 for 3.5 bits).
    """
    bits = TokenSettings.parse(settings).bits
    if card.dim % multiple(bits) or card.dim > WIDEST:
        at = f" at {bits} bits" if multiple(bits) > TOKEN_WIDTH_MULTIPLE else ""
        widths = f"multiples of {multiple(bits)}{at} up to {WIDEST:,}"
        raise InputError(f"{card.source}: vectors of width {card.dim}; {IVF_TOKENS} takes {widths}, use exact-tokens")


def train(sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int) -> _TokenCodec:
    """Train the codec of a token index."""
    del documents
    check_settings(settings, card)
    chosen = TokenSettings.parse(settings)
    matrix, token_ids = sample.vectors, sample.token_ids
    if chosen.pool_factor > 1 and sample.lengths is not None:
        matrix, _, token_ids = pool(matrix, sample.lengths, token_ids, factor=chosen.pool_factor)
    expected = max(1, vectors // chosen.pool_factor)
    grouping = chosen.clustering or default_grouping(expected, token_ids=token_ids is not None)
    if grouping == "tokens" and token_ids is None:
        raise InputError(f"{card.source} does not report token ids; choose clustering=two-level or clustering=flat")
    clustering = cluster(matrix, token_ids, count=chosen.centroids or default_centroids(expected), grouping=grouping, seed=seed)
    if not np.isfinite(clustering.centroids).all():
        raise InputError(TOO_LONG)
    size = min(len(matrix), _RESIDUALS)
    rows = np.sort(np.random.default_rng(seed).choice(len(matrix), size, replace=False))
    part = np.ascontiguousarray(matrix[rows])
    residuals = part - clustering.centroids[clustering.assign(part, None if token_ids is None else token_ids[rows])]
    products = train_codebooks(residuals, CODED_DIMENSIONS)
    residuals -= packing.product(product_quantizer(products).compute_codes(residuals), products)
    coding = Coding(clustering, products, learn_pairs(residuals, chosen.bits, seed=seed))
    return _TokenCodec(coding, pool_factor=chosen.pool_factor, vectors=vectors)


def open_tokens(folder: Path) -> _TokenCodec:
    """Open a codec folder written by ``TokenCodec.save``."""
    described = read_description(_Description, folder / _JSON)
    dim, bits, present = described.dim, described.bits, set(described.arrays)
    if dim % multiple(bits):
        raise DamagedIndexError(f"{folder / _JSON}: vectors of width {dim} at {bits:g} bits are impossible; run quiver index repair")
    if _PAIRS not in present:
        raise InputError(f"{folder}: written by an earlier version of Quiver; build the index again")

    def optional(name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any] | None:
        return np.array(map_array(folder / name, dtype, shape)) if name in present else None

    centroids = np.array(map_array(folder / _CENTROIDS, np.float16, (-1, dim)), np.float32)
    clustering = Clustering(
        centroids,
        np.array(map_array(folder / _GROUPS, np.int64, (-1,))),
        tokens=optional(_TOKENS, "<u4", (-1,)),
        heads=optional(_HEADS, "<f4", (-1, dim)),
    )
    if not clustering.is_whole:
        raise DamagedIndexError(f"{folder / _GROUPS}: the groups do not match the {len(centroids)} centroids; run quiver index repair")
    products = np.array(map_array(folder / _PRODUCTS, np.float32, (dim // CODED_DIMENSIONS, CODEWORDS, CODED_DIMENSIONS)))
    pairs = np.array(map_array(folder / _PAIRS, np.float32, (1 << round(2 * bits), 2)))
    return _TokenCodec(Coding(clustering, products, pairs), pool_factor=described.pool_factor, vectors=described.vectors)


ENGINES = {IVF_TOKENS: Engine("colbert", train, open_tokens, sample_size, setting_names(TokenSettings), check_settings)}
"""The engine of this module; see `quiver.retrieval.index.engines.ENGINE_MODULES`."""
