"""From tokenized texts to vectors: batches of similar length, run so that neither a GPU nor its host waits for the other.

On a GPU three things happen at the same time. A thread tokenizes and packs the texts that follow, and starts their copy to the device from
pinned memory. The calling thread queues the forward pass of a batch. The vectors of the batch before it are copied to pinned memory, and
the calling thread waits for that copy only after the forward pass is queued. On a CPU one thing happens after the other, in one thread.

Shapes: B texts, N tokens of a batch, T vectors of all texts, D width of the encoder, d width of a vector.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.encoder import Encoder, InputError, PackedBatch
from quiver.encoder.packing import copy_to, pack_ids, rows_by_length
from quiver.encoder.progress import Advance
from quiver.retrieval.records import Role, TextTokens

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
Transfer = TypeVar("Transfer")

# How many tokens a batch has.

CPU_TOKENS = 4096
"""Tokens per batch on a CPU: larger batches leave the cache and gain nothing."""

GPU_TOKENS = 65_536
"""Maximum of the tokens per batch that are chosen for a GPU: the forward pass of a base model takes many times as long as its launches."""

_LEAST_GPU_TOKENS = 1024


def bytes_per_token(encoder: Encoder, dim: int) -> int:
    """Estimate the memory that one more token of a batch takes on a GPU, in bytes; at most about twice of what it is.

    It is the largest of three moments, in elements of the weights' dtype unless said: in attention, the residual stream, its update and
    norm (4 D), queries, keys and values (3 D, with RoPE another 3 D) and the mixed values (D); in the MLP, the stream with two updates and
    the norm (5 D), its first product (I, or 2 I if it is gated) and the activation (I); at the end, hidden states (D) with a float32 copy
    of them and one in which a prompt is masked. A post-norm family has no stream beside the norm, and keeps no sum (2 D less). Vectors of
    two batches may be on their way to the host, in float32.

    Args:
        encoder: The encoder.
        dim: Vector width d.
    """
    config = encoder.config
    width, inner = config.hidden_size, config.intermediate_size
    size = encoder.embeddings.tokens.weight.element_size()
    kept = 2 if config.norm_position == "post" else 4
    attention = (kept + (7 if config.positions == "rope" else 4)) * width
    mlp = (kept + 1) * width + (3 if config.mlp == "gated" else 2) * inner
    return max(size * attention, size * mlp, (size + 8) * width) + 2 * 4 * dim


def fitting_tokens(free: int, per_token: int) -> int:
    """Choose the tokens per batch for a GPU: they may take half of the free memory, because allocations leave gaps.

    Args:
        free: Free memory in bytes.
        per_token: Memory of a token in bytes, see `bytes_per_token`.

    Example:
        >>> fitting_tokens(80 << 30, 20_000), fitting_tokens(1 << 30, 20_000), fitting_tokens(0, 20_000)
        (65536, 26843, 1024)
    """
    return min(GPU_TOKENS, max(_LEAST_GPU_TOKENS, free // 2 // per_token))


def available_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that PyTorch can still give out: free ones, and those that it keeps after they were freed."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class BatchSize:
    """Tokens per batch of one model on one device. A text with more tokens is a batch of its own.

    Args:
        device: The device.
        tokens: Tokens per batch; halved once if the GPU runs out of memory.
    """

    def __init__(self, device: torch.device, tokens: int) -> None:
        self.device = device
        self.tokens = tokens
        self._halved = False

    @classmethod
    def choose(cls, encoder: Encoder, dim: int, tokens: int | None = None) -> BatchSize:
        """Return the batch size that was asked for, or choose one by the free memory of the device.

        Args:
            encoder: The encoder.
            dim: Vector width d.
            tokens: Tokens per batch; None to choose.
        """
        device = encoder.device
        if tokens is not None:
            return cls(device, tokens)
        if device.type != "cuda":
            return cls(device, CPU_TOKENS)
        return cls(device, fitting_tokens(available_memory(device), bytes_per_token(encoder, dim)))

    def limit(self, longest: int) -> int:
        """Return the maximum tokens of a batch whose longest text has ``longest`` tokens."""
        return max(self.tokens, longest)

    def halve(self, failed: int) -> None:
        """Halve the batch size after a batch did not fit into memory.

        Args:
            failed: Tokens of that batch.

        Raises:
            InputError: It was halved before.
        """
        if self._halved:
            raise InputError(
                f"{self.device}: out of memory with batches of {failed:,} tokens, after they were halved once;"
                " pass a smaller --batch-tokens (batch_tokens in Python), or free memory of the device"
            )
        self._halved = True
        self.tokens = max(1, min(self.tokens, failed) // 2)
        logger.warning("%s: out of memory with a batch of %d tokens; going on with %d", self.device, failed, self.tokens)


# What is encoded.


@dataclass(frozen=True)
class ModelInputs:
    """B tokenized texts that are packed into batches together.

    Attributes:
        ids: Token ids of each text, special tokens included.
        tokens: Token counts.
        vectors: Number of vectors of each text, (B,) int64.
        key_lengths: Leading tokens that may be attended to, per text; None for all.
        keep: Whether each token has a vector, B arrays of bool; None if the model returns only what is kept.
        out: Where the vectors go, (T, d) float32; None for new memory.
    """

    ids: Sequence[Sequence[int]]
    tokens: TextTokens
    vectors: NDArray[np.int64]
    key_lengths: Sequence[int] | None = None
    keep: Sequence[NDArray[np.bool_]] | None = None
    out: Tensor | None = None


# The copies between host and device.


class Copies(Protocol[Transfer]):
    """Copies batches to a device and vectors back. A copy is started first and used later."""

    ahead: int
    """Number of groups of texts that are prepared ahead in a thread; 0: none, and no thread."""

    behind: int
    """Number of batches whose vectors are on their way to the host while the next batch is queued."""

    def upload(self, batch: PackedBatch, kept: Tensor | None) -> Transfer:
        """Start to copy a batch, and the numbers of the tokens that have a vector, to the device. Called in the thread."""

    def arrived(self, transfer: Transfer) -> tuple[PackedBatch, Tensor | None]:
        """Return the copies on the device; what is queued there next waits for them, the host does not."""

    def download(self, vectors: Tensor) -> Transfer:
        """Start to copy vectors to the host as soon as they are computed."""

    def finished(self, transfer: Transfer) -> Tensor:
        """Wait for the copy of vectors, and return them."""

    def release(self) -> None:
        """Return unused memory to the device."""


@dataclass(frozen=True)
class _HostTransfer:
    batch: PackedBatch | None = None
    tensor: Tensor | None = None


class HostCopies:
    """Copies for a model on a CPU, where nothing runs at the same time and nothing has to be copied."""

    ahead = 0
    behind = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def upload(self, batch: PackedBatch, kept: Tensor | None) -> _HostTransfer:
        """See `Copies`."""
        return _HostTransfer(batch.to(self._device), None if kept is None else kept.to(self._device))

    def arrived(self, transfer: _HostTransfer) -> tuple[PackedBatch, Tensor | None]:
        """See `Copies`."""
        if transfer.batch is None:
            raise ValueError("this transfer holds vectors, not a batch")
        return transfer.batch, transfer.tensor

    def download(self, vectors: Tensor) -> _HostTransfer:
        """See `Copies`."""
        return _HostTransfer(tensor=vectors.cpu())

    def finished(self, transfer: _HostTransfer) -> Tensor:
        """See `Copies`."""
        if transfer.tensor is None:
            raise ValueError("this transfer holds a batch, not vectors")
        return transfer.tensor

    def release(self) -> None:
        """See `Copies`."""


def to_pinned(vectors: Tensor) -> Tensor:
    """Start to copy vectors of a GPU to pinned memory of the host; valid once the current stream has got there."""
    host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
    return host.copy_(vectors, non_blocking=True)


@dataclass(frozen=True)
class _CudaTransfer:
    done: torch.cuda.Event
    batch: PackedBatch | None = None
    tensor: Tensor | None = None


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams of a device for copies to it and from it; one pair, because freed memory is kept for the stream that used it."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaCopies:
    """Copies for a model on a GPU: one stream for each direction, beside the stream that computes."""

    ahead = 2
    behind = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = _streams(device)

    def upload(self, batch: PackedBatch, kept: Tensor | None) -> _CudaTransfer:
        """See `Copies`."""
        with torch.cuda.stream(self._up):
            moved = batch.to(self._device)
            indices = None if kept is None else copy_to(self._device, kept)[0]
        return _CudaTransfer(_end_of(self._up), moved, indices)

    def arrived(self, transfer: _CudaTransfer) -> tuple[PackedBatch, Tensor | None]:
        """See `Copies`."""
        if transfer.batch is None:
            raise ValueError("this transfer holds vectors, not a batch")
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(transfer.done)
        # The memory belongs to the other stream, which must not reuse it before this one is done with it.
        for tensor in (transfer.batch.ids, transfer.tensor):  # ids, borders and positions share their memory
            if tensor is not None:
                tensor.record_stream(computing)
        return transfer.batch, transfer.tensor

    def download(self, vectors: Tensor) -> _CudaTransfer:
        """See `Copies`."""
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            host = to_pinned(vectors)
        vectors.record_stream(self._down)
        return _CudaTransfer(_end_of(self._down), tensor=host)

    def finished(self, transfer: _CudaTransfer) -> Tensor:
        """See `Copies`."""
        if transfer.tensor is None:
            raise ValueError("this transfer holds a batch, not vectors")
        transfer.done.synchronize()
        return transfer.tensor

    def release(self) -> None:
        """See `Copies`."""
        torch.cuda.empty_cache()


def _end_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = stream.record_event()  # type: ignore[no-untyped-call]
    return event


def copies_for(device: torch.device) -> HostCopies | CudaCopies:
    """Return the copies for a model on a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies(device)


# The loop.


def prepared_ahead(items: Iterable[Item], prepare: Callable[[Item], Result], ahead: int) -> Generator[Result, None, None]:
    """Yield the prepared items in order, while a thread prepares those that follow.

    Items are taken in the calling thread, and only when there is room for them. The thread ends with the generator: at its end, when an
    item cannot be prepared, and when the generator is closed.

    Args:
        items: The items.
        prepare: Prepares an item; called in the thread.
        ahead: Number of items to prepare ahead; 0 for none, without a thread.

    Raises:
        Exception: Whatever ``prepare`` raised, at the place of its item.
    """
    if ahead == 0:
        yield from map(prepare, items)
        return
    source, following = iter(items), deque[Future[Result]]()
    thread = ThreadPoolExecutor(1, thread_name_prefix="quiver-batches")

    def fill() -> None:
        for item in source:
            following.append(thread.submit(prepare, item))
            if len(following) >= ahead:
                return

    try:
        fill()
        while following:
            result = following.popleft().result()
            fill()
            yield result
    finally:
        thread.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Work(Generic[Transfer]):
    """A batch: its texts, its tokens, those of its longest text, and its copy to the device; None if there was no memory for it there."""

    rows: NDArray[np.int64]
    tokens: int
    longest: int
    transfer: Transfer | None


@dataclass
class _Group(Generic[Transfer]):
    """Inputs that are being encoded, the first row of each text in ``out``, (B,), and the number of batches that are not finished."""

    inputs: ModelInputs
    starts: NDArray[np.int64]
    out: Tensor
    batches: Iterable[_Work[Transfer]]
    left: int


@dataclass(frozen=True)
class _UnderWay(Generic[Transfer]):
    """Vectors on their way to the host, and the texts that they belong to; None for a group without texts."""

    group: _Group[Transfer]
    rows: NDArray[np.int64]
    transfer: Transfer | None


class BatchLoop(Generic[Transfer]):
    """Runs a model over groups of tokenized texts.

    Args:
        forward: Function from a batch to its vectors on the model's device, (M, d) float32: one row per text, or one per token.
        dim: Vector width d.
        size: Tokens per batch.
        copies: Copies between host and device.
        role: Queries or documents. Documents are encoded batch-invariantly, since parts of an index may be built again with other batches;
            queries by the fastest kernels.
        most: Maximum number of texts per batch; None for no limit but that of the tokens.
        advance: Called with the number of texts finished since the last call.
    """

    def __init__(
        self,
        forward: Callable[[PackedBatch], Tensor],
        *,
        dim: int,
        size: BatchSize,
        copies: Copies[Transfer],
        role: Role,
        most: int | None = None,
        advance: Advance = lambda texts: None,
    ) -> None:
        self._forward, self._dim, self._size, self._copies, self._most = forward, dim, size, copies, most
        self._invariant, self._advance = role == "document", advance

    def run(
        self, items: Iterable[Item], tokenize: Callable[[Item], ModelInputs], *, threaded: bool = True
    ) -> Generator[tuple[ModelInputs, Tensor], None, None]:
        """Yield the inputs of each item with their vectors, (T, d) on the host, in the order of the items.

        Args:
            items: Groups of texts; taken in the calling thread.
            tokenize: Tokenizes a group; on a GPU in a thread, while the groups before it are encoded.
            threaded: Use a thread on a GPU; there is nothing to gain for a single group.

        Raises:
            InputError: The device ran out of memory a second time.
        """
        ahead = self._copies.ahead if threaded else 0

        def prepare(item: Item) -> _Group[Transfer]:
            group = self._grouped(tokenize(item))
            if ahead:
                group.batches = list(group.batches)
            return group

        with closing(prepared_ahead(items, prepare, ahead)) as groups:
            yield from self._delivered(groups)

    def _delivered(self, groups: Iterable[_Group[Transfer]]) -> Generator[tuple[ModelInputs, Tensor], None, None]:
        """Encode groups; what is under way when an error of the user is found is delivered before the error."""
        under_way = deque[_UnderWay[Transfer]]()
        failure: InputError | None = None
        try:
            for group in groups:
                for queued in self._queued(group):
                    under_way.append(queued)
                    while len(under_way) > self._copies.behind:
                        if self._is_last(done := under_way.popleft()):
                            yield done.group.inputs, done.group.out
        except InputError as error:
            failure = error
        for done in under_way:
            if self._is_last(done):
                yield done.group.inputs, done.group.out
        if failure is not None:
            raise failure

    def _grouped(self, inputs: ModelInputs) -> _Group[Transfer]:
        """Choose the batches of a group; they are packed and copied when they are taken."""
        total = int(inputs.vectors.sum())
        out = torch.empty(total, self._dim) if inputs.out is None else inputs.out
        rows = self._rows(inputs, np.arange(len(inputs.ids)))
        batches = (self._packed(inputs, each) for each in rows)
        return _Group(inputs, np.cumsum(inputs.vectors) - inputs.vectors, out, batches, max(1, len(rows)))

    def _rows(self, inputs: ModelInputs, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Divide texts into batches."""
        lengths = np.fromiter((len(inputs.ids[row]) for row in rows.tolist()), np.int64, len(rows))
        budget = self._size.limit(int(lengths.max(initial=0)))
        batches = [rows[each] for each in rows_by_length(lengths, max_tokens=budget)]
        if self._most is None:
            return batches
        return [each[first : first + self._most] for each in batches for first in range(0, len(each), self._most)]

    def _packed(self, inputs: ModelInputs, rows: NDArray[np.int64]) -> _Work[Transfer]:
        """Pack a batch and start its copy to the device."""
        try:
            tokens, longest, transfer = self._upload(inputs, rows)
        except torch.OutOfMemoryError:
            return _Work(rows, sum(len(inputs.ids[row]) for row in rows), len(inputs.ids[rows[0]]), None)
        return _Work(rows, tokens, longest, transfer)

    def _upload(self, inputs: ModelInputs, rows: NDArray[np.int64]) -> tuple[int, int, Transfer]:
        numbers = rows.tolist()
        keys = None if inputs.key_lengths is None else [inputs.key_lengths[row] for row in numbers]
        batch = pack_ids([inputs.ids[row] for row in numbers], rows=numbers, key_lengths=keys)
        kept = None
        if inputs.keep is not None:
            kept = torch.from_numpy(np.flatnonzero(np.concatenate([inputs.keep[row] for row in numbers])))
        transfer = self._copies.upload(replace(batch, batch_invariant=self._invariant), kept)
        return batch.num_tokens, batch.max_seqlen, transfer

    def _queued(self, group: _Group[Transfer]) -> Iterator[_UnderWay[Transfer]]:
        """Queue the forward pass of each batch, and the copy of its vectors; a group without texts has one entry without a batch."""
        for work in group.batches:
            waiting = deque([work])
            while waiting:
                following = waiting.popleft()
                if following.tokens > self._size.limit(following.longest):  # packed before the batch size was halved
                    parts = [self._packed(group.inputs, rows) for rows in self._rows(group.inputs, following.rows)]
                    group.left += len(parts) - 1
                    waiting.extendleft(reversed(parts))
                elif (vectors := self._attempt(group.inputs, following)) is None:
                    self._size.halve(following.tokens)
                    self._copies.release()
                    waiting.appendleft(following)
                else:
                    yield _UnderWay(group, following.rows, vectors)
        if not len(group.inputs.ids):
            yield _UnderWay(group, np.empty(0, np.int64), None)

    def _attempt(self, inputs: ModelInputs, work: _Work[Transfer]) -> Transfer | None:
        """Run a batch; None if the device has no memory for it."""
        # Nothing is done about the error in its handler: until the handler ends, the error keeps the tensors of the forward pass alive.
        try:
            batch, kept = self._copies.arrived(self._upload(inputs, work.rows)[-1] if work.transfer is None else work.transfer)
            with torch.inference_mode():
                vectors = self._forward(batch)
                return self._copies.download(vectors if kept is None else vectors[kept])
        except torch.OutOfMemoryError:
            return None

    def _is_last(self, done: _UnderWay[Transfer]) -> bool:
        """Put the vectors of a batch into their places; return whether it was the last one of its group."""
        group, rows = done.group, done.rows
        if done.transfer is not None:
            vectors, counts = self._copies.finished(done.transfer), group.inputs.vectors[rows]
            places = np.repeat(group.starts[rows] - (np.cumsum(counts) - counts), counts) + np.arange(len(vectors))
            group.out.index_copy_(0, torch.from_numpy(places), vectors)
            self._advance(len(rows))
        group.left -= 1
        return group.left == 0


_WINDOW_BATCHES = 8  # batches of a window: enough that the last one, which is not full, costs little
_CHARACTERS = 4  # of a token, about


def text_windows(texts: Sequence[str], size: BatchSize, *, max_length: int) -> list[slice]:
    """Divide texts into windows that are tokenized and packed one after the other; on a CPU there is one.

    The first window is about one batch, so that a GPU soon has work, and each following one twice the one before, up to eight batches.

    Args:
        texts: B texts.
        size: Tokens per batch.
        max_length: Tokens to which a text is truncated.

    Example:
        >>> [(part.start, part.stop) for part in text_windows(["abcd"] * 100, BatchSize(torch.device("cuda"), 10), max_length=8)]
        [(0, 10), (10, 30), (30, 70), (70, 100)]
    """
    if size.device.type != "cuda":
        return [slice(0, len(texts))]
    ends = np.cumsum(np.minimum(np.fromiter(map(len, texts), np.int64, len(texts)), max_length * _CHARACTERS))
    windows: list[slice] = []
    first, filled, batches = 0, 0, 1
    while first < len(texts):
        last = max(first + 1, int(np.searchsorted(ends, filled + batches * size.tokens * _CHARACTERS, side="right")))
        windows.append(slice(first, last))
        first, filled, batches = last, int(ends[last - 1]), min(2 * batches, _WINDOW_BATCHES)
    return windows or [slice(0, 0)]
