"""The architecture as keys of recipes: every switch in both schemas, contradictions together, and models that differ by layer."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, load_encoder, optimize_for_inference, pack_ids, save_encoder
from quiver.encoder.config import INIT_METHODS, ConfigError, InitMethod, NormPosition, global_every
from quiver.encoder.layers import RotaryRows
from quiver.encoder.packing import PackedBatch
from quiver.encoder.pretraining.recipe import ModelSection, load_pretraining_recipe
from quiver.encoder.schema import SchemaError
from quiver.encoder.training.architecture import RECIPE_NAMES, ArchitectureSection
from quiver.retrieval.training.recipe import RandomEncoderSection, load_recipe

SIZES = {"layers": 4, "hidden_size": 64, "heads": 2, "intermediate_size": 64}
OF_TOKENIZER = {"vocab_size", "max_positions", "global_theta", "pad_token_id", "cls_token_id", "sep_token_id"}
"""Fields that pretraining takes from the vocabulary and from the phase."""


def make_config(**settings: Any) -> EncoderConfig:
    return ArchitectureSection(**SIZES | settings).config(vocab_size=96, max_positions=64, global_theta=10_000.0)


@pytest.mark.parametrize("schema", [ModelSection, RandomEncoderSection])
def test_every_switch_of_the_configuration_is_a_key(schema: type[ArchitectureSection]) -> None:
    names = {RECIPE_NAMES.get(each.name, each.name) for each in fields(EncoderConfig)} - OF_TOKENIZER
    assert names <= schema.model_fields.keys()


def test_the_defaults_are_modernbert() -> None:
    expected = EncoderConfig.modernbert(
        vocab_size=96, hidden_size=64, num_heads=2, intermediate_size=64, layer_types=global_every(4, 3), max_positions=64,
        global_theta=10_000.0,
    )  # fmt: skip
    assert make_config() == expected


@pytest.mark.parametrize(
    ("settings", "family", "norms"),
    [
        ({"qkv_bias": True, "attention_output_bias": True}, "modernbert", (False, True)),
        ({"norm": "rmsnorm"}, "quiver", (False, True)),
        ({"embedding_norm": False}, "quiver", (True, True)),
        ({"norm_position": "post"}, "quiver", (True, False)),
        ({"initial_layers": 1, "initial_norm_position": "post"}, "quiver", (True, True)),
        ({"layer_types": ("local", "global", "local", "global")}, "modernbert", (False, True)),
    ],
)
def test_family_and_norms_follow_the_switches(settings: dict[str, Any], family: str, norms: tuple[bool, bool]) -> None:
    config = make_config(**settings)
    assert (config.family, (config.first_attention_norm, config.final_norm)) == (family, norms)


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        (["positions=alibi", "rotary_fraction=0.5"], ["rotary_fraction: requires positions rope, but positions is alibi"]),
        (["norm=rmsnorm", "family=modernbert"], ["family: a modernbert config.json cannot hold norm 'rmsnorm'; use family quiver"]),
        (["initial_mlp=plain"], ["initial_mlp: requires initial_layers >= 1"]),
        (["initial_layers=9", "initial_mlp=plain"], ["initial_layers: must be >= 0 and <= the number of layers 4, got 9"]),
        (
            ["heads=3", "norm=rmsnorm", "norm_bias=true", "initial_layers=1", "layer_types=[global,local]", "positions=alibi",
             "initial_rotary=false", "position_offset=2"],
            [
                "layer_types: must name 4 layers, got 2",
                "heads: must divide hidden_size 128, got 3",
                "norm_bias: must be false with norm rmsnorm",
                "position_offset: must be 0 unless positions is absolute, got 2",
                "initial_rotary: requires positions rope, but positions is alibi",
            ],
        ),
    ],
)  # fmt: skip
def test_contradictions_are_reported_together_in_both_kinds_of_recipes(settings: list[str], problems: list[str]) -> None:
    with pytest.raises(SchemaError) as pretraining:
        load_pretraining_recipe("pretrain-small", [f"model.{setting}" for setting in settings])
    assert pretraining.value.problems == [f"model.{problem}" for problem in problems]
    sizes = ["hidden_size=128", "layers=4", "family=auto"]
    with pytest.raises(SchemaError) as retrieval:
        load_recipe("quickstart", [f"model.architecture.{setting}" for setting in (*sizes, *settings)])
    assert retrieval.value.problems == [f"model.architecture.{problem}" for problem in problems]


def test_a_configuration_names_all_its_problems() -> None:
    with pytest.raises(ConfigError, match=r"norm_bias must be false with norm rmsnorm; first_attention_norm false requires embedding_norm"):
        replace(make_config(), norm="rmsnorm", norm_bias=True, embedding_norm=False)


def by_the_definition(encoder: Encoder, batch: PackedBatch, ropes: list[RotaryRows | None]) -> torch.Tensor:
    """Every block adds its own updates, so that blocks of different kinds may follow each other in any order."""
    hidden = encoder.embeddings(batch, torch.float32)
    for block, rope in zip(encoder._blocks, ropes, strict=True):
        if block.norm_position == "post":
            hidden = block.attention_norm(hidden + block.attention(hidden, batch, rope))
            hidden = block.mlp_norm(hidden + block.mlp(hidden))
        elif block.norm_position == "parallel":
            normed = block.attention_norm(hidden)
            hidden = hidden + block.attention(normed, batch, rope) + block.mlp(normed)
        else:
            hidden = hidden + block.attention(block.attention_norm(hidden), batch, rope)
            hidden = hidden + block.mlp(block.mlp_norm(hidden))
    output: torch.Tensor = encoder.final_norm(hidden)
    return output


@pytest.mark.parametrize("others", ["pre", "post", "parallel"])
@pytest.mark.parametrize("initial", ["pre", "post", "parallel"])
def test_initial_layers_of_another_kind_compute_by_the_definition(initial: NormPosition, others: NormPosition, tmp_path: Path) -> None:
    """In inference by the kernels and prepacked, in training, padded, and after a round trip through a checkpoint."""
    config = make_config(
        initial_layers=2, initial_norm_position=initial, norm_position=others, initial_mlp="plain", initial_rotary=False, activation="silu"
    )
    assert [config.layer_mlp(layer) for layer in range(4)] == ["plain", "plain", "gated", "gated"]
    encoder = init_weights(Encoder(config), seed=5, method="fan_in").eval()
    batch = pack_ids([[3, 1, 4, 1, 5], [9, 2, 6] * 12, [5]])
    rotary = encoder.rotary[0](batch.positions)
    expected = by_the_definition(encoder, batch, [None, None, rotary, rotary])
    with torch.inference_mode():
        torch.testing.assert_close(encoder(batch), expected, atol=1e-5, rtol=1e-5)
    trained = encoder.train()(batch)
    torch.testing.assert_close(trained, expected, atol=1e-5, rtol=1e-5)
    gradients = [
        torch.autograd.grad(each.square().sum(), encoder.embeddings.tokens.weight, retain_graph=True)[0] for each in (trained, expected)
    ]
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)
    save_encoder(encoder.eval(), tmp_path / "model")
    loaded = load_encoder(tmp_path / "model")
    assert loaded.config == config
    ids, mask = torch.tensor([[9, 2, 6, 0], [5, 3, 1, 4]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    with torch.inference_mode():
        torch.testing.assert_close(loaded.forward_padded(ids, mask)[0, :3], encoder(pack_ids([[9, 2, 6]])), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(optimize_for_inference(loaded)(batch), expected, atol=1e-5, rtol=1e-5)


def test_the_last_initial_layer_drops_its_update_itself() -> None:
    """A pre-norm block before one of another kind: its update, here enormous, is dropped all but surely."""
    encoder = Encoder(make_config(initial_layers=3, initial_norm_position="pre", norm_position="post", mlp_output_dropout=0.999999))
    last, seen = encoder._blocks[2], list[tuple[torch.Tensor, torch.Tensor | None]]()
    with torch.no_grad():
        last.mlp.down.weight.fill_(1e4)
    last.register_forward_hook(lambda module, inputs, output: seen.append(output))
    for _ in range(2):
        encoder.train(not seen)(pack_ids([[1, 2, 3]]))
    (dropped, update), (kept, _) = seen
    assert update is None
    assert dropped.abs().max() < 100 < kept.abs().max()


@pytest.mark.parametrize("method", INIT_METHODS)
def test_weights_are_drawn_as_the_method_says(method: InitMethod) -> None:
    config = make_config(hidden_size=256, intermediate_size=512, heads=4, init_std=0.05)
    encoder = init_weights(Encoder(config), seed=1, method=method)
    inner, to_stream = {
        "full_megatron": (lambda fan_in: 0.05, lambda fan_in, layer: 0.05 / math.sqrt(8)),
        "mitchell": (lambda fan_in: fan_in**-0.5, lambda fan_in, layer: (fan_in * 2 * (layer + 1)) ** -0.5),
        "normal": (lambda fan_in: 0.05, lambda fan_in, layer: 0.05),
        "kaiming_normal": (lambda fan_in: math.sqrt(2 / fan_in), lambda fan_in, layer: math.sqrt(2 / fan_in)),
        "fan_in": (lambda fan_in: fan_in**-0.5, lambda fan_in, layer: fan_in**-0.5),
    }[method]
    # Truncation at two or three deviations takes a part of the deviation.
    share = {"full_megatron": 0.8796, "mitchell": 0.9866}.get(method, 1.0)
    for name, weight in encoder.named_parameters():
        if weight.ndim == 2:
            writes = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = to_stream(weight.shape[1], int(name.split(".")[1])) if writes else inner(weight.shape[1])
            assert weight.std().item() == pytest.approx(share * std, rel=0.02), name


def test_the_named_switches_pretrain_and_train_a_retriever(tmp_path: Path) -> None:
    """The switches of the paper's appendix D together, from recipes, on the text of this file."""
    from quiver.encoder.pretraining.run import pretrain
    from quiver.retrieval.training.model import build_model

    text = Path(__file__).read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text("\n".join(line.strip() for line in text.splitlines() if line.strip()) * 3)
    switches = ["norm=rmsnorm", "activation=silu", "rotary_fraction=0.5", "norm_position=parallel", "mlp=plain", "embedding_norm=false"]
    tiny = ["hidden_size=32", "layers=2", "intermediate_size=48", "init_method=mitchell", "init_std=0.06"]
    source = [
        f"data.sources=[{{name: code, path: {tmp_path / 'text.txt'}, lines: true}}]",
        "data.held_out=0.1",
        "model.vocabulary.size=320",
    ]
    phase = "{name: all, tokens: 3000, context: 32, global_theta: 1e4, learning_rate: 1e-3, batch_size: 16, micro_batch: 8}"
    settings = [*(f"model.{each}" for each in (*switches, *tiny)), *source, f"phases=[{phase}]"]
    recipe = load_pretraining_recipe("pretrain-small", settings)
    curves = pretrain(recipe, tmp_path / "run", device="cpu")["result"]["curves"]
    config = load_encoder(tmp_path / "run" / "model").config
    assert (config.family, config.norm, config.norm_position, config.rotary_fraction) == ("quiver", "rmsnorm", "parallel", 0.5)
    assert curves["held_out_loss"][-1][1] < math.log(320)
    shape = [f"model.architecture.{each}" for each in (*switches, *tiny, "family=auto", "heads=2", "vocab_size=320", "max_positions=128")]
    model = build_model(load_recipe("quickstart", [*shape, "model.vocabulary=words"]), [text], device="cpu")
    assert replace(model.encoder.config, max_positions=32) == replace(config, global_theta=1e4, **ids_of(model.tokenizer))


def ids_of(tokenizer: Tokenizer) -> dict[str, Any]:
    return {f"{role}_token_id": tokenizer.special_id(role) for role in ("pad", "cls", "sep")}


@pytest.mark.parametrize("positions", ["absolute", "alibi"])
def test_other_positions_pretrain_through_phases_of_growing_context(positions: str, tmp_path: Path) -> None:
    from quiver.encoder.pretraining.run import pretrain

    (tmp_path / "text.txt").write_text("\n".join(Path(__file__).read_text(encoding="utf-8").splitlines() * 2))
    phase = "name: {0}, tokens: 1500, context: {0}, global_theta: 1e4, learning_rate: 1e-3, batch_size: 8, micro_batch: 8"
    phases = ", ".join(f"{{{phase.format(context)}}}" for context in (16, 48))
    settings = [f"model.positions={positions}", "model.vocabulary.size=320", "model.hidden_size=16", "model.layers=2", f"phases=[{phases}]"]
    settings += [f"data.sources=[{{name: code, path: {tmp_path / 'text.txt'}, lines: true}}]"]
    pretrain(load_pretraining_recipe("pretrain-small", settings), tmp_path / "run", device="cpu")
    assert load_encoder(tmp_path / "run" / "model").config.max_positions == 48
