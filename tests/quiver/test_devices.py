"""``--dtype`` and ``--device``: which commands have them, and what an index and a result record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from quiver.cli.main import COMMANDS, app
from quiver.encoder import InputError
from quiver.retrieval.index import open_index
from quiver.retrieval.models.loading import load_model


def leaves(words: list[str], command: Any) -> Iterator[tuple[str, set[str]]]:
    """Give each command with its options."""
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves([*words, name], each)
    if not hasattr(command, "commands"):
        yield " ".join(words), {option for parameter in command.params for option in parameter.opts}


def test_every_command_that_trains_has_a_dtype_and_a_device(quiver: Callable[..., Any], tmp_path: Path) -> None:
    found = {name: options for each in COMMANDS for name, options in leaves([each], get_command(app).commands[each])}
    assert {"train", "pretrain", "sweep", "glue", "qa train"} <= {
        name for name, options in found.items() if {"--dtype", "--device"} <= options
    }
    for words in (("train", "quickstart"), ("pretrain", "pretrain-small"), ("glue", "glue-base"), ("qa", "train", "qa-korquad")):
        done = quiver(*words, "--out", tmp_path / "out", "--dtype", "float16")
        assert (done.code, "'float16' is not one of 'float32', 'bfloat16'" in done.err) == (2, True), done.err
        done = quiver(*words, "--out", tmp_path / "out", "--device", "cuda:99")
        assert (done.code, "device cuda:99 is not available" in done.err) == (2, True), done.err
        assert not (tmp_path / "out").exists()


def test_an_index_is_searched_in_the_dtype_it_was_built_in(quiver: Callable[..., Any], model: Path, data: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    built = quiver("index", "build", data, "--model", model, "--out", index, "--dtype", "bfloat16", "--device", "cpu", "--no-calibrate")
    assert built.code == 0, built.err
    shown = json.loads(quiver("index", "info", index, "--json").out)
    assert shown["model"]["dtype"] == "bfloat16"
    found = quiver("search", index, "a text about birds", "--device", "cpu", "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)[0]["id"] == "d0"
    with pytest.raises(InputError, match="in bfloat16, but the model given is in float32; load it with dtype='bfloat16'"):
        open_index(index).check_model(load_model(model).card)
    mined = quiver("mine", data, "--index", index, "--dtype", "int8", "--out", tmp_path / "mined")
    assert (mined.code, "the model of an index runs in the dtype of the index" in mined.err) == (2, True)
    (tmp_path / "more.jsonl").write_text('{"_id": "more", "text": "a text about birds and more"}\n')
    assert quiver("index", "add", index, tmp_path / "more.jsonl", "--device", "cpu").code == 0


def test_a_model_scored_in_another_dtype_can_be_exported_with_its_scores(
    quiver: Callable[..., Any], model: Path, data: Path, tmp_path: Path
) -> None:
    for dtype in ("bfloat16", "int8"):
        out = tmp_path / dtype
        assert quiver("evaluate", "--model", model, "--data", data, "--out", out, "--dtype", dtype, "--no-bm25", "--no-cache").code == 0
        done = quiver("export", model, "--layout", "sentence-transformers", "--results", out, "--out", tmp_path / f"exported-{dtype}")
        assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("index", "build", "DATA", "--model", "MODEL", "--out", "OUT", "--device", "cpu", "--workers", "2"), "without workers"),
        (("evaluate", "--data", "DATA", "--model", "MODEL", "--out", "OUT", "--devices", "cpu", "--device", "cpu"), "excludes --device"),
        (("mine", "DATA", "--model", "bm25", "--batch-tokens", "9", "--out", "OUT"), "options of a model are not for bm25"),
        (("estimate", "--model", "modernbert-base", "--docs", "1000", "--dtype", "int8"), "a preset is not loaded"),
    ],
)
def test_options_without_an_effect_are_refused(
    quiver: Callable[..., Any], model: Path, data: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    places = {"DATA": data, "MODEL": model, "OUT": tmp_path / "out"}
    done = quiver(*(places.get(word, word) for word in arguments))
    assert (done.code, message in done.err) == (2, True), done.err
