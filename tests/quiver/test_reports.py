"""``quiver report``, and the options of ``quiver evaluate``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def results(quiver: Callable[..., Any], model: Path, data: Path, tmp_path: Path) -> Path:
    assert quiver("evaluate", "--model", model, "--data", data, "--out", tmp_path / "results" / "a").code == 0
    assert quiver("evaluate", "--model", "bm25", "--data", data, "--out", tmp_path / "results" / "b").code == 0
    return tmp_path / "results"


def test_an_evaluation_writes_reports(results: Path) -> None:
    assert (results / "a" / "report.md").read_text().startswith("# Retrieval results")
    page = (results / "a" / "report.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "scifact" in page


@pytest.mark.parametrize(
    ("file", "start"),
    [("all.md", "# Retrieval results"), ("all", "# Retrieval results"), ("all.html", "<!doctype html>"), ("all.tex", "%")],
)
def test_the_suffix_chooses_the_format_of_a_report(
    quiver: Callable[..., Any], results: Path, tmp_path: Path, file: str, start: str
) -> None:
    done = quiver("report", results / "a", results / "b", "--out", tmp_path / file)
    assert (done.code, done.out) == (0, f"report: {tmp_path / file}\n")
    written = (tmp_path / file).read_text().lower()
    assert written.startswith(start.lower())
    # The long form is the same command.
    assert quiver("report", "write", results / "a", results / "b", "--out", tmp_path / f"again-{file}").code == 0
    assert (tmp_path / f"again-{file}").read_text().lower() == written


def test_the_paper_layout_has_the_rows_of_the_paper_and_of_the_results(quiver: Callable[..., Any], results: Path, tmp_path: Path) -> None:
    for file in ("table.md", "table.tex", "table.html"):
        done = quiver("report", results / "a", "--layout", "paper", "--against", "ModernBERT-base", "--out", tmp_path / file)
        assert done.code == 0, done.err
        assert "57.0" in (tmp_path / file).read_text()  # SciFact of ModernBERT-base in Table 7
    done = quiver("report", results / "a", "--layout", "paper", "--against", "GPT", "--out", tmp_path / "other.md")
    assert (done.code, "the paper has no row 'GPT'" in done.err) == (2, True)
    done = quiver("report", results / "a", "--against", "ModernBERT-base", "--out", tmp_path / "other.md")
    assert (done.code, "--layout paper" in done.err) == (2, True)


def test_a_comparison_is_printed_written_and_given_as_json(quiver: Callable[..., Any], results: Path, tmp_path: Path) -> None:
    printed = quiver("report", "compare", results / "b", results / "a")
    assert printed.code == 0, printed.err
    assert "scifact" in printed.out
    written = quiver("report", "compare", "bm25", results / "a", "--out", tmp_path / "comparison.md")
    assert written.out.endswith(f"comparison: {tmp_path / 'comparison.md'}\n")
    assert "Recall@100" in (tmp_path / "comparison.md").read_text()
    assert max(map(len, printed.out.splitlines())) <= 80
    machine = json.loads(quiver("report", "compare", results / "b", results / "a", "--json").out)
    pairing = machine["pairings"][0]
    assert pairing["data_set"].startswith("scifact")
    assert quiver("report", "compare", results / "a").code == 2


def test_a_collection_that_fails_is_listed_and_evaluated_by_the_same_command(
    quiver: Callable[..., Any], data: Path, tmp_path: Path
) -> None:
    other, out = tmp_path / "mine" / "data", tmp_path / "out"
    command = ("evaluate", "--model", "bm25", "--data", data, "--data", other, "--title", "Two collections", "--out", out)
    done = quiver(*command)
    assert done.code == 1
    assert "scifact.test: 2 queries, 6 documents; in points" in done.out
    assert "100.00" in done.out
    *_, first, reason, again = done.err.splitlines()
    assert first == "quiver: error: 1 of 2 collections were not evaluated"
    assert reason.startswith(f"  {other}: unknown collection")
    assert "repeat the command" in again
    assert "blank, because not all were evaluated" in " ".join(done.out.split())
    assert json.loads((out / "results.json").read_text())["ndcg@10"] is None
    assert (out / "report.md").read_text().startswith("# Two collections\n")
    shutil.copytree(data, other)
    done = quiver(*command)
    assert (done.code, done.err) == (0, "")
    assert "mine.test" in done.out
    assert "average over 2 data sets, in points" in done.out


def test_a_collection_and_its_repeated_judgements_are_named_and_merged_by_options(
    quiver: Callable[..., Any], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert quiver("index", "build", data, "--model", "bm25", "--out", "words").code == 0
    Path("clicks.csv").write_text("time,query,document,grade\n1,birds,d0,1\n2,birds,d0,3\n3,salt,d3,1.0\n")
    command = ("evaluate", "--index", "words", "--queries", "clicks.csv", "--qrels", "clicks.csv", "--out", "out")
    done = quiver(*command)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "clicks.csv:3: document 'd0' is already judged for query 'birds' on line 2, with grade 1 instead of 3" in done.err
    done = quiver(*command, "--duplicate-judgements", "sum", "--collection-name", "shop")
    assert done.code == 0, done.err
    assert "shop: 2 queries" in done.out


def test_results_are_written_as_cards_and_mteb_files(quiver: Callable[..., Any], results: Path, tmp_path: Path) -> None:
    assert quiver("report", "card", results / "a", "--out", tmp_path / "card.yaml").code == 0
    index = yaml.safe_load((tmp_path / "card.yaml").read_text().strip("-\n"))["model-index"]
    assert index[0]["results"][0]["metrics"][0]["type"] == "ndcg_at_10"
    # Six documents are not the SciFact that mteb has.
    done = quiver("report", "mteb", results / "a", "--out", tmp_path / "mteb")
    assert (done.code, "mteb has no task" in done.err) == (2, True)
    assert not (tmp_path / "mteb").exists()


def test_a_card_overwrites_only_cards(quiver: Callable[..., Any], results: Path, tmp_path: Path) -> None:
    def card(out: Path, *options: str) -> Any:
        return quiver("report", "card", results / "a", "--out", out, *options)

    for out in (results / "a" / "results.json", tmp_path / "README.md", tmp_path / "card"):
        before = out.read_text() if out.exists() else None
        done = card(out)
        assert (done.code, len(done.err.splitlines()), "must end in .yaml or .yml" in done.err) == (2, 1, True)
        assert (out.read_text() if out.exists() else None) == before
    mine = tmp_path / "mine.yml"
    for content in (b"model-index: []\nlicense: mit\n", b"# words\n", b"\xff\xfe", b""):
        mine.write_bytes(content)
        done = card(mine)
        assert (done.code, len(done.err.splitlines()), "holds something other" in done.err) == (2, 1, True)
        assert mine.read_bytes() == content
    first = card(tmp_path / "new.yml"), (tmp_path / "new.yml").read_text()
    again = card(tmp_path / "new.yml"), (tmp_path / "new.yml").read_text()
    assert (first[0].code, again[0].code) == (0, 0)
    assert first[1] == again[1]
    assert "README" not in quiver("report", "card", "--help").out


def test_vectors_are_cached_unless_no_cache_is_given(
    quiver: Callable[..., Any], model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cached(name: str) -> int:
        found: int = json.loads((tmp_path / name / "results.json").read_text())["collections"][0]["cached"]
        return found

    command = ("evaluate", "--model", model, "--data", data, "--no-bm25", "--out")
    assert quiver(*command, tmp_path / "one", "--no-cache").code == 0
    assert quiver(*command, tmp_path / "two").code == 0
    assert quiver(*command, tmp_path / "three").code == 0
    assert quiver(*command, tmp_path / "four", "--cache", tmp_path / "vectors").code == 0
    assert [cached(name) for name in ("one", "two", "three", "four")] == [0, 0, len((data / "corpus.jsonl").read_text().splitlines()), 0]
    assert quiver(*command, tmp_path / "five", "--cache", tmp_path / "vectors", "--no-cache").code == 2


def test_a_report_that_cannot_take_the_system_is_found_before_scoring(
    quiver: Callable[..., Any], results: Path, data: Path, tmp_path: Path
) -> None:
    report = tmp_path / "all.html"
    assert quiver("report", results / "a", results / "b", "--out", report).code == 0
    (results / "b" / "results.json").unlink()
    for target, message in ((report, "no results.json here"), (tmp_path / "all.pdf", ".pdf")):
        done = quiver("evaluate", "--model", "bm25", "--data", data, "--out", tmp_path / "out", "--add-to", target)
        assert (done.code, message in done.err, (tmp_path / "out").exists()) == (2, True, False)
