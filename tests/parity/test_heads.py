"""Our heads against transformers' on random weights: scores, losses, gradients, and folders that open on either side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quiver.encoder import pack_ids
from quiver.encoder.checkpoints.head_checkpoint import load_head, save_head
from quiver.encoder.heads import MaskedLM, SequenceClassifier, SpanQA
from tests.parity.encoders import random_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

VOCABULARY = 512
LENGTHS = (1, 70, 2, 33, 129, 7)
TOLERANCE = {"atol": 1e-5, "rtol": 0.0}


@dataclass(frozen=True)
class Family:
    """A family by its name in configurations, the beginning of its class names, and its weights whose gradients are compared."""

    kind: str
    name: str
    gradients: dict[str, str]

    def model(self, task: str, folder: Path, **settings: object) -> torch.nn.Module:
        sizes = {"local_attention": 32} if self.kind == "modernbert" else {"hidden_size": 96, "num_attention_heads": 3}
        return random_model(self.kind, folder, task=task, seed=11, **{**sizes, **settings})

    def opened(self, task: str, folder: Path) -> torch.nn.Module:
        return getattr(transformers, f"{self.name}For{task}").from_pretrained(folder, attn_implementation="sdpa").eval()


BERT_GRADIENTS = {
    "encoder.embeddings.tokens.weight": "{}.embeddings.word_embeddings.weight",
    "encoder.embeddings.positions.weight": "{}.embeddings.position_embeddings.weight",
    "encoder.layers.0.mlp.up.weight": "{}.encoder.layer.0.intermediate.dense.weight",
    "encoder.layers.1.attention.out.bias": "{}.encoder.layer.1.attention.output.dense.bias",
    "encoder.layers.1.mlp_norm.weight": "{}.encoder.layer.1.output.LayerNorm.weight",
}
FAMILIES = {
    "modernbert": Family(
        "modernbert",
        "ModernBert",
        {
            "encoder.embeddings.tokens.weight": "model.embeddings.tok_embeddings.weight",
            "encoder.layers.1.attention.qkv.weight": "model.layers.1.attn.Wqkv.weight",
            "encoder.layers.3.mlp.up.weight": "model.layers.3.mlp.Wi.weight",
            "encoder.final_norm.weight": "model.final_norm.weight",
            "transform.dense.weight": "head.dense.weight",
            "transform.norm.weight": "head.norm.weight",
        },
    ),
    "bert": Family("bert", "Bert", {ours: theirs.format("bert") for ours, theirs in BERT_GRADIENTS.items()}),
    "roberta": Family("roberta", "Roberta", {ours: theirs.format("roberta") for ours, theirs in BERT_GRADIENTS.items()}),
}


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]], fill: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


def padded_batch(model: torch.nn.Module, rows: list[list[int]]) -> dict[str, Tensor]:
    return {"input_ids": padded(rows, model.config.pad_token_id), "attention_mask": padded([[1] * len(row) for row in rows], 0)}


def compare_gradients(family: Family, ours: torch.nn.Module, theirs: torch.nn.Module, more: dict[str, str]) -> None:
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    for name, their_name in {**family.gradients, **more}.items():
        gradient = other[their_name].grad
        assert gradient is not None
        assert gradient.abs().max() > 1e-6, f"{their_name} has no gradient to compare"
        torch.testing.assert_close(mine[name].grad, gradient, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


MLM_GRADIENTS = {
    "ModernBert": {"decoder.bias": "decoder.bias"},
    "Bert": {"transform.dense.bias": "cls.predictions.transform.dense.bias", "decoder.bias": "cls.predictions.bias"},
    "Roberta": {"transform.dense.bias": "lm_head.dense.bias", "decoder.bias": "lm_head.bias"},
}


def masked_labels(rows: list[list[int]]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [[token if torch.rand(1, generator=generator) < 0.4 else -100 for token in row] for row in rows]


def test_masked_lm(family: Family, tmp_path: Path) -> None:
    theirs = family.model("MaskedLM", tmp_path)
    ours = load_head(MaskedLM, tmp_path)
    rows = texts()
    labels = masked_labels(rows)
    packed = torch.tensor([label for row in labels for label in row])
    expected = theirs(**padded_batch(theirs, rows), labels=padded(labels, -100))
    batch = pack_ids(rows)
    found = ours(batch, packed)
    assert found.masked == int((packed != -100).sum()) > 50
    torch.testing.assert_close(found.loss, expected.loss, **TOLERANCE)
    positions = (packed != -100).nonzero().squeeze(1)
    wanted = expected.logits[padded(labels, -100) != -100]
    torch.testing.assert_close(ours.logits(batch, positions), wanted, **TOLERANCE)
    expected.loss.backward()
    found.loss.backward()
    compare_gradients(family, ours, theirs, MLM_GRADIENTS[family.name])


def test_an_untied_decoder_is_the_decoders_own(family: Family, tmp_path: Path) -> None:
    theirs = family.model("MaskedLM", tmp_path / "theirs", tie_word_embeddings=False)
    ours = load_head(MaskedLM, tmp_path / "theirs")
    assert ours.decoder.weight is not None
    ids = torch.tensor(texts((21,)))
    expected = theirs(ids).logits[0]
    torch.testing.assert_close(ours.logits(pack_ids(ids.tolist()), torch.arange(21)), expected, **TOLERANCE)
    save_head(ours, tmp_path / "ours")
    torch.testing.assert_close(family.opened("MaskedLM", tmp_path / "ours")(ids).logits[0], expected, **TOLERANCE)


def test_modernbert_settings_of_the_head_are_followed(tmp_path: Path) -> None:
    settings = {"decoder_bias": False, "classifier_bias": True, "classifier_activation": "silu", "norm_bias": True}
    theirs = FAMILIES["modernbert"].model("MaskedLM", tmp_path, **settings)
    ids = torch.tensor(texts((50,)))
    found = load_head(MaskedLM, tmp_path).logits(pack_ids(ids.tolist()), torch.arange(50))
    torch.testing.assert_close(found, theirs(ids).logits[0], **TOLERANCE)


CLASSIFIER_GRADIENTS = {
    "ModernBert": {"out.weight": "classifier.weight", "out.bias": "classifier.bias"},
    "Bert": {"out.weight": "classifier.weight", "transform.dense.weight": "bert.pooler.dense.weight"},
    "Roberta": {"out.weight": "classifier.out_proj.weight", "transform.dense.weight": "classifier.dense.weight"},
}
COUNT = len(LENGTHS)
PROBLEMS: dict[str, tuple[int, Tensor]] = {
    "single": (3, torch.tensor([0, 2, 1, 1, 0, 2])),
    "several": (4, torch.rand(COUNT, 4, generator=torch.Generator().manual_seed(1)).round()),
    "one number": (1, torch.linspace(-1, 2, COUNT)),
    "two numbers": (2, torch.randn(COUNT, 2, generator=torch.Generator().manual_seed(2))),
}


@pytest.mark.parametrize(("name", "pooling"), [("modernbert", "cls"), ("modernbert", "mean"), ("bert", "cls"), ("roberta", "cls")])
@pytest.mark.parametrize("problem", sorted(PROBLEMS))
def test_classifier(tmp_path: Path, problem: str, name: str, pooling: str) -> None:
    family = FAMILIES[name]
    labels, targets = PROBLEMS[problem]
    settings: dict[str, object] = {"problem_type": "regression"} if problem == "two numbers" else {}
    if family.name == "ModernBert":
        settings["classifier_pooling"] = pooling
    theirs = family.model("SequenceClassification", tmp_path / "theirs", num_labels=labels, **settings)
    ours = load_head(SequenceClassifier, tmp_path / "theirs")
    assert (ours.num_labels, ours.pooling) == (labels, pooling)
    rows = texts()
    expected = theirs(**padded_batch(theirs, rows), labels=targets)
    batch = pack_ids(rows)
    scores = ours(batch)
    torch.testing.assert_close(scores, expected.logits, **TOLERANCE)
    loss = ours.loss(scores, targets)
    torch.testing.assert_close(loss, expected.loss, **TOLERANCE)
    expected.loss.backward()
    loss.backward()
    compare_gradients(family, ours, theirs, CLASSIFIER_GRADIENTS[family.name])
    save_head(ours, tmp_path / "ours")
    again = family.opened("SequenceClassification", tmp_path / "ours")
    assert again.config.num_labels == labels
    assert again.config.problem_type == settings.get("problem_type")
    torch.testing.assert_close(again(**padded_batch(again, rows)).logits, expected.logits, **TOLERANCE)


def test_names_of_labels_go_both_ways(family: Family, tmp_path: Path) -> None:
    names = {0: "yes", 1: "no", 2: "perhaps"}
    family.model("SequenceClassification", tmp_path / "theirs", id2label=names, label2id={name: key for key, name in names.items()})
    ours = load_head(SequenceClassifier, tmp_path / "theirs")
    assert ours.label_names == ("yes", "no", "perhaps")
    save_head(ours, tmp_path / "ours")
    assert family.opened("SequenceClassification", tmp_path / "ours").config.id2label == names


QA_GRADIENTS = {
    "ModernBert": {"out.weight": "classifier.weight"},  # a softmax over tokens does not feel the bias
    "Bert": {"out.weight": "qa_outputs.weight"},
    "Roberta": {"out.weight": "qa_outputs.weight"},
}


def test_span_logits_of_a_padded_batch(family: Family, tmp_path: Path) -> None:
    theirs = family.model("QuestionAnswering", tmp_path / "theirs")
    ours = load_head(SpanQA, tmp_path / "theirs")
    rows = texts()
    inputs = padded_batch(theirs, rows)
    expected = theirs(**inputs)
    found = ours(pack_ids(rows))
    mask = inputs["attention_mask"].bool()
    torch.testing.assert_close(found.start, expected.start_logits[mask], **TOLERANCE)
    torch.testing.assert_close(found.end, expected.end_logits[mask], **TOLERANCE)
    save_head(ours, tmp_path / "ours")
    again = family.opened("QuestionAnswering", tmp_path / "ours")(**inputs)
    torch.testing.assert_close(again.end_logits[mask], found.end, **TOLERANCE)


def test_span_loss_of_a_mixed_batch_is_that_of_its_sequences_alone(family: Family, tmp_path: Path) -> None:
    """transformers' loss on a padded batch counts the padding in its softmax, so it is asked for each sequence by itself."""
    theirs = family.model("QuestionAnswering", tmp_path)
    ours = load_head(SpanQA, tmp_path)
    rows = texts((70, 2, 33, 129))
    starts, ends = torch.tensor([5, 0, 30, 64]), torch.tensor([9, 1, 32, 100])
    expected = torch.stack(
        [
            theirs(torch.tensor([row]), start_positions=start[None], end_positions=end[None]).loss
            for row, start, end in zip(rows, starts, ends, strict=True)
        ]
    ).mean()
    batch = pack_ids(rows)
    loss = ours.loss(ours(batch), batch, starts, ends)
    torch.testing.assert_close(loss, expected, **TOLERANCE)
    expected.backward()
    loss.backward()
    compare_gradients(family, ours, theirs, QA_GRADIENTS[family.name])
