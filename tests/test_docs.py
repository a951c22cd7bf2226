"""Commands and Python examples in README.md and docs/ use names that exist."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from quiver.cli.main import COMMANDS, app

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "recipes/README.md",
    *sorted(str(p.relative_to(REPOSITORY)) for p in (REPOSITORY / "docs").rglob("*.md")),
]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (REPOSITORY / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Every call of ``quiver`` on a page, in code blocks and in backticks."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
        text = re.sub(r"^```.*?^```", "", (REPOSITORY / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        lines += [" ".join(span.split()) for span in re.findall(r"`(quiver [^`]+)`", text)]
        for line in lines:
            for part in re.split(r"&&|;", line.partition(" #")[0]):
                if match := re.search(r"(?:^|\s)quiver\s+(.+)$", part):
                    found.append((page, match[1]))
    return found


def test_commands_are_found() -> None:
    assert len(commands()) >= 40


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())), ids=lambda value: str(value)[:60])
def test_commands_and_their_options_exist(page: str, line: str) -> None:
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="quiver")
    words = shlex.split(line)
    while words and hasattr(command, "get_command") and not words[0].startswith("-"):
        if "|" in words:
            return  # a list of alternatives in prose
        if command.name == "report" and "/" in words[0]:
            words.insert(0, "write")  # what a folder as first argument stands for
        inner = command.get_command(context, words[0])
        assert inner is not None, f"{page}: no command {words[0]!r} in: quiver {line}"
        command, words = inner, words[1:]
        context = command.context_class(command, info_name=command.name, parent=context)
    options = {name for parameter in command.get_params(context) for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if re.match(r"--?[a-z]", word) and not re.match(r"-\d", word):
            assert word.partition("=")[0] in options | {"--help", "-h", "--version"}, f"{page}: quiver {line}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_names_imported_in_examples_exist(page: str) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page}: {node.module}.{alias.name}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert ((REPOSITORY / page).parent / target).exists(), f"{page}: {target}"


def test_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) < 150


def test_the_readme_example_runs(minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data" / "code"
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": name, "title": "", "text": f"{name}s are birds"} for name in ("owl", "heron")]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "herons"}) + "\n")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\theron\t1\n")
    monkeypatch.chdir(tmp_path)
    [example] = blocks("README.md", "python")
    exec(compile(example.replace("sentence-transformers/all-MiniLM-L6-v2", str(minilm)), "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("owl Owls have wings.\n")


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_is_searched_from_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("sphinx")
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-d",
        str(tmp_path / "cache"),
        str(REPOSITORY / "docs"),
        str(tmp_path / "site"),
    ]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {str(page.relative_to(tmp_path / "site")) for page in (tmp_path / "site").rglob("*.html")}
    assert {f"{page[5:-3]}.html" for page in PAGES if page.startswith("docs/")} <= pages
    commands = (tmp_path / "site" / "reference" / "commands.html").read_text(encoding="utf-8")
    assert all(f">quiver {name}<" in commands for name in COMMANDS)
    assert "shard-memory" in commands
    for page in pages:  # no style, script, font or image of another host
        loaded = re.findall(r'(?:src="|<link [^>]*href="|url\()(?:https?:)?//[^"]+', (tmp_path / "site" / page).read_text(encoding="utf-8"))
        assert not loaded, f"{page}: {loaded}"
    tab = request.getfixturevalue("tab")
    tab.open(f"{(tmp_path / 'site' / 'search.html').as_uri()}?q=tombstone", (1280, 900))
    found = tab.until("[...document.querySelectorAll('#search-results li a')].map(link => link.innerText).join()")
    assert "File formats" in found
    assert not [url for url in tab.requests() if url.startswith("http")]
