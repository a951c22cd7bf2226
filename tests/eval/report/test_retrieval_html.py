"""The HTML report: its content, escaping of foreign texts, and no external resources."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from html.parser import HTMLParser
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.report.formats import render_html
from quiver.eval.report.retrieval import results_report
from quiver.eval.results import Results

Evaluated = Callable[..., list[Results]]

VOID = {"meta", "wbr", "link", "img", "br", "hr", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            each
            for each in self.walk()
            if each.tag == tag and all(value in (each.attributes.get(name) or "").split() for name, value in wanted.items())
        ]

    def walk(self) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child.walk()

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)


class Tree(HTMLParser):
    """Elements of a page; an element that is not closed where it should be is an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = Element("root", {})
        self.open = [self.root]
        self.feed(page)
        self.close()
        assert self.open == [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(page: str) -> Element:
    return Tree(page).root


def section(page: Element, name: str) -> Element:
    return next(each for each in page.all("section") if each.attributes.get("id") == name)


@pytest.fixture(scope="module")
def html(evaluated: Evaluated) -> str:
    """The report of all systems."""
    return render_html(results_report(evaluated()))


@pytest.fixture(scope="module")
def page(html: str) -> Element:
    return parse(html)


def test_every_score_links_to_its_command(page: Element, evaluated: Evaluated) -> None:
    results = evaluated()
    anchors = {
        each.attributes["id"]: each.all("code")[0].text
        for each in page.all("section", class_="sub")
        if (each.attributes.get("id") or "").startswith("result-")
    }
    assert [anchors[f"result-{place}"] for place in range(1, 5)] == [result.provenance.command for result in results]
    head, *rows = section(page, "scores").all("table")[0].all("tr")
    assert len(head.all("th")) == 9
    linked = [[each.attributes["href"] for each in row.all("a")] for row in rows]
    # The row of BM25 comes from its own result, not from the first result that has it as a baseline.
    assert linked == [["#result-4"] * 6, ["#result-1"] * 6, ["#result-2"] * 6, ["#result-3"] * 6]


@pytest.fixture(scope="module")
def poisoned_html(evaluated: Evaluated, hostile: str) -> str:
    return render_html(results_report([_poison(result, hostile) for result in evaluated()], title=hostile))


def test_hostile_texts_are_escaped(page: Element, poisoned_html: str) -> None:
    poisoned = parse(poisoned_html)
    assert len(poisoned.all("script")) == 1
    assert not poisoned.all("img")
    assert {each.tag for each in poisoned.walk()} == {each.tag for each in page.walk()}
    known = {(each.tag, name) for each in page.walk() for name in each.attributes}
    assert {(each.tag, name) for each in poisoned.walk() for name in each.attributes} == known
    assert "{{ 7*7 }}" in poisoned.text
    assert "49&" not in poisoned.text


def test_ids_are_unique_and_links_stay_on_the_page(page: Element) -> None:
    ids = [each.attributes["id"] for each in page.walk() if "id" in each.attributes]
    assert len(set(ids)) == len(ids)
    targets = [each.attributes["href"] or "" for each in page.walk() if "href" in each.attributes]
    targets += [f"#{name}" for each in page.walk() for name in re.findall(r"url\(#([^)]+)\)", str(each.attributes))]
    assert len(targets) > 100
    assert {each.removeprefix("#") for each in targets} <= set(ids)
    assert not [each for each in page.walk() if "src" in each.attributes]


def test_the_page_allows_only_its_own_script(html: str, page: Element) -> None:
    script = page.all("script")[0].text
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(each for each in page.all("meta") if each.attributes.get("http-equiv") == "Content-Security-Policy")
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in (policy.attributes["content"] or "")
    assert not re.search(r"https?://|@import|url\((?!#)|//cdn", html)


def test_without_jinja2_the_error_names_the_install_command(evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError, match=r"jinja2: pip install 'quiver-retrieval\[eval\]'"):
        render_html(results_report(evaluated()))


def _poison(value: Any, hostile: str, name: str = "") -> Any:
    """The value with every text in it replaced by a hostile one, except names of kinds."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _poison(getattr(value, each.name), hostile, each.name) for each in fields(value)})
    if isinstance(value, tuple):
        return tuple(_poison(each, hostile) for each in value)
    if isinstance(value, Mapping):
        free = name in ("parameters", "versions")
        return {hostile + key if free else key: _poison(each, hostile) for key, each in value.items()}
    return hostile + value if isinstance(value, str) and name not in ("kind", "date", "library", "dtype") else value
