"""``quiver bench train``'s rows, sides, losses and record, with models of a few thousand weights."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from quiver.encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights, save_encoder
from quiver.encoder.config import global_every
from quiver.eval.bench.encoder.results import PeakMemory
from quiver.eval.bench.training import (
    WORKLOADS,
    TrainingSettings,
    TrainingWorkload,
    bench_training,
    read_training_benchmark,
    synthetic_source,
    texts_of_collection,
    write_training_benchmark,
)
from quiver.eval.bench.training.results import Steps, side_times, with_memory
from quiver.eval.bench.training.workloads import ENGLISH, batches
from quiver.eval.report.training_speed import render_training_speed, workload_title, write_training_speed_plot

EXTRA = ("sentence_transformers", "transformers", "pylate", "accelerate", "datasets")
pytestmark = pytest.mark.skipif(not all(map(importlib.util.find_spec, EXTRA)), reason="needs the extra train")

TINY = TrainingWorkload("tiny", queries=(8, 20), documents=(20, 60), max_length=60, per_row=2, rows=3)
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


def settings(losses: dict[str, str], **others: object) -> TrainingSettings:
    return TrainingSettings(losses, rounds=2, threads=1, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["learnt", "minilm"])
def test_a_made_up_text_has_the_tokens_that_were_drawn(which: str, tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
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
    one, same, other = (batches(TINY, synthetic_source, tokenizer, count=2, size=3, scored=True, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert [len(batch) for batch in one] == [3, 3]
    assert set(one[0][0]) == {"query", "document_1", "document_2", "scores"}


def test_a_tokenizer_that_knows_no_english() -> None:
    foreign = Tokenizer.train(["가나다 라마바"], vocab_size=261, max_length=64)
    with pytest.raises(InputError, match="only 0 common English words as single tokens; give texts with --data"):
        next(synthetic_source(TINY, foreign, random.Random(1)))


def test_rows_of_a_collection(make_collection: Callable[..., Path], tokenizer: Tokenizer) -> None:
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
    with pytest.raises(InputError, match="tiny: 2 batches of 2 need 4 queries, there are 3; give fewer rounds"):
        batches(TINY, source, tokenizer, count=2, size=2, scored=False, seed=1)
    with pytest.raises(InputError, match="a row needs 9 documents, the corpus has too few"):
        batches(replace(TINY, per_row=9), source, tokenizer, count=1, size=2, scored=False, seed=1)
    with pytest.raises(InputError, match="train"):
        texts_of_collection(folder, "train")


def test_ratios_are_by_step_and_losses_with_the_first() -> None:
    own = Steps([3.0, 2.0, 1.0], [9.0, 1.0, 2.0], (1.0, 2.0))
    other = Steps([3.5, 2.0, 1.25], [9.0, 4.0, 4.0], (3.0, 2.0))
    quiver, peer = side_times({"quiver": own, "pylate": other}, [100, 300], comparable=True)
    assert (quiver.ratios, quiver.max_loss_difference) == ((1, 1), 0)
    assert (peer.ratios, peer.ratio.median, peer.processor_ratio.median) == ((3, 1), 2, 3)
    assert peer.max_loss_difference == 0.5
    assert peer.processor_seconds == (4, 4)
    assert peer.tokens_per_second.highest == 150
    assert side_times({"quiver": own}, [100, 300], comparable=False)[0].max_loss_difference is None


@pytest.mark.parity
def test_both_kinds_beside_their_libraries(tiny: Path, tmp_path: Path) -> None:
    found = bench_training(str(tiny), [TINY], settings(BOTH), command="quiver bench train")
    assert [(times.kind, times.loss, [side.name for side in times.sides]) for times in found.workloads] == [
        ("dense", "mnrl", ["quiver", "sentence-transformers"]),
        ("colbert", "contrastive", ["quiver", "pylate"]),
    ]
    assert found.not_run == ()
    for times in found.workloads:
        quiver, peer = times.sides
        assert (times.rows, times.documents) == (3, 2)
        assert len(times.tokens) == len(peer.seconds) == len(peer.processor_seconds) == 2
        assert len(quiver.losses) == 3
        assert len(set(quiver.losses)) == 3
        assert times.padded is not None
        assert all(padded > tokens for padded, tokens in zip(times.padded, times.tokens, strict=True))
        assert peer.max_loss_difference is not None
        assert peer.max_loss_difference < 1e-4
        assert quiver.max_loss_difference == 0
        assert 20 <= times.longest <= 60
    write_training_benchmark(found, tmp_path / "results.json")
    assert read_training_benchmark(tmp_path / "results.json") == found
    (tmp_path / "other.json").write_text((tmp_path / "results.json").read_text().replace("quiver-training-benchmark/1", "x"))
    with pytest.raises(InputError, match="run quiver bench train again"):
        read_training_benchmark(tmp_path / "other.json")
    pytest.importorskip("matplotlib")
    memory = {"quiver": PeakMemory(1, 3 * 2**20, None)}
    found = replace(found, workloads=(with_memory(found.workloads[0], memory), found.workloads[1]))
    report = render_training_speed(found)
    assert workload_title(found.workloads[0]) in report
    assert f"| {found.workloads[1].sides[1].ratio.median:.2f} |" in report
    assert "| 3 |" in report
    files = write_training_speed_plot(found, tmp_path)
    assert all(file.stat().st_size > 1000 for file in files)


@pytest.mark.parity
@pytest.mark.parametrize(("kind", "loss"), [("dense", "kl"), ("colbert", "distillation")])
def test_losses_with_a_teacher(tiny: Path, kind: str, loss: str) -> None:
    [times] = bench_training(str(tiny), [TINY], settings({kind: loss})).workloads
    assert times.sides[1].max_loss_difference is not None
    assert times.sides[1].max_loss_difference < 1e-4


def test_with_dropout_losses_are_not_compared(tiny: Path) -> None:
    [times] = bench_training(str(tiny), [TINY], settings({"dense": "mnrl"}, dropout=True)).workloads
    assert times.sides[1].max_loss_difference is None
    assert times.sides[1].losses != times.sides[0].losses


def test_what_transformers_lacks_is_said(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = write_model(tmp_path, tokenizer, family="quiver", norm_position="parallel", first_attention_norm=True)
    found = bench_training(str(folder), [TINY], settings(BOTH))
    assert [each.what for each in found.not_run] == ["sentence-transformers", "pylate"]
    assert all("quiver" in each.reason for each in found.not_run)
    assert [[side.name for side in times.sides] for times in found.workloads] == [["quiver"], ["quiver"]]
    assert found.workloads[0].padded is None
    assert "| quiver |" in render_training_speed(found)


def test_a_preset_and_texts_that_are_too_long() -> None:
    found = bench_training("ettin-17m", [replace(TINY, rows=2)], TrainingSettings({"dense": "mnrl"}, rounds=1, threads=1, peers=False))
    assert found.parameters > 15e6
    assert found.not_run == ()
    workloads = [TINY, WORKLOADS["long"]]
    with pytest.raises(InputError, match=r"minilm-l6: long has texts of 2,048 tokens, the model has 512 positions; give another"):
        bench_training("minilm-l6", workloads[1:], settings(BOTH))


def test_a_workload_that_does_not_fit_is_left_out(tiny: Path) -> None:
    found = bench_training(str(tiny), [TINY, WORKLOADS["long"]], settings({"dense": "mnrl"}, peers=False))
    assert [(each.what, each.reason) for each in found.not_run] == [("long", "texts of 2,048 tokens, the model has 64 positions")]
    assert [times.workload for times in found.workloads] == ["tiny"]


def test_mistakes(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="rounds must be >= 1, got 0"):
        bench_training(str(tiny), [TINY], TrainingSettings(BOTH, rounds=0))
    with pytest.raises(InputError, match="a dense model is trained by mnrl, cached_mnrl, margin_mse, kl, not by 'contrastive'"):
        bench_training(str(tiny), [TINY], settings({"dense": "contrastive"}))
    with pytest.raises(InputError, match="kind must be one of dense, colbert, got 'sparse'"):
        bench_training(str(tiny), [TINY], settings({"sparse": "mnrl"}))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pylate" else find(name))
    with pytest.raises(InputError, match=r"training needs pylate: pip install 'quiver-retrieval\[train\]'"):
        bench_training(str(tiny), [TINY], settings(BOTH))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
def test_peak_memory_in_fresh_processes(tiny: Path) -> None:
    found = bench_training(str(tiny), [replace(TINY, rows=32)], settings(BOTH, memory=True))
    assert found.not_run == ()
    for times in found.workloads:
        for side in times.sides:
            assert side.memory is not None
            assert side.memory.before > 100 * 2**20, "torch and the libraries"
            assert 2**20 < side.memory.above < 2**30
