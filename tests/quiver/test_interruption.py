"""Ctrl-C: one line that says how to go on, exit status 130, and the same command finishes the work."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import Encoder

COMMANDS = {
    "index build": "index build {data} --model {model} --out {out} --no-calibrate",
    "index build, a table": "index build {rows} --text positive --model {model} --out {out} --no-calibrate",
    "index add": "index add {index} {rows} --text positive",
    "index refresh": "index refresh {index} {data}",
    "evaluate": "evaluate --model {model} --data {data} --out {out} --no-bm25",
    "mine": "mine {data} --model {model} --split test --out {out} -n 2 --ranks 1-4 --no-cache",
    "teacher-scores": "teacher-scores {rows} --teacher {model} --out {out} --no-cache",
}


@pytest.fixture
def places(quiver: Callable[..., Any], model: Path, data: Path, tmp_path: Path) -> dict[str, Path]:
    rows = tmp_path / "rows.jsonl"
    texts = [{"query": f"number {n}", "positive": f"a text of birds {n}", "negatives": [f"salt {n}"]} for n in range(4)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    index = tmp_path / "index"
    assert quiver("index", "build", data, "--model", model, "--out", index, "--no-calibrate").code == 0
    with (data / "corpus.jsonl").open("a") as corpus:  # for refresh
        corpus.write('{"_id": "new", "text": "a new text about wings"}\n')
    return {"data": data, "model": model, "rows": rows, "index": index, "out": tmp_path / "out"}


def interrupted(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """Run with a SIGINT at the first batch that is encoded."""
    forward = Encoder.forward

    def interrupt(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return forward(*arguments, **options)

    # A shell that starts this process in the background has it ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Encoder, "forward", interrupt)
            return run()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_command_says_that_it_goes_on_and_does(
    quiver: Callable[..., Any], places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    arguments = [word.format(**places) for word in COMMANDS[name].split()]
    done = interrupted(monkeypatch, lambda: quiver(*arguments))
    assert done.code == 130
    assert done.err.splitlines() == ["quiver: error: interrupted; repeat the command to go on"]
    again = quiver(*arguments)
    assert again.code == 0, again.err


def test_what_overwrite_would_discard_is_named(
    quiver: Callable[..., Any], places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [word.format(**places) for word in COMMANDS["mine"].split()]
    done = interrupted(monkeypatch, lambda: quiver(*command, "--overwrite"))
    assert (done.code, done.err) == (130, "quiver: error: interrupted; repeat the command without --overwrite to go on\n")
    built = [word.format(**places) for word in COMMANDS["index build"].split()]
    done = interrupted(monkeypatch, lambda: quiver(*built, "--overwrite"))
    assert (done.code, done.err) == (130, "quiver: error: interrupted; repeat the command to go on\n")
    assert quiver(*built, "--overwrite").code == 0


def test_an_interrupted_command_that_keeps_nothing_promises_nothing(
    quiver: Callable[..., Any], places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = interrupted(monkeypatch, lambda: quiver("search", places["index"], "birds"))
    assert (done.code, done.err) == (130, "quiver: error: interrupted\n")
