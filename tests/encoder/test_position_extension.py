"""Longer position tables: the paper's equations row by row, checkpoints with heads, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quiver.encoder import (
    Encoder,
    EncoderConfig,
    InputError,
    MaskedLM,
    SpanQA,
    Tokenizer,
    init_head,
    init_weights,
    load_encoder,
    load_head,
    pack_ids,
    preset,
    save_encoder,
    save_head,
)
from quiver.encoder.checkpoints.checkpoint import read_weights
from quiver.encoder.files import read_json, write_json
from quiver.encoder.pretraining.position_extension import extend_checkpoint, extend_positions, interpolate_positions


def small(name: str, *, positions: int = 12) -> EncoderConfig:
    return replace(
        preset(name), vocab_size=40, hidden_size=16, num_heads=2, intermediate_size=24, layer_types=("global",) * 2, max_positions=positions
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("factor", [1, 2, 3, 8])
def test_old_positions_are_exact_and_others_between(factor: int, dtype: torch.dtype) -> None:
    """Equations 2 and 3 row by row; rows behind the last old one, which equation 3 does not have, go on by the last step."""
    table = torch.randn(7, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    new = interpolate_positions(table, factor)
    assert new.shape == (7 * factor, 4)
    assert new.dtype == dtype
    assert torch.equal(new[::factor], table)
    ends = torch.cat((table.double(), 2 * table[-1:].double() - table[-2:-1].double()))
    for place in range(7 * factor):
        share = place % factor / factor
        between = ends[place // factor] * (1 - share) + ends[place // factor + 1] * share
        torch.testing.assert_close(new[place].double(), between, atol=8 * torch.finfo(dtype).eps, rtol=0)


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="factor must be >= 1"):
        interpolate_positions(torch.zeros(4, 2), 0)
    with pytest.raises(ValueError, match="fewer than two positions after an offset of 2"):
        interpolate_positions(torch.zeros(3, 2), 2, offset=2)


@pytest.mark.parametrize("name", ["bert-base", "roberta-base"])
def test_an_encoder_reads_longer_texts(name: str) -> None:
    encoder = init_weights(Encoder(small(name)), seed=4).eval()
    longer = extend_positions(encoder, 2)
    assert not longer.training
    assert longer.config == replace(encoder.config, max_positions=24)
    with pytest.raises(InputError, match="13 tokens"):
        encoder(pack_ids([list(range(3, 16))]))
    assert longer(pack_ids([list(range(3, 27))])).shape == (24, 16)
    # A text of one token stands at position 0 in both; any other text has moved.
    batch = pack_ids([[5], [6]])
    assert torch.equal(longer(batch), encoder(batch))
    moved = pack_ids([[5, 6, 7]])
    assert not torch.allclose(longer(moved), encoder(moved), atol=1e-4)
    assert encoder.config.max_positions == 12


@pytest.mark.parametrize("name", ["bert-base", "roberta-base"])
def test_checkpoints_keep_heads_and_other_tensors(tmp_path: Path, name: str) -> None:
    encoder = init_weights(Encoder(small(name)), seed=5)
    for kind in (MaskedLM, SpanQA):
        model = kind(encoder)
        init_head(model, seed=6)
        old, new = tmp_path / f"{kind.__name__}-old", tmp_path / f"{kind.__name__}-new"
        save_head(model, old)
        extend_checkpoint(old, new, 4)
        again = load_head(kind, new)
        assert again.encoder.config.max_positions == 48
        key = "encoder.embeddings.positions.weight"
        before, after = model.state_dict(), again.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before if name != key)
        offset = encoder.config.position_offset
        assert torch.equal(after[key], interpolate_positions(before[key], 4, offset=offset))
        assert read_json(new / "config.json")["max_position_embeddings"] == offset + 48
        assert read_json(new / "config.json") | {"max_position_embeddings": offset + 12} == read_json(old / "config.json")


def test_the_tokenizer_gets_the_new_length_and_buffers_are_left_out(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save_encoder(init_weights(Encoder(small("bert-base")), seed=5), old)
    state = read_weights(old) | {"embeddings.position_ids": torch.arange(12)[None], "pooler.dense.weight": torch.ones(16, 16)}
    save_file(state, old / "model.safetensors")
    new.mkdir()
    Tokenizer.train(["a bird has wings"], vocab_size=300, max_length=12).save(new)
    extend_checkpoint(old, new, 2)
    assert read_json(new / "tokenizer_config.json")["model_max_length"] == 24
    assert read_weights(new).keys() == state.keys() - {"embeddings.position_ids"}
    assert load_encoder(new).config.max_positions == 24


@pytest.mark.parametrize(
    ("name", "kind"), [("modernbert-base", "rotary positions"), ("gte-en-mlm-base", "rotary positions"), ("mosaicbert-base", "ALiBi")]
)
def test_other_positions_are_refused_in_one_line(tmp_path: Path, name: str, kind: str) -> None:
    encoder = Encoder(small(name))
    with pytest.raises(InputError, match=f"no table of position embeddings to extend; it has {kind}") as caught:
        extend_positions(encoder, 2)
    assert "\n" not in str(caught.value)
    save_encoder(encoder, tmp_path / "old")
    with pytest.raises(InputError, match=f"{tmp_path}.*no table of position embeddings to extend; it has {kind}"):
        extend_checkpoint(tmp_path / "old", tmp_path / "new", 2)
    assert not (tmp_path / "new").exists()


def test_malformed_checkpoints_are_refused(tmp_path: Path) -> None:
    encoder = init_weights(Encoder(small("bert-base")), seed=5)
    save_encoder(encoder, tmp_path)
    with pytest.raises(InputError, match="factor must be >= 1"):
        extend_positions(encoder, 0)
    hf = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", hf | {"max_position_embeddings": 512})
    with pytest.raises(InputError, match=r"has shape \(12, 16\), config.json requires \(512, 16\)"):
        extend_checkpoint(tmp_path, tmp_path / "new", 2)
    write_json(tmp_path / "config.json", hf)
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"has 0 tensors embeddings\.position_embeddings\.weight"):
        extend_checkpoint(tmp_path, tmp_path / "new", 2)
