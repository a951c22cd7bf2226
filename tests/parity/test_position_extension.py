"""Extended models in the libraries they come from: longer texts give the vectors there that they give here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quiver.encoder import MaskedLM, load_head, pack_ids
from quiver.encoder.pretraining.position_extension import extend_checkpoint

transformers = pytest.importorskip("transformers")
sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.parity


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
