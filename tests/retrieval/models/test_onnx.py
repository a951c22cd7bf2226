"""Export to ONNX: ONNX Runtime gives the vectors of Quiver for any number and length of texts, in the code of the model card and in
`OnnxModel`, which searches an index without PyTorch."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, InputError, init_weights, pack_padded, preset
from quiver.retrieval.index import build_index, open_index
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.export import FILES, export_model
from quiver.retrieval.models.export.onnx import TOLERANCE, compare, require_libraries, write_onnx
from quiver.retrieval.models.loading import WorkerModel, build_model, load_index_model, load_model
from quiver.retrieval.models.onnx_model import OnnxModel
from quiver.retrieval.models.pretrained import load_parts
from tests.retrieval.models.small import make_colbert, make_dense, make_tokenizer

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TEXTS = ["A bird has wings, feathers and a beak.", "the sea", "", "retrieval finds documents " * 9]


def modernbert(vocabulary: int) -> EncoderConfig:
    return EncoderConfig.modernbert(
        vocab_size=vocabulary,
        hidden_size=32,
        num_heads=2,
        intermediate_size=48,
        layer_types=["global", "local", "local"],
        max_positions=96,
        window=16,
    )


def bert(vocabulary: int) -> EncoderConfig:
    return replace(
        preset("minilm-l6"), vocab_size=vocabulary, hidden_size=32, num_heads=2, intermediate_size=64, layer_types=("global",) * 2,
        max_positions=96,
    )  # fmt: skip


def colbert(folder: Path) -> Path:
    words = make_tokenizer(TEXTS * 2)
    torch.manual_seed(5)
    encoder = init_weights(Encoder(modernbert(len(words))), seed=3).eval()
    make_colbert(words, encoder, projections=(Projection(32, 16),), query_length=12, document_length=80).save_pretrained(folder / "model")
    return folder / "model"


def dense(folder: Path, config: Callable[[int], EncoderConfig], **settings: Any) -> Path:
    words = make_tokenizer(TEXTS * 2)
    encoder = init_weights(Encoder(config(len(words))), seed=4).eval()
    make_dense(words, encoder, max_length=90, **settings).save_pretrained(folder / "model")
    return folder / "model"


def exported(model: Path | str, out: Path) -> dict[str, Any]:
    export_model(model, out, layout="onnx")
    settings: dict[str, Any] = json.loads((out / "onnx_config.json").read_text())
    return settings


def run_card(out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the code of the model card next to the folder, and return its names."""
    (code,) = re.findall("```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(out.parent)
    space: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, space)
    return space


@pytest.mark.slow
def test_onnx_gives_the_token_vectors_of_a_colbert_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = colbert(tmp_path), tmp_path / "graph"
    settings = exported(source, out)
    assert settings["check"]["largest_difference"] < 1e-5
    assert [1, 80] in settings["check"]["shapes"]
    assert {path.name for path in out.iterdir()} <= FILES
    encode, model = run_card(out, monkeypatch)["encode"], load_model(source)
    for role in ("query", "document"):
        expected = model.encode_texts(TEXTS, role).vectors
        for found, ours in zip(encode(TEXTS, role), expected, strict=True):
            np.testing.assert_allclose(found, ours, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (modernbert, {"normalize": True}),
        (bert, {"pooling": "max", "query_prompt": "query: ", "document_prompt": "a bird: ", "include_prompt": False, "similarity": "dot"}),
        (bert, {"pooling": "lasttoken", "lower_case": True, "similarity": "dot"}),
        (modernbert, {"pooling": "cls", "query_prompt": "query: "}),
    ],
)
def test_onnx_gives_the_vectors_of_a_bi_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Callable[[int], EncoderConfig], settings: Any
) -> None:
    source, out = dense(tmp_path, config, **settings), tmp_path / "graph"
    written = exported(source, out)
    assert ("pooling_mask" in written["inputs"]) == (settings.get("include_prompt") is False)
    encode, model = run_card(out, monkeypatch)["encode"], load_model(source)
    for role in ("query", "document"):
        expected = model.encode_texts(TEXTS, role).vectors
        finite = np.isfinite(expected)  # the maximum over no token is none
        np.testing.assert_allclose(encode(TEXTS, role)[finite], expected[finite], atol=1e-4)
    check_onnx_model(out, model)


def check_onnx_model(out: Path, model: BiEncoder | ColBERT) -> None:
    """Compare card, counts and vectors, in one batch and in many."""
    for tokens in (None, 8):
        ours = OnnxModel(out, batch_tokens=tokens)
        assert ours.card == replace(model.card, source=str(out))
        for role in ("query", "document"):
            found, expected = ours.encode_texts(TEXTS, role), model.encode_texts(TEXTS, role)
            assert found.counts == expected.counts
            finite = np.isfinite(expected.vectors)
            np.testing.assert_allclose(found.vectors[finite], expected.vectors[finite], atol=1e-4)


def every_length(source: str | Path, out: Path, lengths: range) -> None:
    """Compare the graph with the packed model at many lengths, with one to five texts, the shorter ones padded."""
    model = load_model(source, device="cpu")
    assert isinstance(model, BiEncoder)
    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    rng = np.random.default_rng(7)
    for number, length in enumerate(lengths):
        rows = 1 + number % 5
        ids = rng.integers(0, len(model.tokenizer), (rows, length))
        mask = (np.arange(length) < np.append(length, rng.integers(1, length + 1, rows - 1))[:, None]).astype(np.int64)
        (found,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
        batch = pack_padded(torch.from_numpy(ids), torch.from_numpy(mask))
        with torch.inference_mode():
            ours = model.pool(model.encoder(batch), batch).numpy()
        np.testing.assert_allclose(found, ours, atol=1e-4, err_msg=f"{rows} texts of {length}")


@pytest.mark.slow
def test_onnx_gives_the_vectors_of_a_small_modernbert_at_every_length(tmp_path: Path) -> None:
    source = dense(tmp_path / "one", modernbert, normalize=True)
    exported(source, tmp_path / "graph")
    every_length(source, tmp_path / "graph", range(1, 91))
    check_onnx_model(tmp_path / "graph", load_model(source))
    check_mistakes(tmp_path / "graph")
    # The graph of another model is found out, and nothing is written above the tolerance.
    other = build_model(load_parts(dense(tmp_path / "two", modernbert, normalize=False)), "two")
    assert compare(tmp_path / "graph" / "model.onnx", other)[0] > TOLERANCE
    (tmp_path / "refused").mkdir()
    with pytest.raises(InputError, match=r"the graph's vectors differ from the model's by \d\.\de[-+]0\d, more than 0e\+00"):
        write_onnx(tmp_path / "refused", other, tolerance=0.0)


@pytest.mark.slow
def test_onnx_gives_the_vectors_of_minilm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minilm: Path) -> None:
    out = tmp_path / "graph"
    settings = exported(minilm, out)
    assert settings["check"]["largest_difference"] < 1e-5
    every_length(minilm, out, range(1, settings["document"]["max_length"] + 1, 51))
    encode, model = run_card(out, monkeypatch)["encode"], load_model(minilm)
    np.testing.assert_allclose(encode(TEXTS, "query"), model.encode_texts(TEXTS, "query").vectors, atol=1e-4)
    check_onnx_model(out, model)

    index = tmp_path / "index"
    build_index(TEXTS, model, index)
    command = (
        f"import sys; from quiver.cli.main import main; sys.argv = ['quiver', 'search', {str(index)!r}, 'wings', '--json', *{{}}]; main()"
    )
    printed = []
    for options in (["--model", str(out)], []):
        code = f"import atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); {command.format(options)}"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stderr.split()[-1] == str(not options)  # by the export without PyTorch, by the model with it
        printed.append([(hit["id"], hit["score"]) for hit in json.loads(run.stdout)])
    assert [key for key, _ in printed[0]] == [key for key, _ in printed[1]]
    assert [score for _, score in printed[0]] == pytest.approx([score for _, score in printed[1]], abs=1e-5)

    # Built by the export, an index needs no option, and workers can build it.
    built = build_index(TEXTS, str(out), tmp_path / "exported")
    assert [hit.id for hit in built.search("wings", k=4)] == [hit.id for hit in open_index(index).search("wings", k=4)]
    assert WorkerModel.of(built.model).load().card.fingerprint == model.card.fingerprint


def check_mistakes(out: Path) -> None:
    """Mistakes with an export are one line; the last of them damage it."""
    with pytest.raises(InputError, match=r"an ONNX export, which only searches indexes; here pass the model that it was exported from"):
        BiEncoder(out)
    with pytest.raises(
        InputError, match=r"an ONNX export has the settings it was exported with and runs on the CPU; remove the other options"
    ):
        load_index_model(str(out), dtype="int8")
    with pytest.raises(InputError, match=r"not an ONNX export: it has no onnx_config\.json"):
        OnnxModel(out.parent)
    settings = out / "onnx_config.json"
    content = json.loads(settings.read_text())
    for change, message in (
        ({"schema": "quiver-onnx/9"}, "schema must be quiver-onnx/1, got 'quiver-onnx/9'"),
        ({"kind": "colbert"}, "the export of a ColBERT model is for other programs"),
        ({"query": {"prompt": ""}}, "export the model again"),
        ({"query": None}, "export the model again"),
        ({"query": {"prompt": "", "max_length": "x"}}, "export the model again"),
    ):
        settings.write_text(json.dumps(content | change))
        with pytest.raises(InputError, match=message):
            OnnxModel(out)
    settings.write_text(json.dumps(content))
    graph = (out / "model.onnx").read_bytes()
    for damaged in (graph[: len(graph) // 2], b""):
        (out / "model.onnx").write_bytes(damaged)
        with pytest.raises(InputError, match=r"not a graph that ONNX Runtime can open .*; export the model again"):
            OnnxModel(out)
    (out / "model.onnx").unlink()
    with pytest.raises(InputError, match="not a graph that ONNX Runtime can open"):
        OnnxModel(out)
    (out / "model.onnx").write_bytes(graph)


def test_a_missing_library_is_named() -> None:
    with pytest.raises(InputError, match=r"needs no_such_library: pip install 'quiver-retrieval\[interop\]'"):
        require_libraries(("onnx", "no_such_library"))
