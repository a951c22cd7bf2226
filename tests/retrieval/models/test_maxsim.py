"""MaxSim: the padded and the packed function, compared with explicit sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quiver.retrieval.models import maxsim
from quiver.retrieval.models.encoding import maxsim_packed
from quiver.retrieval.models.maxsim import maxsim_padded, maxsim_ragged

Tokens = NDArray[np.float32]


def by_hand(queries: Sequence[Tokens], documents: Sequence[Tokens]) -> NDArray[np.float64]:
    """Compute equation 3 of the paper in plain loops and double precision; minus infinity for a document without tokens."""
    return np.array(
        [
            [
                sum(max(float(q.astype(float) @ t.astype(float)) for t in document) for q in query) if len(document) else -np.inf
                for document in documents
            ]
            for query in queries
        ]
    )


def pack(documents: Sequence[Tokens]) -> tuple[Tokens, NDArray[np.int64]]:
    return np.concatenate(documents), np.cumsum([0, *map(len, documents)], dtype=np.int64)


def pad(texts: Sequence[Tokens]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad with large values, which would be every maximum if the mask did not exclude them."""
    longest = max(map(len, texts))
    out = torch.full((len(texts), longest, texts[0].shape[1]), 1e3)
    mask = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        out[row, : len(text)], mask[row, : len(text)] = torch.from_numpy(text), True
    return out, mask


def random_texts(seed: int, lengths: Sequence[int], width: int = 12) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((length, width)).astype(np.float32) for length in lengths]


LENGTHS = [3, 0, 1, 17, 0, 0, 40, 2, 0]


def test_packed_maxsim_is_the_sum_of_maxima_with_empty_documents_anywhere() -> None:
    for lengths in (LENGTHS, [0, 0, 5], [5], [4, 0]):
        queries, documents = random_texts(0, [5, 1, 32]), random_texts(1, lengths)
        np.testing.assert_allclose(maxsim_packed(queries, *pack(documents)), by_hand(queries, documents), rtol=1e-5, atol=1e-5)


def test_block_sizes_do_not_change_scores() -> None:
    queries, documents = random_texts(2, [4, 9, 1, 30, 2]), random_texts(3, [7, 0, 64, 1, 1, 0, 20, 33, 5])
    whole = maxsim_packed(queries, *pack(documents))
    for query_tokens, document_tokens in ((1, 1), (40, 8), (61, 64), (1000, 21)):
        scores = maxsim_packed(queries, *pack(documents), query_block=query_tokens, document_block=document_tokens)
        np.testing.assert_allclose(scores, whole, rtol=1e-5, atol=1e-5)


def test_padded_maxsim_is_the_sum_of_maxima_and_ranks_empty_documents_last() -> None:
    queries, documents = random_texts(0, [5, 1, 7]), random_texts(1, LENGTHS)
    (q, q_mask), (d, d_mask) = pad(queries), pad(documents)
    scores = maxsim_padded(q, d, q_mask, d_mask)
    expected = torch.from_numpy(by_hand(queries, documents)).float()
    full = np.array(LENGTHS) > 0
    torch.testing.assert_close(scores[:, full], expected[:, full], rtol=1e-5, atol=1e-5)
    assert (scores[:, ~full] == torch.finfo(torch.float32).min).all()


@pytest.mark.parametrize("shape", [(0, 12), (3, 11), (12,)])
def test_a_query_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="query 1 must have the shape"):
        maxsim_packed([np.ones((2, 12), np.float32), np.ones(shape, np.float32)], *pack(random_texts(0, [3])))


@pytest.mark.parity
def test_pylate_gives_the_same_scores_for_documents_without_padding() -> None:
    scores = pytest.importorskip("pylate.scores")
    rng = np.random.default_rng(5)
    queries, documents = rng.standard_normal((4, 8, 16)).astype(np.float32), rng.standard_normal((6, 20, 16)).astype(np.float32)
    theirs = scores.colbert_scores(torch.from_numpy(queries), torch.from_numpy(documents))
    ours = maxsim_padded(torch.from_numpy(queries), torch.from_numpy(documents), torch.ones(4, 8), torch.ones(6, 20))
    torch.testing.assert_close(ours, theirs)
    np.testing.assert_allclose(maxsim_packed(list(queries), *pack(list(documents))), theirs.numpy(), rtol=1e-5)


@pytest.mark.parametrize("similarities", [1, 1000, 2**24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ragged_maxsim_is_the_packed_one_whatever_the_blocks(
    dtype: torch.dtype, similarities: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maxsim, "SIMILARITIES", similarities)
    queries, documents = random_texts(0, [5, 1, 32]), random_texts(1, LENGTHS)
    inputs = []
    for texts in (queries, documents):
        tokens, offsets = pack(texts)
        inputs += [torch.from_numpy(tokens).to(dtype), torch.from_numpy(offsets).int()]
    rounded = [text.numpy() for text in inputs[0].float().tensor_split(inputs[1][1:-1].long())]
    expected = maxsim_packed(rounded, inputs[2].float().numpy(), inputs[3].numpy().astype(np.int64))
    expected[expected == -np.inf] = np.finfo(np.float32).min
    scores = maxsim_ragged(*inputs)
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_ragged_maxsim_without_tokens_or_texts() -> None:
    tokens, none = torch.ones(2, 4), torch.ones(0, 4)
    lowest = torch.finfo(torch.float32).min
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    nobody = torch.tensor([0], dtype=torch.int32)
    empty = torch.tensor([0, 0], dtype=torch.int32)
    assert maxsim_ragged(none, nobody, tokens, offsets).shape == (0, 1)
    assert maxsim_ragged(tokens, offsets, none, nobody).shape == (1, 0)
    assert maxsim_ragged(none, empty, tokens, offsets).tolist() == [[0.0]]
    assert maxsim_ragged(tokens, offsets, none, empty).tolist() == [[lowest]]
    assert maxsim_ragged(none, empty, none, empty).tolist() == [[lowest]]


def test_ragged_maxsim_refuses_vectors_that_differ() -> None:
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    for documents in (torch.ones(1, 5), torch.ones(1, 4, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="one width and dtype"):
            maxsim_ragged(torch.ones(1, 4), offsets, documents, offsets)


@pytest.mark.parametrize("similarities", [1, 500, 2**24])
@pytest.mark.parametrize("own", [False, True])
def test_padded_maxsim_has_the_gradients_of_its_definition_whatever_the_blocks(
    own: bool, similarities: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maxsim, "SIMILARITIES", similarities)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 4, 5, dtype=torch.float64, generator=generator).requires_grad_()
    documents = torch.randn(*((3, 2) if own else (6,)), 7, 5, dtype=torch.float64, generator=generator).requires_grad_()
    query_mask, document_mask = torch.rand(3, 4, generator=generator) > 0.3, torch.rand(documents.shape[:-1], generator=generator) > 0.5
    assert torch.autograd.gradcheck(
        lambda q, d: maxsim_padded(q, d, query_mask, document_mask, masked_similarity=0.0), (queries, documents)
    )
    similarity = torch.einsum("qsd,qptd->qpst" if own else "qsd,ptd->qpst", queries, documents)
    kept = document_mask.unsqueeze(-2) if own else document_mask[None, :, None]
    best = similarity.where(kept, 0.0).amax(3) * query_mask[:, None]
    torch.testing.assert_close(maxsim_padded(queries, documents, query_mask, document_mask, masked_similarity=0.0), best.sum(2))


@pytest.mark.parametrize(
    ("queries", "documents"), [((0, 3, 4), (2, 5, 4)), ((2, 0, 4), (2, 5, 4)), ((2, 3, 4), (0, 5, 4)), ((2, 3, 4), (2, 0, 4))]
)
@pytest.mark.parametrize("own", [False, True])
def test_padded_maxsim_without_texts_or_tokens(queries: tuple[int, ...], documents: tuple[int, ...], own: bool) -> None:
    q = torch.ones(*queries, requires_grad=True)
    d = torch.ones(*((queries[0], *documents) if own else documents), requires_grad=True)
    scores = maxsim_padded(q, d)
    assert scores.tolist() == [[0.0 if documents[1] else torch.finfo(torch.float32).min] * documents[0]] * queries[0]
    for leaf, gradient in zip((q, d), torch.autograd.grad(scores.sum(), (q, d)), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))
