"""The Markdown report: golden tables, and the notes that readers need."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from quiver.eval.report.formats import render_markdown
from quiver.eval.report.retrieval import results_report
from quiver.eval.results import CollectionResult, Results

MakeScored = Callable[..., CollectionResult]
MakeResults = Callable[..., Results]


def render(results: list[Results]) -> str:
    return render_markdown(results_report(results))


def table(report: str, heading: str, *, number: int = 0) -> list[list[str]]:
    """Cells of a table after a heading, without the line under its header."""
    section = report[report.index(heading) :]
    found = re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)[number]
    header, _, *lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found.splitlines()]
    return [header, *lines]


def test_the_headline_table_has_the_expected_rows(make_scored: MakeScored, make_results: MakeResults) -> None:
    report = render(
        [
            make_results("out/models/alpha", make_scored("scifact", 0.65704, floor=0.6568539), make_scored("cosqa", 0.4, floor=0.284)),
            make_results("org/beta", make_scored("cosqa", 0.5, floor=0.284)),
        ]
    )
    assert table(report, "## nDCG@10") == [
        ["System", "Average (of data sets)", "scifact (test)", "cosqa (test)"],
        ["bm25", "47.04 (2 of 2)", "65.69 (61.7\N{EN DASH}69.7)", "28.40 (24.4\N{EN DASH}32.4)"],
        ["alpha", "**52.85** (2 of 2)", "**65.70** (60.7\N{EN DASH}70.7)", "40.00 (35.0\N{EN DASH}45.0)"],
        ["beta", "(1 of 2)", "", "**50.00** (45.0\N{EN DASH}55.0)"],
    ]


def test_a_group_counts_once_and_only_if_complete(make_scored: MakeScored, make_results: MakeResults) -> None:
    forums = [make_scored(f"forum-{letter}", score, group="forums", group_size=2) for letter, score in (("a", 0.2), ("b", 0.4))]
    report = render(
        [make_results("alpha", make_scored("scifact", 0.6), *forums), make_results("beta", make_scored("scifact", 0.5), forums[0])]
    )
    assert [row[:2] + row[3:] for row in table(report, "## nDCG@10")] == [
        ["System", "Average (of data sets)", "forums (mean of 2)"],
        ["alpha", "45.00 (2 of 2)", "30.00"],
        ["beta", "(1 of 2)", "(1 of 2)"],
    ]
    assert "### The parts of forums, which counts once, as their mean" in report
    assert table(report, "### forum-b (test)", number=1)[1][:2] == ["alpha", "40.00 (35.0\N{EN DASH}45.0)"]


def test_all_measures_of_a_collection_are_listed(make_scored: MakeScored, make_results: MakeResults) -> None:
    report = render([make_results("alpha", make_scored("scifact", 0.5, floor=0.4))])
    assert table(report, "### scifact (test)", number=1) == [
        ["System", "nDCG@10", "MAP", "MRR@10", "Recall@10", "Recall@100", "Recall@1000", "P@10", "Judged@10 (percent)"],
        ["bm25", "40.00 (36.0\N{EN DASH}44.0)", *(f"**{each}**" for each in ("25.00", "40.00", "60.00", "70.00", "80.00", "10.00")), ""],
        [
            *("alpha", "**50.00** (45.0\N{EN DASH}55.0)"),
            *(f"**{each}**" for each in ("25.00", "40.00", "60.00", "70.00", "80.00", "10.00")),
            "12.5",
        ],
    ]
    values = dict(table(report, "### scifact (test)")[1:])
    assert (values["Documents"], values["Judged queries"], values["Judgements"], values["Licence"]) == ("5,183", "300", "339", "CC BY 4.0")
    assert table(report, "## Protocol", number=1)[1] == [
        *("scifact.test", "alpha", "1,000", "yes", "no", "out", "1,234 (23.8%)", "7 (2.3%)", "2", "1", "12.5")
    ]
    assert table(report, "## Indexes")[1] == [
        *("scifact.test", "alpha", "exact (similarity cosine)", "100.00", "100.00", "3.0", "0.125", "4,321 (83.4%)")
    ]
    assert table(report, "## Time")[1] == ["scifact.test", "alpha", "12.34", "", "", "0.56", "", "", "12.90", "0.00"]


def test_worst_queries_show_the_first_result_and_the_best_relevant_document(make_scored: MakeScored, make_results: MakeResults) -> None:
    collection = make_scored("scifact", 0.5)
    empty = replace(collection.worst[0], query="q|2", text="word " * 100, found=(), wanted=collection.worst[0].wanted[1:], relevant=1)
    report = render([make_results("alpha", replace(collection, worst=(collection.worst[0], empty)))])
    first, second = table(report, "#### alpha: 2 worst queries")[1:]
    assert first == [
        "q1",
        r"what \| is \<b>it\</b>",
        "nDCG@10 0.00, 4 relevant documents",
        r"d9, rank 1, score 0.7500, not judged: not \*this\*",
        "d1, rank 37, score 0.2500, ✓ grade 2: but this",
    ]
    assert second[0] == r"q\|2"
    assert second[1].endswith("…")
    assert len(second[1]) == 100
    assert second[3:] == ["nothing", "d2, not in the first 1,000, ✓ grade 1: or this"]
