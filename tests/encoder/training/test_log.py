"""The log of a run: append, read while it grows, cut on resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quiver.encoder import InputError
from quiver.encoder.training.run_folder import LOG, RunLog, curve, read_log

LINES = [
    {"step": 2, "epoch": 0.5, "loss": 0.1 + 0.2, "seconds": 1.0},
    {"step": 4, "epoch": 1.0, "loss": 1e-17, "seconds": 2.0},
    {"step": 4, "epoch": 1.0, "ndcg@10": 0.25, "seconds": 2.5},
    {"step": 6, "epoch": 1.5, "loss": 0.5, "seconds": 3.5},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    log = RunLog(tmp_path / LOG)
    for line in LINES:
        log.append(line)
    return tmp_path / LOG


def test_appended_lines_can_be_read_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path / LOG)
    for count, line in enumerate(LINES, start=1):
        log.append(line)
        assert read_log(tmp_path / LOG) == LINES[:count]
    assert (tmp_path / LOG).read_text() == "".join(json.dumps(line) + "\n" for line in LINES)


def test_curves_hold_the_values_of_a_key_by_step() -> None:
    assert curve(LINES, "loss") == [(2, 0.1 + 0.2), (4, 1e-17), (6, 0.5)]
    assert curve(LINES, "ndcg@10") == [(4, 0.25)]
    assert curve(LINES, "grad_norm") == []


@pytest.mark.parametrize("torn", ["", "{", '{"step": 8, "lo', '{"step": 8, "loss": 0.5}', "\0\0\0"])
def test_an_incomplete_last_line_is_ignored(path: Path, torn: str) -> None:
    with path.open("a") as file:
        file.write(torn)
    assert read_log(path) == LINES


@pytest.mark.parametrize(("step", "left"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 3), (5, 3), (6, 4), (99, 4)])
def test_a_resumed_run_removes_the_lines_after_its_checkpoint(path: Path, step: int, left: int) -> None:
    with path.open("a") as file:
        file.write('{"step": 6, "torn')
    log = RunLog(path)
    log.cut(step)
    assert read_log(path) == LINES[:left]
    log.append({"step": 7, "loss": 2.5})
    assert read_log(path) == [*LINES[:left], {"step": 7, "loss": 2.5}]


def test_a_missing_log_is_reported(tmp_path: Path) -> None:
    log = RunLog(tmp_path / LOG)
    log.sync()
    log.cut(3)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match=r"log\.jsonl: cannot be read \(No such file or directory\)"):
        read_log(tmp_path / LOG)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"step": 8', "malformed JSON"),
        ("", "malformed JSON"),
        ("[8]", "not a line of a training log, it has no step"),
        ('{"loss": 0.5}', "not a line of a training log, it has no step"),
        ('{"step": "8"}', "not a line of a training log, it has no step"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(path: Path, line: str, problem: str) -> None:
    with path.open("a") as file:
        file.write(f"{line}\n{json.dumps(LINES[0])}\n")
    with pytest.raises(InputError, match=rf"log\.jsonl:5: {problem}"):
        read_log(path)
