"""Numbers stay numbers: any lengths, half precision, autocast, dropout and gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, EncoderConfig, PackedBatch, init_weights, pack_ids
from quiver.encoder.heads import MaskedLM, SequenceClassifier, SpanQA, init_head

WINDOW = 8
MODERNBERT = EncoderConfig.modernbert(
    vocab_size=200,
    hidden_size=48,
    num_heads=3,
    intermediate_size=64,
    layer_types=["global", "local", "local"],
    window=WINDOW,
    max_positions=256,
)
BERT = replace(
    MODERNBERT,
    family="bert",
    norm_position="post",
    mlp="plain",
    positions="absolute",
    layer_types=("global", "global"),
    norm_bias=True,
    first_attention_norm=True,
    final_norm=False,
    type_vocab_size=2,
)
CONFIGS = {
    "modernbert": MODERNBERT,
    "bert": BERT,
    "alibi": replace(BERT, family="mosaicbert", positions="alibi", mlp="gated"),
    "parallel": replace(MODERNBERT, family="quiver", norm_position="parallel", norm="rmsnorm", rotary_fraction=0.5),
}
DROPOUTS = ("embedding_dropout", "attention_dropout", "attention_output_dropout", "mlp_inner_dropout", "mlp_output_dropout")
LENGTHS = {
    "one token": [1],
    "two tokens": [2],
    "many of one token": [1] * 70,
    "window edges": [WINDOW // 2, WINDOW // 2 + 1, WINDOW // 2 + 2, WINDOW, WINDOW + 1, 2 * WINDOW + 1],
    "block edges": [31, 32, 33, 1, 64, 65],
    "one long among short": [1, 1, 250, 1, 2],
    "equal": [40, 40, 40],
}


@pytest.fixture(params=sorted(CONFIGS))
def config(request: pytest.FixtureRequest) -> EncoderConfig:
    return CONFIGS[request.param]


def batch_of(lengths: list[int]) -> PackedBatch:
    generator = torch.Generator().manual_seed(sum(lengths))
    return pack_ids([torch.randint(200, (length,), generator=generator).tolist() for length in lengths])


def encoder_of(config: EncoderConfig, dtype: torch.dtype = torch.float32) -> Encoder:
    encoder = init_weights(Encoder(config), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return encoder.to(dtype)


def losses(encoder: Encoder, batch: PackedBatch) -> dict[str, Callable[[], Tensor]]:
    """For each head a function that gives its loss on the batch; heads and labels are drawn anew, always the same."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.where(torch.rand(batch.num_tokens, generator=generator) < 0.5, batch.ids, -100)
    places = torch.zeros(len(batch), dtype=torch.int64)
    classes = torch.randint(3, (len(batch),), generator=generator)
    words, mean, spans = MaskedLM(encoder), SequenceClassifier(encoder, 3, pooling="mean"), SpanQA(encoder)
    for head in (words, mean, spans):
        init_head(head, seed=6)
        head.to(encoder.embeddings.tokens.weight.dtype)
    return {
        "masked_lm": lambda: words(batch, labels).loss,
        "classifier": lambda: mean.loss(mean(batch), classes),
        "span_qa": lambda: spans.loss(spans(batch), batch, places, places),
    }


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_no_length_gives_nan(config: EncoderConfig, lengths: list[int], dtype: torch.dtype) -> None:
    encoder, batch = encoder_of(config, dtype), batch_of(lengths)
    with torch.no_grad():
        assert encoder.eval()(batch).isfinite().all()
    encoder.train()
    for name, loss in losses(encoder, batch).items():
        value = loss()
        assert value.dtype == torch.float32, name
        assert value.isfinite(), name
        value.backward()
        found = gradients(encoder)
        assert len(found) == len(list(encoder.parameters()))
        for parameter, gradient in found.items():
            assert gradient.dtype == dtype
            assert gradient.isfinite().all(), f"{name}: {parameter}"


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_autocast_is_close_to_float32(config: EncoderConfig, lengths: list[int]) -> None:
    encoder, batch = encoder_of(config).train(), batch_of(lengths)
    for name, loss in losses(encoder, batch).items():
        exact = loss()
        exact.backward()
        expected = gradients(encoder)
        with torch.autocast("cpu", torch.bfloat16):
            value = loss()
        value.backward()
        assert value.dtype == torch.float32, name
        torch.testing.assert_close(value, exact, atol=2e-2, rtol=2e-2)
        found = gradients(encoder)
        assert found.keys() == expected.keys()
        assert all(gradient.dtype == torch.float32 for gradient in found.values())
        whole, wanted = (torch.cat([one[key].flatten() for key in expected]) for one in (found, expected))
        if wanted.norm() > 1e-3:  # one token alone: a softmax over it has no gradient
            assert relative(whole, wanted) < 0.05, name


def with_dropout(config: EncoderConfig, *names: str, share: float = 0.2) -> EncoderConfig:
    return replace(config, **dict.fromkeys(names, share))


@pytest.mark.parametrize("name", DROPOUTS)
def test_each_dropout_acts_in_training_only(config: EncoderConfig, name: str) -> None:
    batch = batch_of([5, 30, 1, 30])
    plain, dropping = encoder_of(config), encoder_of(with_dropout(config, name))
    torch.testing.assert_close(dropping.eval()(batch), plain.eval()(batch), atol=0, rtol=0)
    torch.testing.assert_close(plain.train()(batch), plain.eval()(batch))
    dropping.train()
    torch.manual_seed(0)
    first, second = dropping(batch), dropping(batch)
    torch.manual_seed(0)
    assert torch.equal(dropping(batch), first)
    assert not torch.equal(first, second)
    assert relative(first, plain(batch)) > 1e-3


@pytest.mark.parametrize("share", [0.0, 0.2], ids=["plain", "dropout"])
def test_gradient_checkpointing_changes_nothing(config: EncoderConfig, share: float) -> None:
    batch = batch_of([5, 40, 1, 33])
    encoder = encoder_of(with_dropout(config, *DROPOUTS, share=share)).train()
    assert encoder.gradient_checkpointing is False
    for name, loss in losses(encoder, batch).items():
        results = []
        for setting in (False, True):
            encoder.gradient_checkpointing = setting
            torch.manual_seed(4)
            value = loss()
            value.backward()
            results.append((value.detach(), gradients(encoder)))
        (plain, expected), (found, again) = results
        assert torch.equal(found, plain), name
        assert again.keys() == expected.keys()
        for parameter, gradient in expected.items():
            torch.testing.assert_close(again[parameter], gradient, atol=1e-7, rtol=1e-6, msg=f"{name}: {parameter}")


def saved_bytes(encoder: Encoder, batch: PackedBatch) -> int:
    """What a forward pass keeps for the backward pass, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in encoder.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = encoder(batch)
    del output
    return sum(kept.values())


def test_gradient_checkpointing_keeps_less_and_only_in_training() -> None:
    encoder, batch = encoder_of(replace(MODERNBERT, layer_types=("global", "local") * 4)), batch_of([200] * 4)
    everything = saved_bytes(encoder.train(), batch)
    encoder.gradient_checkpointing = True
    assert saved_bytes(encoder, batch) < everything / 4
    assert saved_bytes(encoder.eval(), batch) == pytest.approx(everything, rel=0.01)
