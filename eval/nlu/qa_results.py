"""Span QA scored: all questions, those with and without an answer, and by the length of question and paragraph.

predictions.json is what the official scripts take: question id -> answer.
results.json holds the scores below, as fractions of 1, and what they were made with.

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
"""Where texts are told apart by their length, in tokens of question, paragraph and special tokens as one sequence."""


@dataclass(frozen=True)
class LengthScores:
    """Of the questions whose sequence is within a range of lengths."""

    above: int
    """In tokens, not itself in the range."""
    up_to: int | None
    """In tokens, itself in the range; None for no end."""
    scores: Scores
    """Their means."""


@dataclass(frozen=True)
class QaResults:
    """What a model scored."""

    official: Official
    """The definition of the scores."""
    scores: Scores
    """Over all questions."""
    answerable: Scores | None
    """Over the questions that have an answer, where there are others too."""
    unanswerable: Scores | None
    """Over those without one."""
    by_length: tuple[LengthScores, ...]
    """By the length of the text, shortest first, without empty ranges."""
    windows: int
    """Sequences that all paragraphs were cut into."""


def score_predictions(
    questions: Sequence[Question], predictions: Sequence[Prediction], tokenizer: Tokenizer, official: Official
) -> QaResults:
    """Score what `quiver.eval.nlu.answering.answer_questions` gave.

    Args:
        questions: At least one.
        predictions: One each.
        tokenizer: Lengths are counted in its tokens.
        official: A key of `quiver.eval.nlu.answer_scores.DEFINITIONS`.

    Raises:
        ValueError: There are no questions, not one prediction each, or a question without an answer where the definition knows none.
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
    """Question id to answer.

    Raises:
        ValueError: There is not one prediction a question.
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
    """Write results.json and predictions.json into a folder that is made where it is missing.

    Args:
        folder: Files of these names are replaced.
        results: The scores.
        answers: Question id to answer.
        made_with: Model, data and settings, for the record.

    Raises:
        InputError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PREDICTIONS, dict(answers))
    write_json(folder / RESULTS, {"schema": SCHEMA, **made_with, **asdict(results)})
