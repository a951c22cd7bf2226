"""The page in a real browser, at desktop and phone width, in the light and the dark theme."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiver.eval.report.formats import render_html
from quiver.eval.report.retrieval import results_report
from quiver.eval.results import Results

DESK, TELEPHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, evaluated: Callable[..., list[Results]]) -> Path:
    return _write(tmp_path_factory.mktemp("page") / "report.html", evaluated())


def _write(file: Path, results: list[Results], title: str = "Retrieval results") -> Path:
    file.write_text(render_html(results_report(results, title=title)), encoding="utf-8")
    return file


OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.open = true; });"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESK, TELEPHONE], ids=["desk", "telephone"])
def test_the_page_opens_from_a_file_without_console_messages(
    tab: Any, page: Path, tmp_path: Path, size: tuple[int, int], dark: bool
) -> None:
    tab.open(page.as_uri(), size, dark=dark)
    shot = tmp_path / "report.png"
    assert tab.screenshot(shot) == size
    assert shot.stat().st_size > 20_000
    tab.run(OPEN_ALL)
    assert tab.run("[document.documentElement.scrollWidth, document.body.scrollWidth]") == [size[0], size[0]]
    # On a telephone tables scroll, in a box; on a desk all of these fit.
    assert tab.run("[...document.querySelectorAll('.box')].some(each => each.scrollWidth > each.clientWidth)") is (size == TELEPHONE)
    paper = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (int(paper.split("(")[1].split(",")[0]) < 64) is dark
    assert tab.complaints() == []
    assert tab.requests() == [page.as_uri()]


# Every text of a chart must be inside the chart and not overlap another text.
CHARTS = """(() => {
  const faults = [];
  for (const svg of document.querySelectorAll('svg')) {
    const area = svg.viewBox.baseVal;
    const boxes = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBBox()]);
    boxes.forEach(([text, box], place) => {
      if (box.width === 0 && text) faults.push(`${text}: not drawn`);
      if (box.x < -0.1 || box.y < -0.1 || box.x + box.width > area.width + 0.1 || box.y + box.height > area.height + 0.1)
        faults.push(`${text}: cut`);
      for (const [other, second] of boxes.slice(place + 1)) {
        const across = Math.min(box.x + box.width, second.x + second.width) - Math.max(box.x, second.x);
        const down = Math.min(box.y + box.height, second.y + second.height) - Math.max(box.y, second.y);
        if (across > 0.1 && down > 0.1) faults.push(`${text} on ${other}`);
      }
    });
  }
  return [document.querySelectorAll('svg text').length, faults];
})()"""


@pytest.mark.parametrize(
    ("systems", "collections", "approximate"),
    [(1, 1, True), (4, 6, True), (4, 6, False), pytest.param(8, 30, True, marks=pytest.mark.slow)],
)
def test_labels_of_charts_are_complete_and_do_not_overlap(
    tab: Any, evaluated: Callable[..., list[Results]], tmp_path: Path, systems: int, collections: int, approximate: bool
) -> None:
    made = evaluated(systems=systems, collections=collections, approximate=approximate)
    named = [replace(each, collections=tuple(replace(one, worst=()) for one in each.collections)) for each in made]
    wide = [replace(each, system=replace(each.system, source=f"org/{'W' * 40}")) for each in named[:1]] + named[1:]
    tab.open(_write(tmp_path / "report.html", wide).as_uri(), TELEPHONE)
    tab.run(OPEN_ALL)
    texts, faults = tab.run(CHARTS)
    assert texts > 40 * collections
    assert faults == []


# WCAG 2.2, 1.4.3: contrast of every text with its background, lowest first.
CONTRAST = """(() => {
  const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const known = new Map();
  const pixel = colour => {
    if (!known.has(colour)) {
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = colour;
      context.fillRect(0, 0, 1, 1);
      known.set(colour, [...context.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(colour);
  };
  const linear = each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4;
  const light = colour => {
    const [r, g, b] = colour.slice(0, 3).map(each => linear(each / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let each = element; each; each = each.parentElement) {
      const colour = pixel(getComputedStyle(each).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest('script, style, title') || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const drawn = element instanceof SVGElement;
    const badge = element.classList.contains('letter') && element.parentElement.querySelector('.badge');
    const ground = badge ? pixel(getComputedStyle(badge).fill) : behind(drawn ? element.ownerSVGElement.parentElement : element);
    const [one, other] = [light(pixel(drawn ? style.fill : style.color)), light(ground)].sort((a, b) => b - a);
    found.push([(one + 0.05) / (other + 0.05), walker.currentNode.data.trim().slice(0, 40), element.outerHTML.slice(0, 80)]);
  }
  return [found.length, found.sort((a, b) => a[0] - b[0]).slice(0, 5)];
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_has_enough_contrast(tab: Any, evaluated: Callable[..., list[Results]], tmp_path: Path, dark: bool) -> None:
    tab.open(_write(tmp_path / "report.html", evaluated(systems=9, forums=False)).as_uri(), DESK, dark=dark)
    tab.run(OPEN_ALL)
    texts, worst = tab.run(CONTRAST)
    assert texts > 5_000
    assert worst[0][0] >= 4.5, worst


COLUMN = "[...document.querySelector('#scores table').tBodies[0].rows].map(row => row.cells[7].dataset.order ?? null)"
SORTED = "[...document.querySelector('#scores table').tHead.rows[0].cells].map(cell => cell.ariaSort)"


def test_a_column_sorts_by_keyboard(tab: Any, evaluated: Callable[..., list[Results]], tmp_path: Path) -> None:
    results = evaluated()
    lacking = replace(results[1], collections=tuple(each for each in results[1].collections if each.name != "designdocs_long"))
    tab.open(_write(tmp_path / "report.html", [results[0], lacking, *results[2:]]).as_uri(), DESK)
    first = tab.run(COLUMN)
    assert first.count(None) == 1
    scores = sorted((each for each in first if each is not None), key=float)
    tab.run("document.querySelector('#scores table').tHead.rows[0].cells[7].querySelector('button').focus()")
    for expected, direction in (([*scores[::-1], None], "descending"), ([*scores, None], "ascending"), (first, None)):
        tab.press("Enter")
        assert tab.run(COLUMN) == expected
        assert tab.run(SORTED) == [None] * 7 + [direction, None]
    assert tab.complaints() == []


@pytest.mark.parametrize("size", [DESK, TELEPHONE], ids=["desk", "telephone"])
def test_hostile_texts_run_no_script_and_do_not_change_the_layout(
    tab: Any, evaluated: Callable[..., list[Results]], hostile: str, tmp_path: Path, size: tuple[int, int]
) -> None:
    made = []
    for result in evaluated(systems=2, collections=2, forums=False):
        words = hostile.replace("\ud800", "") + "y" * 700
        collections = tuple(replace(each, name=f"{each.name}{words}", licence=words, revision=words) for each in result.collections)
        system = replace(result.system, source=result.system.source + words, query_prompt=words)
        made.append(replace(result, system=system, collections=collections, provenance=replace(result.provenance, command=words)))
    tab.open(_write(tmp_path / "report.html", made, title="y" * 700).as_uri(), size)
    tab.run(OPEN_ALL)
    assert tab.run("document.title") == "y" * 700
    assert tab.run("[document.scripts.length, document.images.length, document.documentElement.scrollWidth]") == [1, 0, size[0]]
    assert tab.run(CHARTS)[1] == []
    assert tab.complaints() == []
    assert len(tab.requests()) == 1


def test_the_content_security_policy_blocks_injected_scripts(tab: Any, page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "report.html"
    broken.write_text(
        page.read_text(encoding="utf-8").replace("<main>", "<main><script>document.title = 'owned'</script>"), encoding="utf-8"
    )
    tab.open(broken.as_uri(), DESK)
    assert tab.run("document.title") == "Retrieval results"
    assert any("Content Security Policy" in json.dumps(event) for event in tab.complaints())
