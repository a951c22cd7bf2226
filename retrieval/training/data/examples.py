"""The rows of a section's sources as examples: to train on, or whole, for those who mine from them or score them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from quiver.encoder.errors import InputError
from quiver.retrieval.progress import Advance
from quiver.retrieval.training.data.fields import Example, FieldReader
from quiver.retrieval.training.data.sources import iter_source
from quiver.retrieval.training.sections import DataSection


def read_examples(section: DataSection, advance: Advance) -> Iterator[Example]:
    """What is trained on, in the order of the rows; of a row with several positives perhaps several.

    Args:
        section: Sources and fields; ``format`` is texts or ids.
        advance: Takes the number of further rows.

    Raises:
        InputError: A source cannot be read, or a row is malformed.
    """
    reader = FieldReader(section)
    for place, row in _checked_rows(section, reader, reader.columns):
        advance(1)
        yield from reader.examples(place, row)


def read_whole(section: DataSection, *, all_columns: bool) -> Iterator[tuple[Example, Mapping[str, object]]]:
    """Each row as one example with all its documents, and the row itself.

    Args:
        section: Sources and fields; ``format`` is texts or ids.
        all_columns: The rows have all their fields, not only those that the section names.

    Raises:
        InputError: A source cannot be read, a row is malformed, or its query or first positive is blank.
    """
    reader = FieldReader(section)
    for place, row in _checked_rows(section, reader, () if all_columns else reader.columns):
        example = reader.whole(place, row)
        if example.flaw:
            raise InputError(f"{place}: {example.flaw}")
        yield example, row


def _checked_rows(section: DataSection, reader: FieldReader, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    for source in section.train:
        for number, (place, row) in enumerate(iter_source(source, columns)):
            if number == 0:
                reader.check(place, row)
            yield place, row
