"""Estimates compared with built indexes: disk, memory to build and to search, and hours, within a quarter."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import read_documents
from quiver.retrieval.index import BuildOptions, Index, build_index
from quiver.retrieval.index.documents import DESCRIBED_COPIES, DOCUMENT_BYTES
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import ColBERTSettings, ModelFolder, load_model, load_parts
from quiver.retrieval.models.pooling import Projection
from quiver.retrieval.planning import (
    TEXTS,
    CorpusStatistics,
    Footprint,
    Rates,
    footprint,
    from_sample,
    from_words,
    measure,
    spread_over,
    text_lengths,
)
from quiver.retrieval.records import DenseEncoding, Document, ModelCard, Role, TextTokens, TokenEncoding

WITHIN = 0.25


def close(planned: float, found: float, what: str) -> None:
    assert abs(planned - found) <= WITHIN * found, f"{what}: planned {planned:,.0f}, found {found:,.0f}"


def bytes_of(index: Index, *, vectors: bool | None = None) -> int:
    """Return the bytes of an index's files: of its vectors, of its documents, or of both."""
    sizes = {name: file.bytes for segment in index.manifest.segments for name, file in segment.files.items()}
    described = ("ids", "documents", "metadata")
    chosen = {name: size for name, size in sizes.items() if vectors is None or vectors != name.startswith(described)}
    codec = sum(file.bytes for file in index.manifest.codec.files.values()) if vectors is not False else 0
    return sum(chosen.values()) + codec


def compared(index: Index, planned: Footprint) -> None:
    """Compare all estimates but those of time with an index."""
    assert planned.engine == index.kind
    close(planned.vectors, index.manifest.vectors, "vectors")
    close(planned.disk, bytes_of(index), "disk")
    close(planned.disk_vectors, bytes_of(index, vectors=True), "vectors on the disk")
    close(planned.disk_ids + planned.disk_texts, bytes_of(index, vectors=False), "documents on the disk")
    sizes = [segment.vectors.size for segment in index.segments]
    close(planned.search_mapped, sum(size.mapped for size in sizes), "mapped")
    resident = sum(size.resident for size in sizes)
    if resident:
        close(planned.search_resident, resident, "resident")


class Random:
    """A model with random vectors, a fixed number per word: sizes do not depend on the values."""

    def __init__(self, kind: str, dim: int) -> None:
        self.card = ModelCard(
            "random", "dense" if kind == "dense" else "colbert", "d" * 64, dim, "dot" if kind == "dense" else "maxsim", 32, 180
        )
        self._rng = np.random.default_rng(0)

    def encode_texts(self, texts: list[str], role: Role, *, progress: bool = False) -> Any:
        lengths = [len(text.split()) for text in texts]
        tokens = TextTokens(np.array(lengths, np.int32), np.zeros(len(texts), bool), np.zeros(len(texts), bool))
        if self.card.kind == "dense":
            return DenseEncoding(self._unit(len(texts)), tokens)
        return TokenEncoding([self._unit(length) for length in lengths], tokens)

    def _unit(self, count: int) -> Any:
        vectors = self._rng.standard_normal((count, self.card.dim)).astype(np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def texts(count: int) -> list[Document]:
    rng = np.random.default_rng(1)
    return [Document(f"doc-{n}", " ".join(["word"] * int(size))) for n, size in enumerate(rng.integers(5, 25, count))]


@pytest.mark.parametrize(
    ("engine", "settings", "width"),
    [
        ("exact-dense", {}, 64),
        ("pq-dense", {}, 64),
        ("pq-dense", {}, 384),
        ("pq-dense", {"dsub": 4, "bits": 16}, 64),
        ("ivf-dense", {"nlist": 16}, 64),
        ("exact-tokens", {}, 64),
        ("ivf-tokens", {}, 64),
        ("ivf-tokens", {"bits": 2, "pool_factor": 2}, 64),
    ],
)
def test_the_size_of_every_engine_is_estimated(tmp_path: Path, engine: str, settings: Mapping[str, Any], width: int) -> None:
    model, corpus = Random("dense" if engine.endswith("dense") else "colbert", width), texts(800)
    options = BuildOptions(engine=engine, settings=settings, calibrate=False)
    index = build_index(corpus, model, tmp_path / "i", options=options)
    sample = spread_over(iter(corpus), len(corpus), 200)
    known = from_sample(
        len(corpus), sample, lambda given: (sum(len(each.split()) for each in given) / len(given), 1.0), use_title=True, source="x"
    )
    planned = footprint(known, model.card, name=engine, settings=settings)
    compared(index, planned)
    held = index.codec.memory(len(corpus), index.manifest.vectors)
    if planned.sample:  # writers of exact indexes hold a few megabytes, whatever they write
        described = DOCUMENT_BYTES * len(corpus) + DESCRIBED_COPIES * sum(len(document.id) for document in corpus)
        close(planned.build_peak, max(held + described, 2 * 4 * width * planned.sample), "to build")


def real(model: BiEncoder | ColBERT, corpus: list[Document]) -> CorpusStatistics:
    sample = spread_over(iter(corpus), len(corpus), 256)
    return from_sample(len(corpus), sample, lambda given: text_lengths(model, given), use_title=True, source="scifact")


@pytest.fixture
def small_colbert(minilm: Path, tmp_path: Path) -> ColBERT:
    """ColBERT model on the first layer of all-MiniLM-L6-v2: real tokens, fast to encode."""
    parts = load_parts(minilm)
    settings = ModelFolder("colbert", minilm, projections=(Projection(384, 32),), similarity="maxsim",
                           colbert=ColBERTSettings(query_prefix="", document_prefix="", document_length=100))  # fmt: skip
    del parts.encoder.layers[1:]
    return ColBERT.from_parts(parts.encoder.eval(), parts.tokenizer, settings)


@pytest.mark.data
def test_estimates_of_tokens_and_bytes_fit_real_texts(quiver_data: Path, minilm: Path) -> None:
    """SciFact without encoding: a sample gives the statistics of the corpus, and the number of words comes close."""
    model, corpus = load_model(minilm), list(islice(read_documents(quiver_data / "scifact"), 1500))
    planned = real(model, corpus)
    tokens, _ = text_lengths(model, [document.content() for document in corpus])
    assert abs(planned.tokens - tokens) < 0.03 * tokens
    words = from_words(len(corpus), TEXTS["scifact"], length=model.max_length, source="")
    close(words.tokens, tokens, "tokens from words")
    close(words.line_bytes, planned.line_bytes, "bytes of a line from words")


@pytest.mark.exhaustive
@pytest.mark.data
def test_estimated_sizes_fit_a_real_index(quiver_data: Path, minilm: Path, small_colbert: ColBERT, tmp_path: Path) -> None:
    """One layer of a real model over SciFact: disk and memory of both kinds."""
    corpus = list(islice(read_documents(quiver_data / "scifact"), 3000))
    parts = load_parts(minilm)
    del parts.encoder.layers[1:]
    dense = BiEncoder.from_parts(parts.encoder.eval(), parts.tokenizer, parts.settings)
    models: list[tuple[BiEncoder | ColBERT, str]] = [(dense, "pq-dense"), (small_colbert, "ivf-tokens")]
    for model, engine in models:
        known = real(model, corpus)
        compared(
            build_index(corpus, model, tmp_path / engine, options=BuildOptions(engine=engine, calibrate=False)),
            footprint(known, model.card, name=engine),
        )


@pytest.mark.exhaustive
@pytest.mark.data
def test_estimated_hours_fit_a_real_index(quiver_data: Path, minilm: Path, tmp_path: Path) -> None:
    """The build time for 1,500 documents with all-MiniLM-L6-v2 is estimated from measurements of a few seconds."""
    corpus, model = list(islice(read_documents(quiver_data / "scifact"), 1500)), load_model(minilm)
    sample = spread_over(iter(corpus), len(corpus), 256)
    rates = measure(model, sample, name="exact-dense", settings={}, seconds=15)
    known = real(model, corpus)
    started = time.perf_counter()
    index = build_index(corpus, model, tmp_path / "i", options=BuildOptions(engine="exact-dense"))
    taken = time.perf_counter() - started
    planned = footprint(known, model.card, name="exact-dense")
    compared(index, planned)
    assert rates.tokens_per_second is not None
    assert rates.index_seconds is not None
    hours = known.documents * known.tokens / rates.tokens_per_second + planned.vectors * rates.index_seconds
    close(hours, taken, "seconds")


def test_measured_rates_are_consistent(word_sum: Any, minilm: Path) -> None:
    model = load_model(minilm)
    corpus = [Document(f"d{number}", "wings of birds " * 4) for number in range(20)]
    rates = measure(model, corpus, name="pq-dense", settings={}, seconds=0.2)
    assert isinstance(rates, Rates)
    assert None not in (rates.tokens_per_second, rates.index_seconds, rates.train_seconds)
    with pytest.raises(InputError, match="the sample has no documents; rates cannot be measured"):
        measure(model, [], name="pq-dense", settings={}, seconds=0.2)


def plans(done: Any) -> dict[str, Any]:
    assert (done.code, done.err) == (0, "")
    found: dict[str, Any] = json.loads(done.out)["plans"]
    return found


def test_published_collections_are_estimated(quiver: Callable[..., Any]) -> None:
    preset = ("estimate", "--model", "modernbert-base", "--gpu", "h100", "--price-per-gpu-hour", "2", "--json")
    (marco,) = plans(quiver(*preset, "--preset-collection", "msmarco", "--kind", "colbert")).values()
    assert marco["corpus"]["documents"] == 8_841_823
    assert marco["index"]["engine"] == "ivf-tokens"
    # ColBERTv2 stores 600 million vectors of these passages (arXiv:2112.01488, section 5), with punctuation left out as here.
    close(marco["index"]["vectors"], 600e6, "vectors of MS MARCO")
    assert marco["cost"] == pytest.approx(2 * marco["encoding_hours"])
    assert marco["rates"]["measured"] is False
    beir = plans(quiver(*preset, "--preset-collection", "beir"))
    assert set(beir) == set(TEXTS)
    assert beir["cqadupstack"]["corpus"]["documents"] == 457_199
    (billion,) = plans(quiver(*preset, "--preset-collection", "billion", "--search-memory", "1TB")).values()
    (one,) = plans(quiver(*preset, "--docs", "1e6", "--gpus", "4")).values()
    assert billion["index"]["engine"] == "ivf-dense"
    assert billion["shards"] > 1 == one["shards"]
    assert billion["encoding_hours"] == pytest.approx(4000 * one["encoding_hours"], rel=1e-3)
    assert billion["index"]["disk"] == pytest.approx(1000 * one["index"]["disk"], rel=0.05)


def test_the_report_has_tables_and_formulas(quiver: Callable[..., Any]) -> None:
    done = quiver("estimate", "--model", "minilm-l6", "--docs", "2e5", "--formulas")
    assert done.code == 0
    assert "hours are unknown without a rate; pass --measure or --gpu" in done.out
    assert "pq-dense" in done.out
    assert "encoding hours" in done.out


def test_tables_fit_a_narrow_terminal(quiver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = quiver("estimate", "--model", "modernbert-base", "--preset-collection", "beir", "--gpu", "h100", "--price-per-gpu-hour", "2")
    assert done.out.count("webis-touche2020") == done.out.count("climate-fever") == 3, done.out  # parts of one table
    assert all(done.out.count(name) == 1 for name in ("M tokens", "index (h)", "build (GB)", "search (GB)", "cost ┃", "8,841,823"))
    assert max(map(len, done.out.splitlines())) <= 80


def test_a_sample_gives_statistics_and_rates(quiver: Callable[..., Any], minilm: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"_id": str(number), "title": "", "text": "a bird has wings " * 5}) for number in range(30)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    arguments = ("estimate", "--model", minilm, "--sample", tmp_path / "corpus.jsonl", "--measure", "--seconds", "0.2", "--json")
    (alone,) = plans(quiver(*arguments)).values()
    assert (alone["corpus"]["documents"], alone["corpus"]["tokens"], alone["tokens"]) == (30, 22.0, 660)
    assert alone["rates"]["measured"] is True
    (many,) = plans(quiver(*arguments, "--docs", "3e6", "--engine", "auto:bits=16")).values()
    assert (many["index"]["engine"], many["tokens"]) == ("ivf-dense", 66_000_000)


def test_mistakes_are_reported_in_one_line(quiver: Callable[..., Any], tmp_path: Path, minilm: Path) -> None:
    for arguments, message in (
        (("--model", "minilm-l6"), "pass --docs or --preset-collection, or --sample alone"),
        (("--model", "minilm-l6", "--docs", "5", "--preset-collection", "beir"), "pass --docs or --preset-collection"),
        (("--model", "minilm-l6", "--docs", "5", "--measure"), "pass --sample CORPUS"),
        (("--model", "minilm-l6", "--docs", "5", "--gpu", "abacus"), "'abacus' is not one of 'h200'"),
        (("--model", "minilm-l6", "--docs", "5", "--engine", "ivf-tokens"), "does not exist for a dense model"),
        (("--model", "minilm-l6", "--docs", "5e6", "--engine", "auto:bits=7"), "bits: must be one of 8, 16"),
        (("--model", minilm, "--docs", "5", "--dim", "7"), "--dim and --length apply only to presets"),
        (("--model", "minilm-l6", "--docs", "5e5", "--engine", "faiss-dense:factory=HNSW32,Flat"), "depends on FAISS"),
    ):
        done = quiver("estimate", *arguments)
        assert (done.code, done.err.count("\n")) == (2, 1), done.err
        assert message in done.err
