"""The benchmark over texts: turns and differences with stand-ins, and once with a real model and a real peer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from quiver.encoder import InputError
from quiver.eval.bench.encoder import Settings, bench_texts, texts
from quiver.eval.bench.encoder.text_libraries import TEXT_PEERS, Encode, TextLibrary, open_biencoder, own_encode

SETTINGS = Settings(rounds=3)


def test_everyone_encodes_in_turns_after_a_warm_up(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    own = open_biencoder(str(minilm), SETTINGS)
    encode = own_encode(own)
    monkeypatch.setattr(texts, "open_biencoder", lambda model, settings: own)
    monkeypatch.setattr(texts, "own_encode", lambda own: lambda batch: turns.append("quiver") or encode(batch))

    def load_peer(model: str, settings: Settings, given: Sequence[str]) -> Encode:
        assert (model, settings, given) == (str(minilm), SETTINGS, ["one text", "another one"])
        return lambda batch: turns.append("peer") or encode(batch) + np.float32(0.25)

    peer = TextLibrary(load_peer, lambda settings: None)
    monkeypatch.setattr(texts, "TEXT_LIBRARIES", {"quiver": peer, "peer": peer})
    result = bench_texts(str(minilm), ["one text", "another one"], SETTINGS, name="two", peers=["peer"])
    assert turns == ["quiver", "peer", "quiver", "peer", "peer", "quiver", "quiver", "peer"]
    (found,) = result.sets
    assert (found.name, found.documents, found.tokens, found.shortest, found.longest) == ("two", 2, 8, 4, 4)  # [CLS] and [SEP]
    assert found.batch_documents is None
    quiver, other = found.libraries
    assert (quiver.name, other.name) == ("quiver", "peer")
    np.testing.assert_allclose(other.ratios, np.divide(other.seconds, quiver.seconds))
    np.testing.assert_allclose([quiver.max_difference, other.max_difference], [0, 0.25], atol=1e-6)


@pytest.mark.parity
def test_sentence_transformers_gives_the_same_vectors(minilm: Path) -> None:
    pytest.importorskip("sentence_transformers")
    documents = ["a bird has two wings", "", "granite is a hard stone " * 80]
    result = bench_texts(str(minilm), documents, Settings(rounds=1), peers=["sentence-transformers"])
    quiver, peer = result.sets[0].libraries
    assert result.sets[0].longest == 256  # cut
    assert peer.max_difference < 1e-5
    assert min(*quiver.seconds, *peer.seconds) > 0


@pytest.mark.parity
def test_sentence_transformers_in_bfloat16(minilm: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("sentence_transformers")
    made: list[object] = []
    original = library.SentenceTransformer

    def remember(*arguments: object, **options: object) -> object:
        made.append(original(*arguments, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "SentenceTransformer", remember)
        encode = TEXT_PEERS["sentence-transformers"].load(str(minilm), Settings(dtype="bfloat16"), [])
    (encoder,) = made
    assert {weight.dtype for weight in encoder.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]
    assert encode(["a bird"]).dtype == np.float32


@pytest.mark.parity
@pytest.mark.parametrize("backend", ["onnx", "openvino"])
def test_the_other_backends(minilm: Path, backend: str) -> None:
    names = [f"sentence-transformers-{backend}", f"sentence-transformers-{backend}-int8"]
    if reason := TEXT_PEERS[names[0]].unsupported_reason(Settings()):
        pytest.skip(reason)
    documents = [f"bird number {number} has {number} wings" for number in range(20)]
    _, plain, int8 = bench_texts(str(minilm), documents, Settings(rounds=1, threads=1), peers=names).sets[0].libraries
    assert plain.max_difference < 1e-5
    assert 1e-4 < int8.max_difference < 0.1  # the vectors have length 1


def test_backends_that_are_missing_are_listed(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    result = bench_texts(str(minilm), ["text"], Settings(rounds=1))
    assert [each.what for each in result.not_run] == list(TEXT_PEERS)
    assert result.not_run[0].reason == "not installed (pip install 'quiver-retrieval[train]')"
    assert result.not_run[-1].reason == "not installed (pip install 'sentence-transformers[openvino]')"
    with pytest.raises(InputError, match=r"quiver-retrieval\[train\]"):
        bench_texts(str(minilm), ["text"], Settings(), peers=["sentence-transformers"])


def test_onnx_is_not_compared_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quiver.eval.bench.encoder.text_libraries._importable", lambda module: True)
    half = Settings(dtype="bfloat16")
    assert TEXT_PEERS["sentence-transformers-onnx"].unsupported_reason(half) == "runs float32, not bfloat16"
    assert TEXT_PEERS["sentence-transformers-onnx-int8"].unsupported_reason(half) is None
    assert TEXT_PEERS["sentence-transformers-openvino"].unsupported_reason(half) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
def test_memory(minilm: Path) -> None:
    result = bench_texts(str(minilm), ["granite is a hard stone " * 40] * 4, Settings(rounds=1, memory=True, threads=1), peers=[])
    (quiver,) = result.sets[0].libraries
    assert quiver.memory is not None
    assert quiver.memory.above > result.sets[0].tokens * 384 * 4
    assert quiver.memory.before > result.parameters * 4


@pytest.mark.parametrize(
    ("settings", "option"),
    [({"train": True}, "--train"), ({"batch_size": 4}, "--batch-size"), ({"largest_batch": True, "memory_gib": 1.0}, "--largest-batch")],
)
def test_settings_for_token_ids(minilm: Path, settings: dict[str, object], option: str) -> None:
    with pytest.raises(InputError, match=f"{option} is for sets of token ids"):
        bench_texts(str(minilm), ["text"], Settings(**settings))  # type: ignore[arg-type]


def test_bad_input_is_named(minilm: Path) -> None:
    with pytest.raises(InputError, match="nothing to encode"):
        bench_texts(str(minilm), [], SETTINGS)
    with pytest.raises(InputError, match="unknown peer 'fast'; there are quiver-int8, sentence-transformers, "):
        bench_texts(str(minilm), ["text"], SETTINGS, peers=["fast"])
    with pytest.raises(ValueError, match="rounds must be >= 1"):
        bench_texts(str(minilm), ["text"], Settings(rounds=0))
