"""The folder of a run: refusals, replacement of an old run, and recovery from failures and kills."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import InputError
from quiver.encoder.files import write_json
from quiver.encoder.schema import TextSchema
from quiver.encoder.training import run_folder
from quiver.encoder.training.processes import Processes
from quiver.encoder.training.run_folder import (
    BEGUN,
    CHECKPOINTS,
    DATA,
    LOCK,
    LOG,
    MADE,
    MODEL,
    NONFINITE,
    RECIPE,
    RECORD,
    START,
    Checkpoints,
    RunIdentity,
    finish_run,
    is_run,
    lock_run,
    new_run,
    recipe_changes,
    recipe_of,
    refuse_existing,
    refuse_nothing_to_resume,
    refuse_other_run,
    remove_leftovers,
    remove_run,
    resume_run,
)

EachDeath = Callable[[Callable[[], object], Callable[[], object]], Iterator[None]]

IDENTITY = RunIdentity(
    recipe={"name": "old", "training": {"seed": 7, "learning_rate": 1e-5, "lora": None}, "data": {"train": ["a", "b"]}},
    fixed={"processes": 1, "data": {"rows": 64, "sha256": "ab"}},
    about={"command": "quiver train", "device": "cpu", "threads": 2, "versions": {"torch": "2.11", "pylate": None}},
)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def begin(out: Path, identity: RunIdentity = IDENTITY) -> None:
    out.mkdir(parents=True, exist_ok=True)
    identity.write(out)


def train(out: Path, name: str) -> None:
    """Write the files of a run up to its model."""
    (out / DATA).mkdir()
    (out / DATA / "rows").write_text(name)
    (out / LOG).write_text(f'{{"step": 1, "name": "{name}"}}\n')
    with Checkpoints(out / CHECKPOINTS).writing(1) as folder:
        (folder / "weights").write_text(name)


def save_as(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "weights").write_text(name)


def finished(out: Path, name: str = "old") -> None:
    begin(out)
    train(out, name)
    finish_run(out, save_as(name), {"schema": "quiver-run/2", "name": name, "recipe": IDENTITY.recipe})


def test_finishing_a_run_writes_model_and_record(tmp_path: Path) -> None:
    out = tmp_path / "out"
    begin(out)
    assert is_run(out)
    assert recipe_of(out) == IDENTITY.recipe
    train(out, "old")
    (out / START).mkdir()
    (out / ".replaced-abc").mkdir()
    (out / ".replaced-abc" / RECORD).write_text("an earlier one")
    finish_run(out, save_as("old"), {"schema": "quiver-run/2", "recipe": {"name": "as recorded"}})
    assert sorted(path.name for path in out.iterdir()) == sorted([RECIPE, BEGUN, RECORD, MODEL, LOG, CHECKPOINTS])
    assert contents(out / MODEL) == {"weights": b"old"}
    assert recipe_of(out) == {"name": "as recorded"}
    assert is_run(out)


def test_other_folders_are_not_runs(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    assert recipe_of(tmp_path) is None
    (tmp_path / RECORD).write_text('{"schema": "somebody-else/1"}')
    assert not is_run(tmp_path)
    (tmp_path / RECORD).write_text('{"result": 1}')
    assert not is_run(tmp_path)


@pytest.mark.parametrize("name", MADE)
def test_files_that_are_not_part_of_a_run_are_never_replaced(tmp_path: Path, name: str) -> None:
    if "." in name:
        (tmp_path / name).write_text("{}")
    else:
        (tmp_path / name).mkdir()
    for overwrite in (False, True):
        with pytest.raises(InputError, match=f"holds {name}, which does not come from a training run; choose another --out$"):
            refuse_existing(tmp_path, overwrite=overwrite)


def test_an_existing_run_is_refused_or_replaced(tmp_path: Path) -> None:
    finished(tmp_path / "done")
    with pytest.raises(
        InputError, match=r"done: already contains a run; choose another --out, or pass --overwrite .overwrite=True in Python.$"
    ):
        refuse_existing(tmp_path / "done", overwrite=False)
    refuse_existing(tmp_path / "done", overwrite=True)
    begin(tmp_path / "begun")
    with pytest.raises(
        InputError, match=r"begun: contains an unfinished run; resume it with --resume, or start over with --overwrite .resume=True or .*$"
    ):
        refuse_existing(tmp_path / "begun", overwrite=False)
    refuse_existing(tmp_path / "begun", overwrite=True)


def test_only_an_unfinished_run_can_be_resumed(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"contains no run to resume; omit --resume to start one$"):
            refuse_nothing_to_resume(folder)
    begin(tmp_path / "begun")
    refuse_nothing_to_resume(tmp_path / "begun")
    finished(tmp_path / "done")
    with pytest.raises(InputError, match=r"done: the run is complete, there is nothing to resume; its model is .*done/model$"):
        refuse_nothing_to_resume(tmp_path / "done")


def changed(**parts: Any) -> RunIdentity:
    whole = {"recipe": dict(IDENTITY.recipe), "fixed": dict(IDENTITY.fixed), "about": dict(IDENTITY.about)}
    for part, values in parts.items():
        whole[part] = {**whole[part], **values}
    return RunIdentity(**whole)


def test_a_run_is_resumed_only_with_the_same_recipe_and_data(tmp_path: Path) -> None:
    begin(tmp_path)
    refuse_other_run(tmp_path, IDENTITY)
    refuse_other_run(tmp_path, RunIdentity(IDENTITY.recipe, {"processes": 1}, {}))  # the data are not read yet
    refuse_other_run(tmp_path, changed(about={"command": "another", "device": "cuda"}))
    refuse_other_run(tmp_path, changed(recipe={"data": {"train": ("a", "b")}}))  # a tuple is a list in JSON
    needs = rf"^{tmp_path}: --resume needs the recipe and data of the interrupted run; "
    training = {**IDENTITY.recipe["training"], "seed": 8, "lora": {"rank": 2}}
    with pytest.raises(InputError, match=needs + r'training\.seed was 7, is 8; training\.lora was null, is {"rank": 2}$'):
        refuse_other_run(tmp_path, changed(recipe={"training": training}))
    with pytest.raises(InputError, match=needs + r'data\.train was \["a", "b"\], is \["a"\]$'):
        refuse_other_run(tmp_path, changed(recipe={"data": {"train": ("a",)}}))
    with pytest.raises(InputError, match=needs + "processes was 1, is 2$"):
        refuse_other_run(tmp_path, changed(fixed={"processes": 2}))
    with pytest.raises(InputError, match=needs + r'data\.sha256 was "ab", is "cd"$'):
        refuse_other_run(tmp_path, changed(fixed={"data": {"rows": 64, "sha256": "cd"}}))
    with pytest.raises(InputError, match=needs + "kind was null, is 3$"):
        refuse_other_run(tmp_path, changed(recipe={"kind": 3}))


class Training(TextSchema):
    """Section of `Recipe`."""

    seed: int
    log_every: int = 10
    keep_checkpoints: int = 2
    gradient_checkpointing: bool = False


class Phase(TextSchema):
    """Item of a list in `Recipe`."""

    tokens: int


class Recipe(TextSchema):
    """A recipe with every kind of setting that the run folder treats differently."""

    name: str = "old"
    description: str = "-"
    source: str = "-"
    cost: str = "-"
    expected: str = "-"
    training: Training
    phases: tuple[Phase, ...] = ()


def test_a_resumed_session_may_change_settings_that_do_not_affect_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(tmp_path, replace(IDENTITY, recipe=Recipe(training=Training(seed=7)).model_dump()))
    texts = {"name": "another", "description": "better", "source": "here", "cost": "much", "expected": "more"}
    numbers = {"log_every": 50, "keep_checkpoints": 7}
    assert {*texts, "encoder", "data.revision", "data.licence", *(f"training.{name}" for name in numbers)} == run_folder.WITHOUT_WEIGHT
    now = replace(IDENTITY, recipe=Recipe(**texts, training=Training(seed=7, **numbers)).model_dump())
    refuse_other_run(tmp_path, now)
    with pytest.raises(
        InputError, match=r"of the interrupted run; training\.log_every was 10, is 50; training\.keep_checkpoints was 2, is 7$"
    ):
        refuse_other_run(tmp_path, replace(now, without_weight={*texts}))
    seed = replace(IDENTITY, recipe=Recipe(training=Training(seed=8, log_every=50)).model_dump())
    with pytest.raises(InputError, match=r"of the interrupted run; training\.seed was 7, is 8$"):
        refuse_other_run(tmp_path, seed)
    with caplog.at_level(logging.WARNING, logger=run_folder.__name__):
        assert resume_run(tmp_path, now, Processes()) == 0
    assert caplog.messages == [
        f"{tmp_path}: changed since the run was started: name, description, source, cost, expected, training.log_every, "
        "training.keep_checkpoints; this does not affect the weights"
    ]


def test_settings_that_an_older_recipe_lacks_have_their_defaults(tmp_path: Path) -> None:
    now = Recipe(training=Training(seed=7)).model_dump()
    was = json.loads(json.dumps(now))
    del was["training"]["gradient_checkpointing"]
    assert recipe_changes(was, now) == [("training.gradient_checkpointing", None, False)]
    assert recipe_changes(was, now, Recipe) == []
    begin(tmp_path, replace(IDENTITY, recipe=was))
    refuse_other_run(tmp_path, replace(IDENTITY, recipe=now, schema=Recipe))
    other = Recipe(training=Training(seed=7, gradient_checkpointing=True)).model_dump()
    assert recipe_changes(was, other, Recipe) == [("training.gradient_checkpointing", False, True)]
    del was["training"]["seed"]  # it has no default
    assert ("training.seed", None, 7) in recipe_changes(was, now, Recipe)
    assert recipe_changes({**now, "moons": 3}, now, Recipe) == [("moons", 3, None)]  # written by a later version


def test_a_run_of_another_version_is_not_resumed(tmp_path: Path) -> None:
    begin(tmp_path)
    write_json(tmp_path / BEGUN, {**json.loads((tmp_path / BEGUN).read_text()), "schema": "quiver-begun/0"})
    with pytest.raises(InputError, match=r"schema is quiver-begun/0, this version reads quiver-begun/1; start the run again"):
        refuse_nothing_to_resume(tmp_path)


def test_a_run_killed_between_its_first_two_files_can_be_resumed(tmp_path: Path) -> None:
    begin(tmp_path, RunIdentity({}, {"processes": 1}, IDENTITY.about))
    (tmp_path / RECIPE).unlink()
    refuse_nothing_to_resume(tmp_path)
    refuse_other_run(tmp_path, IDENTITY)


def test_a_change_that_may_affect_the_last_bits_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(tmp_path)
    with caplog.at_level(logging.WARNING, logger=run_folder.__name__):
        resume_run(tmp_path, changed(about={"command": "quiver train --resume"}), Processes())
        assert caplog.messages == []
        resume_run(tmp_path, changed(about={"device": "cuda", "threads": 1, "versions": {"torch": "2.12", "pylate": None}}), Processes())
    assert caplog.messages == [
        f"{tmp_path}: changed since the run was started: device, threads, versions.torch; the final weights may differ slightly"
    ]


def fail(out: Path, *steps: Callable[[Path], object]) -> None:
    with lock_run(out), new_run(out):
        begin(out)
        for step in steps:
            step(out)
        raise ValueError("in the block")


def sealed(out: Path) -> None:
    with Checkpoints(out / CHECKPOINTS).writing(4):
        pass


def rest(out: Path) -> None:
    (out / DATA).mkdir()
    (out / DATA / "half").write_text("new")
    (out / LOG).write_text("new")
    (out / CHECKPOINTS / ".step-000004.unfinished").mkdir(parents=True)
    (out / f".{MODEL}-unfinished").mkdir()


def test_a_run_that_fails_early_restores_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished(out)
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    with pytest.raises(ValueError, match="in the block"):
        fail(out, rest)
    assert contents(out) == before
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("mark", [sealed, lambda out: (out / NONFINITE).mkdir()], ids=["checkpoint", "nonfinite"])
def test_a_run_that_fails_after_a_checkpoint_stays(tmp_path: Path, mark: Callable[[Path], object]) -> None:
    out = tmp_path / "out"
    finished(out)
    (out / "notes.txt").write_text("mine")
    old = {name: content for name, content in contents(out).items() if name != "notes.txt"}
    with pytest.raises(ValueError, match="in the block"):
        fail(out, rest, mark)
    refuse_nothing_to_resume(out)
    assert (out / "notes.txt").exists()
    [aside] = out.glob(".replaced-*")
    assert contents(aside) == old, "whole, until the new one is complete"
    finish_run(out, save_as("new"), {"schema": "quiver-run/2"})
    assert not list(out.glob(".*"))
    assert contents(out / MODEL) == {"weights": b"new"}


def test_leftovers_of_a_killed_complete_run_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished(out)
    (out / "notes.txt").write_text("mine")
    whole = contents(out)
    for left in (DATA, START, ".replaced-abc"):
        (out / left).mkdir()
        (out / left / "rest").touch()
    (out / f".{RECORD}.{'ab' * 16}.tmp").touch()
    remove_leftovers(out)
    assert contents(out) == whole
    assert sorted(path.name for path in out.iterdir()) == sorted([BEGUN, RECIPE, RECORD, MODEL, LOG, CHECKPOINTS, "notes.txt"])


def test_a_run_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("alone", "with notes"):
        finished(tmp_path / name)
    (tmp_path / "with notes" / "notes.txt").write_text("mine")
    with lock_run(tmp_path / "alone"), pytest.raises(InputError, match="is training there"):
        remove_run(tmp_path / "alone")
    for name in ("alone", "with notes"):
        remove_run(tmp_path / name)
    assert contents(tmp_path) == {"with notes/notes.txt": b"mine"}
    assert not (tmp_path / "alone").exists()


def test_a_kill_during_removal_never_leaves_a_different_run(tmp_path: Path, each_death: EachDeath) -> None:
    """The recipe exists as long as a checkpoint does; the remaining files are recognized as those of a run and can be removed."""
    out, half = tmp_path / "out", 0

    def reset() -> None:
        shutil.rmtree(out, ignore_errors=True)
        finished(out)

    for _ in each_death(reset, lambda: remove_run(out)):
        if (out / CHECKPOINTS).exists():
            assert recipe_of(out) == IDENTITY.recipe
        if [path for path in out.glob("*") if path.name != LOCK]:
            assert is_run(out)
            half += not (out / RECORD).exists()
            remove_run(out)
        shutil.rmtree(out, ignore_errors=True)
    assert half >= 5


@pytest.mark.slow
def test_a_kill_at_any_file_operation_loses_nothing(tmp_path: Path, each_death: EachDeath) -> None:
    """A new run replaces an old one: at any moment one of them is complete, and the folder is recognized as a run."""
    out = tmp_path / "out"

    def reset() -> None:
        shutil.rmtree(out, ignore_errors=True)
        finished(out, "old")

    def write_another() -> None:
        with lock_run(out), new_run(out):
            begin(out)
            train(out, "new")
            finish_run(out, save_as("new"), {"schema": "quiver-run/2", "name": "new"})

    reset()
    old = contents(out)
    found = []
    for _ in each_death(reset, write_another):
        refuse_existing(out, overwrite=True)  # every state can be replaced
        if (out / RECORD).exists():
            name = json.loads((out / RECORD).read_text())["name"]
            assert (out / MODEL / "weights").read_text() == name, "a record tells of the model beside it"
            assert Checkpoints(out / CHECKPOINTS).newest() == 1
            found.append(name)
        else:
            parts = [contents(aside) for aside in out.glob(".replaced-*")]
            missing = {path: content for path, content in old.items() if not any(part.get(path) == content for part in parts)}
            assert missing.items() <= contents(out).items(), "what is not aside yet is where it was"
            found.append("between")
        with lock_run(out), new_run(out):
            begin(out)
            train(out, "again")
            finish_run(out, save_as("again"), {"schema": "quiver-run/2", "name": "again"})
        assert sorted(path.name for path in out.iterdir()) == sorted([BEGUN, RECIPE, RECORD, MODEL, LOG, CHECKPOINTS])
        assert contents(out / MODEL) == {"weights": b"again"}
    first, last = found.index("between"), found.index("new")
    assert found == ["old"] * first + ["between"] * (last - first) + ["new"] * (len(found) - last)
    assert first >= 1
    assert last - first >= 20
    assert len(found) > last + 3
