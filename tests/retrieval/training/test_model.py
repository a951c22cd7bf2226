"""Starting models of both kinds, from random weights and from checkpoints, with settings of the recipe and of the checkpoint."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quiver.encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights, load_encoder, save_encoder
from quiver.encoder.schema import validate
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ModelFolder
from quiver.retrieval.training import model as module
from quiver.retrieval.training.model import build_model, require_extra
from quiver.retrieval.training.recipe import RULES, Recipe, load_recipe

TEXTS = ["how wide is the window of a local layer", "A bird has wings, feathers and a beak!", "find what was asked for"]
DENSE = {"pooling": "mean", "normalize": True, "max_length": 32}
COLBERT = {"dim": 8, "query_length": 12, "document_length": 24}


def make_recipe(kind: str, model: dict[str, Any], *, seed: int = 1) -> Recipe:
    described = dict.fromkeys(("name", "description", "source", "cost", "expected"), "as in the test")
    training = {"epochs": 1, "batch_size": 2, "learning_rate": 1e-3, "warmup_ratio": 0, "scheduler": "linear", "weight_decay": 0}
    training |= {"max_grad_norm": 1, "seed": seed, "dtype": "float32", "no_duplicates": False, "log_every": 1}
    loss = {"name": "mnrl" if kind == "dense" else "contrastive"}
    raw = described | {"kind": kind, "model": model, "data": {"train": "rows.jsonl"}, "loss": loss, "training": training}
    recipe, problems = validate(Recipe, raw, RULES)
    assert recipe is not None, problems
    return recipe


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A bare encoder with its vocabulary; the embedding has rows that no token uses."""
    tokenizer = Tokenizer.train(TEXTS, vocab_size=300, max_length=64)
    layers = ["global", "local"]
    config = EncoderConfig.modernbert(
        vocab_size=320, hidden_size=16, num_heads=2, intermediate_size=24, layer_types=layers, max_positions=64
    )
    folder = tmp_path / "bare"
    folder.mkdir()
    save_encoder(init_weights(Encoder(config), seed=5), folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture
def biencoder(bare: Path, tmp_path: Path) -> Path:
    """A bi-encoder with lower-casing, prompts excluded from pooling, and two Dense modules."""
    torch.manual_seed(2)
    projections = (Projection(16, 12, bias=True), Projection(12, 6, activation="torch.nn.modules.activation.Tanh"))
    settings = ModelFolder("dense", bare, lower_case=True, include_prompt=False, projections=projections, query_prompt="q: ", max_length=20)
    BiEncoder.from_parts(load_encoder(bare), Tokenizer.from_pretrained(bare), settings).save_pretrained(tmp_path / "biencoder")
    return tmp_path / "biencoder"


@pytest.fixture
def colbert(bare: Path, tmp_path: Path) -> Path:
    """A ColBERT with two projections and a prefix of its own."""
    model = build_model(make_recipe("colbert", {"init": str(bare), "colbert": COLBERT | {"query_prefix": "[A] "}}), [])
    torch.manual_seed(2)
    projections = (Projection(16, 12), Projection(12, 8))
    settings = replace(model.settings, lower_case=True, projections=projections)
    ColBERT.from_parts(model.encoder, model.tokenizer, settings).save_pretrained(tmp_path / "colbert")
    return tmp_path / "colbert"


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    mine, yours = one.state_dict(), other.state_dict()
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)


def test_a_dense_model_keeps_settings_that_the_recipe_does_not_set(biencoder: Path) -> None:
    model = build_model(make_recipe("dense", {"init": str(biencoder), **DENSE, "document_prompt": "d: ", "normalize": False}), [])
    old = BiEncoder(biencoder)
    assert isinstance(model, BiEncoder)
    assert same_weights(model.projections, old.projections)
    assert (model.dim, model.settings.lower_case, model.settings.include_prompt) == (6, True, False)
    assert (model.settings.query_prompt, model.settings.document_prompt, model.max_length) == ("q: ", "d: ", 32)
    assert (model.settings.pooling, model.settings.normalize, model.settings.similarity) == ("mean", False, "dot")
    assert not model.encoder.prepacked


def test_a_dense_model_starts_from_an_encoder_or_a_colbert(bare: Path, colbert: Path) -> None:
    from_bare = build_model(make_recipe("dense", {"init": str(bare), **DENSE}), [])
    assert (from_bare.dim, len(from_bare.tokenizer), from_bare.encoder.config.vocab_size) == (16, 300, 320)
    from_colbert = build_model(make_recipe("dense", {"init": str(colbert), **DENSE}), [])
    assert isinstance(from_colbert, BiEncoder)
    assert from_colbert.dim == 16
    assert from_colbert.settings.lower_case
    assert same_weights(from_colbert.encoder, load_encoder(colbert))


def test_a_colbert_gets_a_projection_and_prefixes(bare: Path, biencoder: Path, tmp_path: Path) -> None:
    models = [build_model(make_recipe("colbert", {"init": str(init), "colbert": COLBERT}), []) for init in (bare, biencoder)]
    assert [model.settings.lower_case for model in models] == [False, True]
    for model in models:
        assert isinstance(model, ColBERT)
        assert model.settings.colbert.skiplist == tuple(string.punctuation)
        torch.manual_seed(1)
        assert torch.equal(model.projections[0].linear.weight, nn.Linear(16, 8, bias=False).weight)
        old = load_encoder(bare).embeddings.tokens.weight
        rows = model.encoder.embeddings.tokens.weight
        assert torch.equal(rows[:300], old[:300])
        assert torch.equal(rows[302:], old[302:])
        # Drawn as the others are spread: neither far from them nor all but equal.
        assert (rows[300] - rows[301]).norm() > 0.3 * torch.pdist(old[:300]).median()
        assert rows[300:302].norm(dim=1).max() < 2 * old[:300].norm(dim=1).max()
        assert [model.tokenizer.token_id(prefix) for prefix in ("[Q] ", "[D] ")] == [300, 301]
        model.save_pretrained(tmp_path / "model")
        assert ColBERT(tmp_path / "model").card.fingerprint == model.card.fingerprint


@pytest.mark.parametrize("dim", [8, 16, 24])
def test_an_orthogonal_projection_keeps_inner_products(dim: int, bare: Path) -> None:
    asked = COLBERT | {"dim": dim, "projection": "orthogonal"}
    first, again = (build_model(make_recipe("colbert", {"init": str(bare), "colbert": asked}), []) for _ in range(2))
    drawn = build_model(make_recipe("colbert", {"init": str(bare), "colbert": COLBERT | {"dim": dim}}), [])
    assert isinstance(first, ColBERT)
    weight = first.projections[0].linear.weight.detach()
    assert torch.equal(weight, again.projections[0].linear.weight)
    assert not torch.allclose(weight, drawn.projections[0].linear.weight)
    assert torch.equal(weight, torch.eye(dim)) == (dim == 16)
    hidden = torch.randn(5, 16)
    if dim < 16:  # what is left of a rotation: lengths only shrink, rows stay perpendicular
        torch.testing.assert_close(weight @ weight.T, torch.eye(dim), atol=1e-5, rtol=0)
        assert ((hidden @ weight.T).norm(dim=1) < hidden.norm(dim=1)).all()
    else:
        torch.testing.assert_close((hidden @ weight.T) @ (hidden @ weight.T).T, hidden @ hidden.T, atol=1e-5, rtol=1e-5)


def test_new_prefixes_are_drawn_by_the_seed_around_the_mean(bare: Path) -> None:
    tokens = ["[Q] ", "[D] ", *(f"[T{number}] " for number in range(2000))]
    tables = []
    for seed in (1, 1, 2):
        parts = module.load_parts(bare)
        module.add_tokens(parts, tokens, seed=seed)
        tables.append(parts.encoder.embeddings.tokens.weight.detach())
    assert torch.equal(tables[0], tables[1])
    assert not torch.isclose(tables[0][300:], tables[2][300:]).all(dim=1).any()
    old, new = tables[0][:300], tables[0][300:]
    assert len(new) == 2002
    torch.testing.assert_close(new.mean(0), old.mean(0), atol=4 * old.std().item() / 2002**0.5, rtol=0)
    torch.testing.assert_close(new.std(0), old.std(0), atol=0, rtol=0.1)


def test_of_a_cross_encoder_the_encoder_is_trained_with_a_warning(bare: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((bare / "config.json").read_text())
    for named in ({"architectures": ["ModernBertForSequenceClassification"]}, {"architectures": None}):
        (bare / "config.json").write_text(json.dumps(config | named))
        model = build_model(make_recipe("dense", {"init": str(bare), **DENSE}), [])
        assert same_weights(model.encoder, load_encoder(bare))
        # As version 6 of sentence-transformers saves it.
        transformer = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
        (bare / "modules.json").write_text(json.dumps([transformer]))
        (bare / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder"}))
    first, second = caplog.messages
    assert first == f"{bare}: a cross-encoder or classifier; training starts from its encoder, without its head"
    assert second == f"{bare}: a cross-encoder of sentence-transformers; training starts from its encoder, without its head"


def test_a_colbert_keeps_its_projections_and_its_prefixes(colbert: Path) -> None:
    asked = {"query_prefix": "[A] ", "document_prefix": "[B] ", "skiplist": "none", "query_expansion": False, "attend_to_expansion": True}
    model = build_model(make_recipe("colbert", {"init": str(colbert), "colbert": COLBERT | asked}), [])
    old = ColBERT(colbert)
    assert same_weights(model.projections, old.projections)
    assert model.settings.lower_case
    assert [model.tokenizer.token_id(token) for token in ("[A] ", "[D] ", "[B] ")] == [300, 301, 302]
    assert torch.equal(model.encoder.embeddings.tokens.weight[:302], load_encoder(colbert).embeddings.tokens.weight[:302])
    settings = model.settings.colbert
    assert (settings.skiplist, settings.query_expansion, settings.attend_to_expansion) == ((), False, False)
    with pytest.raises(InputError, match=r"model\.colbert\.dim: must be 8, the width of the projection of .*colbert, got 128"):
        build_model(make_recipe("colbert", {"init": str(colbert), "colbert": COLBERT | {"dim": 128}}), [])
    with pytest.raises(InputError, match=r"model\.colbert\.projection: orthogonal initializes a new projection, but .*colbert has one"):
        build_model(make_recipe("colbert", {"init": str(colbert), "colbert": COLBERT | {"projection": "orthogonal"}}), [])


def test_settings_that_do_not_fit_the_checkpoint_are_refused(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="query_length or document_length 65 exceeds the encoder's 64 positions"):
        build_model(make_recipe("colbert", {"init": str(bare), "colbert": COLBERT | {"document_length": 65}}), [])
    with pytest.raises(InputError, match="max_seq_length 65 exceeds the encoder's 64 positions"):
        build_model(make_recipe("dense", {"init": str(bare), **DENSE, "max_length": 65}), [])
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match="not a model"):
        build_model(make_recipe("dense", {"init": str(tmp_path / "nothing"), **DENSE}), [])


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (_, names) in module.LIBRARIES.items() for name in names])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None if asked == name else object())
    extra = {"dense": "train", "colbert": "colbert"}[kind]
    with pytest.raises(InputError, match=rf"training needs {name}: pip install 'quiver-retrieval\[{extra}\]'"):
        require_extra(kind)


def test_a_checkpoint_keeps_its_settings_where_the_recipe_has_none(biencoder: Path, colbert: Path) -> None:
    dense, tokens = BiEncoder(biencoder), ColBERT(colbert)
    for kind, path, old in (("dense", biencoder, dense), ("colbert", colbert, tokens)):
        model = build_model(make_recipe(kind, {"init": str(path)}), [])
        assert replace(model.settings, projections=()) == replace(old.settings, projections=())
        assert same_weights(model.projections, old.projections)
    changed = build_model(make_recipe("colbert", {"init": str(colbert), "colbert": {"query_length": 9, "skiplist": "none"}}), [])
    assert changed.settings.colbert == replace(tokens.settings.colbert, query_length=9, skiplist=())


def other_start(kind: str, model: dict[str, Any], init: Path, *overrides: str) -> Recipe:
    raw = make_recipe(kind, {"init": "some/encoder", **model}).model_dump()
    return load_recipe(raw, [f"model.init={init}", *overrides])


@pytest.mark.parametrize(
    ("pooling", "normalize", "similarity"), [("cls", False, "cosine"), ("max", True, "dot"), ("lasttoken", True, "cosine")]
)
def test_another_start_keeps_its_settings_and_the_log_says_so(
    bare: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, pooling: str, normalize: bool, similarity: str
) -> None:
    settings = ModelFolder("dense", bare, pooling=pooling, normalize=normalize, max_length=20, query_prompt="find: ", similarity=similarity)  # type: ignore[arg-type]
    start = tmp_path / "start"
    BiEncoder.from_parts(load_encoder(bare), Tokenizer.from_pretrained(bare), settings).save_pretrained(start)
    model = build_model(other_start("dense", DENSE | {"query_prompt": "q: "}, start), [])
    assert replace(model.settings, encoder_folder=bare, prompts={}) == replace(settings, prompts={})
    [line] = caplog.messages
    assert f"{start} keeps its own settings" in line
    assert f"pooling '{pooling}', not the recipe's 'mean'" in line
    assert "query_prompt 'find: ', not the recipe's 'q: '" in line
    assert ("normalize" in line) is ((normalize, similarity) != (True, "cosine"))
    old = BiEncoder.from_parts(load_encoder(bare), Tokenizer.from_pretrained(bare), settings)
    np.testing.assert_array_equal(model.encode_query(TEXTS), old.encode_query(TEXTS))
    caplog.clear()
    asked = build_model(other_start("dense", DENSE, start, "model.pooling=mean", "model.max_length=null"), [])
    assert (asked.settings.pooling, asked.settings.max_length, asked.settings.query_prompt) == ("mean", 20, "find: ")
    assert any(f"changes settings of {start}: pooling from '{pooling}' to 'mean'" in line for line in caplog.messages)
    later = load_recipe(other_start("dense", DENSE, start), {"model.pooling": "mean"})
    assert build_model(later, []).settings.pooling == "mean"
