"""The model as a loss calls it: no padding reaches a matrix, and gradients do not depend on the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, optimize_for_inference
from quiver.encoder.cpu.linear import Linear
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.training.dataloader import Collator

pytest.importorskip("pylate.models")

from quiver.retrieval.training.losses import LossModel

QUERIES = ["how wide is the window", "", "wings, feathers and a beak! " * 9]
DOCUMENTS = ["A bird has wings, feathers and a beak!", "?", "the window of a local layer is wide: " * 9]
ROWS = [{"query": query, "document_1": text} for query, text in zip(QUERIES, DOCUMENTS, strict=True)]


def make_parts() -> tuple[Encoder, Tokenizer]:
    tokenizer = Tokenizer.train(QUERIES + DOCUMENTS, vocab_size=300, max_length=64)
    for prefix in ("[Q] ", "[D] "):
        tokenizer.add_token(prefix)
    ids = {f"{name}_token_id": tokenizer.special_id(name) for name in ("pad", "cls", "sep")}
    config = EncoderConfig.modernbert(
        vocab_size=320,
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
    return BiEncoder.from_parts(*make_parts(), settings)


def make_colbert(*, expansion: bool = True) -> ColBERT:
    torch.manual_seed(3)
    settings = ModelFolder(
        "colbert",
        Path(),
        projections=(Projection(16, 12), Projection(12, 8, residual=True)),
        similarity="maxsim",
        colbert=ColBERTSettings(query_length=16, document_length=24, query_expansion=expansion),
    )
    return ColBERT.from_parts(*make_parts(), settings)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("kind", ["dense", "colbert", "colbert without expansion"])
def test_no_pad_token_reaches_a_matrix(kind: str, one_pass: bool) -> None:
    model: BiEncoder | ColBERT = make_dense() if kind == "dense" else make_colbert(expansion=kind == "colbert")
    module = LossModel(model).train()
    seen: list[tuple[str, torch.Size]] = []
    matrices = {name: one for name, one in module.named_modules() if isinstance(one, Linear | torch.nn.Linear)}
    assert len(matrices) == 2 * 4 + (2 if kind == "dense" else 3)  # two blocks; two projections, one with a matrix beside it
    for name, one in matrices.items():
        one.register_forward_hook(lambda _, inputs, output, name=name: seen.append((name, inputs[0].shape)))
    batch = Collator(model)(ROWS)
    features = module.columns(batch["texts"], batch["columns"], one_pass=one_pass)
    lengths = [batch["texts"].lengths[:3], batch["texts"].lengths[3:]]
    for column, own in zip(features, lengths, strict=True):
        assert len(set(own)) > 1 or (kind, own) == ("colbert", (16, 16, 16))
        module(column)
    assert {name for name, _ in seen} == set(matrices)
    inside = {shape[0] for name, shape in seen if "encoder" in name}
    outside = {shape[0] for name, shape in seen if "encoder" not in name}
    assert inside == ({batch["texts"].num_tokens} if one_pass else set(map(sum, lengths)))
    assert outside == ({3} if kind == "dense" else inside)


def test_expansion_tokens_attend_and_are_not_attended_to() -> None:
    """The vectors of a query's text are those of the text alone, and expansion tokens differ from tokens that are attended to."""
    model = make_colbert()
    queries = Collator(model)(ROWS)["texts"][:3]
    together = queries.unpack(model.encoder(queries))
    assert queries.key_lengths is not None
    for row, text in enumerate(queries.key_lengths):
        alone = Collator(make_colbert(expansion=False))([ROWS[row]])["texts"][:1]
        assert alone.ids.tolist() == queries.unpack(queries.ids)[row][:text].tolist()
        torch.testing.assert_close(together[row][:text], model.encoder(alone))
    attended = replace(queries, key_lengths=None, memo={})
    others = attended.unpack(model.encoder(attended))
    assert (together[0] - others[0]).abs().max() > 1e-3
    torch.testing.assert_close(together[2], others[2])  # this query fills its length


def test_a_prepacked_encoder_is_refused() -> None:
    model = make_dense()
    optimize_for_inference(model.encoder)
    with pytest.raises(ValueError, match="prepacked"):
        LossModel(model)
