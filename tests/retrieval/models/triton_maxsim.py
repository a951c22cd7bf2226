"""The MaxSim kernels against PyTorch operators. Run by tests/test_triton.py: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quiver.retrieval.models.maxsim import maxsim_padded, maxsim_ragged
from tests.triton_tools import mend_interpreter, sample_programs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    mend_interpreter()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REPEATS = 2 if DEVICE == "cuda" else 1  # the interpreter runs one program after the other, so its bits are always the same


def packed(lengths: Sequence[int], width: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    vectors = torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(seed))
    return vectors.to(DEVICE, dtype), torch.tensor([0, *lengths]).cumsum(0).int()


def by_hand(queries: Tensor, query_offsets: Tensor, documents: Tensor, document_offsets: Tensor) -> Tensor:
    """Equation 3 in double precision, one pair at a time."""
    scores = torch.full((len(query_offsets) - 1, len(document_offsets) - 1), torch.finfo(torch.float32).min, dtype=torch.float64)
    for row, query in enumerate(queries.double().cpu().tensor_split(query_offsets[1:-1].long())):
        for place, document in enumerate(documents.double().cpu().tensor_split(document_offsets[1:-1].long())):
            if len(document):
                scores[row, place] = (query @ document.T).amax(1).sum()
    return scores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "documents", "width"),
    [
        ([1], [1], 7),
        ([3, 1, 5], [4, 0, 7, 130, 1], 16),
        ([32] * 5, [110, 64, 65, 0, 63], 128),
        ([0, 20, 33], [3, 129], 96),
        ([200, 3, 0], [70, 3], 24),
        ([129], [5, 90], 48),
        ([40, 2], [5, 90], 300),
    ],
)
def test_ragged_scores_are_the_sums_of_maxima(
    queries: list[int], documents: list[int], width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd widths, one token, empty texts; queries that fill several tiles; vectors wider than a tile."""
    monkeypatch.setenv("QUIVER_OPS", "triton")
    inputs = (*packed(queries, width, dtype, seed=1), *packed(documents, width, dtype, seed=2))
    scores, *again = (maxsim_ragged(*inputs) for _ in range(REPEATS))
    assert all(torch.equal(scores, other) for other in again)
    assert scores.dtype == torch.float32
    # The products of half-precision numbers are exact in float32: only its sums round.
    torch.testing.assert_close(scores.cpu().double(), by_hand(*inputs), rtol=1e-5, atol=1e-3)


def test_ragged_scores_of_many_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """More documents than one program processes; the kernel's documents are fewer near the end."""
    monkeypatch.setenv("QUIVER_OPS", "triton")
    monkeypatch.setattr("quiver.retrieval.models.triton_maxsim.BUSY_PROGRAMS", 2)
    inputs = (*packed([2] * 9, 16, torch.float32, seed=1), *packed([1, 3, 0, 2] * 10, 16, torch.float32, seed=2))
    torch.testing.assert_close(maxsim_ragged(*inputs).cpu().double(), by_hand(*inputs), rtol=1e-5, atol=1e-5)


def test_ragged_scores_of_a_million_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a large tile as for a small one, and the smaller are in the other tests."""
    monkeypatch.setenv("QUIVER_OPS", "triton")
    if DEVICE == "cpu":
        monkeypatch.setattr("quiver.retrieval.models.triton_maxsim.TOKENS", 1024)
    lengths = [2**19 - 3, 0, 2**19 + 3]
    inputs = (*packed([2], 16, torch.bfloat16, seed=1), *packed(lengths, 16, torch.bfloat16, seed=2))
    torch.testing.assert_close(maxsim_ragged(*inputs).cpu().double(), by_hand(*inputs), rtol=1e-5, atol=1e-3)


def differentiated(
    code: str, inputs: Sequence[Tensor], masks: Sequence[Tensor | None], masked: float | None, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Scores, and gradients of a weighting of them, by kernels or by PyTorch operators."""
    monkeypatch.setenv("QUIVER_OPS", code)
    leaves = [each.clone().requires_grad_() for each in inputs]
    scores = maxsim_padded(*leaves, *masks, masked_similarity=masked)
    weights = torch.linspace(-1, 2, scores.numel(), device=scores.device).view(scores.shape).to(scores.dtype)
    used = scores if masked is not None else scores.where(scores > torch.finfo(scores.dtype).min, 0.0)
    return [scores.detach(), *torch.autograd.grad((used * weights).sum(), leaves)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [None, 0.0])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("queries", "documents", "rows", "tokens", "width"), [(1, 1, 1, 1, 5), (3, 2, 4, 70, 16), (2, 3, 33, 7, 24), (1, 3, 5, 65, 130)]
)
def test_padded_scores_and_their_gradients(
    queries: int,
    documents: int,
    rows: int,
    tokens: int,
    width: int,
    own: bool,
    masked: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against PyTorch's operators in double precision: masks, a document without tokens; small integers give many ties."""
    generator = torch.Generator().manual_seed(rows)
    shape = (queries, documents) if own else (documents,)
    q = torch.randint(-2, 3, (queries, rows, width), generator=generator).to(DEVICE, dtype)
    d = torch.randint(-2, 3, (*shape, tokens, width), generator=generator).to(DEVICE, dtype)
    query_mask = (torch.rand(queries, rows, generator=generator) > 0.2).to(DEVICE)
    document_mask = (torch.rand(*shape, tokens, generator=generator) > 0.4).to(DEVICE)
    if tokens > 1:
        d[..., tokens // 2, :] = d[..., 0, :]  # equal similarities
        document_mask[..., 0] = document_mask[..., tokens // 2] = True
        document_mask.view(-1, tokens)[-1] = documents == 1
        document_mask.view(-1, tokens)[0, tokens - 3 :] = False
    for masks in ((query_mask, document_mask), (None, None), (query_mask, None)):
        found, *again = (differentiated("triton", (q, d), masks, masked, monkeypatch) for _ in range(REPEATS))
        assert all(torch.equal(one, other) for others in again for one, other in zip(found, others, strict=True))
        exact = differentiated("torch", (q.double(), d.double()), masks, masked, monkeypatch)
        lowest = exact[0] == torch.finfo(torch.float64).min
        assert torch.equal(found[0] == torch.finfo(dtype).min, lowest)
        exact[0] = exact[0].where(~lowest, 0.0)
        found[0] = found[0].where(~lowest, 0.0)
        for one, other in zip(found, exact, strict=True):
            assert one.dtype == dtype
            bound = max(torch.finfo(dtype).eps, 1e-6) * max(other.abs().max().item(), 1.0) * 4
            assert (one.double() - other).abs().max() <= bound


def test_a_nan_in_a_vector_shows_in_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIVER_OPS", "triton")
    queries, documents = torch.ones(1, 2, 4, device=DEVICE), torch.ones(2, 3, 4, device=DEVICE)
    documents[1, 1] = torch.nan
    assert maxsim_padded(queries, documents).isfinite().tolist() == [[True, False]]


def test_padded_scores_of_a_million_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """2**20 document tokens; the interpreter runs some of the programs, and PyTorch's operators find the tokens that get gradients.

    The only program of the queries' gradient goes through all documents, so these are few and long.
    """
    queries, documents = torch.ones(1, 1, 4, device=DEVICE), torch.ones(2**8, 2**12, 4, device=DEVICE)
    documents *= torch.arange(2**8, device=DEVICE)[:, None, None]
    documents.requires_grad_()
    if DEVICE == "cpu":  # a large tile takes as long as a small one
        sample_programs(monkeypatch, 100)
        for size in ("TOKENS", "FLOAT32_TOKENS"):
            monkeypatch.setattr(f"quiver.retrieval.models.triton_maxsim.{size}", 4096)
    monkeypatch.setenv("QUIVER_OPS", "torch")
    expected = maxsim_padded(queries, documents)
    monkeypatch.setenv("QUIVER_OPS", "triton")
    with torch.no_grad():
        found = maxsim_padded(queries, documents) == expected
    assert found[0, [0, -1]].all()
    assert found.sum() >= (100 if DEVICE == "cpu" else 2**8)
    (gradient,) = torch.autograd.grad(expected.sum() * 2, documents)
    for place in (0, -1):
        torch.testing.assert_close(gradient[place, :2], torch.tensor([[2.0] * 4, [0.0] * 4], device=DEVICE))
