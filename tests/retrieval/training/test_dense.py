"""Training a bi-encoder: the native first module is sentence-transformers' own in all but speed, and a run is whole."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder import InputError
from retrieval.biencoder import BiEncoder
from retrieval.model_folder import load_parts
from retrieval.training import dense
from retrieval.training.dense import build_model, total_steps, train_dense
from retrieval.training.recipe import Recipe, load_recipe
from retrieval.training.run import train_recipe

sentence_transformers = pytest.importorskip("sentence_transformers")

VERBS = ("open", "close", "read", "write", "copy", "move", "count", "sort")
NOUNS = ("file", "folder", "line", "word", "socket", "thread", "index", "page")
ROWS = [{"query": f"{verb} every {noun} of it", "positive": f"def {verb}_{noun}(x): return x.{verb}()"} for verb in VERBS for noun in NOUNS]


def write_rows(folder: Path, rows: list[dict[str, str]] = ROWS) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(rows: Path, *overrides: str) -> Recipe:
    small = [
        "model.architecture.hidden_size=32",
        "model.architecture.heads=2",
        "model.architecture.intermediate_size=48",
        "model.architecture.vocab_size=384",
        "model.architecture.max_positions=64",
        "model.max_length=64",
        "training.batch_size=8",
        "training.epochs=2",
        "training.log_every=2",
        "training.learning_rate=5e-3",
        f"data.train={rows}",
    ]
    return load_recipe("quickstart", [*small, *overrides])


def all_texts(rows: list[dict[str, str]] = ROWS) -> list[str]:
    return [text for row in rows for text in row.values()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_learns_and_is_recorded(tmp_path: Path) -> None:
    record = train_recipe(recipe(write_rows(tmp_path)), tmp_path / "out", command="quiver train quickstart")
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == json.loads(json.dumps(record))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model", "run.json"]
    losses = [loss for _, loss in record["result"]["losses"]]
    assert record["result"]["steps"] == record["result"]["steps_planned"] == 16
    assert record["versions"]["torch"] == version("torch")
    assert len(losses) == 8
    assert losses[-1] < 0.7 * losses[0]
    assert record["batch"] == {"rows": 8, "negatives_per_query": 7}
    assert record["recipe"]["training"]["batch_size"] == 8
    assert record["command"] == "quiver train quickstart"
    assert record["data"]["rows"] == 64

    ours = BiEncoder.from_pretrained(tmp_path / "out" / "model")
    assert ours.card.fingerprint == record["model"]["fingerprint"]
    texts = [row["positive"] for row in ROWS[:9]] + ["", "x " * 100]
    plain = sentence_transformers.SentenceTransformer(str(tmp_path / "out" / "model"), device="cpu")
    assert type(plain[0]).__module__.startswith("sentence_transformers.")
    np.testing.assert_allclose(ours.encode_documents(texts), plain.encode_document(texts), atol=1e-5, rtol=0)


def test_equal_seeds_give_equal_weights(tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    prints = [
        train_recipe(recipe(rows, f"training.seed={seed}"), tmp_path / f"{run}")["model"]["fingerprint"]
        for run, seed in enumerate((3, 3, 4))
    ]
    assert prints[0] == prints[1] != prints[2]


def test_triplets_bring_their_negatives(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, [{**row, "negative": ROWS[place - 1]["positive"]} for place, row in enumerate(ROWS)])
    record = train_recipe(
        recipe(rows, "data.negative_field=negative", "training.max_steps=2", "model.query_prompt=query: "), tmp_path / "out"
    )
    assert record["result"]["steps"] == 2
    assert record["batch"]["negatives_per_query"] == 15
    assert BiEncoder.from_pretrained(tmp_path / "out" / "model").settings.query_prompt == "query: "


@pytest.mark.parity
def test_the_native_module_is_the_librarys_transformer(minilm: Path) -> None:
    """Same loss and same gradients as sentence-transformers' own first module, on a padded batch."""
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    from retrieval.training.trainer import sentence_transformer

    with pytest.raises(ValueError, match="frozen"):
        sentence_transformer(BiEncoder.from_pretrained(minilm))
    parts = load_parts(minilm)
    ours = sentence_transformer(BiEncoder(parts.encoder, parts.tokenizer, parts.settings)).eval()
    theirs = sentence_transformers.SentenceTransformer(str(minilm), device="cpu").eval()
    names = {
        True: ("embeddings.tokens.weight", "layers.5.mlp.down.weight"),
        False: ("embeddings.word_embeddings.weight", "encoder.layer.5.output.dense.weight"),
    }
    values, gradients = [], []
    for model in (ours, theirs):
        features = [model.tokenize([row[key] * 3 for row in ROWS[::9]]) for key in ("query", "positive")]
        loss = MultipleNegativesRankingLoss(model, scale=20.0)(features, None)
        loss.backward()
        values.append(loss.item())
        names = (
            ["embeddings.tokens.weight", "layers.5.mlp.down.weight"]
            if model is ours
            else ["embeddings.word_embeddings.weight", "encoder.layer.5.output.dense.weight"]
        )
        module = model[0].encoder if model is ours else model[0].auto_model
        gradients.append([dict(module.named_parameters())[name].grad for name in names])
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_trainer_checkpoint_loads_here_and_in_sentence_transformers(tmp_path: Path) -> None:
    from retrieval.training.trainer import sentence_transformer

    rows = recipe(write_rows(tmp_path))
    model = build_model(rows.model, [text for row in ROWS for text in row.values()], seed=1)
    sentence_transformer(model).save_pretrained(str(tmp_path / "checkpoint"))
    texts = [row["query"] for row in ROWS[:5]]
    expected = model.encode_documents(texts)
    np.testing.assert_allclose(BiEncoder.from_pretrained(tmp_path / "checkpoint").encode_documents(texts), expected, atol=1e-6)
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "checkpoint"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(again.encode_document(texts), expected, atol=1e-6)


def test_steps(tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    assert total_steps(recipe(rows, "training.epochs=1.5"), 67) == 12
    assert total_steps(recipe(rows, "training.max_steps=5"), 67) == 5
    assert total_steps(recipe(rows, "training.epochs=0.01"), 64) == 1


def test_bad_data_and_bad_places_are_named(tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    with pytest.raises(InputError, match=r"rows\.jsonl:1: the field 'question' must hold text, got None"):
        train_recipe(recipe(rows, "data.query_field=question"), tmp_path / "out")
    with pytest.raises(InputError, match=r"nowhere\.jsonl: cannot be read"):
        train_recipe(recipe(tmp_path / "nowhere.jsonl"), tmp_path / "out")
    with pytest.raises(InputError, match=r"64 rows are fewer than training\.batch_size 128"):
        train_recipe(recipe(rows, "training.batch_size=128"), tmp_path / "out")
    assert not (tmp_path / "out").exists()

    train_recipe(recipe(rows, "training.max_steps=1"), tmp_path / "out")
    with pytest.raises(InputError, match="holds a run already"):
        train_recipe(recipe(rows), tmp_path / "out")
    again = train_recipe(recipe(rows, "training.max_steps=2"), tmp_path / "out", overwrite=True)
    assert again["result"]["steps"] == 2


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    rows = recipe(write_rows(tmp_path))
    model = build_model(rows.model, [text for row in ROWS for text in row.values()], seed=1)
    with torch.no_grad():
        model.encoder.final_norm.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="the loss is nan at step 2"):
        train_dense(rows, ROWS, model, tmp_path / "work")
    assert not model.encoder.training


def test_a_model_without_a_record_is_not_overwritten(tmp_path: Path) -> None:
    weights = tmp_path / "out" / "model" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"dear to somebody")
    with pytest.raises(InputError, match="holds a model already; choose another --out, or --overwrite"):
        train_recipe(recipe(write_rows(tmp_path)), tmp_path / "out")
    assert contents(tmp_path / "out") == {"model/model.safetensors": b"dear to somebody"}
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="a file; --out names a folder"):
        train_recipe(recipe(write_rows(tmp_path)), tmp_path / "file")


def test_a_run_that_fails_leaves_the_earlier_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, out = write_rows(tmp_path), tmp_path / "out"
    train_recipe(recipe(rows, "training.max_steps=1"), out)
    (out / "notes.txt").write_text("mine")
    before = contents(out)

    same = tmp_path / "same"
    same.mkdir()
    with pytest.raises(InputError, match="do not fill one batch"):
        train_recipe(recipe(write_rows(same, [ROWS[0]] * 64)), out, overwrite=True)
    assert contents(out) == before

    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "run.json" and target.parent == out and self.parent.name.startswith(".unfinished"):
            raise OSError("disk on fire")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)  # the last of the four renames
    with pytest.raises(OSError, match="disk on fire"):
        train_recipe(recipe(rows, "training.max_steps=2"), out, overwrite=True)
    assert contents(out) == before
    assert sorted(path.name for path in out.iterdir()) == ["model", "notes.txt", "run.json"]

    monkeypatch.undo()
    train_recipe(recipe(rows, "training.max_steps=2"), out, overwrite=True)
    assert json.loads((out / "run.json").read_text())["result"]["steps"] == 2
    assert sorted(path.name for path in out.iterdir()) == ["model", "notes.txt", "run.json"]


def test_a_first_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="64 rows do not fill one batch of 8 without a repeated text"):
        train_recipe(recipe(write_rows(tmp_path, [ROWS[0]] * 64)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["sentence_transformers", "transformers", "datasets", "accelerate"])
def test_a_missing_extra_is_named_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"training needs {module}: pip install 'quiver-retrieval\[train\]'"):
        train_recipe(recipe(tmp_path / "nowhere.jsonl"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_batches_that_cannot_be_filled_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Nine of the 16 rows have one query: a first batch takes all eight queries there are, and the rest do not make a second.
    rows = ROWS[:8] + [{**row, "query": ROWS[0]["query"]} for row in ROWS[8:16]]
    with caplog.at_level(logging.WARNING, logger="retrieval.training.trainer"):
        record = train_recipe(recipe(write_rows(tmp_path, rows), "training.epochs=1"), tmp_path / "out")
    assert (record["result"]["steps"], record["result"]["steps_planned"]) == (1, 2)
    assert "1 of 2 planned steps were done" in caplog.text


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("normalize", ["true", "false"])
def test_what_is_trained_is_what_is_searched(tmp_path: Path, normalize: str, include_prompt: bool) -> None:
    """The loss of the first step follows from the vectors that the starting model gives at inference."""
    start = build_model(recipe(write_rows(tmp_path)).model, all_texts(), seed=1)
    start.settings = replace(start.settings, lower_case=True, include_prompt=include_prompt)
    start.save(tmp_path / "start")
    rows = [{key: text.upper() for key, text in row.items()} for row in ROWS[:8]]
    chosen = recipe(
        write_rows(tmp_path, rows),
        f"model.init={tmp_path / 'start'}",
        "model.architecture=null",
        "model.tokenizer=null",
        f"model.normalize={normalize}",
        "model.query_prompt=Look for ",
        "model.document_prompt=Code ",
        "training.max_steps=1",
        "training.log_every=1",
    )
    model = build_model(chosen.model, [], seed=1)
    assert (model.settings.lower_case, model.settings.include_prompt) == (True, include_prompt)
    assert model.settings.similarity == ("cosine" if normalize == "true" else "dot")
    queries, documents = (
        model.encode([row[key] for row in rows], role).vectors for key, role in (("query", "query"), ("positive", "document"))
    )
    expected = torch.nn.functional.cross_entropy(torch.from_numpy(20 * queries @ documents.T), torch.arange(8)).item()

    result = train_dense(chosen, rows, model, tmp_path / "work")
    (_, first), *_ = result.losses
    assert first == pytest.approx(expected, rel=1e-4)
    result.model.save(tmp_path / "trained")
    assert replace(BiEncoder.from_pretrained(tmp_path / "trained").settings, encoder_folder=Path()) == replace(
        model.settings, encoder_folder=Path()
    )


def test_truncation_is_counted_as_at_inference(tmp_path: Path) -> None:
    plain = recipe(write_rows(tmp_path), "model.max_length=22")
    prompted = recipe(write_rows(tmp_path), "model.max_length=22", "model.query_prompt=find the following thing: ", "training.max_steps=1")
    counts = []
    for one in (plain, prompted):
        model = build_model(one.model, all_texts(), seed=1)
        encoded = [model.encode([row[key] for row in ROWS], role) for key, role in (("query", "query"), ("positive", "document"))]
        counts.append(sum(encoding.counts.truncated for encoding in encoded))
    assert counts[0] < counts[1]
    assert train_recipe(prompted, tmp_path / "out")["result"]["texts_truncated"] == counts[1]


def test_a_model_is_built_where_the_device_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "default_device", lambda: "meta")
    assert build_model(recipe(write_rows(tmp_path)).model, all_texts(), seed=1).encoder.device.type == "meta"
