"""``quiver extend-positions``: models of every layout with absolute positions, length limits, and one-line errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quiver.encoder import Encoder, MaskedLM, Tokenizer, init_weights, load_head, preset, save_head
from quiver.encoder.checkpoints.checkpoint import to_hf_state
from quiver.encoder.files import read_json, write_json
from quiver.encoder.pretraining.position_extension import extend_positions
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.export import export_model, lengthen_model
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.models.pretrained import load_parts

WORDS = ["a", "bird", "has", "wings", "and", "the", "sea", "is", "deep"]


def text(words: int) -> str:
    return " ".join(WORDS[place % len(WORDS)] for place in range(words))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    settings = ModelFolder("dense", tmp_path, max_length=20, normalize=True, projections=(Projection(16, 8),))
    BiEncoder.from_parts(*encoder_and_tokenizer("bert-base"), settings).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def encoder_and_tokenizer(name: str) -> tuple[Encoder, Tokenizer]:
    tokenizer = Tokenizer.train([text(200)], vocab_size=300, max_length=32)
    config = replace(
        preset(name), vocab_size=310, hidden_size=16, num_heads=2, intermediate_size=24, layer_types=("global",) * 2, max_positions=32
    )
    return init_weights(Encoder(config), seed=3).eval(), tokenizer


def test_a_bi_encoder_reads_longer_texts(quiver: Callable[..., Any], dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "longer"
    done = quiver("extend-positions", dense, "--factor", 4, "--out", out)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"model: {out} (32 -> 128 positions; texts are truncated to 20 -> 128 tokens)\n"
    old, new = load_model(dense), load_model(out)
    assert isinstance(old, BiEncoder)
    assert isinstance(new, BiEncoder)
    counts = new.encode_texts([text(100)], "document").counts
    assert (counts.tokens, counts.truncated) == (102, 0)
    assert old.encode_texts([text(100)], "document").counts.truncated == 1
    # What stands behind the old limit counts.
    assert not np.allclose(new.encode_document([text(99) + " wings"]), new.encode_document([text(99) + " deep"]), atol=1e-5)
    # The same as the encoder extended in memory, behind the same Dense module.
    parts = load_parts(dense)
    expected = BiEncoder.from_parts(extend_positions(parts.encoder, 4), parts.tokenizer, replace(parts.settings, max_length=128))
    np.testing.assert_allclose(new.encode_document([text(5), text(100)]), expected.encode_document([text(5), text(100)]), atol=1e-6)
    assert {file.name for file in out.iterdir()} == {file.name for file in dense.iterdir()}


def test_an_adapter_is_added_to_the_weights_of_the_longer_model(dense: Path, tmp_path: Path) -> None:
    """And its files are left out, so that it is not added twice; the tokenizer of its base comes along."""
    folder, start = tmp_path / "adapted", "base_model.model.encoder.layer.0.attention.self.query.lora_"
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("config.json", "model.safetensors", "tokenizer*"), dirs_exist_ok=True)
    for module in (path.parent for path in dense.glob("*/config.json")):
        shutil.copytree(module, folder / module.name, dirs_exist_ok=True)
    settings = {"peft_type": "LORA", "r": 1, "target_modules": ["query"], "base_model_name_or_path": str(dense)}
    write_json(folder / "adapter_config.json", settings)
    width = load_parts(dense).encoder.config.hidden_size
    save_file({f"{start}A.weight": torch.arange(width)[None] / width, f"{start}B.weight": torch.ones(width, 1)},
              folder / "adapter_model.safetensors")  # fmt: skip
    lengthen_model(folder, tmp_path / "longer", factor=2)
    short, long = BiEncoder(folder), BiEncoder(tmp_path / "longer")
    assert (short.encoder.config.max_positions, long.encoder.config.max_positions) == (32, 64)
    query = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(to_hf_state(load_parts(tmp_path / "longer").encoder)[query], to_hf_state(load_parts(folder).encoder)[query])
    assert not torch.equal(to_hf_state(load_parts(folder).encoder)[query], to_hf_state(load_parts(dense).encoder)[query])
    assert not list((tmp_path / "longer").glob("adapter*"))


@pytest.mark.parametrize("layout", ["pylate", "sentence-transformers"])
def test_documents_of_a_colbert_model_get_longer_and_queries_do_not(quiver: Callable[..., Any], tmp_path: Path, layout: str) -> None:
    encoder, tokenizer = encoder_and_tokenizer("roberta-base")
    for token in ("[Q] ", "[D] "):
        tokenizer.add_token(token)
    colbert = ColBERTSettings(query_length=12, document_length=30)
    settings = ModelFolder("colbert", tmp_path, projections=(Projection(16, 8, bias=False),), similarity="maxsim", colbert=colbert)
    ColBERT.from_parts(encoder, tokenizer, settings).save_pretrained(tmp_path / "own")
    export_model(tmp_path / "own", tmp_path / "old", layout=layout)
    done = quiver("extend-positions", tmp_path / "old", "--factor", 2, "--out", tmp_path / "new")
    assert (done.code, done.err) == (0, "")
    assert "32 -> 64 positions; texts are truncated to 30 -> 64 tokens" in done.out
    new = load_model(tmp_path / "new")
    assert isinstance(new, ColBERT)
    assert (new.settings.colbert.query_length, new.settings.colbert.document_length) == (12, 64)
    assert read_json(tmp_path / "new" / "sentence_bert_config.json")["max_seq_length"] == 64
    assert read_json(tmp_path / "new" / "config.json")["max_position_embeddings"] == 66


def test_mistakes_are_reported_in_one_line_and_write_nothing(quiver: Callable[..., Any], dense: Path, tmp_path: Path) -> None:
    rope = tmp_path / "rope"
    tokenizer = Tokenizer.train([text(200)], vocab_size=300, max_length=32)
    config = replace(preset("modernbert-base"), vocab_size=310, hidden_size=16, num_heads=2, intermediate_size=24, layer_types=("global",))
    BiEncoder.from_parts(init_weights(Encoder(config), seed=3), tokenizer, ModelFolder("dense", tmp_path, max_length=20)).save_pretrained(
        rope
    )
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    file.write_text("mine")
    out = tmp_path / "out"
    cases: list[tuple[list[Any], str]] = [
        ([rope, "--factor", 2, "--out", out], "no table of position embeddings to extend"),
        ([dense, "--factor", 0, "--out", out], "--factor"),
        ([dense, "--factor", 2, "--out", out, "--max-length", 65], "max_length must be 3 to 64"),
        ([dense, "--factor", 2, "--out", out, "--plot", tmp_path / "x.pdf"], "must end in .png or .svg"),
        ([dense, "--factor", 2, "--out", full], "not empty"),
        ([dense, "--factor", 2, "--out", full, "--overwrite"], "it does not hold a model"),
        ([dense, "--factor", 2, "--out", file], "is a file"),
        ([dense, "--factor", 2, "--out", dense, "--overwrite"], "contains the model to export, or lies in its folder"),
        ([dense, "--factor", 2, "--out", dense / "inside"], "contains the model to export, or lies in its folder"),
        ([full, "--factor", 2, "--out", out], "not a model"),
    ]
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments, complaint in cases:
        done = quiver("extend-positions", *arguments)
        assert done.code == 2, arguments
        assert complaint in done.err
        assert done.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (full / "notes.txt").read_text() == "mine"


def test_a_bare_masked_lm_keeps_its_head(quiver: Callable[..., Any], tmp_path: Path) -> None:
    encoder, tokenizer = encoder_and_tokenizer("roberta-base")
    save_head(MaskedLM(encoder), tmp_path / "old")
    tokenizer.save(tmp_path / "old")
    done = quiver("extend-positions", tmp_path / "old", "--factor", 2, "--out", tmp_path / "new")
    assert (done.code, done.err) == (0, "")
    assert "32 -> 64 positions; texts are truncated to 64 tokens" in done.out
    assert load_head(MaskedLM, tmp_path / "new").encoder.config.max_positions == 64
    assert Tokenizer.from_pretrained(tmp_path / "new").max_length == 64


def test_extending_a_stanford_folder_is_refused(quiver: Callable[..., Any], tmp_path: Path) -> None:
    encoder, tokenizer = encoder_and_tokenizer("bert-base")
    for token in ("[unused0]", "[unused1]"):
        tokenizer.add_token(token)
    colbert = ColBERTSettings("[unused0]", "[unused1]", query_length=12, document_length=30)
    settings = ModelFolder("colbert", tmp_path, projections=(Projection(16, 8, bias=False),), similarity="maxsim", colbert=colbert)
    ColBERT.from_parts(encoder, tokenizer, settings).save_pretrained(tmp_path / "own")
    export_model(tmp_path / "own", tmp_path / "old", layout="stanford")
    done = quiver("extend-positions", tmp_path / "old", "--factor", 2, "--out", tmp_path / "new")
    assert done.code == 2
    assert "quiver export --layout pylate" in done.err
    assert not (tmp_path / "new").exists()


def test_other_forms_of_the_old_weights_are_not_copied_from_a_subfolder(dense: Path, tmp_path: Path) -> None:
    old, inner = tmp_path / "old", tmp_path / "old" / "0_Transformer"
    inner.mkdir(parents=True)
    for path in dense.iterdir():
        at_top = path.is_dir() or path.name in ("modules.json", "config_sentence_transformers.json")
        path.rename((old if at_top else inner) / path.name)
    modules = json.loads((old / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (old / "modules.json").write_text(json.dumps(modules))
    (inner / "pytorch_model.bin").write_bytes(b"the old weights")
    (inner / "onnx").mkdir()
    new = tmp_path / "new"
    lengthen_model(old, new, factor=2)
    left = {path.relative_to(old) for path in old.rglob("*")} - {path.relative_to(new) for path in new.rglob("*")}
    assert sorted(map(str, left)) == ["0_Transformer/onnx", "0_Transformer/pytorch_model.bin"]
    assert load_model(new).card.document_length == 64
