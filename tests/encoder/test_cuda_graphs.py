"""Buckets of CUDA graphs and how batches are filled up to them; on a GPU, graphs against the encoder itself."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quiver.encoder import Encoder, EncoderConfig, InputError, PackedBatch, init_weights, pack_ids
from quiver.encoder.gpu import cuda_graphs as module
from quiver.encoder.gpu.cuda_graphs import Bucket, GraphedEncoder, bucket_of, bucket_size, filled_offsets

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CONFIG = EncoderConfig.modernbert(
    vocab_size=64, hidden_size=64, num_heads=2, intermediate_size=96, layer_types=["global", "local"], window=16, max_positions=200
)


def encoder_on(device: str, dtype: torch.dtype = torch.float32) -> Encoder:
    return init_weights(Encoder(CONFIG), seed=0).to(device, dtype).eval()


def texts(*lengths: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(sum(lengths))
    return pack_ids([torch.randint(0, 64, (length,), generator=generator).tolist() for length in lengths])


@given(st.integers(2, 10**7))
def test_a_bucket_is_at_most_half_too_large(number: int) -> None:
    assert number <= bucket_size(number) <= max(number * 1.5, 2)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40))
def test_a_batch_fits_its_bucket(lengths: list[int]) -> None:
    batch = pack_ids([[1] * length for length in lengths])
    bucket = bucket_of(batch.offsets, batch.max_seqlen, 200)
    offsets = filled_offsets(batch.offsets, bucket)
    sizes = [end - start for start, end in pairwise(offsets)]
    assert offsets[: len(batch.offsets)] == batch.offsets
    assert len(sizes) == bucket.sequences
    assert offsets[-1] == bucket.tokens
    assert 0 <= min(sizes) <= max(sizes) <= bucket.max_seqlen <= 200


def test_there_are_few_buckets() -> None:
    """The point of it: batches of 1 to 2,048 short tokens share few graphs."""
    buckets = {bucket_of([0, *range(length, tokens + 1, length)], length, 512) for length in (8, 32, 64) for tokens in range(64, 2049, 64)}
    assert len(buckets) <= 45
    assert all(bucket.max_seqlen == 64 for bucket in buckets)


@pytest.mark.parametrize("lengths", [(1,), (70, 20), (200,), (5,) * 30, (200, 130, 3)], ids=str)
@torch.inference_mode()
def test_filling_up_changes_nothing(lengths: tuple[int, ...]) -> None:
    encoder, batch = encoder_on("cpu"), texts(*lengths)
    bucket = bucket_of(batch.offsets, batch.max_seqlen, CONFIG.max_positions)
    offsets = filled_offsets(batch.offsets, bucket)
    static = module._empty_batch(bucket, offsets, torch.device("cpu"))
    module._fill(static, batch, offsets)
    torch.testing.assert_close(encoder(static)[: batch.num_tokens], encoder(batch), atol=2e-6, rtol=0)


class FakeRecording:
    """Runs where a graph would be replayed, so that all around it runs without a GPU."""

    made = 0

    def __init__(self, encoder: Encoder, batch: PackedBatch, pool: object) -> None:
        FakeRecording.made += 1
        self.encoder, self.batch, self.graph = encoder, batch, self

    def pool(self) -> int:
        return 1

    def replay(self) -> Tensor:
        offsets = tuple(self.batch.cu_seqlens.tolist())  # a graph knows the lengths from here alone
        states: Tensor = self.encoder(
            PackedBatch(self.batch.ids, self.batch.cu_seqlens, offsets, self.batch.max_seqlen, self.batch.positions, self.batch.rows)
        )
        return states


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> GraphedEncoder:
    monkeypatch.setattr(module, "check_recordable", lambda encoder: None)
    monkeypatch.setattr(module, "Recording", FakeRecording)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    FakeRecording.made = 0
    return GraphedEncoder(encoder_on("cpu"), max_tokens=300, max_graphs=2)


@torch.inference_mode()
def test_batches_of_a_bucket_share_a_recording(graphed: GraphedEncoder) -> None:
    for lengths in [(70, 20), (80, 10), (66, 1), (90,), (65, 4)]:
        batch = texts(*lengths)
        torch.testing.assert_close(graphed(batch), graphed.encoder(batch), atol=2e-6, rtol=0)
    assert FakeRecording.made == 2  # (90,) fills up to fewer sequences


@torch.inference_mode()
def test_results_survive_the_next_run(graphed: GraphedEncoder) -> None:
    first, second = texts(70, 20), texts(80, 10)
    states = graphed(first)
    graphed(second)
    torch.testing.assert_close(states, graphed.encoder(first), atol=2e-6, rtol=0)


def test_the_graph_unused_for_longest_is_dropped(graphed: GraphedEncoder) -> None:
    small, middle, large = texts(10), texts(100), texts(100, 90)
    for batch in (small, middle, small, large, small, middle):
        graphed(batch)
    assert FakeRecording.made == 4  # small, middle, large, and middle again
    assert len(graphed._recordings) == 2


@torch.inference_mode()
def test_what_is_not_recorded(graphed: GraphedEncoder) -> None:
    reading = pack_ids([[1] * 30, [2] * 40], key_lengths=[30, 8])
    for batch in (texts(200, 101), reading):
        torch.testing.assert_close(graphed(batch), graphed.encoder(batch), atol=0, rtol=0)
    with pytest.raises(InputError, match="a sequence has 201 tokens, this encoder has 200 positions"):
        graphed(texts(201))
    assert FakeRecording.made == 0


def test_a_cpu_is_refused() -> None:
    with pytest.raises(InputError, match=r"CUDA graphs need an encoder on a CUDA device, this one is on cpu: move it with .to\('cuda'\)"):
        GraphedEncoder(encoder_on("cpu"))
    with pytest.raises(ValueError, match="max_tokens and max_graphs must be >= 1, got 0 and 32"):
        GraphedEncoder(encoder_on("cpu"), max_tokens=0)


@pytest.mark.gpu
@needs_cuda
def test_float32_and_training_are_refused() -> None:
    with pytest.raises(InputError, match="CUDA graphs need flash attention, but float32 weights here get 'packed'"):
        GraphedEncoder(encoder_on("cuda"))
    with pytest.raises(ValueError, match="CUDA graphs are for inference"):
        GraphedEncoder(encoder_on("cuda", torch.bfloat16).train())


@pytest.mark.gpu
@needs_cuda
@torch.inference_mode()
def test_graphs_are_the_encoder() -> None:
    encoder = encoder_on("cuda", torch.bfloat16)
    graphed = GraphedEncoder(encoder, max_graphs=3)
    for lengths in [(1,), (70, 20), (80, 10), (200,), (5,) * 30, (200, 130, 3), (70, 20), (2,)]:
        batch = texts(*lengths)
        torch.testing.assert_close(graphed(batch), encoder(batch), atol=2e-2, rtol=2e-2)
    assert len(graphed._recordings) == 3
    assert all(isinstance(bucket, Bucket) for bucket in graphed._recordings)
