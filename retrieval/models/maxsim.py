"""MaxSim: for every query token its best document token, summed over the query.

`maxsim_padded` is for training: differentiable, from padded vectors. `maxsim_ragged` computes the same scores for many documents without
padding. Vectors are not normalized here; ColBERT's have unit length.

Shapes: Q queries, P documents, S padded length, T packed document tokens, T_q packed query tokens, n_i tokens of a query, d vector width.
Source: ColBERT, arXiv:2004.12832, equation 3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quiver.encoder.layers import use_triton

SIMILARITIES = 2**24  # similarities that are held at a time where no kernel runs: 64 MiB of float32


def maxsim_padded(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    masked_similarity: float | None = None,
) -> Tensor:
    """Compute MaxSim from padded vectors, with gradients: of every query with every document, or with its own documents.

    Similarities are not kept, only the document token that each query token is most similar to. Of equal similarities the first token wins
    and gets the gradient. A masked query token adds nothing. Products have the precision of the vectors (IEEE, not TF32, for float32); on a
    GPU sums are float32, and equal inputs give equal bits.

    Args:
        queries: Query vectors, (Q, S_q, d).
        documents: Document vectors, (P, S_d, d) for all queries, or (Q, P, S_d, d), P for each query.
        query_mask: True for tokens, False for padding, (Q, S_q); None for tokens only.
        document_mask: True for tokens, False for padding, like ``documents`` without d; None for tokens only.
        masked_similarity: Similarity of a masked document token with every query token. Default: the minimum of the dtype, so that it is
            never the maximum, and the score of a document without tokens. PyLate's losses use 0.

    Returns:
        Scores (Q, P), in the queries' dtype.

    Example:
        >>> queries, documents = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[-0.5, 1.0], [9.0, 9.0]]])
        >>> maxsim_padded(queries, documents, document_mask=torch.tensor([[True, False]]))
        tensor([[-0.5000]])
    """
    own = documents.ndim == 4
    each = documents.shape[1] if own else documents.shape[0]
    masked = torch.finfo(queries.dtype).min if masked_similarity is None else masked_similarity
    flat = documents.flatten(0, 1) if own else documents
    masks = [None if mask is None else mask.bool() for mask in (query_mask, document_mask)]
    if own and masks[1] is not None:
        masks[1] = masks[1].flatten(0, 1)
    scores: Tensor = _MaxSim.apply(queries.contiguous(), flat.contiguous(), *masks, each, masked)  # type: ignore[no-untyped-call]
    return scores


class _MaxSim(torch.autograd.Function):
    """(queries, documents, masks) to scores; keeps the winners, (Q, P, S_q), instead of the similarities, (Q, P, S_q, S_d)."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, documents: Tensor, query_mask: Tensor | None, document_mask: Tensor | None, each: int, masked: float
    ) -> Tensor:
        arguments = queries, documents, query_mask, document_mask
        if use_triton(queries) and use_triton(documents):
            from quiver.retrieval.models import triton_maxsim

            masks = [None if mask is None else mask.contiguous() for mask in (query_mask, document_mask)]
            scores, winners = triton_maxsim.maxsim_padded(queries, documents, *masks, each=each, masked=masked)
        else:
            scores, winners = _padded_in_blocks(*arguments, each, masked)
        ctx.save_for_backward(queries, documents, winners)
        return scores.to(queries.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        queries, documents, winners = ctx.saved_tensors
        if use_triton(queries) and use_triton(documents):
            from quiver.retrieval.models import triton_maxsim

            gradients = triton_maxsim.maxsim_padded_backward(queries, documents, winners, incoming.float().contiguous())
        else:
            gradients = _padded_backward_in_blocks(queries, documents, winners, incoming)
        return *gradients, None, None, None, None


def _document_blocks(queries: Tensor, documents: Tensor, each: int, held: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries and of their documents with at most ``held`` numbers per query token and document, but at least one document."""
    per_query = max(queries.shape[1] * held, 1)
    if len(documents) != each:  # own documents: blocks of queries
        step = max(SIMILARITIES // (per_query * max(each, 1)), 1)
        for start in range(0, len(queries), step):
            yield slice(start, start + step), slice(start * each, (start + step) * each)
        return
    step = max(SIMILARITIES // max(per_query * len(queries), 1), 1)
    for start in range(0, len(documents), step):
        yield slice(None), slice(start, start + step)


def _padded_in_blocks(
    queries: Tensor, documents: Tensor, query_mask: Tensor | None, document_mask: Tensor | None, each: int, masked: float
) -> tuple[Tensor, Tensor]:
    """Scores (Q, ``each``) and winners (Q, ``each``, S_q) by PyTorch operators; -1 for a token that gets no gradient."""
    tokens, own = documents.shape[1], len(documents) != each
    if not queries.numel() or not documents.numel():
        winners = torch.full((len(queries), each, queries.shape[1]), -1, dtype=torch.int32, device=queries.device)
        return queries.new_full((len(queries), each), 0.0 if tokens else masked), winners
    parts: list[tuple[Tensor, Tensor]] = []
    for rows, places in _document_blocks(queries, documents, each, tokens):
        block, texts = queries[rows], documents[places]
        # (q, S_q, each * S_d) or (Q, S_q, p * S_d)
        similarities = block @ (texts.reshape(len(block), each * tokens, -1) if own else texts.flatten(0, 1)).mT
        similarities = similarities.view(*similarities.shape[:2], -1, tokens)
        kept = None if document_mask is None else document_mask[places].view(len(block) if own else 1, 1, -1, tokens)
        if kept is not None:
            similarities = similarities.masked_fill_(~kept, masked)
        best, winner = (part.transpose(1, 2) for part in similarities.max(3))  # (q, p, S_q)
        if kept is not None:
            winner = winner.masked_fill(~kept.squeeze(1).expand(len(block), -1, -1).gather(2, winner), -1)
        if query_mask is not None:
            padding = ~query_mask[rows, None]
            best, winner = best.masked_fill(padding, 0.0), winner.masked_fill(padding, -1)
        score = best.sum(2)
        if kept is not None:
            score = score.masked_fill(~kept.squeeze(1).any(2), masked)
        parts.append((score, winner.int()))
    scores, winners = (torch.cat(each_part, 0 if own else 1) for each_part in zip(*parts, strict=True))
    return scores, winners


def _padded_backward_in_blocks(queries: Tensor, documents: Tensor, winners: Tensor, incoming: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of queries and documents by PyTorch operators."""
    (tokens, width), each = documents.shape[1:], winners.shape[1]
    own = len(documents) != each
    grad_queries, grad_documents = torch.zeros_like(queries), torch.zeros_like(documents)
    if not queries.numel() or not documents.numel():
        return grad_queries, grad_documents
    for rows, places in _document_blocks(queries, documents, each, width):
        block = slice(None) if own else places
        winner, weights = winners[rows, block].long(), incoming[rows, block, None, None]  # (q, p, S_q)
        weights = torch.where(winner >= 0, weights[..., 0], 0.0)[..., None]
        count = winner.shape[1]
        first = torch.arange(winner.shape[0] * count if own else count, device=winner.device).view(-1, count, 1) * tokens
        place = (first + winner.clamp(min=0)).flatten()  # of the block's tokens
        chosen = documents[places].reshape(-1, width)[place].view(*winner.shape, width)  # (q, p, S_q, d)
        grad_queries[rows] += (weights * chosen).sum(1)
        shares = (weights * queries[rows, None]).flatten(0, 2)
        grad_documents[places] += torch.zeros_like(documents[places]).view(-1, width).index_add_(0, place, shares).view(-1, tokens, width)
    return grad_queries, grad_documents


@torch.no_grad()
def maxsim_ragged(queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor) -> Tensor:
    """Compute MaxSim of every query with every document from packed vectors, without gradients.

    Products have the precision of the vectors (IEEE, not TF32, for float32); sums are float32.

    Args:
        queries: Query tokens, (T_q, d) in float32, bfloat16 or float16; finite.
        query_offsets: Boundaries of the queries, (Q + 1,) int32, from 0 to T_q. On the host if possible: the length of the longest query
            decides the tiles, and reading it from the device waits.
        documents: Document tokens, (T, d), of the queries' dtype and device; finite.
        document_offsets: Boundaries of the documents, (P + 1,) int32, from 0 to T; on the device if possible.

    Returns:
        Scores (Q, P) float32 on the device of the vectors. A document without tokens scores the minimum of float32, otherwise a query
        without tokens scores 0.

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
    device = documents.device
    query_offsets, document_offsets = (each.to(device, non_blocking=device.type == "cuda") for each in (query_offsets, document_offsets))
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
    block_tokens = max(SIMILARITIES // max(len(queries), 1), 1)
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
