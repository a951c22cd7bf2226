"""A prepacked encoder: the same states, the same state dict, no gradients; int8 close to float and blind to its neighbours."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, InputError, init_weights, load_encoder, optimize_for_inference, pack_ids, save_encoder
from quiver.encoder.config import Precision
from quiver.encoder.cpu.linear import PrepackedLinear

CONFIG = EncoderConfig.modernbert(
    vocab_size=300,
    hidden_size=96,
    num_heads=3,
    intermediate_size=160,
    layer_types=["global", "local", "local"],
    max_positions=400,
    window=32,
)
BERT = EncoderConfig.bert(vocab_size=300, hidden_size=64, num_heads=4, intermediate_size=128, layers=2, max_positions=400)
LENGTHS = (1, 200, 33, 64, 7)


def make(config: EncoderConfig, dtype: torch.dtype = torch.float32) -> Encoder:
    encoder = init_weights(Encoder(config), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # biases of zero would hide a lost one
        for name, weight in encoder.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.1, generator=generator)
    return encoder.to(dtype).eval()


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 300, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("config", [CONFIG, BERT], ids=["modernbert", "bert"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 0.03)], ids=str)
def test_prepacked_states_are_the_plain_ones(config: EncoderConfig, dtype: torch.dtype, atol: float) -> None:
    encoder = make(config, dtype)
    prepacked = optimize_for_inference(copy.deepcopy(encoder))
    batch = pack_ids(texts(*LENGTHS))
    with torch.inference_mode():
        expected = encoder(batch)
    states = prepacked(batch)  # no mode needed: it has no gradients
    assert not states.requires_grad
    assert states.dtype == dtype
    torch.testing.assert_close(states, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_state_dict_stays_the_plain_one(dtype: torch.dtype) -> None:
    encoder = make(BERT, dtype)
    prepacked = optimize_for_inference(copy.deepcopy(encoder))
    assert prepacked.num_parameters == encoder.num_parameters
    plain, packed = encoder.state_dict(), prepacked.state_dict()
    assert list(plain) == list(packed)
    for name, weight in plain.items():
        assert torch.equal(weight, packed[name]), name


def test_a_prepacked_encoder_can_be_saved_and_an_int8_one_cannot(tmp_path: Path) -> None:
    encoder = make(BERT)
    save_encoder(optimize_for_inference(copy.deepcopy(encoder)), tmp_path / "float")
    again = load_encoder(tmp_path / "float").state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in encoder.state_dict().items())
    with pytest.raises(InputError, match="quantized to int8"):
        save_encoder(optimize_for_inference(encoder, precision="int8"), tmp_path / "int8")
    assert not (tmp_path / "int8").exists()


@pytest.mark.parametrize("precision", ["float", "int8"])
def test_a_copy_of_a_prepacked_encoder_is_prepacked(precision: Precision) -> None:
    prepacked = optimize_for_inference(make(CONFIG), precision=precision)
    batch = pack_ids(texts(*LENGTHS))
    twin = copy.deepcopy(prepacked)
    assert torch.equal(twin(batch), prepacked(batch))
    assert [type(module) for module in twin.modules()].count(PrepackedLinear) == 4 * CONFIG.num_layers


def test_int8_weights_are_in_the_state_dict() -> None:
    one, other = make(CONFIG), make(CONFIG)
    with torch.no_grad():
        other.layers[2].mlp.down.weight[0, 0] += 1.0
    states = [optimize_for_inference(encoder, precision="int8").state_dict() for encoder in (one, other)]
    changed = [name for name in states[0] if not torch.equal(states[0][name], states[1][name])]
    assert changed == ["layers.2.mlp.down.weight_int8", "layers.2.mlp.down.weight_scales"]


def test_a_prepacked_encoder_cannot_be_moved_trained_or_prepacked_again() -> None:
    prepacked = optimize_for_inference(make(CONFIG))
    assert prepacked.to("cpu") is prepacked
    with pytest.raises(InputError, match="cannot be moved to another device or dtype"):
        prepacked.to(torch.float64)
    assert prepacked.eval() is prepacked
    with pytest.raises(ValueError, match="to train, load the checkpoint"):
        prepacked.train()
    with pytest.raises(ValueError, match="prepacked already"):
        optimize_for_inference(prepacked)
    with pytest.raises(ValueError, match="precision must be one of float, int8, got 'int4'"):
        optimize_for_inference(make(CONFIG), precision="int4")  # type: ignore[arg-type]
