"""GLUE against scikit-learn, scipy and transformers: measures, degenerate ones too, pairs that are cut, a saved classifier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, save_encoder
from quiver.eval.nlu.fine_tuning import save_tokenizer
from quiver.eval.nlu.glue_tasks import TASKS, accuracy, f1, matthews, pearson, spearman
from quiver.eval.nlu.glue_training import open_glue_model, predict, tokenise

pytestmark = pytest.mark.parity

TEXT = "임종석은 1989년 2월 15일 여의도 농민 폭력 시위를 주도했다. The bird has two wings, ünïcode and  spaces; the sea is deep! "

LABELS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "even": lambda draw, count: draw.integers(0, 2, count),
    "rare": lambda draw, count: (draw.random(count) < 0.02).astype(np.int64),
    "none": lambda draw, count: np.zeros(count, np.int64),
    "all": lambda draw, count: np.ones(count, np.int64),
}

NUMBERS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "normal": lambda draw, count: draw.standard_normal(count),
    "tied": lambda draw, count: draw.integers(0, 6, count) / 1.0,
    "huge": lambda draw, count: 1e12 + draw.standard_normal(count),
    "tiny": lambda draw, count: 1e-150 * draw.standard_normal(count),
    "half": lambda draw, count: draw.standard_normal(count).astype(np.float32),
}


@pytest.mark.filterwarnings("ignore")  # of what is not defined, which is then 0
@pytest.mark.parametrize("count", [1, 2, 7, 408, 40_430])
@pytest.mark.parametrize("predicted", LABELS)
@pytest.mark.parametrize("right", LABELS)
def test_measures_of_labels_are_scikit_learns(predicted: str, right: str, count: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng([count, len(predicted), len(right)])
    ours, theirs = LABELS[predicted](draw, count), LABELS[right](draw, count)
    assert accuracy(ours, theirs) == pytest.approx(metrics.accuracy_score(theirs, ours), abs=1e-12)
    assert f1(ours, theirs) == pytest.approx(metrics.f1_score(theirs, ours, zero_division=0.0), abs=1e-12)
    assert matthews(ours, theirs) == pytest.approx(metrics.matthews_corrcoef(theirs, ours), abs=1e-12)


@pytest.mark.filterwarnings("ignore")  # of 1e12 and little more, which is nearly constant
@pytest.mark.parametrize("count", [2, 3, 50, 1_500])
@pytest.mark.parametrize("predicted", NUMBERS)
@pytest.mark.parametrize("right", ["normal", "tied"])
def test_correlations_are_scipys(predicted: str, right: str, count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng([count, len(predicted), len(right), 7])
    ours, theirs = NUMBERS[predicted](draw, count), NUMBERS[right](draw, count)
    if np.ptp(ours) == 0 or np.ptp(theirs) == 0:
        pytest.skip("drawn without a difference")
    # Of 1e12 and a few units a float64 keeps four digits of the units, and rounding differs from one formula to the other.
    tolerance = 1e-6 if predicted in ("huge", "half") else 1e-10
    assert pearson(ours, theirs) == pytest.approx(stats.pearsonr(ours.astype(np.float64), theirs).statistic, abs=tolerance)
    assert spearman(ours, theirs) == pytest.approx(stats.spearmanr(ours, theirs).statistic, abs=1e-10)


def test_where_scipy_has_no_correlation_it_is_zero() -> None:
    stats = pytest.importorskip("scipy.stats")
    same, other = np.full(9, 0.1), np.arange(9.0)
    for ours, theirs in ((same, other), (other, same), (same, same)):
        with pytest.warns(stats.ConstantInputWarning):
            assert np.isnan(stats.pearsonr(ours, theirs).statistic)
        assert pearson(ours, theirs) == spearman(ours, theirs) == 0.0


@pytest.mark.parametrize("kind", ["minilm", "bytes"])
@pytest.mark.parametrize("max_length", [16, 17, 40, 256])
def test_pairs_are_cut_as_transformers_cuts_them(minilm: Path, tmp_path: Path, kind: str, max_length: int) -> None:
    transformers = pytest.importorskip("transformers")
    folder = minilm
    if kind == "bytes":
        folder = tmp_path
        Tokenizer.train([TEXT] * 2, vocab_size=400, max_length=512).save(folder)
    words = TEXT.split()
    pairs = [(" ".join(words[:first]), " ".join(words[-second:])) for first in range(1, 15, 2) for second in range(1, 15, 3)]
    tokenizer, theirs = Tokenizer.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs([pair[0] for pair in pairs], [pair[1] for pair in pairs], truncation="longest_first", max_length=max_length)
    ours = tokenise(pairs, tokenizer, max_length=max_length)
    assert ours.ids == expected["input_ids"]
    whole = theirs([pair[0] for pair in pairs], [pair[1] for pair in pairs])["input_ids"]
    assert ours.truncated == [len(ids) > max_length for ids in whole]
    singles = tokenise([(pair[0],) for pair in pairs], tokenizer, max_length=max_length)
    assert singles.ids == theirs([pair[0] for pair in pairs], truncation=True, max_length=max_length)["input_ids"]


@pytest.mark.parametrize("name", ["mnli", "stsb"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_saved_classifier_says_the_same_in_transformers(tmp_path: Path, name: str, pooling: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from quiver.encoder import save_head

    task = TASKS[name]  # type: ignore[index]
    config = EncoderConfig.modernbert(
        vocab_size=400, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"], max_positions=128
    )
    save_encoder(init_weights(Encoder(config), seed=1), tmp_path / "start")
    Tokenizer.train([TEXT] * 2, vocab_size=400, max_length=128).save(tmp_path / "start")
    model, tokenizer = open_glue_model(tmp_path / "start", task, seed=3, pooling=pooling)
    save_head(model, tmp_path / "saved")
    save_tokenizer(tokenizer, tmp_path / "saved")
    pairs = [(TEXT[:40], TEXT[20:90]), ("The bird", "has wings"), (TEXT[60:], "deep")]
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    backend = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        logits = torch.cat([theirs(**backend(*pair, return_tensors="pt")).logits for pair in pairs])
    ours = predict(model, tokenise(pairs, tokenizer, max_length=128).ids)
    if task.is_regression:
        torch.testing.assert_close(ours, logits[:, 0], atol=1e-5, rtol=1e-5)
        assert theirs.config.problem_type == "regression"
    else:
        assert ours.tolist() == logits.argmax(1).tolist()
        assert [theirs.config.id2label[label] for label in range(3)] == list(task.labels)
