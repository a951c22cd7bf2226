"""EM and F1 against values computed by hand from the rules of the official scripts."""

from __future__ import annotations

from fractions import Fraction

import pytest

from quiver.eval.nlu.answers import AnswerScore, Official, mean_scores, score_answer, score_answers
from quiver.eval.nlu.questions import Answer, Question

# prediction, right answers, exact, F1 as a fraction (2 same / (ours + theirs))
KOREAN: list[tuple[str, list[str], int, str]] = [
    ("서울", ["서울"], 1, "1"),
    ("서울은", ["서울"], 0, "4/5"),  # a particle stays: 2 of 3 characters, 2 of 2
    ("서울에서", ["서울은"], 0, "4/7"),
    ("서울 특별시", ["서울특별시"], 0, "1"),  # spaces do not count in F1, but in exact match
    ("서울  특별시 ", ["서울 특별시"], 1, "1"),
    ("《조선일보》", ["조선일보"], 1, "1"),
    ("〈조선일보〉", ["'조선일보'"], 1, "1"),
    ("조선(일보)", ["조선일보"], 0, "1"),  # a bracket becomes a space
    ("조선-일보", ["조선일보"], 1, "1"),  # ASCII punctuation is deleted, and leaves none
    ("조선·일보", ["조선일보"], 0, "8/9"),  # other punctuation is a character
    ("“서울”", ["서울"], 0, "2/3"),  # only the single curly marks are in the list
    ("\u2018서울\u2019", ["서울"], 1, "1"),
    ("1,989년", ["1989년"], 1, "1"),
    ("1989년 2월 15일", ["1989년 2월15일"], 0, "1"),
    ("KBS", ["kbs"], 1, "1"),
    ("the KBS", ["kbs"], 0, "2/3"),  # articles are not removed in Korean
    ("부산", ["서울", "부산시", "부산"], 1, "1"),
    ("부산", ["서울", "부산시"], 0, "4/5"),
    ("가가나", ["가나나"], 0, "2/3"),  # a multiset: one 가 and one 나 are shared
    ("", ["서울"], 0, "0"),
    ("()", ["서울"], 0, "0"),
    ("()", ["-"], 1, "0"),  # both normalize to nothing: equal texts, but no shared character
    ("서울", ["대구"], 0, "0"),
]

ENGLISH: list[tuple[str, list[str], int, str]] = [
    ("The Broncos", ["Broncos"], 1, "1"),
    ("Denver Broncos", ["Broncos"], 0, "2/3"),
    ("an apple a day", ["apple day"], 1, "1"),
    ("theatre", ["atre"], 0, "0"),  # an article is a word
    ("U.S.A.", ["USA"], 1, "1"),
    ("well-known man", ["wellknown man"], 1, "1"),  # punctuation is deleted without a space
    ("well-known man", ["well known man"], 0, "2/5"),
    ("the-end", ["theend"], 1, "1"),  # deleted before articles are removed
    ("24\u201310", ["2410"], 0, "0"),  # an en dash is not ASCII
    ("new   york\n city", ["New York City"], 1, "1"),
    ("to be or not to be", ["not to be"], 0, "2/3"),  # 3 shared of 6 and of 3
    ("be be", ["be"], 0, "2/3"),
    ("one", ["two", "one two three", "one two"], 0, "2/3"),
    ("", ["one"], 0, "0"),
    ("José's café", ["josés café"], 1, "1"),
    ("서울은", ["서울"], 0, "0"),  # words, not characters
]

# squad_v1, then squad_v2
EMPTY: list[tuple[str, list[str], tuple[int, str], tuple[int, str]]] = [
    ("the", ["a"], (1, "0"), (1, "1")),
    ("...", ["the", "one"], (1, "0"), (0, "0")),  # version 2 ignores answers that normalize to nothing if there are others
    ("one", ["!"], (0, "0"), (0, "0")),
]


@pytest.mark.parametrize(("prediction", "answers", "exact", "f1"), KOREAN)
def test_korean_answers_score_as_in_the_official_script(prediction: str, answers: list[str], exact: int, f1: str) -> None:
    assert score_answer(prediction, answers, "korquad_v1") == AnswerScore(exact, pytest.approx(float(Fraction(f1)), abs=1e-12))


@pytest.mark.parametrize(("prediction", "answers", "exact", "f1"), ENGLISH)
@pytest.mark.parametrize("official", ["squad_v1", "squad_v2"])
def test_english_answers_score_as_in_the_official_script(
    prediction: str, answers: list[str], exact: int, f1: str, official: Official
) -> None:
    assert score_answer(prediction, answers, official) == AnswerScore(exact, pytest.approx(float(Fraction(f1)), abs=1e-12))


@pytest.mark.parametrize(("prediction", "answers", "first", "second"), EMPTY)
def test_answers_that_normalize_to_nothing_are_ignored_in_version_2(
    prediction: str, answers: list[str], first: tuple[int, str], second: tuple[int, str]
) -> None:
    for official, (exact, f1) in zip(("squad_v1", "squad_v2"), (first, second), strict=True):
        assert score_answer(prediction, answers, official) == AnswerScore(exact, float(Fraction(f1)))


def test_unanswered_questions_count_in_the_mean() -> None:
    questions = [Question(name, "?", "가나다", (Answer("가", 0),)) for name in ("q1", "q2", "q3", "q4")]
    scores = score_answers(questions, {"q1": "가", "q2": "가나", "q3": "다"}, "korquad_v1")
    assert scores == {"q1": AnswerScore(1, 1), "q2": AnswerScore(0, pytest.approx(2 / 3)), "q3": AnswerScore(0, 0), "q4": AnswerScore(0, 0)}
    mean = mean_scores(list(scores.values()))
    assert mean is not None
    assert (mean.questions, mean.exact, mean.f1) == (4, 0.25, pytest.approx(5 / 12))
    assert mean_scores([]) is None
    with pytest.raises(ValueError, match="unknown question 'q9'"):
        score_answers(questions, {"q9": "가"}, "korquad_v1")
