"""LaTeX: golden rows, marks, and the structure of the output; compiled if a compiler is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.eval.report.compare import compare_results, comparison_report, significance
from quiver.eval.report.formats import escape_latex, render_latex
from quiver.eval.report.paper import paper_layouts, paper_report
from quiver.eval.report.retrieval import latex_report
from quiver.eval.results import CollectionResult, Results, read_results

MakeScored = Callable[..., CollectionResult]
MakeResults = Callable[..., Results]

COMMANDS = {
    *("begin", "end", "centering", "toprule", "midrule", "bottomrule", "endhead", "caption", "label", "textbf", "underline", "rotatebox"),
    *("footnotesize", "setlength", "tabcolsep", "textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar"),
    *("symbol", "c", "u", "r", "v", "ss", "ldots", "times", "textsuperscript", "phantom"),
}


def headline(results: list[Results]) -> str:
    report, comments = latex_report(results)
    return render_latex(report, comments=comments)


NASTY = r"a\b{c}d&e%f$g#h_i~j^k<l>m|n" + '"o"'
STRANGE = "[*caf\u00e9 \u0159\u016f\u015f\u0103 \u00df\u2026 2\u00d7 a--b---c ?`\x00\x1b\u202e\ud800 \u4e2d\u6587 \U0001f600 \u0105"


@pytest.fixture
def results(make_scored: MakeScored, make_results: MakeResults) -> list[Results]:
    forums = [make_scored(f"forum_{letter}", score, group="forums", group_size=2) for letter, score in (("a", 0.2), ("b", 0.4))]
    return [
        make_results("out/models/alpha_1", make_scored("scifact", 0.65704, floor=0.657), make_scored("cosqa", 0.4), *forums),
        make_results(f"beta {NASTY}", make_scored("scifact", 0.65698), make_scored("cosqa", 0.5), command="quiver\nevaluate 50%"),
        make_results("gamma", make_scored("scifact", 0.6), make_scored("cosqa", 0.3), kind="colbert"),
    ]


def body(latex: str) -> list[list[str]]:
    """Cells of all rows of all tables; checks that each row has the number of columns of its table."""
    tables = re.findall(r"\\begin\{(?:tabular|longtable)\}\{((?:[lr]|p\{\d+em\})*)\}\n(.*?)\\end\{", latex, flags=re.DOTALL)
    assert tables
    found = []
    for columns, content in tables:
        rules = (r"\toprule", r"\midrule", r"\bottomrule", r"\endhead")
        lines = [line for line in content.splitlines() if line not in rules and not line.startswith(r"\caption")]
        assert all(line.endswith(r" \\") for line in lines)
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)&", line.removesuffix(r" \\"))] for line in lines]
        assert {len(row) for row in cells} == {len(re.sub(r"\{\d+em\}", "", columns))}
        found += cells
    return found


def check_structure(latex: str) -> None:
    """Check that environments nest, braces and dollars are balanced, and all commands are known."""
    code = "\n".join(line for line in latex.splitlines() if not line.startswith("%"))
    stack = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+\*?)\}", code):
        if kind == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert not stack
    depth = 0
    for brace in re.findall(r"(?<!\\)(?:\\\\)*([{}])", code):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    assert depth == 0
    assert len(re.findall(r"(?<!\\)\$", code)) % 2 == 0
    assert not re.findall(r"(?<!\\)[#~^]", code)
    labels = re.sub(r"\\label\{[^}]*\}", "", code)
    assert not re.findall(r"(?<!\\)_", labels)
    commands = set(re.findall(r"\\([a-zA-Z]+)", code))
    assert commands <= COMMANDS


def test_the_headline_table_has_the_expected_rows(results: list[Results]) -> None:
    latex = headline(results)
    check_structure(latex)
    header, *rows = body(latex)
    assert header == ["System", "Average", "scifact", "cosqa", "forums"]
    assert rows[0] == ["bm25", "", r"\textbf{65.70}", "", ""]
    # Equal figures look equal: 65.698 and 65.704 are both shown as 65.70. A column of one figure has no best.
    assert rows[1] == [r"alpha\_1", "45.23", r"\textbf{65.70}", r"\underline{40.00}", "30.00"]
    assert latex.count(r"\midrule") == 2  # under the header, and between the baseline and the systems


def test_every_text_is_escaped() -> None:
    assert escape_latex(NASTY) == (
        r"a\textbackslash{}b\{c\}d\&e\%f\$g\#h\_i\textasciitilde{}j\textasciicircum{}k\textless{}l\textgreater{}m\textbar{}n"
        r"\symbol{34}o\symbol{34}"
    )
    assert escape_latex(" two\n words ") == "two words"
    assert escape_latex(STRANGE) == (
        r"{[}{*}caf\'{e} \v{r}\r{u}\c{s}\u{a} \ss{}\ldots{} 2$\times$ a-{}-b-{}-{}-c ?\`{}"
        " {[}U+4E2D]{[}U+6587] {[}U+1F600] {[}U+0105]"
    )


def test_a_table_of_many_rows_may_break_across_pages(make_scored: MakeScored, make_results: MakeResults) -> None:
    many = [make_results(f"system-{number}", make_scored("scifact", number / 100)) for number in range(60)]
    latex = headline(many)
    check_structure(latex)
    assert latex.startswith("% Needs \\usepackage{booktabs} and \\usepackage{longtable}.")
    assert r"\begin{table" not in latex
    header, *rows = body(latex)
    assert header == ["System", "scifact"]
    assert [row[0] for row in rows] == [f"system-{number}" for number in range(60)]
    assert rows[-1][1] == r"\textbf{59.00}"


def test_long_names_are_broken_into_lines(make_scored: MakeScored, make_results: MakeResults) -> None:
    latex = headline([make_results("long name " * 9, make_scored("scifact", 0.5)), make_results("short", make_scored("scifact", 0.4))])
    check_structure(latex)
    assert r"\begin{tabular}{p{16em}r}" in latex


def test_a_line_break_in_a_text_does_not_end_a_comment(make_scored: MakeScored, make_results: MakeResults) -> None:
    inside = "x\n\\input{a}\r\\input{b}\u2028\\input{c}\x0b\\input{d}\x85\\input{e}\x00\ud800"
    scored = make_scored(f"scifact{inside}", 0.5, revision=inside, data_sha256=inside, split=f"test{inside}")
    latex = headline([make_results(f"alpha{inside}", scored, command=inside)])
    comments = [line for line in latex.split("\n") if line.startswith("%")]
    assert len(comments) == 3
    assert sum(line.count("\\input{a}") for line in comments) == 6  # name, split, revision, checksum; label, command
    code = re.split("[\n\r\u2028\x0b\x85]", latex)
    assert not [line for line in code if "\\input" in line and not line.startswith("%")]
    assert latex.encode("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
@pytest.mark.parametrize("encoding", ["", "\\usepackage[T1]{fontenc}\n"])
def test_the_document_compiles(
    encoding: str,
    results: list[Results],
    make_scored: MakeScored,
    make_results: MakeResults,
    make_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    scores = {"low": 0.1, "high_50%": 0.5, "longest-name/" + "x" * 40: 0.9}
    sets = ["scifact", "a_b&c", *(f"forum-{number}" for number in range(12))]
    folders = [
        make_folder(name, {each: {f"q{number}": score for number in range(9)} for each in sets}, folder=str(place))
        for place, (name, score) in enumerate(scores.items())
    ]
    comparison = comparison_report(compare_results(*folders), latex=True)
    tested, _ = latex_report([read_results(each) for each in folders], significance=significance(folders, list(map(read_results, folders))))
    results = [*results, make_results(STRANGE, make_scored("scifact", 0.5), make_scored(STRANGE, 0.5))]
    many = [make_results(f"system-{number}", make_scored("scifact", number / 100)) for number in range(60)]
    long = headline(many).replace("tab:retrieval", "tab:many")
    document = (
        f"\\documentclass{{article}}\n{encoding}\\usepackage{{booktabs}}\n\\usepackage{{graphicx}}\n\\usepackage{{longtable}}\n\\begin{{document}}\n"
        f"{headline(results)}\n{render_latex(paper_report(paper_layouts(results, against='ModernBERT-base')))}\n"
        # A name of another label, because this table stands twice in one document.
        f"{render_latex(tested).replace('tab:retrieval', 'tab:tested')}\n{render_latex(comparison)}\n{long}\n\\end{{document}}\n"
    )
    (tmp_path / "report.tex").write_text(document, encoding="utf-8")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "report.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert not re.findall("Float too large.*|multiply.*", (tmp_path / "report.log").read_text(encoding="latin-1"))
    assert (tmp_path / "report.pdf").stat().st_size > 0
