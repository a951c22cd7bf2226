"""Texts to vectors a chunk at a time, by whichever executor: what is sent to a worker, what comes back, and its order restored.

Chunks are made before they are handed out, so that a text is batched with the same others whoever encodes it.

Shapes: B texts of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import torch

from quiver.retrieval.models.loading import anchored, load_again
from quiver.retrieval.protocols import IN_PROCESS, DenseModel, Executor, Task, TokenModel
from quiver.retrieval.records import DenseEncoding, ModelCard, Role, TokenEncoding

Encoding: TypeAlias = DenseEncoding | TokenEncoding
"""What a model of either kind gives."""


@dataclass(frozen=True)
class Chunk:
    """Texts of one call.

    Attributes:
        number: Its place among the chunks.
        texts: B texts.
    """

    number: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class _EncodeHere:
    """The task of encoding with a model that is loaded."""

    model: DenseModel | TokenModel
    role: Role
    show: bool

    def open(self) -> Callable[[Chunk], Encoding]:
        return lambda chunk: self.model.encode(list(chunk.texts), self.role, progress=self.show)


@dataclass(frozen=True)
class _EncodeAnywhere:
    """The task of encoding with a model that a worker loads."""

    card: ModelCard
    role: Role
    threads: int

    def open(self) -> Callable[[Chunk], Encoding]:
        torch.set_num_threads(self.threads)
        model = load_again(self.card)
        return lambda chunk: model.encode(list(chunk.texts), self.role)


def encode_chunks(
    model: DenseModel | TokenModel, chunks: Iterable[Chunk], role: Role, *, executor: Executor, show: bool = False
) -> Generator[tuple[Chunk, Encoding], None, None]:
    """Encode chunks; they come back in their order.

    Args:
        model: The model; workers load it again by its card.
        chunks: Numbered from 0; gone through as they are needed.
        role: Which prompt is put before each text. Queries take seconds, and are encoded here in any case.
        executor: Who encodes documents.
        show: Show the model's own bar for every chunk that is encoded here.

    Raises:
        InputError: A worker cannot load the model.
        WorkerError: Workers died, again and again.
    """
    task: Task[Chunk, Encoding]
    if role == "query" or not executor.remote:
        executor, threads, task = IN_PROCESS, 1, _EncodeHere(model, role, show)
    else:
        threads = executor.threads(torch.get_num_threads())
        task = _EncodeAnywhere(anchored(model.card), role, threads)
    early: dict[int, tuple[Chunk, Encoding]] = {}
    turn = 0
    with closing(executor.run(task, chunks, threads=threads)) as results:
        for chunk, encoding in results:
            early[chunk.number] = (chunk, encoding)
            while turn in early:
                yield early.pop(turn)
                turn += 1
