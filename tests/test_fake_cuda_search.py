"""Exact search as a GPU runs it, without one: PyTorch's fake tensors carry shapes, dtypes and the device ``cuda``, and no numbers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quiver.retrieval.index.on_device import DeviceScorer, Resident
from quiver.retrieval.index.ranking import FirstPass, SearchLimits
from tests.test_fake_cuda import Trace, trace

__all__ = ["trace"]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

WIDTH, COUNT, HITS = 64, 3000, 100


@pytest.mark.parametrize("first_pass", ["float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [False], ids=["dense"])
def test_an_exact_search_waits_only_for_its_results(trace: Trace, first_pass: FirstPass, tokens: bool) -> None:
    """Ten blocks and two groups of queries."""
    limits = SearchLimits(block_bytes=4 * WIDTH * COUNT // 10, device_scores=COUNT, first_pass=first_pass)
    queries = [np.ones((32, WIDTH), np.float32)] * 20 if tokens else np.ones((20, WIDTH), np.float32)
    offsets = np.arange(0, COUNT + 1, 3) if tokens else None
    documents = COUNT // 3 if tokens else COUNT
    with FakeTensorMode(allow_non_fake_inputs=True):
        vectors = Resident(torch.empty(COUNT, WIDTH, device="cuda"))
        scorer = DeviceScorer(vectors, queries, offsets, documents=documents, largest_norm=1.0, limits=limits)
        with trace:
            scores, rows = scorer.candidates(HITS)
            assert trace.waits == []
            copied = scores.cpu(), rows.cpu()
    assert trace.waits == ["blocking copy"] * 2
    assert [each.shape for each in copied] == [(20, HITS)] * 2
