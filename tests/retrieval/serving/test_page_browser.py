"""The search page in a real browser, with a fake service whose answers have the schemas of `quiver.retrieval.serving.schemas`."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pyarrow as pa
import pytest

from quiver.retrieval.index.filters import Columns, Filter
from quiver.retrieval.serving.page import content_security_policy, page_html

DESK, TELEPHONE = (1280, 900), (390, 844)
# A file of axe-core, such as axe.min.js of its npm package, for the rules of accessibility.
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&amp;\u202e"

DOCUMENTS = {
    "birds": "Birds of the sea. Gulls and terns nest on cliffs, and a tern flies from one pole to the other every year.",
    "fish/1 %?#": "🐟 Fish 🐠 of the deep sea. No light reaches them, and many a fish makes its own light in the dark water.",
    "stone": "Granite and slate. A cliff of granite weathers slowly, slate splits into plates; the sea wears down both.",
    f"hostile {HOSTILE}": f"{HOSTILE} The sea of scripts, javascript:alert(3) and ${{alert(4)}} on the waves.",
    "night": "The night sky. Stars guide birds on their way over land and sea, and a full moon lets them fly by night.",
}
METADATA: dict[str, dict[str, Any]] = {
    "birds": {"year": 2012, "kind": "animals", "open": True, "places": ["cliff", "sea"]},
    "fish/1 %?#": {"year": 2016, "kind": "animals", "open": False},
    "stone": {"year": 1999, "kind": 'rocks, "hard" ones', "open": True},
    f"hostile {HOSTILE}": {"year": 2020, "kind": HOSTILE, "open": True},
    "night": {"year": 2021, "kind": "animals", "open": True},
}
TITLES: dict[str, str] = {}
FIELDS = {"year": ["integer"], "kind": ["string"], "open": ["boolean"], "places": ["string[]"]}
TYPES = pa.schema({"year": pa.int64(), "kind": pa.string(), "open": pa.bool_(), "places": pa.list_(pa.string())})
KINDS = {"dense": "dense", "colbert": "colbert", "bm25": "bm25"}


class Service:
    """A small service that ranks by the number of words that a text shares with the query."""

    def __init__(self) -> None:
        self.searches: list[dict[str, Any]] = []
        self.busy = 0  # how many searches are refused first
        self.partial = False
        self.warnings: dict[str, str] = {}  # retriever -> why it cannot be compared with the first
        self.delays: dict[str, float] = {}  # query -> seconds
        self.broken = False
        self.fields = FIELDS
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                service.get(self)

            def do_POST(self) -> None:
                service.search(self)

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a question that the page has dropped

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        if parts.path == "/":
            answer(handler, 200, page_html().encode(), {"Content-Security-Policy": content_security_policy()}, "text/html; charset=utf-8")
        elif self.broken:
            handler.close_connection = True
        elif parts.path == "/v1/info":
            answer(handler, 200, self.info())
        elif parts.path.startswith("/v1/documents/"):
            name = unquote(parts.path.removeprefix("/v1/documents/"))
            if name in DOCUMENTS:
                assert parse_qs(parts.query)["retriever"][0] in KINDS
                answer(
                    handler,
                    200,
                    {"id": name, "title": TITLES.get(name), "text": DOCUMENTS[name], "metadata": METADATA[name], "generation": 1},
                )
            else:
                answer(handler, 404, {"error": {"code": "not_found", "message": "no such document"}})
        else:
            answer(handler, 404, {"error": {"code": "not_found", "message": "there is no such page"}})

    def info(self) -> dict[str, Any]:
        common = {"documents": len(DOCUMENTS), "generation": 1, "fields": self.fields, "stores_text": True}
        retrievers = [
            {"name": name, "kind": kind, "model": f"{name}-model {HOSTILE}", **common, "explains": kind != "dense",
             "efforts": [] if kind == "bm25" else ["exact", "balanced", "fast"], "warning": self.warnings.get(name)}
            for name, kind in KINDS.items()
        ]  # fmt: skip
        return {"retrievers": retrievers, "limits": {"k": 100, "explained": 20, "query_characters": 500}, "writable": False, "version": "0"}

    def search(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.searches.append(body)
        time.sleep(self.delays.get(body["query"], 0))
        if self.broken:
            handler.close_connection = True
        elif self.busy:
            self.busy -= 1
            answer(handler, 429, {"error": {"code": "busy", "message": "too many queries wait"}}, {"Retry-After": "0"})
        elif "refused" in body["query"]:
            answer(handler, 422, {"error": {"code": "invalid_request", "message": f"this query is refused {HOSTILE}"}})
        else:
            answer(handler, 200, self.found(body))

    def found(self, body: dict[str, Any]) -> dict[str, Any]:
        hits = [
            {"id": name, "score": score, "title": TITLES.get(name), "text": DOCUMENTS[name], "metadata": METADATA[name],
             "explanation": explanation(body["query"], name, body["retriever"]) if body["explain"] else None}
            for name, score in ranking(body["query"], body["retriever"])
            if passes(METADATA[name], body["filter"] or [])
        ]  # fmt: skip
        return {
            "retriever": body["retriever"],
            "hits": hits[body.get("offset") or 0 :][: body["k"]],
            "matching": sum(passes(each, body["filter"] or []) for each in METADATA.values()),
            "offset": body.get("offset") or 0,
            "facets": {field: facet(field, body["filter"] or []) for field in body["facets"]} if "facets" in body else None,
            "milliseconds": {"encode": 4.25, "search": 1.5, "total": 6.5},
            "generation": 1,
            "partial": self.partial,
            "warning": None,
        }


def facet(field: str, conditions: list[str]) -> dict[str, Any]:
    """Counts of the values of a field over the documents that pass."""
    found = [each.get(field) for each in METADATA.values() if passes(each, conditions)]
    values = [(type(one), one) for value in found if value is not None for one in (value if isinstance(value, list) else [value])]
    counts = sorted(Counter(values).items(), key=lambda each: (-each[1], str(each[0][1])))
    return {"values": [{"value": value, "count": count} for (_, value), count in counts[:20]], "distinct": len(counts)}


def answer(
    handler: BaseHTTPRequestHandler, status: int, content: Any, headers: dict[str, str] | None = None, kind: str = "application/json"
) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    with contextlib.suppress(OSError):
        handler.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)


def words(text: str) -> list[tuple[str, int, int]]:
    return [(match[0].lower(), *match.span()) for match in re.finditer(r"\w+", text)]


def ranking(query: str, retriever: str) -> list[tuple[str, float]]:
    """Rank by shared words; colbert in reverse, so that the lists differ; bm25 without texts that share no word."""
    asked = [word for word, _, _ in words(query)]
    scores = {name: float(sum(word in asked for word, _, _ in words(text))) for name, text in DOCUMENTS.items()}
    order = sorted(scores, key=lambda name: scores[name], reverse=True)
    if retriever == "colbert":
        order.reverse()
        return [(name, 5.0 - place) for place, name in enumerate(order)]
    return [(name, scores[name]) for name in order if retriever == "dense" or scores[name]]


def explanation(query: str, name: str, retriever: str) -> dict[str, Any]:
    text = DOCUMENTS[name]
    if retriever == "bm25":
        return {"kind": "words", "score": 1.0, "text": None, "query": [], "passage": [], "matches": [],
                "words": [{"word": word, "score": 0.5} for word, _, _ in words(query)]}  # fmt: skip
    passage = [{"token": "[CLS]", "span": None}, *({"token": word, "span": [begin, end]} for word, begin, end in words(text))]
    asked = [{"token": "[CLS]", "span": None}, *({"token": word, "span": [begin, end]} for word, begin, end in words(query))]
    names = [token["token"] for token in passage]
    matches = [
        {"query": row, "passage": names.index(word) if word in names else 1, "score": 0.95 if word in names else 0.3}
        for row, word in enumerate(token["token"] for token in asked)
    ]
    return {"kind": "tokens", "score": sum(match["score"] for match in matches), "text": text, "query": asked, "passage": passage,
            "matches": matches, "words": []}  # fmt: skip


def passes(metadata: dict[str, Any], conditions: list[str]) -> bool:
    """Test the conditions of a filter."""
    table = pa.Table.from_pylist([metadata], TYPES)
    return bool(Filter.parse(conditions).rows(Columns.of(table), TYPES)[0])


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.broken = True
    made.close()


@pytest.fixture
def browser(tab: Any, service: Service) -> Iterator[Any]:
    """A browser tab; checks after each test that the console has no errors and that only the service received requests."""
    tab.events.clear()
    yield tab
    expected = ("Failed to load resource", "net::ERR")  # the browser's own word on an answer that is no success
    complaints = [event for event in tab.complaints() if not any(word in json.dumps(event) for word in expected)]
    assert complaints == []
    assert all(url.startswith((service.url, "data:", "about:")) for url in tab.requests())


def literal(text: str) -> str:
    """A text in SQL."""
    return "'" + text.replace("'", "''") + "'"


FOUND = "[...document.querySelectorAll('.list .card')].map(each => each.dataset.document)"


def test_results_update_while_typing_and_the_address_holds_the_state(browser: Any, service: Service) -> None:
    browser.open(service.url, DESK)
    browser.until("document.querySelectorAll('.welcome li').length === 3")
    assert browser.run("document.activeElement.id") == "query"
    browser.type("sea")
    browser.until(f"{FOUND}.length && location.hash === '#q=sea'")
    # A question a pause, not a letter.
    before = len(service.searches)
    browser.run("(() => { const query = document.getElementById('query'); for (const letter of ' birds') { query.value += letter; "
                "query.dispatchEvent(new InputEvent('input')); } })()")  # fmt: skip
    browser.until(f"{FOUND}[1] === 'night' && location.hash === '#q=sea+birds'")
    assert [search["query"] for search in service.searches[before:]] == ["sea birds"]
    assert browser.run(FOUND) == [name for name, _ in ranking("sea birds", "dense")]
    assert browser.run("document.getElementById('figures').innerText").startswith("1\u20135 of 5 documents")
    assert "6.5 ms" in browser.run("document.getElementById('figures').innerText")
    browser.until("document.getElementById('said').textContent === '5 results in 6.5 ms'")
    assert "sea" in browser.run("[...document.querySelectorAll('mark')].map(each => each.textContent.toLowerCase())")
    assert browser.run("document.title").startswith("sea birds")
    # Taken back letter by letter until nothing is asked.
    browser.run("document.getElementById('query').select()")
    browser.send("Input.dispatchKeyEvent", type="keyDown", key="Backspace", windowsVirtualKeyCode=8)
    browser.until("document.querySelector('.welcome') && location.hash === ''")
    assert browser.complaints() == []


def test_a_page_opens_in_the_state_of_its_address(browser: Any, service: Service) -> None:
    address = f"{service.url}#q=sea&in=colbert&filter={quote('year >= 2012')}&effort=fast&document={quote('fish/1 %?#', safe='')}"
    browser.open(address, DESK)
    browser.until("document.querySelector('#pane .reading h2')")
    asked = {"query": "sea", "k": 10, "retriever": "colbert", "filter": ["year >= 2012"], "explain": False, "effort": "fast", "offset": 0}
    asked["facets"] = list(FIELDS)
    assert service.searches[0] == asked
    assert browser.run("document.querySelector('#pane .id').textContent") == "fish/1 %?#"
    assert browser.run("[...document.querySelectorAll('.chip')].map(each => each.querySelector('bdi').textContent)") == ["year ≥ 2012"]
    assert browser.run("document.getElementById('effort').value") == "fast"
    assert "stone" not in browser.run(FOUND)


def test_a_switch_asks_for_one_hit_per_file(browser: Any, service: Service) -> None:
    browser.open(f"{service.url}#q=sea", DESK)
    browser.until(f"{FOUND}.length")
    assert browser.run("document.getElementById('group').hidden"), "no document names a file"
    service.fields = {**FIELDS, "file": ["string"]}
    browser.open(f"{service.url}#q=sea&in=bm25", DESK)
    browser.until(f"{FOUND}.length")
    assert "group_by" not in service.searches[-1]
    browser.run("document.getElementById('group').click()")
    browser.until("location.hash === '#q=sea&in=bm25&group=on' && document.getElementById('figures').innerText.includes(', one per file')")
    assert service.searches[-1]["group_by"] == "file"
    assert browser.run("document.getElementById('group').textContent") == "One hit per file"
    browser.open(f"{service.url}#q=sea&view=together&group=on", DESK)
    browser.until("document.querySelector('.columns .card')")
    assert browser.run("document.getElementById('group').hidden")
    assert all("group_by" not in search for search in service.searches[-len(KINDS) :]), "ranks side by side are those of passages"


def test_marked_words_are_those_that_bm25_matches_and_elsewhere_those_of_the_query(browser: Any, service: Service) -> None:
    for retriever, words in (("bm25", {"tern", "cliff"}), ("dense", {"tern", "terns", "cliff", "cliffs", "stars"})):
        browser.open(f"{service.url}#q=tern+the+cliff+star&in={retriever}", DESK)
        browser.until("document.querySelector('.list mark')")
        assert set(browser.run("[...document.querySelectorAll('.list mark')].map(each => each.textContent.toLowerCase())")) == words
        browser.run("document.querySelector('.card[data-document=birds] .title').click()")
        browser.until("document.querySelector('#pane mark')")
        marked = browser.run("[...document.querySelectorAll('#pane mark')].map(each => each.textContent)")
        assert ("terns" in marked) == (retriever == "dense")


def test_an_older_answer_never_replaces_a_newer_one(browser: Any, service: Service) -> None:
    service.delays["sea"] = 0.6
    browser.open(service.url, DESK)
    browser.until("document.querySelector('.welcome')")
    browser.send("Input.insertText", text="sea")
    _until(lambda: service.searches)
    browser.send("Input.insertText", text=" night")
    browser.until(f"{FOUND}[0] === 'night'")
    time.sleep(0.7)
    assert browser.run(f"{FOUND}[0]") == "night"
    assert [search["query"] for search in service.searches] == ["sea", "sea night"]


def test_refusals_are_shown(browser: Any, service: Service) -> None:
    browser.open(f"{service.url}#q=refused", DESK)
    browser.until("document.querySelector('.notice.fault[role=alert]')")
    assert browser.run("document.querySelector('.notice p').textContent") == f"this query is refused {HOSTILE}".replace("\u202e", "\ufffd")
    browser.run("document.getElementById('query').select()")
    browser.type("sea")
    browser.until(f"{FOUND}.length && !document.querySelector('.notice')")


def test_the_page_reconnects_to_a_restarted_service(browser: Any, service: Service) -> None:
    browser.open(f"{service.url}#q=sea", DESK)
    browser.until(f"{FOUND}.length")
    service.broken = True
    browser.type(" birds")
    browser.until("document.querySelector('.notice.lost')")
    service.broken = False
    browser.until(f"{FOUND}[0] === 'birds' && !document.querySelector('.notice')")


def test_filters_are_set_by_a_form_and_by_clicking_a_value(browser: Any, service: Service) -> None:
    browser.open(f"{service.url}#q=sea", DESK)
    browser.until(f"{FOUND}.length === 5")
    browser.run("document.activeElement.blur()")
    browser.press("f")
    browser.until("document.activeElement.id === 'filter-field'")
    for name, value in (("filter-field", "year"), ("filter-operator", ">=")):
        browser.run(f"(each => {{ each.value = '{value}'; each.dispatchEvent(new Event('change')); }})(document.getElementById('{name}'))")
    browser.run("document.getElementById('filter-value').focus()")
    browser.press("Enter")
    assert browser.run("document.getElementById('filter-fault').textContent") == "A value for year is missing."
    browser.type("2012")
    browser.press("Enter")
    browser.until(f"{FOUND}.length === 4")
    assert service.searches[-1]["filter"] == ["year >= 2012"]
    assert browser.run("document.getElementById('filter').hidden")
    # A value of an open document filters too, with all its signs.
    browser.run("document.querySelector('.card[data-document^=hostile] .title').click()")
    browser.run("[...document.querySelectorAll('#pane .tag')].find(each => each.textContent.startsWith('<img')).click()")
    browser.until(f"{FOUND}.length === 1")
    assert service.searches[-1]["filter"] == ["year >= 2012", f"kind = {literal(HOSTILE)}"]
    browser.run("document.querySelectorAll('.chip').forEach(each => document.querySelector('.chip').click())")
    browser.until(f"{FOUND}.length === 5 && !document.querySelector('.chip')")
    browser.run("history.back()")
    browser.until(f"{FOUND}.length === 1 && document.querySelectorAll('.chip').length === 1")


SHADES = "[...document.querySelectorAll('#pane .met')].map(each => [each.textContent, each.style.getPropertyValue('--heat')])"


def test_the_heat_map_shows_the_matched_tokens(browser: Any, service: Service) -> None:
    browser.open(f"{service.url}#q=fish+light+zebra&in=colbert", DESK)
    browser.until("document.querySelector('.list .met')")
    browser.run("document.querySelector('.card[data-document^=fish] .title').click()")
    browser.until("document.querySelectorAll('#pane .asked').length === 3")
    # The characters before the first token are two code units each: spans are of characters.
    assert dict(browser.run(SHADES)) == {"Fish": "93%", "light": "93%"}
    browser.hover("#pane .asked[data-query='2']")
    browser.until("document.querySelector('#pane .heat.lit')")
    assert browser.run("[...document.querySelectorAll('#pane .met.on')].map(each => each.textContent)") == ["light"]
    browser.hover("#pane .met")
    assert browser.run("[...document.querySelectorAll('#pane .asked.on bdi')].map(each => each.textContent)") == ["fish", "zebra"]
    browser.run("document.querySelector('#pane .asked').focus()")
    browser.press("Enter")
    assert browser.run("document.querySelector('#pane .asked').getAttribute('aria-pressed')") == "true"
    assert browser.run("document.querySelector('#pane .asked').textContent") == "fish met Fish, similarity 0.950"
    browser.run("document.querySelector('#pane details').open = true")
    table = browser.run(
        "[...document.querySelectorAll('#pane tbody tr, #pane tfoot tr')].map(each => [...each.cells].map(cell => cell.textContent))"
    )
    assert table[1:] == [
        ["fish", "Fish", "0.950"],
        ["light", "light", "0.950"],
        ["zebra", "Fish", "0.300"],
        ["sum, the score", "", "3.150"],
    ]
    browser.press("Escape")
    browser.press("Escape")
    browser.run("document.activeElement.blur()")
    browser.press("h")
    browser.until("!document.querySelector('.met') && location.hash.includes('heat=off')")


def test_side_by_side_shows_the_rank_of_a_document_in_the_other_list(browser: Any, service: Service) -> None:
    browser.open(f"{service.url}#q=night+stars", DESK)
    browser.until(f"{FOUND}.length")
    browser.run("document.activeElement.blur()")
    browser.press("c")
    browser.until("document.querySelectorAll('.column').length === 3 && document.querySelectorAll('.column .card').length > 9")
    assert browser.run("location.hash").endswith("view=together")
    lists = {name: [each for each, _ in ranking("night stars", name)] for name in KINDS}
    for name, found in lists.items():
        column = f"[...document.querySelectorAll('.column .card[data-retriever={name}]')]"
        assert browser.run(f"{column}.map(each => each.dataset.document)") == found
        for other in set(KINDS) - {name}:
            said = browser.run(
                f"{column}.map(each => [...each.querySelectorAll('.standing li')].find(li => li.title.includes('{other}')).title)"
            )
            ranks = [lists[other].index(each) + 1 if each in lists[other] else None for each in found]
            assert said == [f"rank {rank} in {other}" if rank else f"not among the first {len(lists[other])} of {other}" for rank in ranks]
    browser.press("j", "ArrowRight", "Enter")
    browser.until("document.getElementById('sheet').open && document.querySelector('#sheet .asked')")
    assert browser.run("document.querySelector('#sheet .id').textContent") == lists["colbert"][0].replace("\u202e", "\ufffd")
    browser.press("Escape")
    assert browser.run("document.activeElement.closest('.card').dataset.retriever") == "colbert"


def test_every_control_works_by_keyboard(browser: Any, service: Service) -> None:
    browser.open(f"{service.url}#q=sea", DESK)
    browser.until(f"{FOUND}.length")
    order = browser.run(FOUND)
    focused = "document.activeElement.closest('.card')?.dataset.document"
    browser.press("ArrowDown")
    assert browser.run(focused) == order[0]
    browser.press("j", "j", "k")
    assert browser.run(focused) == order[1]
    browser.press("Enter")
    browser.until("document.activeElement === document.querySelector('#pane h2')")
    browser.press("j")
    assert browser.run("document.querySelector('#pane .id').textContent") == order[2]
    browser.press("Escape")
    assert browser.run("document.getElementById('pane').hidden")
    browser.press("2")
    browser.until("document.querySelector('#retrievers input:checked').value === '1'")
    browser.until("document.querySelector('.list .card').dataset.retriever === 'colbert'")
    for closing in ("Escape", "Enter"):  # the button that closes it has the focus
        browser.press("?")
        assert browser.run("document.getElementById('keys').open")
        browser.press(closing)
        browser.until("!document.getElementById('keys').open")
    browser.press("/")
    assert browser.run("document.activeElement.id") == "query"
    browser.press("?", "j")
    assert browser.run("document.getElementById('query').value.endsWith('?j')")  # a letter is a letter where one writes


def test_a_field_of_any_name_and_type_can_be_filtered_by(browser: Any, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the form writes is found by the filter that it means."""
    name = 'first "author" in a=b'
    values: dict[str, tuple[Any, pa.DataType]] = {
        "string": ("50% o'clock", pa.string()),
        "string[]": (["x y"], pa.list_(pa.string())),
        "number": (-9.5, pa.float64()),
        "date": (datetime.date(2021, 6, 1), pa.date32()),
        "boolean": (False, pa.bool_()),
    }
    forms = [
        ("string", "=", "50% o'clock"), ("string", "LIKE", "50% o'"), ("string", "IN", "other, 50% o'clock"), ("string[]", "has", "x y"),
        ("number", "=", "-9.5"), ("number", "<=", "-9"), ("date", ">=", "2021-06-01"), ("boolean", "=", "False"),
    ]  # fmt: skip
    for kind, relation, typed in forms:
        value, type_ = values[kind]
        service.fields, schema = {name: [kind]}, pa.schema({name: type_})
        monkeypatch.setitem(globals(), "TYPES", schema)
        browser.open("about:blank", DESK)
        browser.open(f"{service.url}#q=sea&in=dense", DESK)
        browser.until(f"{FOUND}.length")
        browser.run("document.getElementById('add-filter').click()")
        browser.run(
            f"document.getElementById('filter-operator').value = '{relation}';"
            f"document.getElementById('filter-value').value = {json.dumps(typed)}; document.getElementById('filter').requestSubmit()"
        )
        browser.until("document.querySelectorAll('.chip').length === 1 && document.querySelector('.empty')")
        filter_ = Filter.parse(service.searches[-1]["filter"])
        table = pa.Table.from_pylist([{name: value}, {name: None}], schema)
        assert filter_.rows(Columns.of(table), schema).tolist() == [True, False], filter_


def test_a_narrow_screen_has_tabs_and_a_sheet(browser: Any, service: Service) -> None:
    browser.open(f"{service.url}#q=sea&view=together", TELEPHONE)
    browser.until("document.querySelectorAll('[role=tab]').length === 3")
    visible = "[...document.querySelectorAll('.column')].filter(each => each.getClientRects().length).map(each => each.dataset.kind)"
    assert browser.run(visible) == ["dense"]
    browser.run("document.querySelectorAll('[role=tab]')[2].click()")
    assert browser.run(visible) == ["bm25"]
    browser.press("ArrowLeft")
    assert browser.run(visible) == ["colbert"]
    browser.run("document.querySelector('.column.chosen .title').click()")
    browser.until("document.getElementById('sheet').open")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("[...document.querySelectorAll('#sheet .reader-bar button')].map(each => each.disabled)") == [True, False, False]
    browser.run("document.querySelector('#sheet [data-control=Close]').click()")
    assert not browser.run("document.getElementById('sheet').open")


def test_markup_in_texts_is_shown_as_text(browser: Any, service: Service) -> None:
    name = f"hostile {HOSTILE}"
    for size, view in ((DESK, "in=dense"), (DESK, "view=together&in=colbert"), (TELEPHONE, "in=colbert"), (TELEPHONE, "in=bm25")):
        browser.open(f"{service.url}#{view}&q={quote('sea scripts ' + HOSTILE)}&document={quote(name, safe='')}", size)
        browser.until("document.querySelector('.reading h2')")
        if view != "in=dense":
            browser.until("document.querySelector('.reading table')")
        assert browser.run("[document.images.length, document.scripts.length]") == [0, 1]
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert HOSTILE[:40] in browser.run("document.querySelector('.reading').textContent")
        assert "\u202e" not in browser.run("document.body.innerText + document.title")
    assert browser.complaints() == []


@pytest.mark.slow
def test_facets_pages_the_fused_tab_and_a_token(tab: Any, indexes: Any, serving: Any, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token for reading only")
    folders = (f"dense={indexes.dense}", f"colbert={indexes.colbert}")
    with serving(*folders, "--fuse", "dense+bm25", "--rerank", "colbert", "--read-token-file", token) as child:
        tab.open(f"{child.url}/#q=granite+sea", DESK)
        tab.until("document.querySelector('.lock input')", 30)
        for given in ("another token, a wrong one", token.read_text()):
            assert tab.run("document.activeElement.labels[0].textContent") == "Token"
            tab.type(given)
            tab.press("Enter")
            if given.startswith("another"):
                tab.until("document.querySelector('.lock')?.innerText.includes('does not accept')", 30)
        tab.until(f"{FOUND}.length === 10 && !document.querySelector('.lock') && document.activeElement.id === 'query'", 30)
        # Facets count all sixty documents, and each value adds and removes a filter.
        facets = (
            "Object.fromEntries([...document.querySelectorAll('#facets dl > div')].map(each => [each.querySelector('dt').textContent,"
            " [...each.querySelectorAll('.facet')].map(one => [...one.children].map(part => part.textContent).join(' '))]))"
        )
        tab.until(f"({facets}).lang?.length === 2")
        assert tab.run(facets)["lang"] == ["de 30", "en 30"]
        tab.run("[...document.querySelectorAll('.facet')].find(each => each.innerText.startsWith('de')).click()")
        tab.until(f"({facets}).lang?.length === 1 && document.querySelectorAll('.chip').length === 1")
        assert tab.run("document.getElementById('figures').textContent").startswith("1\u201310 of 30 documents that pass the filters")
        tab.run("document.querySelector('.facet[aria-pressed=true]').click()")
        tab.until(f"({facets}).lang?.length === 2 && !document.querySelector('.chip')")
        # Pages have no document in common, and Back goes back to the page before.
        first = tab.run(FOUND)
        tab.run("[...document.querySelectorAll('.pages button')].at(-1).click()")
        tab.until("document.querySelector('.rank')?.textContent === '11' && location.hash.includes('from=10')", 30)
        assert not set(first) & set(tab.run(FOUND))
        tab.run("history.back()")
        tab.until("document.querySelector('.rank')?.textContent === '1'", 30)
        assert tab.run(FOUND) == first
        # The fused ranking says where each document stands in its parts.
        tab.run("document.activeElement.blur()")
        tab.press("5")
        tab.until(
            "document.querySelectorAll('.list .parts').length === 10 && document.querySelector('.parts').innerText.includes('bm25')", 30
        )
        assert re.fullmatch(r"score 0\.0\d{3}", tab.run("document.querySelector('.list .score').textContent"))
        tab.press("1")  # what was asked for comes first
        tab.until("document.querySelector('.list .parts')?.innerText.includes('candidates') && document.querySelector('.list .met')", 30)
        expected = ("Failed to load resource", "net::ERR")
        assert [each for each in tab.complaints() if not any(word in json.dumps(each) for word in expected)] == []
        assert all(url.startswith((child.url, "data:", "about:")) for url in tab.requests())


def _until(true: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
