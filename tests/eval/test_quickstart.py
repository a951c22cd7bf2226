"""Quickstart: the whole path on a few steps, and, marked slow, for real with the figures it promises."""

from __future__ import annotations

import gzip
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from quiver.encoder import InputError
from quiver.eval.quickstart import MADE, MARKER, NEEDS, QUESTIONS, quickstart
from quiver.retrieval.data.docstrings import TRAINING_PAIRS, Pair, mine

pytest.importorskip("sentence_transformers")

SMALL = (
    "model.architecture.hidden_size=32",
    "model.architecture.heads=2",
    "model.architecture.intermediate_size=48",
    "model.architecture.vocab_size=512",
    "model.max_length=32",
    "training.max_steps=3",
    "training.log_every=1",
)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


PART = ("a", "c", "e")
"""First letters of the modules of the standard library that are mined by the tests that do not ask how much it is."""


@pytest.fixture(scope="module")
def few_pairs() -> list[Pair]:
    return [pair for pair in mine() if pair.module.startswith(PART)]


@pytest.fixture
def module(few_pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, mining little of the standard library; packages are mined all the same."""
    found = importlib.import_module("quiver.eval.quickstart")  # ``from quiver.eval import quickstart`` would be the function

    def few(*, packages: Sequence[str], progress: bool) -> list[Pair]:
        if not packages:
            return list(few_pairs)
        return [pair for pair in mine(packages=packages, progress=progress) if pair.module.startswith((*PART, *packages))]

    monkeypatch.setattr(found, "mine", few)
    return found


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A folder with the marker of a quickstart, its names, and a file of the user's."""
    out = tmp_path / "earlier"
    for name in (*MADE, MARKER, "notes.txt"):
        path = out / name if "." in name else out / name / "file"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} of the earlier run")
    assert len(contents(out)) == len(MADE) + 2
    return out


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("packages", "overrides", "absent", "message"),
    [
        (["no_such_package"], SMALL, None, "no_such_package"),
        ([], ("training.batchsize=8",), None, "did you mean 'batch_size'"),
        ([], (*SMALL, "training.batch_size=100000"), None, "rows do not fill one batch of 100000"),
        ([], (*SMALL, "model.architecture.vocab_size=512", "model.tokenizer=nowhere/at/all"), None, "nowhere/at/all"),
        ([], SMALL, "datasets", "training needs datasets: pip install 'quiver-retrieval.train.'"),
    ],
)
def test_mistakes_are_found_before_the_folder_is_touched(
    earlier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packages: list[str],
    overrides: tuple[str, ...],
    absent: str | None,
    message: str,
) -> None:
    before = contents(earlier)
    times = {path: path.stat().st_ctime_ns for path in earlier.iterdir()}
    if absent is not None:
        monkeypatch.setitem(sys.modules, absent, None)
    for out in (earlier, tmp_path / "new"):
        with pytest.raises(InputError, match=message):
            quickstart(out, packages=packages, overrides=overrides, overwrite=True)
    assert contents(earlier) == before
    assert {path: path.stat().st_ctime_ns for path in earlier.iterdir()} == times  # a rename there and back would show
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("stage", ["train_and_save", "build_index"])
def test_a_quickstart_that_fails_half_way_takes_its_traces_away(
    earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, stage: str
) -> None:
    before = contents(earlier)

    def fail(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    small = (*SMALL, "training.max_steps=1")
    with monkeypatch.context() as broken:
        broken.setattr(module, stage, fail)
        for out in (earlier, tmp_path / "new"):
            with pytest.raises(KeyboardInterrupt):
                quickstart(out, overrides=small, overwrite=True)
    with pytest.raises(InputError, match="already holds data; choose another --out, or add --overwrite"):
        quickstart(earlier, overrides=small)
    assert contents(earlier) == before
    assert sorted(path.name for path in earlier.iterdir()) == sorted([*MADE, MARKER, "notes.txt"])
    assert not (tmp_path / "new").exists()
    if stage == "build_index":
        assert quickstart(tmp_path / "new", overrides=small).report.is_file()


@pytest.mark.slow
@pytest.mark.alone
def test_the_promised_figures_and_the_next_commands_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started = time.perf_counter()
    printed = subprocess.run(["quiver", "quickstart"], check=True, capture_output=True, text=True, timeout=900).stdout
    seconds = time.perf_counter() - started
    trained, untrained = (
        json.loads((tmp_path / "quickstart" / "results" / name / "results.json").read_text())["ndcg@10"]
        for name in ("trained", "untrained")
    )
    assert trained >= 2.5 * untrained
    assert seconds < 400
    assert printed.startswith("Trains a small code search model")
    assert f"Needs {NEEDS}." in printed
    assert max(map(len, printed.split("mining docstrings")[0].splitlines())) <= 80

    assert sorted(path.name for path in (tmp_path / "quickstart").iterdir()) == sorted([*MADE, MARKER])
    with gzip.open(tmp_path / "quickstart" / "data" / TRAINING_PAIRS, "rt", encoding="utf-8") as rows:
        assert "average" not in rows.read().lower()  # the lesson of the last question
    # Questions: a right function is shown for each but the last, whose lesson is printed.
    shown = printed.split("\n? ")[1:]
    assert [part.splitlines()[0] for part in shown] == [question.text for question in QUESTIONS]
    assert [("(right)" in part, "Wrong: " in part) for part in shown] == [
        (not question.lesson, bool(question.lesson)) for question in QUESTIONS
    ]
    assert [bool(question.lesson) for question in QUESTIONS] == [False, False, False, True]

    commands = [line.strip() for line in printed.split("Next:\n")[1].splitlines() if line.startswith("  quiver ")]
    assert len(commands) == 5
    for command in commands:
        if not command.startswith("quiver serve "):
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
            assert (done.returncode, bool(done.stdout)) == (0, True), (command, done.stderr)
