"""The encode loop: vectors in order whatever the batches, nothing waits for the batch before it, memory that runs out, threads that end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quiver.encoder import Encoder, InputError, PackedBatch, init_weights, pack_ids
from quiver.retrieval.models.batches import BatchLoop, BatchSize, Copies, ModelInputs, Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import describe_tokens
from quiver.retrieval.records import Role
from tests.retrieval.models.small import CONFIG, make_colbert, make_dense, make_tokenizer

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TEXTS = ["a bird has wings", "", "wings, wings!", "a", "the bird, a bird and another bird, has wings", "fly"] * 3


@dataclass(frozen=True)
class Moved:
    """A copy of the recording device."""

    batch: PackedBatch | None = None
    kept: Tensor | None = None
    vectors: Tensor | None = None
    host: Tensor | None = None


@dataclass
class RecordedCopies(Copies):
    """A device that is as late as a GPU may be: vectors are not on the host before their copy is waited for."""

    ahead: int = 2
    behind: int = 1
    released: int = 0

    def upload(self, batch: PackedBatch, kept: Tensor | None) -> Moved:
        return Moved(batch, kept)

    def arrived(self, transfer: Moved) -> tuple[PackedBatch, Tensor | None]:
        assert transfer.batch is not None
        return transfer.batch, transfer.kept

    def download(self, vectors: Tensor) -> Moved:
        return Moved(vectors=vectors, host=torch.full_like(vectors, torch.nan))

    def finished(self, transfer: Moved) -> Tensor:
        assert transfer.host is not None
        assert transfer.vectors is not None
        with torch.inference_mode():
            return transfer.host.copy_(transfer.vectors)

    def release(self) -> None:
        self.released += 1


@dataclass
class Model:
    """A model of which every token has a vector of its own: id, position and length of the text; or the sum per text."""

    pooled: bool = False
    memory: int = 1_000_000
    """Largest batch that fits, in tokens."""
    batches: list[list[list[int]]] = field(default_factory=list)
    """Texts of the batches that succeeded."""

    def __call__(self, batch: PackedBatch) -> Tensor:
        if batch.num_tokens > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.batches.append([part.tolist() for part in batch.unpack(batch.ids)])
        vectors = torch.cat([one_by_one(text) for text in self.batches[-1]])
        return torch.stack([part.sum(0) for part in batch.unpack(vectors)]) if self.pooled else vectors


def one_by_one(text: Sequence[int]) -> Tensor:
    """The vectors of a text's tokens, (n, 3)."""
    length = len(text)
    return torch.tensor([[token, place, length] for place, token in enumerate(text)], dtype=torch.float32).reshape(length, 3)


def inputs_of(texts: Sequence[Sequence[int]], *, pooled: bool, skipped: Sequence[int] = ()) -> ModelInputs:
    tokens = describe_tokens(["x"] * len(texts), texts, [False] * len(texts))
    if pooled:
        return ModelInputs(texts, tokens, np.ones(len(texts), np.int64))
    keep = [~np.isin(np.array(text), skipped) for text in texts]
    return ModelInputs(texts, tokens, np.array([int(each.sum()) for each in keep], np.int64), keep=keep)


def loop(model: Model, copies: Copies, size: BatchSize, role: Role = "document") -> BatchLoop:
    return BatchLoop(model, dim=3, size=size, copies=copies, role=role)


def groups_of(*counts: int, seed: int = 0) -> list[list[list[int]]]:
    """Groups of random texts of 1 to 9 tokens."""
    generator = np.random.default_rng(seed)
    return [[generator.integers(0, 9, generator.integers(1, 10)).tolist() for _ in range(count)] for count in counts]


def encoded(model: Model, copies: RecordedCopies, size: BatchSize, groups: Sequence[Sequence[Sequence[int]]]) -> list[Tensor]:
    with closing(loop(model, copies, size).run(groups, lambda texts: inputs_of(texts, pooled=model.pooled, skipped=[4]))) as found:
        return [vectors for _, vectors in found]


def expected(groups: Sequence[Sequence[Sequence[int]]], *, pooled: bool) -> list[Tensor]:
    def one(text: Sequence[int]) -> Tensor:
        vectors = one_by_one(text)
        return vectors.sum(0, keepdim=True) if pooled else vectors[torch.tensor(text) != 4]

    return [torch.cat([torch.empty(0, 3), *map(one, texts)]) for texts in groups]


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("quiver-batches")]


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(("ahead", "behind"), [(2, 1), (1, 3), (0, 0)])
@pytest.mark.parametrize("groups", [groups_of(20, 1, 0, 7, 0), groups_of(), groups_of(0), groups_of(1), groups_of(40)], ids=len)
def test_vectors_are_those_of_each_text_in_order(groups: list[list[list[int]]], ahead: int, behind: int, pooled: bool) -> None:
    found = encoded(Model(pooled=pooled), RecordedCopies(ahead, behind), BatchSize(CPU, 12), groups)
    assert same(found, expected(groups, pooled=pooled))
    assert workers() == []


def test_documents_are_encoded_batch_invariantly_and_queries_are_not() -> None:
    found: list[bool] = []

    def forward(batch: PackedBatch) -> Tensor:
        found.append(batch.batch_invariant)
        assert torch.is_inference_mode_enabled()
        return torch.zeros(len(batch), 3)

    for role in ("document", "query"):
        ran = BatchLoop(forward, dim=3, size=BatchSize(CPU, 9), copies=Copies(CPU), role=role)
        list(ran.run([[[1]]], lambda texts: inputs_of(texts, pooled=True)))
    assert found == [True, False]
    assert not torch.is_inference_mode_enabled()


def test_key_lengths_follow_their_texts() -> None:
    found: dict[int, int] = {}

    def forward(batch: PackedBatch) -> Tensor:
        found.update(zip(batch.ids[batch.cu_seqlens[:-1].long()].tolist(), batch.key_lengths or batch.lengths, strict=True))
        return torch.zeros(batch.num_tokens, 3)

    texts = [[row] * length for row, length in enumerate((3, 5, 2, 5))]
    inputs = ModelInputs(texts, describe_tokens("abcd", texts, [False] * 4), np.array([3, 5, 2, 5]), [1, 2, 2, 5])
    list(BatchLoop(forward, dim=3, size=BatchSize(CPU, 6), copies=Copies(CPU), role="query").run([inputs], lambda each: each))
    assert found == {0: 1, 1: 2, 2: 2, 3: 5}


# Memory that runs out.


@pytest.mark.parametrize("pooled", [False, True])
def test_a_batch_that_does_not_fit_is_halved_once_and_nothing_is_encoded_twice(pooled: bool, caplog: pytest.LogCaptureFixture) -> None:
    groups = groups_of(20, 5, 20)
    copies, size = RecordedCopies(), BatchSize(CPU, 40)
    model = Model(pooled=pooled, memory=25)
    with caplog.at_level(logging.WARNING):
        found = encoded(model, copies, size, groups)
    assert same(found, expected(groups, pooled=pooled))
    first = max(tokens for tokens in accumulate(sorted(map(len, groups[0]), reverse=True)) if tokens <= 40)
    assert (size.tokens, copies.released) == (first // 2, 1)
    assert caplog.messages == [f"cpu: out of memory with a batch of {first} tokens; going on with {size.tokens}"]
    assert sorted(text for texts in model.batches for text in texts) == sorted(text for texts in groups for text in texts)
    assert all(sum(map(len, texts)) <= size.tokens for texts in model.batches)
    # The next call begins with the smaller batches.
    assert same(encoded(model, copies, size, groups), expected(groups, pooled=pooled))
    assert copies.released == 1


def test_vectors_finished_before_memory_ran_out_are_delivered() -> None:
    groups = [[[1] * 9], [[2] * 9], [[3] * 9], [[4] * 60, [5] * 30, [6] * 30]]
    with closing(
        loop(Model(memory=40), RecordedCopies(), BatchSize(CPU, 100)).run(groups, lambda texts: inputs_of(texts, pooled=False))
    ) as found:
        delivered = []
        with pytest.raises(InputError):
            delivered.extend(vectors for _, vectors in found)
    assert same(delivered, expected(groups[:3], pooled=False))
    assert workers() == []


def test_memory_that_runs_out_again_is_reported_in_one_line() -> None:
    with pytest.raises(
        InputError, match=r"^cpu: out of memory with batches of \d+ tokens, after they were halved once; pass a smaller --batch-tokens"
    ):
        encoded(Model(memory=10), RecordedCopies(), BatchSize(CPU, 100), groups_of(60))
    single = [[[1] * 30]]  # cannot be divided
    with pytest.raises(InputError, match="out of memory with batches of 30 tokens"):
        encoded(Model(memory=20), RecordedCopies(), BatchSize(CPU, 100), single)


# Threads that end.


def test_an_error_of_the_tokenizer_reaches_the_caller_after_the_groups_before_it() -> None:
    def tokenize(texts: list[list[int]]) -> ModelInputs:
        if len(texts) == 2:
            raise ValueError("text 7 must be a string")
        return inputs_of(texts, pooled=False)

    found = loop(Model(), RecordedCopies(behind=0), BatchSize(CPU, 100)).run(groups_of(1, 1, 2, 1), tokenize)
    assert len([next(found), next(found)]) == 2
    with pytest.raises(ValueError, match="text 7"):
        next(found)
    assert workers() == []


@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), KeyboardInterrupt()])
def test_an_error_of_the_model_ends_the_thread(error: BaseException) -> None:
    def forward(batch: PackedBatch) -> Tensor:
        raise error

    ran = BatchLoop(forward, dim=3, size=BatchSize(CPU, 9), copies=RecordedCopies(), role="query")
    with pytest.raises(type(error)):
        list(ran.run(groups_of(*[5] * 9), lambda texts: inputs_of(texts, pooled=False)))
    assert workers() == []


def test_an_abandoned_consumer_ends_the_thread() -> None:
    found = loop(Model(), RecordedCopies(), BatchSize(CPU, 9)).run(groups_of(*[5] * 50), lambda texts: inputs_of(texts, pooled=False))
    next(found)
    assert workers() != []
    found.close()
    assert workers() == []


# Models.


def model_of(kind: str, *, batch_tokens: int | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32) -> BiEncoder | ColBERT:
    encoder, words = init_weights(Encoder(CONFIG), seed=1).eval().to(device, dtype), make_tokenizer([*TEXTS, "query: passage:"])
    prompts: Any = {"query_prompt": "query: ", "document_prompt": "passage: "}
    if kind == "dense":
        more = {"normalize": True, "projections": (Projection(32, 16),), "include_prompt": False}
        return make_dense(words, encoder, batch_tokens=batch_tokens, **more, **prompts)
    return make_colbert(words, encoder, batch_tokens=batch_tokens, document_length=30, prompts=prompts)


@torch.inference_mode()
def plainly(model: BiEncoder | ColBERT, texts: Sequence[str], role: Role) -> list[Tensor]:
    """The vectors of each text, encoded alone."""
    ids = model.tokenize(texts, role).ids
    if isinstance(model, BiEncoder):
        batches = [pack_ids([text]) for text in ids]
        return [model.pool(model.encoder(batch), batch, skip=model.skipped_tokens(role)).cpu() for batch in batches]
    keys = None
    if role == "query":
        ids, keys = model.expand(ids)
    alone = [pack_ids([text], key_lengths=None if keys is None else [keys[row]]) for row, text in enumerate(ids)]
    vectors = [model.project(model.encoder(batch)).cpu() for batch in alone]
    if role == "query":
        return vectors
    return [each[[token not in model.skipped_ids for token in text]] for each, text in zip(vectors, ids, strict=True)]


def check_like_plain(model: BiEncoder | ColBERT, role: Role, tolerance: float) -> None:
    whole = model.encode_texts(TEXTS, role)
    wanted = plainly(model, TEXTS, role)
    for found, alone in zip(whole.vectors, wanted, strict=True):
        np.testing.assert_allclose(found.reshape(alone.shape), alone.numpy(), atol=tolerance)
    chunks = [TEXTS[:5], [], TEXTS[5:6], TEXTS[6:]]
    ticks: list[int] = []
    parts = list(model.encode_chunks(chunks, role, advance=ticks.append))
    assert sum(ticks) == len(TEXTS)
    assert [part.counts for part in parts] == [model.encode_texts(chunk, role).counts for chunk in chunks]
    flat = [vectors for part in parts for vectors in part.vectors]
    for found, alone in zip(flat, wanted, strict=True):
        np.testing.assert_allclose(found.reshape(alone.shape), alone.numpy(), atol=tolerance)


@pytest.mark.parametrize("role", ["query", "document"])
@pytest.mark.parametrize("kind", ["dense", "colbert"])
@pytest.mark.parametrize("batch_tokens", [None, 40, 1])
def test_models_encode_as_one_text_at_a_time(kind: str, role: Role, batch_tokens: int | None) -> None:
    check_like_plain(model_of(kind, batch_tokens=batch_tokens), role, 1e-6)


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_no_texts_and_one_text(kind: str) -> None:
    model = model_of(kind)
    assert len(model.encode_texts([], "document").vectors) == 0
    assert model.encode_texts([], "document").counts.texts == 0
    assert len(model.encode_texts(["a bird"], "document").vectors) == 1
    assert list(model.encode_chunks([], "query")) == []


def test_token_ids_belong_to_the_vectors() -> None:
    model = model_of("colbert")
    assert isinstance(model, ColBERT)
    encoding = model.encode_texts(TEXTS, "document")
    assert encoding.token_ids is not None
    assert [len(ids) for ids in encoding.token_ids] == [len(vectors) for vectors in encoding.vectors]
    wanted = [[token for token in text if token not in model.skipped_ids] for text in model.tokenize(TEXTS, "document").ids]
    assert [ids.tolist() for ids in encoding.token_ids] == wanted == [ids.tolist() for ids in model.document_token_ids(TEXTS)]
    assert any(len(kept) < len(text) for kept, text in zip(wanted, model.tokenize(TEXTS, "document").ids, strict=True))


@pytest.mark.parametrize("tokens", [0, -5])
def test_a_batch_size_below_one_is_refused(tokens: int) -> None:
    with pytest.raises(InputError, match=f"batch_tokens must be >= 1, got {tokens}"):
        model_of("dense", batch_tokens=tokens)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("role", ["query", "document"])
@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_a_gpu_encodes_as_one_text_at_a_time(kind: str, role: Role) -> None:
    check_like_plain(model_of(kind, batch_tokens=40, device="cuda"), role, 1e-4)


def test_truncated_texts_are_logged_once_a_call(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quiver.retrieval.models.encoding"):
        model_of("dense", batch_tokens=20).encode_texts(["a bird has wings " * 40, "a", "wings " * 90], "document")
    assert caplog.messages == ["2 of 3 texts were truncated to the model's maximum length"]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_a_gpu_never_makes_the_loop_wait(kind: str) -> None:
    model, texts = model_of(kind, batch_tokens=200, device="cuda", dtype=torch.bfloat16), TEXTS * 40
    model.encode_texts(texts, "document")  # loads kernels and libraries
    torch.cuda.set_sync_debug_mode("error")  # raises where the host waits for the device, except for events
    try:
        model.encode_texts(texts, "document")
        list(model.encode_chunks([texts[:90], texts[90:]], "document"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert workers() == []
