"""Answers from a model: windows in packed batches, the best span of all windows of a question, and no answer where that scores higher.

Source: BERT, arXiv:1810.04805, sections 4.2 and 4.3; its run_squad.py (over a paragraph's windows the best span, and the lowest score of
no answer).
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
from quiver.retrieval.progress import progress_bar

# Tokens of one batch; windows of any length fit, for a batch holds at least one.
BATCH_TOKENS = 16_384


@dataclass(frozen=True)
class Prediction:
    """What a model says of one question.

    Attributes:
        text: The best span of the paragraph, white space at its ends left out; empty for no answer.
        score: Start logit plus end logit of the best span.
        no_answer: The same of the first token, the lowest over the windows: how much it looks as if there were no answer.
        windows: Windows that the paragraph was cut into.
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
    """Answer questions.

    Args:
        model: Put into evaluation mode while it answers.
        tokenizer: Its vocabulary.
        questions: Paragraphs and questions; answers are not looked at.
        settings: Lengths that `quiver.eval.nlu.windows.check_settings` has accepted.
        may_have_none: There are questions without an answer.
        no_answer_margin: With ``may_have_none``: how much more than the best span no answer must score to be given.
        progress: Show a bar on standard error.

    Returns:
        One prediction a question, in their order.
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
    """For each window of a batch its best span and the score of no answer."""
    start, end = (part.float().cpu() for part in model(batch))
    allowed = [(window.first, window.stop) for window in windows]
    spans = best_spans(start, end, batch, max_answer_length=settings.max_answer_length, allowed=allowed)
    for offset, found in zip(batch.offsets, spans, strict=False):
        yield (found[0] if found else None), float(start[offset + NOWHERE] + end[offset + NOWHERE])


def _prediction(context: str, window: Window, span: Span | None, none: float) -> Prediction:
    if span is None:  # a paragraph of which the tokenizer leaves nothing
        return Prediction(NO_ANSWER, -torch.inf, none, 1)
    low, high = window.characters(span.start, span.end)
    return Prediction(context[low:high].strip(), span.score, none, 1)


def _merged(seen: Prediction, new: Prediction) -> Prediction:
    """Two predictions for one question from different windows: the better span, the lower score of no answer."""
    better = max(seen, new, key=lambda one: one.score)
    return Prediction(better.text, better.score, min(seen.no_answer, new.no_answer), seen.windows + new.windows)


def _decided(prediction: Prediction, margin: float) -> Prediction:
    if prediction.no_answer - prediction.score <= margin:
        return prediction
    return Prediction(NO_ANSWER, prediction.score, prediction.no_answer, prediction.windows)
