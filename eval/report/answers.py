"""Scores of models that answer with spans, by the length of question and paragraph, beside those of Jeong et al.

Every figure is from ``results.json`` of ``quiver qa`` or from `quiver.eval.published`, in points.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError
from quiver.eval.published import KORQUAD, KORQUAD_SOURCE
from quiver.eval.report.formats import Cell, Column, Report, RowKind, Section, check_format, table, write
from quiver.eval.results import read_versioned

SCHEMA, RESULTS = "quiver-qa/1", "results.json"
MEASURES = {"exact": "Exact match", "f1": "F1"}
NOTES = (
    "In points, as the official script defines them; below each figure its number of questions. Lengths are those of question, paragraph"
    " and special tokens as one sequence, counted by the model's own tokenizer: of models with different tokenizers a column holds"
    " different questions."
)


def answers_report(results: Mapping[str, Mapping[str, Any]], *, title: str = "") -> Report:
    """Compare results of ``quiver qa`` on the same questions: label -> content of ``results.json``."""
    first = next(iter(results))
    data = {label: (each["official"], each["scores"]["questions"]) for label, each in results.items()}
    if other := next((label for label in data if data[label] != data[first]), None):
        raise InputError(
            f"{first} answers {data[first][1]:,} questions ({data[first][0]}) and {other} {data[other][1]:,} ({data[other][0]}); "
            "compare results on the same questions"
        )
    ranges = sorted({(each["above"], each["up_to"]) for one in results.values() for each in one["by_length"]}, key=lambda each: each[0])
    korquad = data[first][0] == "korquad_v1"
    caption = NOTES + f" Published rows: {KORQUAD_SOURCE}, trained on 54,366 questions." * korquad
    sections = []
    for measure, name in MEASURES.items():
        headings = [f"{above + 1:,} tokens or more" if up_to is None else f"{above + 1:,} to {up_to:,}" for above, up_to in ranges]
        columns = [Column("Model", numeric=False, wide=True), Column("Window", "tokens"), Column("Paragraphs", numeric=False)]
        columns += [Column(heading, ranked=True) for heading in ("All", *headings)]
        published = [(f"{model}-{size} (paper)", str(size), "head", f"{scores[measure]:.2f}") for (model, size), scores in KORQUAD.items()]
        rows: list[Sequence[Cell | str]] = [(*each, *[""] * len(ranges)) for each in published] if korquad else []
        rows += [_measured_cells(label, each, measure, ranges) for label, each in results.items()]
        made = table(columns, rows, name=name, caption=caption)
        origins: tuple[RowKind, RowKind] = ("published", "measured")
        kinds = (origins[place >= len(rows) - len(results)] for place in range(len(rows)))
        marked = tuple(replace(row, kind=kind, group=kind) for row, kind in zip(made.rows, kinds, strict=True))
        sections.append(Section(name, (replace(made, rows=marked),), measure))
    return Report(title or "Span question answering by length", tuple(sections))


def _measured_cells(label: str, content: Mapping[str, Any], measure: str, ranges: Sequence[tuple[int, int | None]]) -> list[Cell | str]:
    found = {(each["above"], each["up_to"]): each["scores"] for each in content["by_length"]}
    settings = content["settings"]

    def cells() -> Iterator[Cell | str]:
        for scores in (content["scores"], *map(found.get, ranges)):
            points = None if scores is None else 100 * scores[measure]
            yield "" if points is None else Cell(f"{points:.2f}", points, note=f"{scores['questions']:,}")

    return [label, str(settings["max_length"]), settings.get("paragraphs", "overlap"), *cells()]


def write_answers_report(folders: Sequence[str | Path], out: str | Path, *, title: str = "") -> None:
    """Write the comparison of results folders of ``quiver qa train`` or ``quiver qa evaluate``, replacing an existing report."""
    check_format(Path(out))
    found = {str(folder): read_versioned(Path(folder) / RESULTS, SCHEMA, command="quiver qa") for folder in folders}
    try:
        report = answers_report(found, title=title)
    except (KeyError, TypeError) as error:
        raise InputError(f"a {RESULTS} is damaged: the field {error} is missing or has a wrong type") from error
    write(report, Path(out))
