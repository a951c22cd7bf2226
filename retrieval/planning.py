"""Estimate an index before it is built: tokens, hours, disk, memory, shards and cost, each by one formula of `FORMULAS`.

Shapes: P documents, T vectors, d width, K inverted lists, M codebooks. A bi-encoder has T = P; a ColBERT model has a vector for every token
that is not punctuation, of which an index stores one in ``pool_factor``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from quiver.encoder import EncoderConfig
from quiver.encoder.errors import InputError
from quiver.retrieval.index.dense import settings as dense
from quiver.retrieval.index.engines import Setting, engine, engine_name
from quiver.retrieval.index.quantization import CODEWORDS, FastScanLists
from quiver.retrieval.index.tokens import settings as tokens
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.records import Document, ModelCard

FORMULAS = {
    "tokens": "documents x tokens per document after truncation. From a sample: counted by the model's tokenizer. From words: "
    "E[min(X, L)] for a log-normal X with mean 1.35 words + 2, standard deviation 0.5 of its logarithm, and the model's length L",
    "vectors": "documents (bi-encoder); tokens x share without punctuation (0.9 without a sample) / pool_factor (ColBERT)",
    "encoding hours": "tokens / tokens per second / 3600 / devices; of a GPU: "
    "30 % of its peak / (2 operations per matrix weight + attention)",
    "disk": "vectors + codec + ids (28 bytes and the id per document) + texts (8 bytes and the line per document). A vector takes "
    "4d (exact), d/dsub/2 + d bits/8 + 4 [+ 2] (pq-dense, [ivf-dense]), d/8 + 2 + d bits/8 + 2 (ivf-tokens)",
    "memory to build": "model + the smaller of --memory and 8d bytes per training vector + 256 bytes per document + 3 codecs",
    "memory to search": "model + lists in memory (codes + 8 bytes per vector, 16 unused slots per list) + memory-mapped vectors + ids; "
    "less is enough with a fast disk, but the lists must fit",
    "shards": "ceil(memory of the index / (0.9 memory of a machine - model))",
    "cost": "tokens / tokens per second / 3600 x price of a device hour",
}
"""Figure -> its formula."""

DEVICES = {"h200": 989.0, "h100": 989.0, "a100": 312.0, "l40s": 362.0, "l4": 121.0, "rtx4090": 165.0}
"""GPU -> peak throughput in TFLOP/s: bfloat16, dense, float32 accumulation (NVIDIA's data sheets)."""

TEXTS = {
    "arguana": 166.80, "climate-fever": 84.76, "cqadupstack": 129.09, "dbpedia-entity": 49.68, "fever": 84.76, "fiqa": 132.32,
    "hotpotqa": 46.30, "msmarco": 55.98, "nfcorpus": 232.26, "nq": 78.88, "quora": 11.44, "scidocs": 176.19, "scifact": 213.63,
    "trec-covid": 160.77, "webis-touche2020": 292.37,
}  # fmt: skip
"""BEIR collection -> mean number of words per document (arXiv:2104.08663, Table 1)."""

_UTILISATION = 0.3  # share of the peak throughput that an encoder reaches with full batches
_TOKENS_PER_WORD = 1.35  # 1.33 to 1.45 on SciFact and Cranfield with the vocabulary of BERT, less on web texts
_BYTES_PER_WORD = 6.2  # UTF-8, including a space
_ID_BYTES, _LINE_BYTES = 8, 37  # assumed id, and stored line of a document without id, title and text


@dataclass(frozen=True)
class CorpusStatistics:
    """Number of documents P, and means per document: tokens after truncation, with special ones, bytes as stored, bytes of the id.

    ``kept`` is the share of the tokens that have a vector in a ColBERT index, ``source`` where the figures come from.
    """

    documents: int
    tokens: float
    kept: float
    line_bytes: float
    id_bytes: float
    source: str


def statistics_of_words(documents: int, words: float, *, length: int, source: str) -> CorpusStatistics:
    """Estimate the statistics of a corpus from its mean number of words per document and the length of truncation L, in tokens.

    The number of tokens X is log-normal with mean m and standard deviation s of ln X: E[min(X, L)] =
    m F((ln L - u - s^2) / s) + L (1 - F((ln L - u) / s)) with u = ln m - s^2 / 2 and F the normal distribution.
    """
    mean, spread, normal, limit = words * _TOKENS_PER_WORD + 2, 0.5, NormalDist(), math.log(length)
    centre = math.log(mean) - spread**2 / 2
    tokens = mean * normal.cdf((limit - centre - spread**2) / spread) + length * (1 - normal.cdf((limit - centre) / spread))
    return CorpusStatistics(documents, tokens, 0.9, _LINE_BYTES + _ID_BYTES + words * _BYTES_PER_WORD, _ID_BYTES, source)


def statistics_of_sample(documents: int, sample: Sequence[Document], model: BiEncoder | ColBERT, *, source: str) -> CorpusStatistics:
    """Estimate the statistics of a corpus from evenly chosen documents, which are only tokenized; an InputError if there are none."""
    if not sample:
        raise InputError(f"{source}: the sample has no documents")
    texts = [document.content() for document in sample]
    total = sum(map(len, model.tokenize(texts, "document").ids))
    kept = sum(map(len, model.document_token_ids(texts))) / total if isinstance(model, ColBERT) else 1.0
    ids = sum(len(document.id.encode()) for document in sample)
    fields = [(document.title, document.text, *(document.metadata or {}).items()) for document in sample]
    lines = ids + sum(_LINE_BYTES + len(" ".join(map(str, each)).encode()) for each in fields)
    return CorpusStatistics(documents, total / len(texts), kept, lines / len(texts), ids / len(texts), source)


def measure_rate(model: BiEncoder | ColBERT, sample: Sequence[Document], *, seconds: float) -> float:
    """Tokens per second of encoding documents again and again for a time, on this machine; an InputError if there are none."""
    if not sample:
        raise InputError("the sample has no documents; the rate cannot be measured")
    texts = [document.content() for document in sample]
    model.encode_texts(texts[:8], "document")  # compiles and warms up
    read, place, size, begun, spent = 0, 0, 8, time.perf_counter(), 0.0
    while spent < seconds:
        batch = [texts[(place + each) % len(texts)] for each in range(min(size, len(texts)))]
        read, place = read + model.encode_texts(batch, "document").counts.tokens, place + len(batch)
        spent = time.perf_counter() - begun
        # The clock is read between batches: of the size of a build's, unless one would take a quarter of the time.
        size = min(512, max(8, int(len(batch) * seconds / 4 / spent)))
    return read / spent


def estimate_rate(config: EncoderConfig, device: str, *, tokens: float) -> float:
    """Tokens per second of a GPU of `DEVICES` on documents with a mean number of tokens.

    A token takes two operations per matrix weight, and the two products of attention.
    """
    seen = [tokens if window is None else min(tokens, window + 1) for window in map(config.layer_window, range(config.num_layers))]
    operations = sum(2 * _layer_weights(config) + 4 * config.hidden_size * each for each in seen)
    return DEVICES[device] * 1e12 * _UTILISATION / operations


MULTIPROCESSORS = {"t4": 40, "a10": 72, "l4": 58, "rtx3090": 82, "rtx4090": 128, "a100": 108, "h100": 132}
"""GPU that ModernBERT was designed for -> its streaming multiprocessors (arXiv:2412.13663, appendix B; NVIDIA's data sheets)."""

TILE = (128, 256)
"""Block of weights that one multiprocessor works on at a time, in either orientation (appendix B)."""


@dataclass(frozen=True)
class MatrixShape:
    """How a weight matrix of a layer is divided into tiles."""

    name: str
    inputs: int
    outputs: int
    aligned: bool  # both sides are multiples of 64, which tensor cores require
    tiles: int  # in the better orientation
    tile_fill: float  # share of the tiles that holds weights
    last_wave: dict[str, float]  # GPU -> share of its multiprocessors that the last of several waves of tiles occupies


def matrix_shapes(width: int, mlp: int) -> list[MatrixShape]:
    """Divide the four weight matrices of a layer with a gated MLP into tiles.

    Example:
        >>> [(shape.name, shape.tiles, shape.tile_fill, shape.last_wave["a100"]) for shape in matrix_shapes(768, 1152)]
        [('Wqkv', 54, 1.0, 0.5), ('Wo', 18, 1.0, 0.16666666666666666), ('MLP in', 54, 1.0, 0.5), ('MLP out', 27, 1.0, 0.25)]
    """
    sides = {"Wqkv": (width, 3 * width), "Wo": (width, width), "MLP in": (width, 2 * mlp), "MLP out": (mlp, width)}
    found = []
    for name, (inputs, outputs) in sides.items():
        tiles = min(math.ceil(inputs / high) * math.ceil(outputs / wide) for high, wide in (TILE, TILE[::-1]))
        fill, waves = inputs * outputs / (tiles * math.prod(TILE)), {gpu: (tiles % n or n) / n for gpu, n in MULTIPROCESSORS.items()}
        found.append(MatrixShape(name, inputs, outputs, inputs % 64 == outputs % 64 == 0, tiles, fill, waves))
    return found


def matrix_weights(config: EncoderConfig) -> int:
    """Number of weights of an architecture: embeddings and matrices, without norms and biases; 149 million for modernbert-base."""
    rows = config.vocab_size + (config.max_positions if config.positions == "absolute" else 0)
    return rows * config.hidden_size + config.num_layers * _layer_weights(config)


def _layer_weights(config: EncoderConfig) -> int:
    return 4 * config.hidden_size**2 + (3 if config.mlp == "gated" else 2) * config.hidden_size * config.intermediate_size


@dataclass(frozen=True)
class IndexSize:
    """Size of an index; in bytes unless stated otherwise."""

    engine: str  # ``auto`` resolved
    vectors: int  # number of stored vectors T
    lists: int = 0  # number of inverted lists K
    sample: int = 0  # number of training vectors of the codec
    mapped: float = 0  # codes or vectors, memory-mapped
    codec: float = 0  # shared by all segments
    resident: float = 0  # lists built in memory by the first search
    ids: float = 0  # ids, hashes and token counts
    texts: float = 0
    disk: float = 0  # all files
    search: float = 0  # all that searches read, without texts


def index_size(
    corpus: CorpusStatistics, card: ModelCard, *, name: str = "auto", settings: Mapping[str, Setting] | None = None, texts: bool = True
) -> IndexSize:
    """Compute the size of an index; an InputError for an engine that the model or this function does not know, or a wrong setting."""
    given, chosen, documents = dict(settings or {}), engine_name(name, card, corpus.documents), corpus.documents
    engine(chosen, card).check(given, card)
    whole = documents if card.kind == "dense" else round(documents * corpus.tokens * corpus.kept)
    if chosen in ("exact-dense", "exact-tokens"):
        size = IndexSize(chosen, whole, mapped=4 * card.dim * whole + (0 if card.kind == "dense" else 8 * documents))
    elif chosen in ("pq-dense", "ivf-dense"):
        size = _size_of_codes(chosen, documents, card.dim, given)
    elif chosen == "ivf-tokens":
        size = _size_of_tokens(documents, whole, card.dim, given)
    else:
        raise InputError(f"the size of {chosen} indexes depends on FAISS and is not estimated; choose another engine")
    ids, lines = (28 + corpus.id_bytes) * documents, (8 + corpus.line_bytes) * documents if texts else 0
    disk, search = size.mapped + size.codec + ids + lines, size.mapped + 2 * size.codec + size.resident + ids
    return replace(size, ids=ids, texts=lines, disk=disk, search=search)


def _size_of_codes(name: str, documents: int, dim: int, settings: Mapping[str, Setting]) -> IndexSize:
    lists = 0
    if name == "pq-dense":
        scan = dense.ScanSettings.parse(settings)
        dsub, bits = scan.dsub or dense.coordinates(dim), scan.bits
    else:
        inverted = dense.ListSettings.parse(settings)
        dsub, bits, lists = inverted.dsub, inverted.bits, inverted.nlist or dense.sizes(documents).lists
    codebooks = -(-dim // dsub)
    vector = -(-codebooks // 2) + 2 * bool(lists) + dim * bits // 8 + 4
    resident = FastScanLists.nbytes(documents, codebooks=codebooks, lists=max(1, lists))
    codec = 4 * codebooks * dsub * (max(1, lists) + CODEWORDS) + 8 * dim
    return IndexSize(name, documents, lists, dense.sample_size(documents), vector * documents, codec, resident)


def _size_of_tokens(documents: int, whole: int, dim: int, settings: Mapping[str, Setting]) -> IndexSize:
    chosen = tokens.TokenSettings.parse(settings)
    vectors = whole // chosen.pool_factor
    lists = chosen.centroids or tokens.default_centroids(max(1, vectors))
    mapped = vectors * (dim / 8 + (2 if lists <= 1 << 16 else 4) + dim * chosen.bits / 8 + 2) + 4 * documents
    resident = FastScanLists.nbytes(vectors, codebooks=dim // 4, lists=lists) + 9 * documents
    codec = 2 * lists * dim + 4 * CODEWORDS * dim
    return IndexSize("ivf-tokens", vectors, lists, tokens.sample_size(whole), mapped, codec, resident)


@dataclass(frozen=True)
class Machine:
    """Memory of a machine that searches, and of a build without the model, in bytes; encoding devices, and the price per hour of one."""

    memory: int = 64 << 30
    build_memory: int = 2 << 30
    devices: int = 1
    price: float | None = None


def estimate_index(
    corpus: CorpusStatistics, size: IndexSize, machine: Machine, *, dim: int, weights: int, rate: float | None
) -> dict[str, Any]:
    """Estimate tokens, hours, memory (with one copy of the model of float32 weights, in bytes), shards and cost.

    ``rate`` is the tokens per second of one device. Figures that need a rate or a price are None without it.
    """
    read, model = round(corpus.documents * corpus.tokens), 4 * weights
    hours = None if rate is None else read / rate / 3600
    room = max(1.0, 0.9 * machine.memory - model)
    return {
        "tokens": read,
        "encoding_hours": None if hours is None else hours / machine.devices,
        "build_memory": model + min(machine.build_memory, 8 * dim * size.sample + 256 * corpus.documents + 3 * size.codec),
        "search_memory": model + size.search,
        "shards": max(1, math.ceil(size.search / room)),
        "cost": None if hours is None or machine.price is None else hours * machine.price,
    }
