"""``quiver index`` and the filters of ``quiver search``: an index is changed, damaged and repaired from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.quiver.conftest import make_bi_encoder

DOCUMENTS = [
    {"_id": "d1", "text": "a bird has wings", "year": 1999, "tags": ["animal", "air"]},
    {"_id": "d2", "text": "the sea is deep", "metadata": {"year": 2005}},
    {"_id": "d3", "text": "retrieval finds documents", "year": 2020, "tags": ["search"]},
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_bi_encoder(tmp_path / "model", (str(document["text"]) for document in DOCUMENTS))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return path


@pytest.fixture
def index(quiver: Callable[..., Any], model: Path, corpus: Path, tmp_path: Path) -> Path:
    done = quiver("index", "build", corpus, "--model", model, "--out", tmp_path / "index", "--memory", "500MB", "--seed", 3)
    assert done.code == 0, done.err
    return tmp_path / "index"


def search(quiver: Callable[..., Any], index: Path, *options: object) -> set[str]:
    done = quiver("search", index, "wings", "-k", 10, "--json", *options)
    assert done.code == 0, done.err
    return {hit["id"] for hit in json.loads(done.out)}


def test_documents_are_added_replaced_and_deleted(quiver: Callable[..., Any], index: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps({"_id": "d4", "text": "more of the sea"}) + "\n" + json.dumps({"_id": "d1", "text": "a fish"}) + "\n")
    done = quiver("index", "add", index, more)
    assert done.code == 2
    assert f"document 'd1' of {more} is in this index already, from {tmp_path / 'corpus.jsonl'}; replace it with --replace" in done.err
    added = json.loads(quiver("index", "add", index, more, "--replace", "--json").out)
    assert (added["documents"], added["deleted"], added["generation"], added["operation"]) == (4, 1, 2, "add")
    assert search(quiver, index) == {"d1", "d2", "d3", "d4"}
    (tmp_path / "ids.txt").write_text("d2\nd4\n")
    gone = json.loads(quiver("index", "delete", index, "d3", "--ids", tmp_path / "ids.txt", "--json").out)
    assert (gone["documents"], gone["deleted"]) == (1, 4)
    assert search(quiver, index) == {"d1"}
    compacted = json.loads(quiver("index", "compact", index, "--json").out)
    assert (compacted["documents"], compacted["deleted"], len(compacted["segments"])) == (1, 0, 1)
    assert search(quiver, index) == {"d1"}
    for arguments, message in (
        (("delete", index, "d9"), "document 'd9' is not in this index"),
        (("delete", index), "pass the ids of the documents"),
    ):
        done = quiver("index", *arguments)
        assert done.code == 2
        assert message in done.err
        assert done.err.count("\n") == 1


def test_documents_that_match_a_condition_are_deleted(quiver: Callable[..., Any], index: Path) -> None:
    nothing = json.loads(quiver("index", "delete", index, "--where", "year > 3000", "--json").out)
    assert nothing["documents"] == 3
    done = quiver("index", "delete", index, "d1", "--where", "year >= 2000", "--where", "NOT array_contains(tags, 'air')", "--json")
    assert done.code == 0, done.err
    assert search(quiver, index) == {"d2"}
    wrong = quiver("index", "delete", index, "--where", "yaer = 1")
    assert (wrong.code, "did you mean 'year'" in wrong.err, search(quiver, index)) == (2, True, {"d2"})


def test_search_is_restricted_by_filters_and_ids(quiver: Callable[..., Any], index: Path, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("d1\nd3\nunknown\n")
    assert search(quiver, index, "--filter", "year>=2005") == {"d2", "d3"}
    assert search(quiver, index, "--filter", "year>=2005", "--filter", "array_contains(tags, 'search')", "--effort", "exact") == {"d3"}
    assert search(quiver, index, "--filter", "year IN (1999, 2005)", "--no-verify") == {"d1", "d2"}
    assert search(quiver, index, "--ids", tmp_path / "ids") == {"d1", "d3"}
    assert search(quiver, index, "--ids", tmp_path / "ids", "--filter", "NOT array_contains(tags, 'air')") == {"d3"}
    hits = json.loads(quiver("search", index, "wings", "--filter", "year = 1999", "--json").out)
    assert hits[0]["metadata"] == {"year": 1999, "tags": ["animal", "air"]}
    info = json.loads(quiver("index", "info", index, "--json").out)
    assert info["fields"] == {"tags": "string[]", "year": "integer"}
    unknown = "no document has the field 'color' to filter by; there are tags (list of strings), year (integer)"
    for option, message in (("color = 'red'", unknown), ("year", "year is an integer, not a condition")):
        done = quiver("search", index, "wings", "--filter", option)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert message in done.err


def test_damage_is_reported_and_repaired(quiver: Callable[..., Any], index: Path, tmp_path: Path) -> None:
    done = quiver("index", "check", index)
    assert (done.code, done.out) == (0, "generation 1: intact\n")
    texts = next(index.glob("segments/*/texts.arrow"))
    whole = texts.read_bytes()
    texts.write_bytes(bytes(len(whole)))
    hits = json.loads(quiver("search", index, "wings", "--json").out)
    assert ["texts.arrow" in hit["text_error"] for hit in hits] == [True] * 3
    for option, said in (("--encode", "3 documents encoded again"), ("--no-encode", "3 documents lost: d1")):
        assert said in quiver("index", "repair", index, "--dry-run", option).out
    texts.write_bytes(whole)
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps({"_id": "d4", "text": "more of the sea"}) + "\n")
    assert quiver("index", "add", index, more).code == 0
    damaged = index / "segments" / "s-000000000002-0000" / "ids.arrow"
    damaged.write_bytes(b"d5")
    done = quiver("index", "check", index)
    assert done.code == 1
    assert "generation 1: intact\ngeneration 2: damaged" in done.out
    assert str(damaged) in done.out
    report = quiver("index", "check", index, "--json")
    assert report.code == 1
    assert json.loads(report.out)["whole"] is False
    done = quiver("search", index, "wings")
    assert done.code == 2
    assert "quiver index repair" in done.err
    done = quiver("index", "repair", index)
    assert done.code == 0, done.err
    assert "generation 3 keeps 4 of 4 documents of generation 2" in done.out  # the id is a part of the stored text, too
    assert search(quiver, index) == {"d1", "d2", "d3", "d4"}
    again = json.loads(quiver("index", "repair", index, "--json").out)
    assert (again["problems"], again["documents"]) == ([], 4)
    assert "intact, nothing to repair" in quiver("index", "repair", index).out


def test_options_choose_fields_texts_and_titles(quiver: Callable[..., Any], model: Path, corpus: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    done = quiver("index", "build", corpus, "--model", model, "--out", index, "--no-text", "--no-title", "--field", "year", "--json")
    assert done.code == 0, done.err
    info = json.loads(done.out)
    assert (list(info["fields"]), info["policy"]) == (
        ["year"],
        {"use_title": False, "separator": " ", "store_text": False, "fields": ["year"], "types": {"year": "integer"}},
    )
    hits = json.loads(quiver("search", index, "wings", "--filter", "year<2000", "--json").out)
    assert [list(hit) for hit in hits] == [["rank", "id", "score", "effort"]]


@pytest.fixture
def lists(quiver: Callable[..., Any], model: Path, tmp_path: Path) -> Path:
    """An index of an approximate engine that has not been measured."""
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"_id": f"d{number}", "text": f"bird {number} of the sea"}) + "\n" for number in range(60)))
    options = ("--engine", "ivf-dense:nlist=4", "--no-calibrate")
    done = quiver("index", "build", path, "--model", model, "--out", tmp_path / "lists", *options)
    assert done.code == 0, done.err
    assert "not measured" in done.out
    return tmp_path / "lists"


def test_calibrate_prints_the_search_parameters_that_search_chooses_from(quiver: Callable[..., Any], lists: Path, tmp_path: Path) -> None:
    done = quiver("search", lists, "sea", "--target-recall", 0.9)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "recall was not measured; run quiver index calibrate" in done.err
    shown = quiver("index", "calibrate", lists, "-k", 10, "-k", 20, "--count", 20)
    assert shown.code == 0, shown.err
    for word in ("search parameters", "recall", "p50 (ms)", "fast", "balanced", "exact", "nprobe=4", "exhaustive"):
        assert word in shown.out
    (tmp_path / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": f"q{each}", "text": f"the sea {each}"}) + "\n" for each in range(12))
    )
    table = json.loads(quiver("index", "calibrate", lists, "--queries", tmp_path / "queries.jsonl", "-k", 5, "--json").out)
    assert (table["origin"], table["documents"], [each["k"] for each in table["tables"]]) == ("given", 60, [5])
    assert table["tables"][0]["queries"] == 12
    info = json.loads(quiver("index", "info", lists, "--json").out)
    assert (info["calibration"], info["operation"], info["generation"]) == (table, "calibrate", 3)
    assert list(info["presets"]) == ["exact", "balanced", "fast"]
    assert info["presets"]["balanced"]["nprobe"] == 4
    shown = quiver("index", "info", lists)
    assert "presets for 5 results, measured with 12 queries on 60 documents" in " ".join(shown.out.split())
    assert "1.000 (1.000-1.000)" in shown.out
    for arguments, message in (
        (("-k", 2), "-k must be at least 5"),
        (("--model", "somewhere"), "--model encodes the queries of --queries"),
        (("-k", 2, "--queries", tmp_path / "none.jsonl"), "none.jsonl"),
    ):
        done = quiver("index", "calibrate", lists, *arguments)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert message in done.err


def test_search_reports_the_effort_used(quiver: Callable[..., Any], lists: Path, index: Path) -> None:
    assert quiver("index", "calibrate", lists, "-k", 10, "--count", 15).code == 0
    info = json.loads(quiver("index", "info", lists, "--json").out)
    (table,) = info["calibration"]["tables"]
    reaching = [point for point in table["points"] if point["low"] >= 0.8]
    wanted = min(reaching, key=lambda point: point["p50_ms"])["search_params"]
    hits = json.loads(quiver("search", lists, "the sea", "--target-recall", 0.8, "--json").out)
    assert [hit["effort"] for hit in hits] == [{"lists": wanted}] * 10
    hits = json.loads(quiver("search", lists, "the sea", "--effort", "exact", "--json").out)
    assert hits[0]["effort"]["lists"]["exhaustive"] is True
    hits = json.loads(quiver("search", lists, "the sea", "--json").out)
    assert hits[0]["effort"]["lists"] == info["presets"]["balanced"]  # exhaustive where that was the fastest that reached the recall
    assert json.loads(quiver("search", index, "wings", "--target-recall", 0.9, "--json").out)[0]["effort"] == {"index": {}}
    for arguments, message in (
        (("--target-recall", 0.9, "--effort", "fast"), "exclude each other"),
        (("--target-recall", 0), "must be > 0 and <= 1"),
        (("--target-recall", 95), "must be > 0 and <= 1"),
        (("--target-recall", 0.9, "-k", 50), "up to 10 hits, not for 50"),
    ):
        done = quiver("search", lists, "the sea", *arguments)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert message in done.err


def test_options_of_a_model_are_refused_for_an_index_of_words(quiver: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    words = tmp_path / "words"
    assert quiver("index", "build", data, "--model", "bm25", "--out", words).code == 0
    commands = (
        ("index", "add", words, data, "--replace", "--device", "cpu"),
        ("index", "refresh", words, data, "--batch-tokens", "8"),
        ("search", words, "birds", "--device", "cpu"),
    )
    for command in commands:
        done = quiver(*command)
        assert (done.code, done.err.count("\n"), "remove" in done.err) == (2, 1, True), command
    assert quiver("search", words, "birds").code == 0
