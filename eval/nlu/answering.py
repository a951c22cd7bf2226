"""Answer questions with a model: the best span over all windows of a question, or "no answer" if that scores higher.

Source: BERT, arXiv:1810.04805, sections 4.2 and 4.3; its run_squad.py (the best span and the lowest no-answer score over a paragraph's
windows).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quiver.encoder.heads import Span, SpanQA, best_spans
from quiver.encoder.packing import PackedBatch, pack
from quiver.encoder.tokenizer import Tokenizer
from quiver.eval.nlu.answer_scores import NO_ANSWER
from quiver.eval.nlu.questions import Question
from quiver.eval.nlu.windows import NOWHERE, Window, WindowSettings, make_windows
from quiver.retrieval.utils import progress_bar

# Token budget of a batch. Longer windows are allowed: a batch holds at least one.
BATCH_TOKENS = 16_384


@dataclass(frozen=True)
class Prediction:
    """Prediction for one question.

    Attributes:
        text: Best span of the paragraph, without white space at its ends; empty for "no answer".
        score: Start logit plus end logit of the best span.
        no_answer: No-answer score: start logit plus end logit of the first token, minimum over the windows.
        windows: Number of windows of the paragraph.
    """

    text: str
    score: float
    no_answer: float
    windows: int


def answer_questions(
    model: SpanQA,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    settings: WindowSettings,
    *,
    may_have_none: bool = False,
    no_answer_margin: float = 0.0,
    progress: bool = False,
) -> list[Prediction]:
    """Predict an answer for every question.

    Args:
        model: Model to run; it is in evaluation mode during the call, and its mode is restored afterwards.
        tokenizer: Tokenizer of the model.
        questions: Questions with their paragraphs; their answers are ignored.
        settings: Lengths that `quiver.eval.nlu.windows.check_settings` has accepted.
        may_have_none: Allow "no answer" as a prediction.
        no_answer_margin: With ``may_have_none``, predict "no answer" if its score exceeds that of the best span by more than this.
        progress: Show a progress bar on standard error.

    Returns:
        One prediction per question, in the order of the questions.
    """
    windows = list(make_windows(questions, tokenizer, settings))
    best: dict[int, Prediction] = {}
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), progress_bar("answer", len(windows), enabled=progress) as advance:
            for batch in pack([window.ids for window in windows], max_tokens=max(BATCH_TOKENS, settings.max_length)):
                members = [windows[row] for row in batch.rows]
                for window, (span, none) in zip(members, _spans(model, batch, members, settings), strict=True):
                    new = _prediction(questions[window.question].context, window, span, none)
                    seen = best.get(window.question)
                    best[window.question] = new if seen is None else _merged(seen, new)
                advance(len(members))
    finally:
        model.train(was_training)
    margin = no_answer_margin if may_have_none else torch.inf
    return [_decided(best[place], margin) for place in range(len(questions))]


def _spans(model: SpanQA, batch: PackedBatch, windows: Sequence[Window], settings: WindowSettings) -> Iterator[tuple[Span | None, float]]:
    """The best span and the no-answer score of each window in a batch."""
    start, end = (part.float().cpu() for part in model(batch))
    allowed = [(window.first, window.stop) for window in windows]
    spans = best_spans(start, end, batch, max_answer_length=settings.max_answer_length, allowed=allowed)
    for offset, found in zip(batch.offsets, spans, strict=False):
        yield (found[0] if found else None), float(start[offset + NOWHERE] + end[offset + NOWHERE])


def _prediction(context: str, window: Window, span: Span | None, none: float) -> Prediction:
    if span is None:  # the tokenizer leaves no token of the paragraph
        return Prediction(NO_ANSWER, -torch.inf, none, 1)
    low, high = window.characters(span.start, span.end)
    return Prediction(context[low:high].strip(), span.score, none, 1)


def _merged(seen: Prediction, new: Prediction) -> Prediction:
    """Merge predictions from different windows of a question: the better span, the lower no-answer score."""
    better = max(seen, new, key=lambda one: one.score)
    return Prediction(better.text, better.score, min(seen.no_answer, new.no_answer), seen.windows + new.windows)


def _decided(prediction: Prediction, margin: float) -> Prediction:
    if prediction.no_answer - prediction.score <= margin:
        return prediction
    return Prediction(NO_ANSWER, prediction.score, prediction.no_answer, prediction.windows)
