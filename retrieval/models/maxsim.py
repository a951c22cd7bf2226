"""MaxSim: for every query token its best document token, summed over the query.

`maxsim_padded` is the reference, differentiable and on any device. `maxsim_packed` and `maxsim_ragged` compute the same scores for many
documents without padding: the first from NumPy arrays on the CPU, the second from tensors, on a GPU by one Triton kernel. Vectors are not
normalized here; ColBERT's have unit length.

Shapes: Q queries, P documents, S padded length, T packed document tokens, T_q packed query tokens, n_i tokens of a query, d vector width.
Source: ColBERT, arXiv:2004.12832, equation 3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.encoder.ops import use_triton
from quiver.retrieval.records import TokenVectors


def maxsim_padded(queries: Tensor, documents: Tensor, query_mask: Tensor, document_mask: Tensor) -> Tensor:
    """Compute MaxSim of every query with every document from padded vectors.

    A masked document token is never the maximum, even if all similarities are negative; a masked query token adds nothing. A document
    without tokens scores the minimum of the dtype.

    Args:
        queries: Query vectors, (Q, S_q, d).
        documents: Document vectors, (P, S_d, d).
        query_mask: True for tokens, False for padding, (Q, S_q).
        document_mask: True for tokens, False for padding, (P, S_d).

    Returns:
        Scores (Q, P), in the queries' dtype.

    Example:
        >>> one = torch.ones(1, 1, dtype=torch.bool)
        >>> maxsim_padded(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[-0.5, 1.0]]]), one, one)
        tensor([[-0.5000]])
    """
    lowest = torch.finfo(queries.dtype).min
    similarities = torch.einsum("qsd,ptd->qpst", queries, documents)  # (Q, P, S_q, S_d)
    similarities = similarities.masked_fill(~document_mask.bool()[None, :, None, :], lowest)
    best = similarities.amax(dim=3).masked_fill(~query_mask.bool()[:, None, :], 0.0)  # (Q, P, S_q)
    return best.sum(dim=2).masked_fill(~document_mask.bool().any(dim=1)[None, :], lowest)


# Similarities that `maxsim_ragged` holds at a time where no kernel runs: 64 MiB of float32.
RAGGED_SIMILARITIES = 2**24


@torch.no_grad()
def maxsim_ragged(queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor) -> Tensor:
    """Compute MaxSim of every query with every document from packed vectors, without gradients.

    Products have the precision of the vectors (IEEE, not TF32, for float32); sums are float32. On a GPU one kernel reads the documents once
    from memory and writes nothing but the scores; other devices take blocks of documents.

    Args:
        queries: Query tokens, (T_q, d) in float32, bfloat16 or float16; finite.
        query_offsets: Boundaries of the queries, (Q + 1,) int32, from 0 to T_q. On the host if possible: the length of the longest query
            decides the tiles, and reading it from the device waits.
        documents: Document tokens, (T, d), of the queries' dtype and device; finite.
        document_offsets: Boundaries of the documents, (P + 1,) int32, from 0 to T; on the device if possible.

    Returns:
        Scores (Q, P) float32 on the device of the vectors. A document without tokens scores the minimum of float32, otherwise a query
        without tokens scores 0.

    Raises:
        ValueError: Queries and documents differ in width or dtype.

    Example:
        >>> queries, documents = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[-0.5, 1.0], [0.5, 0.25], [0.25, 0.5]])
        >>> maxsim_ragged(queries, torch.tensor([0, 2]), documents, torch.tensor([0, 1, 3]))
        tensor([[0.5000, 1.0000]])
    """
    if queries.shape[1] != documents.shape[1] or queries.dtype != documents.dtype:
        raise ValueError(
            "queries and documents must have one width and dtype, got "
            f"{queries.shape[1]} {queries.dtype} and {documents.shape[1]} {documents.dtype}"
        )
    lengths = query_offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    query_offsets, document_offsets = (each.to(documents.device, non_blocking=True) for each in (query_offsets, document_offsets))
    if len(lengths) and len(document_offsets) > 1 and use_triton(documents):
        from quiver.retrieval.models import triton_maxsim

        packed = queries.contiguous(), query_offsets, documents.contiguous(), document_offsets
        return triton_maxsim.maxsim_ragged(*packed, longest)
    return _ragged_in_blocks(queries, query_offsets, documents, document_offsets)


def _ragged_in_blocks(queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor) -> Tensor:
    """`maxsim_ragged` by PyTorch operators."""
    lowest = torch.finfo(torch.float32).min
    num_queries, num_documents = len(query_offsets) - 1, len(document_offsets) - 1
    scores = torch.full((num_queries, num_documents), lowest, device=documents.device)
    lengths, query_lengths = document_offsets.diff().long(), query_offsets.diff().long()
    bounds = document_offsets.tolist()
    block_tokens = max(RAGGED_SIMILARITIES // max(len(queries), 1), 1)
    first = 0
    while first < num_documents:
        last = max(bisect_right(bounds, bounds[first] + block_tokens, lo=first) - 1, first + 1)
        tokens = documents[bounds[first] : bounds[last]]
        similarities = tokens.float() @ queries.float().T  # (tokens, T_q)
        best = torch.segment_reduce(similarities, "max", lengths=lengths[first:last], axis=0, unsafe=True)  # (documents, T_q)
        sums = torch.segment_reduce(best.T.contiguous(), "sum", lengths=query_lengths, axis=0, unsafe=True)  # (Q, documents)
        scores[:, first:last] = sums.masked_fill(lengths[first:last] == 0, lowest)
        first = last
    return scores


def maxsim_packed(
    queries: Sequence[TokenVectors],
    tokens: TokenVectors,
    offsets: NDArray[np.int64],
    *,
    query_block: int = 256,
    document_block: int = 4096,
) -> NDArray[np.float32]:
    """Compute MaxSim of every query with every document from packed vectors.

    Each block takes one matrix product and one segmented maximum. With the default sizes a block has 4 MiB, which stay in the cache between
    the two; it is larger if one document has more than ``document_block`` tokens.

    Args:
        queries: Q arrays of (n_i, d) float32, n_i >= 1.
        tokens: Document tokens, (T, d) float32; document p is ``tokens[offsets[p]:offsets[p + 1]]``.
        offsets: Document boundaries, (P + 1,) ascending, from 0 to T.
        query_block: Maximum query tokens per block.
        document_block: Maximum document tokens per block.

    Returns:
        Scores (Q, P); minus infinity for a document without tokens.

    Raises:
        ValueError: A query has no tokens, or its width differs from the documents'.
    """
    for row, query in enumerate(queries):
        if query.ndim != 2 or query.shape[0] == 0 or query.shape[1] != tokens.shape[1]:
            raise ValueError(f"query {row} must have the shape (>= 1, {tokens.shape[1]}), got {query.shape}")
    scores = np.full((len(queries), len(offsets) - 1), -np.inf, dtype=np.float32)
    # reduceat gives an empty segment the first value of the next one, so documents without tokens are excluded.
    filled = np.flatnonzero(np.diff(offsets))
    starts, ends = offsets[:-1][filled], offsets[1:][filled]
    for first, last in _query_blocks([len(query) for query in queries], query_block):
        block = np.concatenate(queries[first:last])
        heads = np.cumsum([0, *(len(query) for query in queries[first : last - 1])])
        begin = 0
        while begin < len(filled):
            end = max(begin + 1, int(np.searchsorted(ends, starts[begin] + document_block, side="right")))
            similarities = block @ tokens[starts[begin] : ends[end - 1]].T  # (query tokens, document tokens)
            best = np.maximum.reduceat(similarities, starts[begin:end] - starts[begin], axis=1)
            scores[first:last, filled[begin:end]] = np.add.reduceat(best, heads, axis=0)
            begin = end
    return scores


def _query_blocks(lengths: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Runs of queries with at most ``limit`` tokens together, but at least one query."""
    blocks: list[tuple[int, int]] = []
    first = held = 0
    for row, length in enumerate(lengths):
        if held and held + length > limit:
            blocks.append((first, row))
            first, held = row, 0
        held += length
    if held:
        blocks.append((first, len(lengths)))
    return blocks
