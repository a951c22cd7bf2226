"""Extended models in the libraries they come from: longer texts give the vectors there that they give here."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from quiver.encoder import MaskedLM, load_head, pack_ids
from quiver.encoder.pretraining.position_extension import extend_checkpoint
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.export.export import lengthen_model
from quiver.retrieval.models.loading import load_model

transformers = pytest.importorskip("transformers")
sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.parity

SENTENCE = "the retrieval of long documents by short queries needs vectors that keep what both of them say about wings"
WORDS = SENTENCE.split()


@pytest.mark.slow
def test_minilm_embeds_a_thousand_tokens_as_sentence_transformers_does(minilm: Path, tmp_path: Path) -> None:
    lengthen_model(minilm, tmp_path / "longer", factor=2)
    generator = random.Random(5)
    texts = [" ".join(generator.choices(WORDS, k=count)) for count in (3, 200, 600, 950, 1100)]
    reference = sentence_transformers.SentenceTransformer(str(tmp_path / "longer"), device="cpu")
    assert reference.max_seq_length == 1024
    model = load_model(tmp_path / "longer")
    assert isinstance(model, BiEncoder)
    np.testing.assert_allclose(model.encode_document(texts), reference.encode_document(texts), atol=1e-5, rtol=0)
    assert model.encode_texts(texts, "document").counts.truncated == 1


def test_factor_one_leaves_minilms_vectors(minilm: Path, tmp_path: Path) -> None:
    lengthen_model(minilm, tmp_path / "same", factor=1, max_length=256)
    old, new = load_model(minilm), load_model(tmp_path / "same")
    assert isinstance(old, BiEncoder)
    assert isinstance(new, BiEncoder)
    texts = [" ".join(WORDS), " ".join(WORDS * 20)]
    assert np.array_equal(old.encode_document(texts), new.encode_document(texts))


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_masked_lms_open_in_transformers(tmp_path: Path, name: str) -> None:
    torch.manual_seed(11)
    offset = 2 if name == "Roberta" else 0
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16 + offset
    )
    getattr(transformers, f"{name}ForMaskedLM")(config).eval().save_pretrained(tmp_path / "old")
    extend_checkpoint(tmp_path / "old", tmp_path / "new", 4)
    theirs = getattr(transformers, f"{name}ForMaskedLM").from_pretrained(tmp_path / "new").eval()
    assert theirs.config.max_position_embeddings == 64 + offset
    ours = load_head(MaskedLM, tmp_path / "new")
    ids = torch.arange(5, 64).repeat(2)[:64]  # as long as it gets
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        torch.testing.assert_close(ours.logits(pack_ids([ids.tolist()]), torch.arange(64)), expected, atol=1e-5, rtol=0)
