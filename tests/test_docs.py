"""Commands and Python examples in README.md and docs/ run, links lead somewhere, and the site builds.

Every fence of ``sh`` and ``python`` is executed, in the order of the page, in a folder with two Markdown files in ``docs`` and with
``data/code``, a part of what ``quiver collections docstrings`` makes there. The Python fences of a page share their names. A fence below
``<!-- not run: REASON -->`` is not executed; the commands in ``<!-- setup ... -->`` are, and readers do not see them. ``quiver serve`` runs
until the end of its page. Training takes two steps of 8 rows, and ``quiver estimate --measure`` measures for a second.

A fence of ``text`` right below shows what the commands print on standard output. The words are compared, not the numbers, which belong to
the whole collection and the whole training; ``...`` in it stands for any text.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import gzip
import importlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from quiver.cli.main import COMMANDS, app
from quiver.retrieval.training.data import prepare_rows
from quiver.retrieval.training.recipe import DISTILLATION, IN_BATCH, LOSSES_BY_KIND, LOSSES_BY_SETTING, LossSection, load_recipe
from tests.hub import fill_hub
from tests.processes import imported_python

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


DEFAULT_COMMANDS = {"report": "write", "estimate": "index"}
"""What a group's arguments stand for where the first is no command of it."""


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())), ids=lambda value: str(value)[:60])
def test_commands_and_their_options_exist(page: str, line: str) -> None:
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="quiver")
    words = shlex.split(line)
    while words and hasattr(command, "get_command"):
        if "|" in words:
            return  # a list of alternatives in prose
        if command.name in DEFAULT_COMMANDS and words[0] not in command.commands:
            words.insert(0, DEFAULT_COMMANDS[command.name])
        if words[0].startswith("-"):
            break
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


def test_messages_in_the_faq_are_those_of_the_code() -> None:
    files = [path for folder in ("encoder", "retrieval", "eval", "quiver") for path in (REPOSITORY / folder).rglob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    texts = "\n".join(
        node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    headings = re.findall(r"^### (.+)$", (REPOSITORY / "docs" / "faq.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(headings) >= 8
    for heading in headings:
        for part in heading.split("..."):
            assert part.strip(" ,;:") in texts, f"docs/faq.md: no message says {part!r}"


def test_the_tests_that_back_supported_models_exist() -> None:
    text = (REPOSITORY / "docs" / "supported-models.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\btest_\w+(?!\w|\.py)", text))
    defined = {
        name
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
    }
    files = set(re.findall(r"\b(test_\w+)\.py", text))
    assert len(named) > 15
    assert named - files <= defined
    assert files <= {path.stem for path in (REPOSITORY / "tests").rglob("test_*.py")}


def table_below(page: str, heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its header."""
    section = (REPOSITORY / page).read_text(encoding="utf-8").partition(f"\n{heading}\n")[2].partition("\n#")[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in section.splitlines() if line.startswith("| `")]


def test_the_table_of_losses_is_that_of_the_code() -> None:
    rows = table_below("docs/training.md", "### Losses")
    names = [name.strip("`") for name, *_ in rows]
    assert sorted(names) == sorted(name for each in LOSSES_BY_KIND.values() for name in each)
    for name, kind, needs, negatives, *_ in ([cell.strip("`") for cell in row] for row in rows):
        assert name in LOSSES_BY_KIND[kind]
        assert ("scores" in needs) is (name in DISTILLATION)
        assert ("the batch" in negatives) is (name in IN_BATCH)
    named = {name for row in rows for name in re.findall(r"`loss\.(\w+)`", row[-1])}
    assert named == set(LOSSES_BY_SETTING) <= set(LossSection.model_fields)


@pytest.mark.parametrize(
    ("row", "settings", "documents"), [pytest.param(*row[:3], id=row[1]) for row in table_below("docs/training.md", "### Data formats")]
)
def test_the_rows_in_the_table_of_data_formats_are_read(row: str, settings: str, documents: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(row.strip("`") + "\n", encoding="utf-8")
    for name, text in {
        "queries": {"query_id": "q1", "text": "limescale"},
        "passages": {"document_id": "d7", "text": "Descale it."},
    }.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(text) + "\n", encoding="utf-8")
    changed = [each.replace("=", f"={tmp_path}/", 1) if each.endswith(".jsonl") else each for each in re.findall(r"`([^`]+)`", settings)]
    scored = ["loss.name=kl"] if "score_fields" in settings else []
    recipe = load_recipe("quickstart", [f"data.train={tmp_path / 'rows.jsonl'}", *changed, *scored])
    rows = prepare_rows(recipe.data, tmp_path / "work", seed=1)
    assert len(rows) >= 1
    assert rows.documents_per_row == int(documents)


FENCE = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->|(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>sh|python)\n(?P<code>.*?)^```$"
    r"(?:\n\n```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
REASONS = (
    "needs a GPU",
    "needs the network",
    "needs several machines",
    "needs Docker",
    "installs packages",
    "takes minutes",
    "the collection is not published",
    "your own data",
)
SLOW = (
    "docs/serving.md",
    "docs/clusters.md",
    "docs/tutorial.md",
    "docs/mining.md",
    "docs/choosing.md",
    "docs/training.md",
    "docs/fine-tuning.md",
    "docs/cpus.md",
    "docs/migrating.md",
    "docs/integrations.md",
    "recipes/README.md",
)


class Fence(NamedTuple):
    """A piece of code of a page; ``reason`` says why it is not run, ``shown`` what it prints."""

    language: str
    code: str
    reason: str | None = None
    shown: str | None = None


def fences(page: str) -> list[Fence]:
    found = FENCE.finditer((REPOSITORY / page).read_text(encoding="utf-8"))
    return [
        Fence("sh", each["setup"]) if each["setup"] else Fence(each["language"], each["code"], each["reason"], each["shown"])
        for each in found
    ]


RUN = [page for page in PAGES if any(each.reason is None for each in fences(page))]


def test_a_fence_that_is_not_run_says_why() -> None:
    every = [(page, each) for page in PAGES for each in fences(page)]
    for page, each in every:
        assert each.reason is None or each.reason.startswith(REASONS), f"{page}: {each.reason}"
    for page in PAGES:  # no fence is overlooked, and none is marked in another way
        seen = [each for each in fences(page) if each.code in (REPOSITORY / page).read_text(encoding="utf-8")]
        assert len(seen) >= len(
            re.findall(r"^ *```(?:sh|bash|shell|console|python|py)\b", (REPOSITORY / page).read_text(encoding="utf-8"), re.MULTILINE)
        ), page
    run = [each for _, each in every if each.reason is None]
    assert len(run) >= 2 * (len(every) - len(run)), f"only {len(run)} of {len(every)} fences are run"


def prints_as_shown(shown: str, printed: str) -> bool:
    """Whether two texts have the same words; rules of tables and the values of numbers are not compared."""
    want, got = (re.sub(r"\d[\d.,:]*", "0", re.sub(r"[\u2500-\u257f]", " ", text)) + "\n" for text in (shown, printed))
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


class Shell:
    """Runs the fences of one page in a folder."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.service: subprocess.Popen[str] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def run(self, page: str, fence: Fence) -> None:
        code = fence.code.replace("127.0.0.1:8080", f"127.0.0.1:{self.port}").replace("localhost:8080", f"127.0.0.1:{self.port}")
        if fence.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as caught:
                exec(compile(code, page, "exec"), self.names)
            printed = caught.getvalue()
        else:
            parts = re.split(r"^(quiver serve .*\n)", code.replace("\\\n", " "), flags=re.MULTILINE)
            printed = "".join(self.call(page, part) for part in parts if part.strip())
        assert fence.shown is None or prints_as_shown(fence.shown, printed), f"{page}:\n{code}\nprints\n{printed}"

    def call(self, page: str, commands: str) -> str:
        """Run commands, and return what they print."""
        if commands.startswith("quiver serve "):
            self.serve(commands)
            return ""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f'curl() {{ command curl -fsS "$@"; }}\n{commands}'],
            **{**self.settings(), "stderr": subprocess.PIPE},
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{page}:\n{commands}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout)

    def settings(self) -> dict[str, Any]:
        return {
            "cwd": self.folder,
            "env": self.environment,
            "text": True,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "stdin": subprocess.DEVNULL,
        }

    def serve(self, code: str) -> None:
        self.stop()
        words = [*shlex.split(code, comments=True), "--port", str(self.port)]
        self.service = subprocess.Popen(words, **self.settings())
        end = time.monotonic() + 60
        while self.service.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5):
                return
            time.sleep(0.1)
        self.service.kill()
        raise AssertionError(f"{code}\n{self.service.communicate()[0]}")

    def stop(self) -> None:
        if self.service is not None:
            self.service.terminate()
            said, _ = self.service.communicate(timeout=30)
            assert self.service.returncode == 0, said
            self.service = None


def cut(source: Path, target: Path) -> None:
    """Write a part of a collection: few judged queries of each split with their documents, and few pairs to train on."""
    target.mkdir(parents=True)
    (target / "qrels").mkdir()
    kept: set[str] = set()
    for judgements in sorted((source / "qrels").iterdir()):
        header, *rows = judgements.read_text(encoding="utf-8").splitlines()
        (target / "qrels" / judgements.name).write_text("\n".join([header, *rows[::9][:20]]) + "\n", encoding="utf-8")
        kept.update(key for row in rows[::9][:20] for key in row.split("\t")[:2])
    for name in ("corpus.jsonl", "queries.jsonl"):
        lines = (source / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (target / name).write_text("".join(line for line in lines if json.loads(line)["_id"] in kept), encoding="utf-8")
    with gzip.open(source / "train.jsonl.gz", "rt", encoding="utf-8") as pairs, gzip.open(target / "train.jsonl.gz", "wt") as few:
        few.writelines(itertools.islice(pairs, 0, 4000, 20))


SHORTER = ("training.max_steps=2", "training.batch_size=8", "data.limit=64")
"""Settings of every training."""

# The variable is read when the library is imported, which has been when a process is forked.
FIND_MODELS = "import os, huggingface_hub.constants as hub; hub.HF_HUB_CACHE = os.environ['HF_HOME'] + '/hub'"


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> tuple[Path, dict[str, str]]:
    """A folder with ``data/code``, and the environment of commands: a Hub without a network, and a ``quiver`` that starts quickly."""
    root = tmp_path_factory.mktemp("docs")
    (root / "bin").mkdir()
    command = root / "bin" / "quiver"
    shorter = (
        f'case "$1 $2" in train*|sweep*) set -- "$@" {" ".join(SHORTER)};;\n'
        'estimate*) case "$*" in *--measure*) set -- "$@" --seconds 1;; esac;;\n'
        f'"collections docstrings") [ "$3 $4" != "--out data/code" ] || {{ mkdir -p $4 && cp -r {root}/data/code/. $4; '
        f"cat {root}/said; exit; }};; esac"
    )
    called = f"{FIND_MODELS}; import sys; from quiver.cli.main import main; sys.argv[0] = 'quiver'; main()"
    command.write_text(f'#!/bin/sh\n{shorter}\nexec {imported_python()} -c {shlex.quote(called)} "$@"\n')
    command.chmod(0o755)
    fill_hub(root / "hub", minilm)
    environment = dict(os.environ) | {
        "PATH": f"{root / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HOME": str(root / "hub"),
        "HF_HUB_OFFLINE": "1",
        "QUIVER_CACHE": str(root / "cache"),
        "COLUMNS": "100",
        "TOKEN": "a token of the documentation",
        "QUIVER_TOKEN": "a token of the documentation",
    }
    mine = [command, "collections", "docstrings", "--out", "whole"]
    mined = subprocess.run(mine, cwd=root, env=environment, check=True, capture_output=True, text=True)
    (root / "said").write_text(mined.stdout.replace("whole", "data/code"), encoding="utf-8")
    cut(root / "whole", root / "data" / "code")
    (root / "docs").mkdir()
    for page in ("indexes.md", "corpora.md"):
        shutil.copy(REPOSITORY / "docs" / page, root / "docs")
    return root, environment


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in RUN])
def test_the_examples_of_a_page_run(
    page: str, workshop: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, environment = workshop
    for folder in ("data", "docs"):
        shutil.copytree(root / folder, tmp_path / folder)
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIVER_CACHE", environment["QUIVER_CACHE"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root / "hub" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def load_shorter(recipe: Any, overrides: Any) -> Any:
        if isinstance(overrides, dict):
            overrides = [f"{name}={json.dumps(value)}" for name, value in overrides.items()]
        return load_recipe(recipe, [*overrides, *SHORTER])

    monkeypatch.setattr("quiver.eval.training.load_recipe", load_shorter)
    shell = Shell(tmp_path, environment)
    try:
        for fence in fences(page):
            if fence.reason is None:
                shell.run(page, fence)
    finally:
        shell.stop()


def shown(notebook: Any) -> list[bool]:
    """For each code cell whether it has an output that is not a warning."""
    return [any(output.get("name") != "stderr" for output in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted(path.stem for path in (REPOSITORY / "docs" / "notebooks").glob("*.ipynb")))
def test_a_notebook_runs(notebook: str, workshop: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    root, environment = workshop
    shutil.copytree(root / "data", tmp_path / "data")
    started = f"{FIND_MODELS}; from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"
    kernel = {"argv": [imported_python(), "-c", started, "-f", "{connection_file}"], "display_name": "Python", "language": "python"}
    (tmp_path / "kernels" / "forked").mkdir(parents=True)
    (tmp_path / "kernels" / "forked" / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    content = nbformat.read(REPOSITORY / "docs" / "notebooks" / f"{notebook}.ipynb", as_version=4)
    written = shown(content)
    monkeypatch.chdir(tmp_path)
    nbclient.NotebookClient(content, timeout=120, kernel_name="forked").execute(env=environment)  # a failed cell raises
    assert shown(content) == written, "run the notebook again: its stored outputs are those of an earlier version"


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
    assert commands.count('role="heading" aria-level="2"') == commands.count('role="heading"') > 2
    for page in pages:  # no style, script, font or image of another host
        loaded = re.findall(r'(?:src="|<link [^>]*href="|url\()(?:https?:)?//[^"]+', (tmp_path / "site" / page).read_text(encoding="utf-8"))
        assert not loaded, f"{page}: {loaded}"
    tab = request.getfixturevalue("tab")
    tab.open(f"{(tmp_path / 'site' / 'search.html').as_uri()}?q=tombstone", (1280, 900))
    found = tab.until("[...document.querySelectorAll('#search-results li a')].map(link => link.innerText).join()")
    assert "File formats" in found
    assert not [url for url in tab.requests() if url.startswith("http")]
