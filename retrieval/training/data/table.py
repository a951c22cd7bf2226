"""Training rows on disk as numbers: which text is the query, which are the documents, and the teacher's scores.

Files of a table: ``texts.bytes`` and ``texts.ends`` (`retrieval.training.data.strings`), ``numbers`` (of each row the query's text, then
its documents' texts), ``ends`` (where each row ends in them), ``scores`` (one for each document), ``order`` (the rows that are trained on,
in the order that they have), and ``view.arrow`` (what a `datasets.Dataset` maps). All are written as the rows come.

Shapes: R rows, T texts.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.training.data.strings import Strings, StringWriter, mapped_numbers

_DIGEST = 32


class Row(NamedTuple):
    """One row: numbers of its texts, and the scores of its documents (empty without a teacher)."""

    query: int
    documents: NDArray[np.int64]
    scores: NDArray[np.float64]


class TableWriter:
    """Takes texts and rows as they come; a context that closes its files."""

    def __init__(self, folder: Path) -> None:
        """Begin in a folder that exists and is empty."""
        self.texts = StringWriter(folder / "texts")
        self.folder = folder
        self._stack = ExitStack()
        self._stack.callback(self.texts.close)
        self._digests, self._numbers, self._ends, self._scores = (
            self._stack.enter_context((folder / name).open("xb")) for name in ("digests", "numbers", "ends", "scores")
        )
        self._end = 0

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add_text(self, text: bytes) -> int:
        """Take a text in UTF-8; its number."""
        self._digests.write(hashlib.sha256(text).digest())
        return self.texts.add(text)

    def digests(self, texts: NDArray[np.int64] | Sequence[int]) -> list[bytes]:
        """The sha256 of each of some texts that were taken."""
        self._digests.flush()
        return [digest.tobytes() for digest in _mapped_digests(self.folder)[np.asarray(texts, np.int64)]]

    def add_row(self, query: int, documents: Sequence[int], scores: Sequence[float]) -> None:
        """Take a row; scores for all documents, or none."""
        self._end += 1 + len(documents)
        _write(self._numbers, "q", [query, *documents])
        _write(self._ends, "q", [self._end])
        _write(self._scores, "d", scores)

    def finish(self, order: NDArray[np.int64]) -> str:
        """Write the order of the rows, and of the whole its sum.

        Args:
            order: Numbers of the rows that are trained on.

        Returns:
            A sha256 over the texts and scores of these rows in this order. What it is taken over is, for each row, the number of its
            documents (8 bytes), the sha256 of each text (the query's first), and the scores (8 bytes each), all little-endian.
        """
        self._stack.close()
        (self.folder / "order").write_bytes(order.astype("<i8").tobytes())
        table = Table(self.folder)
        digests = _mapped_digests(self.folder)
        total = hashlib.sha256()
        for number in order.tolist():
            row = table[number]
            total.update(len(row.documents).to_bytes(8, "little"))
            total.update(digests[row.query].tobytes())
            total.update(digests[row.documents].tobytes())
            total.update(row.scores.astype("<f8").tobytes())
        (self.folder / "digests").unlink()
        return total.hexdigest()


class Table:
    """Rows that a `TableWriter` wrote, memory-mapped. Pickled or copied, it is the path alone."""

    def __init__(self, folder: Path) -> None:
        """Map the files of ``folder``."""
        self._folder = folder
        self.texts = Strings(folder / "texts")
        self.order = mapped_numbers(folder / "order", np.int64)
        self._numbers = mapped_numbers(folder / "numbers", np.int64)
        self._ends = mapped_numbers(folder / "ends", np.int64)
        self._scores = mapped_numbers(folder / "scores", np.float64)

    def __getitem__(self, number: int) -> Row:
        start = int(self._ends[number - 1]) if number else 0
        end = int(self._ends[number])
        # Each row has one number more than scores: that of its query.
        return Row(int(self._numbers[start]), self._numbers[start + 1 : end], self._scores[start - number : end - number - 1])

    def __reduce__(self) -> tuple[type[Table], tuple[Path]]:
        return Table, (self._folder,)


def _mapped_digests(folder: Path) -> NDArray[np.uint8]:
    """The sha256 of each text, (T, 32)."""
    return mapped_numbers(folder / "digests", np.uint8).reshape(-1, _DIGEST)


def _write(file: BinaryIO, kind: str, values: Sequence[float]) -> None:
    packed = array(kind, values)
    if sys.byteorder == "big":
        packed.byteswap()
    file.write(packed)
