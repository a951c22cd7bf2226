"""An interrupted and resumed run equals the uninterrupted one in weights, log and record."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError, RunStoppedError
from quiver.encoder.progress import progress_bar
from quiver.encoder.training.run_folder import LOG, read_log
from quiver.encoder.training.trainer import Callback
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.training.recipe import Recipe

pytest.importorskip("pylate.models")

from quiver.retrieval.training.run import train

MakeRecipe = Callable[..., Recipe]

SCORED = ("data.score_fields=scores",)
CASES = {
    "dropout, no duplicates, random negatives, accumulation, second epoch": (
        "dense",
        "training.no_duplicates=true",
        "data.negatives=random",
        "training.accumulation=2",
        "training.epochs=2",
    ),
    "ColBERT, accumulation": ("colbert", "training.accumulation=2", "training.no_duplicates=true", "training.epochs=2"),
    "ColBERT, distilled, LoRA, schedule-free": (
        "colbert",
        "loss.name=distillation",
        *SCORED,
        "data.negatives=random",
        "training.lora.rank=2",
        "training.lora.alpha=4",
        "training.lora.dropout=0.1",
        "training.optimizer=schedule_free_adamw",
        "training.scheduler=constant",
    ),
}
SLOW_CASES = {
    "GradCache": ("dense", "loss.name=cached_mnrl", "loss.mini_batch_size=3"),
    "Matryoshka, teacher": ("dense", "loss.name=margin_mse", *SCORED, "loss.matryoshka_dims=[16, 8]"),
    "schedule-free": ("dense", "training.optimizer=schedule_free_adamw", "training.scheduler=constant"),
    "LoRA": ("dense", "training.lora.rank=2", "training.lora.alpha=4", "training.lora.dropout=0.1"),
    "bfloat16, gradient checkpointing": ("dense", "training.dtype=bfloat16", "training.gradient_checkpointing=true"),
    "ColBERT, GradCache": ("colbert", "loss.name=cached_contrastive", "loss.mini_batch_size=3"),
    "ColBERT, distilled, random negatives": ("colbert", "loss.name=distillation", *SCORED, "data.negatives=random"),
}


class Killed(BaseException):
    """An exception that no code catches."""


class DieAfter(Callback):
    """Simulate a kill after a number of further steps, before anything of the last one is written."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_step(self, step: int) -> None:
        self.left -= 1
        if not self.left:
            raise Killed


def weights(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.safetensors")}
    assert found
    return found


def timeless(out: Path) -> list[dict[str, float]]:
    """The log without values that depend on the machine."""
    return [{key: value for key, value in line.items() if key not in ("seconds", "tokens_per_second")} for line in read_log(out / LOG)]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)])
def test_a_resumed_run_equals_the_uninterrupted_run(case: str, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    kind, *overrides = (CASES | SLOW_CASES)[case]
    if "schedule_free" in " ".join(overrides):
        pytest.importorskip("schedulefree")
    recipe = make_recipe(kind, *overrides, "training.max_steps=13", "training.save_every=4", "training.log_every=3")
    whole = train(recipe, tmp_path / "whole")
    assert whole["result"]["steps"] == 13

    out = tmp_path / "resumed"
    for survived, resume in ((7, False), (6, True)):  # dead in step 7, and then in step 10: both between two lines of the log
        with pytest.raises(Killed):
            train(recipe, out, resume=resume, callbacks=[DieAfter(survived)])
    resumed = train(recipe, out, resume=True)
    assert resumed["result"]["resumed_at"] == [4, 8]
    assert_same_run(out, resumed, tmp_path / "whole", whole)
    assert resumed["model"]["fingerprint"] == load_model(out / "model").card.fingerprint
    assert not (out / "data").exists()
    assert not (out / "start").exists()


def assert_same_run(out: Path, record: dict[str, Any], other_out: Path, other: dict[str, Any]) -> None:
    assert weights(out / "model") == weights(other_out / "model")
    assert timeless(out) == timeless(other_out)
    for key in ("texts", "texts_truncated", "tokens", "steps", "losses", "kept_steps"):
        assert record["result"][key] == other["result"][key]
    assert record["model"] == other["model"]
    assert record["data"] == other["data"]


def test_a_signal_stops_and_saves_the_run(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """SIGINT within the process; the signal handlers are restored afterwards."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    class Interrupt(Callback):
        def on_step(self, step: int) -> None:
            if step == 5:
                signal.raise_signal(signal.SIGINT)  # after this step was asked whether to stop: the run ends with the sixth

    recipe = make_recipe("dense", "training.max_steps=9", "training.log_every=3")
    with pytest.raises(RunStoppedError, match="stopped after step 6, with a checkpoint"):
        train(recipe, tmp_path / "out", callbacks=[Interrupt()])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    resumed = train(recipe, tmp_path / "out", resume=True)
    assert resumed["result"]["resumed_at"] == [6]
    assert_same_run(tmp_path / "out", resumed, tmp_path / "whole", train(recipe, tmp_path / "whole"))


WATCHED = ("development.data=held-out", "training.max_steps=8", "training.log_every=3")
EVALUATED = {
    "every step": ("development.every=1", "training.save_every=4"),
    "with each checkpoint": ("development.every=4", "training.save_every=4"),
    "the best is kept": ("development.every=2", "development.keep_best=true", "training.save_every=4", "training.keep_checkpoints=1"),
    "each epoch": ("training.epochs=2", "training.max_steps=null", "training.batch_size=16"),
}


class Encodes:
    """Scores a model by its vectors, in batches of one text each."""

    def __init__(self, then: Callable[[int, int], None] = lambda call, batch: None) -> None:
        self.calls, self.complete, self.then = 0, 0, then

    def __call__(self, model: Any) -> float:
        self.calls += 1
        total = 0.0
        with progress_bar("texts", 3, enabled=False) as advance:
            for batch, text in enumerate(("open every file", "read it", "count the lines"), start=1):
                total += float(abs(model.encode_query([text])[0]).sum())
                self.then(self.calls, batch)
                advance(1)
        self.complete += 1
        return total


def only_in(call: int, act: Callable[[], None]) -> Callable[[int, int], None]:
    return lambda calls, batch: act() if (calls, batch) == (call, 2) else None


def die() -> None:
    raise Killed


@pytest.mark.parametrize(("case", "call"), [("with each checkpoint", 2), ("the best is kept", 3), ("each epoch", 1)])
def test_a_run_killed_in_an_evaluation_has_its_checkpoint_and_evaluates_once(
    case: str, call: int, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = make_recipe("dense", *WATCHED, *EVALUATED[case])
    scorer = Encodes()
    whole = train(recipe, tmp_path / "whole", scorer=scorer)
    out = tmp_path / "out"
    with pytest.raises(Killed):
        train(recipe, out, scorer=Encodes(only_in(call, die)))
    if case == "the best is kept":
        with pytest.raises(InputError, match=r"development\.keep_best was true, and the best score decides"):
            train(recipe.replace(development=None), out, resume=True)
    again = Encodes()
    resumed = train(recipe, out, resume=True, scorer=again)
    assert_same_run(out, resumed, tmp_path / "whole", whole)
    assert resumed["result"]["development"][-1]["ndcg@10"] == whole["result"]["development"][-1]["ndcg@10"]
    if case != "the best is kept":  # nothing was lost: each evaluation but the killed one ran once
        assert again.complete == scorer.complete - (call - 1)
        assert resumed["result"]["resumed_at"] == [4 * call]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole" / "checkpoints").iterdir()
    )
