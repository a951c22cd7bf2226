"""CUDA graphs without a GPU: passes are traced to a graph of operators, which freezes all that the host decides, as a capture does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from quiver.encoder import Encoder, EncoderConfig, PackedBatch, init_weights, pack_ids
from quiver.encoder.attention import dispatch
from quiver.encoder.gpu.graphs import TOKENS, Bucket, EncoderGraphs, Recording, StaticBatch
from quiver.encoder.lora import add_lora, merge_lora
from quiver.encoder.model import GRAPHS_VARIABLE
from tests.encoder.test_flash import flash_operator_on_cpu


def made(**changes: Any) -> Encoder:
    sizes = {"vocab_size": 64, "hidden_size": 48, "num_heads": 2, "intermediate_size": 64, "window": 140, "max_positions": 300}
    kinds = ["global", "local", "local"]
    return init_weights(Encoder(EncoderConfig.modernbert(layer_types=kinds, **{**sizes, **changes})), seed=0).eval()


def batch_of(lengths: tuple[int, ...], key_lengths: tuple[int, ...] | None = None, *, seed: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    return pack_ids([torch.randint(1, 64, (length,), generator=generator).tolist() for length in lengths], key_lengths=key_lengths)


def trace(function: Callable[[], Tensor]) -> Recording:
    """A graph of the operators that a function calls; it reads and writes the tensors that the function did."""
    graph = make_fx(function)()
    output = graph()
    return Recording(lambda: output.copy_(graph()), output)


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every attention call is PyTorch's flash operator, emulated for CPU tensors."""
    monkeypatch.setenv("QUIVER_ATTENTION", "aten_flash")
    monkeypatch.setattr(dispatch, "choose_backend", lambda call, override: "aten_flash")
    with flash_operator_on_cpu():
        yield


# Batches of one bucket: the number of sequences, their lengths and what is attended to differ.
SHARED = [
    (Bucket(1, 32, 64, False), [((20,), None), ((32,), None), ((1,), None)]),
    (Bucket(1, 256, 256, False), [((200,), None), ((256,), None), ((193,), None)]),
    (Bucket(64, 192, 64, False), [((40, 60, 60), None), ((64, 64, 60, 4), None), ((50, 50, 50, 2), None)]),
    (Bucket(64, 384, 512, False), [((1, 260, 7), None), ((129, 200, 3), None), ((130, 120, 60, 74), None)]),
    (Bucket(64, 128, 64, True), [((32, 32, 32, 32), (9, 31, 1, 5)), ((32, 32, 40), (9, 20, 1)), ((32, 64, 32), (9, 64, 32))]),
    (Bucket(64, 384, 512, True), [((250, 128), (7, 20)), ((200, 128), (200, 1)), ((256, 128), (1, 1))]),
]


@pytest.mark.parametrize(("bucket", "layouts"), SHARED, ids=lambda value: str(tuple(value)) if isinstance(value, Bucket) else None)
@pytest.mark.usefixtures("flash_on_cpu")
def test_one_graph_gives_the_states_of_every_layout_of_its_bucket(
    bucket: Bucket, layouts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = made()
    captures: list[Callable[[], Tensor]] = []

    def record(function: Callable[[], Tensor]) -> Recording:
        captures.append(function)
        return trace(function)

    graphs, results = EncoderGraphs(record), []
    batches = [batch_of(*layout, seed=seed) for seed, layout in enumerate(layouts)]
    with torch.inference_mode():
        assert graphs.encode(encoder, batches[0]) is None  # its bucket is captured when it comes again
        for batch in [*batches, *batches[::-1]]:
            assert Bucket.of(batch) == bucket
            results.append((batch, graphs.encode(encoder, batch)))
    assert graphs.buckets == (bucket,)
    assert len(captures) == 1
    monkeypatch.undo()
    for batch, states in results:  # all at the end: a later replay must not have changed them
        assert states is not None
        torch.testing.assert_close(states, encoder(batch), atol=2e-5, rtol=0)


def test_a_forward_hook_fires_in_every_pass(flash_on_cpu: None) -> None:
    encoder, graphs, batch = made(), EncoderGraphs(trace), batch_of((20,))
    with torch.inference_mode():
        assert [graphs.encode(encoder, batch) is not None for _ in range(2)] == [False, True]
        for hooked in (encoder.layers[1].attention.out, encoder.layers[2]):
            handle = hooked.register_forward_hook(lambda *_: None)
            assert graphs.encode(encoder, batch) is None
            handle.remove()
            assert graphs.encode(encoder, batch) is not None


def test_a_bucket_is_padded_by_at_most_a_third_or_32_tokens() -> None:
    for tokens in range(1, TOKENS[-1] + 1):
        bucket = Bucket.of(batch_of((tokens,)))
        assert bucket is not None
        assert bucket.tokens - tokens < max(32, bucket.tokens / 3 + 1)
    assert Bucket.of(batch_of((2000, 49))) is None
    assert Bucket.of(batch_of((1,) * 65)) is None


def test_every_token_of_a_bucket_lies_in_a_sequence_of_no_more_than_its_length() -> None:
    """Kernels read whole blocks, so a token that no sequence computes could hold NaN and reach its neighbours."""
    for lengths in ((1,), (2,) * 33, (300, 3), (64,) * 32, (700, 700, 1), (1, 1, 1030)):
        batch = batch_of(lengths)
        bucket = Bucket.of(batch)
        assert bucket is not None
        static = StaticBatch(bucket, torch.device("cpu"))
        for each in (batch_of((bucket.tokens,)) if bucket.tokens <= bucket.max_seqlen else batch, batch):  # what was there before is gone
            static.fill(each)
        found = static.batch.cu_seqlens.diff()
        assert found[: len(lengths)].tolist() == list(lengths)
        assert found.sum() == bucket.tokens
        assert found.min() >= 0
        assert found.max() <= bucket.max_seqlen
        assert static.batch.positions[batch.num_tokens :].abs().sum() == 0


def test_attention_that_plans_on_the_host_has_no_graph() -> None:
    encoder, graphs, batch = made(), EncoderGraphs(trace), batch_of((20,))
    with torch.inference_mode():
        assert [graphs.encode(encoder, batch) for _ in range(3)] == [None] * 3
    assert not graphs.buckets


def test_no_memory_for_a_graph_leaves_the_plain_pass(flash_on_cpu: None, caplog: pytest.LogCaptureFixture) -> None:
    def record(function: Callable[[], Tensor]) -> Recording:
        raise torch.OutOfMemoryError

    encoder, graphs, batch = made(), EncoderGraphs(record), batch_of((20,))
    with torch.inference_mode():
        assert [graphs.encode(encoder, batch) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "no memory for a CUDA graph of 32 tokens" in caplog.text


def test_copies_start_without_graphs(flash_on_cpu: None) -> None:
    encoder, graphs, batch = made(), EncoderGraphs(trace), batch_of((20,))
    with torch.inference_mode():
        graphs.encode(encoder, batch)
        graphs.encode(encoder, batch)
    assert len(graphs.buckets) == 1
    for twin in (copy.deepcopy(graphs), pickle.loads(pickle.dumps(graphs))):  # noqa: S301  # made here
        assert not twin.buckets


def test_graphs_are_forgotten_when_weights_move_or_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = made()
    calls: list[Encoder] = []
    monkeypatch.setattr(Encoder, "forget_graphs", lambda encoder: calls.append(encoder))
    changes = (encoder.double, lambda: add_lora(encoder, rank=2, alpha=2.0, dropout=0.0, seed=0), lambda: merge_lora(encoder))
    for change in changes:
        calls.clear()
        change()
        assert calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("bucket", "layouts"), SHARED, ids=lambda value: str(tuple(value)) if isinstance(value, Bucket) else None)
def test_graphs_on_a_gpu_give_the_states_of_plain_passes(bucket: Bucket, layouts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = made(hidden_size=128).to("cuda", torch.bfloat16)
    batches = [batch_of(*layout, seed=seed) for seed, layout in enumerate(layouts)]
    monkeypatch.setenv(GRAPHS_VARIABLE, "0")
    with torch.inference_mode():
        plain = [encoder(batch) for batch in batches]
        monkeypatch.delenv(GRAPHS_VARIABLE)
        for _ in range(3):
            found = [encoder(batch) for batch in batches]
    for one, other in zip(found, plain, strict=True):
        assert (one.float() - other.float()).abs().max() <= 2**-5 * other.float().abs().max()
    assert encoder._graphs is not None
    assert encoder._graphs.buckets == (bucket,)
    torch.cuda.synchronize()
    moved = encoder.to("cpu").to("cuda")  # the graphs of the old weights are forgotten
    with torch.inference_mode():
        for weight in moved.parameters():
            weight.zero_()
        assert all(moved(batch).abs().max() == 0 for batch in batches for _ in range(3))
