"""Fine-tuning of a model for span question answering, by recipe: open an encoder with a head, train it, and score its answers.

The run folder is that of `quiver.eval.nlu.fine_tuning`. It also holds:
  results.json          scores of the test questions, see `quiver.eval.nlu.answers`
  predictions.json      predicted answers of the test questions

Shapes: B windows, N tokens in the batch.
Source: BERT, arXiv:1810.04805, section 4.2 and appendix A.3.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quiver.encoder.checkpoints import config_to_hf
from quiver.encoder.checkpoints.checkpoint import pin_source
from quiver.encoder.checkpoints.head_checkpoint import load_head, save_head
from quiver.encoder.config import EncoderConfig
from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256
from quiver.encoder.heads import SpanQA
from quiver.encoder.model import Encoder, Uninitialized
from quiver.encoder.packing import pack_ids
from quiver.encoder.pretraining.position_extension import extend_positions
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training.optimization import with_training_dtype
from quiver.encoder.training.run_folder import MODEL, with_commit
from quiver.eval.nlu.answers import PREDICTIONS, RESULTS, QaResults, answer_questions, answer_texts, score_predictions, write_qa_results
from quiver.eval.nlu.fine_tuning import TYPES, Prepared, Request, Schedule, TaskBatch, encoder_folder, run_fine_tuning, save_tokenizer
from quiver.eval.nlu.questions import (
    NOWHERE,
    LabelledWindow,
    Question,
    check_settings,
    divide_questions,
    labelled_windows,
    read_questions,
    read_split,
)
from quiver.eval.nlu.recipes import QaDataSection, QaRecipe
from quiver.retrieval.models.pretrained import check_device, default_device

logger = logging.getLogger(__name__)


def open_span_qa(
    source: str | Path, *, seed: int | None, extend: int = 1, attention_dropout: float | None = None
) -> tuple[SpanQA, Tokenizer]:
    """Open a span question answering model, or an encoder with a new head."""
    folder = encoder_folder(source)
    tokenizer = Tokenizer.from_pretrained(folder)
    model = load_head(SpanQA, folder, new_head_seed=seed)
    if extend == 1 and attention_dropout is None:
        return model, tokenizer
    encoder = extend_positions(model.encoder, extend) if extend > 1 else model.encoder
    if attention_dropout is not None:
        weights, config = encoder.state_dict(), replace(encoder.config, attention_dropout=attention_dropout)
        _refuse_what_cannot_be_written(config)
        with Uninitialized():
            encoder = Encoder(config)
        encoder.load_state_dict(weights)
    changed = SpanQA(encoder, dropout=model.dropout.p, transform=None if model.transform is None else model.transform.config)
    head = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("encoder.")}
    changed.load_state_dict(changed.state_dict() | head)
    if extend > 1:
        tokenizer.settings["model_max_length"] = encoder.config.max_positions
    return changed.eval(), tokenizer


def _refuse_what_cannot_be_written(config: EncoderConfig) -> None:
    try:
        config_to_hf(config)
    except InputError as error:
        remedy = "not supported by this model's config.json; omit it"
        raise InputError(f"model.attention_dropout: {remedy} ({error})") from error


def save_qa_model(model: SpanQA, tokenizer: Tokenizer, folder: Path) -> None:
    """Save a model with its tokenizer so that transformers computes the same logits."""
    save_head(model, folder)
    save_tokenizer(tokenizer, folder)


def warn_of_token_types(model: SpanQA, tokenizer: Tokenizer, source: str) -> None:
    """Warn that a model was trained elsewhere with BERT's second token type for paragraphs, which Quiver does not use."""
    names = tokenizer.settings.get("model_input_names", [TYPES])
    if model.encoder.config.type_vocab_size > 1 and TYPES in names:
        logger.warning("%s: was trained with two token types, but only the first is used here; its answers may be worse", source)


@dataclass(frozen=True)
class QuestionSets:
    """The questions of a recipe."""

    train: list[Question]
    development: list[Question]
    test: list[Question]


@dataclass(frozen=True)
class SpanTask:
    """Windows with the positions of their answers, for `quiver.eval.nlu.fine_tuning`."""

    examples: Sequence[LabelledWindow]
    sets: QuestionSets
    tokenizer: Tokenizer
    recipe: QaRecipe

    def batch(self, examples: Sequence[LabelledWindow]) -> TaskBatch:
        """Pack windows, with the positions of the first and last token of their answers, (B,) each."""
        targets = {"starts": torch.tensor([one.start for one in examples]), "ends": torch.tensor([one.end for one in examples])}
        return TaskBatch(pack_ids([one.window.ids for one in examples]), targets)

    def loss(self, model: SpanQA, batch: TaskBatch) -> Tensor:
        """Mean of the cross entropies of start and end position."""
        return model.loss(model(batch.packed), batch.packed, batch.targets["starts"], batch.targets["ends"])

    def score(self, model: SpanQA) -> Mapping[str, float]:
        """F1 and exact match on the development questions; empty if there are none."""
        if not self.sets.development:
            return {}
        scores = self.answered(model, self.sets.development)[0].scores
        return {"f1": scores.f1, "exact": scores.exact}

    def answered(self, model: SpanQA, questions: Sequence[Question], *, progress: bool = False) -> tuple[QaResults, dict[str, str]]:
        """Scores on the given questions, and the predicted answers by question id."""
        official = self.recipe.data.official
        predictions = answer_questions(
            model, self.tokenizer, questions, self.recipe.windows, may_have_none=official == "squad_v2", progress=progress
        )
        return score_predictions(questions, predictions, self.tokenizer, official), answer_texts(questions, predictions)

    def described(self, example: LabelledWindow) -> dict[str, Any]:
        """A window as JSON, with its question id and text, for error messages."""
        question, window = self.sets.train[example.window.question], example.window
        text = self.tokenizer.decode(window.ids)
        return {
            "question": question.id,
            "tokens": [[part.start, part.stop] for part in window.parts],
            "start": example.start,
            "end": example.end,
            "text": text,
        }

    def save(self, model: SpanQA, folder: Path) -> None:
        """Write model and tokenizer."""
        save_qa_model(model, self.tokenizer, folder)

    def open(self, folder: Path) -> SpanQA:
        """Read a model."""
        return load_head(SpanQA, folder)


def train_qa(
    recipe: QaRecipe,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    command: str | None = None,
    device: str | None = None,
) -> QaResults:
    """Follow a recipe: train, save the best checkpoint as the model, answer the test questions, write the scores."""
    resumed = out if resume else None
    recipe = with_commit(with_training_dtype(recipe, check_device(device or default_device()), resumed=resumed), resumed=resumed)
    request = Request(recipe.model_dump(), out, (RESULTS, PREDICTIONS), resume, overwrite, progress, command, device)
    return run_fine_tuning(request, lambda: _prepare_questions(recipe, request))


def _prepare_questions(recipe: QaRecipe, request: Request) -> Prepared[SpanQA, LabelledWindow, QaResults]:
    sets, seed = read_sets(recipe.data), recipe.training.seed
    start = recipe.model
    source = pin_source(start.init, start.revision)
    first, tokenizer = open_span_qa(source, seed=seed, extend=start.extend_positions, attention_dropout=start.attention_dropout)
    check_settings(recipe.windows, tokenizer, positions=first.encoder.config.max_positions)
    windows = list(labelled_windows(sets.train, tokenizer, recipe.windows))
    with_answer = sum(one.start != NOWHERE for one in windows)
    if not with_answer:
        raise InputError(f"{recipe.data.train}: no window contains an answer, so there is nothing to train on")
    task = SpanTask(windows, sets, tokenizer, recipe)

    def finish(model: SpanQA) -> QaResults:
        results, answers = task.answered(model, sets.test, progress=request.progress)
        made_with = {
            "model": str(request.out / MODEL),
            "data": recipe.data.model_dump(),
            "dtype": recipe.training.dtype,
            "settings": recipe.windows.model_dump(),
        }
        write_qa_results(request.out, results, answers, made_with=made_with)
        return results

    return Prepared(
        task,
        Schedule(recipe.updates, recipe.training, "updates", len(windows)),
        {"sha256": _checksum_files(recipe.data)},
        {"questions": len(sets.train), "windows": len(windows), "with_answer": with_answer, "development": len(sets.development)},
        lambda: first,
        finish,
    )


def _checksum_files(data: QaDataSection) -> dict[str, str]:
    """Checksum of every file in the recipe's data section, by path."""
    files = (data.train, data.test, data.development, data.train_split, data.test_split, data.development_split)
    return {path: file_sha256(Path(path)) for path in dict.fromkeys(files) if path is not None}


def read_sets(data: QaDataSection) -> QuestionSets:
    """Read the training, development and test questions."""
    parts = (("train", data.train_split), ("development", data.development_split), ("test", data.test_split))
    given = [(getattr(data, name), split) for name, split in parts]
    read = [[] if path is None else _read_question_file(path, split, data) for path, split in given]
    if data.shares:
        read[: len(data.shares)] = divide_questions(read[0], data.shares)
        if not all(read):
            raise InputError(f"{data.train}: too few questions to divide by data.split: {data.split}")
    train, development, test = read
    train = train[: data.limit]
    _check_disjoint(test, train, f"{data.test}", "test questions are also training questions")
    _check_disjoint(development, train, f"{data.development}", "development questions are also training questions")
    _check_disjoint(test, development, f"{data.test}", "test questions are also development questions")
    return QuestionSets(train, development, test)


def _check_disjoint(some: Sequence[Question], others: Sequence[Question], where: str, complaint: str) -> None:
    if shared := {question.id for question in some} & {question.id for question in others}:
        raise InputError(f"{where}: {len(shared)} {complaint}, for example {min(shared)!r}")


def _read_question_file(path: str, split: str | None, data: QaDataSection) -> list[Question]:
    found = read_questions(Path(path), only=None if split is None else read_split(Path(split)))
    if found.misplaced:
        logger.warning("%s: %d answers are not at their stated position and are not used for training", path, found.misplaced)
    if data.official != "squad_v2":
        check_answerable(found.questions, where=path, official=data.official)
    return found.questions


def check_answerable(questions: Sequence[Question], *, where: str, official: str) -> None:
    """Check that every question has an answer."""
    without = next((question.id for question in questions if not question.answers), None)
    if without is not None:
        raise InputError(
            f"{where}: question {without!r} has no answer, but {official} does not support unanswerable questions; set "
            f"data.official: squad_v2"
        )
