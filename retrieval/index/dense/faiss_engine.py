"""The engine ``faiss-dense``: an index made by FAISS's factory finds candidates, int8 or int16 codes give the scores.

    codec.json       width, factory string, bits of a code
    centre.f32       of the refine store, (d,)
    spread.f32       of the refine store, (d,)
    trained.faiss    the FAISS index, trained and empty
    index.faiss      of a segment: the FAISS index of its vectors, beside its refine store

The FAISS index is built from the refine store after that is written, not from the incoming vectors: merged segments then get the index
that they would have got if they had been written as one. It is built on one thread because FAISS builds a different graph in every run
with several. Filters are passed to FAISS where the index supports selectors; otherwise more candidates are requested.

Shapes: n vectors, P documents, d width.
Source: https://github.com/facebookresearch/faiss/wiki/The-index-factory; FAISS, arXiv:2401.08281.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
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
from quiver.retrieval.index.dense.settings import Bits, DenseParams, FactorySettings, Presets, sample_size
from quiver.retrieval.index.engines import FAISS_DENSE, Bitmap, Engine, Lazy, Preset, Sample, Setting, Size, one_thread, setting_names
from quiver.retrieval.index.files import DamagedIndexError, Disk, Files, RecordFiles, map_array, read_description, write_file
from quiver.retrieval.records import MatrixRows, ModelCard, Rows

logger = logging.getLogger(__name__)

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss

_BUFFER = 1 << 20
# FAISS applies the limit also to tables that it computes while it reads, which may be larger than the file.
_TABLES = 256 << 20
# The limits are FAISS's, for the whole process.
_READING = threading.Lock()
# Vectors that a coarse quantizer learns from, a centroid: FAISS wants 39 at least and uses 256 at most.
_TRAINING_A_CENTROID = 64
# Vectors that anything else learns from, such as product quantizers and rotations: 256 centroids times 256 vectors.
_TRAINING = 65_536
_INDEX = "index.faiss"
_JSON, _TRAINED = "codec.json", "trained.faiss"
_COPIES = 8
_BUFFERS = 4 << 20
# Vectors of the sample that an index is tried with before the documents are encoded.
_TRIED = 64


def write_index(index: Any, path: Path, disk: Disk) -> None:
    """Write an index to a new file."""
    errors: list[OSError] = []
    with disk.create(path) as file:

        def write(data: bytes) -> int:
            if not errors:  # FAISS has to be let go on: an exception does not come back out of it
                try:
                    file.write(data)
                except OSError as error:
                    errors.append(error)
            return len(data)

        faiss.write_index(index, _faiss.PyCallbackIOWriter(write, _BUFFER))
        if errors:
            raise errors[0]


def index_bytes(index: Any) -> int:
    """Size of an index as FAISS writes it."""
    written = 0

    def count(data: bytes) -> int:
        nonlocal written
        written += len(data)
        return len(data)

    faiss.write_index(index, _faiss.PyCallbackIOWriter(count))
    return written


def read_index(content: NDArray[np.uint8], path: Path) -> Any:
    """Read a FAISS index whose checksum has been verified."""
    place = 0

    def read(size: int) -> bytes:
        nonlocal place
        part = content[place : place + size]
        place += len(part)
        return part.tobytes()

    try:
        with _limits(max(len(content), _TABLES)):
            return faiss.read_index(_faiss.PyCallbackIOReader(read, _BUFFER))
    except RuntimeError as error:
        raise DamagedIndexError(f"{path}: FAISS cannot read it; run quiver index repair") from error


@contextmanager
def _limits(size: int) -> Iterator[None]:
    """No part of what is read is larger than so many bytes; older versions of FAISS cannot be told."""
    if not hasattr(_faiss, "set_deserialization_vector_byte_limit"):
        yield
        return
    with _READING:
        former = _faiss.get_deserialization_vector_byte_limit()
        _faiss.set_deserialization_vector_byte_limit(size + 1)  # what is read has to be smaller than the limit
        try:
            yield
        finally:
            _faiss.set_deserialization_vector_byte_limit(former)


def make_index(factory: str, dim: int) -> Any:
    """Create an empty index that ranks by inner product."""
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise InputError(
            f"index {factory!r}: FAISS cannot create it for width {dim} ({_reason(error)}); the setting factory must be"
            " an index factory string of FAISS"
        ) from error
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise InputError(f"index {factory!r}: it does not support inner product; choose another factory string")
    if any(isinstance(part, faiss.IndexRefine) for part in parts_of(index)):
        raise InputError(f"index {factory!r}: {FAISS_DENSE} refines with its own codes; remove the refine part of the factory string")
    return index


def train_index(index: Any, rows: Rows, factory: str, *, seed: int) -> None:
    """Train an index on a sample of the vectors, reproducibly; an index that needs no training is unchanged."""
    if index.is_trained:
        return
    size = min(rows.shape[0], max(_TRAINING, _TRAINING_A_CENTROID * lists_of(index)))
    chosen = np.sort(np.random.default_rng(seed).choice(rows.shape[0], size, replace=False))
    if any(getattr(part, "do_polysemous_training", False) for part in parts_of(index)):
        logger.warning("index %r trains polysemous codes, which takes minutes; write 'np' after PQ to skip it", factory)
    logger.info("index %r: training on %d of %d vectors", factory, size, rows.shape[0])
    try:
        index.train(rows.take(chosen))
    except RuntimeError as error:
        raise InputError(
            f"index {factory!r}: FAISS cannot train it on {size} vectors ({_reason(error)}); choose one with fewer lists or codes"
        ) from error


def add_vectors(index: Any, vectors: NDArray[np.float32], factory: str) -> None:
    """Append vectors, (n, d), to a trained index."""
    try:
        index.add(np.ascontiguousarray(vectors))
    except RuntimeError as error:
        raise InputError(f"index {factory!r}: FAISS cannot add vectors to it ({_reason(error)}); choose another") from error


def parts_of(index: Any) -> list[Any]:
    """Return an index and the indexes that it wraps, from the outermost to the innermost."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return [index, *parts_of(index.index)]
    if isinstance(index, faiss.IndexRefine):
        return [index, *parts_of(index.base_index)]
    return [index]


def lists_of(index: Any) -> int:
    """Number of inverted lists of an index; 0 if it has none."""
    return max((part.nlist for part in parts_of(index) if isinstance(part, faiss.IndexIVF)), default=0)


def search_settings(index: Any) -> dict[str, float]:
    """Search settings of an index with FAISS's default values."""
    settings: dict[str, float] = {}
    for part in parts_of(index):
        if isinstance(part, faiss.IndexIVF):
            settings["nprobe"] = part.nprobe
            quantizer = faiss.downcast_index(part.quantizer)
            if isinstance(quantizer, faiss.IndexHNSW):
                settings["quantizer_efSearch"] = quantizer.hnsw.efSearch
        elif isinstance(part, faiss.IndexHNSW):
            settings["efSearch"] = part.hnsw.efSearch
    return settings


def search_parameters(index: Any, settings: Mapping[str, float], selector: Any = None) -> Any:
    """Convert values of ``search_settings`` to FAISS's search parameters, nested as the indexes are; None if the index has none.

    ``selector`` has the rows that may be found, which not every index supports; None for all rows.
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
        elif isinstance(part, faiss.IndexPreTransform) and parameters is not None:
            parameters = _faiss.SearchParametersPreTransform(index_params=parameters)
    return parameters


def _reason(error: RuntimeError) -> str:
    """What FAISS says, without the place in its source."""
    return re.sub(r"^Error in .* at \S+:\d+: (Error: )?", "", " ".join(str(error).split()))


class _FaissFinder:
    """Candidates from the index of one segment; see `quiver.retrieval.index.dense.refine.Finder`."""

    def __init__(self, files: Files, store: RefineStore) -> None:
        self._path = files.folder / _INDEX
        self._shape = (len(store), store.coding.dim)
        # Mapped now and read at the first search: a merge needs no index, and a file that is removed meanwhile stays with who has it open.
        self._content = files.map(_INDEX, np.uint8, (-1,))
        self._read: Lazy[tuple[Any, bool]] = Lazy()  # the index in memory, and whether it can be told which rows are allowed

    @property
    def size(self) -> Size:
        return Size(len(self._content), len(self._content))

    def find(self, queries: NDArray[np.float32], count: int, *, params: DenseParams, allowed: Bitmap | None) -> list[NDArray[np.int64]]:
        total, fetched = len(self), count
        index, takes_selectors = self._read.get(self._read_index)
        selected = allowed if takes_selectors else None
        if allowed is not None and selected is None:
            fetched = min(total, -(-count * total // max(1, int(np.count_nonzero(allowed)))))
        nprobe = widened(params.nprobe, allowed)
        search_params: dict[str, float] = {
            "nprobe": nprobe,
            "efSearch": widened(params.efSearch, allowed),
            "quantizer_efSearch": max(params.quantizer_efSearch, nprobe),
        }
        found: dict[int, NDArray[np.int64]] = {}
        pending = np.arange(len(queries))
        while len(pending):
            rest = []
            searched = self._search(index, queries[pending], fetched, search_params, selected)
            for number, rows in zip(pending.tolist(), searched, strict=True):
                met = rows[rows >= 0]  # -1 fills up what was not found
                kept = met if allowed is None else met[allowed[met]]
                found[number] = kept[:count]
                if len(kept) < count and len(met) == fetched < total:
                    rest.append(number)
            pending, fetched = np.array(rest, np.int64), min(2 * fetched, total)
        return [found[number] for number in range(len(queries))]

    def copy(self, files: RecordFiles, keep: Bitmap) -> None:
        """Do nothing: the index is built from the refine store."""

    def damaged(self) -> Bitmap:
        """Return no rows: a merge rebuilds the index from the refine store."""
        return np.zeros(len(self), bool)

    def __len__(self) -> int:
        return self._shape[0]

    def _search(
        self, index: Any, queries: NDArray[np.float32], count: int, search_params: Mapping[str, float], allowed: Bitmap | None
    ) -> NDArray[np.int64]:
        """Rows of each query, best first, (Q, count), -1 behind the last."""
        selector = None
        if allowed is not None:
            packed = np.packbits(allowed, bitorder="little")  # the selector does not keep it
            selector = _faiss.IDSelectorBitmap(len(self), _faiss.swig_ptr(packed))
        # Several threads make one query slower; many queries are theirs to share.
        with one_thread() if len(queries) == 1 else nullcontext():
            parameters = search_parameters(index, {name: search_params[name] for name in search_settings(index)}, selector)
            _, rows = index.search(queries, count, params=parameters)
        found: NDArray[np.int64] = rows
        return found

    def _read_index(self) -> tuple[Any, bool]:
        index = read_index(self._content.whole(), self._path)
        if (index.ntotal, index.d) != self._shape:
            raise DamagedIndexError(
                f"{self._path}: {index.ntotal} vectors of width {index.d}, expected {self._shape}; run quiver index repair"
            )
        return index, _takes_selectors(index, *self._shape)


def _takes_selectors(index: Any, count: int, dim: int) -> bool:
    """Whether an index of so many vectors can be told which rows are allowed; one that cannot says so to the first that tries."""
    everything = np.full(-(-count // 8), 0xFF, np.uint8)
    selector = _faiss.IDSelectorBitmap(count, _faiss.swig_ptr(everything))
    try:
        index.search(np.zeros((1, dim), np.float32), 1, params=search_parameters(index, search_settings(index), selector))
    except RuntimeError:
        return False
    return True


class _FaissWriter:
    """Encodes vectors as they are added, and builds the index when closed; see `quiver.retrieval.index.engines.SegmentWriter`."""

    def __init__(self, codec: _FaissCodec, folder: Path, disk: Disk) -> None:
        self._codec = codec
        self._folder = folder
        self._disk = disk
        self._files = RecordFiles(folder, disk, holds(codec.scalar))
        self._count = 0

    def add(
        self, vectors: NDArray[np.float32], lengths: NDArray[np.int64] | None = None, token_ids: NDArray[np.uint32] | None = None
    ) -> None:
        del lengths, token_ids
        for start in range(0, len(vectors), BLOCK):
            write_codes(self._files, self._codec.scalar, np.asarray(vectors[start : start + BLOCK], np.float32))
        self._count += len(vectors)

    def copy(self, segment: DenseSegment, keep: Bitmap) -> None:
        """Append the rows of a segment that are kept, (P,)."""
        segment.copy(self._files, keep)
        self._count += int(np.count_nonzero(keep))

    def close(self) -> Mapping[str, str]:
        written = self._files.close()
        store = RefineStore(self._codec.scalar, Files.written(self._folder, self._disk), self._count)
        write_index(self._codec.index_of(store), self._folder / _INDEX, self._disk)
        return {**written, _INDEX: f"FAISS's index {self._codec.factory} of the vectors"}


@with_config(RECORD)
@dataclass(frozen=True)
class _Description:
    """Width, factory string and bits of a codec, as stored with it."""

    dim: Positive
    factory: str
    bits: Bits


class _FaissCodec:
    """See `quiver.retrieval.index.engines.Codec`; made by `train` or `open_codec`."""

    name = FAISS_DENSE

    def __init__(self, factory: str, trained: Any, scalar: ScalarCoding) -> None:
        self.factory = factory
        self.scalar = scalar
        self._trained = trained
        self._presets = Presets(search_settings(trained), lists_of(trained))

    @property
    def dim(self) -> int:
        return self.scalar.dim

    @property
    def parameters(self) -> Mapping[str, Setting]:
        return {"factory": self.factory, "bits": self.scalar.bits}

    def save(self, folder: Path, disk: Disk) -> Mapping[str, str]:
        described = _Description(self.scalar.dim, self.factory, self.scalar.bits)
        write_file(folder / _JSON, (json.dumps(asdict(described)) + "\n").encode(), disk)
        write_index(self._trained, folder / _TRAINED, disk)
        written = {_JSON: "width, factory string and bits of a final code", _TRAINED: "FAISS's index, trained and empty"}
        return {**written, **save_scalar(self.scalar, folder, disk)}

    def memory(self, rows: int, vectors: int) -> int:
        """Maximum memory in bytes for writing or merging a segment: the index of its vectors, which FAISS copies when it grows."""
        del vectors
        return 2 * (index_bytes(self._trained) + rows * self._bytes_a_vector) + 4 * _COPIES * BLOCK * self.scalar.dim + _BUFFERS

    def writer(self, folder: Path, disk: Disk) -> _FaissWriter:
        return _FaissWriter(self, folder, disk)

    def open(self, files: Files, rows: int) -> DenseSegment:
        store = RefineStore(self.scalar, files, rows)
        return DenseSegment(store, _FaissFinder(files, store))

    def merge(self, parts: Sequence[tuple[DenseSegment, Bitmap]], folder: Path, disk: Disk) -> Mapping[str, str]:
        writer = self.writer(folder, disk)
        for segment, keep in parts:
            writer.copy(segment, keep)
        return writer.close()

    def preset_params(self, preset: Preset, *, k: int) -> DenseParams:
        return self._presets.params(preset, k)

    def param_grid(self, k: int, *, documents: int) -> Sequence[DenseParams]:
        return self._presets.grid(k, documents=documents)

    def index_of(self, store: RefineStore) -> Any:
        """The index of the vectors of a refine store."""
        index = _faiss.clone_index(self._trained)
        with one_thread():
            for start in range(0, len(store), BLOCK):
                add_vectors(index, store.decode(slice(start, start + BLOCK)), self.factory)
        return index

    @property
    def _bytes_a_vector(self) -> int:
        """What the index takes for one more vector, about."""
        part = parts_of(self._trained)[-1]
        if isinstance(part, _faiss.IndexIVF):
            return int(part.code_size) + 8  # and its number
        if isinstance(part, _faiss.IndexHNSW):
            # Twice M neighbours on the ground floor, some more above, each of four bytes.
            return int(part.storage.sa_code_size()) + 4 * int(part.hnsw.nb_neighbors(0)) * 2
        return int(part.sa_code_size()) if hasattr(part, "code_size") else 8 * self.scalar.dim


def train(sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int) -> _FaissCodec:
    """Train the codec of ``faiss-dense``; see `quiver.retrieval.index.engines.train_codec`."""
    del documents, vectors
    chosen = FactorySettings.parse(settings)
    factory = chosen.factory
    index = make_index(factory, card.dim)
    scalar = ScalarCoding.learn(sample.vectors, chosen.bits)
    decoded = np.empty_like(sample.vectors)  # what the index will hold
    for start in range(0, len(decoded), BLOCK):
        decoded[start : start + BLOCK] = scalar.decode(*scalar.encode(sample.vectors[start : start + BLOCK]))
    with one_thread():  # several of them add in another order in every run
        train_index(index, MatrixRows(decoded), factory, seed=seed)
        tried = _faiss.clone_index(index)
        for half in np.array_split(decoded[:_TRIED], 2):
            add_vectors(tried, half, factory)
    return _FaissCodec(factory, index, scalar)


def check_settings(settings: Mapping[str, Setting], card: ModelCard) -> None:
    """Check settings of ``faiss-dense``; see `quiver.retrieval.index.engines.Engine`."""
    make_index(FactorySettings.parse(settings).factory, card.dim)


def open_codec(folder: Path) -> _FaissCodec:
    """Open a saved codec; the caller has verified its checksums."""
    described = read_description(_Description, folder / _JSON)
    path = folder / _TRAINED
    trained = read_index(map_array(path, np.uint8, (-1,)), path)
    if (trained.ntotal, trained.d) != (0, described.dim):
        raise DamagedIndexError(f"{path}: not an empty index of width {described.dim}; run quiver index repair")
    return _FaissCodec(described.factory, trained, open_scalar(folder, described.dim, described.bits))


ENGINES = {FAISS_DENSE: Engine("dense", train, open_codec, sample_size, setting_names(FactorySettings), check_settings)}
"""The engine of this module; see `quiver.retrieval.index.engines.ENGINE_MODULES`."""
