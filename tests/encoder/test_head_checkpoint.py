"""Heads on disk: every family and task there and back, strict reading, what is refused, new heads on old encoders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quiver.encoder import Encoder, InputError, init_weights, pack_ids, save_encoder
from quiver.encoder.checkpoints.checkpoint import FORMATS, families_with_head
from quiver.encoder.checkpoints.format import Task
from quiver.encoder.checkpoints.head_checkpoint import load_head, save_head
from quiver.encoder.heads import MaskedLM, SequenceClassifier, SpanQA, TransformConfig, init_head
from tests.encoder.test_checkpoint import CONFIGS as ENCODERS

CONFIGS = {name: ENCODERS[name] for name in ("modernbert", "bert", "roberta", "mosaicbert", "nomicbert", "gte")}
CONFIGS["quiver"] = ENCODERS["parallel"]
BATCH = pack_ids([[5, 6, 7, 8], [9]])
KINDS: dict[Task, type[Any]] = {"masked_lm": MaskedLM, "classifier": SequenceClassifier, "span_qa": SpanQA}
EVERY = [(task, family) for task in get_args(Task) for family in families_with_head(task)]


def head(task: Task, family: str, **settings: Any) -> Any:
    encoder = init_weights(Encoder(CONFIGS[family]), seed=5)
    made = {
        "masked_lm": MaskedLM,
        "classifier": lambda encoder, **settings: SequenceClassifier(encoder, settings.pop("num_labels", 3), **settings),
        "span_qa": SpanQA,
    }[task](encoder, **settings)
    init_head(made, seed=6)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in made.parameters():  # biases and norms of their own, so that none can be lost unseen
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made.eval()


def outputs(model: nn.Module) -> Tensor:
    if isinstance(model, MaskedLM):
        return model.logits(BATCH, torch.arange(5))
    found = model(BATCH)
    return torch.stack(found) if isinstance(found, tuple) else found


def edit(folder: Path, **settings: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def test_every_family_has_a_layout_for_masked_lm_and_classifier() -> None:
    assert set(families_with_head("masked_lm")) == set(families_with_head("classifier")) == set(CONFIGS)


@pytest.mark.parametrize(("task", "family"), EVERY)
def test_round_trip_is_bit_exact(tmp_path: Path, task: Task, family: str) -> None:
    model = head(task, family)
    save_head(model, tmp_path)
    again = load_head(KINDS[task], tmp_path)
    assert not again.training
    assert again.encoder.config == model.encoder.config
    state = again.state_dict()
    assert set(state) == set(model.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(outputs(again), outputs(model))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [FORMATS[family].heads[task].architecture]


def test_settings_of_classifiers_are_refused_for_other_heads(tmp_path: Path) -> None:
    save_head(head("span_qa", "modernbert"), tmp_path)
    with pytest.raises(ValueError, match="are settings of a SequenceClassifier, not of a SpanQA"):
        load_head(SpanQA, tmp_path, num_labels=2)


@pytest.mark.parametrize(("task", "family"), EVERY)
def test_an_encoder_without_the_head_is_refused_or_given_a_new_one(
    tmp_path: Path, task: Task, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = init_weights(Encoder(CONFIGS[family]), seed=5).eval()
    save_encoder(encoder, tmp_path)
    with pytest.raises(InputError, match=rf"{tmp_path}: the head of \w+ is incomplete: missing .*; pass new_head_seed"):
        load_head(KINDS[task], tmp_path)
    with caplog.at_level("WARNING", logger="quiver.encoder"):
        model = load_head(KINDS[task], tmp_path, new_head_seed=1)
    assert "initialized at random with seed 1, to be trained" in caplog.text
    assert torch.equal(model.encoder(BATCH), encoder(BATCH))
    assert torch.equal(outputs(model), outputs(load_head(KINDS[task], tmp_path, new_head_seed=1)))
    assert not torch.equal(outputs(model), outputs(load_head(KINDS[task], tmp_path, new_head_seed=2)))


def test_another_number_of_labels_needs_a_seed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = head("classifier", "modernbert", label_names=["a", "b", "c"])
    save_head(model, tmp_path)
    with pytest.raises(InputError, match=r"classifier\.weight has shape \(3, 32\), expected \(2, 32\)"):
        load_head(SequenceClassifier, tmp_path, num_labels=2)
    again = load_head(SequenceClassifier, tmp_path, num_labels=2, new_head_seed=0)
    assert "classifier.bias, classifier.weight" in caplog.text
    assert "head.dense" not in caplog.text
    assert (again.out.weight.shape, again.label_names) == ((2, 32), None)
    assert torch.equal(again.transform.dense.weight, model.transform.dense.weight)
    same = load_head(SequenceClassifier, tmp_path, num_labels=3, new_head_seed=0)
    assert torch.equal(same.out.weight, model.out.weight)


def test_a_last_matrix_of_another_task_is_not_taken(tmp_path: Path) -> None:
    classes = head("classifier", "modernbert", num_labels=2)
    save_head(classes, tmp_path)
    with pytest.raises(InputError, match=r"ModernBertForQuestionAnswering is incomplete: missing classifier\.bias, classifier\.weight;"):
        load_head(SpanQA, tmp_path)
    spans = load_head(SpanQA, tmp_path, new_head_seed=1)
    assert torch.equal(spans.transform.dense.weight, classes.transform.dense.weight)
    assert not torch.equal(spans.out.weight, classes.out.weight)


def test_names_of_xlm_r_and_of_tensorflow_are_read(tmp_path: Path) -> None:
    classes = head("classifier", "roberta")
    save_head(classes, tmp_path / "xlm")
    edit(tmp_path / "xlm", model_type="xlm-roberta", architectures=["XLMRobertaForSequenceClassification"])
    assert torch.equal(outputs(load_head(SequenceClassifier, tmp_path / "xlm")), outputs(classes))
    words = head("masked_lm", "bert")
    save_head(words, tmp_path / "bert")

    def rename(state: dict[str, Tensor]) -> None:
        for key in [key for key in state if "LayerNorm" in key]:
            state[key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")] = state.pop(key)
        state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"].clone()
        state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"].clone()
        state["cls.seq_relationship.weight"] = torch.zeros(2, 32)

    edit_tensors(tmp_path / "bert", rename)
    again = load_head(MaskedLM, tmp_path / "bert")
    assert again.decoder.weight is None  # it is the embedding's
    assert torch.equal(outputs(again), outputs(words))


def test_a_decoder_that_differs_from_the_embedding_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_head(head("masked_lm", "modernbert"), tmp_path)
    matrix = torch.randn(64, 32)
    edit_tensors(tmp_path, lambda state: state.update({"decoder.weight": matrix}))
    assert torch.equal(load_head(MaskedLM, tmp_path).decoder_weight, matrix)
    assert "config.json ties the decoder to the embedding, but the file holds two different matrices" in caplog.text


@pytest.mark.parametrize(
    ("task", "family", "settings", "message"),
    [
        ("masked_lm", "modernbert", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ("masked_lm", "modernbert", {"tie_word_embeddings": False}, r"missing decoder\.weight"),
        (
            "masked_lm",
            "modernbert",
            {"decoder_bias": False},
            r"the file contains decoder\.bias, which the head of config.json does not have",
        ),
        ("masked_lm", "modernbert", {"classifier_activation": "mish"}, "classifier_activation must be one of"),
        ("masked_lm", "modernbert", {"sparse_pred_ignore_index": 0}, "sparse_pred_ignore_index must be -100, got 0"),
        ("masked_lm", "bert", {"decoder_bias": False}, "decoder_bias must be True, got False"),
        ("masked_lm", "quiver", {"head": 3}, "head must be an object, got 3"),
        ("masked_lm", "quiver", {"head": {"decoder_bias": 1}}, r"head\.decoder_bias must be true or false, got"),
        ("classifier", "modernbert", {"classifier_pooling": "max"}, "classifier_pooling must be one of cls, mean, got 'max'"),
        ("classifier", "bert", {"classifier_pooling": "mean"}, "classifier_pooling must be 'cls', got 'mean'"),
        ("classifier", "modernbert", {"classifier_dropout": 1.5}, "classifier_dropout must be >= 0 and < 1, got 1.5"),
        ("classifier", "modernbert", {"classifier_bias": True}, r"missing head\.dense\.bias"),
        ("classifier", "modernbert", {"problem_type": "ranking"}, "problem_type must be one of single_label_classification, "),
        ("classifier", "modernbert", {"id2label": {"0": "a", "2": "b"}}, 'id2label must name the labels "0", "1"'),
        ("classifier", "modernbert", {"id2label": {"0": 7}}, "id2label must name"),
        ("classifier", "modernbert", {"id2label": {}}, "id2label must name"),
        ("classifier", "modernbert", {"num_labels": 9}, "num_labels must be 3, the number of labels in id2label, got 9"),
        ("classifier", "modernbert", {"id2label": None, "num_labels": 0}, "num_labels must be >= 1, got 0"),
        ("classifier", "modernbert", {"id2label": None}, r"classifier\.\w+ has shape \(3.*\), expected \(2"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, task: Task, family: str, settings: dict[str, object], message: str) -> None:
    save_head(head(task, family), tmp_path)
    edit(tmp_path, **settings)
    with pytest.raises(InputError, match=f"{tmp_path}: .*{message}"):
        load_head(KINDS[task], tmp_path)


def test_mosaicbert_has_no_span_head(tmp_path: Path) -> None:
    save_encoder(init_weights(Encoder(CONFIGS["mosaicbert"]), seed=5), tmp_path)
    with pytest.raises(InputError, match="family mosaicbert has no span_qa head; families that have one: modernbert, "):
        load_head(SpanQA, tmp_path, new_head_seed=1)
    with pytest.raises(InputError, match="family mosaicbert has no span_qa head"):
        save_head(head("span_qa", "mosaicbert"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("task", "family", "settings", "message"),
    [
        ("masked_lm", "bert", {"decoder_bias": False}, "decoder_bias: a bert config.json cannot express false"),
        ("masked_lm", "gte", {"transform": TransformConfig(bias=False, activation="gelu", norm=True)}, "transform: a gte config.json"),
        ("masked_lm", "modernbert", {"transform": TransformConfig(bias=True, activation="gelu", norm=False)}, "transform: a modernbert"),
        ("classifier", "bert", {"pooling": "mean"}, "pooling: a bert config.json cannot express mean"),
        ("classifier", "quiver", {"transform": TransformConfig(bias=True, activation="tanh", norm=True)}, "transform: a quiver"),
        ("span_qa", "bert", {"transform": TransformConfig(bias=True, activation="gelu", norm=True)}, "transform: a bert"),
    ],
)
def test_heads_that_no_config_json_expresses_are_refused(
    tmp_path: Path, task: Task, family: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        save_head(head(task, family, **settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(32, 31), r"head\.dense\.weight has shape \(32, 31\), expected \(32, 32\)"),
        (torch.zeros(32, 32, dtype=torch.int8), r"head\.dense\.weight holds torch\.int8, not floating-point numbers"),
    ],
)
def test_damaged_tensors_are_named(tmp_path: Path, tensor: Tensor, message: str) -> None:
    save_head(head("masked_lm", "modernbert"), tmp_path)
    edit_tensors(tmp_path, lambda state: state.update({"head.dense.weight": tensor}))
    for seed in (None, 1):
        with pytest.raises(InputError, match=message):
            load_head(MaskedLM, tmp_path, new_head_seed=seed)
