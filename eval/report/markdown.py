"""Results as Markdown: the table, what is behind each number, and how to have it again.

The report is a function of the results alone, so that equal results give equal bytes. It adds no number that is not in
``results.json``; measures are shown in points, hundredths of a fraction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TypeAlias

from encoder.errors import InputError
from eval.report.tables import escape, table
from eval.results import HEADLINE, CollectionResult, Results, System
from eval.results_folder import read_results
from retrieval.files import atomic_file

LABELS: Mapping[str, str] = {
    "ndcg@10": "nDCG@10",
    "map": "MAP",
    "mrr@10": "MRR@10",
    "recall@10": "Recall@10",
    "recall@100": "Recall@100",
    "recall@1000": "Recall@1000",
    "p@10": "P@10",
}
"""Measure -> how the literature spells it."""

TEXT_WIDTH = 100
"""Characters of a query that a table shows."""

WANTED = 3
"""Ids of wanted documents that a table shows."""


def write_report(folders: Sequence[str | Path], out: str | Path) -> None:
    """Read folders of results and write one report; a report already there is replaced.

    Raises:
        InputError: A folder is not a complete folder of results, or two of them cannot stand in one table.
    """
    content = render([read_results(folder) for folder in folders])
    with atomic_file(Path(out)) as file:
        file.write(content.encode())


@dataclass(frozen=True)
class Row:
    """One row of the tables of measures.

    Attributes:
        label: The system or the baseline.
        cells: Collection -> measure -> fraction.
    """

    label: str
    cells: Mapping[str, Mapping[str, float]]


Named: TypeAlias = Sequence[tuple[str, Results]]
"""Results with the label of their system."""


def render(results: Sequence[Results]) -> str:
    """One report over one or more systems.

    Args:
        results: In the order of the tables' rows; baselines come first, and results of one system share a row.

    Raises:
        InputError: There are none, a system has two results for one collection, or two results were made on different data
            under one name, or with other baseline scores.
    """
    if not results:
        raise InputError("there is nothing to report: no folder of results was given")
    _check_data(results)
    named = _named(results)
    rows = _rows(named)
    keys = list(dict.fromkeys(collection.key for result in results for collection in result.collections))
    parts = ["# Retrieval results", *_headline(rows, keys)]
    for key in keys:
        parts += _collection(rows, [(label, c) for label, result in named for c in result.collections if c.key == key], key)
    parts += ["## Protocol", _protocol(results), "## Systems"]
    for label, result in named:
        parts += _system(label, result)
    return "\n\n".join(parts) + "\n"


def _headline(rows: Sequence[Row], keys: Sequence[str]) -> Iterator[str]:
    lines = []
    for row in rows:
        scores = [row.cells.get(key, {}).get(HEADLINE) for key in keys]
        known = [score for score in scores if score is not None]
        # An average over fewer members is another average: it would stand beside the others and mean something else.
        average = math.fsum(known) / len(known) if len(known) == len(keys) else None
        lines.append([row.label, *map(_points, scores), _points(average), f"{len(known)} of {len(keys)}"])
    yield f"## {LABELS[HEADLINE]}"
    yield "In points. The average is over all collections of the table, and blank where one is missing."
    yield table(["System", *keys, "Average", "Collections"], lines)


def _collection(rows: Sequence[Row], scored: Sequence[tuple[str, CollectionResult]], key: str) -> Iterator[str]:
    first = scored[0][1]
    yield f"## {escape(first.name)}, split {escape(first.split)}"
    texts = f"{first.documents:,} documents ({first.empty_texts:,} without text)"
    yield f"{texts}, {first.queries:,} judged queries, {first.judgements:,} judgements. Checksum of the data: `{first.data_sha256[:16]}`."
    lines = [[row.label, *(_points(row.cells[key].get(measure)) for measure in LABELS)] for row in rows if key in row.cells]
    yield table(["System", *LABELS.values()], lines)
    yield table(
        ["System", "k", "Titles", "Self excluded", "Queries without result", "Documents cut", "Queries cut", "Seconds"],
        [[label, *_conditions(collection)] for label, collection in scored],
    )
    for label, collection in scored:
        yield f"### Worst queries of {escape(label)} on {escape(key)}"
        yield table(
            ["Query", "Text", LABELS[HEADLINE], "Found first", "Wanted"],
            [[w.query, _short(w.text), _points(w.score), w.first or "nothing", _wanted(w.wanted)] for w in collection.worst],
        )


def _conditions(collection: CollectionResult) -> list[str]:
    return [
        str(collection.k),
        "yes" if collection.use_title else "no",
        "yes" if collection.exclude_self else "no",
        f"{collection.unanswered:,}",
        f"{collection.truncated.documents:,}",
        f"{collection.truncated.queries:,}",
        ", ".join(f"{step.replace('_', ' ')} {seconds:.1f}" for step, seconds in collection.seconds.items()),
    ]


def _protocol(results: Sequence[Results]) -> str:
    collections = [collection for result in results for collection in result.collections]
    depths = " or ".join(str(k) for k in sorted({collection.k for collection in collections}))
    excluded = sorted({collection.key for collection in collections if collection.exclude_self})
    untitled = sorted({collection.key for collection in collections if not collection.use_title})
    baselines = {each.name: each.parameters for collection in collections for each in collection.baselines}
    sentences = [
        f"Every document of a collection is searched, exactly, and the first {depths} are kept for each query.",
        "The mean is over all judged queries: one for which nothing was found scores 0.",
        "Scores are compared as float32 and equal scores are ordered by document id, descending, as trec_eval does.",
        "nDCG has linear gains and an ideal ranking over all judged documents; a document is relevant from grade 1 on, and a"
        " negative grade counts as 0. MAP is over the documents kept, MRR@10 over the first ten.",
        f"A document with the query's own id is dropped before the cut in {', '.join(excluded)}."
        if excluded
        else "No document is excluded.",
        f"Titles are left out in {', '.join(untitled)}." if untitled else "A document's title and text are one text, joined by a space.",
        "Texts longer than the model reads are cut at the end; the tables count them.",
    ]
    sentences += [
        f"The baseline {name} has the settings {', '.join(f'{key} {value}' for key, value in parameters.items())}."
        for name, parameters in sorted(baselines.items())
    ]
    return escape(" ".join(sentences))


def _system(label: str, result: Results) -> Iterator[str]:
    system, origin = result.system, result.provenance
    facts = {
        "Source": system.source,
        "Kind": system.kind,
        "Fingerprint": system.fingerprint,
        "Vector width": system.dim,
        "Similarity": system.similarity,
        "Query length in tokens": system.query_length,
        "Document length in tokens": system.document_length,
        "Query prompt": system.query_prompt,
        "Document prompt": system.document_prompt,
        "Precision": system.precision,
        "Index": "; ".join(dict.fromkeys(_index(collection) for collection in result.collections)),
        "Date": origin.date,
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(origin.versions.items())),
        "Platform": origin.platform,
        "Threads": origin.threads,
    }
    yield f"### {escape(label)}"
    yield table(["", ""], [[name, str(fact)] for name, fact in facts.items() if fact not in (None, "")])
    if origin.command is None:
        yield "Made by a call of the library, without a command line."
    else:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", origin.command)), default=0))
        yield f"{fence}sh\n{origin.command}\n{fence}"


def _index(collection: CollectionResult) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in collection.index.parameters.items())
    return f"{collection.index.kind} ({settings})"


def _rows(named: Named) -> list[Row]:
    """Baselines first, then systems; a baseline that was evaluated as a system too has one row."""
    collections = [(label, collection) for label, result in named for collection in result.collections]
    cells = [(baseline.name, collection.key, baseline.measures) for _, collection in collections for baseline in collection.baselines]
    cells += [(label, collection.key, collection.measures) for label, collection in collections]
    rows: dict[str, dict[str, Mapping[str, float]]] = {}
    for label, key, measures in cells:
        known = rows.setdefault(label, {}).setdefault(key, measures)
        if known.keys() != measures.keys() or not all(math.isclose(known[name], measures[name], abs_tol=1e-9) for name in known):
            raise InputError(f"{label} has different scores on {key} in two results; evaluate both with the same k, policy and versions")
    return [Row(label, scores) for label, scores in rows.items()]


def _check_data(results: Sequence[Results]) -> None:
    data: dict[str, str] = {}
    seen: set[tuple[System, str]] = set()
    for result in results:
        for collection in result.collections:
            source, key = result.system.source, collection.key
            if data.setdefault(key, collection.data_sha256) != collection.data_sha256:
                raise InputError(f"{key} is other data for {source} than for a system before it; rename one of the folders")
            if (result.system, key) in seen:
                raise InputError(f"{source} has two results for {key}; give one of them")
            seen.add((result.system, key))


def _named(results: Sequence[Results]) -> Named:
    """The shortest names that tell the systems apart: end of the source (a hub id whole), source, source with fingerprint."""
    systems = list(dict.fromkeys(result.system for result in results))
    forms: list[Callable[[System], str]] = [
        lambda system: "/".join(PurePath(system.source).parts[-2:]) or system.source,
        lambda system: system.source,
        lambda system: f"{system.source} ({(system.fingerprint or '')[:12]})",
    ]
    form = next((form for form in forms if len(set(map(form, systems))) == len(systems)), forms[-1])
    return [(form(result.system), result) for result in results]


def _points(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.2f}"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= TEXT_WIDTH else flat[: TEXT_WIDTH - 1] + "…"


def _wanted(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - WANTED} more" if len(ids) > WANTED else ""
    return ", ".join(ids[:WANTED]) + more
