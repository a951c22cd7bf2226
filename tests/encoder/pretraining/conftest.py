"""Fixtures of a small pretraining run: two sources, two phases, two layers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.pretraining.recipe import PretrainingRecipe, load_pretraining_recipe
from quiver.encoder.pretraining.run import pretrain

WORDS = ("open", "close", "read", "write", "file", "folder", "line", "word", "socket", "thread", "index", "page", "the", "a", "of", "it")

MakeRecipe = Callable[..., PretrainingRecipe]


def sentences(count: int, *, seed: int, longest: int = 60) -> list[str]:
    """Texts of 3..longest words in an order that follows a rule, so that a model can learn it."""
    generator = random.Random(seed)
    found = []
    for _ in range(count):
        place, step = generator.randrange(len(WORDS)), generator.choice((1, 3))
        found.append(" ".join(WORDS[(place + step * number) % len(WORDS)] for number in range(generator.randint(3, longest))))
    return found


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    rows = [{"id": number, "text": text} for number, text in enumerate(sentences(160, seed=1))]
    (folder / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prose.txt").write_text("\n".join(sentences(80, seed=2)) + "\n")
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with ``code.jsonl`` and ``prose.txt``."""
    return write_texts(tmp_path / "texts")


def described(texts: Path) -> dict[str, Any]:
    return {
        **dict.fromkeys(("name", "description", "source", "cost", "expected"), "as in the test"),
        "kind": "pretraining",
        "model": {
            "init": "random",
            "tokenizer": "train",
            "layers": 2,
            "hidden_size": 16,
            "heads": 2,
            "intermediate_size": 24,
            "window": 8,
            "global_every": 2,
            "vocabulary": {"size": 320, "unused": 8},
        },
        "data": {
            "sources": [
                {"name": "code", "path": str(texts / "code.jsonl")},
                {"name": "prose", "path": str(texts / "prose.txt"), "lines": True},
            ],
            "held_out": 0.05,
            "held_out_tokens": 400,
        },
        "phases": [
            {
                "name": "short",
                "tokens": 3000,
                "context": 24,
                "global_theta": 10_000,
                "learning_rate": 5e-3,
                "batch_size": 12,
                "micro_batch": 4,
                "warmup_tokens": 600,
                "batch_warmup_tokens": 900,
            },
            {
                "name": "long",
                "tokens": 2000,
                "context": 48,
                "global_theta": 160_000,
                "learning_rate": 3e-3,
                "batch_size": 6,
                "micro_batch": 2,
                "decay_tokens": 1000,
                "mix": [{"source": "code", "times": 0.5}, {"source": "prose", "times": 2}],
            },
        ],
        "training": {"seed": 7, "log_every": 2, "save_every": 4, "evaluate_every": 5},
    }


AVERAGED = "training.averaging.ema_half_life=4"


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``make_recipe("training.averaging.ema_half_life=4")``, not interrupted."""
    pytest.importorskip("optimi")
    folder = tmp_path_factory.mktemp("whole")
    (folder / "recipe.json").write_text(json.dumps(described(write_texts(folder / "texts"))))
    pretrain(load_pretraining_recipe(folder / "recipe.json", [AVERAGED]), folder / "out", command="quiver pretrain ...")
    return folder / "out"


@pytest.fixture
def make_recipe(tmp_path: Path, texts: Path) -> MakeRecipe:
    """``make_recipe("training.seed=3", ...)``: about 20 steps in two phases, unless an override says otherwise."""

    def make(*overrides: str, change: Callable[[dict[str, Any]], object] | None = None) -> PretrainingRecipe:
        raw = described(texts)
        if change is not None:
            change(raw)
        path = tmp_path / "recipe.json"
        path.write_text(json.dumps(raw))
        return load_pretraining_recipe(path, overrides)

    return make
