"""Other encoders behind the encoder's contract: transformers' own states, whatever else is in the batch."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quiver.encoder import InputError, load_encoder, pack_ids
from quiver.encoder.adapter import TransformersEncoder, load_adapter

transformers = pytest.importorskip("transformers")

LENGTHS = (1, 2, 40, 64, 33)


def deberta() -> object:
    """DeBERTaV3's settings in small: relative positions in logarithmic buckets, shared with the content's matrices."""
    return transformers.DebertaV2Config(
        vocab_size=128,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=64,
        max_position_embeddings=64,
        relative_attention=True,
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
        max_relative_positions=-1,
        layer_norm_eps=1e-7,
        type_vocab_size=0,
    )


def electra() -> object:
    return transformers.ElectraConfig(
        vocab_size=128,
        embedding_size=24,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=64,
        max_position_embeddings=64,
    )


def mpnet() -> object:
    return transformers.MPNetConfig(
        vocab_size=128, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=64, max_position_embeddings=66
    )


def save(config: object, folder: Path) -> torch.nn.Module:
    torch.manual_seed(3)
    model = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.no_grad()
@pytest.mark.parity
@pytest.mark.parametrize("config", [deberta, electra, mpnet])
def test_states_are_transformers_own_in_any_batch(tmp_path: Path, config) -> None:
    model = save(config(), tmp_path)
    encoder = load_adapter(tmp_path)
    assert not encoder.training
    alone = [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in texts()]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0], [3]):
        batch = pack_ids([texts()[row] for row in order])
        states = encoder(batch)
        assert states.shape == (batch.num_tokens, 48)
        for row, state in zip(order, batch.unpack(states), strict=True):
            torch.testing.assert_close(state, alone[row], atol=1e-5, rtol=0)


def test_mpnets_padding_rows_are_no_positions(tmp_path: Path) -> None:
    save(mpnet(), tmp_path)
    assert load_adapter(tmp_path).config.max_positions == 64


def test_wrong_input_is_refused(tmp_path: Path) -> None:
    save(deberta(), tmp_path)
    with pytest.raises(InputError, match=r"got 'deberta-v2'; its disentangled attention is not implemented") as refused:
        load_encoder(tmp_path)
    assert "\n" not in str(refused.value)
    encoder = load_adapter(tmp_path)
    with pytest.raises(InputError, match="a sequence has 65 tokens, more than the encoder's 64 positions"):
        encoder(pack_ids([[5] * 65]))
    with pytest.raises(InputError, match="deberta-v2: unattended query expansion requires a native encoder"):
        encoder(pack_ids([[5, 6, 7]], key_lengths=[2]))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"is_decoder": True}, "is_decoder and is_encoder_decoder must be false"), ({"max_position_embeddings": None}, "must be a positive")],
)
def test_what_is_no_encoder_is_refused(change: dict[str, object], message: str) -> None:
    model = transformers.AutoModel.from_config(electra())
    for key, value in change.items():
        setattr(model.config, key, value)
    with pytest.raises(InputError, match=message):
        TransformersEncoder(model)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save(deberta(), tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    del state["encoder.LayerNorm.weight"]
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"the checkpoint lacks the tensors encoder\.LayerNorm\.weight"):
        load_adapter(tmp_path)


def test_folders_that_transformers_cannot_open(tmp_path: Path) -> None:
    save(deberta(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("deberta-v2", "no-such-model"))
    with pytest.raises(InputError, match="transformers cannot load it"):
        load_adapter(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path.write_text(path.read_text().replace("no-such-model", "deberta-v2"))
    with pytest.raises(InputError, match=r"transformers cannot load it: .*model\.safetensors"):
        load_adapter(tmp_path)


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InputError, match=r"pip install 'quiver-retrieval\[train\]'"):
        load_adapter(tmp_path)
