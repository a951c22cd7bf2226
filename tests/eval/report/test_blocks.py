"""Blocks in every format: escaped texts, equal marks, and figures in the colours of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.report.charts import Bar, Key, bar_chart
from quiver.eval.report.formats import (
    Cell,
    Code,
    Column,
    Details,
    Example,
    Examples,
    Excerpt,
    Figure,
    Gallery,
    Paragraph,
    Properties,
    Report,
    Row,
    Section,
    Span,
    Table,
    check_format,
    render_html,
    render_markdown,
    write,
)

KEY = Key("A", 0, "bm25")
COLUMNS = (Column("System", numeric=False), Column("nDCG@10", "points", ranked=True))
SCORES = Table(
    "Scores",
    COLUMNS,
    (Row((Cell("bm25", key=KEY), Cell("65.70", 0.657, "60-70", "where"))), Row((Cell("a<b"), Cell("61.20", 0.612)), group="other")),
    "Higher is better.",
    "scores",
)
FIGURE = Figure("Bars", lambda: bar_chart([Bar(KEY, 0.657, 0.6, 0.7)], 0.7), "bm25 65.70", file="bars.svg")
REPORT = Report(
    "A *title*",
    (
        Section("Scores", (Paragraph(("Text, ", Span("code", "code"), ".")), SCORES, Gallery((FIGURE,), (KEY,))), "scores"),
        Section("Where", (Details("More", (Properties({"Threads": "2"}),)), Code("quiver x")), "where", "note"),
    ),
    ("Now. ", Span("Not finished", "poor")),
)


def test_markdown_shows_every_block() -> None:
    assert render_markdown(REPORT) == (
        "# A \\*title\\*\n\nNow. **Not finished**\n\n## Scores\n\nText, `code`.\n\n"
        "| System | nDCG@10 (points) |\n| --- | --- |\n| bm25 | **65.70** (60-70) |\n| a\\<b | 61.20 |\n\nHigher is better.\n\n"
        "![bm25 65.70](bars.svg)\n\n## Where (note)\n\n### More\n\n|  |  |\n| --- | --- |\n| Threads | 2 |\n\n```sh\nquiver x\n```\n"
    )


def test_html_shows_every_block_and_a_chart_in_the_colours_of_the_page() -> None:
    page = render_html(REPORT)
    assert page == render_html(REPORT)
    assert page.startswith("<!doctype html>\n")
    for part in ('href="#where"', "a&lt;b", "<summary><bdi>More</bdi></summary>", "65.70</a>", "<code>quiver x</code>", "var(--ink)"):
        assert part in page
    assert "bars.svg" not in page
    assert "#20242a" not in page[page.index("<body>") :]


def test_examples_are_cards_on_a_page_and_rows_in_markdown() -> None:
    found = Excerpt((Span("rank 1", "mark"), Span("grade 1", "good")), "d1", "a document", (("query", "document", 0.5),))
    examples = Examples((Example("q1", "a <query>", (Span("nDCG@10 0.00", "mark"),), {"Found": (found, found), "Wanted": ()}),))
    report = Report("Examples", (examples,))
    assert "| q1 | a \\<query> | nDCG@10 0.00 | d1, rank 1, grade 1: a document | nothing |" in render_markdown(report)
    page = render_html(report)
    assert '<span class="mark good">grade 1</span>' in page
    assert 'style="--shade:17%"' in page
    assert "a &lt;query&gt;" in page


@pytest.mark.parametrize(
    ("printed", "marks"),
    [
        (["1.0", "3.0", "2.0"], ["", "best", "second"]),
        (["3.0", "3.0", ""], ["best", "best", ""]),
        (["3.0", "", ""], ["", "", ""]),
        (["-1.0", "-2.0", "n/a"], ["best", "second", ""]),
    ],
)
def test_the_best_and_the_second_best_figures_are_marked_as_printed(printed: list[str], marks: list[str]) -> None:
    rows = tuple(Row((Cell("a"), Cell(text))) for text in printed)
    assert [row[1] for row in Table("t", COLUMNS, rows).marks()] == marks


def test_write_chooses_the_format_by_suffix_and_puts_figures_beside_markdown(tmp_path: Path) -> None:
    for name in ("report.md", "report.html", "report.tex", "report"):
        write(REPORT, tmp_path / name)
    assert (tmp_path / "report").read_text(encoding="utf-8") == (tmp_path / "report.md").read_text(encoding="utf-8")
    assert (tmp_path / "bars.svg").read_text(encoding="utf-8").startswith("<svg ")
    with pytest.raises(InputError, match=r"must end in \.md, \.html, \.tex"):
        write(REPORT, tmp_path / "report.pdf")
    with pytest.raises(InputError, match=r"\.yaml"):
        check_format(tmp_path / "report.yaml")
