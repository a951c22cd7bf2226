"""MaxSim: for every query token its best document token, summed over the query.

``maxsim_padded`` is the reference, differentiable and on any device; ``maxsim_packed`` is the same number for many documents
without padding, on the CPU. Neither knows of ids or files. Vectors are taken as they come; ColBERT's are of unit length.

Shapes: Q queries, P documents, S padded length, T packed document tokens, n_i tokens of a query, d vector width.
Source: ColBERT, arXiv:2004.12832, equation 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.retrieval.records import TokenVectors

# Similarities that are held at a time: 256 query tokens by 4,096 document tokens are 4 MiB, which stay in the cache between
# the product and the maximum.
_QUERY_TOKENS = 256
_DOCUMENT_TOKENS = 4096


def maxsim_padded(queries: Tensor, documents: Tensor, query_mask: Tensor, document_mask: Tensor) -> Tensor:
    """MaxSim of every query with every document, padded.

    A masked document token never wins a maximum, not even when all similarities are negative; a masked query token adds
    nothing. A document without a token scores the minimum of the type, below any document that has one.

    Args:
        queries: (Q, S_q, d).
        documents: (P, S_d, d).
        query_mask: (Q, S_q), true where there is a token.
        document_mask: (P, S_d), true where there is a token.

    Returns:
        (Q, P), of the queries' type.

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


def maxsim_packed(queries: Sequence[TokenVectors], tokens: TokenVectors, offsets: NDArray[np.int64]) -> NDArray[np.float32]:
    """MaxSim of every query with every document of a packed store.

    One matrix product and one segmented maximum a block; the memory beside the result is 4 MiB, or as much as 256 query
    tokens times the longest document take if that is more.

    Args:
        queries: Q arrays of (n_i, d) float32, n_i >= 1.
        tokens: Document tokens, (T, d) float32; document p is ``tokens[offsets[p]:offsets[p + 1]]``.
        offsets: (P + 1,) ascending, from 0 to T.

    Returns:
        (Q, P); minus infinity where the document has no token.

    Raises:
        ValueError: A query has no token or another width than the documents.
    """
    for row, query in enumerate(queries):
        if query.ndim != 2 or query.shape[0] == 0 or query.shape[1] != tokens.shape[1]:
            raise ValueError(f"query {row} must have the shape (>= 1, {tokens.shape[1]}), got {query.shape}")
    scores = np.full((len(queries), len(offsets) - 1), -np.inf, dtype=np.float32)
    # reduceat would hand an empty segment the first value of the next one: documents without tokens stay out of it.
    filled = np.flatnonzero(np.diff(offsets))
    starts, ends = offsets[:-1][filled], offsets[1:][filled]
    for first, last in _query_blocks([len(query) for query in queries]):
        block = np.concatenate(queries[first:last])
        heads = np.cumsum([0, *(len(query) for query in queries[first : last - 1])])
        begin = 0
        while begin < len(filled):
            end = max(begin + 1, int(np.searchsorted(ends, starts[begin] + _DOCUMENT_TOKENS, side="right")))
            similarities = block @ tokens[starts[begin] : ends[end - 1]].T  # (query tokens, document tokens)
            best = np.maximum.reduceat(similarities, starts[begin:end] - starts[begin], axis=1)
            scores[first:last, filled[begin:end]] = np.add.reduceat(best, heads, axis=0)
            begin = end
    return scores


def _query_blocks(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of queries with at most ``_QUERY_TOKENS`` tokens together, one query at least."""
    blocks: list[tuple[int, int]] = []
    first = held = 0
    for row, length in enumerate(lengths):
        if held and held + length > _QUERY_TOKENS:
            blocks.append((first, row))
            first, held = row, 0
        held += length
    if held:
        blocks.append((first, len(lengths)))
    return blocks
