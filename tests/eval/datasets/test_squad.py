"""SQuAD JSON converts to a collection whose ids match the published judgements of KorQuAD."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.datasets.squad import read_squad, write_squad
from quiver.retrieval.data.corpus import load_collection

ARTICLES = [
    {
        "title": "임종석",
        "paragraphs": [
            {"context": "첫째 문단", "qas": [{"id": "65-0-0", "question": "누구?"}, {"id": "63-0-0", "question": "언제?"}]},
            {"context": "질문 없는 문단", "qas": []},
            {"context": "셋째\u2028문단", "qas": [{"id": "65-2-0", "question": "어디?"}]},
        ],
    },
    {
        "title": "again",
        "paragraphs": [
            {
                "context": "첫째 문단",
                "qas": [{"id": "70-0-0", "question": "또?"}, {"id": "x", "question": "no answer", "is_impossible": True}],
            }
        ],
    },
]


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[[object], Path]:
    def make(data: object) -> Path:
        path = tmp_path / "squad.json"
        path.write_text(json.dumps({"version": "1", "data": data}), encoding="utf-8")
        return path

    return make


def test_a_question_has_its_paragraph_as_relevant_document(make_file: Callable[[object], Path], tmp_path: Path) -> None:
    squad = read_squad(make_file(ARTICLES))
    assert squad.documents == {"65-0p0": "첫째 문단", "65-2p2": "셋째\u2028문단"}
    assert squad.queries == {"65-0-0": "누구?", "63-0-0": "언제?", "65-2-0": "어디?", "70-0-0": "또?"}
    # The paragraph of the second article equals one of the first, so both are one document.
    assert squad.answers == {"65-0-0": "65-0p0", "63-0-0": "65-0p0", "65-2-0": "65-2p2", "70-0-0": "65-0p0"}
    assert write_squad(squad, tmp_path / "out") == ["test"]
    collection = load_collection(tmp_path / "out", "test")
    assert {document.id: document.content() for document in collection.documents} == squad.documents
    assert {query.id: query.text for query in collection.queries} == squad.queries
    assert collection.qrels == {query: {document: 1} for query, document in squad.answers.items()}


def test_judgements_are_copied_and_checked(make_file: Callable[[object], Path], tmp_path: Path) -> None:
    squad, qrels = read_squad(make_file(ARTICLES)), tmp_path / "qrels"
    qrels.mkdir()
    (qrels / "train.tsv").write_text("query-id\tcorpus-id\tscore\n65-0-0\t65-0p0\t1\n", encoding="utf-8")
    (qrels / "dev.tsv").write_text("query-id\tcorpus-id\tscore\n65-2-0\t65-2p2\t2\n", encoding="utf-8")
    assert write_squad(squad, tmp_path / "out", qrels=qrels) == ["dev", "train"]
    assert load_collection(tmp_path / "out", "dev").qrels == {"65-2-0": {"65-2p2": 2}}
    assert load_collection(tmp_path / "out", "train").qrels == {"65-0-0": {"65-0p0": 1}}
    for line, missing in (("nobody\t65-0p0\t1", r"dev.tsv:2: unknown question 'nobody'"), ("65-0-0\t9p9\t1", "unknown paragraph '9p9'")):
        (qrels / "dev.tsv").write_text(f"query-id\tcorpus-id\tscore\n{line}\n", encoding="utf-8")
        with pytest.raises(InputError, match=missing):
            write_squad(squad, tmp_path / "other", qrels=qrels)
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "'data' must be a list"),
        ([{"title": "x"}], r"data\[0\]: not SQuAD's format, 'paragraphs' must be a list"),
        ([{"paragraphs": [{"qas": []}]}], r"data\[0\]\.paragraphs\[0\].*'context' must be text"),
        ([{"paragraphs": [{"context": "c", "qas": [{"id": 7, "question": "q"}]}]}], "'id' must be text"),
        ([{"paragraphs": [{"context": "c", "qas": [{"id": "a", "question": "q"}] * 2}]}], "a question id occurs twice"),
        ([{"paragraphs": [{"context": c, "qas": [{"id": "a", "question": "q"}]} for c in "cd"]}], "question id 'a' occurs twice"),
        ([{"paragraphs": [{"context": c, "qas": [{"id": f"a-{c}", "question": "q"}]}]} for c in "cd"], "the id 'ap0'"),
        ([], "contains no answerable question"),
    ],
)
def test_invalid_files_are_reported_in_one_line(make_file: Callable[[object], Path], data: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_squad(make_file(data))
