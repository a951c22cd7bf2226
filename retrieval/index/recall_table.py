"""Measured recall and latency of an index: the table as the manifest stores it, and the choice of search parameters from it.

The measuring is in `quiver.retrieval.index.calibration`.

Shapes: n queries, k hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.schema import RECORD, Count, SchemaError, parse_record, with_config
from quiver.retrieval.index.engines import Preset, Setting

Origin = Literal["index", "given"]
"""Origin of the queries: mixed from vectors of the index, or given by the user."""

PRESET_RECALL: Mapping[Preset, float] = {"exact": 1.0, "balanced": 0.95, "fast": 0.9}
"""Target recall of each preset."""

LOW_RECALL = 0.9
"""Recall of ``balanced`` below which a warning is logged."""

# How far below its target the lower end of a preset's recall interval may lie; few queries give wide intervals.
_DOUBT = 0.05

# 97.5% quantile of the normal distribution.
_Z = 1.96


@dataclass(frozen=True)
class GridPoint:
    """One point of the parameter grid with its measured recall and latency.

    Attributes:
        search_params: Search parameters by name.
        recall: Share of the exact top k that it found, averaged over the queries.
        low: Lower end of the 95% interval of the recall.
        high: Upper end.
        p50_ms: Median latency of one query on one thread, in milliseconds.
        p95_ms: 95th percentile of the latency, in milliseconds.
    """

    search_params: Mapping[str, Setting]
    recall: float
    low: float
    high: float
    p50_ms: float
    p95_ms: float


@dataclass(frozen=True)
class RecallTable:
    """Measurements for one number of hits.

    Attributes:
        k: Hits per query.
        queries: Number n of queries.
        points: Grid points from cheap to exhaustive. The last is exhaustive search, the reference for recall, so its recall is 1.
    """

    k: Count
    queries: Count
    points: tuple[GridPoint, ...]

    def preset(self, name: Preset) -> GridPoint:
        """Choose the grid point of a preset.

        Args:
            name: ``exact`` chooses exhaustive search. The others choose the fastest point whose measured recall is at least
                `PRESET_RECALL` and whose interval ends at most 0.05 below it.

        Returns:
            The grid point. If only exhaustive search reaches the target: the point with the highest recall among the faster ones, if any.
        """
        everything, target = self.points[-1], PRESET_RECALL[name]
        if name == "exact":
            return everything
        reaching = [point for point in self.points if point.recall >= target and point.low >= target - _DOUBT]
        if len(reaching) > 1:
            return min(reaching, key=lambda point: point.p50_ms)
        faster = [point for point in self.points if point.p50_ms < everything.p50_ms]
        return max(faster, key=lambda point: point.recall, default=everything)


@with_config(RECORD)
@dataclass(frozen=True)
class Calibration:
    """Measured recall and latency of an index.

    Attributes:
        documents: Number of documents that were not deleted.
        largest: Rows of the largest segment.
        origin: Origin of the queries.
        seed: Random seed of the queries.
        created: Time of the measurement, UTC, ISO 8601.
        processor: Name of the processor.
        versions: Versions of the packages used, by name.
        tables: One table for each number of hits, ascending.
    """

    documents: Count
    largest: Count
    origin: Origin
    seed: Count
    created: str
    processor: str
    versions: Mapping[str, str]
    tables: tuple[RecallTable, ...]

    def holds_for(self, segments: Iterable[int]) -> bool:
        """Whether the measured recall still holds approximately for changed segments.

        A document of the overall top k is in the top k of its segment, and each segment is searched with the same parameters: more
        segments, smaller segments or deleted documents do not lower recall. A larger segment does, because a smaller share of it is
        visited.

        Args:
            segments: Number of rows of each segment.
        """
        return max(segments, default=0) <= self.largest

    def choose(self, target_recall: float, k: int) -> tuple[int, GridPoint]:
        """The fastest grid point whose 95% interval of recall lies at or above a target.

        Args:
            target_recall: Target in (0, 1].
            k: Number of hits; the table of the smallest measured number >= k is used.

        Returns:
            The number of hits of that table, and the point; exhaustive search if no other point reaches the target.

        Raises:
            InputError: No measured number of hits is >= k.
            ValueError: The target is not in (0, 1].
        """
        check_target(target_recall)
        table = self.table(k)
        if table is None:
            raise InputError(
                f"recall was measured for up to {self.tables[-1].k} hits, not for {k}; measure it with quiver index calibrate -k {k}"
            )
        return table.k, min((point for point in table.points if point.low >= target_recall), key=lambda point: point.p50_ms)

    def table(self, k: int) -> RecallTable | None:
        """The table of the smallest measured number of hits >= k; None if there is none."""
        return next((table for table in self.tables if table.k >= k), None)

    def advice(self) -> str | None:
        """Advice in one line if the recall of ``balanced`` is below 0.9; otherwise None.

        ``balanced`` already is the best of the measured points, so this happens only if few points were measured or if the codes do not
        distinguish the documents.
        """
        for table in self.tables:
            balanced, exact = table.preset("balanced"), table.preset("exact")
            if balanced.recall < LOW_RECALL:
                return (
                    f"the preset balanced finds {balanced.recall:.2f} of the {table.k} best documents; search with --effort exact, "
                    f"effort='exact' in Python ({exact.p50_ms:.3g} ms per query, balanced takes {balanced.p50_ms:.3g}), or measure more"
                    " with quiver index calibrate"
                )
        return None

    def to_json(self) -> dict[str, Any]:
        """The calibration as stored in the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Calibration:
        """Read the output of ``to_json``."""
        try:
            calibration = parse_record(cls, content, source="")
            problems = _impossible(calibration)
        except SchemaError as error:
            problems = "; ".join(error.problems)
        if problems:
            raise InputError(f"the calibration cannot be read ({problems}); run quiver index calibrate")
        return calibration


def check_target(target_recall: float) -> None:
    """Check that a target recall is possible."""
    if not 0 < target_recall <= 1:
        raise ValueError(f"target_recall must be above 0 and at most 1, got {target_recall}")


def interval(recalls: NDArray[np.float64], counted: NDArray[np.int64]) -> tuple[float, float]:
    """The 95% interval of a mean recall.

    It is Wilson's interval of a proportion, which is also meaningful if nothing was missed. The number of independent hits is estimated
    from the variance between queries: one query that misses all its hits is less evidence than many queries that miss one each.

    Args:
        recalls: Recall of each query, (n,).
        counted: Number of hits that each query could find, (n,), at least 1.

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
        size = 1.0  # one query does not show how its hits correlate
    middle = (share + _Z**2 / (2 * size)) / (1 + _Z**2 / size)
    half = _Z / (1 + _Z**2 / size) * (share * (1 - share) / size + _Z**2 / (4 * size**2)) ** 0.5
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def _impossible(calibration: Calibration) -> str | None:
    """A relation between values of a calibration that does not hold."""
    ks = [table.k for table in calibration.tables]
    if not ks or ks[0] < 1 or ks != sorted(set(ks)):
        return f"tables must be of ascending numbers of hits, got {ks}"
    for table in calibration.tables:
        if not table.queries:
            return f"no queries for {table.k} hits"
        if not table.points or table.points[-1].low < 1:
            return f"the last grid point for {table.k} hits does not have recall 1"
        for point in table.points:
            if not 0 <= point.low <= point.recall <= point.high <= 1 or not 0 <= point.p50_ms <= point.p95_ms:
                return f"a grid point for {table.k} hits has an impossible recall or latency"
    return None
