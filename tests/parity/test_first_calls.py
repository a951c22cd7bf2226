"""The first calls of somebody who knows sentence-transformers give what it gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch

from quiver import BiEncoder
from quiver.retrieval.models.encoding import quantize_embeddings

sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.parity

TEXTS = ["which animal has wings", "An owl has wings and flies by night.", "", "Trout are fish of rivers. " * 60, "Ünïcode, ❤ and\ttabs\n"]
MANY = [f"{text} {number}" for number in range(25) for text in TEXTS if len(text) < 99]  # enough for ranges of columns
PROMPTS = {"query": "question: ", "passage": "text: "}


def opened(library: Any, folder: Path, **arguments: Any) -> Any:
    return library(str(folder), device="cpu", **arguments)


def with_length(model: Any, length: int) -> Any:
    """Encode with another maximum length, and put the old one back."""
    before, model.max_seq_length = model.max_seq_length, length
    try:
        return model.encode(TEXTS)
    finally:
        model.max_seq_length = before


def vectors(model: Any) -> Any:
    return model.encode(TEXTS, convert_to_tensor=True)


# Name of the call -> the call; ``model`` is of one library or of the other, ``make`` opens the same model with other arguments.
COMPARED: dict[str, Callable[[Any, Callable[..., Any]], Any]] = {
    "a text": lambda model, make: model.encode("a bird has wings"),
    "a list": lambda model, make: model.encode(TEXTS),
    "a tuple": lambda model, make: model.encode(tuple(TEXTS)),
    "an array of texts": lambda model, make: model.encode(np.array(TEXTS)),
    "sentences by name": lambda model, make: model.encode(sentences=TEXTS),
    "batch_size": lambda model, make: model.encode(TEXTS, batch_size=2),
    "show_progress_bar": lambda model, make: model.encode(TEXTS, show_progress_bar=True),
    "convert_to_tensor": lambda model, make: model.encode(TEXTS, convert_to_tensor=True),
    "convert_to_tensor of a text": lambda model, make: model.encode("a bird", convert_to_tensor=True),
    "convert_to_numpy=False": lambda model, make: model.encode(TEXTS, convert_to_numpy=False),
    "normalize_embeddings": lambda model, make: model.encode(TEXTS, truncate_dim=64, normalize_embeddings=True),
    "prompt": lambda model, make: model.encode(TEXTS, prompt="question: "),
    "prompt_name": lambda model, make: make(prompts=PROMPTS).encode(TEXTS, prompt_name="passage"),
    "default_prompt_name": lambda model, make: make(prompts=PROMPTS, default_prompt_name="query").encode(TEXTS),
    "truncate_dim": lambda model, make: model.encode(TEXTS, truncate_dim=32),
    "a model with truncate_dim": lambda model, make: make(truncate_dim=48).encode(TEXTS),
    "int8": lambda model, make: model.encode(MANY, precision="int8"),
    "uint8": lambda model, make: model.encode(MANY, precision="uint8", convert_to_tensor=True),
    "binary": lambda model, make: model.encode(MANY, precision="binary"),
    "ubinary": lambda model, make: model.encode("a bird", precision="ubinary"),
    "device": lambda model, make: model.encode(TEXTS, device="cpu"),
    "encode_query": lambda model, make: make(prompts=PROMPTS).encode_query(TEXTS),
    "encode_document": lambda model, make: make(prompts=PROMPTS).encode_document("An owl", convert_to_tensor=True),
    "similarity": lambda model, make: model.similarity(vectors(model), model.encode("a bird has wings")),
    "similarity by dot product": lambda model, make: make(similarity_fn_name="dot").similarity(vectors(model) * 2, vectors(model)),
    "similarity_pairwise": lambda model, make: model.similarity_pairwise(vectors(model), vectors(model).flip(0)),
    "to and device": lambda model, make: str(model.to("cpu").device),
    "max_seq_length": lambda model, make: [model.max_seq_length, model.get_max_seq_length(), with_length(model, 16)],
    "get_sentence_embedding_dimension": lambda model, make: [
        model.get_sentence_embedding_dimension(),
        make(truncate_dim=48).get_sentence_embedding_dimension(),
    ],
    "settings": lambda model, make: [dict(make(prompts=PROMPTS).prompts), model.similarity_fn_name, make(truncate_dim=9).truncate_dim],
}


@pytest.fixture(scope="module")
def libraries(minilm: Path) -> list[tuple[Any, Callable[..., Any]]]:
    """Of sentence-transformers and of Quiver: the model, and the function that opens it with other arguments."""

    def of(library: Any) -> tuple[Any, Callable[..., Any]]:
        return opened(library, minilm), lambda **arguments: opened(library, minilm, **arguments)

    return [of(sentence_transformers.SentenceTransformer), of(BiEncoder)]


def assert_same(theirs: Any, ours: Any) -> None:
    """Equal types, shapes and dtypes; floats to 1e-5, quantized values to one step."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(theirs, ours, strict=True):
            assert_same(one, other)
    elif isinstance(theirs, np.ndarray | torch.Tensor):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        step = 1e-5 if "float" in str(theirs.dtype) else 1
        first, second = np.asarray(theirs, np.float64), np.asarray(ours, np.float64)
        np.testing.assert_allclose(second, first, atol=step, rtol=0)
    else:
        assert ours == theirs


@pytest.mark.parametrize("call", COMPARED)
def test_a_call_gives_what_sentence_transformers_gives(call: str, libraries: list[tuple[Any, Callable[..., Any]]]) -> None:
    (theirs, their_make), (ours, our_make) = libraries
    assert_same(COMPARED[call](theirs, their_make), COMPARED[call](ours, our_make))


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_quantized_values_are_those_of_sentence_transformers(precision: Any) -> None:
    given = np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32)
    try:
        from sentence_transformers.util import quantization
    except ImportError:  # version 5
        from sentence_transformers import quantization
    expected = quantization.quantize_embeddings(given, precision=precision)
    found = quantize_embeddings(given, precision)
    assert found.dtype == expected.dtype
    if precision == "int8":
        np.testing.assert_array_equal(found, quantize_embeddings(given, "uint8").astype(np.int16) - 128)
    if precision == "int8" and sentence_transformers.__version__ < "6":  # rounds levels below 0 up
        assert set(np.unique(expected - found)) == {0, 1}
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("arguments", [{}, {"convert_to_tensor": True}, {"convert_to_numpy": False}, {"precision": "int8"}], ids=str)
def test_no_texts_give_what_sentence_transformers_gives(arguments: dict[str, Any], libraries: list[tuple[Any, Any]]) -> None:
    """But for the dtype, which is float64 there."""
    theirs, ours = (model.encode([], **arguments) for model, _ in libraries)
    assert type(ours) is type(theirs)
    assert np.shape(ours) == np.shape(theirs) == (0,)
    model = libraries[1][0]
    assert model.similarity(model.encode([]), model.encode(TEXTS)).shape == (0, len(TEXTS))


def test_saved_models_open_in_both_libraries(minilm: Path, tmp_path: Path) -> None:
    ours = opened(BiEncoder, minilm, prompts=PROMPTS, default_prompt_name="passage")
    ours.save_pretrained(str(tmp_path / "saved"))
    theirs, again = opened(sentence_transformers.SentenceTransformer, tmp_path / "saved"), opened(BiEncoder, tmp_path / "saved")
    assert theirs.prompts == dict(again.prompts) == dict(ours.prompts)
    assert theirs.default_prompt_name == again.default_prompt_name == "passage"
    assert_same(theirs.encode(TEXTS), again.encode(TEXTS))
    np.testing.assert_array_equal(again.encode(TEXTS), ours.encode(TEXTS))


@pytest.mark.slow
def test_processes_encode_what_one_process_encodes(minilm: Path) -> None:
    model = opened(BiEncoder, minilm, prompts=PROMPTS, truncate_dim=100)
    model.max_seq_length = 32
    expected = model.encode_query(MANY, normalize_embeddings=True)
    np.testing.assert_allclose(model.encode_query(MANY, normalize_embeddings=True, device=["cpu", "cpu"]), expected, atol=1e-6)
    pool = model.start_multi_process_pool(["cpu", "cpu"])
    found = model.encode_query(MANY, normalize_embeddings=True, pool=pool, chunk_size=30, convert_to_tensor=True)
    model.stop_multi_process_pool(pool)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_push_to_hub_uploads_the_saved_folder(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, Any] = {}

    class Hub:
        def __init__(self, token: str | None) -> None:
            sent["token"] = token

        def create_repo(self, name: str, **arguments: Any) -> Any:
            sent["repository"] = (name, arguments)
            return SimpleNamespace(repo_id=name)

        def upload_folder(self, *, folder_path: Path, **arguments: Any) -> Any:
            sent["vectors"], sent["upload"] = BiEncoder(folder_path).encode(TEXTS), arguments
            return SimpleNamespace(commit_url="https://hub/owner/name/commit/1")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    model = opened(BiEncoder, minilm)
    assert model.push_to_hub("owner/name", token="secret", private=True) == "https://hub/owner/name/commit/1"
    assert sent["token"] == "secret"
    assert sent["repository"] == ("owner/name", {"private": True, "exist_ok": False})
    assert sent["upload"] == {"repo_id": "owner/name", "commit_message": "Add BiEncoder model", "revision": None, "create_pr": False}
    np.testing.assert_array_equal(sent["vectors"], model.encode(TEXTS))
