"""The encoder benchmark on token ids: turns and differences with stub backends, and states and gradients beside transformers."""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from quiver.encoder import Encoder, EncoderConfig, InputError, init_weights, save_encoder
from quiver.encoder.presets import preset
from quiver.eval.bench.encoder import BATCH_TOKENS, bench_token_ids, default_documents, parse_lengths
from quiver.eval.bench.encoder_backends import (
    BACKENDS,
    BASELINES,
    Backend,
    Batch,
    Documents,
    LoadedEncoder,
    Settings,
    open_encoder,
    version_reason,
)
from quiver.eval.bench.results import Benchmark, NotRun

CONFIG = EncoderConfig.modernbert(
    vocab_size=300, hidden_size=64, num_heads=2, intermediate_size=96, layer_types=["global", "local"], max_positions=256
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    save_encoder(init_weights(Encoder(CONFIG), seed=1), folder)
    return str(folder)


def run(
    model: str, *lengths: str, backends: list[str] | None = None, available: Mapping[str, Backend] = BACKENDS, **settings: object
) -> Benchmark:
    workloads = [parse_lengths(text) for text in lengths]
    return bench_token_ids(model, workloads, Settings(rounds=2, **settings), backends=backends, available=available)  # type: ignore[arg-type]


def stub(turns: list[str], name: str, *, shift: float = 0.0, scale: float = 1.0, reason: str | None = None) -> Backend:
    """Quiver's encoder under another name, with states that differ by a known amount."""

    def load(encoder: Encoder) -> LoadedEncoder:
        inner = BACKENDS["quiver"].load(encoder)

        def prepare(documents: Documents) -> Batch:
            batch = inner.prepare(documents)

            def forward() -> torch.Tensor:
                turns.append(f"{name} {sum(map(len, documents))}")
                return batch.forward() * scale + shift

            return Batch(forward, batch.real)

        return LoadedEncoder(inner.module, inner.embedding, prepare)

    return Backend(load, lambda config, settings: reason)


def stubs(turns: list[str]) -> dict[str, Backend]:
    return {"quiver": stub(turns, "quiver"), "other": stub(turns, "other", shift=0.25), "double": stub(turns, "double", scale=2)}


def test_backends_take_the_same_batches_in_turns(tiny: str) -> None:
    turns: list[str] = []
    result = run(tiny, "30+20+10", batch_size=2, backends=["other"], available=stubs(turns))
    quiver, other = [f"quiver {n}" for n in (50, 10)], [f"other {n}" for n in (50, 10)]
    compared = [turn for pair in zip(quiver, other, strict=True) for turn in pair]
    assert turns == [*compared, *quiver, *other, *other, *quiver]
    (case,) = result.cases
    assert case.name == "30+20+10"
    assert case.metadata == {"documents": 3, "tokens": 60, "shortest": 10, "longest": 30, "batch_documents": 2}
    assert case.title == "30+20+10: 3 documents of 10 to 30 tokens, 60 in total, batches of 2"
    assert [row.backend for row in case.rows] == ["quiver", "other"]
    assert [row.values["max_difference"] for row in case.rows] == [0.0, pytest.approx(0.25, abs=1e-6)]
    assert all(len(row.series["seconds"].values) == 2 and row.series["seconds"].lowest > 0 for row in case.rows)
    assert result.metadata == {"family": "modernbert", "parameters": Encoder(CONFIG).num_parameters}


def test_training_warms_up_and_compares_gradients(tiny: str) -> None:
    turns: list[str] = []
    result = run(tiny, "30+20", train=True, backends=["double"], available=stubs(turns))
    ours, theirs = "quiver 50", "double 50"
    # States, gradients, a round to warm up, two rounds.
    assert turns == [ours, theirs] * 3 + [ours, theirs, theirs, ours]
    # The loss is a square: states twice as large have gradients four times as large.
    assert [row.values["gradient_difference"] for row in result.cases[0].rows] == [0, pytest.approx(3, rel=1e-4)]


def test_unsupported_backends_are_listed_or_refused(tiny: str) -> None:
    available = {**stubs([]), "cuda": stub([], "cuda", reason="needs CUDA")}
    result = run(tiny, "8", available=available)
    assert [row.backend for row in result.cases[0].rows] == ["quiver", "other", "double"]
    assert result.not_run == (NotRun("cuda", "needs CUDA"),)
    with pytest.raises(InputError, match=r"^cuda: needs CUDA"):
        run(tiny, "8", backends=["cuda"], available=available)


def test_layout_is_derived_anew_in_every_pass(tiny: str) -> None:
    batch = BACKENDS["quiver"].load(open_encoder(tiny, Settings())).prepare([[1] * 200, [2] * 100])
    memos = [cell.cell_contents.memo for cell in batch.forward.__closure__ or () if hasattr(cell.cell_contents, "memo")]
    assert len(memos) == 1
    with torch.inference_mode():
        batch.forward()
    assert memos == [{}]


def test_random_weights_depend_on_the_seed() -> None:
    first, same, other = (open_encoder("ettin-17m", Settings(seed=seed)).embeddings.tokens.weight for seed in (1, 1, 2))
    torch.testing.assert_close(first, same, rtol=0, atol=0)
    assert not torch.equal(first, other)
    assert open_encoder("ettin-17m", Settings(dtype="bfloat16")).embeddings.tokens.weight.dtype == torch.bfloat16


def test_default_number_of_documents_makes_one_batch() -> None:
    assert BATCH_TOKENS["cpu"] == 8192
    names = ("fixed-512", "variable-256", "fixed-8192", "variable-4096")
    assert [default_documents(name, Settings()) for name in names] == [16, 32, 1, 2]
    assert default_documents("fixed-512", Settings(batch_size=5)) == 5
    assert default_documents("fixed-512", Settings(batch_tokens=1024)) == 2


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("cpu", "bfloat16", "needs CUDA"), ("cuda", "float32", "needs bfloat16"), ("cuda", "bfloat16", "flash-attn is not")],
)
def test_flash_attention_needs_cuda_and_half_precision(monkeypatch: pytest.MonkeyPatch, device: str, dtype: str, reason: str) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert (BASELINES["transformers-flash"].unsupported_reason(CONFIG, Settings(device=device, dtype=dtype)) or "").startswith(reason)


@pytest.mark.parity
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    ("name", "reason"), [("mosaicbert-base", "transformers has no ALiBi"), ("gte-en-mlm-base", "has no new"), ("modernbert-base", "")]
)
def test_architectures_without_transformers_implementation_are_named(name: str, reason: str) -> None:
    found = BASELINES["transformers-sdpa"].unsupported_reason(preset(name), Settings())
    assert reason in (found or "")
    assert bool(found) == bool(reason)


def test_old_and_missing_transformers_are_refused() -> None:
    assert version_reason("4.48.0") == "transformers 4.48.0 is too old; install 4.56 or later"
    assert version_reason(None) == "not installed (pip install 'quiver-retrieval[train]')"
    assert version_reason("4.56.0") is None


def test_cases_that_are_too_long_are_listed(tiny: str) -> None:
    result = run(tiny, "257", "256", backends=[])
    assert [case.name for case in result.cases] == ["256"]
    assert result.not_run == (NotRun("257", "the model has 256 positions"),)
    with pytest.raises(InputError, match="256 positions, and every set has a longer document; give --lengths"):
        run(tiny, "257", "8+1000", backends=[])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"device": "tpu"}, "device must be cpu or cuda, got 'tpu'"),
        ({"batch_size": 1, "batch_tokens": 1}, "--batch-size and --batch-tokens exclude each other"),
        ({"largest_batch": True}, "--largest-batch on a CPU needs --memory-gib"),
    ],
)
def test_contradicting_settings_are_refused(tiny: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(tiny, "8", backends=[], **settings)


def test_missing_gpu_is_named(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch finds no GPU"):
        run(tiny, "8", device="cuda")


def test_unknown_names_are_refused(tiny: str) -> None:
    with pytest.raises(
        InputError,
        match="unknown backend 'fast'; choose from quiver-optimized, quiver-int8, quiver-compiled, transformers-sdpa, transformers-flash",
    ):
        run(tiny, "8", backends=["fast"])
    with pytest.raises(InputError, match="no-such-preset"):
        run("no-such-preset", "8")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
def test_memory_and_largest_batch_are_measured(tiny: str) -> None:
    result = run(tiny, "64x32", "200x20+100x20", backends=[], memory=True, largest_batch=True, memory_gib=0.004, threads=1)
    *timed, largest = result.cases
    for case in timed:
        (quiver,) = case.rows
        assert int(quiver.values["memory_above"] or 0) > int(case.metadata["tokens"] or 0) * 64 * 4
    (row,) = largest.rows  # of the case with one length
    assert (largest.name, row.backend, row.values["length"]) == ("largest batch", "quiver", 64)
    assert row.values["failed"] is not None


needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")


@pytest.mark.parity
@needs_transformers
@pytest.mark.parametrize("train", [False, True])
def test_states_and_gradients_agree_with_transformers(tiny: str, train: bool) -> None:
    result = run(tiny, "200+30+256", "100x3", backends=["transformers-sdpa"], batch_size=2, train=train)
    for case in result.cases:
        quiver, other = case.rows
        assert (quiver.backend, other.backend) == ("quiver", "transformers-sdpa")
        assert 0 < float(other.values["max_difference"] or 0) < 1e-5
        if train:
            assert 0 <= float(other.values["gradient_difference"] or 0) < 1e-4


@pytest.mark.parity
@needs_transformers
def test_rope_frequencies_stay_float32_in_half_precision(tmp_path: Path) -> None:
    """In bfloat16 both round their states; RoPE's frequencies in bfloat16 would be far off at the end of a long text."""
    config = EncoderConfig.modernbert(
        vocab_size=300, hidden_size=64, num_heads=2, intermediate_size=96, layer_types=["global"] * 2, max_positions=4096
    )
    save_encoder(init_weights(Encoder(config), seed=1), tmp_path)
    quiver = BACKENDS["quiver"].load(open_encoder(str(tmp_path), Settings(dtype="bfloat16")))
    other = BASELINES["transformers-sdpa"].load(open_encoder(str(tmp_path), Settings(dtype="bfloat16")))
    assert {weight.dtype for weight in other.module.parameters()} == {torch.bfloat16}
    frequencies = [buffer for name, buffer in other.module.named_buffers() if "inv_freq" in name]
    assert frequencies
    assert {buffer.dtype for buffer in frequencies} == {torch.float32}
    documents = [[token % 200 + 100 for token in range(4000)]]
    states = []
    with torch.inference_mode():
        for batch in (quiver.prepare(documents), other.prepare(documents)):
            states.append(batch.real(batch.forward()).float())
    assert (states[0] - states[1]).abs().max() < 0.1


@pytest.mark.parity
@needs_transformers
def test_bert_agrees_with_padding(tmp_path: Path) -> None:
    config = EncoderConfig.bert(vocab_size=300, hidden_size=64, num_heads=2, intermediate_size=96, layers=2, max_positions=64)
    save_encoder(init_weights(Encoder(config), seed=1), tmp_path)
    (case,) = run(str(tmp_path), "64+3+20", backends=["transformers-sdpa"]).cases
    assert 0 < float(case.rows[1].values["max_difference"] or 0) < 1e-5


@pytest.mark.parity
@needs_transformers
def test_transformers_backend_does_not_keep_quivers_weights(tiny: str) -> None:
    encoder = open_encoder(tiny, Settings())
    gone = weakref.ref(encoder)
    loaded = BASELINES["transformers-sdpa"].load(encoder)
    del encoder
    gc.collect()
    assert gone() is None
    assert isinstance(loaded.module, nn.Module)


@pytest.mark.slow
def test_variants_of_quiver_run(tiny: str) -> None:
    result = run(tiny, "40+3", backends=["quiver-optimized", "quiver-int8"])
    rows = {row.backend: row for row in result.cases[0].rows}
    assert float(rows["quiver-optimized"].values["max_difference"] or 0) < 1e-5
    assert 1e-5 < float(rows["quiver-int8"].values["max_difference"] or 0) < 0.3


@pytest.mark.slow
def test_compiled_encoder_trains(tiny: str) -> None:
    result = run(tiny, "40+3", backends=["quiver-compiled"], train=True)
    (_, compiled) = result.cases[0].rows
    assert 0 <= float(compiled.values["gradient_difference"] or 0) < 1e-4
