from __future__ import annotations

from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.training.data.sources import Example, FieldReader, parse_list
from quiver.retrieval.training.recipe import DataSection


def read(row: dict[str, Any], **fields: Any) -> Example:
    reader = FieldReader(DataSection(train=("rows.jsonl",), **fields))
    missing = reader.missing("rows.jsonl:1", row)
    for name in (name for name in reader.columns if name in missing):
        raise reader.misspelt("rows.jsonl:1", row, name)
    (example,) = reader.examples("rows.jsonl:1", row)
    return example


def test_documents_of_several_fields_are_concatenated_in_order() -> None:
    row = {"q": "a", "pos": "b", "negs": ["c", "d"], "more": "e", "other": 7}
    assert read(row, query_field="q", document_fields=("pos", "negs", "more")) == Example("rows.jsonl:1", "a", ["b", "c", "d", "e"], [])


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("passages.*.text", ["x", "y"]),
        ("passages.1.text", ["y"]),
        ("passages.7.text", []),
        ("groups.*.*", ["u", "v", "w"]),
        ("groups.*", ["u", "v", "w"]),
        ("deep.er.text", ["z"]),
        ("dotted.key", ["k"]),
        ("nothing", []),
        ("nothing.*.text", []),
        ("empty", []),
        ("empty.*.text", []),
    ],
)
def test_dotted_paths_reach_nested_values(path: str, found: list[str]) -> None:
    row = {
        "query": "q",
        "positive": "p",
        "passages": [{"text": "x"}, {"text": "y"}],
        "groups": [["u", "v"], ["w"]],
        "deep": {"er": {"text": "z"}},
        "dotted.key": "k",
        "nothing": None,
        "empty": [],
    }
    if path == "groups.*":  # one star leaves the inner lists as they are, and a document is no list
        with pytest.raises(InputError, match="must hold text"):
            read(row, document_fields=("positive", path))
    else:
        assert read(row, document_fields=("positive", path)).documents == ["p", *found]


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("[]", []),
        ("[1, -2]", [1, -2]),
        ("[1, -2, +3]", ["1", "-2", "+3"]),
        ("[1. 2.5 .5]", [1.0, 2.5, 0.5]),
        ("[ 1.0e-01\n -2E3 ]", [0.1, -2000.0]),
        ("['a', \"b c\"]", ["a", "b c"]),
        ("['a' 'b']", ["a", "b"]),
        ('["q\\"1"]', ['q"1']),
        (" [1,2,] ", ["1", "2"]),
        ("[007 8]", ["007", "8"]),
        ("[007, 8]", ["007", "8"]),
    ],
)
def test_lists_stored_as_text(text: str, items: list[object]) -> None:
    assert parse_list("f:1", "scores", text) == items


@pytest.mark.parametrize(
    "text", ["[1, 2", "[__import__('os')]", "[1;2]", "[a, b]", "[1 + 1]", "[12ab]", "['a\\'b']", "[,]", "[" * 20_000, "[(1, 2)]"]
)
def test_text_that_is_not_a_list_is_refused_and_never_executed(text: str) -> None:
    with pytest.raises(InputError, match=r"f:1: the field 'scores' must hold a list of numbers or ids"):
        parse_list("f:1", "scores", text)


@pytest.mark.parametrize(
    "score",
    ["[1, NaN]", "[1, nan]", "[1, -inf]", "[1, Infinity]", [1, float("nan")], [1, None], [1, True], [1, "x"], [1, [2]], [1, 10**400]],
)
def test_a_score_is_a_finite_number(score: object) -> None:
    with pytest.raises(InputError, match=r"rows\.jsonl:1: a score in 'scores' must be a finite number, got"):
        read({"query": "q", "docs": ["a", "b"], "scores": score}, document_fields=("docs",), score_fields=("scores",))


@pytest.mark.parametrize("scores", [[1, 2, 3], [1], [], None, 1])
def test_every_document_has_a_score(scores: object) -> None:
    with pytest.raises(InputError, match=r"rows\.jsonl:1: \d scores \(scores\) for 2 documents"):
        read({"query": "q", "docs": ["a", "b"], "scores": scores}, document_fields=("docs",), score_fields=("scores",))


@pytest.mark.parametrize(
    ("row", "fields", "problem"),
    [
        ({"query": "q", "postive": "p"}, {}, "no field 'positive'; did you mean 'postive'\\? the row's fields are query, postive"),
        ({}, {}, "no field 'query'; the row's fields are none; a recipe names it by data.query_field"),
        ({"query": 3, "positive": "p"}, {}, "the field 'query' must hold text, got 3"),
        ({"query": None, "positive": "p"}, {}, "the field 'query' must hold text, got null"),
        ({"query": ["q"], "positive": "p"}, {}, "the field 'query' must hold text"),
        ({"query": "q", "positive": ["p", None]}, {}, "the field 'positive' must hold text, got null"),
        ({"query": "q", "positive": {"text": "p"}}, {}, "the field 'positive' must hold text"),
        ({"query": "q", "positive": "p"}, {"document_fields": ("positive.text",)}, "needs a mapping or a list with 'text', got \"p\""),
        (
            {"query": "q", "positive": {"a": 1}},
            {"document_fields": ("positive.*.a",)},
            "'\\*' in the path '.*' needs a list, got a mapping",
        ),
        ({"query": "q", "positive": [{"b": "p"}]}, {"document_fields": ("positive.*.a",)}, "an item of 'positive.\\*.a' has no 'a'"),
        ({"query": "q", "a": ["p", "p2"], "b": "n"}, {"document_fields": ("a", "b")}, "holds 2 documents, .*use one of them: a.0"),
        (
            {"query": "q", "a": [{"t": "p"}] * 2, "b": "n"},
            {"document_fields": ("a.*.t", "b")},
            "holds 2 documents, .*use one of them: a.0.t",
        ),
        ({"query": 1.5, "positive": 2}, {"format": "ids"}, "'query' must hold an id \\(a string or an integer\\), got 1.5"),
        ({"query": True, "positive": 2}, {"format": "ids"}, "'query' must hold an id \\(a string or an integer\\), got true"),
        ({"query": " ", "positive": 2}, {"format": "ids"}, "'query' must hold an id"),
    ],
)
def test_malformed_fields_are_refused(row: dict[str, Any], fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=rf"^rows\.jsonl:1: .*{problem}"):
        read(row, **fields)


@pytest.mark.parametrize(
    ("row", "flaw"),
    [
        ({"query": "q", "positive": " "}, "the field 'positive' has no positive"),
        ({"query": "q", "positive": None}, "the field 'positive' has no positive"),
        ({"query": "q", "positive": []}, "the field 'positive' has no positive"),
        ({"query": "\t", "positive": "p"}, "the field 'query' is blank"),
        ({"query": "q", "positive": "p"}, ""),
    ],
)
def test_blank_queries_and_positives_are_flaws(row: dict[str, Any], flaw: str) -> None:
    assert read({**row, "negative": ""}, document_fields=("positive", "negative")).flaw == flaw


def test_a_later_row_may_lack_documents() -> None:
    reader = FieldReader(DataSection(train=("rows.jsonl",), document_fields=("positive", "negative")))
    assert reader.examples("rows.jsonl:2", {"query": "q", "positive": "p"})[0].documents == ["p"]
    with pytest.raises(InputError, match=r"rows\.jsonl:2: no field 'query'"):
        reader.examples("rows.jsonl:2", {"positive": "p"})


def test_a_long_malformed_list_is_refused_quickly() -> None:
    """The pattern does not backtrack over every split of a number."""
    with pytest.raises(InputError, match="must hold a list of numbers or ids"):
        read({"id": 1, "docs": f"[{'1' * 200_000}x]"}, format="ids", query_field="id", document_fields=("docs",))


FLAG = {"query": "q", "pos": ["a", "b", "c"], "neg": ["n", "b ", "m"], "pos_scores": [3, 2, 1], "neg_scores": [0.5, 0.25, 0.125]}


@pytest.mark.parametrize("scored", [False, True])
def test_each_positive_makes_an_example_with_all_negatives(scored: bool) -> None:
    scores = ("pos_scores", "neg_scores") if scored else ()
    section = DataSection(train=("f",), document_fields=("pos", "neg"), score_fields=scores, positives="each")
    examples = FieldReader(section).examples("f:1", FLAG)
    assert [example.documents for example in examples] == [["a", "n", "m"], ["b", "n", "m"], ["c", "n", "m"]]
    assert [example.scores for example in examples] == ([[n, 0.5, 0.125] for n in (3, 2, 1)] if scored else [[]] * 3)
    assert [example.excluded for example in examples] == [1, 1, 1]  # "b " is a positive
    assert FieldReader(section).whole("f:1", FLAG).documents == ["a", "b", "c", "n", "b ", "m"]
    assert [example.flaw for example in FieldReader(section).examples("f:1", {**FLAG, "pos": ["a", " ", "c"]})] == [
        "",
        "the field 'pos' has no positive",
        "",
    ]
    (nothing,) = FieldReader(section.replace(score_fields=())).examples("f:1", {**FLAG, "pos": []})
    assert nothing.flaw
