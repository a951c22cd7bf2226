"""Runs from start to end: record, kept weights, refused settings, and what remains after a failure."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional as F

from quiver.encoder import InputError
from quiver.encoder.training.run_folder import LOG, read_log
from quiver.encoder.training.trainer import BarCallback, Callback
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.training.data import TrainingRows, prepare_rows
from quiver.retrieval.training.dataloader import BatchOrder
from quiver.retrieval.training.model import build_model
from quiver.retrieval.training.recipe import SCORE, Recipe
from quiver.retrieval.training.state import learning_rate_share

pytest.importorskip("pylate.models")

from quiver.retrieval.training.run import train

sentence_transformers = pytest.importorskip("sentence_transformers")

MakeRecipe = Callable[..., Recipe]

WATCHED = ("development.data=nowhere", "development.every=2")


class Killed(BaseException):
    """An exception that no code catches."""


class Scorer:
    """Scorer that returns the given scores, one per call, and records the fingerprints of the models."""

    def __init__(self, *scores: float, then: Callable[[int], None] = lambda call: None) -> None:
        self.scores = list(scores)
        self.models: list[str] = []
        self.then = then

    def __call__(self, model: BiEncoder | ColBERT) -> float:
        assert not model.encoder.training
        model.encode_texts(["open every file"], "query")
        self.models.append(model.card.fingerprint)
        random.random(), torch.rand(3), np.random.rand()  # noqa: NPY002  # what a scorer draws is its own business
        self.then(len(self.models))
        return self.scores[len(self.models) - 1]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


class StopAt(Callback):
    """Simulate a kill in a step, before anything of the step is written."""

    def __init__(self, step: int, error: type[BaseException] | None = None) -> None:
        self.step, self.error = step, error or Killed

    def on_step(self, step: int) -> None:
        if step == self.step:
            raise self.error


def killed(recipe: Recipe, out: Path, step: int, *, resume: bool = False) -> None:
    with pytest.raises(Killed):
        train(recipe, out, resume=resume, callbacks=[StopAt(step)])


def rows_of(recipe: Recipe, tmp_path: Path) -> TrainingRows:
    return prepare_rows(recipe.data, tmp_path / "rows", seed=recipe.training.seed)


def test_a_run_is_recorded(make_recipe: MakeRecipe, steady_folder: Path, tmp_path: Path) -> None:
    """All of run.json; the first loss follows from the vectors of the starting model; the best model is kept."""
    overrides = (
        f"model.init={steady_folder}",
        "training.max_steps=6",
        "training.save_every=4",
        "training.log_every=1",
        "model.max_length=16",
    )
    recipe = make_recipe("dense", *overrides, *WATCHED, "development.keep_best=true")
    scorer, out = Scorer(0.2, 0.9, 0.5), tmp_path / "out"
    record = train(recipe, out, command="quiver train it", scorer=scorer)
    assert json.loads((out / "run.json").read_text()) == record
    assert record["schema"] == "quiver-run/2"
    assert record["recipe"] == json.loads((out / "recipe.json").read_text()) == json.loads(json.dumps(recipe.model_dump()))
    assert (record["command"], record["device"], record["processes"]) == ("quiver train it", "cpu", 1)
    assert record["versions"]["torch"] == torch.__version__.partition("+")[0]
    board = ["tensorboard"] if find_spec("tensorboard") else []
    made = ["begun.json", "checkpoints", "log.jsonl", "model", "recipe.json", "run.json", *board]
    assert sorted(path.name for path in out.iterdir()) == made

    rows, start, result = rows_of(recipe, tmp_path), build_model(recipe, []), record["result"]
    assert record["data"] == {**rows.counts._asdict(), "revision": recipe.data.revision, "licence": recipe.data.licence}
    assert record["batch"] == {"rows": 4, "accumulation": 1, "processes": 1, "effective": 4, "negatives_per_query": 11}
    assert (result["steps"], result["epochs"], result["resumed_at"]) == (6, 6 / 16, [])
    batches = [[rows[row] for row in batch.rows] for batch in islice(BatchOrder(rows, size=4, seed=7, no_duplicates=False).batches(), 6)]
    queries, *documents = ([row[key] for row in batches[0]] for key in ("query", "document_1", "document_2", "document_3"))
    scores = (
        start.encode_texts(queries, "query").vectors
        @ start.encode_texts([text for column in documents for text in column], "document").vectors.T
    )
    expected = F.cross_entropy(torch.from_numpy(20 * scores), torch.arange(4)).item()
    assert result["losses"][0] == [1, pytest.approx(expected, rel=1e-5)]
    assert [step for step, _ in result["losses"]] == [1, 2, 3, 4, 5, 6]
    rates = [1e-2 * learning_rate_share(recipe.training, update, 6) for update in range(6)]
    assert result["learning_rates"] == [[step, pytest.approx(rate)] for step, rate in enumerate(rates, start=1)]
    assert all(value > 0 for key in ("grad_norms", "tokens_per_second") for _, value in result[key])
    encoded = [
        start.encode_texts([row[key] for batch in batches for row in batch], role)
        for key, role in (("query", "query"), *((f"document_{place}", "document") for place in (1, 2, 3)))
    ]
    assert result["texts"] == 6 * 4 * 4
    assert result["texts_truncated"] == sum(one.counts.truncated for one in encoded) > 10
    assert result["tokens"] == sum(one.counts.tokens for one in encoded)

    assert [(line["step"], line[SCORE]) for line in result["development"]] == [(2, 0.2), (4, 0.9), (6, 0.5)]
    assert result["kept_steps"] == [4]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    assert same(out / "model", out / "checkpoints" / "step-000004")
    assert not same(out / "model", out / "checkpoints" / "step-000006")
    assert record["model"]["fingerprint"] == scorer.models[1] == load_model(out / "model").card.fingerprint
    assert len(set(scorer.models)) == 3
    assert record["model"]["parameters"] == start.encoder.num_parameters
    assert record["model"]["source"] == str(steady_folder)
    assert 0 < result["seconds"] < 600
    assert [line["seconds"] for line in read_log(out / LOG)] == sorted(line["seconds"] for line in read_log(out / LOG))

    ours = load_model(out / "model")
    plain = sentence_transformers.SentenceTransformer(str(out / "model"), device="cpu")
    assert type(plain[0]).__module__.startswith("sentence_transformers.")
    np.testing.assert_allclose(ours.encode_document(documents[0]), plain.encode_document(documents[0]), atol=1e-5, rtol=0)


def test_a_step_of_several_batches_has_the_loss_and_gradient_of_one_large_batch(
    make_recipe: MakeRecipe, steady_folder: Path, tmp_path: Path
) -> None:
    """Without in-batch negatives the loss is a mean over rows, so 2 x 4 rows are 8 rows."""
    common = (f"model.init={steady_folder}", "loss.name=kl", "data.score_fields=scores", "training.log_every=1", "training.max_steps=4")
    results = [
        train(make_recipe("dense", *common, f"training.batch_size={8 // count}", f"training.accumulation={count}"), tmp_path / str(count))
        for count in (1, 2, 4)
    ]
    for key in ("losses", "grad_norms"):
        one, *others = ([value for _, value in record["result"][key]] for record in results)
        for other in others:
            assert other == pytest.approx(one, rel=1e-4), key


def test_a_best_checkpoint_that_is_damaged_is_not_the_model(
    make_recipe: MakeRecipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"

    def harm(call: int) -> None:
        if call == 2:
            path = out / "checkpoints" / "step-000002" / "model.safetensors"
            content = bytearray(path.read_bytes())
            content[-3] ^= 1
            path.write_bytes(content)

    recipe = make_recipe("dense", *WATCHED, "development.keep_best=true", "training.max_steps=4")
    with caplog.at_level(logging.WARNING, logger="quiver.retrieval.training"):
        record = train(recipe, out, scorer=Scorer(0.9, 0.1, then=harm))
    assert "step-000002: model.safetensors is damaged; its weights are excluded from the average" in caplog.text
    assert record["result"]["kept_steps"] == [4]
    assert same(out / "model", out / "checkpoints" / "step-000004")


def test_the_mean_over_several_collections_counts_and_each_is_logged(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe("dense", "development.data=[a, b]", "development.every=2", "development.keep_best=true", "training.max_steps=4")
    scores = [{"a.dev": 0.9, "b.dev": 0.1}, {"a.dev": 0.2, "b.dev": 0.4}]
    record = train(recipe, tmp_path / "out", scorer=lambda model: scores.pop(0))
    scored = [{key: value for key, value in line.items() if key != "seconds"} for line in record["result"]["development"]]
    assert scored == [
        {"step": 2, SCORE: 0.5, f"{SCORE} a.dev": 0.9, f"{SCORE} b.dev": 0.1},
        {"step": 4, SCORE: pytest.approx(0.3), f"{SCORE} a.dev": 0.2, f"{SCORE} b.dev": 0.4},
    ]
    assert record["result"]["kept_steps"] == [2]
    assert [line[f"{SCORE} b.dev"] for line in read_log(tmp_path / "out" / LOG) if SCORE in line] == [0.1, 0.4]


AVERAGED = ("training.average_checkpoints=3", "training.keep_checkpoints=3", "training.save_every=3", "training.max_steps=10")


def test_the_last_checkpoints_are_averaged(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    record = train(make_recipe("dense", *AVERAGED), out)
    assert record["result"]["kept_steps"] == [6, 9, 10]
    each = [weights(out / "checkpoints" / f"step-{step:06d}") for step in (6, 9, 10)]
    for name, found in weights(out / "model").items():
        np.testing.assert_array_equal(found, np.mean([one[name].astype(np.float64) for one in each], axis=0).astype(np.float32))
    assert not same(out / "model", out / "checkpoints" / "step-000010")


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_low_rank_matrices_are_merged(make_recipe: MakeRecipe, start_folder: Path, tmp_path: Path, kind: str) -> None:
    no_prefixes = ("model.colbert.query_prefix=''", "model.colbert.document_prefix=''") if kind == "colbert" else ()
    recipe = make_recipe(kind, "training.lora.rank=2", "training.lora.alpha=4", "training.max_steps=4", *no_prefixes)
    record = train(recipe, tmp_path / "out")
    found, start = weights(tmp_path / "out" / "model"), weights(start_folder)
    assert sorted(found) == sorted(start)
    changed = {name for name, weight in found.items() if not np.array_equal(weight, start[name])}
    assert changed == {name for name in found if ".Wqkv." in name or ".Wo." in name or ".Wi." in name}
    assert len(changed) == 8
    for name in changed:
        assert np.linalg.matrix_rank((found[name] - start[name]).astype(np.float64), tol=1e-6) <= 2
    checkpoint = tmp_path / "out" / "checkpoints" / "step-000004"
    assert same(tmp_path / "out" / "model", checkpoint)
    assert (checkpoint / "trained_weights.safetensors").exists()
    assert not (tmp_path / "out" / "start").exists()
    assert record["model"]["parameters"] == sum(weight.size for weight in found.values()) + (16 * 8 if kind == "colbert" else 0)


def test_invalid_runs_are_refused_before_anything_is_written(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, recipe = tmp_path / "out", make_recipe("dense")
    with pytest.raises(
        InputError, match=r"--resume \(resume=True\) continues a run and --overwrite \(overwrite=True\) replaces it; use one of them"
    ):
        train(recipe, out, resume=True, overwrite=True)
    with pytest.raises(InputError, match="contains no run to resume"):
        train(recipe, out, resume=True)
    for chosen, scorer in ((recipe, Scorer()), (make_recipe("dense", *WATCHED), None)):
        with pytest.raises(ValueError, match="a scorer is given if and only if the recipe has a development collection"):
            train(chosen, out, scorer=scorer)
    with pytest.raises(InputError, match=r"nowhere\.jsonl: no such file or folder"):
        train(make_recipe("dense", f"data.train={tmp_path / 'nowhere.jsonl'}"), out)
    with pytest.raises(InputError, match=r"rows\.jsonl:1: .*question"):
        train(make_recipe("dense", "data.query_field=question"), out)
    with pytest.raises(InputError, match=r"data\.train: 64 rows do not fill one batch of 65; lower training\.batch_size"):
        train(make_recipe("dense", "training.batch_size=65"), out)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file: is a file; --out must name a folder"):
        train(recipe, tmp_path / "file")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "schedulefree", None)
        patched.setattr("importlib.util.find_spec", lambda name: None if name == "schedulefree" else object())
        with pytest.raises(InputError, match="pip install schedulefree"):
            train(make_recipe("dense", "training.optimizer=schedule_free_adamw", "training.scheduler=constant"), out)
    assert not out.exists()


def test_only_the_same_run_can_be_resumed(make_recipe: MakeRecipe, rows_file: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "mine.jsonl", tmp_path / "out"
    rows.write_bytes(rows_file.read_bytes())
    chosen = (f"data.train={rows}", "training.max_steps=6", "training.save_every=2")
    recipe = make_recipe("dense", *chosen)
    killed(recipe, out, 4)
    before = contents(out)
    with pytest.raises(InputError, match="contains an unfinished run; resume it with --resume, or start over with --overwrite"):
        train(recipe, out)
    with pytest.raises(
        InputError,
        match=r"training\.seed was 7, is 8; training\.learning_rate was|training\.learning_rate was .*; training\.seed was 7, is 8",
    ):
        train(make_recipe("dense", *chosen, "training.seed=8", "training.learning_rate=0.1"), out, resume=True)
    assert contents(out) == before
    rows.write_text(rows.read_text().replace("write every line", "write any line"))
    with pytest.raises(InputError, match=r"--resume needs the recipe and data of the interrupted run; data\.sha256 was"):
        train(recipe, out, resume=True)
    rows.write_bytes(rows_file.read_bytes())  # the same rows, at another time
    assert train(recipe, out, resume=True)["result"]["resumed_at"] == [2]


@pytest.mark.parametrize("more", [(), ("training.lora.rank=2", "training.lora.alpha=4")], ids=["whole", "lora"])
def test_a_full_disk_is_reported_in_one_line_and_the_run_resumes(
    quiver: Callable[..., Any],
    make_recipe: MakeRecipe,
    tmp_path: Path,
    full_disk: Callable[[int], AbstractContextManager[None]],
    more: tuple[str, ...],
) -> None:
    chosen = ("training.max_steps=6", "training.save_every=2", "training.log_every=1", *more)
    make_recipe()
    recipe, out, whole = tmp_path / "recipe.json", tmp_path / "out", tmp_path / "whole"
    with ExitStack() as filled, pytest.MonkeyPatch.context() as patched:

        def filling(self: BarCallback, step: int) -> None:
            if step == 4:
                filled.enter_context(full_disk(10_000))

        patched.setattr(BarCallback, "on_step", filling)
        done = quiver("train", recipe, "--out", out, *chosen)
    assert done.code == 1
    assert done.err.count("\n") == 1, done.err
    assert "File too large" in done.err
    assert str(out / "checkpoints") in done.err, "which file"
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000002"]
    resumed = quiver("train", recipe, "--out", out, "--resume", *chosen)
    assert resumed.code == 0, resumed.err
    assert json.loads((out / "run.json").read_text())["result"]["resumed_at"] == [2]
    assert quiver("train", recipe, "--out", whole, *chosen).code == 0
    assert same(out / "model", whole / "model")


def test_a_run_uses_the_device_that_is_asked_for(make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU: here one that cannot be used, so that any use of it would fail."""
    monkeypatch.setattr("quiver.retrieval.training.run.default_device", lambda: "cuda")
    monkeypatch.setattr("quiver.retrieval.training.model.default_device", lambda: "cuda")
    recipe, out = make_recipe("dense", "training.max_steps=2", "training.dtype=auto"), tmp_path / "out"
    record = train(recipe, out, device="cpu")
    assert (record["device"], record["recipe"]["training"]["dtype"]) == ("cpu", "float32")
    with pytest.raises(InputError, match="device cuda is not available"):
        train(recipe, tmp_path / "other")
