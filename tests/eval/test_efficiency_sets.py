"""The benchmark over sets of token ids: what runs, in which order, on which numbers; with stand-ins and with transformers."""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from quiver.encoder import Encoder, EncoderConfig, InputError, init_weights, save_encoder
from quiver.encoder.presets import preset
from quiver.eval.bench.encoder import (
    BATCH_TOKENS,
    EncoderBenchmark,
    Settings,
    bench_sets,
    default_documents,
    libraries,
    parse_lengths,
    sets,
)
from quiver.eval.bench.encoder.libraries import LIBRARIES, PEERS, Batch, Library, Loaded, open_encoder
from quiver.eval.bench.encoder.results import NotRun

CONFIG = EncoderConfig.modernbert(
    vocab_size=300, hidden_size=64, num_heads=2, intermediate_size=96, layer_types=["global", "local"], max_positions=256
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    save_encoder(init_weights(Encoder(CONFIG), seed=1), folder)
    return str(folder)


def run(model: str, *lengths: str, peers: list[str] | None = None, **settings: object) -> EncoderBenchmark:
    return bench_sets(model, [parse_lengths(text) for text in lengths], Settings(rounds=2, **settings), peers=peers)  # type: ignore[arg-type]


def stand_in(turns: list[str], name: str, *, shift: float = 0.0, scale: float = 1.0) -> Library:
    """Our encoder under another name, its states off by what is known."""

    def load(encoder: Encoder) -> Loaded:
        inner = LIBRARIES["quiver"].load(encoder)

        def prepare(documents: libraries.Documents) -> Batch:
            batch = inner.prepare(documents)

            def forward() -> torch.Tensor:
                turns.append(f"{name} {sum(map(len, documents))}")
                return batch.forward() * scale + shift

            return Batch(forward, batch.real)

        return Loaded(inner.module, inner.embedding, prepare)

    return Library(load, lambda config, settings: None)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    turns: list[str] = []
    known = {"quiver": stand_in(turns, "quiver"), "peer": stand_in(turns, "peer", shift=0.25), "double": stand_in(turns, "double", scale=2)}
    monkeypatch.setattr(sets, "LIBRARIES", known)
    monkeypatch.setattr(sets, "PEERS", {"peer": known["peer"]})
    return turns


def test_the_same_batches_in_turns(tiny: str, stand_ins: list[str]) -> None:
    result = run(tiny, "30+20+10", batch_size=2)
    quiver, peer = [f"quiver {n}" for n in (50, 10)], [f"peer {n}" for n in (50, 10)]
    compared = [turn for pair in zip(quiver, peer, strict=True) for turn in pair]
    assert stand_ins == [*compared, *quiver, *peer, *peer, *quiver]
    (found,) = result.sets
    assert (found.name, found.documents, found.tokens, found.shortest, found.longest, found.batch_documents) == (
        "30+20+10",
        3,
        60,
        10,
        30,
        2,
    )
    assert [each.name for each in found.libraries] == ["quiver", "peer"]
    assert [each.max_difference for each in found.libraries] == [0.0, pytest.approx(0.25, abs=1e-6)]
    assert all(len(each.seconds) == 2 and min(each.seconds) > 0 for each in found.libraries)
    assert result.parameters == Encoder(CONFIG).num_parameters
    assert result.family == "modernbert"


def test_a_training_round_warms_up_and_compares_gradients(tiny: str, stand_ins: list[str]) -> None:
    result = run(tiny, "30+20", train=True, peers=["double"])
    ours, theirs = "quiver 50", "double 50"
    # States, gradients, a round to warm up, two rounds.
    assert stand_ins == [ours, theirs] * 3 + [ours, theirs, theirs, ours]
    # The loss is a square: states twice as large have gradients four times as large.
    assert [each.gradient_difference for each in result.sets[0].libraries] == [0, pytest.approx(3, rel=1e-4)]


def test_the_layout_is_derived_anew_each_time(tiny: str) -> None:
    batch = LIBRARIES["quiver"].load(open_encoder(tiny, Settings())).prepare([[1] * 200, [2] * 100])
    memos = [cell.cell_contents.memo for cell in batch.forward.__closure__ or () if hasattr(cell.cell_contents, "memo")]
    assert len(memos) == 1
    with torch.inference_mode():
        batch.forward()
    assert memos == [{}]


def test_weights_of_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "preset", lambda name: CONFIG)
    weights = [open_encoder("any", Settings(seed=seed)).embeddings.tokens.weight for seed in (1, 1, 2)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert not torch.equal(weights[0], weights[2])
    assert open_encoder("any", Settings(dtype="bfloat16")).embeddings.tokens.weight.dtype == torch.bfloat16


def test_one_batch_of_the_papers_sets_by_default() -> None:
    assert BATCH_TOKENS["cpu"] == 8192
    names = ("fixed-512", "variable-256", "fixed-8192", "variable-4096")
    assert [default_documents(name, Settings()) for name in names] == [16, 32, 1, 2]
    assert default_documents("fixed-512", Settings(batch_size=5)) == 5
    assert default_documents("fixed-512", Settings(batch_tokens=1024)) == 2


def test_peers_that_cannot_run_are_listed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "installed_version", lambda distribution: None)
    result = run(tiny, "8")
    assert [each.name for each in result.sets[0].libraries] == ["quiver"]
    reason = "not installed (pip install 'quiver-retrieval[train]')"
    assert result.not_run == (NotRun("transformers-sdpa", reason), NotRun("transformers-flash", "needs CUDA"))
    with pytest.raises(InputError, match=r"^transformers-sdpa: not installed"):
        run(tiny, "8", peers=["transformers-sdpa"])


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("cpu", "bfloat16", "needs CUDA"), ("cuda", "float32", "needs bfloat16"), ("cuda", "bfloat16", "flash-attn is not")],
)
def test_why_flash_cannot_run(monkeypatch: pytest.MonkeyPatch, device: str, dtype: str, reason: str) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert (PEERS["transformers-flash"].unsupported_reason(CONFIG, Settings(device=device, dtype=dtype)) or "").startswith(reason)


@pytest.mark.parity
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    ("name", "reason"), [("mosaicbert-base", "transformers has no ALiBi"), ("gte-en-mlm-base", "has no new"), ("modernbert-base", "")]
)
def test_architectures_that_transformers_lacks_are_named(name: str, reason: str) -> None:
    found = PEERS["transformers-sdpa"].unsupported_reason(preset(name), Settings())
    assert reason in (found or "")
    assert bool(found) == bool(reason)


def test_an_old_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "installed_version", lambda distribution: "4.48.0")
    assert (
        PEERS["transformers-sdpa"].unsupported_reason(CONFIG, Settings())
        == "transformers 4.48.0 is too old, 4.56 is the first that will do"
    )


def test_sets_that_are_too_long_are_listed(tiny: str) -> None:
    result = run(tiny, "257", "256", peers=[])
    assert [each.name for each in result.sets] == ["256"]
    assert result.not_run == (NotRun("257", "the model has 256 positions"),)
    with pytest.raises(InputError, match="256 positions, and every set has a longer document; give --lengths"):
        run(tiny, "257", "8+1000", peers=[])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"device": "tpu"}, "device must be cpu or cuda, got 'tpu'"),
        ({"batch_size": 1, "batch_tokens": 1}, "give --batch-size or --batch-tokens, not both"),
        ({"largest_batch": True}, "the largest batch on a CPU needs --memory-gib"),
    ],
)
def test_settings_that_cannot_be(tiny: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(tiny, "8", peers=[], **settings)


def test_no_gpu_here(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch sees no GPU here"):
        run(tiny, "8", device="cuda")


def test_unknown_names(tiny: str) -> None:
    with pytest.raises(
        InputError,
        match="unknown peer 'fast'; there are quiver-frozen, quiver-int8, quiver-compiled, transformers-sdpa, transformers-flash",
    ):
        run(tiny, "8", peers=["fast"])
    with pytest.raises(InputError, match="no-such-preset"):
        run("no-such-preset", "8")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
def test_memory_and_the_largest_batch(tiny: str) -> None:
    result = run(tiny, "64x32", "200x20+100x20", peers=[], memory=True, largest_batch=True, memory_gib=0.004, threads=1)
    for times in result.sets:
        (quiver,) = times.libraries
        assert quiver.memory is not None
        assert quiver.memory.above > times.tokens * 64 * 4
    (largest,) = result.largest_batches  # of the set of one length alone
    assert (largest.library, largest.length) == ("quiver", 64)
    assert largest.failed is not None


needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")


@pytest.mark.parity
@needs_transformers
@pytest.mark.parametrize("train", [False, True])
def test_transformers_with_the_same_weights(tiny: str, train: bool) -> None:
    result = run(tiny, "200+30+256", "100x3", peers=["transformers-sdpa"], batch_size=2, train=train)
    for times in result.sets:
        quiver, peer = times.libraries
        assert (quiver.name, peer.name) == ("quiver", "transformers-sdpa")
        assert 0 < peer.max_difference < 1e-5
        if train:
            assert peer.gradient_difference is not None
            assert peer.gradient_difference < 1e-4


@pytest.mark.parity
@needs_transformers
def test_half_precision_is_not_compared_with_other_frequencies(tmp_path: Path) -> None:
    """In bfloat16 both round their states; RoPE's frequencies in bfloat16 would be far off at the end of a long text."""
    config = EncoderConfig.modernbert(
        vocab_size=300, hidden_size=64, num_heads=2, intermediate_size=96, layer_types=["global"] * 2, max_positions=4096
    )
    save_encoder(init_weights(Encoder(config), seed=1), tmp_path)
    quiver = LIBRARIES["quiver"].load(open_encoder(str(tmp_path), Settings(dtype="bfloat16")))
    peer = PEERS["transformers-sdpa"].load(open_encoder(str(tmp_path), Settings(dtype="bfloat16")))
    assert {weight.dtype for weight in peer.module.parameters()} == {torch.bfloat16}
    frequencies = [buffer for name, buffer in peer.module.named_buffers() if "inv_freq" in name]
    assert frequencies
    assert {buffer.dtype for buffer in frequencies} == {torch.float32}
    documents = [[token % 200 + 100 for token in range(4000)]]
    states = []
    with torch.inference_mode():
        for batch in (quiver.prepare(documents), peer.prepare(documents)):
            states.append(batch.real(batch.forward()).float())
    assert (states[0] - states[1]).abs().max() < 0.1


@pytest.mark.parity
@needs_transformers
def test_bert_and_its_padding(tmp_path: Path) -> None:
    config = EncoderConfig(
        family="bert",
        vocab_size=300,
        hidden_size=64,
        num_heads=2,
        intermediate_size=96,
        layer_types=("global", "global"),
        max_positions=64,
        norm_position="post",
        mlp="plain",
        positions="absolute",
        norm_bias=True,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_input_bias=True,
        mlp_output_bias=True,
        type_vocab_size=2,
    )
    save_encoder(init_weights(Encoder(config), seed=1), tmp_path)
    (times,) = run(str(tmp_path), "64+3+20", peers=["transformers-sdpa"]).sets
    assert times.libraries[1].max_difference < 1e-5


@pytest.mark.parity
@needs_transformers
def test_a_peer_does_not_keep_our_weights(tiny: str) -> None:
    encoder = open_encoder(tiny, Settings())
    gone = weakref.ref(encoder)
    loaded = PEERS["transformers-sdpa"].load(encoder)
    del encoder
    gc.collect()
    assert gone() is None
    assert isinstance(loaded.module, nn.Module)


def test_our_own_variants_run(tiny: str) -> None:
    result = run(tiny, "40+3", peers=["quiver-frozen", "quiver-int8"])
    times = {each.name: each for each in result.sets[0].libraries}
    assert times["quiver-frozen"].max_difference < 1e-5
    assert 1e-5 < times["quiver-int8"].max_difference < 0.3


def test_a_compiled_variant_trains(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "quiver.eval.bench.encoder.libraries.compile_encoder", lambda encoder: encoder
    )  # tests/encoder/test_compile.py compiles
    result = run(tiny, "40+3", peers=["quiver-compiled"], train=True)
    (_, compiled) = result.sets[0].libraries
    assert compiled.gradient_difference is not None
    assert compiled.gradient_difference < 1e-6
