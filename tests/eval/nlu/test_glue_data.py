"""The eight loaders on the layout of the Hub, and errors that name file and row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import InputError
from quiver.eval.nlu.glue_tasks import TASKS, GlueExample, TaskName, read_split
from tests.eval.nlu.conftest import Row, write_split

pytest.importorskip("pyarrow")

FIRST: dict[TaskName, tuple[tuple[str, ...], float]] = {
    "cola": (("The bird that sang it flew.",), 1),
    "sst2": (("two hours of fog ",), 0),
    "mrpc": (("The port opened again on Monday .", "On Monday ships came back to the port ."), 1),
    "stsb": (("A man is cutting bread.", "A man cuts bread."), 5.0),
    "qqp": (("How deep is the sea?", ""), 0),  # some of the questions that people asked are empty
    "mnli": (("The mill stood by the river.", "There was a river."), 0),
    "qnli": (("Who built the bridge?", "The bridge is the oldest of the town."), 1),
    "rte": (("No ship was found in the harbour.", "A ship was found."), 1),
}
"""The first row of a task; an empty text is one."""


def written(folder: Path, name: TaskName, split: str, *, parts: int = 1, **columns: list[Any]) -> list[Path]:
    """Write three rows of a task, the first as above."""
    texts, label = FIRST[name]
    rows = [Row(texts, label), Row(("b",) * len(texts), 0.0), Row(("c",) * len(texts), 1.0)]
    return write_split(folder, TASKS[name], split, rows, parts=parts, **columns)


@pytest.mark.parametrize("name", TASKS)
def test_each_of_the_eight_tasks_is_read(tmp_path: Path, name: TaskName) -> None:
    task = TASKS[name]
    written(tmp_path, name, "train", parts=2)
    written(tmp_path, name, task.held_out)
    for split in ("train", task.held_out):
        found = read_split(str(tmp_path), task, split)
        assert found.examples[0] == GlueExample(0, *FIRST[name])
        assert [example.index for example in found.examples] == [0, 1, 2]
        assert [example.label for example in found.examples][1:] == [0.0, 1.0]
    assert read_split(str(tmp_path), task, "train").sha256 == read_split(str(tmp_path), task, task.held_out).sha256
    first = read_split(str(tmp_path), task, "train", limit=2)
    assert len(first.examples) == 2
    assert first.sha256 != found.sha256


@pytest.mark.parametrize("name", ["sst2", "stsb", "mnli"])
def test_hidden_labels_are_refused(tmp_path: Path, name: TaskName) -> None:
    split = "test_matched" if name == "mnli" else "test"
    [file] = written(tmp_path, name, split, label=[-1, -1, -1])
    with pytest.raises(InputError) as caught:
        read_split(str(tmp_path), TASKS[name], split)
    assert str(caught.value).startswith(f"{file}:1: the label is -1, so it is hidden, as in GLUE's test splits; score on 'validation")


@pytest.mark.parametrize(
    ("name", "columns", "complaint"),
    [
        ("cola", {"label": [0, 2, 1]}, ":2: a label of CoLA is a whole number from 0 to 1, got 2"),
        ("stsb", {"label": [0.0, 2.5, 5.5]}, ":3: a label of STS-B is a number from 0 to 5, got 5.5"),
        ("rte", {"label": [0, 1, None]}, ":3: 'label' must be a number, got missing"),
        ("rte", {"label": ["0", "1", "0"]}, ":1: 'label' must be a number, got '0'"),
        ("rte", {"label": [0.0, 0.5, 1.0]}, ":2: a label of RTE is a whole number from 0 to 1, got 0.5"),
        ("qqp", {"question2": ["a", None, "b"]}, ":2: column 'question2' of QQP must be a string, got missing"),
        ("mnli", {"premise": [1, 2, 3]}, ":1: column 'premise' of MNLI must be a string, got 1"),
        ("cola", {"idx": ["a", "b", "c"]}, ":1: 'idx' must be a whole number, got 'a'"),
    ],
)
def test_an_invalid_row_is_named_by_file_and_number(tmp_path: Path, name: TaskName, columns: dict[str, list[Any]], complaint: str) -> None:
    [file] = written(tmp_path, name, "train", **columns)
    with pytest.raises(InputError) as caught:
        read_split(str(tmp_path), TASKS[name], "train")
    assert str(caught.value).startswith(f"{file}{complaint}")


def test_an_invalid_folder_is_named(tmp_path: Path) -> None:
    task = TASKS["mnli"]
    with pytest.raises(InputError, match=r"no folder 'mnli'; expected the layout of nyu-mll/glue, found none"):
        read_split(str(tmp_path), task, "train")
    written(tmp_path, "cola", "train")
    with pytest.raises(InputError, match=r"no folder 'mnli'; expected the layout of nyu-mll/glue, found cola"):
        read_split(str(tmp_path), task, "train")
    files = written(tmp_path, "mnli", "train", parts=3)
    with pytest.raises(InputError, match=r"mnli: no validation_matched-00000-of-00001.parquet; its splits are train"):
        read_split(str(tmp_path), task, "validation_matched")
    files[1].write_bytes(b"no parquet")
    with pytest.raises(InputError, match=r"train-00001-of-00003.parquet: damaged Parquet"):
        read_split(str(tmp_path), task, "train")
    files[1].unlink()
    with pytest.raises(InputError, match="found 2 of the 3 files of train; download the others"):
        read_split(str(tmp_path), task, "train")
    other = written(tmp_path / "other", "rte", "train")[0]
    (tmp_path / "other" / "qnli").mkdir()
    other.rename(tmp_path / "other" / "qnli" / other.name)
    with pytest.raises(InputError, match="column 'question' of QNLI must be a string, got missing; is this the file of another task"):
        read_split(str(tmp_path / "other"), TASKS["qnli"], "train")
