"""The encoder benchmark on texts: turns and differences with stub backends, and vectors beside sentence-transformers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from quiver.encoder import InputError
from quiver.eval.bench.encoder import bench_texts
from quiver.eval.bench.encoder_backends import (
    TEXT_BACKENDS,
    TEXT_BASELINES,
    LoadedTextEncoder,
    Settings,
    TextBackend,
    dtype_reason,
)

SETTINGS = Settings(rounds=3)


def test_backends_encode_in_turns_after_a_warm_up(minilm: Path) -> None:
    turns: list[str] = []

    def load_quiver(model: str, settings: Settings, texts: Sequence[str]) -> LoadedTextEncoder:
        loaded = TEXT_BACKENDS["quiver"].load(model, settings, texts)
        return LoadedTextEncoder(lambda batch: turns.append("quiver") or loaded.encode(batch), loaded.model)

    def load_other(model: str, settings: Settings, texts: Sequence[str]) -> LoadedTextEncoder:
        assert (model, settings, texts) == (str(minilm), SETTINGS, ["one text", "another one"])
        encode = TEXT_BACKENDS["quiver"].load(model, settings, texts).encode
        return LoadedTextEncoder(lambda batch: turns.append("other") or encode(batch) + np.float32(0.25))

    available = {name: TextBackend(load, lambda settings: None) for name, load in (("quiver", load_quiver), ("other", load_other))}
    result = bench_texts(str(minilm), ["one text", "another one"], SETTINGS, name="two", available=available)
    assert turns == ["quiver", "other", "quiver", "other", "other", "quiver", "quiver", "other"]
    (case,) = result.cases
    assert case.name == "two"
    assert case.metadata == {"documents": 2, "tokens": 8, "shortest": 4, "longest": 4, "batch_documents": None}  # [CLS] and [SEP]
    quiver, other = case.rows
    assert (quiver.backend, other.backend) == ("quiver", "other")
    ratios = np.divide(other.series["seconds"].values, quiver.series["seconds"].values)
    np.testing.assert_allclose(other.series["time_ratio"].values, ratios)
    np.testing.assert_allclose([quiver.values["max_difference"], other.values["max_difference"]], [0, 0.25], atol=1e-6)


@pytest.mark.parity
def test_sentence_transformers_gives_equal_vectors(minilm: Path) -> None:
    pytest.importorskip("sentence_transformers")
    documents = ["a bird has two wings", "", "granite is a hard stone " * 80]
    result = bench_texts(str(minilm), documents, Settings(rounds=1), backends=["sentence-transformers"])
    quiver, other = result.cases[0].rows
    assert result.cases[0].metadata["longest"] == 256  # truncated
    assert other.values["max_difference"] < 1e-5
    assert min(*quiver.series["seconds"].values, *other.series["seconds"].values) > 0


@pytest.mark.parity
def test_sentence_transformers_loads_bfloat16_weights(minilm: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("sentence_transformers")
    made: list[object] = []
    original = library.SentenceTransformer

    def remember(*arguments: object, **options: object) -> object:
        made.append(original(*arguments, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "SentenceTransformer", remember)
        encode = TEXT_BASELINES["sentence-transformers"].load(str(minilm), Settings(dtype="bfloat16"), []).encode
    (encoder,) = made
    assert {weight.dtype for weight in encoder.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]
    assert encode(["a bird"]).dtype == np.float32


@pytest.mark.parity
@pytest.mark.parametrize("backend", ["onnx", "openvino"])
def test_onnx_and_openvino_agree(minilm: Path, backend: str) -> None:
    names = [f"sentence-transformers-{backend}", f"sentence-transformers-{backend}-int8"]
    if reason := TEXT_BASELINES[names[0]].unsupported_reason(Settings()):
        pytest.skip(reason)
    documents = [f"bird number {number} has {number} wings" for number in range(20)]
    _, plain, int8 = bench_texts(str(minilm), documents, Settings(rounds=1, threads=1), backends=names).cases[0].rows
    assert plain.values["max_difference"] < 1e-5
    assert 1e-4 < int8.values["max_difference"] < 0.1  # the vectors have length 1


def test_missing_backends_are_listed(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    result = bench_texts(str(minilm), ["text"], Settings(rounds=1))
    assert [each.what for each in result.not_run] == list(TEXT_BASELINES)
    assert result.not_run[0].reason == "not installed (pip install 'quiver-retrieval[train]')"
    assert result.not_run[-1].reason == "not installed (pip install 'sentence-transformers[openvino]')"
    with pytest.raises(InputError, match=r"quiver-retrieval\[train\]"):
        bench_texts(str(minilm), ["text"], Settings(), backends=["sentence-transformers"])


def test_onnx_supports_float32_only() -> None:
    assert dtype_reason(Settings(dtype="bfloat16"), ["float32"]) == "supports float32, not bfloat16"
    assert dtype_reason(Settings(dtype="float32"), ["float32"]) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
def test_memory_is_measured(minilm: Path) -> None:
    result = bench_texts(str(minilm), ["granite is a hard stone " * 40] * 4, Settings(rounds=1, memory=True, threads=1), backends=[])
    (quiver,) = result.cases[0].rows
    assert int(quiver.values["memory_above"] or 0) > int(result.cases[0].metadata["tokens"] or 0) * 384 * 4
    assert int(quiver.values["memory_before"] or 0) > int(result.metadata["parameters"] or 0) * 4


@pytest.mark.parametrize(
    ("settings", "option"),
    [({"train": True}, "--train"), ({"batch_size": 4}, "--batch-size"), ({"largest_batch": True, "memory_gib": 1.0}, "--largest-batch")],
)
def test_settings_for_token_ids_are_refused(minilm: Path, settings: dict[str, object], option: str) -> None:
    with pytest.raises(InputError, match=f"{option} is for token ids"):
        bench_texts(str(minilm), ["text"], Settings(**settings))  # type: ignore[arg-type]


def test_bad_input_is_named(minilm: Path) -> None:
    with pytest.raises(InputError, match="nothing to encode"):
        bench_texts(str(minilm), [], SETTINGS)
    with pytest.raises(InputError, match="unknown backend 'fast'; choose from quiver-int8, sentence-transformers, "):
        bench_texts(str(minilm), ["text"], SETTINGS, backends=["fast"])
    with pytest.raises(ValueError, match="rounds must be >= 1"):
        bench_texts(str(minilm), ["text"], Settings(rounds=0))
