"""Questions on paragraphs in SQuAD's JSON: SQuAD 1.1 and 2.0, KorQuAD 1.0.

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
    """As it stands in the paragraph, white space and particles included."""
    start: int
    """Place of its first character."""


@dataclass(frozen=True)
class Question:
    """A question on one paragraph."""

    id: str
    """As the file has it."""
    text: str
    """The question."""
    context: str
    """The paragraph."""
    answers: tuple[Answer, ...]
    """What people answered; empty where the paragraph has no answer (SQuAD 2.0)."""


@dataclass(frozen=True)
class QuestionSet:
    """What was read.

    Attributes:
        questions: In the order of the file.
        misplaced: Answers that do not stand where the file says. They count in scores, but nothing can be trained on them.
    """

    questions: list[Question]
    misplaced: int


def read_questions(path: Path, *, only: Collection[str] | None = None) -> QuestionSet:
    """Read a file in SQuAD's JSON.

    Args:
        path: ``{"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [{"text": ...,
            "answer_start": ...}]}]}]}]}``; ``is_impossible`` says that there is no answer.
        only: Ids of the questions that are wanted; all by default.

    Raises:
        InputError: The file is missing or not of this form, an answer is neither given nor called impossible, an id comes twice, or one
            of ``only`` is not there; names the article and the paragraph.
    """
    wanted = None if only is None else set(only)
    questions: dict[str, Question] = {}
    for paragraph in read_paragraphs(path):
        for place, raw in enumerate(paragraph.questions):
            where = f"{paragraph.where}.qas[{place}]"
            question = _question(paragraph.context, raw, where)
            if question.id in questions:
                raise InputError(f"{where}: the question id {question.id!r} comes twice")
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
    """Ids of the questions of a split, from the qrels of the same questions as a retrieval collection.

    Args:
        path: ``<split>.tsv`` of a BEIR folder.

    Raises:
        InputError: The file is missing or malformed.
    """
    return list(dict.fromkeys(judgement.query for judgement in read_judgements(path)))


def stands(answer: Answer, context: str) -> bool:
    """Whether an answer stands where it says."""
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
