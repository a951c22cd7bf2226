"""Training a bi-encoder: the native first module is sentence-transformers' own in all but speed, and a run is whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder import InputError
from retrieval.biencoder import BiEncoder
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


def test_a_run_learns_and_is_recorded(tmp_path: Path) -> None:
    record = train_recipe(recipe(write_rows(tmp_path)), tmp_path / "out", command="quiver train quickstart")
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == json.loads(json.dumps(record))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model", "run.json"]
    losses = [loss for _, loss in record["result"]["losses"]]
    assert record["result"]["steps"] == 16
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

    ours = sentence_transformer(BiEncoder.from_pretrained(minilm)).eval()
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
    assert not (tmp_path / "out" / "model").exists()
    assert not (tmp_path / "out" / "run.json").exists()

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
