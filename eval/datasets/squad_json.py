"""SQuAD's JSON taken apart: articles, their paragraphs, the questions on them as they stand there; what is wrong is said by its place.

Source: SQuAD, arXiv:1606.05250 and arXiv:1806.03822; KorQuAD 1.0, arXiv:1909.07005; the files of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json


class RawParagraph(NamedTuple):
    """A paragraph and what is asked about it."""

    number: int
    """Its place in its article."""
    context: str
    """The text."""
    questions: list[object]
    """As they stand in the file."""
    where: str
    """File, article and paragraph, for errors."""


def read_paragraphs(path: Path) -> Iterator[RawParagraph]:
    """The paragraphs of a file in their order.

    Args:
        path: ``{"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}``.

    Raises:
        InputError: The file is missing or not of this form; names the article and the paragraph.
    """
    for article_number, article in enumerate(list_under(read_json(path), "data", f"{path}")):
        for number, paragraph in enumerate(list_under(article, "paragraphs", f"{path}: data[{article_number}]")):
            where = f"{path}: data[{article_number}].paragraphs[{number}]"
            yield RawParagraph(number, text_under(paragraph, "context", where), list_under(paragraph, "qas", where), where)


def is_impossible(question: object) -> bool:
    """Whether version 2 says that a question has no answer in its paragraph."""
    return isinstance(question, Mapping) and question.get("is_impossible") is True


def list_under(value: object, key: str, where: str) -> list[object]:
    """The list that an object has under a key.

    Raises:
        InputError: There is none.
    """
    found = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(found, list):
        raise InputError(f"{where}: not SQuAD's format, '{key}' must be a list")
    return found


def text_under(value: object, key: str, where: str) -> str:
    """The text that an object has under a key.

    Raises:
        InputError: There is none, or it is blank.
    """
    found = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(found, str) or not found.strip():
        raise InputError(f"{where}: not SQuAD's format, '{key}' must be text")
    return found
