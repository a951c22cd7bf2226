"""``quiver enlarge``: encoders with and without a head, presets and config.json; mistakes are reported in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, MaskedLM, Tokenizer, init_head, init_weights, load_head, save_head
from quiver.encoder.checkpoints import config_to_hf
from quiver.encoder.files import write_json
from quiver.encoder.pretraining.tiling import enlarge_masked_lm

SMALL = EncoderConfig.modernbert(
    vocab_size=304, hidden_size=16, num_heads=2, intermediate_size=24, layer_types=["global", "local"], max_positions=32
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    head = MaskedLM(init_weights(Encoder(SMALL), seed=1))
    init_head(head, seed=2)
    save_head(head, tmp_path / "small")
    Tokenizer.train(["a bird has wings"], vocab_size=300, max_length=32).save(tmp_path / "small")
    return tmp_path / "small"


def test_a_masked_lm_is_enlarged_to_a_config(quiver: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    large = replace(SMALL, hidden_size=24, num_heads=3, intermediate_size=41, layer_types=("global", "local", "local"))
    write_json(tmp_path / "large.json", config_to_hf(large))
    out = tmp_path / "large"
    done = quiver("enlarge", model, "--to", tmp_path / "large.json", "--out", out)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"model: {out} (2 layers of 16 with 2 heads, MLP 24 -> 3 layers of 24 with 3 heads, MLP 41)\n"
    expected, found = enlarge_masked_lm(load_head(MaskedLM, model), large).state_dict(), load_head(MaskedLM, out).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert Tokenizer.from_pretrained(out).to_json() == Tokenizer.from_pretrained(model).to_json()
