"""Triton kernels of MaxSim: the similarities of query and document tokens stay in registers, so that nothing of their size is written.

Results match `quiver.retrieval.models.maxsim` to rounding. Products of half-precision vectors use tensor cores with float32 sums; those of
float32 vectors are IEEE float32, not TF32. There are no atomic additions, so that the same vectors give the same bits.

Shapes: Q queries, P documents, T document tokens, L query tokens of a tile that belong to one query, d vector width.
Source: ColBERT, arXiv:2004.12832, equation 3; FlashAttention, arXiv:2205.14135 (a reduction over tiles that are never written).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of a tile of query tokens: 128 rows are four instructions of a Hopper warp group, and leave room for two programs per multiprocessor.
QUERY_ROWS = 128
# Document tokens of a tile.
TOKENS = 64
# Half-precision vectors up to the first width are one tile; wider and float32 vectors are multiplied in parts, for which registers suffice.
WIDEST, COLUMNS = 128, 32
# Documents per program: loading the tile of queries is then a small part of its work. Fewer if the device would have idle multiprocessors.
DOCUMENTS = 16
BUSY_PROGRAMS = 1024


@triton.jit
def _products(
    queries, documents, query_inside, token_inside, width: tl.constexpr, block_width: tl.constexpr, precision: tl.constexpr
):  # pointers to the rows of both, (R,) and (C,)
    """Similarities (R, C) float32 of wide vectors, in parts of their width."""
    column = tl.arange(0, block_width)
    total = tl.zeros([queries.shape[0], documents.shape[0]], dtype=tl.float32)
    for start in range(0, width, block_width):
        inside = start + column < width
        left = tl.load(queries[:, None] + start + column[None, :], mask=query_inside[:, None] & inside[None, :], other=0.0)
        right = tl.load(documents[None, :] + start + column[:, None], mask=inside[:, None] & token_inside[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision=precision)
    return total


@triton.jit(do_not_specialize=["num_queries", "num_documents", "each", "longest"])
def ragged_kernel(  # noqa: PLR0913 (pointers and sizes; a kernel has no other way to get them)
    queries,
    query_offsets,
    documents,
    document_offsets,
    scores,
    num_queries,
    num_documents,
    each,
    longest,
    lowest,
    resident: tl.constexpr,
    group: tl.constexpr,
    query_tokens: tl.constexpr,
    width: tl.constexpr,
    block_width: tl.constexpr,
    block_tokens: tl.constexpr,
    precision: tl.constexpr,
):
    """Scores of ``group`` queries with ``each`` documents.

    Neighbouring programs process the same documents, which thus come from the cache for all queries but the first. A ``resident`` tile of
    queries is loaded once; otherwise vectors are too wide, or queries have more than ``query_tokens`` tokens and are processed in parts.
    """
    tiles = tl.cdiv(num_queries, group)
    program = tl.program_id(0)
    query = (program % tiles) * group + tl.arange(0, group)  # (G,)
    begin = tl.load(query_offsets + query, mask=query < num_queries, other=0)
    end = tl.load(query_offsets + query + 1, mask=query < num_queries, other=0)
    place = tl.arange(0, query_tokens)
    row = tl.reshape(begin[:, None] + place[None, :], [group * query_tokens])
    stop = tl.reshape(end[:, None] + tl.zeros_like(place)[None, :], [group * query_tokens])
    column = tl.arange(0, block_width)
    first = (program // tiles) * each
    last = tl.minimum(first + each, num_documents)
    if resident:
        held = (row < stop)[:, None] & (column < width)[None, :]
        left = tl.load(queries + row.to(tl.int64)[:, None] * width + column[None, :], mask=held, other=0.0)
    for document in range(first, last):
        start = tl.load(document_offsets + document)
        bound = tl.load(document_offsets + document + 1)
        score = tl.zeros([group], dtype=tl.float32)
        for part in range(0, query_tokens if resident else longest, query_tokens):
            best = tl.full([group * query_tokens], float("-inf"), dtype=tl.float32)
            for first_token in range(start, bound, block_tokens):
                token = first_token + tl.arange(0, block_tokens)
                if resident:
                    inside = (column < width)[:, None] & (token < bound)[None, :]
                    right = tl.load(documents + token.to(tl.int64)[None, :] * width + column[:, None], mask=inside, other=0.0)
                    similarity = tl.dot(left, right, input_precision=precision)
                else:
                    similarity = _products(
                        queries + (row + part).to(tl.int64) * width,
                        documents + token.to(tl.int64) * width,
                        row + part < stop,
                        token < bound,
                        width,
                        block_width,
                        precision,
                    )
                similarity = tl.where((token < bound)[None, :], similarity, float("-inf"))
                best = tl.maximum(best, tl.max(similarity, axis=1))
            score += tl.sum(tl.reshape(tl.where(row + part < stop, best, 0.0), [group, query_tokens]), axis=1)
        score = tl.where(start < bound, score, lowest)
        tl.store(scores + query.to(tl.int64) * num_documents + document, score, mask=query < num_queries)


def maxsim_ragged(queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor, longest_query: int) -> Tensor:
    """See `quiver.retrieval.models.maxsim.maxsim_ragged`; offsets are on the device, and the longest query has ``longest_query`` tokens."""
    num_queries, num_documents, width = len(query_offsets) - 1, len(document_offsets) - 1, queries.shape[1]
    scores = queries.new_empty(num_queries, num_documents, dtype=torch.float32)
    exact = queries.dtype == torch.float32
    block_width = max(triton.next_power_of_2(width), 16)
    if exact or block_width > WIDEST:
        block_width = min(block_width, COLUMNS)
    query_tokens = min(max(triton.next_power_of_2(longest_query), 16), QUERY_ROWS)
    group = min(QUERY_ROWS // query_tokens, triton.next_power_of_2(num_queries))
    resident = width <= block_width and longest_query <= query_tokens
    tiles = triton.cdiv(num_queries, group)
    each = min(max(num_documents * tiles // BUSY_PROGRAMS, 1), DOCUMENTS)
    with torch.cuda.device_of(queries):
        ragged_kernel[(tiles * triton.cdiv(num_documents, each),)](
            queries,
            query_offsets,
            documents,
            document_offsets,
            scores,
            num_queries,
            num_documents,
            each,
            longest_query,
            torch.finfo(torch.float32).min,
            resident=resident,
            group=group,
            query_tokens=query_tokens,
            width=width,
            block_width=block_width,
            block_tokens=TOKENS,
            precision="ieee" if exact else "tf32",  # the second is not used for half precision
            num_warps=4 if resident and not exact else 8,
            num_stages=3,
        )
    return scores
