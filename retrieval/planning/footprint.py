"""What an engine's index takes on the disk, in memory to be built and in memory to be searched: its own formulas, before there is one.

A bi-encoder's index has one vector a document, T = P; of a ColBERT's vectors one in ``pool_factor`` is kept. Sizes are chosen as the
engines choose them (`quiver.retrieval.index.dense.settings.sizes`, `quiver.retrieval.index.tokens.settings.default_centroids`).

    exact-dense     disk 4 d T
    pq-dense        disk T (ceil(M / 2) + d bits / 8 + 4), lists in memory T (ceil(M / 2) + 8)                    M = ceil(d / dsub)
    ivf-dense       as pq-dense, 2 bytes a vector more for its list; K lists, with 16 places each unused on average
    exact-tokens    disk 4 d T + 8 P
    ivf-tokens      disk T (d / 8 + 2 + d bits / 8 + 2) + 4 P, lists in memory T (d / 8 + 8) + 16 K d / 8 + 9 P
    every engine    ids and what tokenising did P (28 + bytes of an id), texts P (8 + bytes of a line)

Shapes: P documents, T vectors, d width, K lists, M codebooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from quiver.encoder.errors import InputError
from quiver.retrieval.index.dense import settings as dense
from quiver.retrieval.index.documents.table import DESCRIBED_COPIES, DOCUMENT_BYTES
from quiver.retrieval.index.engine_table import engine, engine_name
from quiver.retrieval.index.engines import Setting
from quiver.retrieval.index.quantization import CODEWORDS, FastScanLists
from quiver.retrieval.index.tokens import settings as tokens
from quiver.retrieval.index.tokens.coding import WINDOW
from quiver.retrieval.index.tokens.segment import CODED_DIMENSIONS
from quiver.retrieval.planning.corpora import Corpus
from quiver.retrieval.records import ModelCard

# Of each document: the end of its id, its hash, row and rank; what tokenising did; the end of its line.
_ID, _TOKENS, _LINE = 8 + 8 + 4 + 4, 4, 8
# What writers hold whatever they write: the buffers of their files, and so many float32 copies of a block of vectors.
_BUFFERS = 4 << 20
_COPIES = 8
_BLOCKS = {"dense": 4096, "colbert": 16_384}


class Sizes(NamedTuple):
    """What an engine's formulas give.

    Attributes:
        disk: Bytes of codes or vectors.
        resident: Bytes of what is made in memory when it is first searched.
        codec: Bytes of what all segments share.
        lists: K; 0 without lists.
        sample: Vectors that are learned from.
        merging: Bytes that merging a document's vectors into fewer takes.
    """

    disk: float
    resident: float
    codec: float = 0
    lists: int = 0
    sample: int = 0
    merging: int = 0


@dataclass(frozen=True)
class Footprint:
    """What an index takes, in bytes.

    Attributes:
        engine: The engine, ``auto`` resolved.
        vectors: Number of vectors that are kept, T.
        lists: Inverted lists K; 0 without.
        sample: Vectors that its codec is trained on.
        disk_vectors: Codes or vectors, with the codec.
        disk_ids: Ids, hashes, and what tokenising did.
        disk_texts: Stored texts; 0 without.
        search_resident: Lists that are made in memory when it is first searched, and stay.
        search_codec: What all segments share, in memory.
        search_mapped: Vectors in files that the system keeps in memory as far as they are used.
        build_peak: Held by a build beside the model, one segment at a time, within its budget.
        segments: Segments that the budget makes.
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
        """All files."""
        return self.disk_vectors + self.disk_ids + self.disk_texts

    @property
    def search(self) -> float:
        """Memory in which nothing is read from a disk twice, texts left out."""
        return self.search_resident + self.search_codec + self.search_mapped + self.disk_ids


def footprint(
    corpus: Corpus,
    card: ModelCard,
    *,
    name: str = "auto",
    settings: Mapping[str, Setting] | None = None,
    memory: int = 2 << 30,
    texts: bool = True,
) -> Footprint:
    """What an index of a corpus takes.

    Args:
        corpus: The documents.
        card: The model: its kind and its width.
        name: The engine.
        settings: Of the engine.
        memory: Budget of the build.
        texts: Texts are stored.

    Raises:
        InputError: There is no such engine for the model, a setting is wrong, or the engine's size follows from nothing but itself.
    """
    given, chosen = dict(settings or {}), engine_name(name, card, corpus.documents)
    engine(chosen, card).check(given, card)
    if chosen not in SIZES:
        raise InputError(f"the size of {chosen} is FAISS's to say; plan with {', '.join(SIZES)}")
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


def _vectors(corpus: Corpus, card: ModelCard, settings: Mapping[str, Setting]) -> int:
    if card.kind == "dense":
        return corpus.documents
    factor = settings.get("pool_factor", 1)
    return round(corpus.documents * corpus.tokens * corpus.kept) // int(factor or 1)


def _exact_dense(corpus: Corpus, dim: int, settings: Mapping[str, Setting]) -> Sizes:
    del settings
    return Sizes(4.0 * dim * corpus.documents, 0)


def _exact_tokens(corpus: Corpus, dim: int, settings: Mapping[str, Setting]) -> Sizes:
    del settings
    return Sizes(corpus.documents * (4 * dim * corpus.tokens * corpus.kept + 8), 0)


def _scan(corpus: Corpus, dim: int, settings: Mapping[str, Setting]) -> Sizes:
    chosen = dense.ScanSettings.parse(settings)
    return _codes(corpus.documents, dim, chosen.dsub or dense.coordinates(dim), chosen.bits, lists=1)


def _lists(corpus: Corpus, dim: int, settings: Mapping[str, Setting]) -> Sizes:
    chosen = dense.ListSettings.parse(settings)
    return _codes(corpus.documents, dim, chosen.dsub, chosen.bits, lists=chosen.nlist or dense.sizes(corpus.documents).lists)


def _codes(documents: int, dim: int, dsub: int, bits: int, *, lists: int) -> Sizes:
    codebooks = -(-dim // dsub)
    record = -(-codebooks // 2) + (0 if lists == 1 else 2) + dim * bits // 8 + 4
    resident = FastScanLists.nbytes(documents, codebooks=codebooks, lists=lists)
    codec = 4 * codebooks * dsub * (lists + CODEWORDS) + 8 * dim
    return Sizes(float(record) * documents, float(resident), codec, 0 if lists == 1 else lists, dense.sample_size(documents))


def _tokens(corpus: Corpus, dim: int, settings: Mapping[str, Setting]) -> Sizes:
    chosen = tokens.TokenSettings.parse(settings)
    whole = round(corpus.documents * corpus.tokens * corpus.kept)
    vectors = whole // chosen.pool_factor
    lists = chosen.centroids or tokens.default_centroids(max(1, vectors))
    number = 2 if lists <= 1 << 16 else 4
    disk = vectors * (dim / 8 + number + dim * chosen.bits / 8 + 2) + 4 * corpus.documents
    resident = FastScanLists.nbytes(vectors, codebooks=dim // CODED_DIMENSIONS, lists=lists) + 9 * corpus.documents
    pairs = 8 * WINDOW * WINDOW * _COPIES if chosen.pool_factor > 1 else 0
    return Sizes(disk, float(resident), 2 * lists * dim + 4 * CODEWORDS * dim, lists, tokens.sample_size(whole), pairs)


SIZES: dict[str, Callable[[Corpus, int, Mapping[str, Setting]], Sizes]] = {
    "exact-dense": _exact_dense,
    "pq-dense": _scan,
    "ivf-dense": _lists,
    "exact-tokens": _exact_tokens,
    "ivf-tokens": _tokens,
}
"""Engine -> its formulas, of a corpus, the width of a vector and the settings."""
