"""Low-rank updates: nothing changes before B is trained, only they are trained, and everything saved is a plain model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quiver.encoder import Encoder, EncoderConfig, InputError, init_weights, load_encoder, optimize_for_inference, pack_ids, save_encoder
from quiver.encoder.adapter import TransformersEncoder
from quiver.encoder.cpu.linear import PACK_TOKENS
from quiver.encoder.lora import add_lora, load_lora_state, lora_matrices, lora_state, merge_lora, save_adapter

MODERNBERT = EncoderConfig.modernbert(
    vocab_size=300, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"], max_positions=1500, window=32
)
BERT = EncoderConfig.bert(vocab_size=300, hidden_size=32, num_heads=2, intermediate_size=64, layers=2, max_positions=1500)
FAMILIES = pytest.mark.parametrize("config", [MODERNBERT, BERT], ids=["modernbert", "bert"])
BATCH = pack_ids([[5, 6, 7, 8], list(range(200)), [9]])
# Long enough for oneDNN's packed products.
LONG_BATCH = pack_ids([[token % 300 for token in range(1100)], [3] * 40])


def plain(config: EncoderConfig) -> Encoder:
    encoder = init_weights(Encoder(config), seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # weights large enough to show a mistake
        for weight in encoder.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    return encoder


def low_rank(config: EncoderConfig, *, rank: int = 4, dropout: float = 0.0, trained: bool = True) -> Encoder:
    encoder = plain(config)
    add_lora(encoder, rank=rank, alpha=8.0, dropout=dropout, seed=3)
    if trained:
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for update in lora_matrices(encoder).values():
                update.lora_b.normal_(std=0.1, generator=generator)
    return encoder


def gradients(encoder: Encoder, *, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    encoder.zero_grad()
    (encoder(LONG_BATCH) ** 2).sum().backward()
    return {name: weight.grad.clone() for name, weight in encoder.named_parameters() if weight.grad is not None}


@FAMILIES
@pytest.mark.parametrize("training", [True, False])
def test_a_new_update_changes_nothing(config: EncoderConfig, training: bool) -> None:
    """No bit where nothing is trained; with gradients, plain matrices of an MLP are multiplied in chunks, and these are not."""
    tolerance = {"atol": 2e-6, "rtol": 0} if training else {"atol": 0, "rtol": 0}
    before, after = plain(config).train(training), low_rank(config, trained=False).train(training)
    with torch.set_grad_enabled(training):
        for batch in (BATCH, LONG_BATCH):
            torch.testing.assert_close(after(batch), before(batch), **tolerance)


@FAMILIES
def test_every_matrix_of_the_blocks_is_updated_and_nothing_else_trained(config: EncoderConfig) -> None:
    encoder = low_rank(config)
    names = {f"layers.{layer}.{part}" for layer in range(2) for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")}
    assert set(lora_matrices(encoder)) == names
    wanted = {f"{name}.{which}" for name in names for which in ("lora_a", "lora_b")}
    assert {name for name, weight in encoder.named_parameters() if weight.requires_grad} == wanted
    assert set(gradients(encoder)) == wanted
    assert lora_matrices(plain(config)) == {}


def test_first_values_are_those_of_the_papers_code() -> None:
    """A uniform within sqrt(3) times He's deviation for a leaky ReLU of slope sqrt(5): 1 / sqrt(D); B zero."""
    encoder = plain(MODERNBERT)
    add_lora(encoder, rank=16, alpha=16.0, dropout=0.0, seed=0)
    for update in lora_matrices(encoder).values():
        bound = 1 / math.sqrt(update.weight.shape[1])
        assert update.lora_a.abs().max() <= bound
        assert update.lora_a.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert not update.lora_b.any()


@FAMILIES
def test_the_update_is_b_a_scaled(config: EncoderConfig) -> None:
    """Against plain encoders whose weights were added up by hand; in training, in evaluation, through packed products."""
    encoder, by_hand = low_rank(config), plain(config)
    with torch.no_grad():
        for name, update in lora_matrices(encoder).items():
            matrix = by_hand.get_submodule(name)
            matrix.weight += 8.0 / 4 * update.lora_b @ update.lora_a
    for batch in (BATCH, LONG_BATCH):
        torch.testing.assert_close(encoder(batch), by_hand(batch), atol=2e-5, rtol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(encoder.eval()(batch), by_hand.eval()(batch), atol=2e-5, rtol=1e-5)
        encoder.train()
        by_hand.train()
    assert len(LONG_BATCH.ids) >= PACK_TOKENS


@FAMILIES
def test_gradients_are_those_of_the_chain_rule(config: EncoderConfig) -> None:
    """W + s B A gives dA = s B' dW and dB = s dW A', where dW is the gradient of the plain encoder with that sum."""
    encoder = low_rank(config)
    summed = plain(config)
    summed.load_state_dict(encoder.state_dict())
    ours, full = gradients(encoder), gradients(summed)
    for name, update in lora_matrices(encoder).items():
        of_weight = full[f"{name}.weight"]
        torch.testing.assert_close(ours[f"{name}.lora_a"], 2.0 * update.lora_b.t() @ of_weight, atol=2e-2, rtol=2e-4)
        torch.testing.assert_close(ours[f"{name}.lora_b"], 2.0 * of_weight @ update.lora_a.t(), atol=2e-2, rtol=2e-4)


@FAMILIES
def test_merging_gives_plain_matrices_of_the_same_states(config: EncoderConfig) -> None:
    encoder, untouched = low_rank(config).eval(), plain(config)
    biases = {name: update.bias for name, update in lora_matrices(encoder).items()}
    with torch.no_grad():
        before = encoder(LONG_BATCH)
        merge_lora(encoder)
        assert torch.equal(encoder(LONG_BATCH), before)
    assert [(name, type(module)) for name, module in encoder.named_modules()] == [
        (name, type(module)) for name, module in untouched.named_modules()
    ]
    assert [name for name, _ in encoder.named_parameters()] == [name for name, _ in untouched.named_parameters()]
    assert all(weight.requires_grad for weight in encoder.parameters())
    assert encoder.layers[0].attention.qkv.parts == 3
    assert repr(encoder) == repr(untouched)
    for name, bias in biases.items():
        assert encoder.get_submodule(name).bias is bias
    assert not any(module.training for module in encoder.modules())


@FAMILIES
def test_what_is_saved_in_the_middle_opens_as_a_plain_model(config: EncoderConfig, tmp_path: Path) -> None:
    encoder = low_rank(config)
    save_encoder(encoder, tmp_path)
    opened = load_encoder(tmp_path)
    assert lora_matrices(opened) == {}
    assert encoder.num_parameters == opened.num_parameters
    assert len(lora_matrices(encoder)) == 8, "saving must not merge"
    merge_lora(encoder)
    ours, theirs = encoder.state_dict(), opened.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_state_dict_is_refused_before_it_counts_the_update_twice() -> None:
    encoder = low_rank(MODERNBERT)
    with pytest.raises(ValueError, match="load_lora_state"):
        encoder.load_state_dict(encoder.state_dict())


@FAMILIES
def test_the_low_rank_matrices_come_back_to_the_bit(config: EncoderConfig) -> None:
    encoder, again = low_rank(config), low_rank(config, trained=False)
    state = lora_state(encoder)
    load_lora_state(again, state)
    assert torch.equal(again(BATCH), encoder(BATCH))
    with torch.no_grad():
        lora_matrices(encoder)["layers.0.mlp.up"].lora_b.add_(1)
    assert torch.equal(lora_state(again)["layers.0.mlp.up.lora_b"], state["layers.0.mlp.up.lora_b"]), "the state must be a copy"


def test_matrices_of_another_model_are_refused_whole() -> None:
    encoder = low_rank(MODERNBERT)
    before = lora_state(encoder)
    state = {name: weight + 1 for name, weight in before.items()}
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up\.lora_b is missing"):
        load_lora_state(encoder, {name: weight for name, weight in state.items() if name != "layers.1.mlp.up.lora_b"})
    with pytest.raises(InputError, match=r"pooler\.lora_a is unknown"):
        load_lora_state(encoder, state | {"pooler.lora_a": torch.zeros(1)})
    with pytest.raises(InputError, match=r"lora_a has shape \(2, 32\), expected \(4, 32\)"):
        load_lora_state(encoder, state | {"layers.1.mlp.up.lora_a": torch.zeros(2, 32)})
    assert all(torch.equal(weight, before[name]) for name, weight in lora_state(encoder).items())


@FAMILIES
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_gives_the_same_gradients(config: EncoderConfig, dropout: float) -> None:
    """Dropout of the second pass is that of the first, the encoder's own too; inputs need no gradient for it."""
    config = EncoderConfig(**{**vars(config), "attention_output_dropout": 0.1, "attention_dropout": 0.1})
    encoder = low_rank(config, dropout=dropout).train()
    expected = gradients(encoder)
    encoder.gradient_checkpointing = True
    found = gradients(encoder)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=0, rtol=0, msg=name)


def test_misuse_is_refused() -> None:
    encoder = low_rank(MODERNBERT)
    with pytest.raises(ValueError, match="merge_lora first"):
        add_lora(encoder, rank=4, alpha=8.0, dropout=0.0, seed=0)
    with pytest.raises(ValueError, match="merge_lora first"):
        optimize_for_inference(encoder)
    merge_lora(encoder)
    for call in (merge_lora, lora_state):
        with pytest.raises(ValueError, match="add_lora first"):
            call(encoder)
    with pytest.raises(ValueError, match="add_lora first"):
        load_lora_state(encoder, {})
    with pytest.raises(ValueError, match="prepacked"):
        add_lora(optimize_for_inference(encoder), rank=4, alpha=8.0, dropout=0.0, seed=0)


def test_an_encoder_of_transformers_is_refused() -> None:
    class Settings:
        model_type = "deberta-v2"
        max_position_embeddings = 512
        vocab_size = hidden_size = 8

        def to_dict(self) -> dict[str, object]:
            return {}

    model = torch.nn.Linear(1, 1)
    model.config = Settings()
    with pytest.raises(InputError, match="deberta-v2 runs in transformers; LoRA needs a native encoder"):
        add_lora(TransformersEncoder(model), rank=4, alpha=8.0, dropout=0.0, seed=0)


def test_an_adapter_has_pefts_names(tmp_path: Path) -> None:
    save_adapter(low_rank(MODERNBERT), tmp_path, base_model="answerdotai/ModernBERT-base", revision="main")
    state = load_file(tmp_path / "adapter_model.safetensors")
    modules = [f"layers.{layer}.{part}" for layer in range(2) for part in ("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo")]
    assert set(state) == {f"base_model.model.{name}.lora_{which}.weight" for name in modules for which in "AB"}
    settings = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"], settings["bias"]) == ("LORA", 4, 8.0, "none")
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("answerdotai/ModernBERT-base", "main")
    assert sorted(settings["target_modules"]) == sorted(modules)


def test_a_family_without_a_hugging_face_model_has_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a Hugging Face architecture, and family quiver has none"):
        save_adapter(low_rank(EncoderConfig(**{**vars(MODERNBERT), "family": "quiver"})), tmp_path / "adapter", base_model="x")
    assert not (tmp_path / "adapter").exists()
