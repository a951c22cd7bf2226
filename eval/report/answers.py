"""Scores of models that answer with spans, by the length of question and paragraph, beside those of Jeong et al.

Every figure is from ``results.json`` of ``quiver qa`` or from `quiver.eval.published`, in points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError
from quiver.eval.published import KORQUAD, KORQUAD_SOURCE
from quiver.eval.report.formats import Cell, Column, Report, Section, Table, check_format, table, write
from quiver.eval.results import FILE, read_versioned

SCHEMA = "quiver-qa/1"
NOTES = (
    "In points, as the official script defines them; below each figure its number of questions. Lengths are those of question, paragraph"
    " and special tokens as one sequence, counted by the model's own tokenizer: of models with different tokenizers a column holds"
    " different questions."
)


def write_answers_report(folders: Sequence[str | Path], out: str | Path, *, title: str = "") -> None:
    """Compare results folders of ``quiver qa train`` or ``quiver qa evaluate`` on the same questions, replacing an existing report."""
    check_format(Path(out))
    results = {str(folder): read_versioned(Path(folder) / FILE, SCHEMA, command="quiver qa") for folder in folders}
    try:
        data = {label: f"{each['scores']['questions']:,} questions, {each['official']}" for label, each in results.items()}
        first, *others = data
        if other := next((label for label in others if data[label] != data[first]), None):
            raise InputError(f"{first} ({data[first]}) and {other} ({data[other]}): compare results on the same questions")
        sections = [Section(name, (_compare_answers(results, key, name),), key) for key, name in (("exact", "Exact match"), ("f1", "F1"))]
    except (KeyError, TypeError) as error:
        raise InputError(f"a {FILE} is damaged: the field {error} is missing or has a wrong type") from error
    write(Report(title or "Span question answering by length", tuple(sections)), Path(out))


def _compare_answers(results: dict[str, dict[str, Any]], measure: str, name: str) -> Table:
    ranges = sorted({(each["above"], each["up_to"] or 0) for one in results.values() for each in one["by_length"]})
    headings = (f"{above + 1:,} to {up_to:,}" if up_to else f"{above + 1:,} tokens or more" for above, up_to in ranges)
    columns = [Column("Model", numeric=False, wide=True), Column("Window", "tokens"), Column("Paragraphs", numeric=False)]
    rows: list[list[Cell | str]] = []
    caption = NOTES
    if next(iter(results.values()))["official"] == "korquad_v1":
        caption += f" Published rows: {KORQUAD_SOURCE}, trained on 54,366 questions and tested on the 5,774 of KorQuAD_v1.0_dev.json."
        for (model, size), scores in KORQUAD.items():
            rows.append([f"{model}-{size} (paper)", str(size), "head", f"{scores[measure]:.2f}", *[""] * len(ranges)])
    published = len(rows)
    for label, content in results.items():
        found = {(each["above"], each["up_to"] or 0): each["scores"] for each in content["by_length"]}
        settings, scored = content["settings"], (content["scores"], *map(found.get, ranges))
        cells = ("" if one is None else Cell(f"{100 * one[measure]:.2f}", one[measure], note=f"{one['questions']:,}") for one in scored)
        rows.append([label, str(settings["max_length"]), settings.get("paragraphs", "overlap"), *cells])
    made = table([*columns, *(Column(heading, ranked=True) for heading in ("All", *headings))], rows, name=name, caption=caption)
    marked = [replace(row, kind="published" if place < published else "measured") for place, row in enumerate(made.rows)]
    return replace(made, rows=tuple(marked))
