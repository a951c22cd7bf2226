"""Results as Markdown: the table, what is behind each number, and how to have it again.

The report is a function of the results alone, so that equal results give equal bytes. It adds no number that is not in
``results.json``; measures are shown in points, hundredths of a fraction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from quiver.eval.report.protocol import protocol, system_facts
from quiver.eval.report.systems import (
    LABELS,
    Row,
    Score,
    check_data,
    collections,
    index_name,
    label_systems,
    members,
    points,
    row_average,
    row_data_sets,
    rows,
)
from quiver.eval.report.tables import escape, table
from quiver.eval.results import HEADLINE, CollectionResult, IndexUsed, Results, ShownDocument, WorstQuery

TEXT_WIDTH = 100
"""Characters of a query or a document that a table shows."""

MEBIBYTE = 2**20


def render(results: Sequence[Results]) -> str:
    """One report over one or more systems.

    Args:
        results: In the order of the tables' rows; baselines come first, and results of one system share a row.

    Raises:
        InputError: There are none, a system has two results for one collection and index, or two results were made on different data
            under one name, or with other baseline scores.
    """
    check_data(results)
    named = label_systems(results)
    lines = rows(named)
    facts = collections(results)
    parts = ["# Retrieval results", *_headline(lines, facts)]
    for key, collection in facts.items():
        parts += _collection(
            lines, [(label, each) for label, result in named for each in result.collections if each.key == key], collection
        )
    parts += ["## Protocol", table(["", ""], [[about, rule] for about, rule in protocol(results).items()]), "## Systems"]
    for label, result in named:
        parts += _system(label, result)
    return "\n\n".join(parts) + "\n"


def _headline(lines: Sequence[Row], facts: Mapping[str, CollectionResult]) -> Iterator[str]:
    names = members(facts.values())
    sizes = {name: facts[keys[0]].group_size for name, keys in names.items() if name not in facts}
    cells = []
    for row in lines:
        scores, mean = row_data_sets(row, facts), row_average(row, facts)
        cells.append([row.label, *(points(scores.get(name)) for name in names), points(mean.value), f"{mean.known} of {mean.members}"])
    yield f"## {LABELS[HEADLINE]}"
    yield "In points. The average is over all data sets of the table, and blank where one is missing."
    if sizes:
        grouped = ", ".join(f"{name} of {size}" for name, size in sizes.items())
        yield escape(f"The mean over its collections stands for a group, which counts once and is blank unless it is whole: {grouped}.")
    yield table(["System", *names, "Average", "Data sets"], cells)


def _collection(lines: Sequence[Row], scored: Sequence[tuple[str, CollectionResult]], facts: CollectionResult) -> Iterator[str]:
    key = facts.key
    yield f"## {escape(facts.name)}, split {escape(facts.split)}"
    origin = f"Licence: {facts.licence or 'not known'}. Revision: {facts.revision or 'none, a local folder'}."
    texts = f"{facts.documents:,} documents ({facts.empty_texts:,} without text)"
    yield escape(f"{texts}, {facts.queries:,} judged queries, {facts.judgements:,} judgements. {origin}")
    yield f"Checksum of the data: `{facts.data_sha256[:16]}`."
    yield table(
        ["System", LABELS[HEADLINE], "Interval", *(label for name, label in LABELS.items() if name != HEADLINE), "Judged@10"],
        [_measures(row.label, row.scores[key]) for row in lines if key in row.scores],
    )
    yield table(
        ["System", "k", "Titles", "Self excluded", "Domain", "Without result", "Documents cut", "Queries cut", "Vectors reused", "Seconds"],
        [[label, *_conditions(collection)] for label, collection in scored],
    )
    yield table(
        ["System", "Index", "Overlap@10", "Overlap@100", "MiB", "ms a query"],
        [[label, *_index(collection.index)] for label, collection in scored],
    )
    for label, collection in scored:
        yield f"### Worst queries of {escape(label)} on {escape(key)}"
        yield table(["Query", "Text", LABELS[HEADLINE], "Found first", "Wanted"], [_worst(each) for each in collection.worst])


def _measures(label: str, score: Score) -> list[str]:
    interval = f"{points(score.interval.low)} to {points(score.interval.high)}"
    others = [points(score.measures.get(name)) for name in LABELS if name != HEADLINE]
    return [label, points(score.measures.get(HEADLINE)), interval, *others, points(score.judged)]


def _conditions(collection: CollectionResult) -> list[str]:
    return [
        str(collection.k),
        "yes" if collection.use_title else "no",
        "yes" if collection.exclude_self else "no",
        "in" if collection.in_domain else "out",
        f"{collection.unanswered:,}",
        f"{collection.truncated.documents:,}",
        f"{collection.truncated.queries:,}",
        f"{collection.cached:,}",
        ", ".join(f"{step.replace('_', ' ')} {seconds:.1f}" for step, seconds in collection.seconds.items()),
    ]


def _index(index: IndexUsed) -> list[str]:
    recall = index.recall or {}
    overlaps = [f"{recall[name]:.4f}" if name in recall else "" for name in ("overlap@10", "overlap@100")]
    size = "" if index.bytes is None else f"{index.bytes / MEBIBYTE:,.1f}"
    latency = "" if index.query_milliseconds is None else f"{index.query_milliseconds:.3f}"
    return [index_name(index), *overlaps, size, latency]


def _worst(worst: WorstQuery) -> list[str]:
    found = _shown(worst.found[0]) if worst.found else "nothing"
    wanted = _shown(worst.wanted[0]) if worst.wanted else "nothing"
    more = f" (and {worst.relevant - 1:,} more)" if worst.relevant > 1 else ""
    return [worst.query, _short(worst.text), points(worst.score), found, wanted + more]


def _shown(document: ShownDocument) -> str:
    grade = "not judged" if document.grade is None else f"grade {document.grade}"
    rank = "not found" if document.rank is None else f"rank {document.rank:,}"
    return f"{document.id}, {grade}, {rank}: {_short(document.text)}"


def _system(label: str, result: Results) -> Iterator[str]:
    command = result.provenance.command
    yield f"### {escape(label)}"
    yield table(["", ""], [[name, fact] for name, fact in system_facts(result).items()])
    if command is None:
        yield "Made by a call of the library, without a command line."
    else:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
        yield f"{fence}sh\n{command}\n{fence}"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= TEXT_WIDTH else flat[: TEXT_WIDTH - 1] + "…"
