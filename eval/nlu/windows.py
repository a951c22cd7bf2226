"""Question and paragraph as one sequence, a long paragraph as several windows that overlap.

``[CLS] question [SEP] part of the paragraph [SEP]``, whatever the tokenizer's tokens are. Windows overlap by at least the longest answer,
so that every answer that may be given stands whole in one of them. The encoder here tells question and paragraph apart by what stands
between them alone: it has no second token type (BERT's segment B).

Shapes: n tokens of a sequence, places counted from its beginning.
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
"""The place that a window without the answer answers with: its first token."""


class WindowSettings(TextSchema):
    """How long sequences are, in tokens."""

    max_length: int = Field(ge=16)
    """Of a whole sequence, special tokens included."""
    overlap: int = Field(ge=1)
    """What two neighbouring windows share of a paragraph; BERT's doc_stride is what they do not share."""
    max_question_length: int = Field(default=64, ge=1)
    """Questions are cut to this."""
    max_answer_length: int = Field(default=30, ge=1)
    """Longest answer that is given; no longer than the overlap."""


@dataclass(frozen=True)
class Window:
    """One sequence.

    Attributes:
        question: Place of its question in the list it came from.
        ids: Token ids, special tokens included.
        first: Place in the sequence where the paragraph begins.
        skipped: Tokens of the paragraph before this window.
        spans: For each token of the paragraph in this window its characters in the whole paragraph.
    """

    question: int
    ids: list[int]
    first: int
    skipped: int
    spans: list[tuple[int, int]]

    @property
    def stop(self) -> int:
        """Place behind the paragraph's last token."""
        return self.first + len(self.spans)

    def characters(self, start: int, end: int) -> tuple[int, int]:
        """First character and the one behind the last of a span of tokens, ``end`` included."""
        return self.spans[start - self.first][0], self.spans[end - self.first][1]


@dataclass(frozen=True)
class LabelledWindow:
    """A window to train on.

    Attributes:
        window: The sequence.
        start: Place of the answer's first token; `NOWHERE` where the answer does not stand whole in the window.
        end: Place of its last token, or `NOWHERE`.
    """

    window: Window
    start: int
    end: int


def check_settings(settings: WindowSettings, tokenizer: Tokenizer, *, positions: int) -> None:
    """Say early that windows of these lengths cannot be.

    Args:
        settings: The lengths.
        tokenizer: Its special tokens take room too.
        positions: Of the encoder.

    Raises:
        InputError: A sequence would be longer than the encoder's positions, has no room for an overlap beside question and special
            tokens, or the overlap is shorter than the longest answer.
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
    """Cut the paragraphs of questions into windows, all of them of one question after another.

    Args:
        questions: A paragraph whose questions follow each other is tokenised once.
        tokenizer: The vocabulary.
        settings: Lengths that `check_settings` has accepted.

    Yields:
        At least one window for every question.
    """
    for cut in _cuts(questions, tokenizer, settings):
        yield from cut.windows()


def labelled_windows(questions: Sequence[Question], tokenizer: Tokenizer, settings: WindowSettings) -> Iterator[LabelledWindow]:
    """The windows of `make_windows` with the first answer of each question, to train on.

    Every answer that fits into a window stands whole in one: where it is longer than the overlap and none holds it, one more is laid
    around it. A window without the answer answers with `NOWHERE`. A question whose answer does not stand where the file says is left out.
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
    """A question and its paragraph, to be cut.

    Attributes:
        question: Place of the question.
        head: The tokens before the paragraph.
        behind: Those behind it.
        pieces: The paragraph.
        room: Tokens of the paragraph that a window holds.
        overlap: Tokens that two windows share.
    """

    question: int
    head: list[int]
    behind: list[int]
    pieces: Pieces
    room: int
    overlap: int

    def windows(self) -> Iterator[Window]:
        """Windows up to the paragraph's end, none of them inside another."""
        for start in range(0, max(len(self.pieces.ids) - self.overlap, 1), self.room - self.overlap):
            yield self.window(start)

    def window(self, start: int) -> Window:
        """The window that begins with a token of the paragraph."""
        inside = slice(start, start + self.room)
        return Window(self.question, [*self.head, *self.pieces.ids[inside], *self.behind], len(self.head), start, self.pieces.spans[inside])

    def tokens(self, begin: int, behind: int) -> tuple[int, int]:
        """The tokens of a span of characters: first and last; the next one behind it where the tokenizer leaves nothing of the span."""
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
    """A window with the places of an answer's first and last token, given as tokens of the paragraph."""
    if low < window.skipped or high >= window.skipped + len(window.spans):
        return LabelledWindow(window, NOWHERE, NOWHERE)
    shift = window.first - window.skipped
    return LabelledWindow(window, low + shift, high + shift)
