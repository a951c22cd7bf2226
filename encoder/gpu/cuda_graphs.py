"""CUDA graphs for small batches, where launching kernels takes longer than running them.

A graph is recorded for fixed shapes. So a batch is filled up to a bucket: tokens to the next size, sequences to a power
of two, and the longest sequence counts as a power of two. The tokens that fill it up form sequences of their own, which
no other sequence sees, and are cut off the result. Only attention that learns the lengths from ``cu_seqlens`` on the
device can be recorded, which is the flash kernels.

Shapes: B sequences, N tokens, D width.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from quiver.encoder.attention.dispatch import VARIABLE, choose_backend, describe
from quiver.encoder.errors import InputError
from quiver.encoder.layers import Block
from quiver.encoder.model import Encoder
from quiver.encoder.packing import PackedBatch

RECORDABLE = ("varlen", "aten_flash", "flash_attn_2", "flash_attn_3", "flash_attn_4")

# The smallest bucket: with fewer tokens and shorter texts the same kernels run in the same time.
TOKENS, LONGEST = 64, 64


class Bucket(NamedTuple):
    """The shapes of one graph."""

    tokens: int
    sequences: int
    max_seqlen: int


def bucket_size(number: int) -> int:
    """The smallest 2 ** k or 3 * 2 ** k that is not below ``number`` >= 2: at most half as much again is filled up.

    Example:
        >>> [bucket_size(number) for number in (2, 5, 64, 65, 97, 1000)]
        [2, 6, 64, 96, 128, 1024]
    """
    whole = 1 << (number - 1).bit_length()
    return whole * 3 // 4 if whole >= 4 and number <= whole * 3 // 4 else whole


def bucket_of(offsets: Sequence[int], max_seqlen: int, max_positions: int) -> Bucket:
    """The bucket of a batch.

    Args:
        offsets: Where its sequences begin and end, B + 1 numbers.
        max_seqlen: Tokens of the longest, at most ``max_positions``.
        max_positions: Longest sequence of the encoder.

    Example:
        >>> bucket_of([0, 70, 90], max_seqlen=70, max_positions=8192)
        Bucket(tokens=96, sequences=4, max_seqlen=128)
    """
    tokens = bucket_size(max(offsets[-1], TOKENS))
    longest = min(1 << (max(max_seqlen, LONGEST) - 1).bit_length(), max_positions)
    fillers = -(-(tokens - offsets[-1]) // longest)
    sequences = len(offsets) - 1 + fillers
    return Bucket(tokens, 1 << (sequences - 1).bit_length(), longest)


def filled_offsets(offsets: Sequence[int], bucket: Bucket) -> tuple[int, ...]:
    """Where the sequences of a filled-up batch begin and end: its own, those that fill it up, then empty ones.

    Example:
        >>> filled_offsets([0, 70, 90], Bucket(tokens=96, sequences=4, max_seqlen=128))
        (0, 70, 90, 96, 96)
    """
    fillers = range(offsets[-1] + bucket.max_seqlen, bucket.tokens, bucket.max_seqlen)
    filled = [*offsets, *fillers]
    return (*filled, *[bucket.tokens] * (bucket.sequences + 1 - len(filled)))


class Recording:
    """One graph with the tensors it reads and writes."""

    def __init__(self, encoder: Encoder, batch: PackedBatch, pool: Any) -> None:
        self.batch = batch
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and workspaces made before the recording, not in it
            for _ in range(2):
                encoder(batch)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph, pool=pool):
            self.output: Tensor = encoder(batch)

    def replay(self) -> Tensor:
        """Run the graph on what its batch holds now; the result is overwritten by the next run."""
        self.graph.replay()
        return self.output


def check_recordable(encoder: Encoder) -> None:
    """Refuse an encoder whose forward pass cannot be recorded.

    Raises:
        InputError: It is not on a CUDA device, or no flash kernel serves its attention.
        ValueError: It is in training mode.
    """
    if encoder.device.type != "cuda":
        raise InputError(f"CUDA graphs need an encoder on a CUDA device, this one is on {encoder.device}: move it with .to('cuda')")
    if encoder.training:
        raise ValueError("CUDA graphs are for inference: call encoder.eval() first")
    batch = _empty_batch(Bucket(TOKENS, 1, encoder.config.max_positions), (0, TOKENS), encoder.device)
    weight = encoder.embeddings.tokens.weight
    heads = weight.new_empty(0, encoder.config.num_heads, encoder.config.head_width)
    for layer in encoder.layers:
        attention = cast("Block", layer).attention
        call = describe(heads, batch, window=attention.window, slopes=attention.slopes)
        name = choose_backend(call, os.environ.get(VARIABLE))
        if name not in RECORDABLE:
            dtype = str(weight.dtype).removeprefix("torch.")
            raise InputError(f"CUDA graphs need flash attention, but {dtype} weights here get {name!r}: use bfloat16 or float16")


def _empty_batch(bucket: Bucket, offsets: tuple[int, ...], device: torch.device) -> PackedBatch:
    return PackedBatch(
        ids=torch.zeros(bucket.tokens, dtype=torch.int64, device=device),
        cu_seqlens=torch.zeros(bucket.sequences + 1, dtype=torch.int32, device=device),
        offsets=offsets,
        max_seqlen=bucket.max_seqlen,
        positions=torch.zeros(bucket.tokens, dtype=torch.int64, device=device),
        rows=tuple(range(bucket.sequences)),
    )


class GraphedEncoder:
    """An encoder that replays recorded graphs for small batches and runs larger ones as usual.

    For inference with one stream at a time. The weights may change in place, but neither move nor change their dtype.

    Args:
        encoder: On a CUDA device, in half precision, in evaluation mode.
        max_tokens: Batches of more tokens are run as usual: there the kernels take longer than their launches.
        max_graphs: How many graphs are kept; of more the one unused for longest is dropped.

    Raises:
        InputError: The encoder's forward pass cannot be recorded; says why.
        ValueError: The encoder is in training mode, or a limit is below 1.
    """

    def __init__(self, encoder: Encoder, *, max_tokens: int = 4096, max_graphs: int = 32) -> None:
        if max_tokens < 1 or max_graphs < 1:
            raise ValueError(f"max_tokens and max_graphs must be >= 1, got {max_tokens} and {max_graphs}")
        check_recordable(encoder)
        self.encoder = encoder
        self.max_tokens = max_tokens
        self.max_graphs = max_graphs
        self._recordings: OrderedDict[Bucket, Recording] = OrderedDict()

    @torch.inference_mode()
    def __call__(self, batch: PackedBatch) -> Tensor:
        """Encode a batch; see `quiver.encoder.model.Encoder.forward`.

        Batches with ``key_lengths`` are run as usual: which tokens may be read is no part of a recording.
        """
        most = self.encoder.config.max_positions
        if batch.num_tokens > self.max_tokens or batch.key_lengths is not None or batch.max_seqlen > most:
            output: Tensor = self.encoder(batch)
            return output
        bucket = bucket_of(batch.offsets, batch.max_seqlen, most)
        offsets = filled_offsets(batch.offsets, bucket)
        with torch.cuda.device_of(self.encoder.embeddings.tokens.weight):  # type: ignore[no-untyped-call]  # torch leaves it untyped
            recording = self._recordings.get(bucket)
            if recording is None:
                recording = self._record(batch, bucket, offsets)
            else:
                self._recordings.move_to_end(bucket)
                _fill(recording.batch, batch, offsets)
            return recording.replay()[: batch.num_tokens].clone()

    def _record(self, batch: PackedBatch, bucket: Bucket, offsets: tuple[int, ...]) -> Recording:
        static = _empty_batch(bucket, offsets, self.encoder.device)
        _fill(static, batch, offsets)
        if len(self._recordings) == self.max_graphs:
            torch.cuda.synchronize()  # it may still be running
            self._recordings.popitem(last=False)
        # Graphs may share one pool of memory: they run one after the other, and what they give is copied at once.
        pool = next(iter(self._recordings.values())).graph.pool() if self._recordings else None
        recording = self._recordings[bucket] = Recording(self.encoder, static, pool)
        return recording


def _fill(static: PackedBatch, batch: PackedBatch, offsets: tuple[int, ...]) -> None:
    """Copy a batch into a recording's tensors; what lies behind it there is left: any token and position will do."""
    static.ids[: batch.num_tokens].copy_(batch.ids, non_blocking=True)
    static.positions[: batch.num_tokens].copy_(batch.positions, non_blocking=True)
    static.cu_seqlens.copy_(torch.tensor(offsets, dtype=torch.int32), non_blocking=True)
