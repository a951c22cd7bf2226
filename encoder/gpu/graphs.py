"""CUDA graphs for small batches: one launch replays a forward pass whose two hundred launches take the host longer than the GPU.

A graph has fixed sizes, so batches are padded to a bucket: one sequence or the most, a number of tokens, and a greatest length. Flash
attention reads the borders of the sequences from a tensor on the device, so one graph serves every layout of its bucket. Surplus tokens are
sequences of their own at the end, so that everything the kernels read is finite; surplus sequences are empty.

Shapes: B sequences and N tokens of a batch, D model width.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from quiver.encoder.attention import dispatch, flash
from quiver.encoder.config import EncoderConfig
from quiver.encoder.layers import Embeddings, any_hooked
from quiver.encoder.packing import PackedBatch, copy_to, effective_window

logger = logging.getLogger(__name__)

# Tokens of a bucket: padding is at most a third of the bucket, or 31 tokens.
TOKENS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MAX_SEQUENCES = 64
# Sequences of up to 64 tokens lie within ModernBERT's window of 128, so that local layers need no window.
SHORTEST = 64
# A bucket is captured when it comes for the second time: a capture takes as long as four or five plain passes.
USES = 2


class GraphedEncoder(Protocol):
    """What a capture needs of `quiver.encoder.Encoder`."""

    @property
    def config(self) -> EncoderConfig: ...  # noqa: D102
    @property
    def embeddings(self) -> Embeddings: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102
    def modules(self) -> Iterator[nn.Module]: ...  # noqa: D102
    def run(self, batch: PackedBatch) -> Tensor: ...  # noqa: D102


class Bucket(NamedTuple):
    """The sizes that a graph is captured for."""

    sequences: int  # 1, or `MAX_SEQUENCES` for a batch of several
    tokens: int
    max_seqlen: int  # `SHORTEST`, or the power of two that holds all tokens
    key_lengths: bool  # whether some tokens are not attended to

    @classmethod
    def of(cls, batch: PackedBatch) -> Bucket | None:
        """Return the bucket of a batch; None if it is too large to gain from a graph."""
        if batch.num_tokens > TOKENS[-1] or len(batch) > MAX_SEQUENCES:
            return None
        tokens = next(size for size in TOKENS if size >= batch.num_tokens)
        longest = SHORTEST if batch.max_seqlen <= SHORTEST else 1 << (tokens - 1).bit_length()
        return cls(1 if len(batch) == 1 else MAX_SEQUENCES, tokens, longest, batch.key_lengths is not None)

    @property
    def slots(self) -> int:
        """Number of sequences with those that hold the surplus tokens."""
        return self.sequences + -(-self.tokens // self.max_seqlen)


class StaticBatch:
    """The input of a graph: tensors that keep their addresses, filled with one batch after the other.

    Only flash attention can read its ``batch``: the borders are right in ``cu_seqlens``, on the device, and not in ``offsets``.
    """

    @torch.inference_mode(False)  # the tensors outlive the caller's mode
    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        numbers: dict[str, Any] = {"dtype": torch.int64, "device": device}
        borders: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._cu_seqlens = torch.zeros(bucket.slots + 1, **borders)
        self.batch = PackedBatch(
            ids=torch.zeros(bucket.tokens, **numbers),
            cu_seqlens=self._cu_seqlens,
            offsets=(0,) * bucket.slots + (bucket.tokens,),
            max_seqlen=bucket.max_seqlen,
            positions=torch.zeros(bucket.tokens, **numbers),
            rows=tuple(range(bucket.slots)),
        )
        self._part: flash.Part | None = None
        if bucket.key_lengths:
            self._key_borders = torch.zeros_like(self._cu_seqlens)
            self._part = flash.Part(
                bucket.tokens,
                (self._cu_seqlens, self._key_borders, bucket.max_seqlen, bucket.max_seqlen),
                reverse=torch.zeros(bucket.tokens, **numbers),
                keys=torch.zeros(bucket.tokens, **numbers),
            )
            self.batch = flash.with_part(self.batch, self._part)

    def fill(self, batch: PackedBatch) -> None:
        """Copy a batch of this bucket into the tensors, without waiting for the device."""
        size, tokens = self.bucket, batch.num_tokens
        self.batch.ids[:tokens].copy_(batch.ids, non_blocking=True)
        self.batch.positions[:tokens].copy_(batch.positions, non_blocking=True)
        self.batch.positions[tokens:].zero_()
        surplus = range(tokens + size.max_seqlen, size.tokens, size.max_seqlen)
        offsets = [*batch.offsets, *surplus]
        offsets += [size.tokens] * (size.slots + 1 - len(offsets))
        targets, values = [self._cu_seqlens], [np.asarray(offsets)]
        if self._part is not None and self._part.reverse is not None and self._part.keys is not None:
            lengths = np.diff(offsets)
            counts = np.concatenate((batch.key_lengths or batch.lengths, lengths[len(batch) :]))
            reverse, keys, key_offsets = flash.reversal(lengths, counts)
            targets += self._key_borders, self._part.reverse, self._part.keys
            # Token 0 stands in the place of unattended keys, which are never read.
            values += key_offsets, reverse, np.pad(keys, (0, size.tokens - len(keys)))
        for target, value in zip(targets, copy_to(self._cu_seqlens.device, *map(torch.from_numpy, values)), strict=True):
            target.copy_(value)


class Recording(NamedTuple):
    """A captured function."""

    replay: Callable[[], object]  # run it again on what its input tensors hold now
    output: Tensor  # its output, overwritten by every replay


# PyTorch allows one capture at a time in a process.
_CAPTURING = threading.Lock()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which graphs are captured."""
    # PyTorch's own belongs to the device of the first capture in the process, and a graph captured there for another device is empty.
    # Streams of high priority are handed out apart from the others, of which there are 32: copies in other threads never share this one.
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return stream


@dataclass
class CudaRecorder:
    """Captures functions as CUDA graphs that share one pool of memory; replays must not overlap."""

    pool: Any = None

    def __call__(self, function: Callable[[], Tensor]) -> Recording:
        """Capture a function that reads and writes tensors on one device only."""
        # Compiles kernels and makes what is kept between passes: neither may happen in a capture.
        device = function().device
        function()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory in the meantime.
        options: dict[str, Any] = {"pool": self.pool, "stream": _capture_stream(device), "capture_error_mode": "thread_local"}
        with _CAPTURING, torch.cuda.device(device), torch.cuda.graph(graph, **options):
            output = function()
        return Recording(graph.replay, output)


class EncoderGraphs:
    """The captured forward passes of one encoder, one for each bucket, which share the memory of their activations; threads take turns."""

    def __init__(self, record: Callable[[Callable[[], Tensor]], Recording] | None = None) -> None:
        self._record = record or CudaRecorder()
        self._captured: dict[Bucket, tuple[StaticBatch, Recording]] = {}
        self._modules: list[nn.Module] = []
        self._uses: Counter[Bucket] = Counter()
        self._refused: set[Bucket] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[EncoderGraphs], tuple[()]]:
        return EncoderGraphs, ()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The captured buckets, in the order of their captures."""
        return tuple(self._captured)

    def encode(self, encoder: GraphedEncoder, batch: PackedBatch) -> Tensor | None:
        """Encode a batch by a captured graph, without gradients, (N, D) on the encoder's device.

        None if `Encoder.run` has to encode it: it is large, its bucket is new, its attention needs the sizes on the host, or a hook waits.
        """
        bucket = Bucket.of(batch)
        if bucket is None:
            return None
        with self._lock:
            self._modules = self._modules or list(encoder.modules())[1:]
            if any_hooked(self._modules):
                return None
            self._uses[bucket] += 1
            if self._uses[bucket] < USES or bucket in self._refused:
                return None
            captured = self._captured.get(bucket) or self._capture_bucket(encoder, batch, bucket)
            if captured is None:
                return None
            static, recording = captured
            static.fill(batch)
            recording.replay()
            return recording.output[: batch.num_tokens].clone()

    def _capture_bucket(self, encoder: GraphedEncoder, batch: PackedBatch, bucket: Bucket) -> tuple[StaticBatch, Recording] | None:
        static = StaticBatch(bucket, encoder.device)
        static.fill(batch)  # a capture runs the pass, so there must be valid ids
        if not reads_borders_on_the_device(encoder, static.batch):
            self._refused.add(bucket)
            return None
        try:
            recording = self._record(lambda: encoder.run(static.batch))
        except torch.OutOfMemoryError:
            logger.warning("no memory for a CUDA graph of %d tokens; such batches are encoded without one", bucket.tokens)
            self._refused.add(bucket)
            return None
        logger.info("captured a CUDA graph of %d sequences, %d tokens", bucket.sequences, bucket.tokens)
        self._captured[bucket] = static, recording
        return self._captured[bucket]


def reads_borders_on_the_device(encoder: GraphedEncoder, batch: PackedBatch) -> bool:
    """Return whether every layer would use flash attention: other backends plan by the lengths on the host."""
    config, weight = encoder.config, encoder.embeddings.tokens.weight
    q = weight.new_empty(0, config.num_heads, config.hidden_size // config.num_heads)
    slopes = q if config.positions == "alibi" else None
    windows = {config.layer_window(layer) for layer in range(config.num_layers)}
    calls = {dispatch.describe(q, batch, window=effective_window(batch.max_seqlen, window), slopes=slopes) for window in windows}
    return all(dispatch.choose_backend(call, os.environ.get(dispatch.VARIABLE)) in flash.KERNELS for call in calls)
