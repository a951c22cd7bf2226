"""The engines ``pq-dense`` and ``ivf-dense``: product codes find candidates, int8 or int16 codes give the scores.

    codec.json       width d, coordinates per code, number of lists, bits of a code of the refine store
    centre.f32       of the refine store, (d,)
    spread.f32       of the refine store, (d,)
    centroids.f32    of the lists, (K, D)
    products.f32     codebooks of the product code, (M, 16, dsub)
    coarse.u8        of a segment, beside its refine store: product code and number of the list, (P, bytes)

A record of ``coarse.u8`` is the product code of the residual, 4 bits for every ``dsub`` coordinates, and the number of the list in 2 or 4
bytes (none if there is one list). Widths that are no multiple of ``dsub`` are padded with zero coordinates. ``pq-dense`` scans all codes:
it is ``ivf-dense`` with one list.

Shapes: n vectors, P documents, K lists, M product codes of a vector, d width, D = M * dsub the padded width.
Source: product quantization, Jegou et al., TPAMI 2011; with 4-bit codes and fast scan, FAISS, arXiv:2401.08281.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.encoder.schema import RECORD, Positive, with_config
from quiver.retrieval.index.dense.refine import (
    BLOCK,
    DenseSegment,
    RefineStore,
    ScalarCoding,
    holds,
    open_scalar,
    save_scalar,
    widened,
    write_codes,
)
from quiver.retrieval.index.dense.settings import Bits, DenseParams, ListSettings, Presets, ScanSettings, coordinates, sample_size, sizes
from quiver.retrieval.index.engines import (
    IVF_DENSE,
    PQ_DENSE,
    Bitmap,
    Engine,
    EngineSettings,
    Lazy,
    Preset,
    Sample,
    Setting,
    Size,
    one_thread,
    setting_names,
)
from quiver.retrieval.index.files import DamagedIndexError, Disk, Files, RecordFiles, map_array, read_description, write_array, write_file
from quiver.retrieval.index.quantization import CODEWORDS, Clustering, FastScanLists, kmeans, product_quantizer, train_codebooks
from quiver.retrieval.records import ModelCard

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss

VECTORS_A_LIST = 32
"""Maximum number of training vectors per centroid."""

# Training vectors of the codebooks: FAISS uses 256 for each of the 16 codewords.
_RESIDUALS = 256 * CODEWORDS

COARSE = "coarse.u8"
"""Name of the file with the records of a segment."""

_JSON = "codec.json"
_CENTROIDS, _PRODUCTS = "centroids.f32", "products.f32"
# Copies of a block in memory while it is coded.
_COPIES = 8
# Size of the file buffers of a segment writer, in bytes.
_BUFFERS = 4 << 20


@dataclass(frozen=True)
class _CoarseCoding:
    """Coding of candidates: parameters shared by all records."""

    dim: int  # vector width d
    centroids: NDArray[np.float32]  # centroids of the lists, (K, D)
    products: NDArray[np.float32]  # codebooks of the product code, (M, 16, dsub)

    @classmethod
    def learn(cls, vectors: NDArray[np.float32], *, lists: int, dsub: int, seed: int) -> _CoarseCoding:
        """Train lists and codebooks on a sample."""
        filled = _filled(vectors, -(-vectors.shape[1] // dsub) * dsub)
        rng = np.random.default_rng(seed)
        with one_thread():  # with several threads, the order of additions differs between runs
            centroids = kmeans(filled, lists, vectors_a_centroid=VECTORS_A_LIST, seed=seed)
            numbers = _clustering(centroids).assign(filled, None)
            chosen = np.sort(rng.choice(len(filled), min(len(filled), _RESIDUALS), replace=False))
            products = train_codebooks(filled[chosen] - centroids[numbers[chosen]], dsub)
        return cls(vectors.shape[1], centroids, products)

    @property
    def dsub(self) -> int:
        """Coordinates per code."""
        return int(self.products.shape[2])

    @property
    def code_width(self) -> int:
        """Bytes of a product code."""
        return -(-len(self.products) // 2)

    @property
    def number_type(self) -> np.dtype[Any]:
        """Type of a list's number."""
        return np.dtype("<u2" if len(self.centroids) <= 1 << 16 else "<u4")

    @property
    def width(self) -> int:
        """Bytes of a record."""
        return self.code_width + (self.number_type.itemsize if len(self.centroids) > 1 else 0)

    def encode(self, vectors: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Encode vectors as records, (n, width); a record does not depend on the other vectors."""
        filled = self.fill(vectors)
        numbers = self._nearest.assign(filled, None)
        codes: NDArray[np.uint8] = self._quantizer.compute_codes(filled - self.centroids[numbers])
        if len(self.centroids) == 1:
            return codes
        stored = numbers.astype(self.number_type)
        return np.concatenate([codes, stored.view(np.uint8).reshape(len(stored), stored.dtype.itemsize)], axis=1)

    def numbers(self, records: NDArray[np.uint8]) -> NDArray[np.int64]:
        """List numbers of records, (n,)."""
        if len(self.centroids) == 1:
            return np.zeros(len(records), np.int64)
        stored = np.ascontiguousarray(records[:, self.code_width :]).view(self.number_type)[:, 0]
        return stored.astype(np.int64)

    def fill(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Pad vectors with zeros to the width that is coded, (n, D)."""
        return _filled(vectors, self.centroids.shape[1])

    @cached_property
    def _nearest(self) -> Clustering:
        return _clustering(self.centroids)

    @cached_property
    def _quantizer(self) -> Any:
        return product_quantizer(self.products)


def _filled(vectors: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    if vectors.shape[1] == width:
        return np.ascontiguousarray(vectors, np.float32)
    filled = np.zeros((len(vectors), width), np.float32)
    filled[:, : vectors.shape[1]] = vectors
    return filled


def _clustering(centroids: NDArray[np.float32]) -> Clustering:
    """A clustering with a single group: each vector is assigned to the nearest of all centroids."""
    return Clustering(centroids, np.array([0, len(centroids)]))


class _ListFinder:
    """Candidates from the lists of one segment; see `quiver.retrieval.index.dense.refine.Finder`."""

    def __init__(self, coding: _CoarseCoding, files: Files, rows: int) -> None:
        self._coding = coding
        self._path = files.folder / COARSE
        self._records = files.map(COARSE, np.uint8, (rows, coding.width))
        self._lists: Lazy[FastScanLists] = Lazy()

    @property
    def size(self) -> Size:
        coding, count = self._coding, len(self._records)
        lists = FastScanLists.nbytes(count, codebooks=len(coding.products), lists=len(coding.centroids))
        return Size(lists, self._records.nbytes)

    def find(self, queries: NDArray[np.float32], count: int, *, params: DenseParams, allowed: Bitmap | None) -> list[NDArray[np.int64]]:
        codes = self._lists.get(self._make_lists)
        matrix, nprobe = self._coding.fill(queries), min(widened(params.nprobe, allowed) or 1, len(self._coding.centroids))
        lists, closeness = np.zeros((len(matrix), nprobe), np.int64), np.zeros((len(matrix), nprobe), np.float32)
        if len(self._coding.centroids) > 1:  # with one list, the inner product shifts all scores equally
            for number, query in enumerate(matrix):  # one at a time, so that results do not depend on the other queries
                products = self._coding.centroids @ query
                best = np.argpartition(-products, nprobe - 1)[:nprobe]
                best = best[np.argsort(-products[best], kind="stable")]
                lists[number], closeness[number] = best, products[best]
        # Several threads make a single query slower; they help only with many queries.
        with one_thread() if len(matrix) == 1 else nullcontext():
            _, rows = codes.search(matrix, count, lists=lists, closeness=closeness, allowed=allowed)
        return [found if found[-1] >= 0 else found[found >= 0] for found in rows]  # missing results are -1

    def copy(self, files: RecordFiles, keep: Bitmap) -> None:
        files.copy(COARSE, self._records, keep)

    def damaged(self) -> Bitmap:
        return self._records.damaged()

    def _make_lists(self) -> FastScanLists:
        records, coding = self._records.whole(), self._coding
        numbers, rows = coding.numbers(records), np.arange(len(records), dtype=np.int64)
        if len(numbers) and int(numbers.max()) >= len(coding.centroids):
            raise DamagedIndexError(f"{self._path}: refers to an inverted list that the codec does not have; run quiver index repair")
        return FastScanLists(coding.products, records[:, : coding.code_width], numbers, rows, lists=len(coding.centroids))


class _ListWriter:
    """Encodes and writes vectors; see `quiver.retrieval.index.engines.SegmentWriter`."""

    def __init__(self, coarse: _CoarseCoding, scalar: ScalarCoding, folder: Path, disk: Disk) -> None:
        self._coarse = coarse
        self._scalar = scalar
        self._files = RecordFiles(folder, disk, _holds(scalar))

    def add(
        self, vectors: NDArray[np.float32], lengths: NDArray[np.int64] | None = None, token_ids: NDArray[np.uint32] | None = None
    ) -> None:
        del lengths, token_ids
        for start in range(0, len(vectors), BLOCK):
            block = np.ascontiguousarray(vectors[start : start + BLOCK], np.float32)
            self._files.write(COARSE, self._coarse.encode(block))
            write_codes(self._files, self._scalar, block)

    def close(self) -> Mapping[str, str]:
        return self._files.close()


@with_config(RECORD)
@dataclass(frozen=True)
class _Description:
    """Sizes and settings of a codec, as stored with it."""

    dim: Positive
    dsub: Positive
    nlist: Positive
    bits: Bits


class _ListCodec:
    """See `quiver.retrieval.index.engines.Codec`; made by the engines ``pq-dense`` and ``ivf-dense``."""

    def __init__(self, name: str, coarse: _CoarseCoding, scalar: ScalarCoding) -> None:
        self.name = name
        self._coarse = coarse
        self._scalar = scalar
        self._presets = Presets(() if name == PQ_DENSE else ("nprobe",), len(coarse.centroids), coarse.dsub)

    @property
    def dim(self) -> int:
        return self._scalar.dim

    @property
    def parameters(self) -> Mapping[str, Setting]:
        lists: dict[str, Setting] = {} if self.name == PQ_DENSE else {"nlist": len(self._coarse.centroids)}
        return {**lists, "dsub": self._coarse.dsub, "bits": self._scalar.bits, "bytes_a_vector": self._coarse.width + self._scalar.nbytes}

    def save(self, folder: Path, disk: Disk) -> Mapping[str, str]:
        described = _Description(self._scalar.dim, self._coarse.dsub, len(self._coarse.centroids), self._scalar.bits)
        write_file(folder / _JSON, (json.dumps(asdict(described)) + "\n").encode(), disk)
        write_array(folder / _CENTROIDS, self._coarse.centroids, disk)
        write_array(folder / _PRODUCTS, self._coarse.products, disk)
        return {
            _JSON: "sizes and settings of the codec",
            _CENTROIDS: "centroids of the lists, (K, D) float32",
            _PRODUCTS: "codebooks of the product code, (M, 16, dsub) float32",
            **save_scalar(self._scalar, folder, disk),
        }

    def memory(self, rows: int, vectors: int) -> int:
        """Maximum memory in bytes for writing or merging a segment; it does not depend on the size of the segment."""
        del rows, vectors
        # The centroids are also stored in lanes for the compiled kernel that compares vectors with them.
        return 3 * self._coarse.centroids.nbytes + 4 * _COPIES * BLOCK * self._scalar.dim + _BUFFERS

    def writer(self, folder: Path, disk: Disk) -> _ListWriter:
        return _ListWriter(self._coarse, self._scalar, folder, disk)

    def open(self, files: Files, rows: int) -> DenseSegment:
        return DenseSegment(RefineStore(self._scalar, files, rows), _ListFinder(self._coarse, files, rows))

    def merge(self, parts: Sequence[tuple[DenseSegment, Bitmap]], folder: Path, disk: Disk) -> Mapping[str, str]:
        files = RecordFiles(folder, disk, _holds(self._scalar))
        for segment, keep in parts:
            segment.copy(files, keep)
        return files.close()

    def preset_params(self, preset: Preset, *, k: int) -> DenseParams:
        return self._presets.params(preset, k)

    def param_grid(self, k: int, *, documents: int) -> Sequence[DenseParams]:
        return self._presets.grid(k, documents=documents)


def _train(
    name: str, sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
) -> _ListCodec:
    del card, vectors
    lists = 1
    if name == PQ_DENSE:
        chosen: ScanSettings | ListSettings = ScanSettings.parse(settings)
        dsub = chosen.dsub or coordinates(sample.vectors.shape[1])
    else:
        chosen = ListSettings.parse(settings)
        dsub, lists = chosen.dsub, chosen.nlist or sizes(documents).lists
    coarse = _CoarseCoding.learn(sample.vectors, lists=lists, dsub=dsub, seed=seed)
    return _ListCodec(name, coarse, ScalarCoding.learn(sample.vectors, chosen.bits))


def _holds(scalar: ScalarCoding) -> dict[str, str]:
    return {COARSE: "product code and list of each vector, (P, bytes)", **holds(scalar)}


def _open(name: str, folder: Path) -> _ListCodec:
    described = read_description(_Description, folder / _JSON)
    dim, dsub = described.dim, described.dsub
    codes = -(-dim // dsub)
    centroids = np.array(map_array(folder / _CENTROIDS, np.float32, (described.nlist, codes * dsub)))
    products = np.array(map_array(folder / _PRODUCTS, np.float32, (codes, CODEWORDS, dsub)))
    return _ListCodec(name, _CoarseCoding(dim, centroids, products), open_scalar(folder, dim, described.bits))


def _check(settings: type[EngineSettings], chosen: Mapping[str, Setting], card: ModelCard) -> None:
    del card
    settings.parse(chosen)


ENGINES = {
    name: Engine("dense", partial(_train, name), partial(_open, name), sample_size, setting_names(settings), partial(_check, settings))
    for name, settings in ((PQ_DENSE, ScanSettings), (IVF_DENSE, ListSettings))
}
"""The engines of this module; see `quiver.retrieval.index.engines.ENGINE_MODULES`."""
