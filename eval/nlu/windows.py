"""Sequences of a question and its paragraph; a long paragraph is split into several overlapping windows.

A window is ``[CLS] question [SEP] part of the paragraph [SEP]``, with the tokenizer's own special tokens. Windows overlap by at least the
maximum answer length, so that every such answer is complete in one of them. There is no second token type (BERT's segment B): the encoder
distinguishes question and paragraph only by the tokens between them.

Shapes: n tokens of a sequence; positions are counted from the beginning of the sequence.
Source: BERT, arXiv:1810.04805, section 4.2, and its run_squad.py (``doc_stride``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from quiver.encoder.errors import InputError
from quiver.encoder.schema import Field, TextSchema
from quiver.encoder.tokenizer import Pieces, Tokenizer
from quiver.eval.nlu.questions import Question, stands

NOWHERE = 0
"""Target position of windows without the answer: their first token."""


class WindowSettings(TextSchema):
    """Lengths of the windows, in tokens."""

    max_length: int = Field(ge=16)
    """Maximum length of a window, special tokens included."""
    overlap: int = Field(ge=1)
    """Paragraph tokens shared by neighbouring windows; BERT's doc_stride is the number of tokens not shared."""
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
        skipped: Number of paragraph tokens before this window.
        spans: Character range in the whole paragraph of each paragraph token in this window, as (start, stop).
    """

    question: int
    ids: list[int]
    first: int
    skipped: int
    spans: list[tuple[int, int]]

    @property
    def stop(self) -> int:
        """Position after the last paragraph token."""
        return self.first + len(self.spans)

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
    """Check early that windows of these lengths are possible.

    Args:
        settings: Window lengths.
        tokenizer: Tokenizer, whose special tokens need space too.
        positions: Number of positions of the encoder.

    Raises:
        InputError: The windows are longer than the encoder's positions, leave too little space for an overlap beside the question and the
            special tokens, or the overlap is shorter than the maximum answer length.
    """
    template = tokenizer.pair_template()
    special = len(template.before) + len(template.between) + len(template.behind)
    room = settings.max_length - special - settings.max_question_length
    if settings.max_length > positions:
        raise InputError(f"windows.max_length: must be <= {positions}, the encoder's positions, got {settings.max_length}")
    if settings.max_answer_length > settings.overlap:
        raise InputError(
            f"windows.overlap: must be >= {settings.max_answer_length}, max_answer_length, so that no answer is cut; got {settings.overlap}"
        )
    if room <= settings.overlap:
        raise InputError(
            f"windows.overlap: must be < {room}, what a question of {settings.max_question_length} tokens and {special} special ones leave "
            f"of {settings.max_length}; got {settings.overlap}"
        )


def make_windows(questions: Sequence[Question], tokenizer: Tokenizer, settings: WindowSettings) -> Iterator[Window]:
    """Split the paragraphs of questions into windows, in the order of the questions.

    Args:
        questions: The questions. Consecutive questions with the same paragraph share its tokenisation.
        tokenizer: Tokenizer of the model.
        settings: Lengths that `check_settings` has accepted.

    Yields:
        At least one window per question.
    """
    for cut in _cuts(questions, tokenizer, settings):
        yield from cut.windows()


def labelled_windows(questions: Sequence[Question], tokenizer: Tokenizer, settings: WindowSettings) -> Iterator[LabelledWindow]:
    """The windows of `make_windows`, labelled with the first answer of each question, for training.

    An answer that fits into a window is complete in at least one: if no regular window contains it, because it is longer than the overlap,
    one more window is placed around it. Windows without the answer have the target `NOWHERE`. Questions whose answer is not at its stated
    position are left out.
    """
    for cut in _cuts(questions, tokenizer, settings):
        question = questions[cut.question]
        if not question.answers:
            yield from (LabelledWindow(window, NOWHERE, NOWHERE) for window in cut.windows())
            continue
        answer = question.answers[0]
        if not stands(answer, question.context):
            continue
        low, high = cut.tokens(answer.start, answer.start + len(answer.text))
        labelled = [_labelled(window, low, high) for window in cut.windows()]
        if all(one.start == NOWHERE for one in labelled) and high - low < cut.room:
            middle = low - (cut.room - (high - low)) // 2
            labelled.append(_labelled(cut.window(max(0, min(middle, len(cut.pieces.ids) - cut.room))), low, high))
        yield from labelled


@dataclass(frozen=True)
class _Cut:
    """A question with its tokenised paragraph, which can be split into windows.

    Attributes:
        question: Index of the question.
        head: Tokens before the paragraph.
        behind: Tokens after the paragraph.
        pieces: Tokens of the paragraph.
        room: Maximum paragraph tokens per window.
        overlap: Paragraph tokens shared by neighbouring windows.
    """

    question: int
    head: list[int]
    behind: list[int]
    pieces: Pieces
    room: int
    overlap: int

    def windows(self) -> Iterator[Window]:
        """Overlapping windows up to the end of the paragraph; none is contained in another."""
        for start in range(0, max(len(self.pieces.ids) - self.overlap, 1), self.room - self.overlap):
            yield self.window(start)

    def window(self, start: int) -> Window:
        """The window that starts at a given paragraph token."""
        inside = slice(start, start + self.room)
        return Window(self.question, [*self.head, *self.pieces.ids[inside], *self.behind], len(self.head), start, self.pieces.spans[inside])

    def tokens(self, begin: int, behind: int) -> tuple[int, int]:
        """First and last token of a character range; if the tokenizer leaves no token of the range, the next token after it."""
        inside = [token for token, (first, stop) in enumerate(self.pieces.spans) if stop > begin and first < behind]
        if inside:
            return inside[0], inside[-1]
        after = next((token for token, (first, _) in enumerate(self.pieces.spans) if first >= behind), len(self.pieces.spans) - 1)
        return after, after


def _cuts(questions: Sequence[Question], tokenizer: Tokenizer, settings: WindowSettings) -> Iterator[_Cut]:
    template = tokenizer.pair_template()
    places = iter(range(len(questions)))
    for context, asked in groupby(questions, key=lambda question: question.context):
        pieces = tokenizer.pieces(context)
        for question in asked:
            text = tokenizer.pieces(question.text).ids[: settings.max_question_length]
            head = [*template.before, *text, *template.between]
            room = settings.max_length - len(head) - len(template.behind)
            yield _Cut(next(places), head, template.behind, pieces, room, settings.overlap)


def _labelled(window: Window, low: int, high: int) -> LabelledWindow:
    """Label a window with an answer whose first and last token are given as paragraph tokens."""
    if low < window.skipped or high >= window.skipped + len(window.spans):
        return LabelledWindow(window, NOWHERE, NOWHERE)
    shift = window.first - window.skipped
    return LabelledWindow(window, low + shift, high + shift)
