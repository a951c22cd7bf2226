"""Export to layouts of other libraries: the same vectors when read back, refusals, model cards, and atomic writing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import yaml
from safetensors.torch import load_file

from quiver.encoder import InputError, Tokenizer
from quiver.encoder.checkpoints.checkpoint import to_hf_state
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.export import FILES, LAYOUTS, MODULE, MODULE_FILES, ModelScores, export_model
from quiver.retrieval.models.export.sentence_transformers import reads_as_token, with_prefixes
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.pretrained import read_model_folder
from quiver.retrieval.search.explain import text_tokens
from tests.retrieval.models.small import make_colbert, make_dense, make_tokenizer

TEXTS = ["a bird has wings", "wings, and a beak!", "x"]


def save_dense(folder: Path, **changes: Any) -> Path:
    make_dense(make_tokenizer(max_length=50), **{"normalize": True, "projections": (Projection(32, 16),), **changes}).save_pretrained(
        folder
    )
    return folder


def save_colbert(folder: Path, **changes: Any) -> Path:
    make_colbert(make_tokenizer(max_length=50), **{"query_length": 12, "document_length": 40, **changes}).save_pretrained(folder)
    return folder


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return save_dense(tmp_path / "dense")


@pytest.fixture
def colbert(tmp_path: Path) -> Path:
    return save_colbert(tmp_path / "colbert")


@pytest.fixture
def multi_vector(tmp_path: Path, colbert: Path) -> Path:
    """Save a ColBERT model in the layout of sentence-transformers 6."""
    return export_model(colbert, tmp_path / "multi-vector", layout="sentence-transformers").folder


def change(path: Path, **values: object) -> None:
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def same_vectors(one: Path, other: Path) -> None:
    first, second = load_model(one), load_model(other)
    for found, expected in (
        (second.encode_query(TEXTS), first.encode_query(TEXTS)),
        (second.encode_document(TEXTS), first.encode_document(TEXTS)),
    ):
        for left, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(left, right)


# Layouts.


def test_weights_of_every_module_may_be_a_bin_file(dense: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    shutil.copytree(dense, pickled)
    weights = sorted(pickled.rglob("model.safetensors"))
    assert len(weights) == 2  # of the encoder and of the Dense module
    for path in weights:
        torch.save(load_file(path), path.with_name("pytorch_model.bin"))
        path.unlink()
    same_vectors(dense, pickled)
    assert load_model(pickled).card.fingerprint == load_model(dense).card.fingerprint


@pytest.mark.parametrize("layout", [name for name, kinds in LAYOUTS.items() if "colbert" in kinds and name not in ("hf", "onnx")])
def test_a_colbert_model_gives_the_same_vectors_after_export(colbert: Path, tmp_path: Path, layout: str) -> None:
    exported = export_model(colbert, tmp_path / "out", layout=layout)
    same_vectors(colbert, tmp_path / "out")
    assert load_model(tmp_path / "out").card.fingerprint == exported.fingerprint
    assert exported.bytes == sum(file.stat().st_size for file in (tmp_path / "out").rglob("*") if file.is_file())


def test_a_bi_encoder_gives_the_same_vectors_after_export(dense: Path, tmp_path: Path) -> None:
    exported = export_model(dense, tmp_path / "out", layout="sentence-transformers")
    same_vectors(dense, tmp_path / "out")
    assert load_model(tmp_path / "out").card.fingerprint == exported.fingerprint


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_the_hf_layout_stores_only_the_encoder_and_warns(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    source: Path = request.getfixturevalue(kind)
    exported = export_model(source, tmp_path / "out", layout="hf")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert exported.left_out
    assert all(part in caplog.text and part in (tmp_path / "out" / "README.md").read_text() for part in exported.left_out)
    ours = to_hf_state(load_model(source).encoder)
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(theirs[key].equal(tensor) for key, tensor in ours.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projections": (Projection(32, 16), Projection(16, 8))}, "more than one matrix"),
        ({"projections": (Projection(32, 8, bias=True),)}, "more than one matrix"),
        ({"projections": (Projection(32, 32, residual=True),)}, "more than one matrix"),
        ({"projections": (Projection(32, 8, activation="torch.nn.modules.activation.Tanh"),)}, "more than one matrix"),
        ({"query_prefix": ""}, "no prefixes"),
        ({"query_expansion": False}, "does not expand queries"),
        ({"skiplist": ("!",)}, "its skiplist is neither"),
    ],
)
def test_stanfords_layout_refuses_models_that_it_cannot_express(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    source = save_colbert(tmp_path / "source", **changes)
    with pytest.raises(InputError) as caught:
        export_model(source, tmp_path / "out", layout="stanford")
    assert message in str(caught.value)
    assert str(caught.value).endswith("use --layout pylate")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_stanfords_layout_has_the_files_of_stanfords_colbert(colbert: Path, tmp_path: Path) -> None:
    folder = export_model(colbert, tmp_path / "out", layout="stanford").folder
    metadata = json.loads((folder / "artifact.metadata").read_text())
    asked = {"query_token_id": "[Q] ", "doc_token_id": "[D] ", "query_maxlen": 12, "doc_maxlen": 40, "dim": 8, "similarity": "cosine"}
    assert asked.items() <= metadata.items()
    assert (metadata["mask_punctuation"], metadata["attend_to_mask_tokens"]) == (True, False)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["HF_ColBERT"]
    state = load_file(folder / "model.safetensors")
    assert tuple(state.pop("linear.weight").shape) == (8, 32)
    assert all(key.startswith("model.") for key in state)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("similarity", "l2", "similarity: must be one of cosine; got 'l2'"),
        ("interaction", "flipr", "interaction: must be one of colbert"),
        ("query_maxlen", "32", "query_maxlen: must be a whole number, got '32'"),
        ("doc_maxlen", 2, "must be >= 4"),
    ],
)
def test_stanfords_metadata_is_checked(colbert: Path, tmp_path: Path, key: str, value: object, message: str) -> None:
    folder = export_model(colbert, tmp_path / "out", layout="stanford").folder
    change(folder / "artifact.metadata", **{key: value})
    with pytest.raises(InputError, match=message):
        load_model(folder)


# What sentence-transformers 6 writes.


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task: must be one of feature-extraction"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 5}}}, "processing_kwargs: "),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "modality_config.message: unknown key"),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "all", "length": 12}},
            "query_expansion.strategy: must be one of fixed, min; got 'all'",
        ),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "fixed"}}, "must be >= 4, got 0 and 40"),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "fixed", "length": 12, "token": "[CLS]"}},
            "the expansion token must be the mask token, got '",
        ),
        ("2_MultiVectorMask/config.json", {"skiplist_tasks": ["query", "document"]}, "skiplist_tasks"),
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [7]}, "keep_only_token_ids: "),
        ("2_MultiVectorMask/config.json", {"skiplist_words": [5]}, "skiplist_words.0: must be text"),
        ("3_Normalize/config.json", {"module_input_name": "sentence_embedding"}, "module_input_name must be 'token_embeddings'"),
        ("1_Dense/config.json", {"module_output_name": "elsewhere"}, "module_output_name must be 'token_embeddings'"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "cosine"}, "similarity_fn_name: must be"),
        (
            "config_sentence_transformers.json",
            {"model_type": "SparseEncoder"},
            "a sparse encoder of sentence-transformers, which is not supported",
        ),
    ],
)
def test_unsupported_settings_are_refused(multi_vector: Path, file: str, values: dict[str, object], message: str) -> None:
    assert isinstance(load_model(multi_vector), ColBERT)
    change(multi_vector / file, **values)
    with pytest.raises(InputError) as caught:
        load_model(multi_vector)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stored", ["{}", '{"query_expansion": {}}'])
def test_a_model_without_settings_has_the_length_of_its_tokenizer_and_no_expansion(multi_vector: Path, stored: str) -> None:
    (multi_vector / "sentence_bert_config.json").write_text(stored)
    change(multi_vector / "config_sentence_transformers.json", prompts={"query": "", "document": None})
    settings = read_model_folder(multi_vector).colbert
    assert (settings.query_length, settings.document_length, settings.query_expansion) == (50, 50, False)
    assert (settings.query_prefix, settings.document_prefix) == ("", "")
    assert [len(vectors) for vectors in load_model(multi_vector).encode_query(["x"])] == [3]


def test_prompts_of_several_tokens_and_a_minimum_expansion_are_read(multi_vector: Path, tmp_path: Path) -> None:
    plain = load_model(multi_vector)
    change(multi_vector / "config_sentence_transformers.json", prompts={"query": "wings: ", "document": "a bird: "})
    change(multi_vector / "sentence_bert_config.json", query_length=30, query_expansion={"strategy": "min", "length": 12})
    model = load_model(multi_vector)
    assert isinstance(model, ColBERT)
    assert (model.card.query_prompt, model.card.document_prompt) == ("wings: ", "a bird: ")
    assert model.card.fingerprint != plain.card.fingerprint
    queries = ["x", "a bird has wings and " * 9]
    assert [len(vectors) for vectors in model.encode_query(queries)] == [12, 30]
    assert [len(text_tokens(model, query, "query")) for query in queries] == [12, 30]
    assert text_tokens(model, "x", "document")[1].name == "a"
    exported = export_model(multi_vector, tmp_path / "out", layout="sentence-transformers")
    same_vectors(multi_vector, tmp_path / "out")
    assert load_model(tmp_path / "out").card.fingerprint == exported.fingerprint
    for layout in ("pylate", "stanford"):
        with pytest.raises(InputError, match=r"prompts of several tokens; its queries may be longer .* --layout sentence-transformers$"):
            export_model(multi_vector, tmp_path / layout, layout=layout)


def test_vectors_that_are_not_normalised_are_refused(multi_vector: Path) -> None:
    modules = json.loads((multi_vector / "modules.json").read_text())
    (multi_vector / "modules.json").write_text(json.dumps(modules[:-1]))
    with pytest.raises(InputError, match="a multi-vector model must have Transformer, one or more Dense, optionally MultiVectorMask, and"):
        load_model(multi_vector)


def test_meanmaxsim_is_read_as_maxsim_with_a_warning(multi_vector: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(multi_vector / "config_sentence_transformers.json", similarity_fn_name="meanmaxsim")
    assert load_model(multi_vector).card.similarity == "maxsim"
    assert "Quiver sums over the query's tokens" in caplog.text


def test_a_pylate_folder_is_recognized_without_model_type(colbert: Path) -> None:
    """PyLate writes no model_type if the folder it started from has none."""
    before = load_model(colbert).card.fingerprint
    change(colbert / "config_sentence_transformers.json", model_type=...)
    assert load_model(colbert).card.fingerprint == before


# Prefixes.


def word_pieces() -> Tokenizer:
    """A vocabulary like BERT's, in which [unused0] is an ordinary word and not an added token."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {word: place for place, word in enumerate([*special, "[unused0]", "[", "]", "unused", "##0", "wings", "7", "(", "a", ")"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.add_special_tokens(special)
    return Tokenizer(backend, {})


def test_a_prefix_in_the_vocabulary_becomes_one_token_everywhere() -> None:
    words = word_pieces()
    assert not reads_as_token(words, "[unused0] ", "[unused0]")
    changed = with_prefixes(words, ("", "[unused0]"))
    assert reads_as_token(changed, "[unused0] ", "[unused0]")
    assert reads_as_token(changed, "[unused0]", "[unused0]")
    assert changed.encode(["[unused0] wings 7"], max_length=9).ids == [[2, 5, 10, 11, 3]]
    assert words.encode(["[unused0] wings 7"], max_length=9).ids == [[2, 6, 8, 9, 7, 10, 11, 3]]


# Cards.

RUN = {
    "schema": "quiver-run/2",
    "command": "quiver train mine --out runs/mine",
    "date": "2026-11-21T10:00:00+00:00",
    "versions": {"python": "3.11.2", "torch": "2.11.0", "pylate": None},
    "data": {"rows": 1234, "sha256": "ab" * 32},
    "batch": {"effective": 512, "negatives_per_query": 127},
    "result": {"steps": 2441, "texts_truncated": 17, "development": [{"step": 9, "ndcg@10": 0.25}, {"step": 2441, "ndcg@10": 0.375}]},
    "recipe": {
        "name": "mine",
        "description": "A model | with a bar.",
        "source": "arXiv:2004.04906",
        "model": {"init": "answerdotai/ModernBERT-base"},
        "data": {
            "train": ["hub://sentence-transformers/msmarco@abc/triplet-hard/train", "local/file.jsonl"],
            "documents": "hub://lightonai/ms-marco-en-bge/documents/train",
        },
        "loss": {"name": "mnrl"},
        "training": {"seed": 12},
    },
}
TOLD = ("| Rows per update | `512` |", "| Negatives per query | `127` |", "| Updates | `2441` |", "nDCG@10 | `0.375` |")
ENTRY = {
    "task": {"type": "text-retrieval", "name": "Retrieval"},
    "dataset": {"type": "mteb/scifact", "name": "SciFact", "split": "test"},
    "metrics": [{"type": "ndcg_at_10", "name": "nDCG@10", "value": 0.64512}],
}


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    text = (folder / "README.md").read_text(encoding="utf-8")
    _, metadata, body = text.split("---\n", 2)
    return yaml.safe_load(metadata), body


def run_folder(tmp_path: Path, source: Path, **changes: object) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    known = {"fingerprint": load_model(source).card.fingerprint, "base_model": "answerdotai/ModernBERT-base"}
    record = {**RUN, "model": known, **changes}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_scores_of_another_model_and_repeated_scores_are_refused(dense: Path, tmp_path: Path) -> None:
    own = load_model(dense).card.fingerprint
    for scores, message in (
        ([ModelScores("there", "0" * 64, [ENTRY])], "there: scores of another model"),
        ([ModelScores(where, own, [ENTRY]) for where in ("one", "two")], "two and one both hold scores of SciFact"),
    ):
        with pytest.raises(InputError, match=message):
            export_model(dense, tmp_path / "out", layout="sentence-transformers", scores=scores)
    assert not (tmp_path / "out").exists()


def test_a_model_card_lists_known_facts(dense: Path, tmp_path: Path) -> None:
    scores = ModelScores("results", load_model(dense).card.fingerprint, [ENTRY])
    run = run_folder(tmp_path, dense)
    export_model(dense, tmp_path / "my-model", layout="sentence-transformers", run=run, scores=[scores], languages=["en"])
    metadata, body = card_of(tmp_path / "my-model")
    assert metadata == {
        "language": ["en"],
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "sentence-similarity", "retrieval", "dense", "quiver"],
        "base_model": "answerdotai/ModernBERT-base",
        "datasets": ["sentence-transformers/msmarco", "lightonai/ms-marco-en-bge"],
        "model-index": [{"name": "my-model", "results": [ENTRY]}],
    }
    for told in ("# my-model", 'SentenceTransformer("my-model")', "| SciFact | test | 0.6451 |", "`1234`", *TOLD):
        assert told in body
    assert "SentenceTransformer  # 5 or 6" in body
    recipe = body.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(recipe) == RUN["recipe"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"fingerprint": "f" * 64}}, "belongs to another model (fingerprint ffffffffffff"),
        ({"model": None}, "belongs to another model (fingerprint unknown"),
        ({"schema": "quiver-run/1"}, "not the record of a training run (schema quiver-run/2)"),
    ],
)
def test_a_run_record_of_another_model_is_refused(dense: Path, tmp_path: Path, changes: dict[str, object], message: str) -> None:
    run = run_folder(tmp_path, dense, **changes)
    with pytest.raises(InputError) as caught:
        export_model(dense, tmp_path / "out", layout="hf", run=run)
    assert message in str(caught.value)


# An export is written completely or not at all.


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writing README.md, the last file of an export, fail as on a full disk."""
    write = Path.write_text

    def fail(path: Path, *given: Any, **settings: Any) -> int:
        if "README.md" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, *given, **settings)

    monkeypatch.setattr(Path, "write_text", fail)


def test_a_failed_export_leaves_no_files(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_model(dense, tmp_path / "out", layout="hf")
    before = (tmp_path / "out" / "README.md").read_text()
    fill_the_disk(monkeypatch)
    for out in ("out", "new"):
        with pytest.raises(OSError, match="No space"):
            export_model(dense, tmp_path / out, layout="sentence-transformers", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]
    assert (tmp_path / "out" / "README.md").read_text() == before


def test_only_a_model_is_replaced_and_only_with_overwrite(dense: Path, tmp_path: Path) -> None:
    out = export_model(dense, tmp_path / "out", layout="sentence-transformers").folder
    with pytest.raises(InputError, match="not empty; choose another --out, or add --overwrite"):
        export_model(dense, out, layout="hf")
    export_model(dense, out, layout="hf", overwrite=True)
    assert not (out / "modules.json").exists()
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").touch()
    with pytest.raises(InputError, match="not overwritten, since it does not hold a model"):
        export_model(dense, other, layout="hf", overwrite=True)
    with pytest.raises(InputError, match="is a file; --out must name a folder"):
        export_model(dense, other / "chapter.tex", layout="hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out", "thesis"]


@pytest.mark.parametrize("layout", ["sentence-transformers", "hf"])
def test_a_git_clone_keeps_its_history_and_other_files(
    colbert: Path, tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "clone"
    (clone / ".git" / "objects").mkdir(parents=True)
    for name in (".git/HEAD", ".git/objects/ab", ".gitattributes"):
        (clone / name).write_text("git's")
    out = export_model(colbert, clone, layout="pylate").folder  # nothing there yet but git's: no --overwrite is needed
    (out / "notes.md").write_text("mine")
    with pytest.raises(InputError, match="not empty; choose another --out, or add --overwrite"):
        export_model(colbert, out, layout=layout)
    export_model(colbert, out, layout=layout, overwrite=True)
    export_model(colbert, tmp_path / "alone" / "clone", layout=layout)
    assert "kept files that exports do not write: notes.md" in caplog.text
    kept = {".git/HEAD", ".git/objects/ab", ".gitattributes", "notes.md"}
    assert files_in(out) == kept | files_in(tmp_path / "alone" / "clone")
    assert all((out / name).read_text() in ("git's", "mine") for name in kept)
    for name in files_in(out) - kept:
        assert (out / name).read_bytes() == (tmp_path / "alone" / "clone" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "clone", "colbert"]
    before = {name: (out / name).read_bytes() for name in files_in(out)}
    fill_the_disk(monkeypatch)
    with pytest.raises(OSError, match="No space"):
        export_model(colbert, out, layout="pylate", overwrite=True)
    assert {name: (out / name).read_bytes() for name in files_in(out)} == before


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_every_file_of_an_export_is_listed(dense: Path, colbert: Path, tmp_path: Path) -> None:
    """Only a folder of listed files is overwritten; those of the layout onnx are in another test."""
    found = set[str]()
    for source, layouts in ((dense, ("sentence-transformers", "hf")), (colbert, ("sentence-transformers", "pylate", "hf", "stanford"))):
        for layout in layouts:
            found |= files_in(export_model(source, tmp_path / f"{source.name}-{layout}", layout=layout).folder)
    assert {name for name in found if "/" not in name} | {"model.onnx", "model.onnx.data", "onnx_config.json"} == FILES
    modules = {tuple(name.split("/")) for name in found if "/" in name}
    assert {name for _, name in modules} == MODULE_FILES
    assert all(MODULE.fullmatch(folder) for folder, _ in modules)


@pytest.mark.parametrize("target", ["dense", "."])
def test_a_model_is_not_exported_over_itself(dense: Path, tmp_path: Path, target: str) -> None:
    shutil.copy(dense / "config.json", tmp_path / "config.json")
    with pytest.raises(InputError, match="contains the model to export"):
        export_model(dense, tmp_path / target, layout="hf", overwrite=True)
    assert isinstance(load_model(dense), BiEncoder)
