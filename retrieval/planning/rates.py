"""Encoding and indexing rates: measured by benchmarks or on this machine, or estimated from the arithmetic of a GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from quiver.encoder import EncoderConfig
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.retrieval.index.disk import REAL
from quiver.retrieval.index.engine_table import engine, train_codec
from quiver.retrieval.index.engines import Sample, Setting
from quiver.retrieval.index.segments import SegmentFolderWriter
from quiver.retrieval.index.source import Encoded, encode, joined
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import clean
from quiver.retrieval.progress import progress_bar
from quiver.retrieval.records import Document

SCHEMA = "quiver-benchmark/1"
"""``schema`` of the files that rates are read from."""

OWN = "quiver"

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

    def filled(self, other: Rates) -> Rates:
        """Fill in unknown rates from another source."""
        known = self.tokens_per_second is not None
        return Rates(
            self.tokens_per_second if known else other.tokens_per_second,
            self.index_seconds if self.index_seconds is not None else other.index_seconds,
            self.train_seconds if self.train_seconds is not None else other.train_seconds,
            self.measured if known else other.measured,
            "; ".join(filter(None, dict.fromkeys((self.source, other.source)))),
        )


def read_rates(paths: Sequence[Path], *, tokens: float, kind: str) -> Rates:
    """Read rates from benchmark results.

    Args:
        paths: Output of ``quiver bench encoder --json`` and ``quiver bench index --json``, or their results.json.
        tokens: Mean number of tokens per document; texts of the nearest length are used.
        kind: ``dense`` or ``colbert``; index builds of the other kind are refused.

    Raises:
        InputError: A file cannot be read, or is not a benchmark result.
    """
    rates = Rates()
    for path in paths:
        content = read_json(path)
        try:
            if content["schema"] != SCHEMA:
                raise ValueError(f"the schema is {content['schema']!r}, not {SCHEMA!r}")
            found = READERS[content["subject"]](content, tokens, kind)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise InputError(f"{path}: not what quiver bench encoder --json or quiver bench index --json writes ({error!r})") from error
        rates = rates.filled(replace(found, source=f"{path.name}: {found.source}"))
    return rates


def _encoder(content: dict[str, Any], tokens: float, kind: str) -> Rates:
    del kind
    speeds = {
        case["name"]: row["series"].get("tokens_per_second") for case in content["cases"] for row in case["rows"] if row["backend"] == OWN
    }
    lengths = {case["name"]: case["facts"]["tokens"] / case["facts"]["documents"] for case in content["cases"] if speeds.get(case["name"])}
    chosen = min(lengths, key=lambda name: abs(lengths[name] - tokens))
    source = f"{content['name']} on {content['processor']}, {chosen}, {lengths[chosen]:.0f} tokens per document"
    return Rates(tokens_per_second=float(speeds[chosen]["median"]), source=source)


def _index(content: dict[str, Any], tokens: float, kind: str) -> Rates:
    del tokens
    builds = next(case["rows"] for case in content["cases"] if case["name"] == "build")
    ours = [row for row in builds if row["values"]["library"] == OWN]
    if content["facts"]["kind"] != kind or not ours:
        raise ValueError(f"it contains no index build of {kind} vectors")
    # A build with a codec says more of large ones than an exact one, which only copies.
    slowest = max(ours, key=lambda row: float(row["values"]["seconds"]))
    vectors = int(content["facts"]["vectors"])
    source = f"{slowest['backend']} of {vectors:,} vectors on {content['processor']}"
    return Rates(index_seconds=float(slowest["values"]["seconds"]) / vectors, source=source)


READERS = {"encoder": _encoder, "index": _index}
"""Subject of a benchmark -> function that reads its rates."""


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
        raise InputError(f"--gpu must be one of {', '.join(DEVICES)}, got {device!r}; or measure, with --measure or --rates")
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
    """Mean number of tokens per text after truncation, and the share of them that have a vector. Nothing is encoded.

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
        raise InputError("the sample has no documents to measure with")
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
