"""The report: golden tables, and what a reader must be told beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.report.markdown import render
from quiver.eval.results import CollectionResult, IndexUsed, Results

MakeScored = Callable[..., CollectionResult]
MakeResults = Callable[..., Results]


def table(report: str, heading: str, *, number: int = 0) -> list[list[str]]:
    """The cells of a table behind a heading, without the line under its header."""
    section = report[report.index(heading) :]
    found = re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)[number]
    header, _, *lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found.splitlines()]
    return [header, *lines]


def test_the_headline_table(make_scored: MakeScored, make_results: MakeResults) -> None:
    report = render(
        [
            make_results("out/models/alpha", make_scored("scifact", 0.65704, floor=0.6568539), make_scored("cosqa", 0.4, floor=0.284)),
            make_results("org/beta", make_scored("cosqa", 0.5, floor=0.284)),
        ]
    )
    assert table(report, "## nDCG@10") == [
        ["System", "scifact.test", "cosqa.test", "Average", "Data sets"],
        ["bm25", "65.69", "28.40", "47.04", "2 of 2"],
        ["models/alpha", "65.70", "40.00", "52.85", "2 of 2"],
        ["org/beta", "", "50.00", "", "1 of 2"],
    ]


def test_a_group_counts_once_and_only_when_whole(make_scored: MakeScored, make_results: MakeResults) -> None:
    forums = [make_scored(f"forum-{letter}", score, group="forums", group_size=2) for letter, score in (("a", 0.2), ("b", 0.4))]
    report = render(
        [make_results("alpha", make_scored("scifact", 0.6), *forums), make_results("beta", make_scored("scifact", 0.5), forums[0])]
    )
    assert table(report, "## nDCG@10") == [
        ["System", "scifact.test", "forums", "Average", "Data sets"],
        ["alpha", "60.00", "30.00", "45.00", "2 of 2"],
        ["beta", "50.00", "", "", "1 of 2"],
    ]
    assert "counts once and is blank unless it is whole: forums of 2." in report
    assert table(report, "## forum-b, split test")[1][:2] == ["alpha", "40.00"]


def test_all_measures_of_a_collection(make_scored: MakeScored, make_results: MakeResults) -> None:
    report = render([make_results("alpha", make_scored("scifact", 0.5, floor=0.4))])
    assert table(report, "## scifact, split test") == [
        ["System", "nDCG@10", "Interval", "MAP", "MRR@10", "Recall@10", "Recall@100", "Recall@1000", "P@10", "Judged@10"],
        ["bm25", "40.00", "36.00 to 44.00", "25.00", "40.00", "60.00", "70.00", "80.00", "10.00", ""],
        ["alpha", "50.00", "45.00 to 55.00", "25.00", "40.00", "60.00", "70.00", "80.00", "10.00", "12.50"],
    ]
    assert "5,183 documents (1 without text), 300 judged queries, 339 judgements. Licence: CC BY 4.0. Revision: cccccc" in report
    assert table(report, "## scifact, split test", number=1)[1] == [
        *("alpha", "1000", "yes", "no", "out", "2", "1,234", "7", "4,321", "encode documents 12.3, search 0.6"),
    ]
    assert table(report, "## scifact, split test", number=2) == [
        ["System", "Index", "Overlap@10", "Overlap@100", "MiB", "ms a query"],
        ["alpha", "exact (similarity cosine)", "1.0000", "1.0000", "3.0", "0.125"],
    ]


def test_what_is_not_known_is_blank_or_said(make_scored: MakeScored, make_results: MakeResults) -> None:
    measures = {"ndcg@10": 0.5, "mrr@10": 0.4}
    bare = make_scored("scifact", 0.5, licence=None, revision=None, index=IndexUsed("bm25", {}), measures=measures, in_domain=True)
    report = render([make_results("alpha", bare)])
    assert "Licence: not known. Revision: none, a local folder." in report
    assert table(report, "## scifact, split test")[1] == ["alpha", "50.00", "45.00 to 55.00", "", "40.00", "", "", "", "", "12.50"]
    assert table(report, "## scifact, split test", number=1)[1][4] == "in"
    assert table(report, "## scifact, split test", number=2)[1] == ["alpha", "bm25", "", "", "", ""]


def test_worst_queries_say_what_was_found_and_what_was_wanted(make_scored: MakeScored, make_results: MakeResults) -> None:
    collection = make_scored("scifact", 0.5)
    empty = replace(collection.worst[0], query="q|2", text="word " * 100, found=(), wanted=collection.worst[0].wanted[1:], relevant=1)
    report = render([make_results("alpha", replace(collection, worst=(collection.worst[0], empty)))])
    first, second = table(report, "### Worst queries of alpha on scifact.test")[1:]
    assert first == [
        "q1",
        r"what \| is \<b>it\</b>",
        "0.00",
        r"d9, not judged, rank 1: not \*this\*",
        "d1, grade 2, rank 37: but this (and 3 more)",
    ]
    assert second[0] == r"q\|2"
    assert second[1].endswith("…")
    assert len(second[1]) == 100
    assert second[3:] == ["nothing", "d2, grade 1, not found: or this"]


def test_provenance_holds_the_exact_command(make_scored: MakeScored, make_results: MakeResults) -> None:
    command = "quiver evaluate --model 'a|b' --data `pwd`/*_x ```"
    report = render([make_results("alpha", make_scored("scifact", 0.5), command=command)])
    assert f"````sh\n{command}\n````" in report
    assert "| Versions | python 3.11, quiver 0.1, torch 2.11 |" in report
    assert "without a command line" in render([make_results("alpha", make_scored("scifact", 0.5), command=None)])


def test_the_protocol_says_what_was_done(make_scored: MakeScored, make_results: MakeResults) -> None:
    excluding = make_scored("arguana", 0.5, floor=0.4, exclude_self=True, k=100)
    report = render([make_results("alpha", excluding, make_scored("scifact", 0.5))])
    protocol = report[report.index("## Protocol") : report.index("## Systems")]
    for said in (
        "first 100 or 1,000",
        "dropped before the cut in arguana.test",
        "10,000 bootstrap resamples",
        "| Baseline bm25 | k1 0.9, stemmer None",
    ):
        assert said in protocol


def test_equal_results_give_equal_bytes(make_scored: MakeScored, make_results: MakeResults) -> None:
    results = [make_results(name, make_scored("scifact", 0.5, floor=0.4)) for name in ("alpha", "beta")]
    assert render(results) == render(list(results))
    assert render(results).endswith("\n")
    assert all(line == line.rstrip() for line in render(results).splitlines())


def test_nothing_to_report() -> None:
    with pytest.raises(InputError, match="nothing to report"):
        render([])
