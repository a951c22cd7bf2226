"""Reports to files: a layout and the suffix of the file's name say which one it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_target, write_json, write_text
from quiver.eval.report.compare import Comparison
from quiver.eval.report.compare_markdown import render_comparison
from quiver.eval.report.html import render_html
from quiver.eval.report.latex import render_latex, render_paper_latex
from quiver.eval.report.markdown import render
from quiver.eval.report.model_index import is_card, render_eval_results, render_model_index
from quiver.eval.report.mteb_json import task_results, without_task
from quiver.eval.report.paper import render_paper
from quiver.eval.report.paper_html import render_paper_html
from quiver.eval.results import Results
from quiver.eval.results_folder import read_results

Render: TypeAlias = Callable[[Sequence[Results]], str]

RESULTS: Mapping[str, Render] = {".md": render, ".html": render_html, ".tex": render_latex}
"""Suffix -> how results become that file; the first is that of a file without a suffix too."""

PAPER: Mapping[str, Callable[..., str]] = {".md": render_paper, ".html": render_paper_html, ".tex": render_paper_latex}
"""As ``RESULTS``, beside the rows of the ModernBERT paper."""

CARDS: Mapping[str, Callable[[Results], str]] = {"model-index": render_model_index, "eval-results": render_eval_results}
"""Name -> metadata of a model on the Hugging Face Hub."""

COMPARISON = (".md",)
"""Suffixes of a comparison."""

YAML = (".yaml", ".yml")
"""Suffixes of metadata."""


def write_report(folders: Sequence[str | Path], out: str | Path) -> None:
    """Read folders of results and write one report over all of them; a report already there is replaced.

    Args:
        folders: What ``quiver evaluate`` wrote.
        out: The file; its suffix is a key of ``RESULTS``.

    Raises:
        InputError: The suffix is unknown, a folder is not a complete folder of results, two of them cannot stand in one table, or the
            file cannot be written.
    """
    _write(folders, Path(out), RESULTS)


def write_paper(folders: Sequence[str | Path], out: str | Path, *, against: str | None = None) -> None:
    """As `write_report`, laid out as the paper's Tables 1, 7 and 8 with its rows.

    Args:
        folders: What ``quiver evaluate`` wrote.
        out: The file; its suffix is a key of ``PAPER``.
        against: A row of the paper, such as ``ModernBERT-base``, to take the difference to.

    Raises:
        InputError: As `write_report`; or the paper has no such row.
    """
    _write(folders, Path(out), {suffix: partial(layout, against=against) for suffix, layout in PAPER.items()})


def write_card(folder: str | Path, out: str | Path, *, kind: str = "model-index") -> None:
    """The results of one system as metadata for the Hugging Face Hub; only a file of such metadata alone is replaced.

    Args:
        folder: What ``quiver evaluate`` wrote.
        out: The YAML file; its suffix is in ``YAML``.
        kind: A key of ``CARDS``.

    Raises:
        InputError: The kind is unknown, the file is not YAML by its suffix or holds something else already, the folder is not one of
            results, holds nothing this format can name, or the file cannot be written.
    """
    if kind not in CARDS:
        raise InputError(f"unknown kind of card {kind!r}; there are {', '.join(CARDS)}")
    target = Path(out)
    check_target(target)
    if target.suffix.lower() not in YAML:
        raise InputError(f"{target}: metadata ends in {' or '.join(YAML)}; write it to a file of its own, and copy it where it belongs")
    if target.exists() and not _holds_card(target):
        raise InputError(f"{target}: holds something else than such metadata, which would be lost; name another file")
    write_text(target, CARDS[kind](read_results(folder)))


def write_comparison(comparison: Comparison, out: str | Path) -> None:
    """A comparison as a Markdown file; a file already there is replaced.

    Args:
        comparison: What `quiver.eval.report.compare.compare_results` made.
        out: The file, see `check_comparison_target`.

    Raises:
        InputError: As `check_comparison_target`.
    """
    check_comparison_target(out)
    write_text(Path(out), render_comparison(comparison))


def check_comparison_target(out: str | Path) -> None:
    """Say before a comparison is made that it cannot be written there.

    Args:
        out: The file; its suffix is in ``COMPARISON``, or it has none.

    Raises:
        InputError: The suffix is another, or the file cannot be written.
    """
    _check_format(Path(out), COMPARISON)


def write_mteb(folder: str | Path, out: str | Path) -> tuple[list[Path], list[str]]:
    """The results of one system as files in mteb's shape.

    Args:
        folder: What ``quiver evaluate`` wrote.
        out: The folder to write into; made if it is missing.

    Returns:
        The files, and the collections that mteb has no task for or scores otherwise.

    Raises:
        InputError: The folder is not one of results, mteb knows none of its collections, or the files cannot be written.
    """
    results = read_results(folder)
    contents = task_results(results)
    target = Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror})") from error
    for name, content in contents.items():
        write_json(target / name, content)
    return [target / name for name in contents], without_task(results)


def _write(folders: Sequence[str | Path], out: Path, formats: Mapping[str, Render]) -> None:
    layout = formats[_check_format(out, formats)]
    write_text(out, layout([read_results(folder) for folder in folders]))


def _check_format(out: Path, suffixes: Collection[str]) -> str:
    """The suffix of a report that can be written; a file without one has the first."""
    check_target(out)
    suffix = out.suffix.lower() or next(iter(suffixes))
    if suffix not in suffixes:
        raise InputError(f"{out}: a report of this layout ends in {', '.join(suffixes)}; the suffix says which one it is")
    return suffix


def _holds_card(path: Path) -> bool:
    try:
        return is_card(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}), and what it holds would be lost; name another file") from error
