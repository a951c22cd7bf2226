"""MaxSim of packed vectors in NumPy, on the CPU; imports no PyTorch. `quiver.retrieval.models.maxsim` has it for tensors.

Shapes: Q queries, P documents, T packed document tokens, n_i tokens of a query, d vector width.
Source: ColBERT, arXiv:2004.12832, equation 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.records import TokenVectors


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
