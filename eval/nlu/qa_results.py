"""Results of span question answering: scores of all questions, of those with and without an answer, and by length.

predictions.json has the format of the official scripts: question id -> answer.
results.json holds the scores as fractions, with the model, data and settings.

Source: the tables of Jeong et al., HCLT 2023, sections 4.1 and 4.3 (texts within 512 tokens and beyond).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quiver.encoder.files import write_json
from quiver.encoder.tokenizer import Tokenizer
from quiver.eval.nlu.answer_scores import AnswerScore, Official, Scores, mean_scores, score_answers
from quiver.eval.nlu.answering import Prediction
from quiver.eval.nlu.questions import Question

SCHEMA = "quiver-qa/1"
RESULTS, PREDICTIONS = "results.json", "predictions.json"

LENGTHS = (256, 512, 1024, 2048)
"""Bounds of the length ranges, in tokens of question, paragraph and special tokens as one sequence."""


@dataclass(frozen=True)
class LengthScores:
    """Scores of the questions whose sequence length is within a range."""

    above: int
    """Lower bound of the length in tokens, exclusive."""
    up_to: int | None
    """Upper bound of the length in tokens, inclusive; None for no bound."""
    scores: Scores
    """Mean scores."""


@dataclass(frozen=True)
class QaResults:
    """Scores of a model."""

    official: Official
    """Official script that defines the scores."""
    scores: Scores
    """Mean scores over all questions."""
    answerable: Scores | None
    """Mean scores over the questions with an answer; None if all questions have one."""
    unanswerable: Scores | None
    """Mean scores over the questions without an answer; None if all questions have one."""
    by_length: tuple[LengthScores, ...]
    """Mean scores by length, shortest first; empty ranges are left out."""
    windows: int
    """Number of windows of all paragraphs."""


def score_predictions(
    questions: Sequence[Question], predictions: Sequence[Prediction], tokenizer: Tokenizer, official: Official
) -> QaResults:
    """Score the predictions of `quiver.eval.nlu.answering.answer_questions`.

    Args:
        questions: At least one question.
        predictions: One prediction per question.
        tokenizer: Tokenizer that measures the lengths.
        official: A key of `quiver.eval.nlu.answer_scores.DEFINITIONS`.

    Raises:
        ValueError: There are no questions, the numbers of questions and predictions differ, or a question has no answer although the
            definition does not allow that.
    """
    scores = score_answers(questions, answer_texts(questions, predictions), official)
    overall = mean_scores(list(scores.values()))
    if overall is None:
        raise ValueError("there are no questions to score")
    parts: dict[bool, list[AnswerScore]] = {True: [], False: []}
    for question in questions:
        parts[bool(question.answers)].append(scores[question.id])
    mixed = bool(parts[False])
    return QaResults(
        official,
        overall,
        mean_scores(parts[True]) if mixed else None,
        mean_scores(parts[False]),
        tuple(_by_length(questions, scores, tokenizer)),
        sum(prediction.windows for prediction in predictions),
    )


def answer_texts(questions: Sequence[Question], predictions: Sequence[Prediction]) -> dict[str, str]:
    """Question id -> predicted answer.

    Raises:
        ValueError: The numbers of questions and predictions differ.
    """
    return {question.id: prediction.text for question, prediction in zip(questions, predictions, strict=True)}


def _by_length(questions: Sequence[Question], scores: Mapping[str, AnswerScore], tokenizer: Tokenizer) -> list[LengthScores]:
    template = tokenizer.pair_template()
    special = len(template.before) + len(template.between) + len(template.behind)
    contexts = {context: len(tokenizer.pieces(context).ids) for context in {question.context for question in questions}}
    lengths = {question.id: special + len(tokenizer.pieces(question.text).ids) + contexts[question.context] for question in questions}
    found = []
    for above, up_to in zip((0, *LENGTHS), (*LENGTHS, None), strict=True):
        inside = [key for key, length in lengths.items() if above < length and (up_to is None or length <= up_to)]
        means = mean_scores([scores[key] for key in inside])
        if means is not None:
            found.append(LengthScores(above, up_to, means))
    return found


def write_qa_results(folder: Path, results: QaResults, answers: Mapping[str, str], *, made_with: Mapping[str, Any]) -> None:
    """Write results.json and predictions.json, replacing existing files.

    Args:
        folder: Target folder; created if missing.
        results: The scores.
        answers: Question id -> predicted answer.
        made_with: Model, data and settings, for the record.

    Raises:
        InputError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PREDICTIONS, dict(answers))
    write_json(folder / RESULTS, {"schema": SCHEMA, **made_with, **asdict(results)})
