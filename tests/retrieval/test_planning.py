"""Estimates compared with built indexes: vectors, disk and memory to search, within a quarter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import Encoder
from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import read_documents
from quiver.retrieval.index import BuildOptions, IndexReader, build_index
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.models.pretrained import load_parts
from quiver.retrieval.planning import TEXTS, IndexSize, index_size, measure_rate, statistics_of_sample, statistics_of_words
from quiver.retrieval.records import Document


def close(planned: float, found: float, what: str) -> None:
    assert abs(planned - found) <= 0.25 * found, f"{what}: planned {planned:,.0f}, found {found:,.0f}"


def compared(index: IndexReader, planned: IndexSize) -> None:
    """Compare all figures with an index."""
    assert planned.engine == index.kind
    close(planned.vectors, index.manifest.vectors, "vectors")
    codec = sum(file.bytes for file in index.manifest.codec.files.values())
    close(planned.disk, codec + sum(file.bytes for segment in index.manifest.segments for file in segment.files.values()), "disk")
    sizes = [segment.vectors.size for segment in index.segments]
    close(planned.mapped, sum(size.mapped for size in sizes), "mapped")
    if resident := sum(size.resident for size in sizes):
        close(planned.resident, resident, "resident")


@pytest.fixture(scope="module")
def models(minilm: Path) -> dict[str, BiEncoder | ColBERT]:
    """A bi-encoder and a ColBERT model on the first layer of all-MiniLM-L6-v2: real tokens, fast to encode."""
    parts = load_parts(minilm)
    encoder = Encoder(replace(parts.encoder.config, layer_types=parts.encoder.config.layer_types[:1])).eval()
    encoder.load_state_dict(parts.encoder.state_dict(), strict=False)
    settings = ModelFolder("colbert", minilm, projections=(Projection(384, 32),), similarity="maxsim",
                           colbert=ColBERTSettings(query_prefix="", document_prefix="", document_length=100))  # fmt: skip
    return {
        "dense": BiEncoder.from_parts(encoder, parts.tokenizer, parts.settings),
        "tokens": ColBERT.from_parts(encoder, parts.tokenizer, settings),
    }


CASES = [
    ("exact-dense", {}),
    ("pq-dense", {}),
    pytest.param("pq-dense", {"dsub": 8, "bits": 16}, marks=pytest.mark.slow),
    pytest.param("ivf-dense", {"nlist": 16}, marks=pytest.mark.slow),
    ("exact-tokens", {}),
    pytest.param("ivf-tokens", {}, marks=pytest.mark.slow),
    pytest.param("ivf-tokens", {"bits": 2, "pool_factor": 2}, marks=pytest.mark.slow),
]


@pytest.mark.data
@pytest.mark.parametrize(("engine", "settings"), CASES)
def test_the_size_of_every_engine_is_estimated(
    tmp_path: Path, quiver_data: Path, models: dict[str, BiEncoder | ColBERT], engine: str, settings: Mapping[str, Any]
) -> None:
    model, corpus = models[engine.rpartition("-")[2]], list(islice(read_documents(quiver_data / "scifact"), 600))
    index = build_index(corpus, model, tmp_path / "i", options=BuildOptions(engine=engine, settings=settings, calibrate=False))
    known = statistics_of_sample(len(corpus), corpus[:: max(1, len(corpus) // 200)][:200], model, source="scifact")
    compared(index, index_size(known, model.card, name=engine, settings=settings))


@pytest.mark.data
def test_words_estimate_tokens_and_bytes(quiver_data: Path, models: dict[str, BiEncoder | ColBERT]) -> None:
    model, corpus = models["dense"], list(islice(read_documents(quiver_data / "scifact"), 1500))
    counted = statistics_of_sample(len(corpus), corpus, model, source="")
    words = statistics_of_words(len(corpus), TEXTS["scifact"], length=model.card.document_length, source="")
    close(words.tokens, counted.tokens, "tokens")
    close(words.line_bytes, counted.line_bytes, "bytes of a line")


def test_a_rate_needs_documents(models: dict[str, BiEncoder | ColBERT]) -> None:
    assert measure_rate(models["tokens"], [Document("d", "wings of birds " * 4)], seconds=0.05) > 100
    with pytest.raises(InputError, match="the sample has no documents; the rate cannot be measured"):
        measure_rate(models["dense"], [], seconds=0.2)


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


def test_tables_fit_a_narrow_terminal_and_have_formulas(quiver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = quiver("estimate", "--model", "modernbert-base", "--preset-collection", "beir", "--gpu", "h100", "--price-per-gpu-hour", "2")
    assert done.out.count("webis-touche2020") == done.out.count("climate-fever") > 1, done.out  # parts of one table
    assert all(done.out.count(name) == 1 for name in ("M tokens", "build (GB)", "search (GB)", "cost ┃", "8,841,823"))
    assert max(map(len, done.out.splitlines())) <= 80
    done = quiver("estimate", "--model", "minilm-l6", "--docs", "2e5", "--formulas")
    assert done.code == 0
    assert all(part in done.out for part in ("hours are unknown without a rate; pass --measure or --gpu", "pq-dense", "encoding hours"))


def test_a_sample_gives_statistics_and_rates(quiver: Callable[..., Any], minilm: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"_id": str(number), "title": "", "text": "a bird has wings " * 5}) for number in range(30)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    arguments = ("estimate", "--model", minilm, "--sample", tmp_path / "corpus.jsonl", "--measure", "--seconds", "0.2", "--json")
    (alone,) = plans(quiver(*arguments)).values()
    assert (alone["corpus"]["documents"], alone["corpus"]["tokens"], alone["tokens"]) == (30, 22.0, 660)
    assert alone["rates"]["measured"] is True
    (many,) = plans(quiver(*arguments, "--docs", "3e6", "--engine", "auto:bits=16")).values()
    assert (many["index"]["engine"], many["tokens"]) == ("ivf-dense", 66_000_000)


def test_mistakes_are_reported_in_one_line(quiver: Callable[..., Any], minilm: Path) -> None:
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


def test_the_sizes_of_the_paper_fill_tiles_and_multiprocessors(quiver: Callable[..., Any]) -> None:
    """Both models, by hand from Table 4 and appendix B: 5,248 makes 164 tiles of the large one, two full waves of an RTX 3090."""
    sizes = {"base": (768, 12, 1152), "large": (1024, 16, 2624)}
    found = {}
    for size, (width, heads, mlp) in sizes.items():
        done = quiver("estimate", "shape", "--width", width, "--heads", heads, "--mlp", mlp, "--json")
        assert done.code == 0, done.err
        found[size] = json.loads(done.out)["matrices"]
    assert [(each["inputs"], each["outputs"], each["tiles"]) for each in found["base"]] == [
        (768, 2304, 6 * 9), (768, 768, 6 * 3), (768, 2304, 6 * 9), (1152, 768, 9 * 3),
    ]  # fmt: skip
    assert [(each["inputs"], each["outputs"], each["tiles"]) for each in found["large"]] == [
        (1024, 3072, 8 * 12), (1024, 1024, 8 * 4), (1024, 5248, 4 * 41), (2624, 1024, 21 * 4),
    ]  # fmt: skip
    assert all(each["aligned"] for each in (*found["base"], *found["large"]))
    assert [each["tile_fill"] for each in (*found["base"], *found["large"])] == [1.0] * 7 + [pytest.approx(20.5 / 21)]
    assert found["large"][2]["last_wave"]["rtx3090"] == 1.0
    assert found["base"][0]["last_wave"] == {name: pytest.approx(54 % count / count) for name, count in PAPER_MULTIPROCESSORS.items()}
    table = quiver("estimate", "shape", "--width", 770, "--heads", 11, "--mlp", 1000, "--gpu", "h100").out
    assert "770 x 2,310" in table
    assert "h100 (132)" in table
    assert "head width: 70, not a multiple of 64" in table
    failed = quiver("estimate", "shape", "--width", 770, "--heads", 12, "--mlp", 1)
    assert (failed.code, "--width 770 is not divisible by --heads 12" in failed.err) == (2, True), failed.err


PAPER_MULTIPROCESSORS = {"t4": 40, "a10": 72, "l4": 58, "rtx3090": 82, "rtx4090": 128, "a100": 108, "h100": 132}
