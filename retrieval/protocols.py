"""Protocols between the parts of retrieval, and the row containers that implement `Rows`.

Shapes: Q queries, B documents, k hits per query, n rows, d vector width, n_i token vectors of text i.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.records import DenseEncoding, DenseVectors, ModelCard, Role, TokenEncoding


class DenseModel(Protocol):
    """A text encoder with one vector per text."""

    @property
    def card(self) -> ModelCard:
        """Facts about the model for indexes and reports."""

    def encode(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        """Encode texts to (B, d) float32, in input order."""


class TokenModel(Protocol):
    """A text encoder with one vector per token."""

    @property
    def card(self) -> ModelCard:
        """Facts about the model for indexes and reports."""

    def encode(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        """Encode texts to B arrays of (n_i, d) float32, in input order."""


class Rows(Protocol):
    """Vectors in memory or on disk, (n, d) float32. The returned arrays may be views and must not be modified."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows n and width d."""

    def blocks(self, size: int) -> Iterator[tuple[int, DenseVectors]]:
        """Yield all rows in order in blocks of ``size``, each with the number of its first row."""

    def span(self, start: int, stop: int) -> DenseVectors:
        """Return the rows ``start`` to ``stop - 1``."""

    def take(self, indices: NDArray[np.intp]) -> DenseVectors:
        """Return rows by number, in the order given."""


class Matrix(Protocol):
    """An array of rows, in memory or read from a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> DenseVectors:
        """Select rows."""


class MatrixRows:
    """Rows of a matrix, (n, d) float32, in memory or memory-mapped."""

    def __init__(self, matrix: DenseVectors | Matrix) -> None:
        self.matrix = matrix

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows n and width d."""
        return self.matrix.shape[0], self.matrix.shape[1]

    def blocks(self, size: int) -> Iterator[tuple[int, DenseVectors]]:
        """Yield all rows in order in blocks of ``size``, each with the number of its first row; views, not copies."""
        for start in range(0, len(self.matrix), size):
            yield start, self.matrix[start : start + size]

    def span(self, start: int, stop: int) -> DenseVectors:
        """Return the rows ``start`` to ``stop - 1``; a view, not a copy."""
        return self.matrix[start:stop]

    def take(self, indices: NDArray[np.intp]) -> DenseVectors:
        """Return rows by number, in the order given."""
        taken: DenseVectors = self.matrix[indices]
        return taken


class PickedRows:
    """A selection of other rows; nothing is read before it is requested.

    Args:
        rows: All rows, (n, d).
        picked: Numbers of the selected rows, (m,), in their order here.
    """

    def __init__(self, rows: Rows, picked: NDArray[np.intp]) -> None:
        self._rows = rows
        self._picked = picked

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows m and width d."""
        return len(self._picked), self._rows.shape[1]

    def blocks(self, size: int) -> Iterator[tuple[int, DenseVectors]]:
        """Yield all rows in order in blocks of ``size``, each with the number of its first row."""
        for start in range(0, len(self._picked), size):
            yield start, self.span(start, start + size)

    def span(self, start: int, stop: int) -> DenseVectors:
        """Return the rows ``start`` to ``stop - 1``."""
        return self._rows.take(self._picked[start:stop])

    def take(self, indices: NDArray[np.intp]) -> DenseVectors:
        """Return rows by number, in the order given."""
        return self._rows.take(self._picked[indices])


Item = TypeVar("Item")
"""Item of work: small and picklable, since it may be sent to another process."""

ItemIn = TypeVar("ItemIn", contravariant=True)
"""Items of a task."""

Result = TypeVar("Result")
"""Result of an item; picklable."""

ResultOut = TypeVar("ResultOut", covariant=True)
"""Results of a task."""


class Task(Protocol[ItemIn, ResultOut]):
    """Work on items. A remote executor pickles the task for its workers."""

    def open(self) -> Callable[[ItemIn], ResultOut]:
        """Load what all items need, such as a model, and return the function for one item. Called once per worker.

        Raises:
            InputError: Loading failed; the run ends with this error.
        """


class Executor(Protocol):
    """Runs a task on items in any order, on one worker or many, and returns the result of each item once.

    An item may be *executed* more than once: if a worker dies, or seems dead, its item is assigned again. What an item writes must
    therefore be safe to write twice.
    """

    @property
    def name(self) -> str:
        """Name on the command line."""

    @property
    def remote(self) -> bool:
        """Whether tasks run in other processes, which share only files with this one."""

    def threads(self, here: int) -> int:
        """Threads per worker, given that this process uses ``here``."""

    def run(self, task: Task[Item, Result], items: Iterable[Item], *, threads: int = 1) -> Generator[tuple[Item, Result], None, None]:
        """Run all items and yield results as they complete, in any order. Workers end when the iterator ends or is closed.

        Args:
            task: The task.
            items: Items; consumed as workers become free.
            threads: Threads that each worker reserves; the task itself sets how many it uses.

        Raises:
            InputError: An item, or opening the task, failed because of a mistake of the user.
            WorkerError: An item failed on several workers, or no worker stays alive.
        """


class InProcess:
    """Executor that runs items in this process, in order; errors are raised unchanged."""

    name = "local"
    remote = False

    def threads(self, here: int) -> int:
        """Return all threads of this process."""
        return here

    def run(self, task: Task[Item, Result], items: Iterable[Item], *, threads: int = 1) -> Generator[tuple[Item, Result], None, None]:
        """See `Executor`."""
        del threads
        work = None
        for item in items:
            work = work or task.open()
            yield item, work(item)


IN_PROCESS = InProcess()
"""The default executor."""
