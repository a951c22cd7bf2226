"""Heads: their definitions written out, losses that do not depend on how a batch was made, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from quiver.encoder import Encoder, EncoderConfig, init_weights, pack_ids
from quiver.encoder.heads import MaskedLM, SequenceClassifier, SpanQA, TransformConfig, init_head

CONFIG = EncoderConfig.modernbert(
    vocab_size=300,
    hidden_size=48,
    num_heads=3,
    intermediate_size=64,
    layer_types=["global", "local", "global"],
    window=8,
    max_positions=128,
)
BERT = replace(CONFIG, family="bert", norm_bias=True, embedding_dropout=0.1, activation="relu")
ROBERTA = replace(BERT, family="roberta")


def masked_lm(config: EncoderConfig = CONFIG, **settings: bool) -> MaskedLM:
    model = MaskedLM(init_weights(Encoder(config), seed=1), **settings)
    init_head(model, seed=2)
    return enlarge(model).eval()


def enlarge(model: nn.Module) -> nn.Module:
    """Weights large enough that a mistake shows."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def sequences(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]


def labels_for(rows: list[list[int]], share: float = 0.4) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(rows))
    return [[token if torch.rand((), generator=generator) < share else -100 for token in row] for row in rows]


def flat(rows: list[list[int]]) -> Tensor:
    return torch.tensor([label for row in rows for label in row])


@pytest.mark.parametrize("config", [CONFIG, BERT, ROBERTA], ids=lambda config: config.family)
@pytest.mark.parametrize("tied", [True, False])
def test_masked_lm_is_cross_entropy_of_all_logits(config: EncoderConfig, tied: bool) -> None:
    model = masked_lm(config, tied=tied)
    rows = sequences([40, 1, 90, 13])
    labels = flat(labels_for(rows))
    batch = pack_ids(rows)
    activation = {"modernbert": F.gelu, "bert": F.relu, "roberta": F.gelu}[config.family]
    states = model.transform.norm(activation(model.transform.dense(model.encoder(batch))))
    matrix = model.encoder.embeddings.tokens.weight if tied else model.decoder.weight
    logits = states @ matrix.T + model.decoder.bias
    expected = F.cross_entropy(logits, labels, ignore_index=-100)
    found = model(batch, labels)
    assert found.masked == int((labels != -100).sum())
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(model.logits(batch, torch.tensor([3, 100])), logits[[3, 100]])
    parameters = list(model.parameters())
    for one, other in zip(torch.autograd.grad(found.loss, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(one, other)


def test_only_masked_tokens_go_through_the_head() -> None:
    model = masked_lm()
    shapes: list[torch.Size] = []
    model.transform.dense.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    labels = torch.full((50,), -100)
    labels[[4, 30, 49]] = 7
    model(pack_ids(sequences([20, 30])), labels)
    assert shapes == [torch.Size([3, 48])]


def test_a_batch_without_masked_tokens_has_zero_loss_with_gradients() -> None:
    model = masked_lm()
    batch = pack_ids(sequences([5, 9]))
    loss, _, _, masked = model(batch, torch.full((14,), -100))
    assert (loss.item(), masked) == (0.0, 0)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} is cut off"
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([1, 2]), r"must be \(N,\) like the batch's ids, \(3,\), got \(2,\)"),
        (torch.tensor([[1, 2, 3]]), r"got \(1, 3\)"),
        (torch.tensor([1, -100, 300]), r"-100 or 0\.\.299, got 1\.\.300"),
        (torch.tensor([1, -1, 2]), r"got -1\.\.2"),
    ],
)
def test_wrong_labels_are_named(labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        masked_lm()(pack_ids([[4, 5, 6]]), labels)


def classifier(config: EncoderConfig = CONFIG, num_labels: int = 3, **arguments: object) -> SequenceClassifier:
    model = SequenceClassifier(init_weights(Encoder(config), seed=1), num_labels, **arguments)  # type: ignore[arg-type]
    init_head(model, seed=2)
    enlarge(model).eval()
    return model


def test_robertas_dropout_stands_on_both_sides_of_its_layer() -> None:
    assert classifier(BERT).dropout.p == 0.1  # the encoder's, as config.json says nothing else
    model = classifier(ROBERTA, dropout=0.5)
    seen: list[Tensor] = []
    model.dropout.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(pack_ids(sequences([4])))
    assert len(seen) == 2
    seen.clear()
    plain = classifier(BERT, dropout=0.5)
    plain.dropout.register_forward_hook(lambda module, inputs, output: seen.append(output))
    plain(pack_ids(sequences([4])))
    assert len(seen) == 1


SCORES = torch.tensor([[1.0, -1.0, 0.5], [0.0, 2.0, -3.0]])


@pytest.mark.parametrize("integer", [torch.int64, torch.int32])
def test_integer_labels_are_one_label_each(integer: torch.dtype) -> None:
    labels = torch.tensor([2, 1], dtype=integer)
    torch.testing.assert_close(classifier().loss(SCORES, labels), F.cross_entropy(SCORES, labels.long()))


def test_the_problem_type_can_be_set() -> None:
    labels = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(classifier(problem_type="regression").loss(SCORES, labels), F.mse_loss(SCORES, labels))
    model = classifier(problem_type="multi_label_classification")
    whole = torch.tensor([[1, 0, 1], [0, 1, 0]])
    torch.testing.assert_close(model.loss(SCORES, whole), F.binary_cross_entropy_with_logits(SCORES, whole.float()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_labels": 0}, "num_labels must be >= 1, got 0"),
        ({"pooling": "max"}, "pooling must be one of cls, mean, got 'max'"),
        ({"problem_type": "ranking"}, "problem_type must be one of single_label_classification"),
        ({"label_names": ["a"]}, "label_names must hold 3 names, got 1"),
        ({"transform": TransformConfig(bias=True, activation="gelu", norm=True), "dropout": 2.0}, "dropout probability"),
    ],
)
def test_wrong_settings_of_a_classifier_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classifier(**arguments)  # type: ignore[arg-type]


def test_labels_of_another_shape_are_named() -> None:
    with pytest.raises(ValueError, match=r"single_label_classification must be \(2,\), got \(2, 3\)"):
        classifier().loss(SCORES, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"multi_label_classification must be \(2, 3\), got \(2,\)"):
        classifier().loss(SCORES, torch.zeros(2))


def span_qa(config: EncoderConfig = CONFIG) -> SpanQA:
    model = SpanQA(init_weights(Encoder(config), seed=1))
    init_head(model, seed=2)
    enlarge(model).eval()
    return model


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=6))
def test_span_loss_is_the_mean_of_the_sequences(lengths: list[int]) -> None:
    model = span_qa()
    rows = sequences(lengths)
    starts, ends = torch.tensor([length // 2 for length in lengths]), torch.tensor([length - 1 for length in lengths])

    def loss(rows: list[list[int]], starts: Tensor, ends: Tensor) -> Tensor:
        batch = pack_ids(rows)
        return model.loss(model(batch), batch, starts, ends)

    with torch.no_grad():
        whole = loss(rows, starts, ends)
        alone = torch.stack([loss([row], starts[place : place + 1], ends[place : place + 1]) for place, row in enumerate(rows)])
        torch.testing.assert_close(whole, alone.mean(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(loss(rows[::-1], starts.flip(0), ends.flip(0)), whole, atol=1e-5, rtol=1e-5)


def test_places_must_be_one_a_sequence() -> None:
    model, batch = span_qa(), pack_ids([[4, 5], [6]])
    with pytest.raises(ValueError, match=r"must be \(2,\), got \(2,\) and \(1,\)"):
        model.loss(model(batch), batch, torch.tensor([0, 0]), torch.tensor([0]))


def test_new_heads_have_megatrons_widths() -> None:
    config = replace(CONFIG, hidden_size=192, initializer_range=0.03)
    encoder = init_weights(Encoder(config), seed=1)
    before = encoder.embeddings.tokens.weight.clone()
    # A normal distribution cut at two standard deviations has 0.8796 of its width.
    cut, residual = 0.8796, 1 / (2 * config.num_layers) ** 0.5
    words, classes, spans = MaskedLM(encoder, tied=False), SequenceClassifier(encoder, 64), SpanQA(encoder)
    for model in (words, classes, spans):
        init_head(model, seed=9)
        assert torch.equal(model.transform.norm.weight, torch.ones(192))
    assert torch.equal(encoder.embeddings.tokens.weight, before)
    assert words.decoder.weight is not None
    for weight, width in [
        (words.transform.dense.weight, 0.03),
        (words.decoder.weight, 192**-0.5),
        (classes.transform.dense.weight, 0.03 * residual),
        (classes.out.weight, 192**-0.5),
        (spans.transform.dense.weight, 0.03 * residual),
    ]:
        assert weight.std().item() == pytest.approx(cut * width, rel=0.03)
        assert weight.abs().max() <= 2 * width
    assert torch.equal(words.decoder.bias, torch.zeros(300))
    assert torch.equal(classes.out.bias, torch.zeros(64))
