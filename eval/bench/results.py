"""Results of a benchmark: cases with one row per backend, and the conditions of the measurement; the content of ``results.json``.

All values are stored round by round, ratios included: the range of a ratio shows how reliable its median is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Literal, TypeAlias

from pydantic.dataclasses import dataclass

from quiver.encoder.files import write_json
from quiver.encoder.schema import RECORD, parse_record
from quiver.eval.results import Provenance, read_versioned

SCHEMA = "quiver-benchmark/2"
"""Name and version of the format: the value of ``schema`` in the file."""

FINISHED_SCHEMA = "quiver-benchmark-finished/1"
"""Format of the saved measurements of an interrupted run."""

OWN = "quiver"
"""Name of the backend that all others are compared with."""

Subject: TypeAlias = Literal["encoder", "training", "index", "gpu"]

Scalar: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, config=RECORD)
class Series:
    """One quantity over the rounds.

    Attributes:
        values: One value per round.
        median: Median of the values.
        mean: Mean of the values.
        deviation: Standard deviation of the values; 0 for a single round.
        lowest: Lowest value.
        highest: Highest value.
    """

    values: tuple[float, ...]
    median: float
    mean: float
    deviation: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Series:
        """Summarise one or more values.

        Example:
            >>> Series.of([2, 4, 9])
            Series(values=(2.0, 4.0, 9.0), median=4.0, mean=5.0, deviation=3.605551275463989, lowest=2.0, highest=9.0)
        """
        deviation = stdev(values) if len(values) > 1 else 0.0
        return cls(tuple(values), median(values), fmean(values), deviation, min(values), max(values))


@dataclass(frozen=True, config=RECORD)
class Row:
    """The measurement of one backend in one case.

    Attributes:
        backend: Name of the backend.
        series: Quantity -> values over the rounds, such as ``seconds`` and ``time_ratio``.
        values: Quantity -> a single value, such as ``max_difference``; quantities that were not measured are missing.
        variant: Distinguishes rows of one backend, such as search parameters.
    """

    backend: str
    series: Mapping[str, Series]
    values: Mapping[str, Scalar]
    variant: str = ""


@dataclass(frozen=True, config=RECORD)
class Case:
    """The work that every backend ran, and its measurements.

    Attributes:
        name: Short name.
        title: Description in one line.
        metadata: Sizes, such as ``documents`` and ``tokens``.
        rows: One row per backend and variant; Quiver first if the others are compared with it.
    """

    name: str
    title: str
    metadata: Mapping[str, Scalar]
    rows: tuple[Row, ...]


@dataclass(frozen=True, config=RECORD)
class NotRun:
    """A backend or case without measurements.

    Attributes:
        what: Name of the backend or case.
        reason: Why there are no measurements: not installed, not supported, or how it failed.
    """

    what: str
    reason: str


@dataclass(frozen=True, config=RECORD)
class Benchmark:
    """A run of ``quiver bench``.

    Attributes:
        subject: Subject of the benchmark.
        name: Name of the model or data.
        metadata: Description of the model or data.
        settings: Options that affect the measurement.
        cases: The measurements.
        not_run: Backends and cases without measurements.
        processor: Name of the CPU or GPU.
        load_average: Average number of running processes over the last 1, 5 and 15 minutes, at the start; empty if not available.
        provenance: Command, versions and machine.
    """

    subject: Subject
    name: str
    metadata: Mapping[str, Scalar]
    settings: Mapping[str, Scalar]
    cases: tuple[Case, ...]
    not_run: tuple[NotRun, ...]
    processor: str
    load_average: tuple[float, ...]
    provenance: Provenance

    def case(self, name: str) -> Case:
        """The case with the given name.

        Raises:
            KeyError: There is no such case.
        """
        return {case.name: case for case in self.cases}[name]


def with_ratios(rows: Sequence[Row], quantities: Mapping[str, str]) -> tuple[Row, ...]:
    """Add the ratio to Quiver's value in the same round; a ratio of 2 is twice Quiver's value.

    Args:
        rows: The rows of a case; one of them must be that of `OWN`.
        quantities: Series -> name of the new series of ratios.
    """
    own = next(row for row in rows if row.backend == OWN)

    def ratios(row: Row, quantity: str) -> Series:
        return Series.of([each / base for each, base in zip(row.series[quantity].values, own.series[quantity].values, strict=True)])

    return tuple(replace(row, series={**row.series, **{new: ratios(row, old) for old, new in quantities.items()}}) for row in rows)


def to_json(benchmark: Benchmark) -> dict[str, object]:
    """Convert a benchmark to parsed JSON."""
    return {"schema": SCHEMA, **asdict(benchmark)}


def write_benchmark(benchmark: Benchmark, path: Path) -> None:
    """Write a benchmark as JSON, atomically."""
    write_json(path, to_json(benchmark))


def read_benchmark(path: Path) -> Benchmark:
    """Read a file written by `write_benchmark`.

    Raises:
        InputError: The file is missing, damaged, or of another format or version.
    """
    return parse_record(Benchmark, read_versioned(path, SCHEMA, command="quiver bench"), source=str(path))


@dataclass(frozen=True, config=RECORD)
class Finished:
    """Finished rows of an interrupted run.

    Attributes:
        key: Hash of everything that the rows depend on.
        cases: Name of a case -> rows.
    """

    key: str
    cases: Mapping[str, tuple[Row, ...]]


class FinishedRows:
    """Finished measurements in a folder, one file each, so that a repeated command measures only the missing ones.

    Args:
        folder: Created when the first measurement is saved.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, name: str, key: str) -> Mapping[str, tuple[Row, ...]] | None:
        """Return the rows saved under a name; None if there are none or their key differs.

        Raises:
            InputError: The file is damaged or of another version.
        """
        path = self._path(name)
        if not path.is_file():
            return None
        content = read_versioned(path, FINISHED_SCHEMA, command="quiver bench with --overwrite")
        found = parse_record(Finished, content, source=str(path))
        return found.cases if found.key == key else None

    def save(self, name: str, key: str, cases: Mapping[str, tuple[Row, ...]]) -> None:
        """Write the rows of a finished measurement, atomically."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(name), {"schema": FINISHED_SCHEMA, **asdict(Finished(key, cases))})

    def remove(self, name: str) -> None:
        """Delete a saved measurement."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{file_name(name)}.json"


def file_name(name: str) -> str:
    """File name for any text: readable, and different for different texts.

    Example:
        >>> file_name("ivf-dense:nlist=64")
        'ivf-dense-nlist-64-57f76407'
    """
    readable = "".join(letter if letter.isalnum() else "-" for letter in name)[:60]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
