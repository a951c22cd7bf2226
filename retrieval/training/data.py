"""Training data: pairs and triplets of text, from .jsonl[.gz] files or mined from the standard library.

A row has the keys ``query``, ``positive`` and, where the recipe names one, ``negative``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from encoder import InputError
from encoder.files import expand_home
from retrieval.docstrings import Pair, mine, split_by_module
from retrieval.files import read_json_lines
from retrieval.training.recipe import STDLIB_DOCSTRINGS, DataSection, Recipe

Row: TypeAlias = dict[str, str]

HELD_OUT = 0.15
"""Share of the mined pairs that training never sees: what quickstart is scored on."""


def load_rows(recipe: Recipe) -> list[Row]:
    """Read the rows a recipe names, in their order.

    Raises:
        InputError: The file is missing, or a row lacks a field or holds something other than text; names file and line.
    """
    data = recipe.data
    if data.train == STDLIB_DOCSTRINGS:
        train, _ = split_by_module(mine(), held_out=HELD_OUT, seed=recipe.training.seed)
        return rows_of_pairs(train)[: data.limit]
    return _read_rows(data)


def rows_of_pairs(pairs: Iterable[Pair]) -> list[Row]:
    """Mined pairs as training rows."""
    return [{"query": pair.query, "positive": pair.code} for pair in pairs]


def column_prompts(*, query: str, document: str) -> dict[str, str]:
    """For each key a row may have, the prompt that goes before its texts.

    Example:
        >>> column_prompts(query="find: ", document="")
        {'query': 'find: ', 'positive': '', 'negative': ''}
    """
    return {"query": query, "positive": document, "negative": document}


def _read_rows(data: DataSection) -> list[Row]:
    fields = {"query": data.query_field, "positive": data.positive_field}
    if data.negative_field is not None:
        fields["negative"] = data.negative_field
    rows: list[Row] = []
    path = expand_home(data.train)
    for number, row in read_json_lines(path):
        texts = {key: row.get(name) for key, name in fields.items()}
        for key, text in texts.items():
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"{path}:{number}: the field {fields[key]!r} must hold text, got {text!r}")
        rows.append({key: str(text) for key, text in texts.items()})
        if data.limit is not None and len(rows) >= data.limit:
            break
    return rows
