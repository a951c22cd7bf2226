"""Answers to questions: predicted by a model, and scored by exact match and F1 as the official script of each data set defines them.

A prediction is the best span over all windows of a question, or "no answer" if that scores higher.

========== ============================== =============== =====================================
definition text is normalised by          F1 counts       an answer that is empty afterwards
========== ============================== =============== =====================================
squad_v1   lower-casing, deleting ASCII   words           has F1 0, even against another empty
           punctuation, then a, an, the                   answer
squad_v2   the same                       words           means "no answer"; F1 1 against another
korquad_v1 replacing brackets and quotes  characters, but has F1 0, even against another empty
           by spaces, lower-casing, then  not white space answer
           deleting ASCII punctuation
========== ============================== =============== =====================================

All definitions reduce white space to single spaces. With several right answers, the one that gives the highest score counts. Korean
particles are part of a word and are kept: an answer with another particle is not an exact match, so F1 counts characters there.

predictions.json has the format of the official scripts: question id -> answer. results.json holds the scores as fractions, of all
questions, of those with and without an answer, and by length, with the model, data and settings.

Source: BERT, arXiv:1810.04805, sections 4.2 and 4.3, and its run_squad.py (the best span and the lowest no-answer score over a
paragraph's windows); evaluate-v1.1.py and evaluate-v2.0.py of SQuAD (rajpurkar.github.io/SQuAD-explorer); evaluate-v1.0.py of KorQuAD
(korquad.github.io); arXiv:1909.07005, section 4.2; the tables of Jeong et al., HCLT 2023, sections 4.1 and 4.3 (texts within 512 tokens
and beyond).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from quiver.encoder.files import write_json
from quiver.encoder.heads import Span, SpanQA, best_spans
from quiver.encoder.packing import PackedBatch, pack
from quiver.encoder.progress import progress_bar
from quiver.encoder.tokenizer import Tokenizer
from quiver.eval.nlu.questions import NOWHERE, Question, Window, WindowSettings, make_windows

Official = Literal["squad_v1", "squad_v2", "korquad_v1"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETED = str.maketrans("", "", string.punctuation)
# Straight and single curly quotation marks (U+2018, U+2019), title brackets and parentheses become spaces.
_SPACED = str.maketrans(dict.fromkeys("'\"《》<>〈〉()\u2018\u2019", " "))

NO_ANSWER = ""


def squad_text(text: str) -> str:
    """Normalise a text as SQuAD's scripts do.

    Example:
        >>> squad_text("The  Broncos' (24-10)")
        'broncos 2410'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DELETED)).split())


def korquad_text(text: str) -> str:
    """Normalise a text as KorQuAD's script does.

    Example:
        >>> korquad_text("《조선일보》의 '사설(社說)'")
        '조선일보 의 사설 社說'
    """
    return " ".join(text.translate(_SPACED).lower().translate(_DELETED).split())


@dataclass(frozen=True)
class Definition:
    """Definition of the scores in one official script."""

    compared: Callable[[str], str]
    counted: Callable[[str], list[str]]
    empty_answers: bool


DEFINITIONS: Mapping[Official, Definition] = {
    "squad_v1": Definition(squad_text, str.split, empty_answers=False),
    "squad_v2": Definition(squad_text, str.split, empty_answers=True),
    "korquad_v1": Definition(korquad_text, lambda text: list("".join(text.split())), empty_answers=False),
}


@dataclass(frozen=True)
class AnswerScore:
    """Score of one question."""

    exact: float
    """1 for an exact match, otherwise 0."""
    f1: float
    """F1, from 0 to 1."""


def score_answer(prediction: str, answers: Sequence[str], official: Official) -> AnswerScore:
    """Score a prediction against all right answers of a question.

    Raises:
        ValueError: ``answers`` is empty, and the definition has no unanswerable questions.

    Example:
        >>> score_answer("조선일보가", ["조선일보", "한겨레"], "korquad_v1")
        AnswerScore(exact=0.0, f1=0.888888888888889)
        >>> score_answer("", [], "squad_v2")
        AnswerScore(exact=1.0, f1=1.0)
    """
    definition = DEFINITIONS[official]
    if definition.empty_answers:
        answers = [answer for answer in answers if definition.compared(answer)] or [NO_ANSWER]
    elif not answers:
        raise ValueError(f"a question without an answer cannot be scored as {official}")
    ours = definition.compared(prediction)
    theirs = [definition.compared(answer) for answer in answers]
    return AnswerScore(float(ours in theirs), max(_f1(ours, answer, definition) for answer in theirs))


def _f1(prediction: str, answer: str, definition: Definition) -> float:
    ours, theirs = definition.counted(prediction), definition.counted(answer)
    if definition.empty_answers and not (ours and theirs):
        return float(ours == theirs)
    same = sum((Counter(ours) & Counter(theirs)).values())
    if not same:
        return 0.0
    precision, recall = same / len(ours), same / len(theirs)
    return 2 * precision * recall / (precision + recall)


@dataclass(frozen=True)
class Scores:
    """Mean scores over questions, as fractions."""

    questions: int
    """Number of questions."""
    exact: float
    """Mean exact match."""
    f1: float
    """Mean F1."""


def mean_scores(scores: Sequence[AnswerScore]) -> Scores | None:
    """Mean scores; None if ``scores`` is empty."""
    count = len(scores)
    if not count:
        return None
    return Scores(count, sum(one.exact for one in scores) / count, sum(one.f1 for one in scores) / count)


def score_answers(questions: Sequence[Question], predictions: Mapping[str, str], official: Official) -> dict[str, AnswerScore]:
    """Score every question: id -> score.

    A question without a prediction scores 0, as in the scripts of SQuAD 1.1 and KorQuAD; SQuAD 2.0's script leaves it out of the mean.
    """
    if unknown := sorted(predictions.keys() - {question.id for question in questions}):
        raise ValueError(f"prediction for unknown question {unknown[0]!r}")
    none = AnswerScore(0.0, 0.0)
    return {
        question.id: none
        if question.id not in predictions
        else score_answer(predictions[question.id], [answer.text for answer in question.answers], official)
        for question in questions
    }


BATCH_TOKENS = 16_384
"""Token budget of a batch. Longer windows are allowed: a batch holds at least one."""


@dataclass(frozen=True)
class Prediction:
    """Prediction for one question."""

    text: str
    score: float
    no_answer: float  # start logit plus end logit of the first token, minimum over the windows
    windows: int


def answer_questions(
    model: SpanQA,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    settings: WindowSettings,
    *,
    may_have_none: bool = False,
    no_answer_margin: float = 0.0,
    batch_tokens: int = BATCH_TOKENS,
    progress: bool = False,
) -> list[Prediction]:
    """Predict an answer for every question."""
    windows = list(make_windows(questions, tokenizer, settings))
    best: dict[int, Prediction] = {}
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), progress_bar("answer", len(windows), enabled=progress) as advance:
            for batch in pack([window.ids for window in windows], max_tokens=max(batch_tokens, settings.max_length)):
                members = [windows[row] for row in batch.rows]
                for window, (span, none) in zip(members, _find_spans(model, batch, members, settings), strict=True):
                    new = _read_prediction(questions[window.question].context, window, span, none)
                    seen = best.get(window.question)
                    best[window.question] = new if seen is None else _merge_predictions(seen, new)
                advance(len(members))
    finally:
        model.train(was_training)
    margin = no_answer_margin if may_have_none else torch.inf
    return [_apply_margin(best[position], margin) for position in range(len(questions))]


def _find_spans(
    model: SpanQA, batch: PackedBatch, windows: Sequence[Window], settings: WindowSettings
) -> Iterator[tuple[Span | None, float]]:
    """The best span and the no-answer score of each window in a batch."""
    start, end = (part.float().cpu() for part in model(batch))
    found: list[list[Span]] = [[] for _ in windows]
    for number in range(max(len(window.parts) for window in windows)):  # no answer continues beyond a part
        allowed = [positions[number] if number < len(positions) else (0, 0) for positions in (window.positions for window in windows)]
        for spans, more in zip(
            found, best_spans(start, end, batch, max_answer_length=settings.max_answer_length, allowed=allowed), strict=True
        ):
            spans += more
    for offset, spans in zip(batch.offsets, found, strict=False):
        best = max(spans, key=lambda span: span.score, default=None)
        yield best, float(start[offset + NOWHERE] + end[offset + NOWHERE])


def _read_prediction(context: str, window: Window, span: Span | None, none: float) -> Prediction:
    if span is None:  # the tokenizer leaves no token of the paragraph
        return Prediction(NO_ANSWER, -torch.inf, none, 1)
    low, high = window.characters(span.start, span.end)
    return Prediction(context[low:high].strip(), span.score, none, 1)


def _merge_predictions(seen: Prediction, new: Prediction) -> Prediction:
    """Merge predictions from different windows of a question: the better span, the lower no-answer score."""
    better = max(seen, new, key=lambda one: one.score)
    return Prediction(better.text, better.score, min(seen.no_answer, new.no_answer), seen.windows + new.windows)


def _apply_margin(prediction: Prediction, margin: float) -> Prediction:
    if prediction.no_answer - prediction.score <= margin:
        return prediction
    return Prediction(NO_ANSWER, prediction.score, prediction.no_answer, prediction.windows)


SCHEMA = "quiver-qa/1"
RESULTS, PREDICTIONS = "results.json", "predictions.json"

LENGTHS = (256, 512, 1024, 2048)
"""Bounds of the length ranges, in tokens of question, paragraph and special tokens as one sequence."""


@dataclass(frozen=True)
class LengthScores:
    """Scores of the questions whose sequence length is within a range."""

    above: int
    """Lower bound of the length in tokens, exclusive."""
    up_to: int | None
    """Upper bound of the length in tokens, inclusive; None for no bound."""
    scores: Scores
    """Mean scores."""


@dataclass(frozen=True)
class QaResults:
    """Scores of a model."""

    official: Official
    """Official script that defines the scores."""
    scores: Scores
    """Mean scores over all questions."""
    answerable: Scores | None
    """Mean scores over the questions with an answer; None if all questions have one."""
    unanswerable: Scores | None
    """Mean scores over the questions without an answer; None if all questions have one."""
    by_length: tuple[LengthScores, ...]
    """Mean scores by length, shortest first; empty ranges are left out."""
    windows: int
    """Number of windows of all paragraphs."""


def score_predictions(
    questions: Sequence[Question], predictions: Sequence[Prediction], tokenizer: Tokenizer, official: Official
) -> QaResults:
    """Score the predictions of `quiver.eval.nlu.answers.answer_questions`."""
    scores = score_answers(questions, answer_texts(questions, predictions), official)
    overall = mean_scores(list(scores.values()))
    if overall is None:
        raise ValueError("there are no questions to score")
    parts: dict[bool, list[AnswerScore]] = {True: [], False: []}
    for question in questions:
        parts[bool(question.answers)].append(scores[question.id])
    mixed = bool(parts[False])
    return QaResults(
        official,
        overall,
        mean_scores(parts[True]) if mixed else None,
        mean_scores(parts[False]),
        tuple(_score_by_length(questions, scores, tokenizer)),
        sum(prediction.windows for prediction in predictions),
    )


def answer_texts(questions: Sequence[Question], predictions: Sequence[Prediction]) -> dict[str, str]:
    """Question id -> predicted answer."""
    return {question.id: prediction.text for question, prediction in zip(questions, predictions, strict=True)}


def _score_by_length(questions: Sequence[Question], scores: Mapping[str, AnswerScore], tokenizer: Tokenizer) -> list[LengthScores]:
    template = tokenizer.pair_template()
    special = len(template.before) + len(template.between) + len(template.behind)
    contexts = {context: len(tokenizer.pieces(context).ids) for context in {question.context for question in questions}}
    lengths = {question.id: special + len(tokenizer.pieces(question.text).ids) + contexts[question.context] for question in questions}
    found = []
    for above, up_to in zip((0, *LENGTHS), (*LENGTHS, None), strict=True):
        inside = [key for key, length in lengths.items() if above < length and (up_to is None or length <= up_to)]
        means = mean_scores([scores[key] for key in inside])
        if means is not None:
            found.append(LengthScores(above, up_to, means))
    return found


def write_qa_results(folder: Path, results: QaResults, answers: Mapping[str, str], *, made_with: Mapping[str, Any]) -> None:
    """Write results.json and predictions.json, replacing existing files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PREDICTIONS, dict(answers))
    write_json(folder / RESULTS, {"schema": SCHEMA, **made_with, **asdict(results)})
