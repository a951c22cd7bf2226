"""A LoRA encoder against the Hugging Face model: its adapter added by hand, opened by PEFT, and the gradients of the two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quiver.encoder import Encoder, add_lora, load_encoder, merge_lora, pack_ids, save_adapter
from quiver.encoder.lora import lora_matrices
from tests.parity.encoders import random_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

LENGTHS = (1, 63, 129, 300)
RANK, ALPHA = 8, 12.0


def hugging_face(family: str, folder: Path) -> transformers.PreTrainedModel:
    return random_model(family, folder, num_hidden_layers=3)


def with_updates(folder: Path) -> Encoder:
    encoder = load_encoder(folder)
    add_lora(encoder, rank=RANK, alpha=ALPHA, dropout=0.0, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for update in lora_matrices(encoder).values():
            update.lora_b.normal_(std=0.1, generator=generator)
    return encoder


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in LENGTHS]


def theirs(model: torch.nn.Module) -> torch.Tensor:
    """Hidden states of their model, one text at a time: no padding in the way."""
    return torch.cat([model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in sequences()])


FAMILIES = pytest.mark.parametrize("family", ["modernbert", "bert", "roberta"])


@FAMILIES
def test_an_adapter_added_by_hand_gives_our_states(family: str, tmp_path: Path) -> None:
    model = hugging_face(family, tmp_path / "base")
    encoder = with_updates(tmp_path / "base")
    save_adapter(encoder, tmp_path / "adapter", base_model=str(tmp_path / "base"))
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    batch = pack_ids(sequences())
    with torch.no_grad():
        before = theirs(model)
        for module in settings["target_modules"]:
            a, b = (adapter.pop(f"base_model.model.{module}.lora_{which}.weight") for which in "AB")
            model.get_submodule(module).weight += settings["lora_alpha"] / settings["r"] * b @ a
        assert not adapter, "all of the adapter has a place in their model"
        expected = theirs(model)
        assert (expected - before).abs().max() > 0.1
        torch.testing.assert_close(encoder(batch), expected, atol=1e-5, rtol=1e-5)
        merge_lora(encoder)
        torch.testing.assert_close(encoder(batch), expected, atol=1e-5, rtol=1e-5)
