"""From rows to packed batches: the order of the rows, their tokens, and batches made ahead of the model.

The order of an epoch is torch's random permutation with the seed ``training.seed`` + epoch, counted from 0, as in the samplers of
accelerate and sentence-transformers. An incomplete batch at the end of an epoch is dropped, because it would have fewer negatives.

Shapes: B rows of a batch, n documents per row, C columns of texts, N packed tokens.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quiver.encoder import InputError, pack_ids
from quiver.encoder.training.processes import Processes
from quiver.encoder.training.trainer import TrainingBatch, prefetch
from quiver.retrieval.data.embedding_store import text_keys
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.records import Role
from quiver.retrieval.training.data import SCORES, TrainingRows

logger = logging.getLogger(__name__)

TEXTS, COLUMNS, LABEL, PRESENT = "texts", "columns", "label", "present"
"""Keys of a batch: the packed texts of all columns, the number of texts of each column, the teacher scores, and which texts are there."""

_BLOCK = 512  # rows read together to compare their texts
_MOST_LEFT_OUT = 0.01  # share of the rows that an epoch may leave out without a warning

_MANY_TRUNCATED, _FIRST_TEXTS = 0.2, 256
"""Share of truncated texts that is worth a warning, and the number of texts after which it is computed."""

_EPSILON = 1e-8  # PyLate's, against a division by zero if all scores of a row are equal

_REMEDY = "lower training.batch_size, remove repeated rows, or set training.no_duplicates to false"


@dataclass(frozen=True)
class Batch:
    """Rows of one batch."""

    epoch: int
    number: int
    rows: list[int]
    last: bool

    @property
    def next_position(self) -> tuple[int, int]:
        """Position of the next batch: its epoch, and the number of batches before it in that epoch."""
        return (self.epoch + 1, 0) if self.last else (self.epoch, self.number)


class BatchOrder:
    """The batches of a run, epoch after epoch, without end."""

    def __init__(self, rows: TrainingRows, *, size: int, seed: int, no_duplicates: bool, warn: bool = True) -> None:
        if len(rows) < size:
            raise InputError(f"data.train: {len(rows)} rows do not fill one batch of {size}; lower training.batch_size")
        self._rows = rows
        self._size = size
        self._seed = seed
        self._no_duplicates = no_duplicates
        self._warn = warn

    @property
    def per_epoch(self) -> int:
        """Full batches per epoch; with ``no_duplicates`` an epoch may have fewer."""
        return len(self._rows) // self._size

    def batches(self, epoch: int = 0, done: int = 0) -> Iterator[Batch]:
        """Yield the batches from a position on, see `Batch.next_position`.

        While a batch is in use, the rows are in its epoch (`TrainingRows.set_epoch`).
        """
        while True:
            self._rows.set_epoch(epoch)
            full = 0
            for full, (rows, last) in enumerate(self._order_epoch(epoch), start=1):
                left_out = (self.per_epoch - full) * self._size
                if last and self._warn and left_out > _MOST_LEFT_OUT * len(self._rows):
                    text = "epoch %d leaves out %d of %d rows because they repeat texts; %s"
                    logger.warning(text, epoch + 1, left_out, len(self._rows), _REMEDY)
                if full > done:
                    yield Batch(epoch, full, rows, last)
            if not full:
                raise InputError(
                    f"data.train: {len(self._rows)} rows do not fill one batch of {self._size} without a repeated text; {_REMEDY}"
                )
            epoch, done = epoch + 1, 0

    def _order_epoch(self, epoch: int) -> Iterator[tuple[list[int], bool]]:
        """The rows of each batch, and whether it is the last."""
        generator = torch.Generator().manual_seed(self._seed + epoch)
        order: list[int] = torch.randperm(len(self._rows), generator=generator).tolist()
        slices = (order[first : first + self._size] for first in range(0, self.per_epoch * self._size, self._size))
        batches = without_shared_texts(self._key_rows(order), self._size) if self._no_duplicates else slices
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            yield batch, following is None
            batch = following

    def _key_rows(self, order: Sequence[int]) -> Iterator[KeyedRow]:
        for first in range(0, len(order), _BLOCK):
            numbers = list(order[first : first + _BLOCK])
            texts = [values for name, values in self._rows.columns(numbers).items() if name != SCORES]
            each = [[text for text in row if text is not None] for row in zip(*texts, strict=True)]
            keys = iter(text_keys([text for row in each for text in row]).tolist())
            for number, row in zip(numbers, each, strict=True):
                yield KeyedRow(number, frozenset(islice(keys, len(row))))


class KeyedRow(NamedTuple):
    """A row with a key of each of its texts."""

    number: int
    keys: frozenset[bytes]


def without_shared_texts(rows: Iterator[KeyedRow], size: int) -> Iterator[list[int]]:
    """Yield full batches of rows that share no text; each gets the first rows that fit, deferred rows before new ones."""
    deferred: list[KeyedRow] = []
    while True:
        batch, keys, waiting, earlier = list[int](), set[bytes](), list[KeyedRow](), iter(deferred)
        for row in chain(earlier, rows):
            if keys.isdisjoint(row.keys):
                batch.append(row.number)
                keys |= row.keys
                if len(batch) == size:
                    break
            else:
                waiting.append(row)
        else:
            return  # the rows that are left do not fill a batch
        deferred = [*waiting, *earlier]
        yield batch


class Collator:
    """Tokenizes and packs rows with the prompts, prefixes, lengths and query expansion of the model; warns once of truncated texts.

    ``counts`` are totals of what it has seen: ``texts``, ``truncated`` texts, and ``tokens``.
    """

    def __init__(
        self, model: BiEncoder | ColBERT, *, max_length: int | None = None, merge_documents: bool = False, minmax: bool = False
    ) -> None:
        self.counts = Counter[str]()
        self._model = model
        self._max_length = max_length
        self._merge_documents = merge_documents
        self._minmax = minmax
        self._warns = os.environ.get("RANK", "0") == "0"  # set by torchrun
        roles: tuple[Role, Role] = ("query", "document")
        for role in roles:
            self._check_room(role)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch.

        Returns:
            ``texts``: a `PackedBatch` of all texts, column by column, the queries first. ``columns``: the number of texts of each column, C
            integers. ``label``: the teacher scores, (B, n) float32, if the rows have scores. ``present``: whether a text is there, a
            tensor with one value per text, if a document is None; an empty text takes its place in ``texts``.
        """
        query, *documents = (column for column in rows[0] if column != SCORES)
        ids, attended = self._tokens([row[query] for row in rows], "query"), None
        if isinstance(self._model, ColBERT):
            ids, attended = self._model.expand(ids, max_length=self._max_length)
        key_lengths = list(map(len, ids)) if attended is None else attended  # leading tokens that are attended to
        sizes = [len(rows)]
        columns = [[row[column] for row in rows] for column in documents]
        for texts in [[text for row in zip(*columns, strict=True) for text in row]] if self._merge_documents else columns:
            tokens = self._tokens(texts, "document")
            ids, key_lengths = [*ids, *tokens], [*key_lengths, *map(len, tokens)]
            sizes.append(len(texts))
        batch: dict[str, Any] = {TEXTS: pack_ids(ids, key_lengths=key_lengths), COLUMNS: tuple(sizes)}
        if any(text is None for texts in columns for text in texts):
            there = [True] * len(rows) + [text is not None for texts in columns for text in texts]
            batch[PRESENT] = torch.tensor(there)
        if SCORES in rows[0]:
            batch[LABEL] = teacher_scores([row[SCORES] for row in rows], minmax=self._minmax)
        seen, truncated = self.counts["texts"], self.counts["truncated"]
        if self._warns and seen >= _FIRST_TEXTS and truncated > _MANY_TRUNCATED * seen:
            self._warns = False
            text = "%.0f%% of the texts so far are truncated; their remaining tokens are not trained on. The limit is the model's, or %s"
            logger.warning(text, 100 * truncated / seen, "training.max_length")
        return batch

    def _tokens(self, texts: Sequence[str | None], role: Role) -> list[list[int]]:
        found = self._model.tokenize([text or "" for text in texts], role, max_length=self._max_length)
        there = [ids for ids, text in zip(found.ids, texts, strict=True) if text is not None]
        self.counts.update(texts=len(there), truncated=sum(found.truncated), tokens=sum(map(len, there)))
        return found.ids

    def _check_room(self, role: Role) -> None:
        """Refuse a limit that a prompt or prefix fills up."""
        model = self._model
        if isinstance(model, ColBERT):
            own = model.settings.colbert.query_length if role == "query" else model.settings.colbert.document_length
            name, remedy = f"model.colbert.{role}_length", "raise it"
        else:
            own, name, remedy = model.max_length, "model.max_length", f"raise it, or shorten model.{role}_prompt"
        limit = min(own, self._max_length or own)
        if len(model.tokenize([""], role, max_length=self._max_length).ids[0]) >= limit:
            name = name if limit == own else "training.max_length"
            raise InputError(f"{name}: {limit} tokens leave no room for the text of a {role} after its prompt or prefix; {remedy}")


def teacher_scores(scores: Sequence[Sequence[float]], *, minmax: bool) -> Tensor:
    """Return teacher scores as labels, (B, n) float32; ``minmax`` scales those of each row to 0..1."""
    labels = torch.tensor([list(row) for row in scores], dtype=torch.float32)
    if not minmax:
        return labels
    low, high = labels.amin(dim=1, keepdim=True), labels.amax(dim=1, keepdim=True)
    return (labels - low) / (high - low + _EPSILON)


@dataclass(frozen=True)
class DataLoader:
    """The remaining batches of a run: this process's rows of each, collated.

    While the model trains on a batch, a thread makes the next one. It draws no random numbers, and no other thread reads rows, so the
    result does not depend on timing.
    """

    order: BatchOrder
    rows: TrainingRows
    collate: Collator
    processes: Processes
    start: tuple[int, int]
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[TrainingBatch]:
        return prefetch(self._collate_batches())

    def _collate_batches(self) -> Iterator[TrainingBatch]:
        for batch in islice(self.order.batches(*self.start), self.count):
            share = len(batch.rows) // self.processes.size
            numbers = batch.rows[share * self.processes.rank :][:share]
            columns = self.rows.columns(numbers)
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            before = self.collate.counts.copy()
            inputs, new = self.collate(rows), self.collate.counts - before
            yield TrainingBatch(
                inputs,
                [{"row": number, "epoch": batch.epoch, **row} for number, row in zip(numbers, rows, strict=True)],
                tokens=new["tokens"],
                counts={"texts": new["texts"], "truncated": new["truncated"]},
                next_position=batch.next_position,
                ends_epoch=batch.last,
            )
