"""The encoding benchmark: turns, ratios and differences with stand-ins, and once with a real model and a real peer."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import eval.efficiency as module
from encoder.errors import InputError
from eval.efficiency import Timing, bench_encoding


def test_medians_and_ratios() -> None:
    timing = Timing("peer", seconds=(2.0, 4.0, 3.0), ratios=(2.0, 1.0, 4.0), texts=12, tokens=300, max_difference=0.0)
    assert (timing.texts_per_second, timing.tokens_per_second, timing.ratio) == (4.0, 100.0, 2.0)


def test_everyone_encodes_in_turns_after_a_warm_up(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    own = module.load_model(minilm)
    encode = own.encode
    monkeypatch.setattr(own, "encode", lambda *given: turns.append("quiver") or encode(*given))
    monkeypatch.setattr(module, "load_model", lambda source, device: own)

    def load_peer(model: str, device: str) -> module.Encode:
        assert (model, device) == (str(minilm), "cpu")
        return lambda texts: turns.append("peer") or encode(texts, "document").vectors + np.float32(0.25)

    monkeypatch.setattr(module, "PEERS", {"peer": load_peer})
    quiver, peer = bench_encoding(minilm, ["one text", "another one"], peers=["peer"], rounds=3)
    assert turns == ["quiver", "peer", "quiver", "peer", "peer", "quiver", "quiver", "peer"]
    assert (quiver.name, peer.name, quiver.texts, len(peer.seconds)) == ("quiver", "peer", 2, 3)
    assert quiver.ratios == (1.0, 1.0, 1.0)
    np.testing.assert_allclose(peer.ratios, np.divide(peer.seconds, quiver.seconds))
    np.testing.assert_allclose([quiver.max_difference, peer.max_difference], [0, 0.25], atol=1e-6)
    assert quiver.tokens == peer.tokens == 8  # two words each, [CLS] and [SEP]


@pytest.mark.parity
def test_sentence_transformers_gives_the_same_vectors(minilm: Path) -> None:
    pytest.importorskip("sentence_transformers")
    texts = ["a bird has two wings", "", "granite is a hard stone " * 80]
    quiver, peer = bench_encoding(minilm, texts, peers=["sentence-transformers"], rounds=1)
    assert (quiver.name, peer.name) == ("quiver", "sentence-transformers")
    assert peer.max_difference < 1e-5
    assert min(*quiver.seconds, *peer.seconds) > 0


def test_bad_input_is_named(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="nothing to encode"):
        bench_encoding(minilm, [])
    with pytest.raises(InputError, match="unknown peer 'fast'; there are sentence-transformers"):
        bench_encoding(minilm, ["text"], peers=["fast"])
    with pytest.raises(ValueError, match="rounds must be >= 1"):
        bench_encoding(minilm, ["text"], rounds=0)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(InputError, match=r"quiver-retrieval\[train\]"):
        bench_encoding(minilm, ["text"])
