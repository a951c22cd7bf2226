"""The MaxSim kernels compile for GPUs that are not there, exactly as they would be launched."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
import torch

from quiver.retrieval.models.maxsim import maxsim_padded
from tests.triton_tools import compile_launch, launches

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize(
    ("capability", "dtype", "query_tokens", "width"),
    [
        *((capability, torch.bfloat16, 32, 128) for capability in (80, 90, 100)),
        *((90, dtype, tokens, width) for dtype in (torch.float16, torch.float32) for tokens, width in ((10, 24), (200, 96), (32, 768))),
        (80, torch.float32, 200, 96),
        (100, torch.float32, 32, 768),
    ],
)
def test_search_compiles_without_spills(
    query_tokens: int, width: int, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from quiver.retrieval.models import triton_maxsim

    def search() -> None:
        queries, documents = (torch.empty(size, width, dtype=dtype, device="cuda") for size in (8 * query_tokens, 4000))
        query_offsets, document_offsets = (torch.empty(size, dtype=torch.int32, device="cuda") for size in (9, 41))
        triton_maxsim.maxsim_ragged(queries, query_offsets, documents, document_offsets, query_tokens)

    (launch,) = launches(monkeypatch, search)
    code = compile_launch(launch, capability, tmp_path)
    logger.info("%s %d %s %s", launch.kernel.fn.__name__, capability, dtype, code)
    assert code.spilled == 0
    assert code.registers <= 255
    assert code.vectors == 16
    # Programs fit beside each other on the smallest of these GPUs (an A100 has 164 KiB).
    assert code.shared <= 96 * 1024 if capability < 100 else code.shared <= 160 * 1024
    if dtype != torch.float32 and query_tokens > 16:
        assert code.instructions >= {{80: "mma", 90: "wgmma", 100: "tcgen05"}[capability]}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("own", "width", "dtype"),
    [
        (False, 128, torch.float32),
        pytest.param(True, 96, torch.float16, marks=pytest.mark.slow),
        pytest.param(False, 768, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_training_compiles_without_spills(
    own: bool, width: int, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def score_and_differentiate() -> None:
        queries = torch.empty(4, 32, width, dtype=dtype, device="cuda", requires_grad=True)
        documents = torch.empty(*((4, 6) if own else (6,)), 180, width, dtype=dtype, device="cuda", requires_grad=True)
        masks = queries[..., 0] > 0, documents[..., 0] > 0
        scores = maxsim_padded(queries, documents, *masks)
        scores.grad_fn.apply(torch.empty_like(scores))  # type: ignore[union-attr]  # the engine of autograd needs a device

    found = launches(monkeypatch, score_and_differentiate)
    assert [launch.kernel.fn.__name__ for launch in found] == ["padded_kernel", "query_gradient_kernel", "document_gradient_kernel"]
    for launch in found:
        code = compile_launch(launch, capability, tmp_path)
        logger.info("%s %d %s %s", launch.kernel.fn.__name__, capability, dtype, code)
        assert code.spilled == 0, launch.kernel.fn.__name__
        assert code.registers <= 255
        assert code.vectors == 16, launch.kernel.fn.__name__
