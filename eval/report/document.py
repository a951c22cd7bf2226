"""Results as the parts of a page: tables with cells that know how they sort, charts with what they show, texts as they are.

Nothing here is markup. The page is a function of the results alone and adds no number that is not in them, except averages,
sums and shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quiver.eval.averages import Average
from quiver.eval.report.page_tables import (
    SHOWN_OVERLAPS,
    SYSTEM,
    Cell,
    Column,
    Key,
    Table,
    conditions_table,
    files_table,
    highest,
    index_table,
    interval_note,
    number_cell,
    percent_cell,
    seconds_table,
    system_cell,
)
from quiver.eval.report.protocol import system_facts
from quiver.eval.report.svg import BarChart, Frame, Measured, PointChart, Scale, Timed, bar_chart, point_chart
from quiver.eval.report.systems import (
    LABELS,
    Named,
    Row,
    Score,
    check_data,
    collections,
    label_systems,
    members,
    row_average,
    row_data_sets,
    rows,
)
from quiver.eval.results import HEADLINE, CollectionResult, Results

COLOURS = 8
"""Colours that tell systems apart; the style sheet knows them as 1 to 8, and 0 as the grey of BM25."""


@dataclass(frozen=True)
class Chart:
    """A chart of one collection or data set.

    Attributes:
        title: Of what.
        note: Small print beside the title.
        drawing: Where everything stands.
    """

    title: str
    note: str
    drawing: BarChart | PointChart


@dataclass(frozen=True)
class Parts:
    """The parts of a group of collections, such as the forums of CQADupStack.

    Attributes:
        name: The group.
        table: nDCG@10 by part.
        charts: One a part.
    """

    name: str
    table: Table
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Scored:
    """One collection with everything that was measured on it.

    Attributes:
        anchor: Where the page has it.
        facts: The collection itself, by the first result over it.
        table: All measures.
        results: Systems with their results, for the worst queries.
    """

    anchor: str
    facts: CollectionResult
    table: Table
    results: tuple[tuple[Key, CollectionResult], ...]


@dataclass(frozen=True)
class Run:
    """One result: the system, the command and the machine.

    Attributes:
        anchor: Where the page has it.
        key: The system.
        results: Everything.
        facts: The system's fields and the machine, as a list.
        files: Runs and scores of every query, where they were written.
    """

    anchor: str
    key: Key
    results: Results
    facts: Mapping[str, str]
    files: Table | None


@dataclass(frozen=True)
class Latency:
    """The plot of quality over time.

    Attributes:
        measure: What its vertical axis shows.
        approximate: Whether an index other than the exact one was searched.
        keys: The systems that were timed; empty where none was.
        charts: One a collection that was timed.
        groups: Group of collections -> the charts of its parts.
    """

    measure: str
    approximate: bool
    keys: tuple[Key, ...]
    charts: tuple[Chart, ...]
    groups: Mapping[str, tuple[Chart, ...]]


@dataclass(frozen=True)
class Document:
    """A page.

    Attributes:
        keys: The systems in the order of the tables.
        data_sets: How many there are, a group counting once.
        headline: nDCG@10, systems by data sets.
        intervals: How the intervals were made, each way once.
        charts: nDCG@10 with intervals, one a data set.
        groups: The parts of groups.
        latency: Recall or nDCG@10 over milliseconds.
        collections: In the order of the results.
        conditions: What was kept, cut and left out.
        indexes: What was searched.
        seconds: What took how long.
        runs: The results.
    """

    keys: tuple[Key, ...]
    data_sets: int
    headline: Table
    intervals: tuple[tuple[float, int], ...]
    charts: tuple[Chart, ...]
    groups: tuple[Parts, ...]
    latency: Latency
    collections: tuple[Scored, ...]
    conditions: Table
    indexes: Table
    seconds: Table
    runs: tuple[Run, ...]


def document(results: Sequence[Results]) -> Document:
    """The page over one or more results.

    Raises:
        InputError: The results cannot stand in one table.
    """
    check_data(results)
    return _Builder(label_systems(results)).document()


class _Builder:
    """What several parts of a page need: keys, rows, collections and where the numbers come from."""

    def __init__(self, named: Named) -> None:
        self.named = named
        self.rows = rows(named)
        self.facts = collections([result for _, result in named])
        self.members = members(self.facts.values())
        self.keys = _keys(self.rows, named)
        self.scored = [(self.keys[label], collection) for label, result in named for collection in result.collections]
        self.links = _links(named)
        self.scale = _scale(self.rows)

    def document(self) -> Document:
        intervals = [score.interval for row in self.rows for score in row.scores.values()]
        return Document(
            keys=tuple(self.keys.values()),
            data_sets=len(self.members),
            headline=self._headline(),
            intervals=tuple(dict.fromkeys((interval.level, interval.resamples) for interval in intervals)),
            charts=self._charts(self.members),
            groups=tuple(self._parts(name) for name in self.members if name not in self.facts),
            latency=self._latency(),
            collections=tuple(self._collection(place, key) for place, key in enumerate(self.facts, start=1)),
            conditions=conditions_table(self.scored),
            indexes=index_table(self.scored),
            seconds=seconds_table(self.scored),
            runs=tuple(self._run(place, label, result) for place, (label, result) in enumerate(self.named, start=1)),
        )

    def _headline(self) -> Table:
        sets = [row_data_sets(row, self.facts) for row in self.rows]
        averages = [row_average(row, self.facts) for row in self.rows]
        best = [highest(scores.get(name) for scores in sets) for name in self.members]
        best_average = highest(each.value for each in averages)
        lines = []
        for row, scores, average in zip(self.rows, sets, averages, strict=True):
            cells = [self._set_cell(row, name, scores.get(name), top) for name, top in zip(self.members, best, strict=True)]
            lines.append((system_cell(self.keys[row.label]), _average_cell(average, best_average), *cells))
        columns = [Column(*self._heading(name)) for name in self.members]
        return Table("nDCG@10 of systems on data sets", (SYSTEM, Column("Average", "of data sets"), *columns), tuple(lines))

    def _heading(self, name: str) -> tuple[str, str]:
        """A data set with what is to be said of it: its split, or of how many parts it is the mean."""
        if name in self.facts:
            return self.facts[name].name, self.facts[name].split
        return name, f"mean of {self.facts[self.members[name][0]].group_size}"

    def _set_cell(self, row: Row, name: str, value: float | None, best: str) -> Cell:
        if name in self.facts:
            return self._score_cell(row.label, name, row.scores.get(name), best)
        known = [key for key in self.members[name] if key in row.scores]
        note = "" if value is not None or not known else f"{len(known)} of {self.facts[known[0]].group_size}"
        return number_cell(value, best, note=note)

    def _score_cell(self, label: str, key: str, score: Score | None, best: str) -> Cell:
        if score is None:
            return Cell("")
        return number_cell(
            score.measures.get(HEADLINE), best, note=interval_note(score.interval.low, score.interval.high), link=self.links[label, key]
        )

    def _parts(self, group: str) -> Parts:
        keys = self.members[group]
        best = [highest(_values(self.rows, key)) for key in keys]
        lines = []
        for row in self.rows:
            if not row.scores.keys().isdisjoint(keys):
                cells = [self._score_cell(row.label, key, row.scores.get(key), top) for key, top in zip(keys, best, strict=True)]
                lines.append((system_cell(self.keys[row.label]), *cells))
        columns = [Column(self.facts[key].name, self.facts[key].split) for key in keys]
        table = Table(f"nDCG@10 on the parts of {group}", (SYSTEM, *columns), tuple(lines))
        return Parts(group, table, self._charts(keys))

    def _charts(self, names: Iterable[str]) -> tuple[Chart, ...]:
        """One a data set or collection; none for a group that no system has whole."""
        drawn = [(name, self._bars(name)) for name in names]
        return tuple(Chart(*self._heading(name), bar_chart(bars, self.scale)) for name, bars in drawn if bars)

    def _bars(self, name: str) -> list[Measured]:
        bars = []
        for row in self.rows:
            key, score = self.keys[row.label], row.scores.get(name)
            value = row_data_sets(row, self.facts).get(name) if score is None else score.measures.get(HEADLINE)
            ends = (None, None) if score is None else (score.interval.low, score.interval.high)
            if value is not None:
                bars.append(Measured(key.letter, key.colour, key.label, value, *ends))
        return bars

    def _latency(self) -> Latency:
        approximate = any(_is_approximate(collection) for _, collection in self.scored)
        measure = SHOWN_OVERLAPS[0] if approximate else HEADLINE
        timed: dict[str, list[Timed]] = {}
        for key, collection in self.scored:
            index = collection.index
            value = (index.recall or {}).get(measure) if approximate else collection.measures.get(HEADLINE)
            if value is not None and index.query_milliseconds:
                point = Timed(key.letter, key.colour, key.label, index.query_milliseconds, value, index.kind == "exact")
                timed.setdefault(collection.key, []).append(point)
        every = [point for found in timed.values() for point in found]
        groups: dict[str | None, list[Chart]] = {}
        homes = {key: name for name, keys in self.members.items() if name not in self.facts for key in keys}
        if every:
            frame = Frame.around([point.milliseconds for point in every], [point.value for point in every], to_one=approximate)
            for name, found in timed.items():
                groups.setdefault(homes.get(name), []).append(Chart(*self._heading(name), point_chart(found, frame)))
        return Latency(
            LABELS.get(measure, measure),
            approximate,
            tuple(key for key in self.keys.values() if any(point.label == key.label for point in every)),
            tuple(groups.pop(None, ())),
            {group: tuple(charts) for group, charts in groups.items() if group is not None},
        )

    def _collection(self, place: int, key: str) -> Scored:
        measured = [row for row in self.rows if key in row.scores]
        best = {measure: highest(row.scores[key].measures.get(measure) for row in measured) for measure in LABELS}
        lines = tuple(self._measures(row.label, key, row.scores[key], best) for row in measured)
        columns = (SYSTEM, *(Column(label) for label in LABELS.values()), Column("Judged@10", "percent"))
        results = tuple((system, collection) for system, collection in self.scored if collection.key == key)
        return Scored(f"collection-{place}", self.facts[key], Table(f"Measures on {key}", columns, lines), results)

    def _measures(self, label: str, key: str, score: Score, best: Mapping[str, str]) -> tuple[Cell, ...]:
        others = [number_cell(score.measures.get(measure), best[measure]) for measure in LABELS if measure != HEADLINE]
        return (system_cell(self.keys[label]), self._score_cell(label, key, score, best[HEADLINE]), *others, percent_cell(score.judged))

    def _run(self, place: int, label: str, result: Results) -> Run:
        return Run(_anchor(place), self.keys[label], result, system_facts(result), files_table(result))


def _keys(every: Sequence[Row], named: Named) -> dict[str, Key]:
    """Letters in the order of the rows; BM25 is grey, and nothing else is."""
    grey = {label for label, result in named if result.system.kind == "bm25"}
    grey |= {baseline.name for _, result in named for collection in result.collections for baseline in collection.baselines}
    labels = dict.fromkeys([*(row.label for row in every), *(label for label, _ in named)])  # one without a collection has no row
    coloured = [label for label in labels if label not in grey]
    colours = {label: place % COLOURS + 1 for place, label in enumerate(coloured)}
    return {label: Key(_letters(place), colours.get(label, 0), label) for place, label in enumerate(labels)}


def _letters(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else _letters(place // 26 - 1) + chr(ord("A") + place % 26)


def _scale(every: Sequence[Row]) -> Scale:
    """One axis for all charts, so that they can be compared."""
    scores = [score for row in every for score in row.scores.values()]
    return Scale.over(max((max(score.interval.high, score.measures.get(HEADLINE, 0.0)) for score in scores), default=1.0))


def _links(named: Named) -> dict[tuple[str, str], str]:
    """Row and collection -> the result whose command made the number; a baseline's is that of the first result that has it."""
    links: dict[tuple[str, str], str] = {}
    for place, (label, result) in enumerate(named, start=1):
        for collection in result.collections:
            links[label, collection.key] = _anchor(place)
    for place, (_, result) in enumerate(named, start=1):
        for collection in result.collections:
            for baseline in collection.baselines:
                links.setdefault((baseline.name, collection.key), _anchor(place))
    return links


def _anchor(place: int) -> str:
    return f"result-{place}"


def _values(every: Iterable[Row], key: str) -> list[float | None]:
    return [row.scores[key].measures.get(HEADLINE) for row in every if key in row.scores]


def _average_cell(average: Average, best: str) -> Cell:
    return number_cell(average.value, best, note=f"{average.known} of {average.members}")


def _is_approximate(collection: CollectionResult) -> bool:
    return collection.index.kind != "exact" and collection.index.recall is not None
