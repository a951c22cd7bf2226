"""The MaxSim kernels against PyTorch operators. Run by tests/test_triton.py: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quiver.retrieval.models.maxsim import maxsim_ragged
from tests.triton_tools import mend_interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    mend_interpreter()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
    scores, again = (maxsim_ragged(*inputs) for _ in range(2))
    assert torch.equal(scores, again)
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
    monkeypatch.setenv("QUIVER_OPS", "triton")
    lengths = [2**19 - 3, 0, 2**19 + 3]
    inputs = (*packed([2], 16, torch.bfloat16, seed=1), *packed(lengths, 16, torch.bfloat16, seed=2))
    torch.testing.assert_close(maxsim_ragged(*inputs).cpu().double(), by_hand(*inputs), rtol=1e-5, atol=1e-3)
