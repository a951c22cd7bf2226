"""Fine-tuning of a classifier on one GLUE task by recipe; the score is that of the held-out split, as in the papers' tables.

One text becomes ``[CLS] text [SEP]`` and a pair ``[CLS] first [SEP] second [SEP]``, with the tokenizer's own special tokens. If a pair is
too long, the longer text is truncated, or both to half of the space if both are longer than that. There are no token types: the model
distinguishes the texts by the tokens between them.

The held-out split both selects the best checkpoint and gives the score. GLUE's test splits have no labels, and published scores on the
development sets are obtained in this way. The score is therefore the best of several evaluations, not an unbiased estimate.

The run folder is that of `quiver.eval.nlu.fine_tuning`. It also holds:
  results.json          the task's measures
  predictions.json      GLUE's number of each held-out example -> prediction

Shapes: B sequences, C labels, n examples.
Source: BERT, arXiv:1810.04805, section 3; transformers' truncation ``longest_first``; ModernBERT, arXiv:2412.13663, appendix E.1.
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
from quiver.encoder.heads import SHARED_TRANSFORM, ClassifierPooling, SequenceClassifier, init_head
from quiver.encoder.packing import pack, pack_ids
from quiver.encoder.progress import check_stop
from quiver.encoder.tokenizer import TokenizedTexts, Tokenizer
from quiver.eval.nlu.fine_tuning import Prepared, Request, Schedule, TaskBatch, encoder_folder, run_fine_tuning, save_tokenizer
from quiver.eval.nlu.glue_tasks import TASKS, GlueExample, GlueTask, TaskName, measure, read_split
from quiver.eval.nlu.recipes import GlueRecipe

logger = logging.getLogger(__name__)


BATCH_TOKENS = 16_384
"""Token budget of a batch for predictions. Longer sequences are allowed: a batch holds at least one."""


def open_glue_model(
    source: str | Path, task: GlueTask, *, seed: int, pooling: ClassifierPooling | None = None
) -> tuple[SequenceClassifier, Tokenizer]:
    """Open a model for training on a task.

    The output layer is always initialized anew, even if the model is a classifier already. The layers between it and the encoder are
    loaded, and initialized only if the model has none. ModernBERT's release does the same when it continues from MNLI to RTE, MRPC and
    STS-B.
    """
    folder = encoder_folder(source)
    tokenizer = Tokenizer.from_pretrained(folder)
    opened = load_head(SequenceClassifier, folder, num_labels=len(task.labels) or 1, pooling=pooling, new_head_seed=seed)
    family = opened.encoder.config.family
    if opened.pooling != "cls" and family not in SHARED_TRANSFORM:
        raise InputError(f"model.pooling: must be cls for the family {family}, got {opened.pooling}")
    model = SequenceClassifier(
        opened.encoder,
        opened.num_labels,
        pooling=opened.pooling,
        problem_type="regression" if task.is_regression else "single_label_classification",
        dropout=opened.dropout.p,
        transform=opened.transform.config,
        label_names=task.labels or None,
    )
    init_head(model, seed=seed)
    model.transform.load_state_dict(opened.transform.state_dict())
    return model.eval(), tokenizer


def tokenise(texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer, *, max_length: int) -> TokenizedTexts:
    """Tokenise texts or pairs of texts.

    Args:
        texts: All single texts or all pairs; at least one.
        tokenizer: Tokenizer; it also provides the special tokens.
        max_length: Maximum tokens per sequence, special tokens included; must exceed their number.

    Example:
        >>> tokenizer = Tokenizer.train(["a bird has wings"] * 2, vocab_size=320)
        >>> tokenised = tokenise([("a bird has", "a bird"), ("a bird", "a")], tokenizer, max_length=6)
        >>> [len(ids) for ids in tokenised.ids], tokenised.truncated
        ([6, 6], [True, False])
    """
    if len(texts[0]) == 1:
        return tokenizer.encode([text for (text,) in texts], max_length=max_length)
    template = tokenizer.pair_template()
    room = max_length - len(template.before) - len(template.between) - len(template.behind)
    first, second = (tokenizer.encode_bare([pair[position] for pair in texts]) for position in (0, 1))
    sequences = []
    for one, other in zip(first, second, strict=True):
        kept = lengths_kept(len(one), len(other), room=room)
        head, tail = (_cut_tokens(ids, count, tokenizer.truncation_side) for ids, count in zip((one, other), kept, strict=True))
        sequences.append([*template.before, *head, *template.between, *tail, *template.behind])
    return TokenizedTexts(sequences, [len(one) + len(other) > room for one, other in zip(first, second, strict=True)])


def lengths_kept(first: int, second: int, *, room: int) -> tuple[int, int]:
    """Number of tokens to keep of each of two texts that share ``room`` tokens; the longer text is truncated first.

    Example:
        >>> lengths_kept(3, 20, room=10), lengths_kept(20, 30, room=9), lengths_kept(4, 4, room=10)
        ((3, 7), (4, 5), (4, 4))
    """
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)


def _cut_tokens(ids: list[int], count: int, side: str) -> list[int]:
    return ids[:count] if side == "right" else ids[len(ids) - count :]


def predict(model: SequenceClassifier, sequences: Sequence[Sequence[int]], *, batch_tokens: int = BATCH_TOKENS) -> Tensor:
    """Predict labels or similarities."""
    scores = torch.empty(len(sequences), model.num_labels)
    longest = max(map(len, sequences), default=0)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in pack(sequences, max_tokens=max(batch_tokens, longest)):
                scores[list(batch.rows)] = model(batch).float().cpu()
                check_stop()
    finally:
        model.train(was_training)
    return scores[:, 0] if model.num_labels == 1 else scores.argmax(dim=1)


TASK_SCHEMA = "quiver-glue-task/1"
RESULTS, PREDICTIONS = "results.json", "predictions.json"

WEIGHTS = "model.safetensors"
"""File name of the weights in a model folder written by Quiver."""

_CHUNK = 10_000


@dataclass(frozen=True)
class TaskScores:
    """Scores of a model on a task."""

    task: TaskName
    split: str
    examples: int
    score: float
    measures: dict[str, float]


@dataclass(frozen=True)
class TextExample:
    """A tokenised text or pair of texts."""

    ids: Sequence[int]
    truncated: bool
    source: GlueExample


@dataclass(frozen=True)
class TextTask:
    """A GLUE task for `quiver.eval.nlu.fine_tuning`."""

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
    """Initial model of a task."""

    source: str
    trained_on: TaskName | None = None


def run_recipe(recipe: GlueRecipe, task: TaskName) -> dict[str, Any]:
    """The recipe of one task's run, as JSON, without the settings of the other tasks."""
    whole = recipe.model_dump()
    return whole | {"tasks": {task: whole["tasks"][task]}}


def train_glue_task(recipe: GlueRecipe, task: TaskName, start: Start, request: Request) -> TaskScores:
    """Train a model on a task, save the best checkpoint as the model, and score it."""
    return run_fine_tuning(request, lambda: _prepare_task(recipe, TASKS[task], start, request))


def _prepare_task(
    recipe: GlueRecipe, task: GlueTask, start: Start, request: Request
) -> Prepared[SequenceClassifier, TextExample, TaskScores]:
    updates = recipe.updates(task.name)
    if updates is None:
        raise ValueError(f"the recipe does not train {task.name}")
    train = read_split(recipe.data.source, task, "train", limit=recipe.data.limit)
    held_out = read_split(recipe.data.source, task, task.held_out)
    first, tokenizer = open_glue_model(start.source, task, seed=recipe.training.seed, pooling=recipe.model.pooling)
    positions = first.encoder.config.max_positions
    if recipe.data.max_length > positions:
        raise InputError(f"data.max_length: must be <= {positions}, the encoder's positions, got {recipe.data.max_length}")
    examples, scored = (_tokenise_examples(part.examples, tokenizer, recipe.data.max_length) for part in (train, held_out))
    learnt = TextTask(examples, scored, task, tokenizer)
    inputs: dict[str, Any] = {"sha256": {"train": train.sha256, task.held_out: held_out.sha256}}
    if start.trained_on is not None:
        inputs["start"] = {"task": start.trained_on, "sha256": file_sha256(Path(start.source) / WEIGHTS)}

    def finish(model: SequenceClassifier) -> TaskScores:
        return _write_scores(learnt, model, request.out)

    return Prepared(
        learnt,
        Schedule(updates, recipe.training, f"tasks.{task.name}", len(examples)),
        inputs,
        {
            "examples": len(examples),
            "truncated": sum(one.truncated for one in examples),
            "held_out": len(scored),
            "held_out_truncated": sum(one.truncated for one in scored),
        },
        lambda: first,
        finish,
    )


def _tokenise_examples(examples: Sequence[GlueExample], tokenizer: Tokenizer, max_length: int) -> list[TextExample]:
    found = []
    for low in range(0, len(examples), _CHUNK):
        chunk = examples[low : low + _CHUNK]
        tokens = tokenise([one.texts for one in chunk], tokenizer, max_length=max_length)
        # An array takes four bytes per token and a list of Python integers 36; MNLI alone has about sixteen million tokens.
        found += [TextExample(array("i", ids), cut, one) for ids, cut, one in zip(tokens.ids, tokens.truncated, chunk, strict=True)]
    return found


def _write_scores(learnt: TextTask, model: SequenceClassifier, out: Path) -> TaskScores:
    task, predictions = learnt.task, learnt.predicted(model)
    measures = learnt.measured(predictions)
    answers = predictions.tolist() if task.is_regression else [task.labels[label] for label in predictions.tolist()]
    scores = TaskScores(task.name, task.held_out, len(learnt.held_out), measures[task.measures[0]], measures)
    write_json(out / PREDICTIONS, {str(one.source.index): answer for one, answer in zip(learnt.held_out, answers, strict=True)})
    write_json(out / RESULTS, {"schema": TASK_SCHEMA, **asdict(scores)})
    return scores
