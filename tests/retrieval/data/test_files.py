"""Files of every type: their text, the place of each passage, and what is left out."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.source import SourceOptions, open_corpus
from quiver.retrieval.records import Document


def make_pdf(pages: Sequence[str], title: str = "") -> bytes:
    """A PDF with one line of text per page."""
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{' '.join(f'{4 + 2 * n} 0 R' for n in range(len(pages)))}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET"
        page = f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R"
        objects.append(f"{page} /Resources << /Font << /F1 3 0 R >> >> >>")
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    objects.append(f"<< /Title ({title}) >>")
    content, places = "%PDF-1.4\n", []
    for number, each in enumerate(objects, start=1):
        places.append(len(content))
        content += f"{number} 0 obj\n{each}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    content += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    tail = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R /Info {len(objects)} 0 R >>\nstartxref\n{content.index('xref')}\n%%EOF\n"
    return (content + tail).encode("latin-1")


HTML = """<!DOCTYPE html><!-- comment -->
<html><head><title>The
page</title><style>p { color: red }</style></head>
<body><nav>menu</nav>
<h1>Top <b>bold</b></h1>
<p>first
paragraph</p>
<pre>
def f():
    # comment
</pre>
<script>alert("no")</script>
<h2>Second</h2>
<ul><li>item_one</li><li>a * b</li></ul>
</body></html>
"""

NOTEBOOK = {
    "nbformat": 4,
    "metadata": {"language_info": {"name": "python"}},
    "cells": [
        {"cell_type": "markdown", "source": ["# Load\n", "the data"]},
        {"cell_type": "code", "source": "# no heading\nx = 1", "outputs": [{"text": "secret output"}]},
        {"cell_type": "code", "source": "", "outputs": []},
        {"cell_type": "markdown", "source": "# Plot"},
        {"cell_type": "code", "source": ["plot(x)"], "outputs": []},
    ],
}


def documents(root: Path, options: SourceOptions = SourceOptions()) -> list[Document]:  # noqa: B008 - frozen
    return list(open_corpus(root, options))


def where(document: Document, *names: str) -> tuple[object, ...]:
    return tuple((document.metadata or {})[name] for name in names)


def test_passages_of_text_name_file_lines_and_characters(tmp_path: Path) -> None:
    text = "intro\r\n\r\n# A\r\nfirst\r\n## B\r\nsecond\r\n\r\n"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_bytes(text.encode())
    found = documents(tmp_path)
    assert [document.id for document in found] == ["docs/a.md#1", "docs/a.md#2", "docs/a.md#3"]
    assert [document.title for document in found] == ["docs/a.md", "docs/a.md > A", "docs/a.md > A > B"]
    assert [where(document, "file", "type", "line", "end_line") for document in found] == [
        ("docs/a.md", "markdown", 1, 1),
        ("docs/a.md", "markdown", 3, 4),
        ("docs/a.md", "markdown", 5, 6),
    ]
    for document in found:
        start, end = where(document, "start", "end")
        assert isinstance(start, int) and isinstance(end, int)  # noqa: PT018
        assert text[start:end] == document.text
    assert "".join(document.text for document in found) == text


def test_front_matter_is_title_and_metadata_and_no_text(tmp_path: Path) -> None:
    fields = "title: Größe\ntags: [a, 7]\ncreated: 2022-03-01\nat: 2022-03-01T08:30:00Z\nauthor: {name: Bo}\ndraft: true\ntype: note\n"
    fields += "none:\nlang: no\nzip: 01234\n"
    front = f"---\n{fields}---\n\n"
    body = "# Größe\nfirst\n## B\nsecond\n"
    (tmp_path / "a.md").write_text(front + body)
    found = documents(tmp_path)
    assert [(document.title, document.text) for document in found] == [
        ("a.md > Größe", "# Größe\nfirst\n"),
        ("a.md > Größe > B", "## B\nsecond\n"),
    ]
    own = {"title": "Größe", "tags": ["a", 7], "created": "2022-03-01", "at": "2022-03-01T08:30:00Z", "author.name": "Bo", "draft": True}
    own |= {"lang": "no", "zip": "01234"}
    for document, line in zip(found, (14, 16), strict=True):
        assert document.metadata is not None
        places = {"file": "a.md", "type": "markdown", "line": line, "end_line": line + 1}
        assert document.metadata.items() >= {**own, **places, "front_matter.type": "note"}.items()
        start, end = where(document, "start", "end")
        assert (front + body)[start:end] == document.text  # type: ignore[misc]


@pytest.mark.parametrize(
    "front",
    [
        "tags: [a\n",
        "- a\n- b\n",
        "tags: &a [x]\nmore: [*a, *a]\n",
        "a: !!binary aGk=\n",
        "a: {b: 1}\na.b: 2\n",
        "? [x]\n: y\n" + "[" * 5000 + "\n",
    ],
)
def test_what_is_no_front_matter_stays_text_and_is_told(tmp_path: Path, front: str, caplog: pytest.LogCaptureFixture) -> None:
    text = f"---\n{front}---\nbody\n"
    (tmp_path / "a.md").write_text(text)
    found = documents(tmp_path, SourceOptions(passages="whole"))
    assert [(document.title, document.text) for document in found] == [("a.md", text)]
    assert "front matter left in the text, because it is no YAML of fields: 1 (such as a.md)" in caplog.text


def test_html_becomes_markdown_with_the_lines_of_the_source(tmp_path: Path) -> None:
    pytest.importorskip("markdownify")
    pytest.importorskip("bs4")
    (tmp_path / "a.html").write_text(HTML)
    first, second = documents(tmp_path)
    assert (first.title, second.title) == ("a.html > The page > Top **bold**", "a.html > The page > Top **bold** > Second")
    assert (where(first, "line", "end_line"), where(second, "line", "end_line")) == ((5, 8), (13, 14))
    assert "first\nparagraph" in first.text
    assert "    # comment" in first.text
    assert "item_one" in second.text
    assert "a * b" in second.text
    assert not re.search("menu|alert|color|comment -|html|[\ue000\ue001]", first.text + second.text)


def test_pdf_passages_name_their_pages(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    pages = [f"page {number} " + "w " * 40 for number in range(1, 8)]
    (tmp_path / "a.pdf").write_bytes(make_pdf(pages, "A title"))
    found = documents(tmp_path, SourceOptions(passages="tokens:100"))
    assert len(found) > 3
    for document in found:
        named = [int(number) for number in re.findall(r"page (\d)", document.text)]
        begin, end = where(document, "page", "end_page")
        assert isinstance(begin, int) and isinstance(end, int)  # noqa: PT018
        assert begin <= min(named) <= max(named) <= end
        assert document.title == "a.pdf > A title"
    assert [where(found[0], "page"), where(found[-1], "end_page")] == [(1,), (7,)]


def test_notebooks_give_markdown_and_code_by_cell_without_outputs(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text(json.dumps(NOTEBOOK))
    first, second = documents(tmp_path)
    assert (first.title, second.title) == ("a.ipynb > Load", "a.ipynb > Plot")
    assert first.text == "# Load\nthe data\n\n```python\n# no heading\nx = 1\n```\n\n"
    assert (where(first, "cell", "end_cell"), where(second, "cell", "end_cell")) == ((1, 2), (4, 5))


def test_the_encoding_is_found_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffplain é".encode())
    (tmp_path / "b.txt").write_bytes("latin é".encode("cp1252"))
    (tmp_path / "c.txt").write_bytes("wide é".encode("utf-16"))
    assert [document.text for document in documents(tmp_path)] == ["plain é", "latin é", "wide é"]
    assert "read as cp1252 by guess: 1 (such as b.txt); read as utf-16: 1 (such as c.txt)" in caplog.text


def test_what_is_left_out_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hidden = (".git/a.txt", "node_modules/b.js", "node_modules/x/b.js", "src/.venv/c.py", ".hidden.md")
    for name in (*hidden, "src/d.py", "e.png", "f.csv", "g.txt", "empty.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.md" else "x = 1")
    (tmp_path / "h.txt").write_bytes(b"\0\1\2")
    (tmp_path / "i.ipynb").write_text("{}")
    corpus = open_corpus(tmp_path)
    assert [document.id for document in corpus] == ["g.txt#1", "src/d.py#1"]
    assert list(corpus)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == (
        f"{tmp_path}: files read: 3; hidden files and files of package folders left out: 4 (node_modules: 2, .hidden.md: 1, .venv: 1);"
        " to read those of a name too: --include '*' --include NAME;"
        " files of other types left out: 1 (.png); tables left out: 1 (such as f.csv); unreadable: 2 (such as h.txt)"
    )


def test_hidden_files_and_package_folders_are_read_if_a_pattern_names_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [".git/a.txt", ".github/b.yml", ".github/c.png", "node_modules/d.js", "src/node_modules/e.js", "src/f.py", ".g.md", "h.weird"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1")

    def read(*include: str, exclude: tuple[str, ...] = ()) -> list[str]:
        found = documents(tmp_path, SourceOptions(include=include, exclude=exclude))
        return sorted(str(where(document, "file")[0]) for document in found)

    assert read() == read("*") == read("**") == ["src/f.py"]
    assert read("node_modules/**") == ["node_modules/d.js"]
    assert read("node_modules") == ["node_modules/d.js", "src/node_modules/e.js"]
    assert read(".github/**") == [".github/b.yml", ".github/c.png"]
    assert read(".github/*.yml", ".g.md") == [".g.md", ".github/b.yml"]
    assert read("*", ".*", "node_modules", exclude=("*.png", ".git")) == sorted({*names} - {".git/a.txt", ".github/c.png", "h.weird"})
    caplog.clear()
    assert read(exclude=(".git", ".g.md", "node_modules")) == ["src/f.py"]
    assert "left out: 1 (.github: 1); to read those of a name too: --include '*' --include NAME" in caplog.text
    caplog.clear()
    assert read("src/**") == ["src/f.py"]
    assert "left out: 1 (node_modules: 1); to read those of a name too: --include NAME" in caplog.text
    caplog.clear()
    assert read(".*", "node_modules", exclude=(".git",)) == [
        ".g.md",
        ".github/b.yml",
        ".github/c.png",
        "node_modules/d.js",
        "src/node_modules/e.js",
    ]
    assert "files read: 5; other files left out (--include '*' reads them too): 1 (such as src/f.py)" in caplog.text


def test_links_to_folders_are_not_followed_and_links_to_files_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.txt").write_text("text")
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "c.txt").symlink_to(tmp_path / "a" / "b.txt")
    (tmp_path / "d.txt").symlink_to(tmp_path / "nowhere")
    assert [document.id for document in documents(tmp_path)] == ["c.txt#1", "a/b.txt#1"]
    assert "links to folders that were left out: 1 (such as a/loop)" in caplog.text
    assert "unreadable: 1 (such as d.txt)" in caplog.text


@pytest.mark.parametrize(
    ("include", "exclude", "found"),
    [
        (("*.md",), (), ["a.md", "docs/b.md", "docs/old/c.md"]),
        (("docs/**",), (), ["docs/b.md", "docs/d.py", "docs/old/c.md"]),
        (("docs/*.md",), (), ["docs/b.md"]),
        ((), ("old", "*.py"), ["a.md", "docs/b.md"]),
        (("*.MD",), ("Docs/old/",), ["a.md", "docs/b.md"]),
        (("*.weird",), (), ["e.weird"]),
    ],
)
def test_patterns_choose_files(tmp_path: Path, include: tuple[str, ...], exclude: tuple[str, ...], found: list[str]) -> None:
    for name in ("a.md", "docs/b.md", "docs/d.py", "docs/old/c.md", "e.weird"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    names = {where(document, "file")[0] for document in documents(tmp_path, SourceOptions(include=include, exclude=exclude))}
    assert sorted(map(str, names)) == found


def test_tables_are_read_where_a_field_is_named_or_there_is_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,x\n")
    assert documents(tmp_path) == [Document("1", "x")]
    (tmp_path / "b.md").write_text("words")
    assert [document.id for document in documents(tmp_path)] == ["b.md#1"]
    assert documents(tmp_path, SourceOptions(text=("text",))) == [Document("1", "x")]


def test_texts_of_tables_are_cut_on_request(tmp_path: Path) -> None:
    text = " ".join(f"w{number}" for number in range(50))
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "d", "title": "t", "text": text, "year": 1}) + '\n{"id": "e", "text": ""}\n')
    found = documents(tmp_path / "a.jsonl", SourceOptions(passages="tokens:20"))
    assert [document.id for document in found] == ["d#1", "d#2", "d#3", "e#1"]
    assert "".join(document.text for document in found) == text
    assert where(found[1], "document", "year") == ("d", 1)
    start, end = where(found[1], "start", "end")
    assert isinstance(start, int) and isinstance(end, int)  # noqa: PT018
    assert text[start:end] == found[1].text


@pytest.mark.parametrize(
    ("name", "content", "library", "message"),
    [
        ("a.pdf", b"no PDF", "pypdf", "a.pdf: the PDF cannot be read"),
        ("a.ipynb", b"[]", "", "a.ipynb: not a notebook of format 4"),
        ("a.ipynb", b'{"cells": [{"cell_type": "code", "source": 7}]}', "", "a.ipynb: not a notebook of format 4"),
        ("a.txt", b"\0", "", "a.txt: not text"),
    ],
)
def test_the_only_file_of_a_source_must_be_readable(tmp_path: Path, name: str, content: bytes, library: str, message: str) -> None:
    if library:
        pytest.importorskip(library)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        documents(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module", "kind"), [("a.pdf", "pypdf", "PDF"), ("a.html", "bs4", "HTML"), ("a.html", "markdownify", "HTML")]
)
def test_a_missing_library_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, kind: str
) -> None:
    if module == "markdownify":
        pytest.importorskip("bs4")
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_text("x")
    with pytest.raises(
        InputError, match=rf"{name}: reading {kind} needs .*: pip install 'quiver-retrieval\[files\]', or leave it out with"
    ):
        documents(tmp_path)


def test_an_encrypted_pdf_is_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pypdf = pytest.importorskip("pypdf")
    (tmp_path / "plain.pdf").write_bytes(make_pdf(["words"]))
    writer = pypdf.PdfWriter(clone_from=tmp_path / "plain.pdf")
    writer.encrypt("secret", algorithm="RC4-128")
    writer.write(tmp_path / "locked.pdf")
    with caplog.at_level(logging.INFO, logger="quiver.retrieval.data.files"):
        assert [document.id for document in documents(tmp_path)] == ["plain.pdf#1"]
    assert "locked.pdf: the PDF needs a password" in caplog.text


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="needs a file system that takes any bytes")
def test_a_name_that_is_not_utf_8_and_lone_surrogates_cost_only_themselves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("words")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("lost")
    (tmp_path / "b.ipynb").write_text('{"cells": [{"cell_type": "markdown", "source": "x \\ud83d y"}]}')
    assert [(document.id, document.text.strip()) for document in documents(tmp_path)] == [("a.txt#1", "words"), ("b.ipynb#1", "x ? y")]
    assert r"names with control characters or without an encoding left out: 1 (such as '\udcff.txt')" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SourceOptions(text=("body",)), "--id, --title, --text, --list and --columns name fields of tables"),
        (SourceOptions(id="x"), "--id, --title, --text, --list and --columns name fields of tables"),
    ],
)
@pytest.mark.parametrize("source", ["folder", "file"])
def test_names_of_fields_are_refused_for_files(tmp_path: Path, source: str, options: SourceOptions, message: str) -> None:
    (tmp_path / "a.md").write_text("words")
    with pytest.raises(InputError, match=message):
        open_corpus(tmp_path if source == "folder" else tmp_path / "a.md", options)
