"""Dates in the text of a field, for filters.

A date that a condition asks for is a period: a year, a month, a day, or all times that begin so. A field may write dates with several
separators and to several parts, and have other text among them. Its values are sorted as text, so that the values of one form that lie
before, in or after a period are neighbours: bisections find them, and no value has to be read as a date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quiver.retrieval.index.strings import StringColumn

SIGNS = "-/."
"""What may stand between year, month and day."""

CLOCKS = "T "
"""What may stand between day and time."""

Span = tuple[int, int]
"""Numbers of a column's values, from the first to behind the last."""

_ONE_DIGIT = {1: ("01", SIGNS), 2: ("0123", CLOCKS), 3: ("012", ":")}
"""Known parts -> what the next one, a month, day or hour, begins with if it has two digits; and what follows if that is all of it."""

_DATE = re.compile(r"([12][0-9]{3})(?:[-/.]([0-9]{1,2})(?:[-/.]([0-9]{1,2})(?:[T ]([0-9]{1,2})(:[0-9]{2}.*)?)?)?)?")


@dataclass(frozen=True)
class Date:
    """A year, month, day or time that a condition asks for.

    Attributes:
        parts: Year, month, day and time as far as they are known, with two digits each. A time is compared as text, its zone too.
    """

    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Date | None:
        """Read a date with the year first; None if it is none.

        Example:
            >>> Date.parse("2021-6"), Date.parse("2021/06/01 8:30"), Date.parse("2021-14"), Date.parse("1.6.2021")
            (Date(parts=('2021', '06')), Date(parts=('2021', '06', '01', '08:30')), None, None)
        """
        found = _DATE.fullmatch(text)
        if found is None:
            return None
        year, month, day, hour, rest = found.groups()
        if not (1 <= int(month or 1) <= 12 and 1 <= int(day or 1) <= 31 and int(hour or 0) <= 24):
            return None
        time = [hour.zfill(2) + (rest or "")] if hour else []
        return cls((year, *(part.zfill(2) for part in (month, day) if part), *time))

    def spans(self, values: StringColumn, operator: str) -> list[Span]:
        """The values that stand in a relation to the period; ``=`` and ``!=`` are those in it.

        Text that begins with no digit is neither before nor after it.

        Example:
            >>> values = StringColumn.pack(["2021", "2021-05-31", "2021-06-01", "2021-06-01T08:30", "2021/07/01", "unknown"])
            >>> june = Date(("2021", "06"))
            >>> june.spans(values, "="), june.spans(values, ">"), Date(("2021", "06", "01")).spans(values, "=")
            ([(2, 4)], [(4, 5)], [(2, 3), (3, 4)])
        """
        runs = _Runs(values)
        inside = list(self._inside(runs)) if operator in ("=", "!=", "<=", ">=") else []
        beside = list(self._before(runs)) if operator in ("<", "<=") else list(self._after(runs)) if operator in (">", ">=") else []
        return [span for span in (*inside, *beside) if span[0] < span[1]]

    def unsorted(self, values: StringColumn) -> str | None:
        """A value near the date whose month, day or hour has one digit, so that its place among texts is not that in time, if any."""
        runs = _Runs(values)
        for level in range(1, len(self.parts)):
            tens, behind = _ONE_DIGIT[level]
            for sign, form in self._forms(runs, level):
                for between in _between(level, sign):
                    begun = form + between
                    spans = [(runs.low(f"{begun}{len(tens)}"), runs.low(begun + ":"))]  # the character behind 9
                    for ten in tens:
                        spans += [runs.exactly(begun + ten), *(runs.begun(begun + ten + mark) for mark in behind)]
                    found = next((values[first] for first, end in spans if first < end), None)
                    if found is not None:
                        return found
        return None

    def _inside(self, runs: _Runs) -> Iterator[Span]:
        level = len(self.parts)
        for sign, form in self._forms(runs, level):
            if level == 4:  # a time: all that begins so
                yield runs.low(self._minute(form)), runs.high(form)
            else:
                yield runs.exactly(form)
                yield from ((runs.low(f"{form}{between}0"), runs.low(f"{form}{between}:")) for between in _between(level, sign))
        if self._is_midnight:  # a field may write a day alone
            yield from (runs.exactly(day) for _, day in self._forms(runs, 3))

    def _before(self, runs: _Runs) -> Iterator[Span]:
        yield runs.low("0"), runs.low(self.parts[0])
        for level in range(1, len(self.parts)):
            for sign, form in self._forms(runs, level):
                if not (level == 3 and self._is_midnight):
                    yield runs.exactly(form)  # less exact: it begins with the period
                for between in _between(level, sign):
                    yield runs.low(form + between), runs.low(self._minute(form + between + self.parts[level]))

    def _after(self, runs: _Runs) -> Iterator[Span]:
        yield runs.high(self.parts[0]), runs.low(":")  # the character behind 9
        for level in range(1, len(self.parts)):
            for sign, form in self._forms(runs, level):
                for between in _between(level, sign):
                    yield runs.high(form + between + self.parts[level]), runs.high(form + between)

    def _forms(self, runs: _Runs, level: int) -> Iterator[tuple[str, str]]:
        """The separator and the text of the first parts, in each form that a value has."""
        for sign in SIGNS if level > 1 else ("",):
            for clock in CLOCKS if level > 3 else ("",):
                form = sign.join(self.parts[: min(level, 3)]) + "".join(clock + time for time in self.parts[3:level])
                first, behind = runs.low(self._minute(form) if level > 3 else form), runs.high(form)
                if first < behind:
                    yield sign, form

    @property
    def _is_midnight(self) -> bool:
        return len(self.parts) == 4 and re.fullmatch(r"00(:00){0,2}(\.0*)?(Z|[+]00:?00)?", self.parts[3]) is not None

    def _minute(self, form: str) -> str:
        """A time without its seconds if they are zero: fields may leave them out."""
        return form.removesuffix(":00") if len(self.parts) == 4 and re.fullmatch(r"[0-9]{2}:[0-9]{2}:00", self.parts[3]) else form


def digit_ends(values: StringColumn, holds: Callable[[int], bool]) -> list[str]:
    """The first and last of the values that begin with a digit and that a document has; none if there are none.

    Args:
        values: The values, sorted.
        holds: Whether a document has the value of a number.

    Example:
        >>> digit_ends(StringColumn.pack(["-", "2021-06-01", "2022", "3 days", "unknown"]), lambda number: number != 3)
        ['2021-06-01', '2022']
    """
    runs = _Runs(values)
    numbers = range(runs.low("0"), runs.low(":"))
    ends = [next(filter(holds, order), None) for order in (numbers, reversed(numbers))]
    return [values[number] for number in ends if number is not None]


def _between(level: int, sign: str) -> str:
    """What may stand behind so many parts of a date, one character each."""
    return SIGNS if level == 1 else sign if level == 2 else CLOCKS if level == 3 else ""


class _Runs:
    """Neighbouring values of a sorted column."""

    def __init__(self, values: StringColumn) -> None:
        self._values = values

    def low(self, text: str) -> int:
        """How many values are less than a text."""
        return self._bisect(text.encode())

    def high(self, text: str) -> int:
        """How many values are less than all that do not begin with a text and are greater."""
        return self._bisect(text.encode() + b"\xff")  # no byte of UTF-8 is 255

    def begun(self, text: str) -> Span:
        """The values that begin with a text."""
        return self.low(text), self.high(text)

    def exactly(self, text: str) -> Span:
        """The value that is a text."""
        return self.low(text), self._bisect(text.encode() + b"\0")

    def _bisect(self, wanted: bytes) -> int:
        low, high = 0, len(self._values)
        while low < high:
            middle = (low + high) // 2
            if self._values.bytes_of(middle) < wanted:
                low = middle + 1
            else:
                high = middle
        return low
