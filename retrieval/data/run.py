"""Runs as TREC text: ``query Q0 document rank score tag``, one retrieved document per line.

A run is ordered by score as float32, then by document id, both descending, as trec_eval ranks; the rank column is ignored. Scores are
written with nine significant digits, which represent every float32 exactly.

Source: https://github.com/usnistgov/trec_eval (form_res_rels.c: the comparison of two results).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import atomic_file, read_lines
from quiver.retrieval.records import Run


def ranked(scores: Mapping[str, float]) -> list[str]:
    """Sort the documents of one query, best first, in trec_eval's order.

    Args:
        scores: Document id -> score.

    Raises:
        ValueError: A score is NaN.

    Example:
        >>> ranked({"a": 1.0, "b": 2.0, "c": 1.0 + 1e-9})
        ['b', 'c', 'a']
    """
    return [document for _, document in _in_order(scores)]


def write_run(run: Run, path: Path, *, tag: str) -> None:
    """Write a run by one rename. A query without documents has no line.

    Args:
        run: Query id -> document id -> score; queries are written in this order.
        path: Target file, compressed if it ends in ``.gz``. Its folder must exist.
        tag: Name of the system, the last column.

    Raises:
        InputError: An id is empty or contains white space, which the format does not allow, or a score is not finite.
        ValueError: The tag is empty or contains white space.
    """
    if tag.split() != [tag]:
        raise ValueError(f"the tag of a run must be one word, got {tag!r}")
    with atomic_file(path) as file:
        for query, scores in run.items():
            _check_id(query, "query", path)
            for document, score in scores.items():
                _check_id(document, "document", path)
                if not math.isfinite(score):
                    raise InputError(f"{path}: query '{query}', document '{document}': the score is {score}, it must be finite")
            lines = (
                f"{query} Q0 {document} {rank} {score:.9g} {tag}\n" for rank, (score, document) in enumerate(_in_order(scores), start=1)
            )
            file.write("".join(lines).encode("utf-8"))


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """Read a run: query id -> document id -> score, in the order of the file. The rank column is ignored.

    Raises:
        InputError: A line does not have six columns, a score is not a finite number, a document is repeated for a query (names the line),
            or the file is empty.
    """
    run: dict[str, dict[str, float]] = {}
    for number, line in read_lines(path):
        columns = line.split()
        if len(columns) != 6:
            raise InputError(f"{path}:{number}: expected 6 columns (query Q0 document rank score tag), got {len(columns)}")
        query, _, document, _, text, _ = columns
        try:
            score = float(text)
        except ValueError as error:
            raise InputError(f"{path}:{number}: the score must be a number, got '{text}'") from error
        if not math.isfinite(score):
            raise InputError(f"{path}:{number}: the score must be finite, got '{text}'")
        documents = run.setdefault(query, {})
        if document in documents:
            raise InputError(f"{path}:{number}: document '{document}' is repeated for query '{query}'")
        documents[document] = score
    return run


def _in_order(scores: Mapping[str, float]) -> list[tuple[float, str]]:
    values: NDArray[np.float64] = np.fromiter(scores.values(), dtype=np.float64, count=len(scores))
    if np.isnan(values).any():
        document = next(document for document, score in scores.items() if math.isnan(score))
        raise ValueError(f"document '{document}' has the score NaN, which cannot be ranked")
    with np.errstate(over="ignore"):  # trec_eval also has infinity beyond float32
        single = values.astype(np.float32)
    return sorted(zip(single.tolist(), scores, strict=True), reverse=True)


def _check_id(key: str, kind: str, path: Path) -> None:
    if key.split() != [key]:
        raise InputError(f"{path}: a run cannot hold the {kind} id {key!r}: ids must not be empty or contain white space")
