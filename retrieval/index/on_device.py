"""Exact search on a device: products in half precision choose the candidates, and float64 orders them.

The vectors stay in the device's memory if they fit; otherwise they are copied block by block from pinned memory, and the next block is
copied while the products of the last one are computed. The host waits once, for the candidates of all blocks.

The first scores have a bounded error, so that `quiver.retrieval.index.ranking.rank` finds the same ranking as on a CPU: every returned
score is computed in float64 from the float32 vectors, and rounded once. float16 is the default on a GPU: it takes the time of bfloat16 and
is eight times as precise. Queries and documents are scaled by powers of two to lengths below 1, which float16 can hold.

The bound: a number x is stored as x (1 + e) + f with |e| <= u and |f| <= v, where u is the unit roundoff and v half the distance of
subnormal numbers. For vectors of width d with norms X and Y, the inner product of the stored vectors differs from x y by at most
(2 u + u^2) X Y + v sqrt(d) (X + Y) (1 + u) + v^2 d. The sum in float32 adds (d + 2) w X Y; tensor cores truncate where others round and
align the terms of a sum to the largest, so that w is four times the unit roundoff of float32. A maximum has at most the largest error of
its terms, and MaxSim the sum of the errors of the query's vectors.

Shapes: Q queries, P documents, n documents of a block, T vectors of all documents, t vectors of some, n_i vectors of a query, d width,
k hits.
Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1; Fasi, Higham, Mikaitis and Pranesh, Numerical
behavior of NVIDIA tensor cores, PeerJ Computer Science 7:e330, 2021.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.retrieval.index.engines import Bitmap
from quiver.retrieval.index.ranking import LIMITS, MARGIN, SearchLimits, document_blocks, float32_error, picked_offsets, token_rows
from quiver.retrieval.models.batches import available_memory
from quiver.retrieval.models.maxsim import maxsim_ragged
from quiver.retrieval.records import DenseVectors, Rows, TokenVectors

logger = logging.getLogger(__name__)

# Share of the free memory of a GPU that the vectors of a segment may take; queries, scores and the model need the rest.
_SHARE = 0.7
# Exponents of scales: within the normal numbers of float32.
_LARGEST_EXPONENT = 126
# Documents retrieved in addition to k after scores in half precision, which have larger errors: a number and a share of k. Those that
# turn out to be too far below the k best are not scored in float64.
_MORE, _SHARE_OF_HITS = 128, 4


class DeviceVectors:
    """Vectors of documents, (T, d) float32, for searches on a device.

    Args:
        rows: The vectors on the host.
        device: The device.
        resident: The vectors in its memory; None to copy them whenever they are needed.
    """

    def __init__(self, rows: Rows, device: torch.device, resident: Tensor | None = None) -> None:
        self.rows, self.device, self.resident = rows, device, resident

    def of(self, rows: Rows) -> DeviceVectors:
        """Other vectors for searches on the same device, copied whenever they are needed."""
        return DeviceVectors(rows, self.device)

    def blocks(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """Yield ranges of rows, each valid until the next is requested; while a copied range is used, the next is copied."""
        if self.resident is not None or not ranges:
            return (self.resident[first:last] for first, last in ranges) if self.resident is not None else iter(())
        shape = (max(last - first for first, last in ranges), self.rows.shape[1])
        return self._copied(ranges, shape) if self.device.type == "cuda" else self._read(ranges, torch.empty(shape))

    def take(self, rows: NDArray[np.int64]) -> Tensor:
        """Rows by number, in the order given."""
        if self.resident is not None:
            return self.resident.index_select(0, _on(rows, self.device))
        return torch.from_numpy(np.array(self.rows.take(rows), np.float32)).to(self.device)

    def _read(self, ranges: Sequence[tuple[int, int]], buffer: Tensor) -> Iterator[Tensor]:
        for first, last in ranges:
            buffer.numpy()[: last - first] = self.rows.span(first, last)
            yield buffer[: last - first]

    def _copied(self, ranges: Sequence[tuple[int, int]], shape: tuple[int, int]) -> Iterator[Tensor]:
        pinned = [torch.empty(shape, pin_memory=True) for _ in range(2)]
        buffers = [torch.empty(shape, device=self.device) for _ in range(2)]
        cuda: Any = torch.cuda  # its events and streams have no types
        copied = [cuda.Event(), cuda.Event()]
        products, copies = cuda.current_stream(self.device), cuda.Stream(self.device)

        def start(number: int) -> None:
            """Copy a range, after the products that read its buffer; the host waits only until its pinned memory is free."""
            slot, (first, last) = number % 2, ranges[number]
            copied[slot].synchronize()
            pinned[slot].numpy()[: last - first] = self.rows.span(first, last)
            copies.wait_stream(products)
            with cuda.stream(copies):
                buffers[slot][: last - first].copy_(pinned[slot][: last - first], non_blocking=True)
                copied[slot].record(copies)

        try:
            start(0)
            for number, (first, last) in enumerate(ranges):
                if number + 1 < len(ranges):
                    start(number + 1)
                products.wait_event(copied[number % 2])
                yield buffers[number % 2][: last - first]
        finally:
            products.wait_stream(copies)  # what reuses the buffers comes later


def place(rows: Rows, device: torch.device, limits: SearchLimits = LIMITS) -> DeviceVectors:
    """Copy vectors to a device if they fit into its memory; otherwise every search copies them block by block.

    Args:
        rows: The vectors, (T, d).
        device: The device.
        limits: Its ``device_bytes`` decides; by default, 0.7 of the free memory of a GPU, and nothing on a CPU.
    """
    streamed, size = DeviceVectors(rows, device), 4 * rows.shape[0] * rows.shape[1]
    budget = limits.device_bytes
    if budget is None:
        budget = int(_SHARE * available_memory(device)) if device.type == "cuda" else -1
    vectors = None
    if size <= budget:
        with suppress(torch.OutOfMemoryError):  # the free memory may be in too many parts
            vectors = torch.empty(rows.shape, device=device)
    described = f"{rows.shape[0]:,} vectors of width {rows.shape[1]} ({size / 2**20:,.0f} MiB)"
    if vectors is None:
        logger.info("exact search on %s: %s are copied for every search, %.0f MiB would fit", device, described, max(0, budget) / 2**20)
        return streamed
    logger.info("exact search on %s: %s stay in its memory", device, described)
    ranges = _ranges(rows.shape[0], limits.block_rows(rows.shape[1]))
    for (first, last), block in zip(ranges, streamed.blocks(ranges), strict=True):
        vectors[first:last].copy_(block)
    return DeviceVectors(rows, device, vectors)


class _Group(NamedTuple):
    """Queries whose scores are computed together."""

    queries: NDArray[np.int64]  # their numbers, (Q',)
    vectors: Tensor  # their vectors in the precision of the first pass, (sum of n_i, d)
    offsets: Tensor  # first vector of each, and the sum of n_i, (Q' + 1,) int32, on the host


class DeviceScorer:
    """Scores on a device; implements `quiver.retrieval.index.ranking.Scorer`. The scores of ``nearest`` are scaled by powers of two.

    Args:
        vectors: Vectors of all documents, (T, d).
        queries: (Q, d) for inner products; Q arrays of (n_i >= 1, d) for MaxSim.
        offsets: For MaxSim, the first vector of each document, and T, (P + 1,); None for inner products.
        documents: Number of documents P.
        allowed: Documents that may be found, (P,); None for all. For MaxSim, documents without a vector are never found.
        largest_norm: Length of the longest vector.
        limits: Sizes of the parts, and the precision.

    Attributes:
        errors: Bound on the error of the scores of ``nearest``, for each query, (Q,).
        all_exact: Whether all scores have to be computed in float64.

    Raises:
        ValueError: A query has scores that overflow float32.
    """

    def __init__(
        self,
        vectors: DeviceVectors,
        queries: DenseVectors | Sequence[TokenVectors],
        offsets: NDArray[np.int64] | None = None,
        *,
        documents: int,
        allowed: Bitmap | None = None,
        largest_norm: float,
        limits: SearchLimits = LIMITS,
    ) -> None:
        self._vectors, self._limits = vectors, limits
        self._dtype = _first_pass(vectors.device, limits)
        self.all_exact = self._dtype != torch.float32
        self._tokens = offsets is not None
        self._offsets = np.arange(documents + 1) if offsets is None else offsets
        packed = np.concatenate([np.zeros((0, queries[0].shape[-1]), np.float32), *queries]) if self._tokens else np.asarray(queries)
        self._heads = np.cumsum([0, *map(len, queries)]) if self._tokens else np.arange(len(queries) + 1)
        self._scale, scales, self.errors = self._bounds(packed, largest_norm)
        self._queries = _on(packed, vectors.device)  # (sum of n_i, d)
        self._fast = _on(packed * np.repeat(scales, np.diff(self._heads))[:, None], vectors.device).to(self._dtype)
        self._device_offsets = _on(self._offsets, vectors.device) if self._tokens else None
        findable = np.diff(self._offsets) > 0 if allowed is None else allowed & (np.diff(self._offsets) > 0)
        self._hidden = None if findable.all() else (~findable, _on(~findable, vectors.device))
        size = limits.block_rows(packed.shape[1])
        self._blocks = list(document_blocks(self._offsets, size)) if self._tokens else _ranges(documents, size)
        self._group = max(1, limits.device_scores // max((end - begin for begin, end in self._blocks), default=1))

    def margin(self, k: int) -> int:
        """Number of documents to retrieve in addition to k."""
        return _MORE + k // _SHARE_OF_HITS if self.all_exact else MARGIN

    def candidates(self, k: int) -> tuple[Tensor, Tensor]:
        """`nearest` in the memory of the device; the host does not wait for it."""
        groups = self._groups(np.arange(len(self.errors)))
        best: tuple[Tensor, Tensor] | None = None
        for (begin, end), block in self._parts():
            fast = self._lowered(block)
            found = [self._scores(group, fast, begin, end).topk(min(k, end - begin), dim=1, sorted=False) for group in groups]
            scores, rows = torch.cat([each.values for each in found]), torch.cat([each.indices for each in found]) + begin
            if best is not None:
                scores, rows = torch.cat([best[0], scores], dim=1), torch.cat([best[1], rows], dim=1)
            if scores.shape[1] > k:
                scores, kept = scores.topk(k, dim=1, sorted=False)
                rows = rows.gather(1, kept)
            best = scores, rows
        if best is None:
            raise ValueError("a search needs at least one document")
        scores, order = best[0].sort(dim=1, descending=True)
        return scores, best[1].gather(1, order)

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See `quiver.retrieval.index.ranking.Scorer`."""
        scores, rows = self.candidates(k)
        return scores.cpu().numpy(), rows.cpu().numpy()

    def exact(self, wanted: Mapping[int, NDArray[np.int64]]) -> dict[int, NDArray[np.float64]]:
        """See `quiver.retrieval.index.ranking.Scorer`."""
        exact = {query: np.empty(len(rows), np.float64) for query, rows in wanted.items()}
        chosen = np.unique(np.concatenate([np.zeros(0, np.int64), *wanted.values()]))
        targets, found = list[tuple[int, NDArray[np.bool_]]](), list[Tensor]()
        ends = picked_offsets(self._offsets, chosen)
        for first, last in document_blocks(ends, self._limits.block_rows(self._queries.shape[1])):
            piece, offsets = chosen[first:last], ends[first : last + 1] - ends[first]
            vectors = self._vectors.take(token_rows(self._offsets, piece))
            for query, rows in wanted.items():
                places = np.searchsorted(chosen, rows) - first
                here = (places >= 0) & (places < len(piece))
                if here.any():
                    targets.append((query, here))
                    found.append(self._exact(query, vectors, offsets, places[here]))
        if found:
            values = np.split(torch.cat(found).cpu().numpy(), np.cumsum([len(each) for each in found])[:-1])
            for (query, here), each in zip(targets, values, strict=True):
                exact[query][here] = each
        return exact

    def reaching(
        self, queries: Sequence[int], thresholds: NDArray[np.float64]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
        """See `quiver.retrieval.index.ranking.Scorer`."""
        lowest = np.nextafter(thresholds.astype(np.float32), np.float32(-np.inf))
        groups, numbers = self._groups(np.array(queries)), dict(zip(queries, lowest, strict=True))
        limits = [_on(np.array([numbers[query] for query in group.queries.tolist()]), self._vectors.device) for group in groups]
        for (begin, end), block in self._parts():
            fast, offsets = self._lowered(block), self._offsets[begin : end + 1] - self._offsets[begin]
            for group, limit in zip(groups, limits, strict=True):
                reached = (self._scores(group, fast, begin, end) >= limit[:, None]).nonzero().cpu().numpy()
                heads = np.searchsorted(reached[:, 0], np.arange(len(group.queries) + 1))
                for number in np.flatnonzero(np.diff(heads)).tolist():
                    query, places = int(group.queries[number]), reached[heads[number] : heads[number + 1], 1]
                    yield query, places + begin, self._exact(query, block, offsets, places).cpu().numpy()

    def _bounds(self, packed: DenseVectors, largest_norm: float) -> tuple[float, NDArray[np.float32], NDArray[np.float64]]:
        """Scale of the documents, scale of each query, (Q,), and bound on the error of the scaled scores, (Q,)."""
        width, counts, heads = packed.shape[1], np.diff(self._heads), self._heads[:-1]
        with np.errstate(over="ignore"):  # an overflow becomes infinity, which float32_error rejects
            norms = np.linalg.norm(packed, axis=1).astype(np.float64)
        sums, longest = np.add.reduceat(norms, heads), np.maximum.reduceat(norms, heads)
        terms = width + (counts if self._tokens else 0 * counts)
        errors = np.array([float32_error(int(n), float(total) * largest_norm) for n, total in zip(terms, sums, strict=True)])
        if not self.all_exact:
            return 1.0, np.ones(len(counts), np.float32), errors
        limits = torch.finfo(self._dtype)
        scale, scales = _power(largest_norm), np.array([_power(float(norm)) for norm in longest])
        unit, lost = limits.eps / 2, limits.smallest_normal * limits.eps / 2 * math.sqrt(width)
        documents, queries = scale * largest_norm, scales * sums * (1 + width * 2.0**-23)  # the norms are rounded themselves
        rounded = (2 * unit + unit**2) * queries * documents + lost * (1 + unit) * (queries + counts * documents) + lost**2 * counts
        stored = (1 + unit) ** 2 * queries * documents + 2 * lost * (queries + counts * documents) + lost**2 * counts
        return scale, scales.astype(np.float32), rounded + 4 * (terms + 2) * 2.0**-24 * stored

    def _groups(self, queries: NDArray[np.int64]) -> list[_Group]:
        """Groups of queries, so that the scores of a group with a block fit."""
        groups, device = [], self._vectors.device
        for start in range(0, len(queries), self._group):
            some = queries[start : start + self._group]
            if len(some) == len(self.errors):
                groups.append(_Group(some, self._fast, _pinned(self._heads, device)))
                continue
            heads = picked_offsets(self._heads, some)
            vectors = self._fast.index_select(0, _on(token_rows(self._heads, some), device))
            groups.append(_Group(some, vectors, _pinned(heads, device)))
        return groups

    def _parts(self) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """The documents in blocks: the range of each, and its vectors."""
        ranges = [(int(self._offsets[begin]), int(self._offsets[end])) for begin, end in self._blocks]
        return zip(self._blocks, self._vectors.blocks(ranges), strict=True)

    def _lowered(self, block: Tensor) -> Tensor:
        return (block if self._scale == 1 else block * self._scale).to(self._dtype)

    def _scores(self, group: _Group, block: Tensor, begin: int, end: int) -> Tensor:
        """Scores of the documents of a block for a group of queries, (Q', n) float32."""
        if self._device_offsets is None:
            scores = _inner_products(group.vectors, block)
        else:
            offsets = (self._device_offsets[begin : end + 1] - int(self._offsets[begin])).int()
            scores = maxsim_ragged(group.vectors, group.offsets, block, offsets)
        if self._hidden is not None and self._hidden[0][begin:end].any():
            scores.masked_fill_(self._hidden[1][begin:end], -torch.inf)
        return scores

    def _exact(self, query: int, vectors: Tensor, offsets: NDArray[np.int64], places: NDArray[np.int64]) -> Tensor:
        """Scores of a query with some of the documents in ``vectors`` in float64, (len(places),)."""
        own, found = self._queries[int(self._heads[query]) : int(self._heads[query + 1])].double(), []
        for first, last in document_blocks(picked_offsets(offsets, places), self._limits.tokens_rescored):
            piece = places[first:last]
            rows = _on(token_rows(offsets, piece), self._vectors.device)
            similarities = vectors.index_select(0, rows).double() @ own.T  # (t, n_i)
            if self._tokens:
                lengths = _on(offsets[piece + 1] - offsets[piece], self._vectors.device)
                similarities = torch.segment_reduce(similarities, "max", lengths=lengths, unsafe=True)
            found.append(similarities.sum(dim=1))
        return torch.cat(found)


def _ranges(count: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _first_pass(device: torch.device, limits: SearchLimits) -> torch.dtype:
    on_gpu = device.type == "cuda"
    name = limits.first_pass or ("float16" if on_gpu else "float32")
    if on_gpu and name == "float32":
        raise ValueError("the first pass on a GPU is float16 or bfloat16: in float32 the error would depend on whether TF32 is allowed")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _power(norm: float) -> float:
    """The power of two that scales a norm to [0.5, 1), if float32 has it."""
    exponent = math.frexp(norm)[1]
    return 2.0 ** max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, -exponent))


def _inner_products(queries: Tensor, documents: Tensor) -> Tensor:
    """Inner products of (Q, d) and (n, d) of one dtype, (Q, n) float32, with sums in float32."""
    if queries.device.type == "cpu" or not hasattr(torch.ops.aten.mm, "dtype"):
        # PyTorch before 2.8 has no other sums in float32. TF32 represents numbers of either half precision exactly.
        return queries.float() @ documents.float().T
    return torch.mm(queries, documents.T, out_dtype=torch.float32)


def _pinned(offsets: NDArray[np.int64], device: torch.device) -> Tensor:
    """Offsets as int32 on the host; pinned for a GPU, so that their copies do not wait."""
    found = torch.empty(len(offsets), dtype=torch.int32, pin_memory=device.type == "cuda")
    return found.copy_(torch.from_numpy(offsets))


def _on(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to a device."""
    return torch.from_numpy(np.array(array)).to(device, non_blocking=True)
