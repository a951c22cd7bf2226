"""Exact search as a GPU runs it, without one: PyTorch's fake tensors carry shapes, dtypes and the device ``cuda``, and no numbers."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quiver.retrieval.index.on_device import DeviceScorer, DeviceVectors
from quiver.retrieval.index.ranking import FirstPass, SearchLimits
from quiver.retrieval.records import MatrixRows
from tests.fake_cuda import Trace
from tests.largest_tensor import LargestTensor
from tests.test_fake_cuda import trace

__all__ = ["trace"]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

WIDTH, VECTORS, QUERIES, TOKENS, HITS = 64, 3000, 20, 32, 100


class Watched(LargestTensor):
    """Answers the one number that is read from memory of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "cpu":
            return TOKENS
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("first_pass", ["float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [False, True], ids=["dense", "tokens"])
def test_an_exact_search_waits_only_for_its_results_and_holds_no_similarities(trace: Trace, first_pass: FirstPass, tokens: bool) -> None:
    """Ten blocks. No tensor is larger than a block of documents or the queries: products of tokens are never stored."""
    limits = SearchLimits(block_bytes=4 * WIDTH * VECTORS // 10, first_pass=first_pass)
    queries = [np.ones((TOKENS, WIDTH), np.float32)] * QUERIES if tokens else np.ones((QUERIES, WIDTH), np.float32)
    offsets = np.arange(0, VECTORS + 1, 3) if tokens else None
    documents = VECTORS // 3 if tokens else VECTORS
    watched = Watched()
    with FakeTensorMode(allow_non_fake_inputs=True):
        resident = torch.empty(VECTORS, WIDTH, device="cuda")
        vectors = DeviceVectors(MatrixRows(np.zeros((0, WIDTH))), resident.device, resident)
        scorer = DeviceScorer(vectors, queries, offsets, documents=documents, largest_norm=1.0, limits=limits)
        with trace, watched:
            scores, rows = scorer.candidates(HITS)
        assert trace.waits == []
        with trace:
            copied = scores.cpu(), rows.cpu()
    assert trace.waits == ["blocking copy"] * 2
    assert [each.shape for each in copied] == [(QUERIES, HITS)] * 2
    assert watched.elements <= WIDTH * max(VECTORS // 10, QUERIES * TOKENS)  # the products are QUERIES x TOKENS x VECTORS / 10
    assert (trace.names.count("mm"), trace.names.count("ragged_kernel")) == ((0, 10) if tokens else (10, 0))
    assert trace.names.count("topk") == 10 + 9
