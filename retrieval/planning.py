"""Estimate an index before it is built: tokens, hours, disk, memory, shards and cost, each by a formula of `FORMULAS`.

Encoding and indexing rates are measured on this machine, or estimated from the arithmetic of a GPU.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from statistics import NormalDist
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from quiver.encoder import EncoderConfig
from quiver.encoder.errors import InputError
from quiver.encoder.progress import progress_bar
from quiver.retrieval.index.dense import settings as dense
from quiver.retrieval.index.documents import DESCRIBED_COPIES, DOCUMENT_BYTES
from quiver.retrieval.index.engines import Sample, Setting, engine, engine_name, train_codec
from quiver.retrieval.index.files import REAL
from quiver.retrieval.index.index import SegmentFolderWriter
from quiver.retrieval.index.pieces import Encoded, encode, joined
from quiver.retrieval.index.quantization import CODEWORDS, FastScanLists
from quiver.retrieval.index.tokens import settings as tokens
from quiver.retrieval.index.tokens.segment import CODED_DIMENSIONS
from quiver.retrieval.index.tokens.token_quantizer import WINDOW
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import clean
from quiver.retrieval.records import Document, ModelCard

DEVICES = {"h200": 989.0, "h100": 989.0, "a100": 312.0, "l40s": 362.0, "l4": 121.0, "rtx4090": 165.0}
"""GPU -> peak arithmetic throughput in TFLOP/s: bfloat16, dense, float32 accumulation.

Source: NVIDIA's data sheets (H100 and H200 SXM, A100, L40S, L4) and the Ada architecture's white paper (RTX 4090).
"""

UTILISATION = 0.3
"""Assumed share of the peak throughput that an encoder reaches with full batches."""


@dataclass(frozen=True)
class Rates:
    """Encoding and indexing rates of a machine.

    Attributes:
        tokens_per_second: Encoding rate for texts of the length of the corpus; None if unknown.
        index_seconds: Time to write one vector into the index, in seconds; None if unknown.
        train_seconds: Time to train the codec, in seconds per training vector and list; None if unknown.
        measured: Whether the encoding rate was measured.
        source: Source of the rates.
    """

    tokens_per_second: float | None = None
    index_seconds: float | None = None
    train_seconds: float | None = None
    measured: bool = True
    source: str = ""


def estimated(config: EncoderConfig, device: str, *, tokens: float) -> Rates:
    """Estimate the encoding rate of a GPU from its peak throughput and the operations per token.

    Args:
        config: Architecture of the encoder.
        device: A key of `DEVICES`.
        tokens: Mean number of tokens per document, for the cost of attention.

    Raises:
        InputError: Unknown GPU.
    """
    if device not in DEVICES:
        raise InputError(f"--gpu must be one of {', '.join(DEVICES)}, got {device!r}; or measure, with --measure")
    speed = DEVICES[device] * 1e12 * UTILISATION / operations(config, tokens)
    return Rates(tokens_per_second=speed, measured=False, source=f"{device}: {DEVICES[device]:.0f} TFLOP/s, {UTILISATION:.0%} of it")


def operations(config: EncoderConfig, tokens: float) -> float:
    """Floating-point operations per token: two per matrix weight, and the two products of attention.

    Example:
        >>> from quiver.encoder import preset
        >>> round(operations(preset("bert-base"), 128) / 1e6)
        175
    """
    width, inner = config.hidden_size, config.intermediate_size
    matrices = 4 * width * width + (3 if config.mlp == "gated" else 2) * width * inner
    seen = [tokens if window is None else min(tokens, window + 1) for window in map(config.layer_window, range(config.num_layers))]
    return sum(2 * matrices + 4 * width * each for each in seen)


CHUNK = 512
"""Documents that are encoded together, as in a build; they are sorted by length, which decides how full batches are."""

_WARM = 8  # documents that are encoded before the measurement, to warm up


def text_lengths(model: BiEncoder | ColBERT, texts: Sequence[str]) -> tuple[float, float]:
    """Mean number of tokens per text after truncation, and the share of these tokens that get a vector; the texts are only tokenized.

    Args:
        model: Model with tokenizer, prompts and lengths.
        texts: One or more documents.
    """
    settings, card = model.settings, model.card
    cleaned = clean(texts, prompt=settings.document_prompt, lower_case=settings.lower_case)
    prefixed = isinstance(model, ColBERT) and bool(settings.colbert.document_prefix)
    ids = model.tokenizer.encode(cleaned, max_length=card.document_length - prefixed).ids
    tokens = sum(map(len, ids)) + prefixed * len(ids)
    kept = sum(map(len, model.document_token_ids(texts))) if isinstance(model, ColBERT) else tokens
    return tokens / len(ids), kept / tokens


def measure(
    model: BiEncoder | ColBERT,
    sample: Sequence[Document],
    *,
    name: str,
    settings: Mapping[str, Setting],
    seconds: float,
    use_title: bool = True,
    progress: bool = False,
) -> Rates:
    """Measure rates: encode documents for a number of seconds, and index them in a temporary folder.

    Args:
        model: The model.
        sample: Documents like those of the corpus; encoded repeatedly if there is time.
        name: Name of the engine.
        settings: Settings of the engine.
        seconds: Duration of encoding in seconds; indexing takes a fraction of it in addition.
        use_title: Encode titles too.
        progress: Show a progress bar over the seconds.

    Raises:
        InputError: The sample is empty, or has no vector.
    """
    if not sample:
        raise InputError("the sample has no documents; rates cannot be measured")
    list(encode(model, [sample[:_WARM]], use_title=use_title))
    started = time.perf_counter()
    list(encode(model, [sample[:_WARM]], use_title=use_title))
    # The clock is read between chunks: on a slow machine a chunk is a quarter of the time.
    size = min(max(int(_WARM * seconds / 4 / (time.perf_counter() - started)), _WARM), CHUNK)
    repeated = (sample[first : first + size] for _ in count() for first in range(0, len(sample), size))
    parts: list[tuple[Sequence[Document], Encoded]] = []
    spent, tokens, started = 0.0, 0, time.perf_counter()
    with (
        progress_bar("seconds", round(seconds), enabled=progress) as advance,
        closing(encode(model, repeated, use_title=use_title)) as done,
    ):
        while spent < seconds:
            chunk, encoded = next(done)
            taken = time.perf_counter() - started - spent
            spent, tokens = spent + taken, tokens + int(encoded.tokens.tokens.sum())
            if len(parts) * size < len(sample):
                parts.append((chunk, encoded))
            advance(round(taken))
    rates = _indexing(model, parts, name, settings)
    where = f"measured here: {tokens:,} tokens in {spent:.1f} s"
    return Rates(tokens / spent, rates.index_seconds, rates.train_seconds, True, where)


def _indexing(
    model: BiEncoder | ColBERT, parts: Sequence[tuple[Sequence[Document], Encoded]], name: str, settings: Mapping[str, Setting]
) -> Rates:
    whole = joined([encoded for _, encoded in parts])
    if not len(whole.vectors):
        raise InputError("no document of the sample has a vector")
    dense, count = model.card.kind == "dense", len(whole.lengths)
    given = Sample(np.ascontiguousarray(whole.vectors), None if dense else whole.lengths, whole.token_ids)
    started = time.perf_counter()
    codec = train_codec(name, given, model.card, documents=count, vectors=len(whole.vectors), settings=settings, seed=0)
    training = time.perf_counter() - started
    parameters = codec.parameters
    lists = int(parameters.get("nlist") or parameters.get("centroids") or 1)
    learned = engine(name, model.card).sample(len(whole.vectors))
    with TemporaryDirectory(prefix="quiver-plan-") as folder:
        started = time.perf_counter()
        writer = SegmentFolderWriter(Path(folder), codec, REAL, texts=True)
        for documents, encoded in parts:
            lengths = None if dense else encoded.lengths
            writer.add(documents, encoded.vectors, lengths, encoded.token_ids, encoded.tokens)
        writer.close()
        writing = time.perf_counter() - started
    return Rates(index_seconds=writing / len(whole.vectors), train_seconds=training / learned / lists if learned else None)


TOKENS_PER_WORD = 1.35
"""Tokens per English word: 1.33 to 1.45 on SciFact and Cranfield with the vocabulary of BERT, less on web texts."""

BYTES_PER_WORD = 6.2
"""UTF-8 bytes per English word, including a space."""

SPREAD = 0.5
"""Standard deviation of the logarithm of the tokens per document; matters only with truncation."""

KEPT = 0.9
"""Share of the tokens of a document that are not punctuation; ColBERT indexes store their vectors."""

SPECIAL = 2
"""Special tokens per text."""

_LINE_BYTES = 37  # stored line of a document without id, title and text
_ID_BYTES = 8  # assumed id

TEXTS = {
    "arguana": 166.80,
    "climate-fever": 84.76,
    "cqadupstack": 129.09,
    "dbpedia-entity": 49.68,
    "fever": 84.76,
    "fiqa": 132.32,
    "hotpotqa": 46.30,
    "msmarco": 55.98,
    "nfcorpus": 232.26,
    "nq": 78.88,
    "quora": 11.44,
    "scidocs": 176.19,
    "scifact": 213.63,
    "trec-covid": 160.77,
    "webis-touche2020": 292.37,
}
"""BEIR collection -> mean number of words per document.

Source: BEIR, arXiv:2104.08663, Table 1.
"""


@dataclass(frozen=True)
class CorpusStatistics:
    """Statistics of a corpus.

    Attributes:
        documents: Number of documents P.
        tokens: Mean number of tokens per document after truncation, including special tokens.
        kept: Share of the tokens that have a vector in a ColBERT index.
        line_bytes: Mean size of a stored document (id, title, text, metadata), in bytes.
        id_bytes: Mean size of an id, in bytes.
        source: Source of the figures.
    """

    documents: int
    tokens: float
    kept: float
    line_bytes: float
    id_bytes: float
    source: str

    def sized(self, documents: int) -> CorpusStatistics:
        """Return the same statistics for another number of documents."""
        return replace(self, documents=documents)


def from_words(documents: int, words: float, *, length: int, source: str) -> CorpusStatistics:
    """Estimate the statistics of a corpus from its words.

    Args:
        documents: Number of documents P.
        words: Mean number of words per document.
        length: Length that documents are truncated to, in tokens.
        source: Source of the figures.
    """
    tokens = truncated_mean(words * TOKENS_PER_WORD + SPECIAL, length)
    return CorpusStatistics(documents, tokens, KEPT, _LINE_BYTES + _ID_BYTES + words * BYTES_PER_WORD, _ID_BYTES, source)


def truncated_mean(mean: float, length: int, *, spread: float = SPREAD) -> float:
    """Mean number of tokens after truncation, for a log-normal number of tokens X: E[min(X, L)].

    Args:
        mean: Mean number of tokens m before truncation.
        length: Length L that documents are truncated to.
        spread: Standard deviation s of ln X.

    Returns:
        m F((ln L - u - s^2) / s) + L (1 - F((ln L - u) / s)) with u = ln m - s^2 / 2 and F the normal distribution.

    Example:
        >>> round(truncated_mean(100, 10_000)), round(truncated_mean(300, 256)), round(truncated_mean(10_000, 256))
        (100, 220, 256)
    """
    normal, centre, limit = NormalDist(), math.log(mean) - spread**2 / 2, math.log(length)
    below = mean * normal.cdf((limit - centre - spread**2) / spread)
    return below + length * (1 - normal.cdf((limit - centre) / spread))


def from_sample(
    documents: int, sample: Sequence[Document], lengths: Callable[[Sequence[str]], tuple[float, float]], *, use_title: bool, source: str
) -> CorpusStatistics:
    """Estimate the statistics of a corpus from a sample of its documents.

    Args:
        documents: Number of documents P.
        sample: One or more documents, chosen evenly.
        lengths: Texts -> mean number of tokens after truncation, and the share of them that have a vector.
        use_title: Whether titles are encoded too.
        source: Source of the sample.

    Raises:
        InputError: The sample is empty.
    """
    if not sample:
        raise InputError(f"{source}: the sample has no documents")
    tokens, kept = lengths([document.content(use_title=use_title) for document in sample])
    lines = [len(_line(document)) for document in sample]
    ids = [len(document.id.encode()) for document in sample]
    return CorpusStatistics(documents, tokens, kept, sum(lines) / len(lines), sum(ids) / len(ids), source)


def spread_over(documents: Iterable[Document], count: int, size: int) -> list[Document]:
    """Choose documents evenly from a corpus of known size.

    Example:
        >>> [each.id for each in spread_over((Document(str(n), "") for n in range(10)), 10, 3)]
        ['0', '3', '6']
    """
    step = max(1, count // max(1, size))
    return list(islice(documents, 0, step * size, step))


def _line(document: Document) -> bytes:
    fields: dict[str, object] = {"_id": document.id, "title": document.title, "text": document.text}
    if document.metadata:
        fields["metadata"] = dict(document.metadata)
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


# Bytes per document: end of its id, hash, row and rank; token counts; end of its line.
_ID, _TOKENS, _LINE = 8 + 8 + 4 + 4, 4, 8
# Memory of writers: buffers of their files, and float32 copies of a block of vectors.
_BUFFERS = 4 << 20
_COPIES = 8
_BLOCKS = {"dense": 4096, "colbert": 16_384}


@dataclass(frozen=True)
class Footprint:
    """Size of an index, in bytes.

    Attributes:
        engine: Name of the engine (``auto`` resolved).
        vectors: Number of stored vectors T.
        lists: Number of inverted lists K; 0 without lists.
        sample: Number of training vectors of the codec.
        disk_vectors: Codes or vectors, with the codec.
        disk_ids: Ids, hashes and token counts.
        disk_texts: Stored texts; 0 without texts.
        search_resident: Lists built in memory by the first search.
        search_codec: Codec in memory.
        search_mapped: Memory-mapped files of vectors.
        build_peak: Peak memory of a build without the model, within its budget.
        segments: Number of segments that the budget gives.
    """

    engine: str
    vectors: int
    lists: int
    sample: int
    disk_vectors: float
    disk_ids: float
    disk_texts: float
    search_resident: float
    search_codec: float
    search_mapped: float
    build_peak: float
    segments: int

    @property
    def disk(self) -> float:
        """Size of all files."""
        return self.disk_vectors + self.disk_ids + self.disk_texts

    @property
    def search(self) -> float:
        """Memory for all data that searches read, without texts."""
        return self.search_resident + self.search_codec + self.search_mapped + self.disk_ids


class EngineSizes(NamedTuple):
    """Sizes of an engine in bytes, by the formulas below.

    Shapes: P documents, T vectors, d width, K lists, M codebooks. A bi-encoder has T = P; of the vectors of a ColBERT model one in
    ``pool_factor`` is stored.

        exact-dense     disk 4 d T
        pq-dense        disk T (ceil(M / 2) + d bits / 8 + 4), lists in memory T (ceil(M / 2) + 8), M = ceil(d / dsub)
        ivf-dense       as pq-dense, with 2 more bytes per vector for its list; K lists, with 16 unused slots each on average
        exact-tokens    disk 4 d T + 8 P
        ivf-tokens      disk T (d / 8 + 2 + d bits / 8 + 2) + 4 P, lists in memory T (d / 8 + 8) + 16 K d / 8 + 9 P
        every engine    ids and token counts P (28 + bytes of an id), texts P (8 + bytes of a line)

    Attributes:
        disk: Codes or vectors.
        resident: Data built in memory by the first search.
        codec: Codec, shared by all segments.
        lists: Number of lists K; 0 without lists.
        sample: Number of training vectors.
        merging: Memory for pooling the vectors of a document.
    """

    disk: float
    resident: float
    codec: float = 0
    lists: int = 0
    sample: int = 0
    merging: int = 0


def footprint(
    corpus: CorpusStatistics,
    card: ModelCard,
    *,
    name: str = "auto",
    settings: Mapping[str, Setting] | None = None,
    memory: int = 2 << 30,
    texts: bool = True,
) -> Footprint:
    """Compute the size of an index.

    Args:
        corpus: Statistics of the corpus.
        card: Card of the model, with its kind and width.
        name: Name of the engine.
        settings: Settings of the engine.
        memory: Memory of the build in bytes, without the model.
        texts: Whether texts are stored.

    Raises:
        InputError: Unknown engine for the model, a wrong setting, or an engine of unknown size.
    """
    given, chosen = dict(settings or {}), engine_name(name, card, corpus.documents)
    engine(chosen, card).check(given, card)
    if chosen not in SIZES:
        raise InputError(f"the size of {chosen} indexes depends on FAISS and is not estimated; choose one of {', '.join(SIZES)}")
    found = SIZES[chosen](corpus, card.dim, given)
    vectors = _vectors(corpus, card, given)
    writing = 3 * found.codec + _BLOCKS[card.kind] * card.dim * 4 * _COPIES + _BUFFERS + found.merging
    merging = writing + corpus.documents * (DOCUMENT_BYTES + DESCRIBED_COPIES * corpus.id_bytes)
    training = 2 * 4 * card.dim * found.sample
    per_document = _ID + corpus.id_bytes + _TOKENS
    return Footprint(
        engine=chosen,
        vectors=vectors,
        lists=found.lists,
        sample=found.sample,
        disk_vectors=found.disk + found.codec,
        disk_ids=per_document * corpus.documents,
        disk_texts=(_LINE + corpus.line_bytes) * corpus.documents if texts else 0,
        search_resident=found.resident,
        search_codec=2 * found.codec,  # centroids of two bytes have four in memory
        search_mapped=found.disk,
        build_peak=min(max(training, merging), max(memory, writing)),
        segments=max(1, -(-int(merging) // memory)),
    )


def _vectors(corpus: CorpusStatistics, card: ModelCard, settings: Mapping[str, Setting]) -> int:
    if card.kind == "dense":
        return corpus.documents
    factor = settings.get("pool_factor", 1)
    return round(corpus.documents * corpus.tokens * corpus.kept) // int(factor or 1)


def _exact_dense(corpus: CorpusStatistics, dim: int, settings: Mapping[str, Setting]) -> EngineSizes:
    del settings
    return EngineSizes(4.0 * dim * corpus.documents, 0)


def _exact_tokens(corpus: CorpusStatistics, dim: int, settings: Mapping[str, Setting]) -> EngineSizes:
    del settings
    return EngineSizes(corpus.documents * (4 * dim * corpus.tokens * corpus.kept + 8), 0)


def _scan(corpus: CorpusStatistics, dim: int, settings: Mapping[str, Setting]) -> EngineSizes:
    chosen = dense.ScanSettings.parse(settings)
    return _codes(corpus.documents, dim, chosen.dsub or dense.coordinates(dim), chosen.bits, lists=1)


def _lists(corpus: CorpusStatistics, dim: int, settings: Mapping[str, Setting]) -> EngineSizes:
    chosen = dense.ListSettings.parse(settings)
    return _codes(corpus.documents, dim, chosen.dsub, chosen.bits, lists=chosen.nlist or dense.sizes(corpus.documents).lists)


def _codes(documents: int, dim: int, dsub: int, bits: int, *, lists: int) -> EngineSizes:
    codebooks = -(-dim // dsub)
    record = -(-codebooks // 2) + (0 if lists == 1 else 2) + dim * bits // 8 + 4
    resident = FastScanLists.nbytes(documents, codebooks=codebooks, lists=lists)
    codec = 4 * codebooks * dsub * (lists + CODEWORDS) + 8 * dim
    return EngineSizes(float(record) * documents, float(resident), codec, 0 if lists == 1 else lists, dense.sample_size(documents))


def _tokens(corpus: CorpusStatistics, dim: int, settings: Mapping[str, Setting]) -> EngineSizes:
    chosen = tokens.TokenSettings.parse(settings)
    whole = round(corpus.documents * corpus.tokens * corpus.kept)
    vectors = whole // chosen.pool_factor
    lists = chosen.centroids or tokens.default_centroids(max(1, vectors))
    number = 2 if lists <= 1 << 16 else 4
    disk = vectors * (dim / 8 + number + dim * chosen.bits / 8 + 2) + 4 * corpus.documents
    resident = FastScanLists.nbytes(vectors, codebooks=dim // CODED_DIMENSIONS, lists=lists) + 9 * corpus.documents
    pairs = 8 * WINDOW * WINDOW * _COPIES if chosen.pool_factor > 1 else 0
    return EngineSizes(disk, float(resident), 2 * lists * dim + 4 * CODEWORDS * dim, lists, tokens.sample_size(whole), pairs)


SIZES: dict[str, Callable[[CorpusStatistics, int, Mapping[str, Setting]], EngineSizes]] = {
    "exact-dense": _exact_dense,
    "pq-dense": _scan,
    "ivf-dense": _lists,
    "exact-tokens": _exact_tokens,
    "ivf-tokens": _tokens,
}
"""Engine -> sizes, from a corpus, the width of a vector and the settings."""


FORMULAS = {
    "tokens": "documents x tokens per document after truncation. From a sample: counted by the model's tokenizer. From words: "
    "E[min(X, L)] for a log-normal X with mean 1.35 words + 2, standard deviation 0.5 of its logarithm, and the model's length L",
    "vectors": "documents (bi-encoder); tokens x share without punctuation / pool_factor (ColBERT)",
    "encoding hours": "tokens / tokens per second / 3600 / devices, with the rate for texts of this length",
    "indexing hours": "(vectors x seconds per vector + training) / 3600 on one machine; "
    "training = seconds per vector and list x sample x lists",
    "disk": "codes or vectors + codec + ids (28 bytes and the id per document) + texts (8 bytes and the line per document). A vector takes "
    "4d (exact), d/dsub/2 + d bits/8 + 4 [+ 2] (pq-dense, [ivf-dense]), d/8 + 2 + d bits/8 + 2 (ivf-tokens); see "
    "quiver.retrieval.planning",
    "memory to build": "model + the larger of twice the training sample and a merge (256 bytes + 12 ids per document + 3 codecs + "
    "8 blocks), split into segments by the budget",
    "memory to search": "model + lists in memory (codes + 8 bytes per vector, 16 unused slots per list) + memory-mapped codes + ids; "
    "less is enough with a fast disk, but the lists must fit",
    "shards": "ceil((lists + codes + ids) / (0.9 memory of a machine - model))",
    "cost": "tokens / tokens per second / 3600 x price of a device hour",
}
"""Figure -> its formula."""

_SYSTEM = 0.1  # share of the memory of a machine for the operating system


@dataclass(frozen=True)
class ModelSize:
    """Size of a model.

    Attributes:
        name: Folder, hub id or preset.
        card: Kind, width and lengths.
        parameters: Number of weights of the encoder.
    """

    name: str
    card: ModelCard
    parameters: int

    @property
    def bytes(self) -> int:
        """Size of the weights in memory, in float32."""
        return 4 * self.parameters


@dataclass(frozen=True)
class Machine:
    """Machines that build and search the index.

    Attributes:
        memory: Memory of a machine that searches, in bytes.
        build_memory: Memory of a build without the model, in bytes.
        devices: Number of devices that encode in parallel.
        price: Price per hour of a device; None if unknown.
    """

    memory: int = 64 << 30
    build_memory: int = 2 << 30
    devices: int = 1
    price: float | None = None


@dataclass(frozen=True)
class Plan:
    """Estimate for an index.

    Attributes:
        corpus: Statistics of the corpus.
        model: Size of the model.
        tokens: Number of tokens of all documents.
        index: Size of the index.
        rates: Rates that hours are computed from.
        encoding_hours: Wall-clock time of encoding in hours; None without a rate.
        indexing_hours: Time of training and writing in hours; None without a rate.
        build_memory: Memory of the build with the model, in bytes.
        search_memory: Memory of all searching processes with one copy of the model, in bytes.
        shards: Number of machines that hold the index in memory.
        cost: Cost of encoding; None without a price or a rate.
    """

    corpus: CorpusStatistics
    model: ModelSize
    tokens: int
    index: Footprint
    rates: Rates
    encoding_hours: float | None
    indexing_hours: float | None
    build_memory: float
    search_memory: float
    shards: int
    cost: float | None

    def to_json(self) -> dict[str, Any]:
        """Return all fields, with the sums of the sizes."""
        content = asdict(self)
        content["index"] |= {"disk": self.index.disk, "search": self.index.search}
        return content


def matrix_weights(config: EncoderConfig) -> int:
    """Number of weights of an architecture: embeddings and matrices, without norms and biases.

    Example:
        >>> from quiver.encoder import preset
        >>> round(matrix_weights(preset("modernbert-base")) / 1e6)
        149
    """
    width, inner = config.hidden_size, config.intermediate_size
    block = 4 * width * width + (3 if config.mlp == "gated" else 2) * width * inner
    rows = config.vocab_size + (config.max_positions if config.positions == "absolute" else 0)
    return rows * width + config.num_layers * block


def make_plan(
    corpus: CorpusStatistics,
    model: ModelSize,
    machine: Machine,
    rates: Rates,
    *,
    engine: str = "auto",
    settings: Mapping[str, Setting] | None = None,
    texts: bool = True,
) -> Plan:
    """Estimate an index.

    Args:
        corpus: Statistics of the corpus.
        model: Size of the model.
        machine: Machines that build and search.
        rates: Encoding and indexing rates.
        engine: Name of the engine.
        settings: Settings of the engine.
        texts: Whether texts are stored.

    Raises:
        InputError: Unknown engine, or a wrong setting.
    """
    index = footprint(corpus, model.card, name=engine, settings=settings, memory=machine.build_memory, texts=texts)
    tokens = round(corpus.documents * corpus.tokens)
    device_hours = None if rates.tokens_per_second is None else tokens / rates.tokens_per_second / 3600
    indexing = None
    if rates.index_seconds is not None:
        training = (rates.train_seconds or 0) * index.sample * max(1, index.lists)
        indexing = (index.vectors * rates.index_seconds + training) / 3600
    room = max(1.0, (1 - _SYSTEM) * machine.memory - model.bytes)
    return Plan(
        corpus=corpus,
        model=model,
        tokens=tokens,
        index=index,
        rates=rates,
        encoding_hours=None if device_hours is None else device_hours / machine.devices,
        indexing_hours=indexing,
        build_memory=model.bytes + index.build_peak,
        search_memory=model.bytes + index.search,
        shards=max(1, math.ceil(index.search / room)),
        cost=None if device_hours is None or machine.price is None else device_hours * machine.price,
    )
