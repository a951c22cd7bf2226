"""Fixtures of small training runs: rows with scores and negatives, a model with dropout, and recipes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, save_encoder
from quiver.encoder.config import DROPOUTS, global_every
from quiver.retrieval.training.recipe import Recipe, load_recipe

VERBS = ("open", "close", "read", "write", "copy", "move", "count", "sort")
NOUNS = ("file", "folder", "line", "word", "socket", "thread", "index", "page")

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"model": {"pooling": "mean", "normalize": True, "max_length": 24, "query_prompt": "find: "}, "loss": {"name": "mnrl"}},
    "colbert": {"model": {"colbert": {"dim": 8, "query_length": 12, "document_length": 24}}, "loss": {"name": "contrastive"}},
}


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 rows: a query, a positive, four negatives that are positives of other rows, and five scores."""
    pairs = [(verb, noun) for verb in VERBS for noun in NOUNS]
    code = [f"def {verb}_{noun}(x): return x.{verb}()" for verb, noun in pairs]
    rows = [
        {
            "query": f"{verb} every {noun} of it" if place % 8 else f"{verb} everything",
            "positive": code[place],
            "negatives": [code[(place + step) % 64] for step in (1, 9, 17, 33)],
            "scores": [9.0 - place % 3, 2.0, 1.5, 0.5 + place % 2, 0.0],
        }
        for place, (verb, noun) in enumerate(pairs)
    ]
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_start(folder: Path, rows: Path, *, dropout: float) -> Path:
    tokenizer = Tokenizer.train(rows.read_text().splitlines(), vocab_size=320, max_length=64)
    config = EncoderConfig.modernbert(
        vocab_size=320, hidden_size=16, num_heads=2, intermediate_size=24, layer_types=global_every(2, 2), max_positions=64, window=8
    )
    config = replace(config, **dict.fromkeys(set(DROPOUTS) - {"mlp_output_dropout"}, dropout))  # the one that ModernBERT has not
    save_encoder(init_weights(Encoder(config), seed=5), folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def start_folder(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """A bare encoder of two layers with every kind of dropout."""
    return write_start(tmp_path_factory.mktemp("start"), rows_file, dropout=0.1)


@pytest.fixture(scope="session")
def steady_folder(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """A bare encoder of two layers without dropout."""
    return write_start(tmp_path_factory.mktemp("steady"), rows_file, dropout=0.0)


MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def make_recipe(tmp_path: Path, rows_file: Path, start_folder: Path) -> MakeRecipe:
    """``make_recipe(kind, "training.batch_size=4", ...)``: 16 steps of 4 rows with 3 documents each, unless overridden."""

    def make(kind: str = "dense", *overrides: str) -> Recipe:
        described = dict.fromkeys(("name", "description", "source", "cost", "expected"), "as in the test")
        raw = described | {
            "kind": kind,
            "model": {"init": str(start_folder), **KINDS[kind]["model"]},
            "data": {"train": str(rows_file), "document_fields": ["positive", "negatives"], "documents_per_row": 3},
            "loss": KINDS[kind]["loss"],
            "training": {
                "epochs": 1,
                "batch_size": 4,
                "learning_rate": 1e-2,
                "warmup_ratio": 0.1,
                "scheduler": "linear",
                "weight_decay": 0.01,
                "max_grad_norm": 1.0,
                "seed": 7,
                "dtype": "float32",
                "no_duplicates": False,
                "log_every": 2,
            },
        }
        path = tmp_path / "recipe.json"
        path.write_text(json.dumps(raw))
        return load_recipe(path, overrides)

    return make
