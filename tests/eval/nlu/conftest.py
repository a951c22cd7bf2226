"""GLUE in the layout of the Hub with learnable labels, and an encoder small enough to learn them in a second."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, save_encoder
from quiver.encoder.schema import validate
from quiver.eval.nlu.glue_tasks import TASKS, GlueTask
from quiver.eval.nlu.recipes import GlueRecipe

WORDS = ["bird", "sea", "wing", "stone", "tree", "river", "cloud", "field", "road", "lamp"]
MARKS = ["never", "always", "perhaps", "twice"]


@dataclass(frozen=True)
class Row:
    """Type of a row."""

    texts: tuple[str, ...]
    label: float


def learnable_rows(task: GlueTask, seed: int, count: int) -> list[Row]:
    """The last text determines the label: one word per label, or as many repeated words as points of similarity."""
    draw = random.Random(f"{task.name} {seed}")
    rows = []
    for _ in range(count):
        texts = [draw.choices(WORDS, k=draw.randint(4, 8)) for _ in task.columns]
        label = draw.randrange(6) if task.is_regression else draw.randrange(len(task.labels))
        for mark in [MARKS[-1]] * label if task.is_regression else [MARKS[label]]:
            texts[-1].insert(draw.randrange(len(texts[-1]) + 1), mark)
        rows.append(Row(tuple(map(" ".join, texts)), float(label)))
    return rows


def write_split(folder: Path, task: GlueTask, split: str, rows: list[Row], *, parts: int = 1, **columns: list[Any]) -> list[Path]:
    """Write Parquet as on the Hub, in numbered parts; given columns replace the usual ones."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / task.name).mkdir(parents=True, exist_ok=True)
    kind = arrow.float32() if task.is_regression else arrow.int64()
    whole: dict[str, Any] = {name: [row.texts[place] for row in rows] for place, name in enumerate(task.columns)}
    whole["label"] = arrow.array([row.label if task.is_regression else int(row.label) for row in rows], kind)
    whole["idx"] = arrow.array(range(len(rows)), arrow.int32())
    table = arrow.table(whole | columns)
    files = []
    for part in range(parts):
        low, high = (len(rows) * place // parts for place in (part, part + 1))
        files.append(folder / task.name / f"{split}-{part:05}-of-{parts:05}.parquet")
        parquet.write_table(table.slice(low, high - low), files[-1])
    return files


@pytest.fixture(scope="session")
def glue_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All eight tasks with 240 training and 60 development rows."""
    folder = tmp_path_factory.mktemp("glue")
    for task in TASKS.values():
        write_split(folder, task, "train", learnable_rows(task, 1, 240), parts=2)
        write_split(folder, task, task.held_out, learnable_rows(task, 2, 60))
    return folder


@pytest.fixture(scope="session")
def small_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with dropout, so that the random generators matter."""
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = Tokenizer.train([" ".join(WORDS + MARKS) + " number?"] * 3, vocab_size=384, max_length=64)
    config = EncoderConfig.modernbert(
        vocab_size=384, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "global"], max_positions=64
    )
    config = replace(config, embedding_dropout=0.05)
    save_encoder(init_weights(Encoder(config), seed=1), folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def make_glue(glue_folder: Path, small_encoder: Path) -> Callable[..., GlueRecipe]:
    """``make_glue("cola", "rte", from_mnli=["rte"], patience=2)``: a recipe of some tasks; other arguments are training settings."""

    def make(*tasks: str, from_mnli: tuple[str, ...] = (), updates: dict[str, Any] | None = None, **training: Any) -> GlueRecipe:
        chosen = {"epochs": 4, "batch_size": 16, "learning_rate": 3e-3, "weight_decay": 1e-5} | (updates or {})
        raw = {
            **dict.fromkeys(("name", "description", "source", "cost", "expected"), "as in the test"),
            "kind": "glue",
            "model": {"init": str(small_encoder), "from_mnli": list(from_mnli)},
            "data": {"source": str(glue_folder), "max_length": 32},
            "tasks": dict.fromkeys(tasks, chosen),
            "training": {"decoupled_decay": True, "log_every": 5} | training,
        }
        recipe, problems = validate(GlueRecipe, raw)
        assert recipe is not None, problems
        return recipe

    return make
