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
TOKENS = 64  # document tokens of a tile
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


def _columns(width: int, most: int) -> int:
    """Columns of a block: a power of two from 16, which a product of tiles needs, to ``most``."""
    return int(min(max(triton.next_power_of_2(width), 16), most))


def _precision(vectors: Tensor) -> str:
    return "ieee" if vectors.dtype == torch.float32 else "tf32"  # the second is not used for half precision


def maxsim_ragged(queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor, longest_query: int) -> Tensor:
    """See `quiver.retrieval.models.maxsim.maxsim_ragged`; offsets are on the device, and the longest query has ``longest_query`` tokens."""
    num_queries, num_documents, width = len(query_offsets) - 1, len(document_offsets) - 1, queries.shape[1]
    scores = queries.new_empty(num_queries, num_documents, dtype=torch.float32)
    exact = queries.dtype == torch.float32
    block_width = _columns(width, COLUMNS if exact or width > WIDEST else WIDEST)
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
            precision=_precision(queries),
            num_warps=4 if resident and not exact else 8,
            num_stages=3,
        )
    return scores


# Tiles of training: query tokens; document tokens of float32 similarities, for which registers suffice; columns of gradients.
TRAINING_ROWS, FLOAT32_TOKENS, GRADIENT_COLUMNS = 32, 32, 64


@triton.jit(do_not_specialize=["rows", "tokens", "each"])
def padded_kernel(  # noqa: PLR0913 (pointers and sizes; a kernel has no other way to get them)
    queries,
    documents,
    query_mask,
    document_mask,
    bounds,
    scores,
    winners,
    rows,
    tokens,
    each,
    masked,
    own: tl.constexpr,
    width: tl.constexpr,
    block_width: tl.constexpr,
    block_rows: tl.constexpr,
    block_tokens: tl.constexpr,
    precision: tl.constexpr,
):
    """Score of one query with one document, and for each query token the document token that it is most similar to.

    Each query is scored with ``each`` documents: its ``own``, or the same for all. Tokens from a document's bound on are masked.
    """
    pair = tl.program_id(0).to(tl.int64)
    query = pair // each
    document = pair if own else pair % each
    bound = tokens
    if bounds is not None:
        bound = tl.load(bounds + document)
    score = 0.0
    for first_row in range(0, rows, block_rows):
        row = first_row + tl.arange(0, block_rows)
        best = tl.full([block_rows], float("-inf"), dtype=tl.float32)
        winner = tl.full([block_rows], -1, dtype=tl.int32)
        for first_token in range(0, bound, block_tokens):
            token = first_token + tl.arange(0, block_tokens)
            similarity = _products(
                queries + (query * rows + row) * width,
                documents + (document * tokens + token) * width,
                row < rows,
                token < bound,
                width,
                block_width,
                precision,
            )
            if document_mask is not None:
                kept = tl.load(document_mask + document * tokens + token, mask=token < bound, other=0) != 0
                similarity = tl.where(kept[None, :], similarity, masked)
            similarity = tl.where(similarity == similarity, similarity, float("inf"))  # a NaN must not lose: the loss has to show it
            similarity = tl.where((token < bound)[None, :], similarity, float("-inf"))
            value, place = tl.max(similarity, axis=1, return_indices=True, return_indices_tie_break_left=True)
            better = value > best  # the first of equal similarities wins
            winner = tl.where(better, place + first_token, winner)
            best = tl.where(better, value, best)
        if document_mask is not None:  # a masked token gets no gradient
            kept = tl.load(document_mask + document * tokens + winner, mask=winner >= 0, other=0) != 0
            winner = tl.where(kept, winner, -1)
        beyond = (bound < tokens) & (masked > best)
        best = tl.where(beyond, masked, best)
        winner = tl.where(beyond, -1, winner)
        counts = row < rows
        if query_mask is not None:
            counts = counts & (tl.load(query_mask + query * rows + row, mask=row < rows, other=0) != 0)
        score += tl.sum(tl.where(counts, best, 0.0), axis=0)
        tl.store(winners + pair * rows + row, tl.where(counts, winner, -1), mask=row < rows)
    tl.store(scores + pair, tl.where(bound > 0, score, masked))


@triton.jit(do_not_specialize=["rows", "tokens", "each"])
def query_gradient_kernel(  # noqa: PLR0913 (pointers and sizes; a kernel has no other way to get them)
    documents,
    winners,
    incoming,
    gradient,
    rows,
    tokens,
    each,
    own: tl.constexpr,
    width: tl.constexpr,
    block_width: tl.constexpr,
    block_rows: tl.constexpr,
):
    """Gradient of a few tokens of a query: the document tokens that they chose, weighted."""
    query = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(2) * block_width + tl.arange(0, block_width)
    total = tl.zeros([block_rows, block_width], dtype=tl.float32)
    for index in range(each):
        pair = query * each + index
        document = pair if own else tl.cast(index, tl.int64)
        winner = tl.load(winners + pair * rows + row, mask=row < rows, other=-1)
        place = (document * tokens + winner) * width
        inside = (winner >= 0)[:, None] & (column < width)[None, :]
        chosen = tl.load(documents + place[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.load(incoming + pair) * chosen
    place = (query * rows + row) * width
    tl.store(gradient + place[:, None] + column[None, :], total, mask=(row < rows)[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["num_queries", "rows", "tokens", "each"])
def document_gradient_kernel(  # noqa: PLR0913 (pointers and sizes; a kernel has no other way to get them)
    queries,
    winners,
    incoming,
    gradient,
    num_queries,
    rows,
    tokens,
    each,
    own: tl.constexpr,
    width: tl.constexpr,
    block_width: tl.constexpr,
    block_rows: tl.constexpr,
    block_tokens: tl.constexpr,
    precision: tl.constexpr,
):
    """Gradient of a few tokens of a document: the query tokens that chose them, weighted.

    A product with zeros and ones adds them in one order; a sum by atomic additions would have any.
    """
    document = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * block_tokens + tl.arange(0, block_tokens)
    column = tl.program_id(2) * block_width + tl.arange(0, block_width)
    total = tl.zeros([block_tokens, block_width], dtype=tl.float32)
    for index in range(1 if own else num_queries):
        query = document // each if own else tl.cast(index, tl.int64)
        pair = document if own else query * each + document
        weight = tl.load(incoming + pair)
        for first_row in range(0, rows, block_rows):
            row = first_row + tl.arange(0, block_rows)
            winner = tl.load(winners + pair * rows + row, mask=row < rows, other=-1)
            inside = (row < rows)[:, None] & (column < width)[None, :]
            place = (query * rows + row) * width
            vectors = tl.load(queries + place[:, None] + column[None, :], mask=inside, other=0.0)
            chosen = tl.where(winner[None, :] == token[:, None], 1.0, 0.0).to(vectors.dtype)
            total += weight * tl.dot(chosen, vectors, input_precision=precision)
    place = (document * tokens + token) * width
    tl.store(gradient + place[:, None] + column[None, :], total, mask=(token < tokens)[:, None] & (column < width)[None, :])


def maxsim_padded(
    queries: Tensor, documents: Tensor, query_mask: Tensor | None, document_mask: Tensor | None, *, each: int, masked: float
) -> tuple[Tensor, Tensor]:
    """Scores (Q, ``each``) float32 and winners (Q, ``each``, S_q) int32, -1 where no token gets a gradient.

    Tensors are contiguous: queries (Q, S_q, d), documents (P, S_d, d), with P of ``each``, or Q times ``each`` if every query has its own
    documents, and bool masks without d.
    """
    (num_queries, rows, width), tokens = queries.shape, documents.shape[1]
    scores = queries.new_empty(num_queries, each, dtype=torch.float32)
    winners = queries.new_empty(num_queries, each, rows, dtype=torch.int32)
    bounds = None
    if document_mask is not None:  # after the last token that counts
        bounds = (document_mask * torch.arange(1, tokens + 1, dtype=torch.int32, device=queries.device)).amax(1)
    with torch.cuda.device_of(queries):
        padded_kernel[(num_queries * each,)](
            queries,
            documents,
            query_mask,
            document_mask,
            bounds,
            scores,
            winners,
            rows,
            tokens,
            each,
            masked,
            own=len(documents) != each,
            width=width,
            block_width=_columns(width, COLUMNS),
            block_rows=TRAINING_ROWS,
            block_tokens=FLOAT32_TOKENS if queries.dtype == torch.float32 else TOKENS,
            precision=_precision(queries),
            num_warps=4,
        )
    return scores, winners


def maxsim_padded_backward(queries: Tensor, documents: Tensor, winners: Tensor, incoming: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of queries and documents from that of the scores, (Q, ``each``) float32 and contiguous; arguments of `maxsim_padded`."""
    (num_queries, rows, width), (num_documents, tokens) = queries.shape, documents.shape[:2]
    each = winners.shape[1]
    grad_queries, grad_documents = torch.empty_like(queries), torch.empty_like(documents)
    block_width = _columns(width, GRADIENT_COLUMNS)
    parts = triton.cdiv(width, block_width)
    shape = {"own": num_documents != each, "width": width, "block_width": block_width, "block_rows": TRAINING_ROWS, "num_warps": 4}
    with torch.cuda.device_of(queries):
        query_gradient_kernel[(num_queries, triton.cdiv(rows, TRAINING_ROWS), parts)](
            documents, winners, incoming, grad_queries, rows, tokens, each, **shape
        )
        document_gradient_kernel[(num_documents, triton.cdiv(tokens, TOKENS), parts)](
            queries,
            winners,
            incoming,
            grad_documents,
            num_queries,
            rows,
            tokens,
            each,
            block_tokens=TOKENS,
            precision=_precision(queries),
            **shape,
        )
    return grad_queries, grad_documents
