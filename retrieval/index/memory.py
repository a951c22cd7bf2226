"""In-memory indexes: same engines, documents and search as an index in a folder.

`index_vectors` indexes existing vectors, such as those of the embedding store; the exact engines use them without a copy.
`build_in_memory` is ``build_index`` without ``out``: it encodes documents and keeps their texts and metadata.

Shapes: P documents, T vectors of all documents, d vector width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.progress import progress_bar
from quiver.retrieval.data.entries import checked_document, unique
from quiver.retrieval.index.documents import DocumentTable, FieldCheck, IdTable, OpenSegment, SegmentFolderWriter, open_segment
from quiver.retrieval.index.engines import (
    EXACT_DENSE,
    EXACT_TOKENS,
    WORDS,
    AnyCodec,
    AnySegment,
    EngineSpec,
    Sample,
    clustering_on,
    engine,
    engine_name,
    parse_engine,
    train_codec,
)
from quiver.retrieval.index.exact import ROWS, ExactSegment, largest_norm
from quiver.retrieval.index.files import Files, MemoryDisk
from quiver.retrieval.index.index import IndexReader
from quiver.retrieval.index.pieces import BuildOptions, Encoded, Model, concatenate_encoded, encode, survey
from quiver.retrieval.index.ranking import LIMITS, document_blocks, token_rows
from quiver.retrieval.index.store.reading import CodecEntry, Manifest, Policy, SegmentEntry
from quiver.retrieval.models.batches import CPU, device_of
from quiver.retrieval.records import DenseVectors, Document, MatrixRows, ModelCard, Rows, TokenCounts, row_blocks

logger = logging.getLogger(__name__)

MEMORY = Path("(in memory)")
"""Path of an index in memory, in errors and logs."""


def index_vectors(
    ids: Sequence[str],
    vectors: Rows | DenseVectors,
    card: ModelCard,
    *,
    lengths: Sequence[int] | NDArray[np.int64] | None = None,
    engine: str = "exact",
    seed: int = 0,
    read_bytes: int = 256 << 20,
    device: torch.device = CPU,
) -> IndexReader:
    """Index existing vectors in memory.

    Args:
        ids: P document ids.
        vectors: (P, d), or for token vectors (T, d), document after document; their inner product is the similarity. The exact engines
            use them without a copy.
        card: Card of the model that made them; its ``kind`` and ``dim`` decide which engines fit.
        lengths: Token vectors of each document, (P,), zero allowed; None for one vector per document.
        engine: Engine with settings, see `quiver.retrieval.index.engines.parse_engine`.
        seed: Random seed of engines that are trained.
        read_bytes: The exact engines read vectors outside memory completely if they have at most this size in bytes.
        device: Device that searches and trains centroids.

    Raises:
        InputError: The engine or a setting is unknown or does not fit the model; there are no documents, an id is repeated, no document
            has a vector, or a vector is not finite (names the document).
        ValueError: The numbers of ids, lengths and vectors do not match.
    """
    rows = MatrixRows(np.ascontiguousarray(vectors, np.float32)) if isinstance(vectors, np.ndarray) else vectors
    offsets = _check_offsets(ids, rows, lengths)
    spec = parse_engine(engine)
    name = engine_name(spec.name, card, len(ids))
    if rows.shape[1] != card.dim:
        raise ValueError(f"the vectors have the shape {rows.shape}, but the model's vectors have width {card.dim}")
    if not isinstance(rows, MatrixRows) and 4 * rows.shape[0] * rows.shape[1] <= read_bytes:
        rows = MatrixRows(rows.span(0, rows.shape[0]))
    norm = largest_norm(rows)
    blocks = row_blocks(rows, ROWS) if not np.isfinite(norm) else ()
    bad = next((start + int(np.isfinite(block).all(axis=1).argmin()) for start, block in blocks if not np.isfinite(block).all()), None)
    if bad is not None:
        owner = ids[bad if lengths is None else int(np.searchsorted(offsets, bad, side="right")) - 1]
        what = "the vector" if lengths is None else "a token vector"
        raise InputError(f"{what} of document '{owner}' is not finite; check the model")
    with clustering_on(device):
        codec = _train_on_sample(name, spec, rows, offsets, card, dense=lengths is None, seed=seed)
    segment: AnySegment
    if name in (EXACT_DENSE, EXACT_TOKENS):
        segment = ExactSegment(rows, None if lengths is None else offsets, norm, all_exact=False)
    else:
        disk = MemoryDisk()
        with clustering_on(device):
            writer = codec.writer(MEMORY, disk)
            for first, last in document_blocks(offsets, LIMITS.block_rows(rows.shape[1])):
                block_lengths = None if lengths is None else np.diff(offsets[first : last + 1])
                writer.add(rows.span(int(offsets[first]), int(offsets[last])), block_lengths)
            writer.close()
            segment = codec.open(Files.written(MEMORY, disk), len(ids))
    documents = DocumentTable(IdTable.of(ids), None, None, {})
    tokens = TokenCounts(len(ids), 0, 0, 0)
    return _make_reader(card, codec, OpenSegment(documents, segment, None), Policy(store_text=False), tokens).search_on(device)


def build_in_memory(corpus: Iterable[Document], model: Model, options: BuildOptions, *, progress: bool = False) -> IndexReader:
    """Encode documents and index them in memory; see `quiver.retrieval.index.build.build_index`."""
    documents, disk, card = list(map(checked_document, corpus)), MemoryDisk(), model.card
    source = survey(documents, MEMORY / "spool", disk=disk, fields=FieldCheck(options.types, options.on_type_error))
    options = replace(options, types=options.field_types(source.types))
    name = engine_name(options.engine, card, source.count)
    engine(name, card).check(options.settings, card)
    parts: list[tuple[Sequence[Document], Encoded]] = []
    stream = iter(documents)
    chunks = iter(lambda: list(islice(stream, options.pieces.chunk_documents)), [])
    with progress_bar("documents", source.count, enabled=progress) as advance:
        parts.extend(encode(model, chunks, use_title=options.use_title, advance=advance))
    logger.info("%d documents encoded", source.count)
    lengths = np.concatenate([encoded.lengths for _, encoded in parts])
    if not lengths.sum():
        raise InputError(f"none of the documents has a {'word' if name == WORDS else 'vector'}; there is nothing to index")
    chosen = _choose_documents(engine(name, card).sample(int(lengths.sum())), lengths, options.seed)
    sample = _take_sample([encoded for _, encoded in parts], chosen, card)
    vectors, device = int(lengths.sum()), device_of(model)
    with clustering_on(device):
        codec = train_codec(name, sample, card, documents=source.count, vectors=vectors, settings=options.settings, seed=options.seed)
    writer = SegmentFolderWriter(MEMORY, codec, disk, texts=options.store_text, types=options.types)
    parts.reverse()
    while parts:  # release each part after writing it, so that the vectors are not in memory twice
        chunk, encoded = parts.pop()
        with clustering_on(device):
            writer.add(chunk, encoded.vectors, None if card.kind == "dense" else encoded.lengths, encoded.token_ids, encoded.tokens)
        del encoded
    contents = writer.close()
    segment = open_segment(Files.written(MEMORY, disk), codec, source.count, policy := options.policy)
    return _make_reader(card, codec, segment, policy, contents.tokens).search_on(device)


def _check_offsets(ids: Sequence[str], rows: Rows, lengths: Sequence[int] | NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Check ids and lengths; return the first vector of each document, and T, (P + 1,)."""
    count = rows.shape[0] if lengths is None else len(lengths)
    if len(ids) != count:
        raise ValueError(f"{len(ids)} ids for the vectors of {count} documents")
    if not count:
        raise InputError("an index needs at least one document, got none")
    for _ in unique(lambda: ((None, Document(key, "")) for key in ids)):  # raises at the end
        pass
    if lengths is None:
        return np.arange(count + 1)
    offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
    if offsets[-1] != rows.shape[0] or np.min(lengths) < 0:
        raise ValueError(f"the lengths of the documents add up to {offsets[-1]} vectors, but the vectors have the shape {rows.shape}")
    if not rows.shape[0]:
        raise InputError("none of the documents has a vector; there is nothing to index")
    return offsets


def _train_on_sample(
    name: str, spec: EngineSpec, rows: Rows, offsets: NDArray[np.int64], card: ModelCard, *, dense: bool, seed: int
) -> AnyCodec:
    """Train the codec of an engine on documents chosen at random."""
    chosen_engine = engine(name, card)
    chosen_engine.check(spec.settings, card)
    lengths = np.diff(offsets)
    chosen = _choose_documents(chosen_engine.sample(rows.shape[0]), lengths, seed)
    sample = Sample(rows.take(token_rows(offsets, chosen)), None if dense else lengths[chosen])
    return train_codec(name, sample, card, documents=len(lengths), vectors=rows.shape[0], settings=spec.settings, seed=seed)


def _choose_documents(vectors: int, lengths: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Choose documents at random with at least ``vectors`` vectors in total, or all documents; their numbers, ascending."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    enough = int(np.searchsorted(np.cumsum(lengths[order]), vectors)) + 1 if vectors else 0
    chosen: NDArray[np.int64] = np.sort(order[:enough])
    return chosen


def _take_sample(parts: Sequence[Encoded], chosen: NDArray[np.int64], card: ModelCard) -> Sample:
    """The vectors of chosen documents."""
    if not len(chosen):
        return Sample(np.zeros((0, card.dim), np.float32))
    selected, first = [], 0
    for part in parts:
        low, high = np.searchsorted(chosen, [first, first + len(part.lengths)])
        selected.append(part.select(chosen[low:high] - first))
        first += len(part.lengths)
    sample = concatenate_encoded(selected)
    return Sample(sample.vectors, None if card.kind == "dense" else sample.lengths, sample.token_ids)


def _make_reader(card: ModelCard, codec: AnyCodec, segment: OpenSegment, policy: Policy, tokens: TokenCounts) -> IndexReader:
    documents, vectors = len(segment.documents), int(segment.vectors.lengths.sum())
    entry = SegmentEntry(str(MEMORY), documents, vectors, tokens, {}, None)
    manifest = Manifest(0, "", "build", {}, card, policy, CodecEntry(codec.name, "", codec.parameters, {}), (entry,))
    return IndexReader(MEMORY, manifest, codec, [segment])
