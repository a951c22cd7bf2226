"""Runs from start to end: record, kept weights, refused settings, and what remains after a failure."""

from __future__ import annotations

import json
import logging
import random
import signal
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
from quiver.encoder.errors import RunStoppedError
from quiver.encoder.training import run_folder
from quiver.encoder.training.callbacks import BarCallback
from quiver.encoder.training.log import LOG, read_log
from quiver.encoder.training.run_folder import lock_run
from quiver.encoder.training.state import preserve_rng_state
from quiver.encoder.training.trainer import Callback
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.training import run as module
from quiver.retrieval.training.data import TrainingRows, prepare_rows
from quiver.retrieval.training.dataloader import BatchOrder
from quiver.retrieval.training.model import build_model
from quiver.retrieval.training.recipe import SCORE, Recipe
from quiver.retrieval.training.state import learning_rate_share

pytest.importorskip("pylate.models")

from quiver.retrieval.training.run import train, train_and_save

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


class SignalAt(Callback):
    """Send SIGTERM in a step after the stop request was checked."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: int) -> None:
        if step == self.step:
            signal.raise_signal(signal.SIGTERM)


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
    assert record["data"] == {**rows.counts._asdict(), "revision": recipe.data.revision}
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


def test_the_recorded_passes_are_those_done(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Half of the rows share a query: an epoch has two batches of 16 instead of four, and its periodic actions are due at its end."""
    path = tmp_path / "half.jsonl"
    path.write_text(
        "".join(
            json.dumps({"query": f"q {place}" if place % 2 else "one for all", "positive": f"p {place}", "negatives": [f"n {place}"]})
            + "\n"
            for place in range(64)
        )
    )
    chosen = (f"data.train={path}", "data.documents_per_row=2", "training.batch_size=16", "training.no_duplicates=true")
    recipe = make_recipe("dense", *chosen, "training.log_every=1", "development.data=nowhere", "training.keep_checkpoints=9")
    out = tmp_path / "out"
    record = train(recipe, out, scorer=Scorer(0.1, 0.2))
    result = record["result"]
    assert (result["steps"], result["epochs"]) == (4, 2.0)
    assert [(line["step"], line["epoch"]) for line in read_log(out / LOG) if "loss" in line] == [(1, 0.25), (2, 1.0), (3, 1.25), (4, 2.0)]
    assert [line["step"] for line in result["development"]] == [2, 4]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    usual = train(make_recipe("dense", *chosen[:3], "training.log_every=1"), tmp_path / "usual")
    assert (usual["result"]["steps"], usual["result"]["epochs"]) == (4, 1.0)


def test_a_run_learns(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    for kind, overrides in (("dense", ()), ("colbert", ("loss.temperature=0.1",))):
        record = train(make_recipe(kind, *overrides, "training.log_every=4"), tmp_path / kind)
        losses = [loss for _, loss in record["result"]["losses"]]
        assert len(losses) == 4
        assert losses[-1] < 0.8 * losses[0], kind


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


AVERAGED = ("training.average_checkpoints=3", "training.keep_checkpoints=3", "training.save_every=3", "training.max_steps=10")


def test_the_last_checkpoints_are_averaged(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    record = train(make_recipe("dense", *AVERAGED), out)
    assert record["result"]["kept_steps"] == [6, 9, 10]
    each = [weights(out / "checkpoints" / f"step-{step:06d}") for step in (6, 9, 10)]
    for name, found in weights(out / "model").items():
        np.testing.assert_array_equal(found, np.mean([one[name].astype(np.float64) for one in each], axis=0).astype(np.float32))
    assert not same(out / "model", out / "checkpoints" / "step-000010")


def test_a_checkpoint_saved_for_a_signal_is_not_averaged(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A run stopped twice between two checkpoints ends with the weights of one that was not stopped."""
    recipe, out = make_recipe("dense", *AVERAGED, "training.save_every=4", "training.max_steps=13"), tmp_path / "out"
    whole = train(recipe, tmp_path / "whole")
    for resume, step in ((False, 7), (True, 9)):
        with pytest.raises(RunStoppedError) as stopped:
            train(recipe, out, resume=resume, callbacks=[SignalAt(step + 1)])
        assert stopped.value.step == step + 2
        assert (out / "checkpoints" / f"step-{step + 2:06d}").is_dir()
    resumed = train(recipe, out, resume=True)
    assert resumed["result"]["resumed_at"] == [9, 11]
    assert resumed["result"]["kept_steps"] == whole["result"]["kept_steps"] == [8, 12, 13]
    assert same(out / "model", tmp_path / "whole" / "model")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [f"step-{step:06d}" for step in (8, 12, 13)]


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


def test_a_run_restores_the_random_generators(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))  # noqa: NPY002

    with preserve_rng_state():
        expected = draw()
    train(make_recipe("dense", "training.max_steps=2"), tmp_path / "out")
    with preserve_rng_state():
        assert draw() == expected
    rows, recipe = rows_of(make_recipe("dense"), tmp_path), make_recipe("dense", "training.max_steps=1")
    model = build_model(recipe, [])
    with preserve_rng_state():
        expected = draw()
    train_and_save(recipe, rows, model, tmp_path / "at-hand")
    assert draw() == expected


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


@pytest.mark.parametrize("name", ["sentence_transformers", "transformers", "datasets"])
def test_a_missing_extra_is_named_before_anything_is_read(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    recipe = make_recipe("dense", f"data.train={tmp_path / 'nowhere.jsonl'}")
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None if asked == name else object())
    with pytest.raises(InputError, match=rf"training needs {name}: pip install 'quiver-retrieval\[train\]'"):
        train(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_given_rows_and_model_give_the_run_of_the_recipe(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe("dense", "training.max_steps=2")
    model = build_model(recipe, [])
    record = train_and_save(recipe, rows_of(recipe, tmp_path), model, tmp_path / "at-hand", command="it")
    assert record["command"] == "it"
    assert not model.encoder.training
    plain = train(recipe, tmp_path / "plain")
    assert record["model"] == plain["model"]
    assert record["data"] == plain["data"]
    with pytest.raises(InputError, match="already contains a run"):
        train_and_save(recipe, rows_of(recipe, tmp_path), model, tmp_path / "at-hand")


def test_an_earlier_run_is_replaced_only_by_a_complete_one(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(make_recipe("dense", "training.max_steps=1"), out)
    (out / "notes.txt").write_text("mine")
    (out / "report.md").write_text("of the old run")
    before = contents(out)
    for overwrite, resume, problem in (
        (False, False, "already contains a run"),
        (False, True, "the run is complete, there is nothing to resume"),
    ):
        with pytest.raises(InputError, match=problem):
            train(make_recipe("dense"), out, overwrite=overwrite, resume=resume)
    same_texts = tmp_path / "same.jsonl"
    same_texts.write_text((json.dumps({"query": "q", "positive": "p", "negatives": ["n", "m"]}) + "\n") * 64)
    failing = make_recipe("dense", f"data.train={same_texts}", "training.no_duplicates=true")
    with pytest.raises(InputError, match="64 rows do not fill one batch of 4 without a repeated text"):
        train(failing, out, overwrite=True)
    assert contents(out) == before
    assert not list(out.glob(".*"))
    again = train(make_recipe("dense", "training.max_steps=2"), out, overwrite=True)
    assert json.loads((out / "run.json").read_text())["result"]["steps"] == again["result"]["steps"] == 2
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "report.md").exists()
    assert not list(out.glob(".*"))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000002"]


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


def test_a_folder_used_by_another_session_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe, out = make_recipe("dense", "training.max_steps=2"), tmp_path / "out"
    used = "out: .* is training there; wait for it, or choose another --out"
    asked: list[dict[str, bool]] = [{}, {"overwrite": True}, {"resume": True}]

    def refused(call: int) -> None:
        before = settled()
        for how in asked:
            with pytest.raises(InputError, match=used):
                train(recipe, out, **how)
        with pytest.raises(InputError, match=used):
            train_and_save(recipe, rows_of(recipe, tmp_path), build_model(recipe, []), out)
        assert settled() == before

    def settled() -> dict[str, bytes]:
        """Files except those that a thread of TensorBoard writes at any time."""
        return {name: content for name, content in contents(out).items() if name != ".lock" and not name.startswith("tensorboard/")}

    scorer = Scorer(0.5, then=refused)
    train(make_recipe("dense", "training.max_steps=2", *WATCHED), out, scorer=scorer)
    assert len(scorer.models) == 1
    assert not list(out.glob(".*"))
    with lock_run(tmp_path / "begun"), pytest.raises(InputError, match="is training there"):
        train(recipe, tmp_path / "begun")
    assert not (tmp_path / "begun").exists()


def test_a_run_killed_while_writing_its_record_is_complete_after_resume(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leftovers are deleted by the next session, and the run stays complete."""
    out = tmp_path / "out"
    recipe = make_recipe("dense", "training.max_steps=2", "training.lora.rank=2", "training.lora.alpha=4")

    def dying(out: Path) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "remove_leftovers", dying)
        with pytest.raises(Killed):
            train(recipe, out)
    assert {"run.json", "data", "start"} <= {path.name for path in out.iterdir()}
    kept = {name: content for name, content in contents(out).items() if name.split("/")[0] not in ("data", "start")}
    with pytest.raises(InputError, match="the run is complete, there is nothing to resume"):
        train(recipe, out, resume=True)
    assert contents(out) == kept


def test_a_damaged_checkpoint_is_skipped(make_recipe: MakeRecipe, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe, out = make_recipe("colbert", "training.max_steps=6", "training.save_every=2", "training.log_every=1"), tmp_path / "out"
    killed(recipe, out, 6)
    path = out / "checkpoints" / "step-000004" / "trainer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, logger="quiver.retrieval.training"):
        resumed = train(recipe, out, resume=True)
    assert "step-000004: trainer.safetensors is damaged; removed it, so the run resumes from the checkpoint before it" in caplog.text
    assert resumed["result"]["resumed_at"] == [2]
    whole = train(recipe, tmp_path / "whole")
    assert same(out / "model", tmp_path / "whole" / "model")
    assert resumed["result"]["losses"] == whole["result"]["losses"]


def test_a_run_without_a_checkpoint_is_resumed_from_the_beginning(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe, out = (
        make_recipe("dense", "training.max_steps=3", "training.log_every=1", "training.lora.rank=2", "training.lora.alpha=4"),
        tmp_path / "out",
    )
    with pytest.MonkeyPatch.context() as patched:  # as after a kill: nothing is put back
        patched.setattr("quiver.encoder.training.run_folder.new_run", module.nullcontext)
        (out / "checkpoints").mkdir(parents=True)
        (out / "checkpoints").rmdir()
        killed(recipe, out, 3)
    assert len(read_log(out / LOG)) == 2
    resumed = train(recipe, out, resume=True)
    assert resumed["result"]["resumed_at"] == [0]
    train(recipe, tmp_path / "whole")
    assert same(out / "model", tmp_path / "whole" / "model")
    assert [line["step"] for line in read_log(out / LOG)] == [1, 2, 3]


@pytest.mark.parametrize("where", ["retrieval.training.run.average_models", "encoder.training.run_folder.finish_run"])
def test_a_run_killed_after_its_last_step_is_finished_by_resume(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    recipe, out = make_recipe("dense", "training.max_steps=2"), tmp_path / "out"

    def dying(*arguments: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(f"quiver.{where}", dying)
        with pytest.raises(Killed):
            train(recipe, out)
    assert not (out / "run.json").exists()
    record = train(recipe, out, resume=True, callbacks=[StopAt(step) for step in (1, 2, 3)])  # nothing is trained again
    assert record["result"]["resumed_at"] == [2]
    assert same(out / "model", out / "checkpoints" / "step-000002")
    assert not (out / "data").exists()
    assert not list(out.glob(".*"))


def test_a_run_keeps_the_dtype_that_it_began_with(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    usual, out, seen = ("training.max_steps=4", "training.save_every=2", "training.log_every=1"), tmp_path / "out", []

    class Products(Callback):
        def on_step(self, step: int) -> None:
            seen.append(torch.get_float32_matmul_precision())

    auto = train(make_recipe("dense", *usual, "training.dtype=auto"), tmp_path / "auto", callbacks=[Products()])
    assert auto["recipe"]["training"]["dtype"] == "float32"
    assert seen == ["highest"] * 4
    whole = train(make_recipe("dense", *usual, "training.dtype=bfloat16"), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(make_recipe("dense", *usual, "training.dtype=bfloat16"), out, callbacks=[StopAt(3, KeyboardInterrupt)])
    with pytest.raises(InputError, match=r'training\.dtype was "bfloat16", is "float32"'):
        train(make_recipe("dense", *usual, "training.dtype=float32"), out, resume=True)
    resumed = train(make_recipe("dense", *usual, "training.dtype=auto"), out, resume=True)
    assert resumed["recipe"]["training"]["dtype"] == "bfloat16"
    assert resumed["result"]["losses"] == whole["result"]["losses"] != auto["result"]["losses"]


def test_a_run_uses_the_device_that_is_asked_for(make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU: here one that cannot be used, so that any use of it would fail."""
    monkeypatch.setattr("quiver.retrieval.training.run.default_device", lambda: "cuda")
    monkeypatch.setattr("quiver.retrieval.training.model.default_device", lambda: "cuda")
    recipe, out = make_recipe("dense", "training.max_steps=2", "training.dtype=auto"), tmp_path / "out"
    record = train(recipe, out, device="cpu")
    assert (record["device"], record["recipe"]["training"]["dtype"]) == ("cpu", "float32")
    with pytest.raises(InputError, match="device cuda is not available"):
        train(recipe, tmp_path / "other")
