"""The training benchmark: rows, steps of both libraries, losses and results, with models of a few thousand weights."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights, save_encoder
from quiver.encoder.config import global_every
from quiver.eval.bench.report import write_report
from quiver.eval.bench.results import read_benchmark, write_benchmark
from quiver.eval.bench.training import (
    WORKLOADS,
    bench_training,
    draw,
    make_batches,
    report,
    synthetic_source,
    texts_of_collection,
)
from quiver.eval.bench.training_backends import ENGLISH, Backend, Settings, Workload, make_training
from quiver.eval.report.formats import render_markdown

EXTRA = ("sentence_transformers", "transformers", "pylate", "accelerate", "datasets")
pytestmark = pytest.mark.skipif(not all(map(importlib.util.find_spec, EXTRA)), reason="needs the extra train")

TINY = Workload("tiny", queries=(8, 20), documents=(20, 60), max_length=60, per_row=2, rows=3)
BOTH = {"dense": "mnrl", "colbert": "contrastive"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([ENGLISH] * 2, vocab_size=1024, max_length=128)


def write_model(folder: Path, tokenizer: Tokenizer, **changes: object) -> Path:
    config = EncoderConfig.modernbert(
        vocab_size=1024,
        hidden_size=32,
        num_heads=2,
        intermediate_size=48,
        layer_types=global_every(3, 3),
        max_positions=64,
        window=16,
        pad_token_id=tokenizer.special_id("pad") or 0,
        cls_token_id=tokenizer.special_id("cls"),
        sep_token_id=tokenizer.special_id("sep"),
    )
    config = replace(config, embedding_dropout=0.2, **changes)  # type: ignore[arg-type]
    save_encoder(init_weights(Encoder(config), seed=3), folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tokenizer)


def settings(losses: dict[str, str], **others: object) -> Settings:
    return Settings(losses, rounds=2, threads=1, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["learnt", "minilm"])
def test_synthetic_texts_have_the_drawn_number_of_tokens(which: str, tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    if which == "minilm":
        tokenizer = Tokenizer.from_pretrained(request.getfixturevalue("minilm"))
    workload = WORKLOADS["msmarco"]
    rows = list(islice(synthetic_source(workload, tokenizer, random.Random(1)), 400))
    queries = [len(ids) for ids in tokenizer.encode([query for query, _ in rows], max_length=4096).ids]
    documents = [len(ids) for ids in tokenizer.encode([text for _, texts in rows for text in texts], max_length=4096).ids]
    assert (min(queries), max(queries)) == workload.queries
    assert (min(documents), max(documents)) == workload.documents
    assert sum(documents) / len(documents) == pytest.approx(100, rel=0.05), "uniform between 20 and 180"
    assert len(set(documents)) > 140


def test_equal_seeds_give_equal_rows(tokenizer: Tokenizer) -> None:
    one, same, other = (make_batches(TINY, synthetic_source, tokenizer, count=2, size=3, scored=True, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert [len(batch) for batch in one] == [3, 3]
    assert set(one[0][0]) == {"query", "document_1", "document_2", "scores"}


def test_tokenizer_without_english_words_is_refused() -> None:
    foreign = Tokenizer.train(["가나다 라마바"], vocab_size=261, max_length=64)
    with pytest.raises(InputError, match="only 0 common English words as single tokens; give texts with --data"):
        next(synthetic_source(TINY, foreign, random.Random(1)))


def test_rows_of_a_collection_have_a_relevant_document_first(make_collection: Callable[..., Path], tokenizer: Tokenizer) -> None:
    folder = make_collection()
    relevant = {"bird wings": {"d1", "d4"}, "deep sea fish": {"d2", "d5"}, "granite": {"d3"}}
    texts = {"d1": "Wings", "d2": "Fish", "d3": "Stone", "d4": "birds and", "d5": "Sea"}
    source = texts_of_collection(folder, "test")
    found = list(source(replace(TINY, per_row=3), tokenizer, random.Random(4)))
    assert {query for query, _ in found} == set(relevant)
    for query, documents in found:
        named = [next(key for key, start in texts.items() if document.startswith(start)) for document in documents]
        assert named[0] in relevant[query]
        assert len(set(named)) == 3
        assert not relevant[query] & set(named[1:])
    with pytest.raises(InputError, match="tiny: 2 batches of 2 rows need 4 queries, found 3; reduce --rounds"):
        make_batches(TINY, source, tokenizer, count=2, size=2, scored=False, seed=1)
    with pytest.raises(InputError, match="a row needs 9 documents, and the corpus has too few"):
        make_batches(replace(TINY, per_row=9), source, tokenizer, count=1, size=2, scored=False, seed=1)
    with pytest.raises(InputError, match="train"):
        texts_of_collection(folder, "train")


@pytest.mark.parity
def test_both_kinds_agree_with_their_libraries(tiny: Path, tmp_path: Path) -> None:
    found = bench_training(str(tiny), [TINY], settings(BOTH), command="quiver bench training")
    assert [(case.metadata["kind"], case.metadata["loss"], [row.backend for row in case.rows]) for case in found.cases] == [
        ("dense", "mnrl", ["quiver", "sentence-transformers"]),
        ("colbert", "contrastive", ["quiver", "pylate"]),
    ]
    assert found.not_run == ()
    for case in found.cases:
        quiver, other = case.rows
        assert (case.metadata["rows"], case.metadata["documents"]) == (3, 2)
        assert {len(other.series[name].values) for name in ("tokens", "seconds", "processor_seconds", "time_ratio")} == {2}
        assert len(set(quiver.series["loss"].values)) == 3, "the step that is not timed has a loss too"
        pairs = zip(other.series["padded_tokens"].values, other.series["tokens"].values, strict=True)
        assert all(padded > tokens for padded, tokens in pairs)
        assert 0 <= float(other.values["max_loss_difference"] or 0) < 1e-4
        assert quiver.values["max_loss_difference"] == 0
        assert 20 <= int(case.metadata["longest"] or 0) <= 60
    write_benchmark(found, tmp_path / "results.json")
    assert read_benchmark(tmp_path / "results.json") == found
    pytest.importorskip("matplotlib")
    memory = {"memory_above": 3 * 2**20}
    rows = tuple(replace(row, values={**row.values, **memory}) for row in found.cases[0].rows)
    found = replace(found, cases=(replace(found.cases[0], rows=rows), found.cases[1]))
    text = render_markdown(report(found))
    assert found.cases[0].title in text
    assert f"| {found.cases[1].rows[1].series['time_ratio'].median:.2f} |" in text
    assert "| 3 |" in text
    write_report(report(found), tmp_path, draw=lambda: draw(found))
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parity
@pytest.mark.parametrize(("kind", "loss"), [("dense", "kl"), ("colbert", "distillation")])
def test_losses_with_a_teacher_agree(tiny: Path, kind: str, loss: str) -> None:
    [case] = bench_training(str(tiny), [TINY], settings({kind: loss})).cases
    assert 0 <= float(case.rows[1].values["max_loss_difference"] or 0) < 1e-4


def test_losses_are_not_compared_with_dropout(tiny: Path) -> None:
    [case] = bench_training(str(tiny), [TINY], settings({"dense": "mnrl"}, dropout=True)).cases
    assert "max_loss_difference" not in case.rows[1].values
    assert case.rows[1].series["loss"] != case.rows[0].series["loss"]


def test_architectures_without_transformers_implementation_are_measured_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = write_model(tmp_path, tokenizer, family="quiver", norm_position="parallel", first_attention_norm=True)
    found = bench_training(str(folder), [TINY], settings(BOTH))
    assert [each.what for each in found.not_run] == ["sentence-transformers", "pylate"]
    assert all("quiver" in each.reason for each in found.not_run)
    assert [[row.backend for row in case.rows] for case in found.cases] == [["quiver"], ["quiver"]]
    assert "with padding" not in found.cases[0].title
    assert "| quiver |" in render_markdown(report(found))


def test_preset_is_trained_and_too_long_texts_are_refused() -> None:
    one_step = Settings({"dense": "mnrl"}, rounds=1, threads=1, baselines=False)
    found = bench_training("ettin-17m", [replace(TINY, rows=2)], one_step)
    assert float(found.metadata["parameters"] or 0) > 15e6
    assert found.not_run == ()
    with pytest.raises(InputError, match=r"minilm-l6: long has texts of 2,048 tokens, the model has 512 positions; choose another"):
        bench_training("minilm-l6", [WORKLOADS["long"]], settings(BOTH))


def test_workload_that_does_not_fit_is_left_out(tiny: Path) -> None:
    found = bench_training(str(tiny), [TINY, WORKLOADS["long"]], settings({"dense": "mnrl"}, baselines=False))
    assert [(each.what, each.reason) for each in found.not_run] == [("long", "texts of 2,048 tokens, the model has 64 positions")]
    assert [case.metadata["workload"] for case in found.cases] == ["tiny"]


def test_invalid_settings_are_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="rounds must be >= 1, got 0"):
        bench_training(str(tiny), [TINY], Settings(BOTH, rounds=0))
    with pytest.raises(InputError, match="the loss of a dense model must be one of mnrl, cached_mnrl, margin_mse, kl, got 'contrastive'"):
        bench_training(str(tiny), [TINY], settings({"dense": "contrastive"}))
    with pytest.raises(InputError, match="kind must be one of dense, colbert, mlm, got 'sparse'"):
        bench_training(str(tiny), [TINY], settings({"sparse": "mnrl"}))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pylate" else find(name))
    with pytest.raises(InputError, match=r"training needs pylate: pip install 'quiver-retrieval\[colbert\]'"):
        bench_training(str(tiny), [TINY], settings(BOTH))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
@pytest.mark.parametrize("kind", BOTH)
def test_memory_is_measured_in_fresh_processes(tiny: Path, kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "colbert":  # the other kind's processes import all by themselves, which takes seconds each
        request.getfixturevalue("quick_children")
    found = bench_training(str(tiny), [replace(TINY, rows=32)], settings({kind: BOTH[kind]}, memory=True))
    assert found.not_run == ()
    for row in (row for case in found.cases for row in case.rows):
        assert int(row.values["memory_before"] or 0) > 100 * 2**20, "torch and the libraries"
        assert 2**20 < int(row.values["memory_above"] or 0) < 2**30


class Recorded(nn.Linear):
    """Records the dtype of its products."""

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(x)
        seen.append(product.dtype)
        return product


seen: list[torch.dtype] = []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_runs_in_the_dtype_of_training_and_losses_in_float32(dtype: Any) -> None:
    model = Recorded(4, 4)
    seen.clear()

    def loss(batch: Mapping[str, Any]) -> Tensor:
        first = model(batch["x"])
        with torch.no_grad():  # a cached loss calls the model more than once
            second = model(batch["x"])
        seen.append((first @ second).dtype)
        return first.sum()

    training = make_training(TINY, settings(BOTH, dtype=dtype))
    Backend(model, loss, lambda rows: {"x": torch.ones(4, 4)}, training, steps=1).step([{}])
    assert seen == [getattr(torch, dtype)] * 2 + [torch.float32]
