"""The page in a real browser, at the width of a desk and of a telephone, by day and by night.

Chromium is driven over the pipe of its DevTools protocol, which needs no library: https://chromedevtools.github.io/devtools-protocol.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import evaluate
from eval.report.html import render_html
from eval.results import Results
from retrieval.biencoder import BiEncoder
from retrieval.colbert import ColBERT
from retrieval.corpus import load_collection
from retrieval.model_folder import ColBERTSettings, ModelFolder
from retrieval.projection import Projection

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
    " --disable-sync --hide-scrollbars --remote-debugging-pipe"
)
DESK, TELEPHONE = (1280, 900), (390, 844)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium")

# The browser wants its two ends of the pipes as descriptors 3 and 4.
LAUNCH = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"


class Browser:
    """One tab; what it logs and asks the network for is kept."""

    def __init__(self, executable: str, profile: Path) -> None:
        theirs, self._to = (_above_ten(end) for end in os.pipe())
        self._from, back = (_above_ten(end) for end in os.pipe())
        command = [sys.executable, "-c", LAUNCH, str(theirs), str(back), executable, *FLAGS.split(), f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(command, pass_fds=(theirs, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(back)
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        with contextlib.suppress(OSError):
            self.send("Browser.close")
        self._process.wait(timeout=10)
        os.close(self._to)
        os.close(self._from)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            block = os.read(self._from, 1 << 20)
            if not block:
                raise OSError("the browser has gone")
            self._rest += block
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, page: Path, size: tuple[int, int], *, dark: bool = False) -> None:
        width, height = size
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.events.clear()
        self.send("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def run(self, script: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=13, text="\r")
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=13)

    def screenshot(self, file: Path) -> tuple[int, int]:
        """Write what the window shows and give its size, which is in the PNG's first block."""
        content = base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        file.write_bytes(content)
        assert content.startswith(b"\x89PNG")
        return struct.unpack(">II", content[16:24])

    def complaints(self) -> list[dict[str, Any]]:
        said = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")
        return [event for event in self.events if event["method"] in said]

    def requests(self) -> list[str]:
        return [event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"]


def _above_ten(descriptor: int) -> int:
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return copy


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert BROWSER is not None
    tab = Browser(BROWSER, tmp_path_factory.mktemp("profile"))
    yield tab
    tab.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, evaluated: Callable[..., list[Results]]) -> Path:
    return _write(tmp_path_factory.mktemp("page") / "report.html", evaluated())


def _write(file: Path, results: list[Results], title: str = "Retrieval results") -> Path:
    file.write_text(render_html(results, title=title), encoding="utf-8")
    return file


OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.open = true; });"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESK, TELEPHONE], ids=["desk", "telephone"])
def test_it_opens_from_a_file_in_silence(browser: Browser, page: Path, tmp_path: Path, size: tuple[int, int], dark: bool) -> None:
    browser.open(page, size, dark=dark)
    shot = tmp_path / "report.png"
    assert browser.screenshot(shot) == size
    assert shot.stat().st_size > 20_000
    browser.run(OPEN_ALL)
    assert browser.run("[document.documentElement.scrollWidth, document.body.scrollWidth]") == [size[0], size[0]]
    assert browser.run(
        "[...document.querySelectorAll('.box')].some(each => each.scrollWidth > each.clientWidth)"
    )  # tables scroll, in a box
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (int(paper.split("(")[1].split(",")[0]) < 64) is dark
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]


# Every text of every chart: inside its chart, and on no other text.
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


@pytest.mark.parametrize(("systems", "collections", "approximate"), [(1, 1, True), (4, 6, True), (4, 6, False), (8, 30, True)])
def test_labels_of_charts_are_whole_and_apart(
    browser: Browser, evaluated: Callable[..., list[Results]], tmp_path: Path, systems: int, collections: int, approximate: bool
) -> None:
    made = evaluated(systems=systems, collections=collections, approximate=approximate)
    named = [replace(each, collections=tuple(replace(one, worst=()) for one in each.collections)) for each in made]
    wide = [replace(each, system=replace(each.system, source=f"org/{'W' * 40}")) for each in named[:1]] + named[1:]
    browser.open(_write(tmp_path / "report.html", wide), TELEPHONE)
    browser.run(OPEN_ALL)
    texts, faults = browser.run(CHARTS)
    assert texts > 40 * collections
    assert faults == []


# WCAG 2.2, 1.4.3: contrast of every text with what is behind it, the lowest first.
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
    if (!walker.currentNode.data.trim() || element.closest('script, title') || !element.getClientRects().length) continue;
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
def test_every_text_can_be_read(browser: Browser, evaluated: Callable[..., list[Results]], tmp_path: Path, dark: bool) -> None:
    browser.open(_write(tmp_path / "report.html", evaluated(systems=9, forums=False)), DESK, dark=dark)
    browser.run(OPEN_ALL)
    texts, worst = browser.run(CONTRAST)
    assert texts > 5_000
    assert worst[0][0] >= 4.5, worst


COLUMN = "[...document.querySelector('#scores table').tBodies[0].rows].map(row => row.cells[7].dataset.order ?? null)"
SORTED = "[...document.querySelector('#scores table').tHead.rows[0].cells].map(cell => cell.ariaSort)"


def test_a_column_sorts_by_keyboard(browser: Browser, evaluated: Callable[..., list[Results]], tmp_path: Path) -> None:
    results = evaluated()
    lacking = replace(results[1], collections=tuple(each for each in results[1].collections if each.name != "designdocs_long"))
    browser.open(_write(tmp_path / "report.html", [results[0], lacking, *results[2:]]), DESK)
    first = browser.run(COLUMN)
    assert first.count(None) == 1
    scores = sorted((each for each in first if each is not None), key=float)
    browser.run("document.querySelector('#scores table').tHead.rows[0].cells[7].querySelector('button').focus()")
    for expected, direction in (([*scores[::-1], None], "descending"), ([*scores, None], "ascending"), (first, None)):
        browser.press("Enter")
        assert browser.run(COLUMN) == expected
        assert browser.run(SORTED) == [None] * 7 + [direction, None]
    assert browser.complaints() == []


def test_names_sort_from_a_to_z_and_one_column_sorts_at_a_time(browser: Browser, page: Path) -> None:
    browser.open(page, DESK)
    press = "document.querySelector('#scores table').tHead.rows[0].cells[{}].querySelector('button').click()"
    browser.run(press.format(3))
    browser.run(press.format(0))
    names = browser.run(
        "[...document.querySelectorAll('#scores table')[0].tBodies[0].rows].map(row => row.cells[0].querySelector('bdi').textContent)"
    )
    assert names == sorted(names)
    assert len(names) == 4
    assert browser.run(SORTED) == ["descending"] + [None] * 8


def test_the_head_of_a_long_table_and_its_first_column_stay(browser: Browser, page: Path) -> None:
    browser.open(page, TELEPHONE)
    edges = """(() => {
      const box = document.querySelector('#protocol .box');
      box.scrollTo(200, 900);
      const place = element => element.getBoundingClientRect();
      const [frame, head, name] = [place(box), place(box.querySelector('thead th:nth-child(2)')), place(box.querySelector('tbody th'))];
      return [box.scrollTop, box.scrollLeft, head.top - frame.top - box.clientTop, name.left - frame.left];
    })()"""
    assert browser.run(edges) == [900, 200, 0, 0]


def test_the_button_turns_day_into_night(browser: Browser, page: Path) -> None:
    browser.open(page, DESK)
    seen = []
    for _ in range(3):
        seen.append(browser.run("[document.getElementById('theme').textContent, getComputedStyle(document.body).backgroundColor]"))
        browser.run("document.getElementById('theme').click()")
    assert [name for name, _ in seen] == ["Dark", "Light", "Dark"]
    assert seen[0] == seen[2] != seen[1]


def test_a_command_is_copied_whole(browser: Browser, evaluated: Callable[..., list[Results]], tmp_path: Path) -> None:
    result = evaluated(systems=1, collections=1, forums=False)[0]
    command = "quiver evaluate --model 'a  b' \\\n  --data \"$HOME/<x>&amp;\" --out runs/été"
    result = replace(result, provenance=replace(result.provenance, command=command))
    browser.open(_write(tmp_path / "report.html", [result]), DESK)
    kept = """(() => {
      let kept = null;
      Object.defineProperty(navigator, 'clipboard', { value: { writeText: text => { kept = text; return Promise.resolve(); } } });
      document.querySelector('.copy').click();
      return new Promise(then => setTimeout(() => then([kept, document.querySelector('.copy').textContent]), 0));
    })()"""
    assert browser.run(kept) == [command, "Copied"]


def test_without_a_clipboard_a_command_is_selected(browser: Browser, page: Path) -> None:
    browser.open(page, DESK)
    selected = """(() => {
      Object.defineProperty(navigator, 'clipboard', { value: undefined });
      document.querySelector('.copy').click();
      return [getSelection().toString() === document.querySelector('.run code').textContent, document.querySelector('.copy').textContent];
    })()"""
    assert browser.run(selected) == [True, "Selected"]


def test_the_contents_are_open_beside_the_page_and_closed_above_it(browser: Browser, page: Path) -> None:
    for size, is_open in ((DESK, True), (TELEPHONE, False)):
        browser.open(page, size)
        assert browser.run("document.getElementById('contents').open") is is_open


@pytest.mark.parametrize("size", [DESK, TELEPHONE], ids=["desk", "telephone"])
def test_others_words_do_nothing_and_move_nothing(
    browser: Browser, evaluated: Callable[..., list[Results]], hostile: str, tmp_path: Path, size: tuple[int, int]
) -> None:
    made = []
    for result in evaluated(systems=2, collections=2, forums=False):
        words = hostile.replace("\ud800", "") + "y" * 700
        collections = tuple(replace(each, name=f"{each.name}{words}", licence=words, revision=words) for each in result.collections)
        system = replace(result.system, source=result.system.source + words, query_prompt=words)
        made.append(replace(result, system=system, collections=collections, provenance=replace(result.provenance, command=words)))
    browser.open(_write(tmp_path / "report.html", made, title="y" * 700), size)
    browser.run(OPEN_ALL)
    assert browser.run("document.title") == "y" * 700
    assert browser.run("[document.scripts.length, document.images.length, document.documentElement.scrollWidth]") == [1, 0, size[0]]
    assert browser.run(CHARTS)[1] == []
    assert browser.complaints() == []
    assert len(browser.requests()) == 1


def test_a_script_that_got_in_would_not_run(browser: Browser, page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "report.html"
    broken.write_text(
        page.read_text(encoding="utf-8").replace("<main>", "<main><script>document.title = 'owned'</script>"), encoding="utf-8"
    )
    browser.open(broken, DESK)
    assert browser.run("document.title") == "Retrieval results"
    assert any("Content Security Policy" in json.dumps(event) for event in browser.complaints())


def test_print_has_whole_tables_and_no_buttons(browser: Browser, page: Path) -> None:
    browser.open(page, DESK, dark=True)
    browser.send("Emulation.setEmulatedMedia", media="print")
    assert browser.run("[...document.querySelectorAll('nav, .tool')].every(each => getComputedStyle(each).display === 'none')")
    assert browser.run("[...document.querySelectorAll('.box')].every(each => getComputedStyle(each).overflow === 'visible')")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.send("Emulation.setEmulatedMedia", media="")


COLLECTIONS = ("scifact", "cranfield", "cosqa", "tldr_nl2cmd", "designdocs_long", "pycodesearch")


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("size", [DESK, TELEPHONE], ids=["desk", "telephone"])
def test_a_real_evaluation_of_four_systems_on_six_collections(
    browser: Browser, real: list[Results], tmp_path: Path, size: tuple[int, int]
) -> None:
    file = _write(tmp_path / "report.html", real)
    browser.open(file, size)
    shot = tmp_path / "report.png"
    assert browser.screenshot(shot) == size
    browser.run(OPEN_ALL)
    assert browser.run("[document.documentElement.scrollWidth, document.body.scrollWidth]") == [size[0], size[0]]
    shown = browser.run("document.body.innerText")
    assert all(name in shown for name in (*COLLECTIONS, "bm25", "int8", "HNSW"))
    assert browser.run("document.querySelectorAll('.matches li').length") > 100  # of the ColBERT
    assert browser.run("document.querySelectorAll('svg').length") >= len(COLLECTIONS)
    count, faults = browser.run(CHARTS)
    assert count > 0
    assert faults == []
    assert browser.complaints() == []
    assert browser.requests() == [file.as_uri()]


@pytest.fixture(scope="module")
def real(quiver_data: Path, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """MiniLM in float32 with an exact index and with a graph, in int8, and as a ColBERT; BM25 beside the first; on parts of real data."""
    root = tmp_path_factory.mktemp("real")
    folders: list[str | Path] = [_part(quiver_data / name, root / name) for name in COLLECTIONS]
    dense = BiEncoder.from_pretrained(minilm)
    torch.manual_seed(0)
    settings = ModelFolder(
        "colbert",
        minilm,
        lower_case=dense.settings.lower_case,
        projections=(Projection(dense.encoder.config.hidden_size, 64),),
        similarity="maxsim",
        colbert=ColBERTSettings(query_prefix="", document_prefix="", query_expansion=False),
    )
    colbert = ColBERT(dense.encoder, dense.tokenizer, settings, source="minilm as ColBERT")
    cache = root / "cache"
    return [
        evaluate(dense, folders, out=root / "exact", cache=cache, command="quiver evaluate --model minilm"),
        evaluate(dense, folders, out=root / "graph", cache=cache, index="HNSW16,Flat?efSearch=16", baselines=()),
        evaluate(minilm, folders, out=root / "int8", cache=cache, precision="int8", baselines=()),
        evaluate(colbert, folders, out=root / "colbert", cache=cache, baselines=()),
    ]


def _part(source: Path, target: Path) -> Path:
    """A dozen queries of a collection, what was judged for them, and sixty other documents."""
    collection = load_collection(source, "test")
    queries = collection.queries[:12]
    judged = {query.id: collection.qrels[query.id] for query in queries}
    wanted = {document for grades in judged.values() for document in grades}
    documents = list(collection.documents)
    kept = [document for place, document in enumerate(documents) if place < 60 or document.id in wanted]
    (target / "qrels").mkdir(parents=True)
    rows = [{"_id": document.id, "title": document.title, "text": document.text} for document in kept]
    (target / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    asked = [{"_id": query.id, "text": query.text} for query in queries]
    (target / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    lines = [f"{query}\t{document}\t{grade}\n" for query, grades in judged.items() for document, grade in grades.items()]
    (target / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines), encoding="utf-8")
    return target
