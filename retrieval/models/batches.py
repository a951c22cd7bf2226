"""From tokenized texts to vectors: batches of similar length, the loop that runs them, and pooling and projections after the encoder.

On a GPU three things happen at the same time: a thread tokenizes and packs the texts that follow and starts their copy to the device, the
calling thread queues the forward pass of a batch, and the vectors of the batch before it are copied to the host. On a CPU one thing happens
after the other, in one thread.

Shapes: B texts, N tokens of a batch, T vectors of all texts, D width of the encoder, d width of a vector.
Source: sentence-transformers' ``Pooling`` and ``Dense`` modules; PyLate's ``Dense``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quiver.encoder import Encoder, InputError, PackedBatch
from quiver.encoder.packing import copy_to, pack_ids, rows_by_length
from quiver.encoder.progress import Advance
from quiver.retrieval.records import DenseModel, Item, Result, Role, TextTokens, TokenModel

logger = logging.getLogger(__name__)

CPU_TOKENS = 4096  # tokens per batch on a CPU: larger batches leave the cache and gain nothing

GPU_TOKENS = 65_536
"""Maximum of the tokens per batch that are chosen for a GPU: the forward pass of a base model takes many times as long as its launches."""

_LEAST_GPU_TOKENS = 1024

CPU = torch.device("cpu")


def device_of(model: DenseModel | TokenModel) -> torch.device:
    """Device of a model, on which its vectors are searched and clustered; the CPU for a model without one, such as a stored one."""
    found: torch.device | None = getattr(model, "device", None)
    return CPU if found is None else found


def bytes_per_token(encoder: Encoder, dim: int) -> int:
    """Estimate the memory that one more token of a batch takes on a GPU, in bytes; at most about twice of what it is.

    It is the largest of three moments, in elements of the weights' dtype unless said: in attention, the residual stream, its update and
    norm (4 D), queries, keys and values (3 D, with RoPE another 3 D) and the mixed values (D); in the MLP, the stream with two updates and
    the norm (5 D), its first product (I, or 2 I if it is gated) and the activation (I); at the end, hidden states (D) with a float32 copy
    of them and one in which a prompt is masked. A post-norm family has no stream beside the norm, and keeps no sum (2 D less). Vectors of
    two batches, of width ``dim``, may be on their way to the host, in float32.
    """
    config = encoder.config
    width, inner = config.hidden_size, config.intermediate_size
    size = encoder.embeddings.tokens.weight.element_size()
    kept = 2 if config.norm_position == "post" else 4
    attention = (kept + (7 if config.positions == "rope" else 4)) * width
    mlp = (kept + 1) * width + (3 if config.mlp == "gated" else 2) * inner
    return max(size * attention, size * mlp, (size + 8) * width) + 2 * 4 * dim


def available_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that PyTorch can still give out: free ones, and those that it keeps after they were freed."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class BatchSize:
    """Tokens per batch of one model on one device, halved once if a GPU runs out of memory. A longer text is a batch of its own."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        self.device = device
        self.tokens = tokens
        self._halved = False

    @classmethod
    def choose(cls, encoder: Encoder, dim: int, tokens: int | None = None) -> BatchSize:
        """Return the batch size that was asked for, or choose one by the free memory of the device, for vectors of width d."""
        device = encoder.device
        if tokens is not None:
            return cls(device, tokens)
        if device.type != "cuda":
            return cls(device, CPU_TOKENS)
        # Batches may take half of the free memory, because allocations leave gaps.
        fitting = available_memory(device) // 2 // bytes_per_token(encoder, dim)
        return cls(device, min(GPU_TOKENS, max(_LEAST_GPU_TOKENS, fitting)))

    def limit(self, longest: int) -> int:
        """Return the maximum tokens of a batch whose longest text has ``longest`` tokens."""
        return max(self.tokens, longest)

    def halve(self, failed: int) -> None:
        """Halve the batch size after a batch of ``failed`` tokens did not fit into memory; an InputError the second time."""
        if self._halved:
            raise InputError(
                f"{self.device}: out of memory with batches of {failed:,} tokens, after they were halved once;"
                " pass a smaller --batch-tokens (batch_tokens in Python), or free memory of the device"
            )
        self._halved = True
        self.tokens = max(1, min(self.tokens, failed) // 2)
        logger.warning("%s: out of memory with a batch of %d tokens; going on with %d", self.device, failed, self.tokens)


@dataclass(frozen=True)
class ModelInputs:
    """B tokenized texts that are packed into batches together."""

    ids: Sequence[Sequence[int]]  # token ids of each text, special tokens included
    tokens: TextTokens  # token counts
    vectors: NDArray[np.int64]  # number of vectors of each text, (B,)
    key_lengths: Sequence[int] | None = None  # leading tokens that may be attended to, per text; None for all
    keep: Sequence[NDArray[np.bool_]] | None = None  # whether each token has a vector; None if the model returns only what is kept


Upload: TypeAlias = tuple[PackedBatch, Tensor | None, torch.cuda.Event | None]
"""A batch and the numbers of its tokens that have a vector, on their way to the device, and the end of their copy."""

Download: TypeAlias = tuple[Tensor, torch.cuda.Event | None]  # vectors on their way to the host, and the end of their copy


@cache
def _copy_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams of a GPU for copies to it and from it; one pair, because freed memory is kept for the stream that used it."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def to_pinned(vectors: Tensor) -> Tensor:
    """Start to copy vectors of a GPU to pinned memory of the host; valid once the current stream has got there."""
    host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
    return host.copy_(vectors, non_blocking=True)


class Copies:
    """Copies between host and device, started first and used later: on a GPU in a stream for each direction, beside the one that computes.

    Attributes:
        ahead: Number of groups of texts that are prepared ahead in a thread; 0 on a CPU: none, and no thread.
        behind: Number of batches whose vectors are on their way to the host while the next batch is queued; 0 on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = _copy_streams(device) if device.type == "cuda" else None
        self.ahead, self.behind = (2, 1) if self._streams else (0, 0)

    def upload(self, batch: PackedBatch, kept: Tensor | None) -> Upload:
        """Start to copy a batch, and the numbers of the tokens that have a vector, to the device. Called in the thread."""
        if self._streams is None:
            return batch.to(self._device), kept, None
        with torch.cuda.stream(self._streams[0]):
            moved = batch.to(self._device)
            numbers = None if kept is None else copy_to(self._device, kept)[0]
        return moved, numbers, self._streams[0].record_event()  # type: ignore[no-untyped-call]

    def arrived(self, upload: Upload) -> tuple[PackedBatch, Tensor | None]:
        """Return the copies on the device; what is queued there next waits for them, the host does not."""
        batch, kept, done = upload
        if done is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(done)
            # The memory belongs to the other stream, which must not reuse it before this one is done with it.
            for tensor in (batch.ids, kept):  # ids, borders and positions share their memory
                if tensor is not None:
                    tensor.record_stream(computing)
        return batch, kept

    def download(self, vectors: Tensor) -> Download:
        """Start to copy vectors to the host as soon as they are computed."""
        if self._streams is None:
            return vectors.cpu(), None
        down = self._streams[1]
        down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(down):
            host = to_pinned(vectors)
        vectors.record_stream(down)
        return host, down.record_event()  # type: ignore[no-untyped-call]

    def finished(self, download: Download) -> Tensor:
        """Wait for the copy of vectors, and return them."""
        vectors, done = download
        if done is not None:
            done.synchronize()
        return vectors

    def release(self) -> None:
        """Return unused memory to the device."""
        if self._streams is not None:
            torch.cuda.empty_cache()


def prepared_ahead(items: Iterable[Item], prepare: Callable[[Item], Result], ahead: int) -> Generator[Result, None, None]:
    """Yield the prepared items in order, while a thread prepares those that follow.

    Items are taken in the calling thread, and only when there is room for them. The thread ends with the generator: at its end, when an
    item cannot be prepared, and when the generator is closed. With ``ahead`` of 0, nothing is prepared ahead and there is no thread. What
    ``prepare`` raises is raised at the place of its item.
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
class _Batch:
    """A batch: its texts, its tokens, those of its longest text, and its copy to the device; None if there was no memory for it there."""

    rows: NDArray[np.int64]
    tokens: int
    longest: int
    upload: Upload | None


@dataclass
class _TextGroup:
    """Inputs that are being encoded, the first row of each text in ``out``, (B,), and the number of batches that are not finished."""

    inputs: ModelInputs
    starts: NDArray[np.int64]
    out: Tensor
    batches: Iterable[_Batch]
    left: int


_UnderWay: TypeAlias = tuple[_TextGroup, NDArray[np.int64], Download | None]
"""A group, texts of it, and their vectors on the way to the host; None for a group without texts."""


class BatchLoop:
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
        copies: Copies,
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

        Batches that are under way when a mistake of the user is found are delivered before the error.

        Args:
            items: Groups of texts; taken in the calling thread.
            tokenize: Tokenizes a group; on a GPU in a thread, while the groups before it are encoded.
            threaded: Use a thread on a GPU; there is nothing to gain for a single group.

        Raises:
            InputError: The device ran out of memory a second time.
        """
        ahead = self._copies.ahead if threaded else 0
        under_way, failure = deque[_UnderWay](), None
        with closing(prepared_ahead(items, lambda item: self._plan_group(tokenize(item), at_once=ahead > 0), ahead)) as groups:
            try:
                for group in groups:
                    for queued in self._queue(group):
                        under_way.append(queued)
                        while len(under_way) > self._copies.behind:
                            if self._ends_group(first := under_way.popleft()):
                                yield first[0].inputs, first[0].out
            except InputError as error:
                failure = error
            for queued in under_way:
                if self._ends_group(queued):
                    yield queued[0].inputs, queued[0].out
        if failure is not None:
            raise failure

    def _plan_group(self, inputs: ModelInputs, *, at_once: bool) -> _TextGroup:
        """Choose the batches of a group; pack and copy them at once, or when they are taken."""
        rows = self._divide(inputs, np.arange(len(inputs.ids)))
        batches = (self._pack_batch(inputs, each) for each in rows)
        starts, out = np.cumsum(inputs.vectors) - inputs.vectors, torch.empty(int(inputs.vectors.sum()), self._dim)
        return _TextGroup(inputs, starts, out, list(batches) if at_once else batches, max(1, len(rows)))

    def _divide(self, inputs: ModelInputs, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Divide texts into batches."""
        lengths = np.fromiter((len(inputs.ids[row]) for row in rows.tolist()), np.int64, len(rows))
        budget = self._size.limit(int(lengths.max(initial=0)))
        batches = [rows[each] for each in rows_by_length(lengths, max_tokens=budget)]
        if self._most is None:
            return batches
        return [each[first : first + self._most] for each in batches for first in range(0, len(each), self._most)]

    def _pack_batch(self, inputs: ModelInputs, rows: NDArray[np.int64]) -> _Batch:
        """Pack a batch and start its copy to the device."""
        lengths = [len(inputs.ids[row]) for row in rows.tolist()]
        try:
            upload = self._upload(inputs, rows)
        except torch.OutOfMemoryError:
            upload = None
        return _Batch(rows, sum(lengths), max(lengths), upload)

    def _upload(self, inputs: ModelInputs, rows: NDArray[np.int64]) -> Upload:
        numbers = rows.tolist()
        keys = None if inputs.key_lengths is None else [inputs.key_lengths[row] for row in numbers]
        batch = pack_ids([inputs.ids[row] for row in numbers], rows=numbers, key_lengths=keys)
        kept = None
        if inputs.keep is not None:
            kept = torch.from_numpy(np.flatnonzero(np.concatenate([inputs.keep[row] for row in numbers])))
        return self._copies.upload(replace(batch, batch_invariant=self._invariant), kept)

    def _queue(self, group: _TextGroup) -> Iterator[_UnderWay]:
        """Queue the forward pass of each batch, and the copy of its vectors; a group without texts has one entry without a batch."""
        for batch in group.batches:
            waiting = deque([batch])
            while waiting:
                following = waiting.popleft()
                if following.tokens > self._size.limit(following.longest):  # packed before the batch size was halved
                    parts = [self._pack_batch(group.inputs, rows) for rows in self._divide(group.inputs, following.rows)]
                    group.left += len(parts) - 1
                    waiting.extendleft(reversed(parts))
                elif (vectors := self._run_batch(group.inputs, following)) is None:
                    self._size.halve(following.tokens)
                    self._copies.release()
                    waiting.appendleft(following)
                else:
                    yield group, following.rows, vectors
        if not len(group.inputs.ids):
            yield group, np.empty(0, np.int64), None

    def _run_batch(self, inputs: ModelInputs, batch: _Batch) -> Download | None:
        """Run a batch; None if the device has no memory for it."""
        # Nothing is done about the error in its handler: until the handler ends, the error keeps the tensors of the forward pass alive.
        try:
            packed, kept = self._copies.arrived(batch.upload or self._upload(inputs, batch.rows))
            with torch.inference_mode():
                vectors = self._forward(packed)
                return self._copies.download(vectors if kept is None else vectors[kept])
        except torch.OutOfMemoryError:
            return None

    def _ends_group(self, queued: _UnderWay) -> bool:
        """Put the vectors of a batch into their places; return whether it was the last one of its group."""
        group, rows, download = queued
        if download is not None:
            vectors, counts = self._copies.finished(download), group.inputs.vectors[rows]
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


def _reduce_segments(hidden: Tensor, batch: PackedBatch, skip: int, reduce: str) -> Tensor:
    """Reduce each sequence without its first ``skip`` tokens to (B, D), without waiting for the device."""
    lengths = batch.cu_seqlens.diff().long()
    if skip:
        skipped = batch.positions < skip
        hidden = hidden.masked_fill(skipped[:, None], 0.0 if reduce == "sum" else -torch.inf)
    # Checks of the lengths would wait for the device; those of a batch are right.
    return torch.segment_reduce(hidden, reduce, lengths=lengths, axis=0, unsafe=True)


def _mean(hidden: Tensor, batch: PackedBatch, skip: int) -> Tensor:
    # A sum and a division instead of "mean": a text whose tokens are all skipped gives zeros, not NaN.
    lengths = batch.cu_seqlens.diff().long()
    return _reduce_segments(hidden, batch, skip, "sum") / (lengths - skip).clamp(min=1)[:, None]


POOLINGS: dict[str, Callable[[Tensor, PackedBatch, int], Tensor]] = {
    "cls": lambda hidden, batch, skip: hidden[batch.cu_seqlens[:-1].long()],  # it precedes any prompt
    "mean": _mean,
    "max": partial(_reduce_segments, reduce="max"),
    "lasttoken": lambda hidden, batch, skip: hidden[batch.cu_seqlens[1:].long() - 1],  # it follows any prompt
}
"""Pooling functions by sentence-transformers' names: hidden states (N, D), batch and number of leading tokens to skip -> (B, D)."""


def pool(hidden: Tensor, batch: PackedBatch, mode: str, *, skip: int = 0) -> Tensor:
    """Pool hidden states (N, D) by a mode of `POOLINGS` to one float32 vector per sequence, (B, D).

    Mean and max exclude the first ``skip`` tokens: a prompt that is not pooled.

    Example:
        >>> from quiver.encoder import pack_ids
        >>> pool(torch.tensor([[1.0], [3.0], [5.0]]), pack_ids([[7, 7], [7]]), "mean").tolist()
        [[2.0], [5.0]]
    """
    # In half precision a sum over thousands of tokens would saturate.
    return POOLINGS[mode](hidden.float(), batch.to(hidden.device), skip)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": nn.functional.gelu,
    "torch.nn.modules.activation.SiLU": nn.functional.silu,
}
"""Activations by the class names that checkpoints store."""

IDENTITY = "torch.nn.modules.linear.Identity"


class Projection(nn.Module):
    """Linear layer on top of the encoder, with an activation of `ACTIVATIONS`: the ``Dense`` module of checkpoints.

    With ``residual``, the input is added to the output, through a matrix if the widths differ (PyLate's ``use_residual``).
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, activation: str = IDENTITY, residual: bool = False
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise InputError(f"a Dense module's activation_function must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        self.use_residual = residual
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.residual = nn.Linear(in_features, out_features, bias=False) if residual and in_features != out_features else None

    def forward(self, vectors: Tensor) -> Tensor:
        """Map vectors (N, D) to (N, d)."""
        projected = ACTIVATIONS[self.activation](self.linear(vectors))
        if self.use_residual:
            projected = projected + (vectors if self.residual is None else self.residual(vectors))
        return projected
