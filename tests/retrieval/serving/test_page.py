"""The HTML of the page: complete, without external parts, and with a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

from quiver.retrieval.models.bm25 import query_words
from quiver.retrieval.serving.page import content_security_policy, page_html


class Parts(HTMLParser):
    """Collects the attributes of elements, and the texts of style sheets and scripts."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {"style": [], "script": []}
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.texts:
            self.texts[self._inside].append(data)


def parts() -> Parts:
    found = Parts()
    found.feed(page_html())
    return found


def test_the_policy_allows_only_the_own_style_and_script() -> None:
    policy = dict(each.strip().split(" ", 1) for each in content_security_policy().split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    for tag in ("style", "script"):
        (text,) = parts().texts[tag]
        assert policy[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    (own,) = (value for tag, name, value in parts().attributes if (tag, name) == ("meta", "content") and "default-src" in value)
    assert own == content_security_policy().replace("; frame-ancestors 'none'", "")  # which only a header may say


def test_the_page_leaves_out_the_words_that_bm25_leaves_out() -> None:
    little, stop = ("".join(re.findall(r'"([a-z ]+)"', each)).split() for each in re.findall(r"new Set\(\((\"a an [^)]*)\)", page_html()))
    assert len(stop) == 33
    assert {word for word in {*little, *stop} if not query_words(word)} == set(stop)


def test_the_page_names_no_other_address() -> None:
    linked = [value for _, name, value in parts().attributes if name in ("src", "href", "action", "srcset")]
    assert len(linked) == 1
    assert linked[0].startswith("data:image/svg+xml,")
    assert set(re.findall(r"https?://[^\s'\"]+", page_html())) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in page_html()
    assert "@import" not in page_html()


def test_no_text_becomes_markup_and_no_markup_runs() -> None:
    (script,) = parts().texts["script"]
    ways = "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( createContextualFragment DOMParser srcdoc"
    assert [way for way in ways.split() if way in script] == []
    assert not [name for _, name, _ in parts().attributes if name.startswith("on") or name == "style"]
