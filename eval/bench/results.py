"""Results of a benchmark: cases with one row per backend, and how they were measured. The content of ``results.json``.

Everything is stored as measured, round by round. Ratios are kept per round as well: their range shows how far to trust the median.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Literal, TypeAlias

from quiver.encoder.files import write_json
from quiver.eval.decoding import encode, read_record
from quiver.eval.results import Provenance

SCHEMA = "quiver-benchmark/1"
"""Name and version of the format, the value of ``schema`` in the file."""

FINISHED_SCHEMA = "quiver-benchmark-finished/1"
"""Format of the measurements that an interrupted run keeps."""

OWN = "quiver"
"""The backend that all others are compared with."""

Subject: TypeAlias = Literal["encoder", "training", "index"]

Scalar: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True)
class Series:
    """One quantity over the rounds.

    Attributes:
        values: One value per round.
        median: Their median.
        mean: Their mean.
        deviation: Their standard deviation; 0 for a single round.
        lowest: The lowest value.
        highest: The highest value.
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
            Series(values=(2, 4, 9), median=4, mean=5.0, deviation=3.605551275463989, lowest=2, highest=9)
        """
        deviation = stdev(values) if len(values) > 1 else 0.0
        return cls(tuple(values), median(values), fmean(values), deviation, min(values), max(values))


@dataclass(frozen=True)
class Row:
    """The measurement of one backend in one case.

    Attributes:
        backend: Its name.
        series: Quantity -> values over the rounds, such as ``seconds`` and ``time_ratio``.
        values: Quantity -> a single value, such as ``max_difference``; quantities that were not measured are missing.
        variant: Distinguishes rows of one backend, such as search parameters.
    """

    backend: str
    series: Mapping[str, Series]
    values: Mapping[str, Scalar]
    variant: str = ""


@dataclass(frozen=True)
class Case:
    """What every backend ran, and what each of them needed.

    Attributes:
        name: Short name.
        title: The case in one line.
        facts: Sizes, such as ``documents`` and ``tokens``.
        rows: One per backend and variant; Quiver first where the others are compared with it.
    """

    name: str
    title: str
    facts: Mapping[str, Scalar]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class NotRun:
    """A backend or case without measurements.

    Attributes:
        what: Its name.
        reason: Not installed, not supported, or how it failed.
    """

    what: str
    reason: str


@dataclass(frozen=True)
class Benchmark:
    """A run of ``quiver bench``.

    Attributes:
        subject: What was measured.
        name: Model or data.
        facts: Facts about the model or data.
        settings: Options that affect the measurement.
        cases: The measurements.
        not_run: Backends and cases without measurements.
        processor: Name of the CPU or GPU.
        load_average: Running processes over the last 1, 5 and 15 minutes at the start; empty if the system does not report it.
        provenance: Command, versions, machine.
    """

    subject: Subject
    name: str
    facts: Mapping[str, Scalar]
    settings: Mapping[str, Scalar]
    cases: tuple[Case, ...]
    not_run: tuple[NotRun, ...]
    processor: str
    load_average: tuple[float, ...]
    provenance: Provenance

    def case(self, name: str) -> Case:
        """The case of that name.

        Raises:
            KeyError: There is no such case.
        """
        return {case.name: case for case in self.cases}[name]


def with_ratios(rows: Sequence[Row], quantities: Mapping[str, str]) -> tuple[Row, ...]:
    """Add the ratio to Quiver's value of the same round: 2 is twice as much as Quiver.

    Args:
        rows: The rows of a case; the row of `OWN` is among them.
        quantities: Series -> name of the new series of ratios.
    """
    own = next(row for row in rows if row.backend == OWN)

    def ratios(row: Row, quantity: str) -> Series:
        return Series.of([each / base for each, base in zip(row.series[quantity].values, own.series[quantity].values, strict=True)])

    return tuple(replace(row, series={**row.series, **{new: ratios(row, old) for old, new in quantities.items()}}) for row in rows)


def to_json(benchmark: Benchmark) -> dict[str, object]:
    """Convert a benchmark to parsed JSON."""
    return encode(benchmark, SCHEMA)


def write_benchmark(benchmark: Benchmark, path: Path) -> None:
    """Write a benchmark as JSON, atomically."""
    write_json(path, to_json(benchmark))


def read_benchmark(path: Path) -> Benchmark:
    """Read what `write_benchmark` wrote.

    Raises:
        InputError: The file is missing, damaged, or of another format or version.
    """
    return read_record(Benchmark, path, schema=SCHEMA, command="quiver bench")


@dataclass(frozen=True)
class Finished:
    """Rows that an interrupted run has finished.

    Attributes:
        key: Hash of everything the rows depend on.
        cases: Name of a case -> rows.
    """

    key: str
    cases: Mapping[str, tuple[Row, ...]]


class FinishedRows:
    """Finished measurements in a folder, one file each: a command that is repeated measures only what is missing.

    Args:
        folder: Created when the first measurement is saved.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, name: str, key: str) -> Mapping[str, tuple[Row, ...]] | None:
        """Return the rows saved under a name; None if there are none or they depend on something else.

        Raises:
            InputError: The file is damaged or of another version.
        """
        path = self._path(name)
        if not path.is_file():
            return None
        found = read_record(Finished, path, schema=FINISHED_SCHEMA, command="quiver bench with --overwrite")
        return found.cases if found.key == key else None

    def save(self, name: str, key: str, cases: Mapping[str, tuple[Row, ...]]) -> None:
        """Write the rows of a finished measurement, atomically."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(name), encode(Finished(key, cases), FINISHED_SCHEMA))

    def remove(self, name: str) -> None:
        """Forget a measurement."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{file_name(name)}.json"


def file_name(name: str) -> str:
    """A file name for any text: readable, and different for different texts.

    Example:
        >>> file_name("ivf-dense:nlist=64")
        'ivf-dense-nlist-64-57f76407'
    """
    readable = "".join(letter if letter.isalnum() else "-" for letter in name)[:60]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
