"""Our bi-encoder against sentence-transformers: vectors, prompts, poolings, both layouts of folders."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.loading import load_model

sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.parity

SENTENCE = "the retrieval of long documents by short queries needs vectors that keep what both of them say about wings"
WORDS = SENTENCE.split()


def texts_of(token_counts: list[int]) -> list[str]:
    """Texts of common words, about one token each, so that lengths in tokens are as asked."""
    generator = random.Random(5)
    return [" ".join(generator.choices(WORDS, k=count)) for count in token_counts]


TEXTS = [*texts_of([1, 2, 7, 15, 60, 61, 120, 250, 254, 256, 300, 420, 600]), "Ünïcode, ❤ and\ttabs\n", "", "  padded  "]


@pytest.fixture(scope="module")
def reference(minilm: Path) -> sentence_transformers.SentenceTransformer:
    return sentence_transformers.SentenceTransformer(str(minilm), device="cpu")


def test_minilm_vectors_are_equal_in_any_order(minilm: Path, reference: sentence_transformers.SentenceTransformer) -> None:
    model = load_model(minilm)
    assert isinstance(model, BiEncoder)
    expected = reference.encode_document(TEXTS)
    np.testing.assert_allclose(model.encode_document(TEXTS), expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(model.encode_query(TEXTS), reference.encode_query(TEXTS), atol=1e-5, rtol=0)
    for seed in range(3):
        order = list(range(len(TEXTS)))
        random.Random(seed).shuffle(order)
        shuffled = model.encode_document([TEXTS[place] for place in order])
        np.testing.assert_allclose(shuffled, expected[order], atol=1e-5, rtol=0)
    alone = np.concatenate([model.encode_document([text]) for text in TEXTS])
    np.testing.assert_allclose(alone, expected, atol=1e-5, rtol=0)


def test_truncation_is_counted(minilm: Path, reference: sentence_transformers.SentenceTransformer) -> None:
    encoding = load_model(minilm).encode_texts(TEXTS, "document")
    counts = encoding.counts
    lengths = [len(ids) for ids in reference.tokenizer(TEXTS)["input_ids"]]
    assert counts.truncated == sum(length > 256 for length in lengths) > 2
    assert counts.tokens == sum(min(length, 256) for length in lengths)
    assert counts.texts == len(TEXTS)
    assert counts.empty == 1
    assert encoding.tokens.tokens.tolist() == [min(length, 256) for length in lengths]
    assert encoding.tokens.truncated.tolist() == [length > 256 for length in lengths]
    assert encoding.tokens.empty.tolist() == [not text for text in TEXTS]


def variant(minilm: Path, folder: Path, *, pooling: str, prompts: dict[str, str], include_prompt: bool, modules: list[str]) -> Path:
    """MiniLM with other modules around its encoder, written by sentence-transformers itself."""
    models = sentence_transformers.models
    first = models.Transformer(str(minilm), max_seq_length=128)
    dim = first.get_word_embedding_dimension()
    stack = [first, models.Pooling(dim, pooling_mode=pooling, include_prompt=include_prompt)]
    if "dense" in modules:
        stack.append(models.Dense(dim, 48))
    if "normalize" in modules:
        stack.append(models.Normalize())
    sentence_transformers.SentenceTransformer(modules=stack, prompts=prompts, device="cpu").save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize(
    ("pooling", "include_prompt", "modules"),
    [
        pytest.param("cls", True, [], marks=pytest.mark.slow),
        ("mean", False, ["dense", "normalize"]),
        pytest.param("max", False, ["normalize"], marks=pytest.mark.slow),
        pytest.param("lasttoken", True, ["dense"], marks=pytest.mark.slow),
    ],
)
def test_module_stacks_and_prompts(minilm: Path, tmp_path: Path, pooling: str, include_prompt: bool, modules: list[str]) -> None:
    prompts = {"query": "search query: ", "document": "passage: "}
    folder = variant(minilm, tmp_path / "model", pooling=pooling, prompts=prompts, include_prompt=include_prompt, modules=modules)
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    ours = BiEncoder(folder)
    # 15 to 250 words; an empty text behind a prompt that is not pooled has no tokens: see below.
    texts = [text for text in (*TEXTS[3:5], TEXTS[7], *TEXTS[-3:]) if text]
    np.testing.assert_allclose(ours.encode_query(texts), theirs.encode_query(texts), atol=1e-5, rtol=0)
    np.testing.assert_allclose(ours.encode_document(texts), theirs.encode_document(texts), atol=1e-5, rtol=0)

    ours.save_pretrained(tmp_path / "saved")
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(again.encode_query(texts), theirs.encode_query(texts), atol=1e-6, rtol=0)
    np.testing.assert_allclose(BiEncoder(tmp_path / "saved").encode_query(texts), ours.encode_query(texts), atol=0)


def test_bare_hugging_face_folder(minilm: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(minilm / name, tmp_path / name)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    ours = BiEncoder(tmp_path)
    assert ours.max_length == theirs.max_seq_length == 512
    np.testing.assert_allclose(ours.encode_document(TEXTS), theirs.encode_document(TEXTS), atol=1e-5, rtol=0)


def test_new_class_paths_of_sentence_transformers_6(minilm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm, folder)
    base = "sentence_transformers.base.modules"
    types = [
        f"{base}.transformer.Transformer",
        "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        f"{base}.normalize.Normalize",
    ]
    modules = json.loads((folder / "modules.json").read_text())
    for module, path in zip(modules, types, strict=True):
        module["type"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"embedding_dimension": 384, "pooling_mode": "mean", "include_prompt": True})
    )
    expected = BiEncoder(minilm).encode_document(TEXTS)
    np.testing.assert_allclose(BiEncoder(folder).encode_document(TEXTS), expected, atol=0)


@pytest.mark.parametrize(
    ("prompts", "default"),
    [
        ({"query": "q: ", "passage": "p: "}, None),
        ({"query": "q: ", "document": "d: ", "passage": "p: "}, "query"),
        ({"clustering": "topic: "}, "clustering"),
    ],
)
def test_other_names_of_prompts_mean_what_they_mean_there(
    minilm: Path, tmp_path: Path, prompts: dict[str, str], default: str | None
) -> None:
    folder = variant(minilm, tmp_path / "model", pooling="mean", prompts={}, include_prompt=True, modules=["normalize"])
    path = folder / "config_sentence_transformers.json"
    settings = json.loads(path.read_text()) | {"prompts": prompts, "default_prompt_name": default}
    path.write_text(json.dumps(settings))
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    ours = BiEncoder(folder)
    texts = ["wings of birds", "deep sea"]
    np.testing.assert_allclose(ours.encode_query(texts), theirs.encode_query(texts), atol=1e-5)
    np.testing.assert_allclose(ours.encode_document(texts), theirs.encode_document(texts), atol=1e-5)
