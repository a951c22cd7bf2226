"""This machine, timed for some seconds on the model and texts of a plan: encoding as a build does it, training, writing.

Shapes: B documents of a chunk, n vectors of the sample.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from quiver.encoder.errors import InputError
from quiver.retrieval.index.disk import REAL
from quiver.retrieval.index.engine_table import engine, train_codec
from quiver.retrieval.index.engines import Sample, Setting
from quiver.retrieval.index.segments import SegmentFolderWriter
from quiver.retrieval.index.source import Encoded, encode, joined
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import clean
from quiver.retrieval.planning.rates import Rates
from quiver.retrieval.progress import progress_bar
from quiver.retrieval.records import Document

CHUNK = 512
"""Documents that are encoded together, as in a build: their order by length decides how full batches are."""

# Documents that are encoded before the clock starts: torch makes what it keeps.
_WARM = 8


def text_lengths(model: BiEncoder | ColBERT, texts: Sequence[str]) -> tuple[float, float]:
    """Tokens of a text on average after truncation, special tokens in, and the share of them that has a vector; nothing is encoded.

    Args:
        model: Its tokenizer, prompts and lengths count.
        texts: Documents, at least one.
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
    """Encode documents until the time is up, and index what was encoded in a folder that goes away.

    Args:
        model: Encodes them.
        sample: Documents like those of the corpus; gone through once, and again if there is time.
        name: The engine that is planned.
        settings: Of the engine.
        seconds: For encoding; indexing comes on top, a fraction of it.
        use_title: Titles are encoded too.
        progress: Show a bar over the seconds.

    Raises:
        InputError: The sample is empty, or has no vector.
    """
    if not sample:
        raise InputError("there are no documents to measure with")
    encode(model, sample[:_WARM], use_title=use_title)
    parts: list[tuple[Sequence[Document], Encoded]] = []
    spent, tokens, first = 0.0, 0, 0
    with progress_bar("seconds", round(seconds), enabled=progress) as advance:
        while spent < seconds:
            chunk = sample[first : first + CHUNK]
            started = time.perf_counter()
            encoded = encode(model, chunk, use_title=use_title)
            taken = time.perf_counter() - started
            spent, tokens = spent + taken, tokens + int(encoded.tokens.tokens.sum())
            if len(parts) * CHUNK < len(sample):
                parts.append((chunk, encoded))
            first = first + CHUNK if first + CHUNK < len(sample) else 0
            advance(round(taken))
    rates = _indexing(model, parts, name, settings)
    where = f"measured here: {tokens:,} tokens in {spent:.1f} s"
    return Rates(tokens / spent, rates.index_seconds, rates.train_seconds, True, where)


def _indexing(
    model: BiEncoder | ColBERT, parts: Sequence[tuple[Sequence[Document], Encoded]], name: str, settings: Mapping[str, Setting]
) -> Rates:
    whole = joined([encoded for _, encoded in parts])
    if not len(whole.vectors):
        raise InputError("none of the documents has a vector; there is nothing to measure")
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
