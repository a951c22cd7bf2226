"""What searches of an index were measured to find and to take: a table of efforts, as the manifest keeps it, and the choice among them.

It knows nothing of how to measure, which `quiver.retrieval.index.calibration` does.

Shapes: n queries, k hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.engines import Preset, Setting

Origin = Literal["index", "given"]
"""Where the queries came from: made of the vectors of the index, or given by the user."""

PRESET_RECALL: Mapping[Preset, float] = {"exact": 1.0, "balanced": 0.95, "fast": 0.9}
"""The recall that each preset is to have."""

LOW_RECALL = 0.9
"""Where ``balanced`` has less, whoever builds the index is warned."""

# The lower end of the interval of a preset's recall may lie so much below the recall that it is to have: few queries leave wide intervals.
_DOUBT = 0.05
# Of the normal distribution: 95% lie between these.
_Z = 1.96


@dataclass(frozen=True)
class GridPoint:
    """One point of the parameter grid with its measured recall and latency.

    Attributes:
        search_params: Search parameters by name.
        recall: The share of the k documents with the best scores that it found, on average over the queries.
        low: Lower end of the 95% interval of the recall.
        high: Upper end.
        p50_ms: Median latency of one query on one thread, in milliseconds.
        p95_ms: 95th percentile of it.
    """

    search_params: Mapping[str, Setting]
    recall: float
    low: float
    high: float
    p50_ms: float
    p95_ms: float


@dataclass(frozen=True)
class RecallTable:
    """What was measured for one number of hits.

    Attributes:
        k: Hits a query.
        queries: How many were searched, n.
        points: Efforts from cheap to thorough; the last looks at everything, which is what the others are compared with: its recall is 1.
    """

    k: int
    queries: int
    points: tuple[GridPoint, ...]

    def preset(self, name: Preset) -> GridPoint:
        """What a preset looks at.

        Args:
            name: ``exact`` looks at everything. The others are the fastest effort whose recall was measured to be at least that of
                `PRESET_RECALL`, with no more than 0.05 less at the lower end of its interval.

        Returns:
            The effort. Where none but the look at everything reaches the recall, and that is slower, the one with the highest recall.
        """
        everything, target = self.points[-1], PRESET_RECALL[name]
        if name == "exact":
            return everything
        reaching = [point for point in self.points if point.recall >= target and point.low >= target - _DOUBT]
        if len(reaching) > 1:
            return min(reaching, key=_latency)
        faster = [point for point in self.points if point.p50_ms < everything.p50_ms]
        return max(faster, key=lambda point: point.recall, default=everything)


@dataclass(frozen=True)
class Calibration:
    """What was measured of an index.

    Attributes:
        documents: Documents that could be found.
        largest: Rows of the largest segment.
        origin: Where the queries came from.
        seed: Of what was random.
        created: When it was measured, UTC, ISO 8601.
        processor: On what.
        versions: Package -> version that it was measured with.
        tables: One for each number of hits, ascending.
    """

    documents: int
    largest: int
    origin: Origin
    seed: int
    created: str
    processor: str
    versions: Mapping[str, str]
    tables: tuple[RecallTable, ...]

    def holds_for(self, segments: Iterable[int]) -> bool:
        """Whether the recall is still at least about what was measured, now that there are other segments.

        A document among the k best of all is among the k best of its segment, and each segment is searched with the whole effort: more
        segments, smaller ones, or deleted documents make recall no worse. A larger one does: of its documents less is looked at.

        Args:
            segments: Rows of each segment.
        """
        return max(segments, default=0) <= self.largest

    def choose(self, target_recall: float, k: int) -> tuple[int, GridPoint]:
        """The fastest point whose recall reaches a target with the lower end of its interval.

        Args:
            target_recall: Above 0 and at most 1.
            k: Hits; the table is that of the next greater number that was measured.

        Returns:
            The number of hits that it was measured for, and the point; exhaustive search if no other point reaches the target.

        Raises:
            InputError: So many hits were not measured.
            ValueError: The target is not in (0, 1].
        """
        check_target(target_recall)
        table = self.table(k)
        if table is None:
            raise InputError(
                f"recall was measured for up to {self.tables[-1].k} hits, not for {k}; measure it with quiver index calibrate -k {k}"
            )
        return table.k, min((point for point in table.points if point.low >= target_recall), key=_latency)

    def table(self, k: int) -> RecallTable | None:
        """What was measured for k hits, or for the next greater number; None where neither was."""
        return next((table for table in self.tables if table.k >= k), None)

    def advice(self) -> str | None:
        """One line that says what to do where ``balanced`` finds less than 0.9 of the best; None where it finds more.

        Where an approximate effort can find more it is ``balanced`` already: only an index that was measured at fewer efforts, or one
        whose codes do not tell its documents apart, comes here.
        """
        for table in self.tables:
            balanced, exact = table.preset("balanced"), table.preset("exact")
            if balanced.recall < LOW_RECALL:
                return (
                    f"the preset balanced finds {balanced.recall:.2f} of the {table.k} best documents; search with --effort exact "
                    f"({exact.p50_ms:.3g} ms a query, balanced takes {balanced.p50_ms:.3g}), or measure more with quiver index calibrate"
                )
        return None

    def to_json(self) -> dict[str, Any]:
        """As the manifest has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Calibration:
        """Read what ``to_json`` gave.

        Raises:
            InputError: It is something else.
        """
        try:
            checked = _record(cls, content)
            tables = tuple(_table(each) for each in _list(checked["tables"]))
            calibration = cls(**{**checked, "tables": tables})
            _check(calibration)
        except (TypeError, ValueError) as error:
            raise InputError(f"the calibration cannot be read ({error}); run quiver index calibrate") from error
        return calibration


def _latency(point: GridPoint) -> float:
    return point.p50_ms


def check_target(target_recall: float) -> None:
    """Refuse a target that no search can have.

    Raises:
        ValueError: It is not in (0, 1].
    """
    if not 0 < target_recall <= 1:
        raise ValueError(f"target_recall must be above 0 and at most 1, got {target_recall}")


def interval(recalls: NDArray[np.float64], counted: NDArray[np.int64]) -> tuple[float, float]:
    """The 95% interval of a mean recall.

    It is Wilson's of a share, which also says something where nothing was missed. How many hits count as independent is what the spread
    between the queries says: one query that misses all its hits tells less than many that miss one each.

    Args:
        recalls: Of each query, (n,).
        counted: Hits that each query could find, (n,), at least 1.

    Source: Wilson, JASA 1927; Kish's design effect, Survey Sampling, 1965.

    Example:
        >>> [round(end, 3) for end in interval(np.full(200, 1.0), np.full(200, 10))]
        [0.998, 1.0]
        >>> [round(end, 3) for end in interval(np.tile([0.0, 1.0], 100), np.full(200, 10))]
        [0.431, 0.569]
    """
    share, size = float(recalls.mean()), float(counted.sum())
    spread = float(recalls.var(ddof=1)) / len(recalls) if len(recalls) > 1 else 0.0
    if spread * size > share * (1 - share) > 0:
        size = share * (1 - share) / spread
    if len(recalls) == 1:
        size = 1.0  # it does not say how its hits hang together
    middle = (share + _Z**2 / (2 * size)) / (1 + _Z**2 / size)
    half = _Z / (1 + _Z**2 / size) * (share * (1 - share) / size + _Z**2 / (4 * size**2)) ** 0.5
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def _check(calibration: Calibration) -> None:
    """Refuse what nobody could have measured."""
    if calibration.origin not in get_args(Origin) or not calibration.tables:
        raise ValueError("origin must be index or given, and tables must not be empty")
    if any(not isinstance(value, int) for value in (calibration.documents, calibration.largest, calibration.seed)):
        raise TypeError("documents, largest and seed must be whole numbers")
    ks = [table.k for table in calibration.tables]
    if any(not isinstance(k, int) or k < 1 for k in ks) or ks != sorted(set(ks)):
        raise ValueError(f"tables must be of ascending numbers of hits, got {ks}")
    for table in calibration.tables:
        if not isinstance(table.queries, int) or table.queries < 1:
            raise ValueError(f"nothing was searched for {table.k} hits")
        if not table.points or table.points[-1].low < 1:
            raise ValueError(f"the last grid point for {table.k} hits does not have recall 1")
        for point in table.points:
            if not 0 <= point.low <= point.recall <= point.high <= 1 or not 0 <= point.p50_ms <= point.p95_ms:
                raise ValueError(f"a grid point for {table.k} hits has an impossible recall or latency")


def _table(content: Any) -> RecallTable:
    checked = _record(RecallTable, content)
    return RecallTable(**{**checked, "points": tuple(_rung(each) for each in _list(checked["points"]))})


def _rung(content: Any) -> GridPoint:
    point = GridPoint(**_record(GridPoint, content))
    if not isinstance(point.search_params, dict):
        raise TypeError("search parameters must have names")
    return point


def _list(content: Any) -> Sequence[Any]:
    if not isinstance(content, list | tuple):
        raise TypeError(f"expected a list, got {type(content).__name__}")
    return content


def _record(kind: type[Any], content: Any) -> dict[str, Any]:
    """The fields of a record, none missing and none unknown."""
    names = {field.name for field in fields(kind)}
    if not isinstance(content, dict) or content.keys() != names:
        raise TypeError(f"the fields must be {', '.join(sorted(names))}")
    return cast("dict[str, Any]", content)
