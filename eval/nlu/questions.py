"""Questions on paragraphs in SQuAD's JSON format (SQuAD 1.1 and 2.0, KorQuAD 1.0), and the windows into which long paragraphs are split.

A window is ``[CLS] question [SEP] part of the paragraph [SEP]``, with the tokenizer's own special tokens. Windows overlap by at least the
maximum answer length, so that every such answer is complete in one of them; or paragraphs are truncated to one window each. There is no
second token type (BERT's segment B): the encoder distinguishes question and paragraph only by the tokens between them.

Shapes: n tokens of a sequence; positions are counted from the beginning of the sequence.
Source: SQuAD, arXiv:1606.05250 and arXiv:1806.03822; KorQuAD 1.0, arXiv:1909.07005; the files of both; BERT, arXiv:1810.04805, section
4.2, and its run_squad.py (``doc_stride``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Literal, TypeAlias

from quiver.encoder.errors import InputError
from quiver.encoder.schema import Field, TextSchema
from quiver.encoder.tokenizer import TextTokens, Tokenizer
from quiver.eval.datasets.squad import is_impossible, list_under, read_paragraphs, text_under
from quiver.retrieval.data.corpus import read_judgements


@dataclass(frozen=True)
class Answer:
    """A span of a paragraph."""

    text: str
    """Text of the span, white space and particles included."""
    start: int
    """Index of its first character in the paragraph."""


@dataclass(frozen=True)
class Question:
    """A question on one paragraph."""

    id: str
    """Question id in the file."""
    text: str
    """The question."""
    context: str
    """The paragraph."""
    answers: tuple[Answer, ...]
    """Reference answers; empty if the question has no answer in the paragraph (SQuAD 2.0)."""


@dataclass(frozen=True)
class QuestionSet:
    """Questions of a file."""

    questions: list[Question]
    misplaced: int


def read_questions(path: Path, *, only: Collection[str] | None = None) -> QuestionSet:
    """Read a file in SQuAD's JSON format."""
    wanted = None if only is None else set(only)
    questions: dict[str, Question] = {}
    for paragraph in read_paragraphs(path):
        for position, raw in enumerate(paragraph.questions):
            where = f"{paragraph.where}.qas[{position}]"
            question = _read_question(paragraph.context, raw, where)
            if question.id in questions:
                raise InputError(f"{where}: the question id {question.id!r} occurs twice")
            questions[question.id] = question
    if not questions:
        raise InputError(f"{path}: contains no questions")
    if wanted is not None:
        if missing := sorted(wanted - questions.keys()):
            raise InputError(f"{path}: contains no question {missing[0]!r}" + (f", and {len(missing) - 1} more" if missing[1:] else ""))
        questions = {key: question for key, question in questions.items() if key in wanted}
    found = list(questions.values())
    return QuestionSet(found, sum(not stands(answer, question.context) for question in found for answer in question.answers))


def divide_questions(questions: Sequence[Question], shares: Sequence[int]) -> list[list[Question]]:
    """Divide questions by shares such as 9 and 1: drawn by the checksum of their ids, so that neither order nor seed matters.

    Questions on one paragraph may come into different parts. With 60,407 questions, 9 and 1 give 54,366 and 6,041, as in Table 1 of Jeong
    et al., HCLT 2023, which has such parts.

    Example:
        >>> questions = [Question(str(number), "why?", "because", ()) for number in range(10)]
        >>> [[one.id for one in part] for part in divide_questions(questions, (8, 1, 1))]
        [['0', '1', '2', '3', '4', '7', '8', '9'], ['6'], ['5']]
    """
    drawn = sorted(range(len(questions)), key=lambda place: hashlib.sha256(questions[place].id.encode()).digest())
    ends = [len(questions) * total // sum(shares) for total in accumulate(shares, initial=0)]
    return [[questions[place] for place in sorted(drawn[start:end])] for start, end in pairwise(ends)]


def read_split(path: Path) -> list[str]:
    """Read the question ids of a split, from the judgements of the same questions as a retrieval collection."""
    return list(dict.fromkeys(judgement.query for judgement in read_judgements(path)))


def stands(answer: Answer, context: str) -> bool:
    """Whether the paragraph contains an answer at its stated position."""
    return answer.start >= 0 and context.startswith(answer.text, answer.start)


def _read_question(context: str, raw: object, where: str) -> Question:
    key, text = text_under(raw, "id", where), text_under(raw, "question", where)
    impossible = is_impossible(raw)
    answers = () if impossible else tuple(_read_answer(one, where) for one in list_under(raw, "answers", where))
    if not answers and not impossible:
        raise InputError(f'{where}: has no answers and is not marked "is_impossible": true')
    return Question(key, text, context, answers)


def _read_answer(raw: object, where: str) -> Answer:
    start = raw.get("answer_start") if isinstance(raw, Mapping) else None
    if type(start) is not int:
        raise InputError(f"{where}: not SQuAD's format, 'answer_start' must be a whole number")
    return Answer(text_under(raw, "text", where), start)


Paragraphs: TypeAlias = Literal["overlap", "head", "tail", "head-tail"]
"""Treatment of a paragraph that is too long for a window, see `WindowSettings`."""

NOWHERE = 0
"""Target position of windows without the answer: their first token."""


class WindowSettings(TextSchema):
    """Lengths of the windows, in tokens."""

    max_length: int = Field(ge=16)
    """Maximum length of a window, special tokens included."""
    overlap: int = Field(default=128, ge=1)
    """Paragraph tokens shared by neighbouring windows; BERT's doc_stride is the number of tokens not shared."""
    paragraphs: Paragraphs = "overlap"
    """Treatment of a paragraph that is too long for a window. ``overlap``: several windows. ``head``, ``tail``: one window with its
    beginning or its end; the rest is not read. ``head-tail``: one window with a quarter of ``max_length`` from its beginning and the rest
    from its end (128 and 382 of 510 tokens in arXiv:1905.05583, section 5.3.1)."""
    max_question_length: int = Field(default=64, ge=1)
    """Maximum length of a question; longer questions are truncated."""
    max_answer_length: int = Field(default=30, ge=1)
    """Maximum length of a predicted answer; at most the overlap."""


@dataclass(frozen=True)
class Window:
    """One sequence of a question and part of its paragraph.

    Attributes:
        question: Index of the question in the input list.
        ids: Token ids, special tokens included.
        first: Position in the sequence of the first paragraph token.
        parts: Ranges of the paragraph's tokens in this window, in their order: one, or two if the middle is left out.
        spans: Character range in the whole paragraph of each paragraph token in this window, as (start, stop).
    """

    question: int
    ids: list[int]
    first: int
    parts: tuple[range, ...]
    spans: list[tuple[int, int]]

    @property
    def stop(self) -> int:
        """Position after the last paragraph token."""
        return self.first + len(self.spans)

    @property
    def positions(self) -> list[tuple[int, int]]:
        """Positions (first, stop) in the sequence of each part."""
        ends = list(accumulate(map(len, self.parts), initial=self.first))
        return list(pairwise(ends))

    def characters(self, start: int, end: int) -> tuple[int, int]:
        """Character range (start, stop) in the paragraph of the tokens from ``start`` to ``end``, both included."""
        return self.spans[start - self.first][0], self.spans[end - self.first][1]


@dataclass(frozen=True)
class LabelledWindow:
    """A window for training.

    Attributes:
        window: The sequence.
        start: Position of the answer's first token; `NOWHERE` if the window does not contain the complete answer.
        end: Position of the answer's last token, or `NOWHERE`.
    """

    window: Window
    start: int
    end: int


def check_settings(settings: WindowSettings, tokenizer: Tokenizer, *, positions: int) -> None:
    """Check early that windows of these lengths are possible."""
    template = tokenizer.pair_template()
    special = len(template.before) + len(template.between) + len(template.behind)
    room = settings.max_length - special - settings.max_question_length
    if settings.max_length > positions:
        raise InputError(f"windows.max_length: must be <= {positions}, the encoder's positions, got {settings.max_length}")
    if settings.paragraphs != "overlap":
        if room < 1:
            raise InputError(
                f"windows.max_length: must be > {settings.max_length - room} (max_question_length and {special} special tokens)"
            )
        return
    if settings.max_answer_length > settings.overlap:
        raise InputError(
            f"windows.overlap: must be >= {settings.max_answer_length}, max_answer_length, so that no answer is cut; got {settings.overlap}"
        )
    if room <= settings.overlap:
        raise InputError(
            f"windows.overlap: must be < {room} (max_length {settings.max_length} minus max_question_length "
            f"{settings.max_question_length} and {special} special tokens), got {settings.overlap}"
        )


def make_windows(questions: Sequence[Question], tokenizer: Tokenizer, settings: WindowSettings) -> Iterator[Window]:
    """Split or truncate the paragraphs of questions into windows, in the order of the questions."""
    for cut in _cut_paragraphs(questions, tokenizer, settings):
        yield from cut.windows()


def labelled_windows(questions: Sequence[Question], tokenizer: Tokenizer, settings: WindowSettings) -> Iterator[LabelledWindow]:
    """The windows of `make_windows`, labelled with the first answer of each question, for training.

    With overlapping windows, an answer that fits into a window is complete in at least one: if no regular window contains it, because it is
    longer than the overlap, one more window is placed around it. Windows without the answer, as of a truncated paragraph, have the target
    `NOWHERE`. Questions whose answer is not at its stated position are left out.
    """
    for cut in _cut_paragraphs(questions, tokenizer, settings):
        question = questions[cut.question]
        if not question.answers:
            yield from (LabelledWindow(window, NOWHERE, NOWHERE) for window in cut.windows())
            continue
        answer = question.answers[0]
        if not stands(answer, question.context):
            continue
        low, high = cut.tokens(answer.start, answer.start + len(answer.text))
        labelled = [_label_window(window, low, high) for window in cut.windows()]
        if settings.paragraphs == "overlap" and all(one.start == NOWHERE for one in labelled) and high - low < cut.room:
            middle = max(0, min(low - (cut.room - (high - low)) // 2, len(cut.pieces.ids) - cut.room))
            labelled.append(_label_window(cut.window(range(middle, middle + cut.room)), low, high))
        yield from labelled


@dataclass(frozen=True)
class _Cut:
    """A question with its tokenised paragraph, which can be split into windows or truncated to one."""

    question: int
    head: list[int]
    behind: list[int]
    pieces: TextTokens
    room: int
    settings: WindowSettings

    def windows(self) -> Iterator[Window]:
        """Overlapping windows up to the end of the paragraph, none contained in another; or the window of a truncated paragraph."""
        tokens, kept = len(self.pieces.ids), self.settings.paragraphs
        if kept == "overlap":
            for start in range(0, max(tokens - self.settings.overlap, 1), self.room - self.settings.overlap):
                yield self.window(range(start, min(start + self.room, tokens)))
            return
        before = {"head": self.room, "tail": 0, "head-tail": min(self.settings.max_length // 4, self.room)}[kept]
        left_out = max(0, tokens - self.room)
        parts = (range(before), range(before + left_out, tokens)) if left_out else (range(tokens),)
        yield self.window(*filter(None, parts))

    def window(self, *parts: range) -> Window:
        """The window with ranges of the paragraph's tokens."""
        inside = [token for part in parts for token in part]
        ids = [*self.head, *(self.pieces.ids[token] for token in inside), *self.behind]
        return Window(self.question, ids, len(self.head), parts, [self.pieces.spans[token] for token in inside])

    def tokens(self, begin: int, behind: int) -> tuple[int, int]:
        """First and last token of a character range; if the tokenizer leaves no token of the range, the next token after it."""
        inside = [token for token, (first, stop) in enumerate(self.pieces.spans) if stop > begin and first < behind]
        if inside:
            return inside[0], inside[-1]
        after = next((token for token, (first, _) in enumerate(self.pieces.spans) if first >= behind), len(self.pieces.spans) - 1)
        return after, after


def _cut_paragraphs(questions: Sequence[Question], tokenizer: Tokenizer, settings: WindowSettings) -> Iterator[_Cut]:
    template = tokenizer.pair_template()
    places = iter(range(len(questions)))
    for context, group in groupby(questions, key=lambda question: question.context):
        pieces = tokenizer.pieces(context)
        for question in group:
            text = tokenizer.pieces(question.text).ids[: settings.max_question_length]
            head = [*template.before, *text, *template.between]
            room = settings.max_length - len(head) - len(template.behind)
            yield _Cut(next(places), head, template.behind, pieces, room, settings)


def _label_window(window: Window, low: int, high: int) -> LabelledWindow:
    """Label a window with an answer whose first and last token are given as paragraph tokens."""
    for part, (first, _) in zip(window.parts, window.positions, strict=True):
        if low in part and high in part:
            return LabelledWindow(window, low - part.start + first, high - part.start + first)
    return LabelledWindow(window, NOWHERE, NOWHERE)
