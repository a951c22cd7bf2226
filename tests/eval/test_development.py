"""The score that a run is watched by is that of ``evaluate``, for models with and without a vector a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quiver.encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights
from quiver.eval.development import development_scorer
from quiver.eval.evaluation import evaluate
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.training.recipe import DevelopmentSection

MakeCollection = Callable[..., Path]
WORDS = ("oak", "elm", "ash", "fir", "yew", "bay", "fig", "box", "sloe", "hazel", "larch", "rowan")


def _tokenizer() -> Tokenizer:
    return Tokenizer.train([" ".join(WORDS)] * 3, vocab_size=320, max_length=64)


def _encoder(tokenizer: Tokenizer) -> Encoder:
    config = EncoderConfig.modernbert(
        vocab_size=320,
        hidden_size=32,
        num_heads=2,
        intermediate_size=32,
        layer_types=("global", "local"),
        max_positions=64,
        window=8,
        global_theta=10_000.0,
        local_theta=10_000.0,
        pad_token_id=tokenizer.special_id("pad") or 0,
        cls_token_id=tokenizer.special_id("cls"),
        sep_token_id=tokenizer.special_id("sep"),
    )
    return init_weights(Encoder(replace(config, embedding_dropout=0.5)), seed=3).eval()


def _dense(tmp_path: Path) -> BiEncoder:
    tokenizer = _tokenizer()
    settings = ModelFolder("dense", tmp_path, pooling="mean", normalize=True, similarity="cosine", max_length=32)
    return BiEncoder.from_parts(_encoder(tokenizer), tokenizer, settings, source="tiny dense")


def _colbert(tmp_path: Path) -> ColBERT:
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    colbert = ColBERTSettings(query_prefix="", document_prefix="", query_length=8, document_length=32)
    settings = ModelFolder("colbert", tmp_path, projections=(Projection(32, 16),), similarity="maxsim", colbert=colbert)
    return ColBERT.from_parts(_encoder(tokenizer), tokenizer, settings, source="tiny ColBERT")


MODELS: dict[str, Callable[[Path], Any]] = {"dense": _dense, "colbert": _colbert}


@pytest.fixture
def folder(make_collection: MakeCollection) -> Path:
    """Sixty documents, among them one text thirty times over: which of those are the first ten is a matter of ids alone."""
    draw = np.random.default_rng(5)
    texts = [" ".join(draw.choice(WORDS, 4)) for _ in range(30)] + ["oak elm ash fir"] * 30
    documents = {f"d{place:02}": ("", text) for place, text in enumerate(texts)}
    queries = {f"q{place}": texts[place] for place in range(6)} | {"ties": "oak elm ash fir"}
    qrels = {f"q{place}": {f"d{place:02}": 1, f"d{place + 6:02}": 2} for place in range(6)} | {"ties": {"d35": 1, "d52": 1}}
    return make_collection("trees", documents=documents, queries=queries, qrels=qrels)


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_the_score_of_evaluate(kind: str, folder: Path, tmp_path: Path) -> None:
    model = MODELS[kind](tmp_path)
    scorer = development_scorer(DevelopmentSection(data=str(folder), split="test"))
    expected = evaluate(MODELS[kind](tmp_path), folder, baselines=()).collections[0].measures["ndcg@10"]
    model.encoder.train()
    assert scorer(model) == {"trees.test": expected}
    assert 0 < expected < 1


def test_several_collections_are_scored_one_by_one(folder: Path, make_collection: MakeCollection, tmp_path: Path) -> None:
    other = make_collection(
        "shrubs",
        documents={f"s{place}": ("", f"{word} {WORDS[0]}") for place, word in enumerate(WORDS)},
        queries={"q0": "elm oak"},
        qrels={"q0": {"s1": 1}},
    )
    scores = development_scorer(DevelopmentSection(data=(str(folder), str(other)), split="test"))(_dense(tmp_path))
    alone = [development_scorer(DevelopmentSection(data=str(each), split="test"))(_dense(tmp_path)) for each in (folder, other)]
    assert scores == alone[0] | alone[1]
    assert list(scores) == ["trees.test", "shrubs.test"]
    namesake = tmp_path / "elsewhere" / "trees"
    namesake.parent.mkdir()
    namesake.symlink_to(other)
    with pytest.raises(InputError, match=r"two collections are called trees\.test"):
        development_scorer(DevelopmentSection(data=(str(folder), str(namesake)), split="test"))


def test_missing_collections_are_one_line_with_the_command_that_downloads_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = ("beir/nfcorpus", str(folder), "beir/fiqa")
    with pytest.raises(
        InputError,
        match=r"^development\.data: .* lacks beir/nfcorpus, beir/fiqa, and offline mode is on; .*: quiver collections "
        r"fetch beir/nfcorpus beir/fiqa; .*development=null trains without one$",
    ):
        development_scorer(DevelopmentSection(data=data, split="test"))


def test_the_policy_of_a_published_collection_is_followed(make_collection: MakeCollection, tmp_path: Path) -> None:
    # ArguAna asks with documents: the query's own is no answer to it.
    texts = {f"t{place}": f"{WORDS[place]} {WORDS[place + 1]} {WORDS[place + 2]}" for place in range(8)}
    folder = make_collection(
        "arguana",
        documents={key: ("", text) for key, text in texts.items()},
        queries=texts,
        qrels={f"t{place}": {f"t{place + 1}": 1} for place in range(7)},
    )
    model = _dense(tmp_path)
    scored = evaluate(_dense(tmp_path), folder, baselines=()).collections[0]
    assert scored.exclude_self
    assert development_scorer(DevelopmentSection(data=str(folder), split="test"))(model) == {"arguana.test": scored.measures["ndcg@10"]}


def test_the_model_and_the_random_numbers_are_left_as_they_were(folder: Path, tmp_path: Path) -> None:
    model = _dense(tmp_path)
    model.encoder.train()
    frozen = next(module for module in model.encoder.modules() if isinstance(module, nn.Embedding))
    frozen.eval()
    modes = [module.training for module in model.encoder.modules()]
    assert True in modes
    assert False in modes
    before = torch.get_rng_state()
    development_scorer(DevelopmentSection(data=str(folder), split="test"))(model)
    assert [module.training for module in model.encoder.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_read_is_found_when_the_scorer_is_made(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no split 'dev'; existing splits: test"):
        development_scorer(DevelopmentSection(data=str(folder)))
    with pytest.raises(InputError, match=r"^development\.data: unknown collection .*; .*development=null trains without one$"):
        development_scorer(DevelopmentSection(data=str(tmp_path / "nothing")))
    with (folder / "corpus.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"_id": "broken"\n')
    with pytest.raises(InputError, match=r"corpus\.jsonl:61"):
        development_scorer(DevelopmentSection(data=str(folder), split="test"))
