"""Exact match and F1 of answers, as defined by the official script of each data set.

========== ============================== =============== =====================================
definition text is normalised by          F1 counts       an answer that is empty afterwards
========== ============================== =============== =====================================
squad_v1   lower-casing, deleting ASCII   words           has F1 0, even against another empty
           punctuation, then a, an, the                   answer
squad_v2   the same                       words           means "no answer"; F1 1 against another
korquad_v1 replacing brackets and quotes  characters, but has F1 0, even against another empty
           by spaces, lower-casing, then  not white space answer
           deleting ASCII punctuation
========== ============================== =============== =====================================

All definitions reduce white space to single spaces. With several right answers, the one that gives the highest score counts. Korean
particles are part of a word and are kept: an answer with another particle is not an exact match, so F1 counts characters there.

Source: evaluate-v1.1.py and evaluate-v2.0.py of SQuAD (rajpurkar.github.io/SQuAD-explorer); evaluate-v1.0.py of KorQuAD
(korquad.github.io); arXiv:1909.07005, section 4.2.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quiver.eval.nlu.questions import Question

Official = Literal["squad_v1", "squad_v2", "korquad_v1"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETED = str.maketrans("", "", string.punctuation)
# Straight and single curly quotation marks (U+2018, U+2019), title brackets and parentheses become spaces.
_SPACED = str.maketrans(dict.fromkeys("'\"《》<>〈〉()\u2018\u2019", " "))

NO_ANSWER = ""


def squad_text(text: str) -> str:
    """Normalise a text as SQuAD's scripts do.

    Example:
        >>> squad_text("The  Broncos' (24-10)")
        'broncos 2410'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DELETED)).split())


def korquad_text(text: str) -> str:
    """Normalise a text as KorQuAD's script does.

    Example:
        >>> korquad_text("《조선일보》의 '사설(社說)'")
        '조선일보 의 사설 社說'
    """
    return " ".join(text.translate(_SPACED).lower().translate(_DELETED).split())


def _characters(text: str) -> list[str]:
    return [character for character in text if not character.isspace()]


@dataclass(frozen=True)
class Definition:
    """Definition of the scores in one official script.

    Attributes:
        compared: Normalises a text for comparison.
        counted: Splits a normalised text into the units that F1 counts.
        empty_answers: Whether an empty answer means "no answer": two empty answers have F1 1, and a question may have no answer.
    """

    compared: Callable[[str], str]
    counted: Callable[[str], list[str]]
    empty_answers: bool


DEFINITIONS: Mapping[Official, Definition] = {
    "squad_v1": Definition(squad_text, str.split, empty_answers=False),
    "squad_v2": Definition(squad_text, str.split, empty_answers=True),
    "korquad_v1": Definition(korquad_text, _characters, empty_answers=False),
}


@dataclass(frozen=True)
class AnswerScore:
    """Score of one question."""

    exact: float
    """1 for an exact match, otherwise 0."""
    f1: float
    """F1, from 0 to 1."""


def score_answer(prediction: str, answers: Sequence[str], official: Official) -> AnswerScore:
    """Score a prediction against all right answers of a question.

    Args:
        prediction: Predicted text; empty for "no answer".
        answers: Right answers, at least one. For squad_v2 the sequence may be empty: the question has no answer.
        official: A key of `DEFINITIONS`.

    Raises:
        ValueError: ``answers`` is empty, and the definition has no unanswerable questions.

    Example:
        >>> score_answer("조선일보가", ["조선일보", "한겨레"], "korquad_v1")
        AnswerScore(exact=0.0, f1=0.888888888888889)
        >>> score_answer("", [], "squad_v2")
        AnswerScore(exact=1.0, f1=1.0)
    """
    definition = DEFINITIONS[official]
    if definition.empty_answers:
        answers = [answer for answer in answers if definition.compared(answer)] or [NO_ANSWER]
    elif not answers:
        raise ValueError(f"a question without an answer cannot be scored as {official}")
    ours = definition.compared(prediction)
    theirs = [definition.compared(answer) for answer in answers]
    return AnswerScore(float(ours in theirs), max(_f1(ours, answer, definition) for answer in theirs))


def _f1(prediction: str, answer: str, definition: Definition) -> float:
    ours, theirs = definition.counted(prediction), definition.counted(answer)
    if definition.empty_answers and not (ours and theirs):
        return float(ours == theirs)
    same = sum((Counter(ours) & Counter(theirs)).values())
    if not same:
        return 0.0
    precision, recall = same / len(ours), same / len(theirs)
    return 2 * precision * recall / (precision + recall)


@dataclass(frozen=True)
class Scores:
    """Mean scores over questions, as fractions."""

    questions: int
    """Number of questions."""
    exact: float
    """Mean exact match."""
    f1: float
    """Mean F1."""


def mean_scores(scores: Sequence[AnswerScore]) -> Scores | None:
    """Mean scores; None if ``scores`` is empty."""
    count = len(scores)
    if not count:
        return None
    return Scores(count, sum(one.exact for one in scores) / count, sum(one.f1 for one in scores) / count)


def score_answers(questions: Sequence[Question], predictions: Mapping[str, str], official: Official) -> dict[str, AnswerScore]:
    """Score every question: id -> score.

    A question without a prediction scores 0, as in the scripts of SQuAD 1.1 and KorQuAD; SQuAD 2.0's script leaves it out of the mean.

    Raises:
        ValueError: A question has no answer and the definition has no such questions, or a prediction belongs to no question.
    """
    if unknown := sorted(predictions.keys() - {question.id for question in questions}):
        raise ValueError(f"there is no question {unknown[0]!r}")
    none = AnswerScore(0.0, 0.0)
    return {
        question.id: none
        if question.id not in predictions
        else score_answer(predictions[question.id], [answer.text for answer in question.answers], official)
        for question in questions
    }
