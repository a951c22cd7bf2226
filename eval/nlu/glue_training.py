"""Fine-tuning of a classifier on one GLUE task by recipe; the score is that of the held-out split, as in the papers' tables.

The held-out split both selects the best checkpoint and gives the score. GLUE's test splits have no labels, and published scores on the
development sets are obtained in this way. The score is therefore the best of several evaluations, not an unbiased estimate.

The run folder is that of `quiver.eval.nlu.fine_tuning.run`. It also holds:
  results.json          the task's measures
  predictions.json      GLUE's number of each held-out example -> prediction

Shapes: B sequences.
Source: ModernBERT, arXiv:2412.13663, appendix E.1.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quiver.encoder.checkpoints.head_checkpoint import load_head, save_head
from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256, write_json
from quiver.encoder.heads import SequenceClassifier
from quiver.encoder.packing import pack_ids
from quiver.encoder.tokenizer import Tokenizer
from quiver.eval.nlu.fine_tuning.run import Prepared, Request, run_fine_tuning
from quiver.eval.nlu.fine_tuning.start import save_tokenizer
from quiver.eval.nlu.fine_tuning.task import Schedule, TaskBatch
from quiver.eval.nlu.glue_data import GlueExample, read_split
from quiver.eval.nlu.glue_model import open_glue_model, predict, tokenise
from quiver.eval.nlu.glue_recipe import GlueRecipe
from quiver.eval.nlu.glue_scores import measure
from quiver.eval.nlu.glue_tasks import TASKS, GlueTask, TaskName

logger = logging.getLogger(__name__)

SCHEMA = "quiver-glue-task/1"
RESULTS, PREDICTIONS = "results.json", "predictions.json"

WEIGHTS = "model.safetensors"
"""File name of the weights in a model folder written by Quiver."""

_CHUNK = 10_000


@dataclass(frozen=True)
class TaskScores:
    """Scores of a model on a task.

    Attributes:
        task: The task.
        split: Split that was scored.
        examples: Number of examples in the split.
        score: The task's headline score, as a fraction.
        measures: All measures of the task.
    """

    task: TaskName
    split: str
    examples: int
    score: float
    measures: dict[str, float]


@dataclass(frozen=True)
class TextExample:
    """A tokenised text or pair of texts.

    Attributes:
        ids: Token ids, special tokens included.
        truncated: Whether tokens were cut off.
        source: The example.
    """

    ids: Sequence[int]
    truncated: bool
    source: GlueExample


@dataclass(frozen=True)
class TextTask:
    """A GLUE task for `quiver.eval.nlu.fine_tuning`.

    Attributes:
        examples: Training examples.
        held_out: Examples to score on.
        task: Labels and measures.
        tokenizer: Tokenizer of the model.
    """

    examples: Sequence[TextExample]
    held_out: Sequence[TextExample]
    task: GlueTask
    tokenizer: Tokenizer

    def batch(self, examples: Sequence[TextExample]) -> TaskBatch:
        """Pack sequences, with their labels: (B,) int64, or (B,) float32 for similarities."""
        labels = torch.tensor([one.source.label for one in examples])
        return TaskBatch(pack_ids([one.ids for one in examples]), {"labels": labels if self.task.is_regression else labels.long()})

    def loss(self, model: SequenceClassifier, batch: TaskBatch) -> Tensor:
        """Cross entropy, or squared error for similarities."""
        return model.loss(model(batch.packed), batch.targets["labels"])

    def score(self, model: SequenceClassifier) -> Mapping[str, float]:
        """The task's measures on the held-out examples."""
        return self.measured(self.predicted(model))

    def predicted(self, model: SequenceClassifier) -> Tensor:
        """Predicted labels or similarities of the held-out examples."""
        return predict(model, [one.ids for one in self.held_out])

    def measured(self, predictions: Tensor) -> dict[str, float]:
        """The task's measures for given predictions of the held-out examples."""
        return measure(self.task, predictions.numpy(), [one.source.label for one in self.held_out])

    def described(self, example: TextExample) -> dict[str, Any]:
        """The source row as JSON, for error messages."""
        return asdict(example.source)

    def save(self, model: SequenceClassifier, folder: Path) -> None:
        """Write model and tokenizer."""
        save_head(model, folder)
        save_tokenizer(self.tokenizer, folder)

    def open(self, folder: Path) -> SequenceClassifier:
        """Read a model."""
        return load_head(SequenceClassifier, folder)


@dataclass(frozen=True)
class Start:
    """Initial model of a task.

    Attributes:
        source: Folder or hub id.
        trained_on: Task that the model was trained on; None for the recipe's model.
    """

    source: str
    trained_on: TaskName | None = None


def run_recipe(recipe: GlueRecipe, task: TaskName) -> dict[str, Any]:
    """The recipe of one task's run, as JSON, without the settings of the other tasks."""
    whole = recipe.model_dump()
    return whole | {"tasks": {task: whole["tasks"][task]}}


def train_glue_task(recipe: GlueRecipe, task: TaskName, start: Start, request: Request) -> TaskScores:
    """Train a model on a task, save the best checkpoint as the model, and score it.

    Args:
        recipe: The recipe.
        task: A task of the recipe.
        start: Initial model.
        request: Result of `run_recipe` and the run folder.

    Raises:
        InputError: Data or model cannot be read, or do not fit the recipe or each other; or see `run_fine_tuning`.
        RunStoppedError: See `run_fine_tuning`.
    """
    return run_fine_tuning(request, lambda: _prepared(recipe, TASKS[task], start, request))


def _prepared(recipe: GlueRecipe, task: GlueTask, start: Start, request: Request) -> Prepared[SequenceClassifier, TextExample, TaskScores]:
    updates = recipe.updates(task.name)
    if updates is None:
        raise ValueError(f"the recipe does not train {task.name}")
    train = read_split(recipe.data.source, task, "train", limit=recipe.data.limit)
    held_out = read_split(recipe.data.source, task, task.held_out)
    first, tokenizer = open_glue_model(start.source, task, seed=recipe.training.seed, pooling=recipe.model.pooling)
    positions = first.encoder.config.max_positions
    if recipe.data.max_length > positions:
        raise InputError(f"data.max_length: must be <= {positions}, the encoder's positions, got {recipe.data.max_length}")
    examples, scored = (_tokenised(part.examples, tokenizer, recipe.data.max_length) for part in (train, held_out))
    learnt = TextTask(examples, scored, task, tokenizer)
    facts: dict[str, Any] = {"sha256": {"train": train.sha256, task.held_out: held_out.sha256}}
    if start.trained_on is not None:
        facts["start"] = {"task": start.trained_on, "sha256": file_sha256(Path(start.source) / WEIGHTS)}

    def finish(model: SequenceClassifier) -> TaskScores:
        return _scored(learnt, model, request.out)

    return Prepared(
        learnt,
        Schedule(updates, recipe.training, f"tasks.{task.name}", len(examples)),
        facts,
        {
            "examples": len(examples),
            "truncated": sum(one.truncated for one in examples),
            "held_out": len(scored),
            "held_out_truncated": sum(one.truncated for one in scored),
        },
        lambda: first,
        finish,
    )


def _tokenised(examples: Sequence[GlueExample], tokenizer: Tokenizer, max_length: int) -> list[TextExample]:
    found = []
    for low in range(0, len(examples), _CHUNK):
        chunk = examples[low : low + _CHUNK]
        tokens = tokenise([one.texts for one in chunk], tokenizer, max_length=max_length)
        # An array takes four bytes per token and a list of Python integers 36; MNLI alone has about sixteen million tokens.
        found += [TextExample(array("i", ids), cut, one) for ids, cut, one in zip(tokens.ids, tokens.truncated, chunk, strict=True)]
    return found


def _scored(learnt: TextTask, model: SequenceClassifier, out: Path) -> TaskScores:
    task, predictions = learnt.task, learnt.predicted(model)
    measures = learnt.measured(predictions)
    told = predictions.tolist() if task.is_regression else [task.labels[label] for label in predictions.tolist()]
    scores = TaskScores(task.name, task.held_out, len(learnt.held_out), measures[task.measures[0]], measures)
    write_json(out / PREDICTIONS, {str(one.source.index): said for one, said in zip(learnt.held_out, told, strict=True)})
    write_json(out / RESULTS, {"schema": SCHEMA, **asdict(scores)})
    return scores
