"""The command line end to end on a small collection; mistakes give one line and exit status 2."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len

from quiver.cli import doctor
from quiver.cli.main import OneLineFormatter
from quiver.cli.options import print_table
from quiver.encoder.attention import flash
from quiver.encoder.cpu.support import kernels_available
from quiver.encoder.schema import SchemaError
from quiver.retrieval.models.biencoder import BiEncoder
from tests.quiver.conftest import make_bi_encoder

DOCUMENTS = {
    "d1": ("Birds", "a bird has wings and feathers"),
    "d2": ("", "the window of a local layer is narrow"),
    "d3": ("Empty", ""),
    "d4": ("Search", "find what was asked for and nothing else"),
}
QUERIES = {"q1": "which animal has wings", "q2": "what does search find", "q3": "not judged"}
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td4\t2\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_bi_encoder(tmp_path / "model", [text for pair in DOCUMENTS.values() for text in pair])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "qrels").mkdir(parents=True)
    rows = [json.dumps({"_id": key, "title": title, "text": text}) for key, (title, text) in DOCUMENTS.items()]
    (folder / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "queries.jsonl").write_text("".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in QUERIES.items()))
    (folder / "qrels" / "test.tsv").write_text(QRELS)
    return folder


def test_doctor_lists_what_extras_lack(quiver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"torch": "some", "no-such": "some", "none": "empty", "rich": "whole"}
    monkeypatch.setattr(metadata, "requires", lambda name: [f'{package}>=1; extra == "{extra}"' for package, extra in needed.items()])
    lines = {
        cells[2]: cells[3]
        for cells in ([cell.strip() for cell in line.split("│")] for line in quiver("doctor").out.splitlines())
        if cells[3:]
    }
    assert [lines[extra] for extra in ("some", "empty", "whole")] == ["missing: no-such", "not installed", "complete"]


def test_doctor_shows_what_the_commands_use(quiver: Callable[..., Any]) -> None:
    facts = json.loads(quiver("doctor", "--json").out)
    used = {"device": "cpu", "dtype": "float32", "attention": "compiled" if kernels_available() else "packed"}
    assert facts["evaluate, index build, serve"] == used
    assert facts["train, pretrain, glue, qa train"] == {**used, "products": "float32"}


@pytest.mark.parametrize(
    ("capability", "used", "trained", "without_flash"),
    [
        ((9, 0), ("bfloat16", "aten_flash"), ("bfloat16", "aten_flash"), None),
        ((7, 5), ("float16", "packed"), ("float32", "packed"), "not used: compute capability 7.5"),
    ],
)
def test_doctor_tells_what_commands_use_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], used: tuple[str, str], trained: tuple[str, str], without_flash: str | None
) -> None:
    """What decides the dtype and the attention backend, of a GPU and of torch's build for it, is simulated; nothing runs on it."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "device_count", lambda: 0)
        patched.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        patched.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)  # a build for CPUs has no such kernel
        patched.setattr(flash, "installed", flash.installed.__wrapped__)  # not cached
        facts = doctor.gather(with_check=False)
    told = facts["evaluate, index build, serve"]
    assert (told["device"], told["dtype"], told["attention"]) == ("cuda", *used)
    assert told.get("flash attention") == without_flash
    training = facts["train, pretrain, glue, qa train"]
    assert (training["device"], training["dtype"], training["attention"]) == ("cuda", *trained)
    assert training["products"] == ("float32 weights, bfloat16 autocast" if trained[0] == "bfloat16" else "float32, without TF32")


def damage(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def is_one_line(err: str) -> bool:
    lines = err.splitlines()
    return len(lines) == 1 and lines[0].startswith("quiver: error: ")


def test_an_index_of_another_model_is_refused(quiver: Callable[..., Any], model: Path, data: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    assert quiver("index", "build", data, "--model", model, "--out", index).code == 0
    other = make_bi_encoder(tmp_path / "other", [text for text, _ in DOCUMENTS.values()], seed=2)
    done = quiver("search", index, "wings", "--model", other)
    assert (done.code, is_one_line(done.err)) == (2, True)
    assert str(model) in done.err
    assert str(other) in done.err
    # The same weights elsewhere are the same model.
    moved = tmp_path / "moved"
    shutil.move(model, moved)
    assert quiver("search", index, "wings", "--model", moved).code == 0
    gone = quiver("search", index, "wings")
    assert (gone.code, is_one_line(gone.err)) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serch",), "No such command 'serch'"),
        (("refresh", "notes"), "No such command 'refresh'; type quiver index refresh (see quiver --help)"),
        (
            ("search", "notes", "owls", "--top", "3"),
            "No such option: --top (Possible options: --out); the number of results is -k (see quiver search --help)",
        ),
        (("search",), "(see quiver search --help)"),
        (("index", "build"), "(see quiver index build --help)"),
        (("bench", "encoder"), "the benchmarks are scripts of the repository, such as python benchmarks/encoder.py"),
    ],
)
def test_a_command_line_that_cannot_be_parsed_is_reported_in_one_line(
    quiver: Callable[..., Any], arguments: tuple[str, ...], message: str
) -> None:
    done = quiver(*arguments)
    assert (done.code, done.out) == (2, "")
    assert is_one_line(done.err), done.err
    assert message in done.err


@pytest.mark.parametrize(("family", "command"), [((), "quickstart"), (("index",), "build")])
def test_a_group_without_a_command_shows_its_help(quiver: Callable[..., Any], family: tuple[str, ...], command: str) -> None:
    alone, asked = quiver(*family), quiver(*family, "--help")
    assert (alone.code, asked.code, alone.err) == (2, 0, "")
    assert alone.out == asked.out
    assert command in alone.out


def test_a_log_message_with_several_problems_is_one_line() -> None:
    error = SchemaError("a.json", ["k: must be > 0, got 0", "size: unknown"])
    record = logging.makeLogRecord({"levelname": "WARNING", "msg": "%s (%s)", "args": ("scoring again", error)})
    shown = OneLineFormatter("%(levelname)s: %(message)s").format(record)
    assert shown == "WARNING: scoring again (a.json: 2 problems; k: must be > 0, got 0; size: unknown)"


@pytest.mark.parametrize("target", [".", "folder", "missing/run.trec"])
def test_files_that_cannot_be_written_are_found_before_encoding(
    quiver: Callable[..., Any], model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    assert quiver("index", "build", data, "--model", model, "--out", tmp_path / "index").code == 0
    assert quiver("evaluate", "--model", "bm25", "--data", data, "--out", tmp_path / "results").code == 0
    (tmp_path / "work" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(BiEncoder, "encode_texts", _must_not_be_called)
    for command in (
        ("search", tmp_path / "index", "--queries", data / "queries.jsonl", "--out", target),
        ("report", tmp_path / "results", "--out", target),
    ):
        done = quiver(*command)
        assert done.code == 2
        assert is_one_line(done.err), done.err
        assert f"{target}: cannot be written" in done.err
    assert [path.name for path in Path().rglob("*")] == ["folder"]


@pytest.mark.parametrize(("kind", "file"), [("query", "queries.jsonl"), ("document", "corpus.jsonl")])
def test_ids_that_no_run_can_hold_are_found_before_encoding(
    quiver: Callable[..., Any], model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, file: str
) -> None:
    damage(data / file, lambda text: text + json.dumps({"_id": "two\nwords", "text": "wings"}) + "\n")
    assert quiver("index", "build", data, "--model", model, "--out", tmp_path / "index").code == 0
    monkeypatch.setattr(BiEncoder, "encode_texts", _must_not_be_called)
    done = quiver("search", tmp_path / "index", "--queries", data / "queries.jsonl", "--out", tmp_path / "run.trec")
    assert done.code == 2
    assert is_one_line(done.err), done.err
    assert f"the {kind} id 'two\\nwords'" in done.err
    assert not (tmp_path / "run.trec").exists()


def _must_not_be_called(*args: object, **kwargs: object) -> None:
    raise RuntimeError("the model was asked for vectors")


def test_a_wide_table_is_printed_in_parts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    header = ("System", "search", *(f"measure {number:02}" for number in range(12)))
    rows = [("ours", "fast", *(f"{number}.123" for number in range(12))), ("theirs", "slow", *["7"] * 12)]
    for width in (80, 300):
        monkeypatch.setenv("COLUMNS", str(width))
        print_table("a title", header, rows)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        shown = "\n".join(lines)
        assert shown.count("a title") == 1
        assert all(shown.count(name) == 1 for name in header[2:])
        assert all(f"{number}.123 " in shown for number in range(12))
        assert shown.count("theirs") == shown.count("System") == (3 if width == 80 else 1), shown


def test_a_path_is_not_broken_where_the_text_beside_it_can_be_narrower(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "urllib3/notes/connection-lifecycle.md:120-130"
    text = "a text of many words, `resource.runInScope(function[, argument, ...args])` and 漢字 " * 3
    rows = [(path, "0.9123", text), ("short", "0.1", "text")]
    for width in (80, 100, 400):
        monkeypatch.setenv("COLUMNS", str(width))
        print_table("hits", ("document", "score", "text"), rows)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(cell_len, lines)) <= width
        assert all(line.strip()[-1] in "hits┓┃┩│┘" for line in lines)  # the right border is there
        assert any(path in line for line in lines)
    assert any(text.strip() in line for line in lines)


def test_markup_in_texts_is_not_interpreted(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("runs/[bold]a[/] :smile:", ("", "value"), [("[/red] :bird:", "[1]"), ("x", "2")])
    shown = capsys.readouterr().out
    for words in ("runs/[bold]a[/] :smile:", "[/red] :bird:", "[1]"):
        assert words in shown
