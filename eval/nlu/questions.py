"""Questions on paragraphs in SQuAD's JSON format: SQuAD 1.1 and 2.0, KorQuAD 1.0.

Source: SQuAD, arXiv:1606.05250 and arXiv:1806.03822; KorQuAD 1.0, arXiv:1909.07005; the files of both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from quiver.encoder.errors import InputError
from quiver.eval.datasets.squad import is_impossible, list_under, read_paragraphs, text_under
from quiver.retrieval.data.corpus import read_judgements


@dataclass(frozen=True)
class Answer:
    """A span of a paragraph."""

    text: str
    """Text of the span, white space and particles included."""
    start: int
    """Index of its first character in the paragraph."""


@dataclass(frozen=True)
class Question:
    """A question on one paragraph."""

    id: str
    """Question id in the file."""
    text: str
    """The question."""
    context: str
    """The paragraph."""
    answers: tuple[Answer, ...]
    """Reference answers; empty if the question has no answer in the paragraph (SQuAD 2.0)."""


@dataclass(frozen=True)
class QuestionSet:
    """Questions of a file.

    Attributes:
        questions: Questions in the order of the file.
        misplaced: Number of answers that are not at their stated position. They count in scores but are not used for training.
    """

    questions: list[Question]
    misplaced: int


def read_questions(path: Path, *, only: Collection[str] | None = None) -> QuestionSet:
    """Read a file in SQuAD's JSON format.

    Args:
        path: JSON file ``{"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [{"text": ...,
            "answer_start": ...}]}]}]}]}``; ``is_impossible`` marks a question without an answer.
        only: Ids of the questions to return; None for all.

    Raises:
        InputError: The file is missing or has another form, a question has no answer and is not marked as impossible, an id occurs twice,
            or an id of ``only`` is missing; names the article and the paragraph.
    """
    wanted = None if only is None else set(only)
    questions: dict[str, Question] = {}
    for paragraph in read_paragraphs(path):
        for place, raw in enumerate(paragraph.questions):
            where = f"{paragraph.where}.qas[{place}]"
            question = _question(paragraph.context, raw, where)
            if question.id in questions:
                raise InputError(f"{where}: the question id {question.id!r} occurs twice")
            questions[question.id] = question
    if not questions:
        raise InputError(f"{path}: holds no questions")
    if wanted is not None:
        if missing := sorted(wanted - questions.keys()):
            raise InputError(f"{path}: holds no question {missing[0]!r}" + (f", and {len(missing) - 1} more" if missing[1:] else ""))
        questions = {key: question for key, question in questions.items() if key in wanted}
    found = list(questions.values())
    return QuestionSet(found, sum(not stands(answer, question.context) for question in found for answer in question.answers))


def read_split(path: Path) -> list[str]:
    """Read the question ids of a split, from the judgements of the same questions as a retrieval collection.

    Args:
        path: ``<split>.tsv`` file of a BEIR folder.

    Raises:
        InputError: The file is missing or malformed.
    """
    return list(dict.fromkeys(judgement.query for judgement in read_judgements(path)))


def stands(answer: Answer, context: str) -> bool:
    """Whether the paragraph contains an answer at its stated position."""
    return answer.start >= 0 and context.startswith(answer.text, answer.start)


def _question(context: str, raw: object, where: str) -> Question:
    key, text = text_under(raw, "id", where), text_under(raw, "question", where)
    impossible = is_impossible(raw)
    answers = () if impossible else tuple(_answer(one, where) for one in list_under(raw, "answers", where))
    if not answers and not impossible:
        raise InputError(f'{where}: has no answers, and does not say "is_impossible": true')
    return Question(key, text, context, answers)


def _answer(raw: object, where: str) -> Answer:
    start = raw.get("answer_start") if isinstance(raw, Mapping) else None
    if type(start) is not int:
        raise InputError(f"{where}: not SQuAD's format, 'answer_start' must be a whole number")
    return Answer(text_under(raw, "text", where), start)
