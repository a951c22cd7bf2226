"""The report: a golden page, and the cases in which a table would mislead."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from encoder.errors import InputError
from eval.evaluation import evaluate
from eval.provenance import Provenance
from eval.report.markdown import render, write_report
from eval.results import (
    Baseline,
    CollectionResult,
    IndexUsed,
    Results,
    System,
    Truncated,
    WorstQuery,
)

MEASURES = {"ndcg@10": 0.5, "map": 0.25, "mrr@10": 0.4, "recall@10": 0.6, "recall@100": 0.7, "recall@1000": 0.8, "p@10": 0.1}


def _collection(name: str, score: float, *, floor: float | None = None) -> CollectionResult:
    return CollectionResult(
        name=name,
        split="test",
        documents=5183,
        queries=300,
        judgements=339,
        use_title=True,
        exclude_self=False,
        k=1000,
        measures=MEASURES | {"ndcg@10": score},
        unanswered=2,
        truncated=Truncated(documents=1234, queries=7),
        empty_texts=1,
        index=IndexUsed("exact", {"similarity": "cosine"}),
        seconds={"encode_documents": 12.34, "search": 0.56},
        run=None,
        per_query=None,
        data_sha256=f"{name:0<64}",
        worst=(WorstQuery("q1", "what | is\n<b>it</b>", 0.0, None, ("d1", "d2", "d3", "d4")),),
        baselines=() if floor is None else (Baseline("bm25", {"k1": 0.9, "stemmer": None}, MEASURES | {"ndcg@10": floor}, None),),
    )


def _results(source: str, *collections: CollectionResult, fingerprint: str = "f" * 64, command: str | None = "quiver evaluate") -> Results:
    system = System(source, "dense", fingerprint, 384, "cosine", 256, 256)
    origin = Provenance(command, "2030-01-02T03:04:05+00:00", {"torch": "2.11", "python": "3.11"}, "Linux", 2)
    return Results(system, collections, origin)


def _rows(report: str, heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading."""
    section = report[report.index(heading) :]
    lines = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[0].splitlines()]


def test_the_headline_table() -> None:
    report = render(
        [
            _results("out/models/alpha", _collection("scifact", 0.65704, floor=0.6568539), _collection("cosqa", 0.4, floor=0.284)),
            _results("org/beta", _collection("cosqa", 0.5, floor=0.284)),
        ]
    )
    assert _rows(report, "## nDCG@10") == [
        ["System", "scifact.test", "cosqa.test", "Average", "Collections"],
        ["---", "---", "---", "---", "---"],
        ["bm25", "65.69", "28.40", "47.04", "2 of 2"],
        ["models/alpha", "65.70", "40.00", "52.85", "2 of 2"],
        ["org/beta", "", "50.00", "", "1 of 2"],
    ]


def test_all_measures_of_a_collection() -> None:
    report = render([_results("alpha", _collection("scifact", 0.5))])
    assert _rows(report, "## scifact, split test") == [
        ["System", "nDCG@10", "MAP", "MRR@10", "Recall@10", "Recall@100", "Recall@1000", "P@10"],
        ["---"] * 8,
        ["alpha", "50.00", "25.00", "40.00", "60.00", "70.00", "80.00", "10.00"],
    ]
    assert "5,183 documents (1 without text), 300 judged queries, 339 judgements." in report
    assert "| alpha | 1000 | yes | no | 2 | 1,234 | 7 | encode documents 12.3, search 0.6 |" in report


def test_worst_queries_are_escaped_and_shortened() -> None:
    collection = _collection("scifact", 0.5)
    long = replace(collection.worst[0], query="q|2", text="word " * 100, first="d9", wanted=("d1",))
    report = render([_results("alpha", replace(collection, worst=(collection.worst[0], long)))])
    assert r"| q1 | what \| is \<b>it\</b> | 0.00 | nothing | d1, d2, d3 and 1 more |" in report
    row = next(line for line in report.splitlines() if line.startswith(r"| q\|2 |"))
    assert row.endswith("… | 0.00 | d9 | d1 |")
    assert len(row) < 140


def test_results_of_one_system_share_a_row() -> None:
    report = render([_results("alpha", _collection("scifact", 0.6)), _results("alpha", _collection("cosqa", 0.4))])
    assert _rows(report, "## nDCG@10")[2:] == [["alpha", "60.00", "40.00", "50.00", "2 of 2"]]


def test_bm25_as_a_system_is_the_baselines_row() -> None:
    bm25 = replace(_results("bm25", _collection("scifact", 0.6), _collection("cosqa", 0.3)), system=System("bm25", "bm25"))
    report = render([_results("alpha", _collection("scifact", 0.7, floor=0.6)), bm25])
    assert _rows(report, "## nDCG@10")[2:] == [["bm25", "60.00", "30.00", "45.00", "2 of 2"], ["alpha", "70.00", "", "", "1 of 2"]]


@pytest.mark.parametrize(
    ("sources", "fingerprints", "labels"),
    [
        (("a/one", "/x/a/two"), ("1" * 64, "2" * 64), ["a/one", "a/two"]),
        (("x/a/model", "y/a/model"), ("1" * 64, "2" * 64), ["x/a/model", "y/a/model"]),
        (("a/model", "a/model"), ("1" * 64, "2" * 64), ["a/model (111111111111)", "a/model (222222222222)"]),
    ],
)
def test_systems_are_told_apart(sources: tuple[str, str], fingerprints: tuple[str, str], labels: list[str]) -> None:
    results = [
        _results(source, _collection("scifact", 0.5), fingerprint=fingerprint)
        for source, fingerprint in zip(sources, fingerprints, strict=True)
    ]
    assert [row[0] for row in _rows(render(results), "## nDCG@10")[2:]] == labels


def test_the_protocol_says_what_was_done() -> None:
    excluding = replace(_collection("arguana", 0.5, floor=0.4), exclude_self=True, use_title=False, k=100)
    report = render([_results("alpha", excluding, _collection("scifact", 0.5))])
    protocol = report[report.index("## Protocol") : report.index("## Systems")]
    for said in (
        "the first 100 or 1000 are kept",
        "scores 0",
        "document id, descending",
        "dropped before the cut in arguana.test",
        "Titles are left out in arguana.test",
        "bm25 has the settings k1 0.9, stemmer None",
    ):
        assert said in protocol


def test_provenance_holds_the_exact_command() -> None:
    command = "quiver evaluate --model 'a|b' --data `pwd`/*_x ```"
    report = render([_results("alpha", _collection("scifact", 0.5), command=command)])
    assert f"````sh\n{command}\n````" in report
    assert "| Versions | python 3.11, torch 2.11 |" in report
    assert "without a command line" in render([_results("alpha", _collection("scifact", 0.5), command=None)])


def test_equal_results_give_equal_bytes() -> None:
    results = [_results("alpha", _collection("scifact", 0.5, floor=0.4)), _results("beta", _collection("scifact", 0.5, floor=0.4))]
    assert render(results) == render(list(results))
    assert render(results).endswith("\n")
    assert all(line == line.rstrip() for line in render(results).splitlines())


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (_results("beta", replace(_collection("scifact", 0.5), data_sha256="e" * 64)), r"scifact\.test is other data for beta"),
        (_results("beta", _collection("scifact", 0.5, floor=0.3)), r"bm25 has different scores on scifact\.test"),
        (_results("alpha", _collection("scifact", 0.5)), r"alpha has two results for scifact\.test"),
    ],
)
def test_what_cannot_be_compared_is_refused(second: Results, message: str) -> None:
    with pytest.raises(InputError, match=message):
        render([_results("alpha", _collection("scifact", 0.5, floor=0.4)), second])


def test_nothing_to_report() -> None:
    with pytest.raises(InputError, match="nothing to report"):
        render([])


def test_a_report_from_folders(make_collection: Callable[..., Path], tmp_path: Path) -> None:
    evaluate("bm25", make_collection(), out=tmp_path / "bm25", command="quiver evaluate --model bm25")
    write_report([tmp_path / "bm25"], tmp_path / "report.md")
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| bm25 |" in report
    assert "quiver evaluate --model bm25" in report
    with pytest.raises(InputError, match="did not finish"):
        write_report([tmp_path / "bm25", tmp_path / "other"], tmp_path / "second.md")
    assert not (tmp_path / "second.md").exists()
