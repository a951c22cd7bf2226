"""Exported models in the libraries they are for, and models of sentence-transformers 6 in Quiver: equal vectors, 1e-5.

sentence-transformers 6 cannot be installed beside PyLate 1.6: ``QUIVER_ST6_PYTHON`` names an interpreter that has it, and without one
its tests skip.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.export import export_model
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.models.pretrained import load_parts

sentence_transformers = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")
models = pytest.importorskip("pylate.models")
pytestmark = pytest.mark.parity

QUERIES = ["which animal has wings", "how wide is the window of a local layer? " * 5 + "128", "late interaction", "x", "\n wings ", ""]
DOCUMENTS = [
    "A bird has wings, feathers and a beak!",
    "The window of a local layer is 128 tokens wide.",
    "Retrieval: find (quickly) what was asked for; ünïcode ❤ nothing else.",
    "MaxSim sums, over the query's tokens, the best similarity of each; " * 9 + "end.",
    "?",
    "  A bird\nhas wings and   a beak. \t\n",
    "a title [SEP] and a text ",
    "\u3000def find(texts):\n    return [MASK] \n\n",
]
WORKER = Path(__file__).with_name("sentence_transformers_6.py")


def tokenizer() -> Tokenizer:
    """Like ModernBERT's: byte-level, and runs of blanks are tokens that are found behind the normalizer."""
    trained = Tokenizer.train(DOCUMENTS + QUERIES, vocab_size=512, max_length=256)
    backend = tokenizers.Tokenizer.from_str(trained.to_json())
    backend.add_tokens([tokenizers.AddedToken(" " * length, normalized=True) for length in (2, 3, 4)])
    made = Tokenizer(backend, trained.settings)
    for prefix in ("[Q] ", "[D] "):
        made.add_token(prefix)
    return made


def modernbert() -> Encoder:
    config = EncoderConfig.modernbert(
        vocab_size=576,
        hidden_size=64,
        num_heads=2,
        intermediate_size=96,
        layer_types=["global", "local", "local", "global"],
        max_positions=256,
        window=32,
    )
    encoder = init_weights(Encoder(config), seed=11)
    torch.manual_seed(12)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return encoder


def with_more_tokens(encoder: Encoder, vocab_size: int) -> Encoder:
    """The same encoder with random rows behind its token embedding."""
    larger = Encoder(dataclasses.replace(encoder.config, vocab_size=vocab_size))
    state = encoder.state_dict()
    tokens = state["embeddings.tokens.weight"]
    state["embeddings.tokens.weight"] = torch.cat([tokens, torch.randn(vocab_size - len(tokens), tokens.shape[1]) * 0.02])
    larger.load_state_dict(state)
    return larger.eval()


@pytest.fixture(scope="module")
def sources(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models as Quiver saves them, by name."""
    root = tmp_path_factory.mktemp("sources")
    torch.manual_seed(13)
    tanh = Projection(64, 32, bias=True, activation="torch.nn.modules.activation.Tanh")
    dense = ModelFolder("dense", root, max_length=48, pooling="cls", normalize=True, projections=(tanh,))
    dense = dataclasses.replace(dense, query_prompt="query: ", document_prompt="passage: ")
    BiEncoder.from_parts(modernbert(), tokenizer(), dense).save_pretrained(root / "modernbert-dense")
    plain = dataclasses.replace(dense, projections=(), pooling="mean")
    BiEncoder.from_parts(modernbert(), tokenizer(), plain).save_pretrained(root / "modernbert-plain")
    unpooled = dataclasses.replace(plain, include_prompt=False)
    BiEncoder.from_parts(modernbert(), tokenizer(), unpooled).save_pretrained(root / "modernbert-unpooled")
    settings = ModelFolder("colbert", root, projections=(Projection(64, 16),), similarity="maxsim")
    colbert = ColBERTSettings(query_length=40, document_length=60)
    ColBERT.from_parts(modernbert(), tokenizer(), dataclasses.replace(settings, colbert=colbert)).save_pretrained(
        root / "modernbert-colbert"
    )
    parts = load_parts(minilm)
    for prefix in ("[Q] ", "[D] "):
        parts.tokenizer.add_token(prefix)
    encoder = with_more_tokens(parts.encoder, len(parts.tokenizer))
    settings = dataclasses.replace(settings, projections=(Projection(384, 64), Projection(64, 32)))
    # The last skipped word is no token: PyLate takes it for [UNK], and so for the heart; sentence-transformers 6 takes it for nothing.
    listed = ColBERTSettings(document_length=60, attend_to_expansion=True, skiplist=("!", "?", "no single token"))
    ColBERT.from_parts(encoder, parts.tokenizer, dataclasses.replace(settings, colbert=listed)).save_pretrained(root / "minilm-colbert")
    settings = dataclasses.replace(settings, projections=settings.projections[:1], colbert=ColBERTSettings())
    ColBERT.from_parts(encoder, parts.tokenizer, settings).save_pretrained(root / "minilm-stanford")
    without = ColBERTSettings(query_prefix="", document_prefix="", query_length=48, query_expansion=False, skiplist=())
    ColBERT.from_parts(encoder, parts.tokenizer, dataclasses.replace(settings, colbert=without)).save_pretrained(root / "minilm-plain")
    return {"minilm-dense": minilm, **{folder.name: folder for folder in root.iterdir()}}


def assert_equal(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.shape(one) == np.shape(other)
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-5, rtol=0)


# sentence-transformers 5, PyLate and transformers: the libraries of the train extra.


@pytest.mark.parametrize("name", ["minilm-dense", "modernbert-dense", "modernbert-unpooled"])
def test_a_bi_encoder_in_sentence_transformers(sources: dict[str, Path], tmp_path: Path, name: str) -> None:
    export_model(sources[name], tmp_path / "out", layout="sentence-transformers")
    ours, theirs = load_model(sources[name]), sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert_equal(theirs.encode_query(QUERIES), ours.encode_query(QUERIES))
    assert_equal(theirs.encode_document(DOCUMENTS), ours.encode_document(DOCUMENTS))


@pytest.mark.parametrize(
    ("name", "layout"), [("modernbert-colbert", "pylate"), ("minilm-colbert", "pylate"), ("modernbert-colbert", "stanford")]
)
def test_a_colbert_in_pylate(sources: dict[str, Path], tmp_path: Path, name: str, layout: str) -> None:
    export_model(sources[name], tmp_path / "out", layout=layout)
    ours, theirs = load_model(sources[name]), models.ColBERT(str(tmp_path / "out"), device="cpu")
    assert_equal(theirs.encode(QUERIES, is_query=True, show_progress_bar=False), ours.encode_query(QUERIES))
    assert_equal(theirs.encode(DOCUMENTS, is_query=False, show_progress_bar=False), ours.encode_document(DOCUMENTS))
    again = load_model(tmp_path / "out")
    assert_equal(again.encode_query(QUERIES), ours.encode_query(QUERIES))
    assert_equal(again.encode_document(DOCUMENTS), ours.encode_document(DOCUMENTS))


@pytest.mark.parametrize("name", ["minilm-dense", "modernbert-plain"])
def test_the_card_says_how_transformers_gives_the_vectors(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    export_model(sources[name], tmp_path / "out", layout="hf")
    [code] = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(code, scope)  # what a reader of the card would do
    ours = load_model(sources[name])
    settings = ours.settings
    assert_equal(scope["encode"](QUERIES, settings.query_prompt).numpy(), ours.encode_query(QUERIES))
    assert_equal(scope["encode"](DOCUMENTS, settings.document_prompt).numpy(), ours.encode_document(DOCUMENTS))


def test_a_model_of_pylates_own_goes_through(minilm: Path, tmp_path: Path) -> None:
    theirs = models.ColBERT(str(minilm), embedding_size=32, document_length=50, device="cpu")
    theirs.save_pretrained(str(tmp_path / "theirs"))
    export_model(tmp_path / "theirs", tmp_path / "ours", layout="pylate")
    again = models.ColBERT(str(tmp_path / "ours"), device="cpu")
    for is_query, texts in ((True, QUERIES), (False, DOCUMENTS)):
        expected = theirs.encode(texts, is_query=is_query, show_progress_bar=False)
        assert_equal(again.encode(texts, is_query=is_query, show_progress_bar=False), expected)


# sentence-transformers 6.


@pytest.fixture(scope="module")
def st6_python() -> str:
    """An interpreter with sentence-transformers 6 or later."""
    named = os.environ.get("QUIVER_ST6_PYTHON")
    if named is not None:
        return named
    try:
        major = int(version("sentence-transformers").partition(".")[0])
    except PackageNotFoundError:
        major = 0
    if major < 6:
        pytest.skip("QUIVER_ST6_PYTHON names no interpreter with sentence-transformers 6")
    return sys.executable


def in_st6(python: str, folder: Path, jobs: Sequence[dict[str, Any]]) -> list[tuple[list[Any], list[Any]]]:
    """What sentence-transformers 6 makes of each model: vectors of the queries and of the documents."""
    listed = [{**job, "vectors": str(folder / f"{place}.npz")} for place, job in enumerate(jobs)]
    file = folder / "job.json"
    file.write_text(json.dumps({"queries": QUERIES, "documents": DOCUMENTS, "models": listed}), encoding="utf-8")
    done = subprocess.run([python, str(WORKER), str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = []
    for job in listed:
        with np.load(job["vectors"]) as arrays:
            sides = [[arrays[f"{role} {n}"] for n in range(len(texts))] for role, texts in (("query", QUERIES), ("document", DOCUMENTS))]
        found.append((sides[0], sides[1]))
    return found


EXPORTS = [
    ("minilm-dense", "sentence-transformers"),
    ("modernbert-dense", "sentence-transformers"),
    ("modernbert-unpooled", "sentence-transformers"),
    ("minilm-colbert", "pylate"),
    ("modernbert-colbert", "pylate"),
    ("minilm-plain", "pylate"),
    ("minilm-colbert", "sentence-transformers"),
    ("modernbert-colbert", "sentence-transformers"),
    ("minilm-plain", "sentence-transformers"),
    ("minilm-stanford", "stanford"),
    ("modernbert-colbert", "stanford"),
]


@pytest.mark.slow
def test_exports_open_in_sentence_transformers_6(sources: dict[str, Path], tmp_path: Path, st6_python: str) -> None:
    jobs = []
    for name, layout in EXPORTS:
        exported = export_model(sources[name], tmp_path / f"{name}-{layout}", layout=layout)
        jobs.append({"kind": exported.kind, "folder": str(exported.folder)})
    found = in_st6(st6_python, tmp_path, jobs)
    assert len(found) == len(EXPORTS)
    for (name, layout), (queries, documents) in zip(EXPORTS, found, strict=True):
        for folder in (sources[name], tmp_path / f"{name}-{layout}"):
            ours = load_model(folder)
            assert_equal(queries, ours.encode_query(QUERIES))
            assert_equal(documents, ours.encode_document(DOCUMENTS))


@pytest.mark.slow
def test_models_of_sentence_transformers_6_open_here(minilm: Path, sources: dict[str, Path], tmp_path: Path, st6_python: str) -> None:
    exported = export_model(sources["modernbert-colbert"], tmp_path / "modernbert", layout="pylate").folder
    other = export_model(sources["minilm-colbert"], tmp_path / "minilm", layout="pylate").folder
    expansion = {"strategy": "fixed", "length": 24, "attend": False}
    changed = {"first": {"query_expansion": expansion, "document_length": 40}, "skiplist": [*string.punctuation, "no single token"]}
    starts = [
        {"kind": "dense", "folder": str(minilm)},
        {"kind": "dense", "folder": str(sources["modernbert-dense"]), "prompts": {"query": "q: ", "document": "d: "}},
        {"kind": "colbert", "folder": str(minilm)},
        {"kind": "colbert", "folder": str(minilm), **changed},
        {"kind": "colbert", "folder": str(minilm), "first": {"query_length": 12}},
        {"kind": "colbert", "folder": str(minilm), "first": {"query_expansion": {**expansion, "strategy": "min"}, "query_length": 50}},
        {"kind": "colbert", "folder": str(minilm), "prompts": {"query": "search_query: ", "document": "passage: "}},
        {"kind": "colbert", "folder": str(exported), "prompts": {"query": "query: ", "document": "passage: "}},
        {"kind": "colbert", "folder": str(exported)},
        {"kind": "colbert", "folder": str(other)},
    ]
    jobs = [{**start, "save": str(tmp_path / f"theirs-{place}")} for place, start in enumerate(starts)]
    found = in_st6(st6_python, tmp_path, jobs)
    assert len(found) == 10
    for job, (queries, documents) in zip(jobs, found, strict=True):
        ours = load_model(job["save"])
        assert_equal(ours.encode_query(QUERIES), queries)
        assert_equal(ours.encode_document(DOCUMENTS), documents)
