"""The CUDA path without a GPU: FakeTensorMode traces shapes, so that operators, dtypes and waits are seen and no number is computed.

Triton kernels cannot be launched on such tensors, so their names are recorded; `tests/test_triton.py` compiles and runs them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quiver.encoder import Encoder, EncoderConfig, PackedBatch, pack_ids
from quiver.encoder.attention import dispatch
from quiver.encoder.model import GRAPHS_VARIABLE
from quiver.encoder.packing import copy_to
from quiver.retrieval.models.batches import BatchLoop, BatchSize, Copies, ModelInputs, bytes_per_token, pool, to_pinned
from quiver.retrieval.models.encoding import describe_tokens
from tests.fake_cuda import Operation, Trace, fake_batch, fake_h100
from tests.largest_tensor import LargestTensor

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """An H100 that is not there, and what runs on it."""
    found = Trace()
    fake_h100(monkeypatch, lambda name: found.current.append(Operation(name)))
    # A random number has no value in this mode.
    monkeypatch.setattr("quiver.encoder.gpu.triton_norms.new_seed", lambda: 5)
    monkeypatch.setenv(GRAPHS_VARIABLE, "0")  # a graph is captured on a real device only
    yield found
    dispatch.choose_backend.cache_clear()


FAMILIES: dict[str, dict[str, Any]] = {
    "modernbert": {},
    "bert": {
        "norm_position": "post",
        "final_norm": False,
        "first_attention_norm": True,
        "positions": "absolute",
        "embedding_norm": True,
        "mlp": "plain",
        **dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_input_bias", "mlp_output_bias", "norm_bias"), True),
    },
}


def config(layers: int, **changes: Any) -> EncoderConfig:
    kinds = ["global" if layer % 3 == 0 else "local" for layer in range(layers)]
    return replace(
        EncoderConfig.modernbert(vocab_size=300, hidden_size=768, num_heads=12, intermediate_size=1152, layer_types=kinds), **changes
    )


@contextlib.contextmanager
def fake_encoder(layers: int, family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Iterator[tuple[Encoder, FakeTensorMode]]:
    """An encoder on the GPU that is not there, in the mode in which its tensors can be used."""
    before = torch.get_default_dtype()
    with FakeTensorMode() as mode:
        torch.set_default_dtype(dtype)
        try:
            with torch.device("cuda"):
                encoder = Encoder(config(layers, **FAMILIES[family], **changes)).eval()
        finally:
            torch.set_default_dtype(before)
        yield encoder, mode


def run(trace: Trace, layers: int, family: str, lengths: Sequence[int], key_lengths: Sequence[int] | None = None) -> Counter[str]:
    """Trace one forward pass; the number of launches by name."""
    trace.clear()
    packed = pack_ids([[7] * length for length in lengths], key_lengths=key_lengths)
    with fake_encoder(layers, family) as (encoder, mode), torch.inference_mode():
        batch = fake_batch(mode, packed)
        with trace:
            states = encoder(batch)
    assert (states.shape, states.dtype, states.device.type) == ((sum(lengths), 768), torch.bfloat16, "cuda")
    return Counter(trace.names)


@pytest.mark.parametrize("family", FAMILIES)
def test_inference_uses_flash_attention_and_never_waits(trace: Trace, family: str) -> None:
    run(trace, 4, family, [300, 20, 77])
    assert trace.attention == {"_flash_attention_forward"}
    assert trace.waits == []
    # Ids, borders and positions go to the device together; nothing comes back.
    assert trace.names.count("upload") == 1, trace.names
    assert trace.names.count("download") == 0, trace.names


# Queries shorter and longer than half a window, alone and beside documents, as in training; how many calls a layer makes for them.
EXPANDED = [
    ([32] * 3, [9, 32, 20], 1),
    ([64] * 3, [9, 20, 5], 1),
    ([128, 128], [20, 100], 1),
    ([128, 128, 300, 77], [20, 100, 300, 77], 2),
    ([300, 128, 77], [300, 9, 77], 3),
]


@pytest.mark.parametrize(("lengths", "key_lengths", "calls"), EXPANDED)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("head_width", [24, 32, 64, 96, 128])
def test_unattended_query_expansion_uses_flash_attention(
    trace: Trace, lengths: list[int], key_lengths: list[int], calls: int, training: bool, head_width: int
) -> None:
    packed = pack_ids([[7] * length for length in lengths], key_lengths=key_lengths)
    with FakeTensorMode() as mode:
        with torch.device("cuda"):
            encoder = Encoder(config(4, num_heads=768 // head_width, attention_dropout=0.1)).train(training)
        batch = fake_batch(mode, packed)
        with trace, torch.autocast("cuda", torch.bfloat16), torch.inference_mode(not training):
            states = encoder(batch)
    assert states.shape == (sum(lengths), 768)
    assert states.requires_grad == training
    assert trace.attention == {"_flash_attention_forward"}
    assert trace.names.count("_flash_attention_forward") == 4 * calls
    assert trace.waits == []


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_width", "alibi"),
    [(torch.float64, 64, False), (torch.float32, 26, False), (torch.float32, 64, True), (torch.bfloat16, 64, True)],
)
def test_attention_without_a_fitting_kernel_never_writes_all_weights(
    trace: Trace, dtype: torch.dtype, head_width: int, alibi: bool, gradients: bool, window: int | None
) -> None:
    lengths, heads = [8192, 8192, 300], 4
    packed = pack_ids([[7] * length for length in lengths])
    with FakeTensorMode() as mode:
        batch = fake_batch(mode, packed).to("cuda")
        q, k, v = torch.empty(sum(lengths), 3, heads, head_width, dtype=dtype, device="cuda").requires_grad_(gradients).unbind(1)
        slopes = torch.empty(heads, device="cuda") if alibi else None
        assert dispatch.choose_backend(dispatch.describe(q, batch, window=window, slopes=slopes, gradients=gradients)) == "packed"
        with LargestTensor() as largest, torch.set_grad_enabled(gradients):
            mixed = dispatch.attend(q, k, v, batch, window, slopes=slopes)
    assert mixed.shape == q.shape
    # A block of 32 queries in a local layer sees 160 keys: 160 weights, and five keys per query.
    local = sum(lengths) * heads * max(160, 5 * head_width) * 1.01
    assert sum(lengths) * heads * head_width <= largest.elements <= (2**24 if window is None else local) < heads * 8192**2


@pytest.mark.parametrize(("family", "dropout", "kernels"), [("modernbert", 0.0, 9), ("modernbert", 0.1, 9), ("bert", 0.1, 8)])
def test_training_under_autocast_converts_each_matrix_once_and_no_hidden_states(
    trace: Trace, family: str, dropout: float, kernels: int
) -> None:
    """A layer takes as many kernels as in inference, with dropout too, and one cast for each of its four matrices."""
    packed, counts = pack_ids([[7] * length for length in (300, 20, 77)]), []
    for layers in (3, 6):
        trace.clear()
        changes = {"attention_output_dropout": dropout, "mlp_output_dropout": dropout}
        with fake_encoder(layers, family, torch.float32, **changes) as (encoder, mode):
            batch = fake_batch(mode, packed)
            with torch.autocast("cuda", torch.bfloat16), trace:
                states = encoder.train()(batch)
        assert (states.dtype, states.requires_grad) == (torch.float32, True)
        assert trace.waits == []
        matrices = [tuple(each.shape) for name, each in encoder.layers.named_parameters() if each.ndim > 1]
        last = [(397, 768)] if family == "bert" else []  # without a final norm, the last layer's norm is what the encoder returns
        assert sorted(trace.casts) == sorted(matrices + last)
        counts.append(Counter(trace.names))
    added = counts[1] - counts[0]
    biases = 12 if family == "bert" else 0  # autocast converts those too
    assert added["_to_copy"] == 12 + biases
    assert (added.total() - added["_to_copy"]) == 3 * kernels, dict(added)


def test_a_copy_that_waits_is_seen(trace: Trace) -> None:
    with FakeTensorMode(), trace:
        pageable, pinned = torch.empty(20), torch.empty(20, pin_memory=True)
        moved = pinned[4:8].to("cuda", non_blocking=True)
        pinned[:4].copy_(moved, non_blocking=True)
        assert trace.waits == []
        pageable.to("cuda", non_blocking=True)
        pinned.to("cuda")
        moved.cpu()
        pageable[:4].copy_(moved, non_blocking=True)
    assert trace.waits == ["blocking copy"] * 4


@dataclass(frozen=True)
class FakeCopies(Copies):
    """The copies of a GPU without its streams and events, which FakeTensorMode does not have."""

    ahead: int = 0
    behind: int = 1

    def upload(self, batch: PackedBatch, kept: Tensor | None) -> Any:
        return batch.to("cuda"), None if kept is None else copy_to("cuda", kept)[0]

    def arrived(self, transfer: Any) -> tuple[PackedBatch, Tensor | None]:
        batch, kept = transfer
        return batch, kept

    def download(self, vectors: Tensor) -> Any:
        return to_pinned(vectors)

    def finished(self, transfer: Any) -> Tensor:
        vectors: Tensor = transfer
        return vectors

    def release(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_the_encode_loop_never_waits_and_copies_each_batch_once(trace: Trace, kind: str) -> None:
    texts = [[7] * length for length in (300, 20, 77, 210, 5)]
    counts = describe_tokens(["x"] * 5, texts, [False] * 5)
    keep = [np.arange(len(text)) % 7 > 0 for text in texts]
    dense = ModelInputs(texts, counts, np.ones(5, np.int64))
    late = ModelInputs(texts, counts, np.array([int(each.sum()) for each in keep]), keep=keep)
    with fake_encoder(2, "modernbert") as (encoder, _):
        projection = torch.nn.Linear(768, 128, device="cuda")

        def forward(batch: PackedBatch) -> Tensor:
            states = encoder(batch)
            return pool(states, batch, "mean") if kind == "dense" else torch.nn.functional.normalize(projection(states.float()))

        loop = BatchLoop(
            forward, dim=768 if kind == "dense" else 128, size=BatchSize(encoder.device, 320), copies=FakeCopies(), role="query"
        )
        with trace:
            found = [vectors for _, vectors in loop.run([dense if kind == "dense" else late], lambda inputs: inputs)]
    assert [vectors.shape for vectors in found] == [(5, 768) if kind == "dense" else (int(late.vectors.sum()), 128)]
    assert trace.waits == []
    assert trace.attention == {"_flash_attention_forward"}
    batches = trace.names.count("_flash_attention_forward") // 2
    assert batches == 2
    assert trace.names.count("upload") == batches * (1 if kind == "dense" else 2)
    assert trace.names.count("download") == batches


class Peak(TorchDispatchMode):
    """Largest memory of the device that is in use at one time, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_of_a_token_is_estimated_within_a_factor_of_two(trace: Trace, family: str) -> None:
    def peak(lengths: list[int]) -> int:
        with fake_encoder(3, family) as (encoder, mode), torch.inference_mode():
            batch, used = fake_batch(mode, pack_ids([[7] * length for length in lengths])), Peak()
            estimates.append(bytes_per_token(encoder, 768))
            with used:
                moved = batch.to("cuda")
                pool(encoder(moved), moved, "mean", skip=2)
        return used.most

    estimates: list[int] = []
    measured = (peak([500] * 8) - peak([500] * 4)) / 2000
    assert measured <= estimates[0] <= 2 * measured, (measured, estimates[0])
