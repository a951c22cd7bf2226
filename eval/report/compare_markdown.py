"""A comparison as Markdown: the differences, how sure they are, a word of caution where they are not, and the queries behind them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from quiver.eval.report.compare import ALPHA, Comparison, Measured, Pairing
from quiver.eval.report.systems import LABELS, points
from quiver.eval.report.tables import escape, table
from quiver.eval.results import HEADLINE
from quiver.eval.significance import PERMUTATIONS, Change

TEXT_WIDTH = 100
"""Characters of a query that a table shows."""


def render_comparison(comparison: Comparison) -> str:
    """The comparison as Markdown; measures are in points, hundredths of a fraction."""
    parts = [f"# Compared with {escape(comparison.baseline)}", escape(_method(comparison)), f"## {LABELS[HEADLINE]}"]
    rows = (*comparison.pairings, *comparison.averages)
    header = ["System", "Collection", "Queries", *_HEADER, "Verdict"]
    parts.append(table(header, [[*_place(row), *_cells(row.measures[HEADLINE]), row.measures[HEADLINE].verdict] for row in rows]))
    parts += _cautions(rows)
    parts.append("## All measures")
    others = [[row.system, row.data_set, LABELS[name], *_cells(row.measures[name])] for row in rows for name in row.measures]
    parts.append(table(["System", "Collection", "Measure", *_HEADER], others))
    for pairing in comparison.pairings:
        parts += _changes(pairing, comparison.query_texts)
    if comparison.unpaired:
        lines = [[each.collection, each.has, each.lacks] for each in comparison.unpaired]
        parts += ["## Not compared", table(["Collection", "Scored for", "Not scored for"], lines)]
    return "\n\n".join(parts) + "\n"


_HEADER = ["Baseline", "System's", "Difference", "Interval", "p", "p corrected", "Better / equal / worse"]


def _method(comparison: Comparison) -> str:
    interval = comparison.pairings[0].measures[HEADLINE].paired.interval
    family = comparison.pairings[0].measures[HEADLINE].family
    some_lack = any(measured.family < family for pairing in comparison.pairings for measured in pairing.measures.values())
    return " ".join(
        [
            f"Differences are system minus {comparison.baseline}, in points, over the same judged queries.",
            f"The interval holds {100 * interval.level:g} % of {interval.resamples:,} bootstrap resamples of the queries (percentiles).",
            f"p is that of a two-sided paired sign-flip test: all assignments of signs where they are no more than {PERMUTATIONS:,}, and"
            " otherwise as many at random.",
            f"It is corrected after Holm for {family} {'comparison' if family == 1 else 'comparisons'} of each measure"
            f"{', fewer where not all have it' if some_lack else ''}, not for looking"
            f" at several measures: {LABELS[HEADLINE]} is the test, the others explain it.",
            "A group of collections is the mean of its parts, and an average the mean of the data sets above it: queries are drawn and"
            " flipped inside their collection.",
        ]
    )


def _place(row: Pairing) -> list[str]:
    return [row.system, row.data_set, f"{row.queries:,}"]


def _cells(measured: Measured) -> list[str]:
    paired = measured.paired
    return [
        points(paired.first),
        points(paired.second),
        _signed(paired.difference),
        f"{_signed(paired.interval.low)} to {_signed(paired.interval.high)}",
        _chance(paired.p),
        _chance(measured.corrected),
        f"{paired.wins:,} / {paired.ties:,} / {paired.losses:,}",
    ]


def _cautions(rows: Iterable[Pairing]) -> Iterator[str]:
    for row in rows:
        measured = row.measures[HEADLINE]
        if measured.corrected >= ALPHA:
            text = (
                f"no difference is shown between {row.system} and {row.baseline} on {row.data_set}"
                f" ({_signed(measured.paired.difference)} points over {row.queries:,} queries, corrected p {_chance(measured.corrected)});"
                " neither may be called better."
            )
            yield f"**Caution:** {escape(text)}"


def _changes(pairing: Pairing, texts: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    paired = pairing.measures[HEADLINE].paired
    for word, changes in (("gain", paired.gained), ("lose", paired.lost)):
        if changes:
            yield f"## Queries of {escape(pairing.data_set)} that {word} most by {escape(pairing.system)}"
            header = ["Collection", "Query", "Text", "Baseline", "System's", "Difference"]
            yield table(header, [_change(change, texts) for change in changes])


def _change(change: Change, texts: Mapping[str, Mapping[str, str]]) -> list[str]:
    flat = " ".join(texts.get(change.part, {}).get(change.query, "").split())
    short = flat if len(flat) <= TEXT_WIDTH else flat[: TEXT_WIDTH - 1] + "…"
    return [change.part, change.query, short, points(change.first), points(change.second), _signed(change.difference)]


def _signed(fraction: float) -> str:
    """Points with a sign; what rounds to zero has none."""
    text = f"{100 * fraction:+.2f}"
    return "0.00" if float(text) == 0 else text


def _chance(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"
