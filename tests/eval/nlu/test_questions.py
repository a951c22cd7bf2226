"""SQuAD JSON in both versions, and errors that name article and paragraph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import InputError
from quiver.eval.nlu.questions import Answer, Question, read_questions, stands

CONTEXT = "서울은 대한민국의 수도이다. 부산은 항구이다."


def written(path: Path, *questions: dict[str, Any], context: object = CONTEXT) -> Path:
    path.write_text(json.dumps({"version": "v", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(questions)}]}]}))
    return path


def qa(key: str = "q1", **changes: Any) -> dict[str, Any]:
    return {"id": key, "question": "수도는?", "answers": [{"text": "서울", "answer_start": 0}]} | changes


def test_both_versions_of_squad_are_read(tmp_path: Path) -> None:
    several = [{"text": "서울", "answer_start": 0}, {"text": "서울은", "answer_start": 0}, {"text": "부산", "answer_start": 3}]
    path = written(
        tmp_path / "a.json",
        qa(answers=several),
        qa("q2", answers=[], is_impossible=True),
        qa("q3", answers=[], is_impossible=True, plausible_answers=several),
        qa("q4", is_impossible=False),
    )
    found = read_questions(path)
    answers = (Answer("서울", 0), Answer("서울은", 0), Answer("부산", 3))
    assert found.questions[0] == Question("q1", "수도는?", CONTEXT, answers)
    assert [question.answers for question in found.questions[1:]] == [(), (), (Answer("서울", 0),)]
    assert found.misplaced == 1
    assert [stands(answer, CONTEXT) for answer in answers] == [True, True, False]
    assert not stands(Answer("다.", -2), CONTEXT)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (qa(answers=[]), r"paragraphs\[0\]\.qas\[0\]: has no answers and is not marked"),
        (qa(answers=[{"text": "서울"}]), "'answer_start' must be a whole number"),
        (qa(answers=[{"text": "서울", "answer_start": True}]), "'answer_start' must be a whole number"),
        (qa(answers=["서울"]), "'answer_start' must be a whole number"),
        (qa(answers=[{"text": " ", "answer_start": 0}]), "'text' must be text"),
        (qa(question=None), "'question' must be text"),
        (qa(id=7), "'id' must be text"),
        (qa(answers=None), "'answers' must be a list"),
    ],
)
def test_malformed_questions_are_named(tmp_path: Path, bad: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as caught:
        read_questions(written(tmp_path / "a.json", bad))
    assert str(caught.value).startswith(f"{tmp_path / 'a.json'}: data[0].paragraphs[0].qas[0]: ")


def test_malformed_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(InputError, match="missing"):
        read_questions(path)
    with pytest.raises(InputError, match="'context' must be text"):
        read_questions(written(path, qa(), context=""))
    with pytest.raises(InputError, match="the question id 'q1' occurs twice"):
        read_questions(written(path, qa(), qa()))
    with pytest.raises(InputError, match="contains no questions"):
        read_questions(written(path))
    path.write_text('{"data": {}}')
    with pytest.raises(InputError, match="'data' must be a list"):
        read_questions(path)
