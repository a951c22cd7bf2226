"""Predictions over windows, with a model whose logits are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quiver.encoder import EncoderConfig, PackedBatch, SpanLogits, SpanQA, Tokenizer
from quiver.encoder.model import Encoder
from quiver.eval.nlu.answers import answer_questions, score_predictions
from quiver.eval.nlu.questions import Answer, Question, WindowSettings, make_windows

FILLER = "bird sea wing stone tree river cloud field road lamp "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([FILLER * 2 + "target other 0123456789"] * 3, vocab_size=420)


class Pointing(SpanQA):
    """Model whose logits depend only on the token id, and on whether a token is the first of its sequence."""

    def __init__(self, scores: dict[int, float], none: float) -> None:
        config = EncoderConfig.modernbert(
            vocab_size=420, hidden_size=8, num_heads=1, intermediate_size=8, layer_types=["global"], max_positions=64
        )
        super().__init__(Encoder(config))
        self.scores, self.none = scores, none
        self.seen: list[bool] = []

    def forward(self, batch: PackedBatch) -> SpanLogits:
        self.seen.append(self.training)
        logits = torch.tensor([self.scores.get(int(token), 0.0) for token in batch.ids])
        logits[batch.cu_seqlens[:-1].long()] = self.none
        return SpanLogits(logits, logits.clone())


def make_question(context: str, *answers: str, key: str = "q") -> Question:
    return Question(key, "where?", context, tuple(Answer(answer, context.index(answer)) for answer in answers))


def token(tokenizer: Tokenizer, word: str) -> int:
    [found] = tokenizer.pieces(word).ids
    return found


def test_the_answer_comes_from_the_window_with_the_best_score(tokenizer: Tokenizer) -> None:
    questions = [
        make_question(FILLER * 3 + "target " + FILLER * 3, "target"),
        make_question("lamp target", "target", key="short"),
        make_question(FILLER * 5 + "other " + FILLER, "other", key="weaker"),
    ]
    model = Pointing({token(tokenizer, " target"): 5.0, token(tokenizer, " other"): 2.0}, none=9.0)
    settings = WindowSettings(max_length=24, overlap=6, max_question_length=6, max_answer_length=1)
    model.train()
    found = answer_questions(model, tokenizer, questions, settings)
    assert [one.text for one in found] == ["target", "target", "other"]
    assert [one.score for one in found] == [10.0, 10.0, 4.0]
    assert sum(one.windows for one in found) == len(list(make_windows(questions, tokenizer, settings)))
    assert found[0].windows > found[1].windows == 1
    assert model.training
    assert not any(model.seen)
    results = score_predictions(questions, found, tokenizer, "squad_v1")
    assert (results.scores.questions, results.scores.exact, results.scores.f1) == (3, 1.0, 1.0)
    assert results.answerable is None
    assert [part.scores.questions for part in results.by_length] == [3]
    assert (results.by_length[0].above, results.by_length[0].up_to) == (0, 256)


def test_no_answer_is_returned_if_it_scores_higher(tokenizer: Tokenizer) -> None:
    questions = [make_question("bird target", "target"), Question("none", "where?", "bird sea", ())]
    settings = WindowSettings(max_length=24, overlap=6, max_question_length=6, max_answer_length=1)
    model = Pointing({token(tokenizer, " target"): 5.0}, none=2.0)
    found = answer_questions(model, tokenizer, questions, settings, may_have_none=True)
    assert [(one.text, one.score, one.no_answer) for one in found] == [("target", 10.0, 4.0), ("", 0.0, 4.0)]
    assert [one.text for one in answer_questions(model, tokenizer, questions, settings)] != ["target", ""]
    wary = answer_questions(model, tokenizer, questions, settings, may_have_none=True, no_answer_margin=-6.5)
    assert [one.text for one in wary] == ["", ""]
    bold = answer_questions(model, tokenizer, questions, settings, may_have_none=True, no_answer_margin=4.0)
    assert bold[1].text != ""
    results = score_predictions(questions, found, tokenizer, "squad_v2")
    assert results.answerable is not None
    assert results.unanswerable is not None
    assert (results.answerable.exact, results.unanswerable.exact) == (1.0, 1.0)
    assert results.unanswerable.questions == 1


def test_windows_of_a_question_may_be_in_different_batches(tokenizer: Tokenizer) -> None:
    questions = [make_question(FILLER * repeats + "target " + FILLER * (7 - repeats), "target", key=str(repeats)) for repeats in range(7)]
    settings = WindowSettings(max_length=24, overlap=6, max_question_length=6, max_answer_length=1)
    torch.manual_seed(3)
    model = SpanQA(Pointing({}, 0.0).encoder)
    nn.init.normal_(model.out.weight)
    whole = answer_questions(model, tokenizer, questions, settings)
    for one, other in zip(whole, answer_questions(model, tokenizer, questions, settings, batch_tokens=1), strict=True):
        assert (one.text, one.windows) == (other.text, other.windows)
        assert one.score == pytest.approx(other.score, abs=1e-5)
        assert one.no_answer == pytest.approx(other.no_answer, abs=1e-5)
