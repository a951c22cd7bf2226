"""The layouts of the paper as an HTML page: published and measured rows, and no external resources."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.report.formats import render_html
from quiver.eval.report.paper import paper_layouts, paper_report, shown
from quiver.eval.results import Results

Evaluated = Callable[..., list[Results]]
Tables = list[list[tuple[str, list[str]]]]


class Page(HTMLParser):
    """The tables of a page as rows with their class, and every tag and attribute of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: Tables = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.words = ""
        self._inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.add(tag)
        self.attributes |= named.keys()
        self.ids += [named["id"] or ""] if "id" in named else []
        self.targets += [named["href"] or ""] if "href" in named else []
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append((named.get("class") or "", []))
        elif tag in ("th", "td"):
            self.tables[-1][-1][1].append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag not in ("th", "td")

    def handle_data(self, data: str) -> None:
        self.words += data
        if self._inside:
            self.tables[-1][-1][1][-1] += data.strip()


@pytest.fixture(scope="module")
def results(evaluated: Evaluated) -> list[Results]:
    return evaluated()


def render_paper_html(results: list[Results], *, against: str | None = None) -> str:
    return render_html(paper_report(results, against=against))


def test_the_page_has_every_row_and_figure_of_the_layouts(results: list[Results]) -> None:
    layouts = paper_layouts(results, against="ModernBERT-base")
    page = Page(render_paper_html(results, against="ModernBERT-base"))
    assert len(page.tables) == len(layouts) == 4
    for table, layout in zip(page.tables, layouts, strict=True):
        (_, header), *body = table
        assert header == ["System", *layout.columns, "Measured"]
        for (_, cells), line in zip(body, layout.lines, strict=True):
            expected = [line.label, *(shown(line, cell) for cell in line.cells), line.measured]
            assert cells == [text or "\N{EN DASH}" for text in expected]
        for note in layout.notes:
            assert note in page.words


def test_published_rows_and_measured_ones_look_different(results: list[Results]) -> None:
    text = render_paper_html(results, against="ModernBERT-base")
    rows = {cells[0]: kind for kind, cells in Page(text).tables[0]}
    assert rows["ModernBERT-base"] == rows["BM25 (pyserini)"] == "published"
    assert rows["bm25"] == "measured"
    assert next(kind for label, kind in rows.items() if label.endswith("minus ModernBERT-base")) == "difference"
    assert re.search(r"\.published > \* \{ color: var\(--muted\)", text)


def test_the_page_loads_nothing_and_escapes_all_texts(results: list[Results], hostile: str) -> None:
    plain = Page(render_paper_html(results))
    text = render_paper_html(
        [replace(each, system=replace(each.system, source=f"{hostile}/{place}")) for place, each in enumerate(results)]
    )
    page = Page(text)
    assert (page.tags, page.attributes) == (plain.tags, plain.attributes)
    assert text.count("<script") == 1
    assert "{{ 7*7 }}" in page.words
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|url\(", text)
    assert "src" not in page.attributes
    assert len(set(page.ids)) == len(page.ids)
    assert {target.removeprefix("#") for target in page.targets} <= set(page.ids)
    assert text.encode("utf-8")


def test_equal_results_give_equal_bytes(results: list[Results]) -> None:
    page = render_paper_html(results)
    assert page == render_paper_html(list(results))
    assert page.startswith("<!doctype html>\n")
    assert page.endswith("</html>\n")


def test_a_row_that_the_paper_lacks_is_refused(results: list[Results]) -> None:
    with pytest.raises(InputError, match="no row 'ModernBERT'"):
        render_paper_html(results, against="ModernBERT")
