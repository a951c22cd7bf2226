"""The native modules: nothing padded reaches a matrix, and the libraries save them and give them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, optimize_for_inference, save_encoder
from quiver.encoder.cpu.linear import Linear
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import Projection
from quiver.retrieval.models.loading import ColBERTSettings, ModelFolder

pylate_models = pytest.importorskip("pylate.models")

from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.models import Pooling  # noqa: E402

from quiver.retrieval.training.student.build import colbert_library, dense_library  # noqa: E402
from quiver.retrieval.training.student.collator import Collator  # noqa: E402
from quiver.retrieval.training.student.heads import NativePooling, NativeProjection  # noqa: E402
from quiver.retrieval.training.student.native import LENGTHS, LibraryTokenizer, NativeTransformer  # noqa: E402

QUERIES = ["how wide is the window", "", "wings, feathers and a beak! " * 9]
DOCUMENTS = ["A bird has wings, feathers and a beak!", "?", "the window of a local layer is wide: " * 9]
ROWS = [{"query": query, "document_1": text} for query, text in zip(QUERIES, DOCUMENTS, strict=True)]


def make_parts(*, prefixes: bool = True, rows: int = 320) -> tuple[Encoder, Tokenizer]:
    tokenizer = Tokenizer.train(QUERIES + DOCUMENTS, vocab_size=300, max_length=64)
    if prefixes:
        for prefix in ("[Q] ", "[D] "):
            tokenizer.add_token(prefix)
    ids = {f"{name}_token_id": tokenizer.special_id(name) for name in ("pad", "cls", "sep")}
    config = EncoderConfig.modernbert(
        vocab_size=rows,
        hidden_size=16,
        num_heads=2,
        intermediate_size=24,
        layer_types=["global", "local"],
        window=8,
        max_positions=64,
        **ids,
    )
    return init_weights(Encoder(config), seed=5).eval(), tokenizer


def make_dense() -> BiEncoder:
    torch.manual_seed(2)
    settings = ModelFolder(
        "dense",
        Path(),
        max_length=24,
        lower_case=True,
        include_prompt=False,
        projections=(Projection(16, 12, bias=True, activation="torch.nn.modules.activation.Tanh"), Projection(12, 12, residual=True)),
        normalize=True,
        query_prompt="Find: ",
        document_prompt="Code ",
    )
    return BiEncoder(*make_parts(), settings)


def make_colbert(*, expansion: bool = True) -> ColBERT:
    torch.manual_seed(3)
    settings = ModelFolder(
        "colbert",
        Path(),
        projections=(Projection(16, 12), Projection(12, 8, residual=True)),
        similarity="maxsim",
        colbert=ColBERTSettings(query_length=16, document_length=24, query_expansion=expansion),
    )
    return ColBERT(*make_parts(), settings)


def features(batch: dict[str, torch.Tensor], column: str) -> dict[str, torch.Tensor]:
    return {key[len(column) + 1 :]: value for key, value in batch.items() if key.startswith(f"{column}_")}


@pytest.mark.parametrize("kind", ["dense", "colbert", "colbert without expansion"])
def test_no_pad_token_reaches_a_matrix(kind: str) -> None:
    model: BiEncoder | ColBERT = make_dense() if kind == "dense" else make_colbert(expansion=kind == "colbert")
    library = dense_library(model) if isinstance(model, BiEncoder) else colbert_library(model)
    seen: list[tuple[str, torch.Size]] = []
    matrices = {name: module for name, module in library.named_modules() if isinstance(module, Linear | torch.nn.Linear)}
    assert len(matrices) == 2 * 4 + (2 if kind == "dense" else 3)  # two blocks; two projections, one with a matrix beside it
    for name, module in matrices.items():
        module.register_forward_hook(lambda _, inputs, output, name=name: seen.append((name, inputs[0].shape)))
    batch = Collator(model)(ROWS)
    for column in ("query", "document_1"):
        seen.clear()
        read = features(batch, column)
        assert read["attention_mask"].shape[1] > read["attention_mask"].sum(1).min()
        tokens = 3 * 16 if (kind, column) == ("colbert", "query") else int(read["attention_mask"].sum())
        library.train()(read)
        assert {name for name, _ in seen} == set(matrices)
        inside = {shape[0] for name, shape in seen if "encoder" in name}
        outside = {shape[0] for name, shape in seen if "encoder" not in name}
        assert inside == {tokens}
        assert outside == {3 if kind == "dense" else tokens}


def test_expansion_reads_and_is_not_read() -> None:
    """A query's text has the states it would have alone, and its expansion tokens differ from tokens that are attended to."""
    model = make_colbert()
    batch = features(Collator(model)(ROWS), "query")
    first = NativeTransformer(model.encoder, model.tokenizer, max_seq_length=16)
    together = first(dict(batch))["token_embeddings"]
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        text = int(mask.sum())
        alone = first({"input_ids": ids[None, :text], "attention_mask": mask[None, :text]})["token_embeddings"][0]
        torch.testing.assert_close(together[row, :text], alone)
    attended = first({**batch, LENGTHS: (16,) * len(ROWS)})["token_embeddings"]
    assert (together[0] - attended[0]).abs().max() > 1e-3
    torch.testing.assert_close(together[2], attended[2])  # nothing left to fill up


def test_gradients_are_those_of_one_text_after_the_other() -> None:
    model = make_colbert()
    batch = features(Collator(model)(ROWS), "query")
    library = colbert_library(model).train()
    weights = list(library.parameters())
    generator = torch.Generator().manual_seed(1)
    wanted = torch.randn(3, 16, 8, generator=generator)
    together = torch.autograd.grad((library(dict(batch))["token_embeddings"] * wanted).sum(), weights)
    single = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(3)]
    one_by_one = [torch.autograd.grad((library(one)["token_embeddings"] * wanted[row]).sum(), weights) for row, one in enumerate(single)]
    for found, parts in zip(together, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(found, sum(parts), atol=1e-5, rtol=1e-4)
        assert found.abs().max() > 0


@pytest.mark.parametrize("kind", ["dense", "colbert", "colbert without expansion"])
def test_the_libraries_encode_as_we_do_and_give_back_what_they_save(tmp_path: Path, kind: str) -> None:
    model: BiEncoder | ColBERT = make_dense() if kind == "dense" else make_colbert(expansion=kind == "colbert")
    library = dense_library(model) if isinstance(model, BiEncoder) else colbert_library(model)
    library.save_pretrained(str(tmp_path / "saved"))
    again = type(library)(str(tmp_path / "saved"), device="cpu", trust_remote_code=True)
    assert [type(module) for module in again] == [type(module) for module in library]
    assert isinstance(again[0], NativeTransformer)
    for one in (library, again):
        if isinstance(model, BiEncoder):
            found = [one.encode_query(QUERIES), one.encode_document(DOCUMENTS)]
        else:
            found = [one.encode(texts, is_query=texts is QUERIES, show_progress_bar=False) for texts in (QUERIES, DOCUMENTS)]
        for vectors, expected in zip(found, (model.encode_queries(QUERIES), model.encode_documents(DOCUMENTS)), strict=True):
            for text, wanted in zip(vectors, expected, strict=True):
                np.testing.assert_allclose(np.asarray(text), wanted, atol=1e-5, rtol=0)


def test_pylate_adds_its_prefixes_and_its_projection_to_a_bare_encoder(tmp_path: Path) -> None:
    """PyLate's constructor lengthens the vocabulary through the module; what it makes is what it makes of transformers' encoder."""
    encoder, tokenizer = make_parts(prefixes=False, rows=300)
    save_encoder(encoder, tmp_path)
    tokenizer.save(tmp_path)
    settings: dict[str, Any] = {"embedding_size": 8, "query_length": 16, "document_length": 24, "device": "cpu"}
    torch.manual_seed(4)
    ours = pylate_models.ColBERT(modules=[NativeTransformer(encoder, tokenizer, max_seq_length=24)], **settings)
    torch.manual_seed(4)
    theirs = pylate_models.ColBERT(str(tmp_path), model_kwargs={"attn_implementation": "sdpa"}, **settings)
    assert (ours.query_prefix_id, ours.document_prefix_id) == (theirs.query_prefix_id, theirs.document_prefix_id) == (300, 301)
    assert encoder.config.vocab_size == len(encoder.embeddings.tokens.weight) == 302
    prefixes, their_prefixes = encoder.embeddings.tokens.weight[300:], theirs[0].auto_model.embeddings.tok_embeddings.weight[300:]
    torch.testing.assert_close(prefixes, their_prefixes, atol=1e-5, rtol=0)  # theirs are drawn, close around the mean
    with torch.no_grad():
        ours[1].linear.weight.copy_(theirs[1].linear.weight)
        prefixes.copy_(their_prefixes)
    ours.save_pretrained(str(tmp_path / "saved"))
    again = pylate_models.ColBERT(str(tmp_path / "saved"), device="cpu", trust_remote_code=True)
    for texts in (QUERIES, DOCUMENTS):
        expected = theirs.encode(texts, is_query=texts is QUERIES, show_progress_bar=False)
        for one in (ours, again):
            for found, wanted in zip(one.encode(texts, is_query=texts is QUERIES, show_progress_bar=False), expected, strict=True):
                np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=1e-5, rtol=0)


def test_the_librarys_own_pooling_may_stand_behind_it() -> None:
    model = make_dense()
    first = NativeTransformer(model.encoder, model.tokenizer, max_seq_length=24)
    read = {
        "input_ids": torch.tensor([[5, 6, 7, 0, 0], [8, 9, 0, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]),
    }
    padded = first(dict(read))
    assert padded["token_embeddings"].shape == (2, 5, 16)  # as wide as the batch, wider than its longest text
    assert padded["token_embeddings"][1, 2:].abs().max() == 0
    expected = Pooling(16, pooling_mode="mean")(padded)["sentence_embedding"]
    packed = NativeTransformer(model.encoder, model.tokenizer, max_seq_length=24, pads=False)(dict(read))
    torch.testing.assert_close(NativePooling(16, pooling_mode="mean")(packed)["sentence_embedding"], expected)


def test_both_interfaces_tokenise_alike() -> None:
    encoder, tokenizer = make_parts()
    first = NativeTransformer(encoder, tokenizer, max_seq_length=12, do_lower_case=True)
    old, new = (
        first.tokenize(["Find: A BIRD " * 4, "x"]),
        first.preprocess(["A BIRD Find: A BIRD Find: A BIRD Find: A BIRD", "x"], prompt="Find: "),
    )
    assert torch.equal(old["input_ids"][0], new["input_ids"][0])
    assert old["input_ids"].shape == (2, 12)
    assert first.preprocess(["a bird has wings"], max_length=4)["input_ids"].shape == (1, 4)
    full = first.tokenize(["x"], padding="max_length")
    assert full["input_ids"].shape == full["attention_mask"].shape == (1, 12)
    assert full["expanded"].tolist() == [True]


def test_a_library_tokenizer_answers_as_transformers_does() -> None:
    _, tokenizer = make_parts()
    shim = LibraryTokenizer(tokenizer)
    assert len(shim) == len(tokenizer) == 302
    assert shim.convert_tokens_to_ids("[D] ") == 301
    assert shim.convert_tokens_to_ids("no such token") == tokenizer.special_id("unk")
    assert shim.add_tokens(["[D] ", "[E] "]) == 1
    assert (shim.convert_tokens_to_ids("[E] "), len(shim)) == (302, 303)
    assert sorted(shim.all_special_ids) == sorted(tokenizer.token_id(token) for token in ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"))


def test_checkpointing_reaches_the_encoder() -> None:
    encoder, tokenizer = make_parts()
    NativeTransformer(encoder, tokenizer, max_seq_length=12).gradient_checkpointing_enable({"use_reentrant": True})
    assert encoder.gradient_checkpointing


def test_what_cannot_be_trained_is_refused() -> None:
    encoder, tokenizer = make_parts()
    first = NativeTransformer(encoder, tokenizer, max_seq_length=12)
    with pytest.raises(ValueError, match="padding must be on the right"):
        first({"input_ids": torch.tensor([[0, 5]]), "attention_mask": torch.tensor([[0, 1]])})
    expanded = {"input_ids": torch.tensor([[0, 5]]), "attention_mask": torch.tensor([[0, 1]]), "expanded": torch.tensor([True])}
    with pytest.raises(ValueError, match="padding must be on the right"):
        first(expanded)
    optimize_for_inference(encoder)
    with pytest.raises(ValueError, match="prepacked"):
        NativeTransformer(encoder, tokenizer, max_seq_length=12)


def test_a_projection_is_the_checkpoints(tmp_path: Path) -> None:
    torch.manual_seed(1)
    projection = Projection(6, 4, bias=True, activation="torch.nn.modules.activation.ReLU", residual=True)
    module = NativeProjection(projection, pads=True)
    (tmp_path / "1_Dense").mkdir()
    module.save(str(tmp_path / "1_Dense"))
    again = NativeProjection.load(str(tmp_path), "1_Dense")
    vectors = torch.randn(3, 6)
    assert again.pads
    torch.testing.assert_close(again.projection(vectors), projection(vectors))
    assert isinstance(SentenceTransformer(modules=[again])[0], pylate_models.Dense)
