"""Windows: they cover the paragraph, contain every answer whole, and map tokens back to characters."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import tokenizers

from quiver.encoder import InputError, Tokenizer
from quiver.eval.nlu.questions import NOWHERE, Answer, Paragraphs, Question, WindowSettings, check_settings, labelled_windows, make_windows

TEXT = "임종석은 1989년 2월 15일 여의도 농민 폭력 시위를 주도한 혐의로 지명수배되었다. The bird has wings; the sea is deep!"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT] * 2, vocab_size=600)


def question(context: str, answer: str | None, key: str = "q", start: int | None = None) -> Question:
    answers = () if answer is None else (Answer(answer, context.index(answer) if start is None else start),)
    return Question(key, "언제 was it?", context, answers)


@pytest.mark.parametrize(("max_length", "overlap"), [(32, 4), (40, 12), (64, 30), (33, 1)])
def test_windows_cover_a_long_paragraph(tokenizer: Tokenizer, max_length: int, overlap: int) -> None:
    context = " ".join([TEXT] * 5)
    pieces = tokenizer.pieces(context)
    settings = WindowSettings(max_length=max_length, overlap=overlap, max_question_length=8, max_answer_length=overlap)
    check_settings(settings, tokenizer, positions=max_length)
    windows = list(make_windows([question(context, None)], tokenizer, settings))
    assert len(windows) > 3
    for window in windows:
        assert len(window.ids) <= max_length
        (inside,) = window.parts
        assert window.ids[window.first : window.stop] == pieces.ids[inside.start : inside.stop]
        assert window.spans == pieces.spans[inside.start : inside.stop]
    assert windows[0].parts[0].start == 0
    assert windows[-1].parts[0].stop == len(pieces.ids)
    for before, after in pairwise(windows):
        assert before.parts[0].stop - after.parts[0].start == overlap
    # So every span that is no longer than the overlap is whole in some window.
    for low in range(len(pieces.ids) - overlap + 1):
        assert any(window.parts[0].start <= low and low + overlap <= window.parts[0].stop for window in windows)


def test_every_answer_is_whole_in_some_window(tokenizer: Tokenizer) -> None:
    """Answers have random positions and every length up to more than the overlap; each one is whole in some window."""
    context = " ".join([TEXT] * 4)
    generator = random.Random(7)
    settings = WindowSettings(max_length=48, overlap=6, max_question_length=8, max_answer_length=6)
    questions = []
    for number in range(300):
        start = generator.randrange(len(context) - 60)
        text = context[start : start + generator.randint(1, 60)]
        if text.strip():
            questions.append(question(context, text, f"q{number}", start))
    labelled = list(labelled_windows(questions, tokenizer, settings))
    around = 0
    for place, example in enumerate(questions):
        mine = [one for one in labelled if one.window.question == place]
        regular = list(make_windows([example], tokenizer, settings))
        holding = [one for one in mine if one.start != NOWHERE]
        assert holding, example
        around += len(mine) - len(regular)
        assert len(mine) - len(regular) in (0, 1)
        wanted = example.answers[0]
        for one in holding:
            low, high = one.window.characters(one.start, one.end)
            assert wanted.text.strip() in context[low:high]
            # A token may extend beyond the ends of the answer; no other characters are added.
            assert low <= wanted.start + len(wanted.text) - len(wanted.text.lstrip())
            assert len(context[low:high]) <= len(wanted.text) + 20
            assert len(one.window.ids) <= 48
    assert around > 10


def test_questions_without_an_answer_and_with_a_misplaced_answer(tokenizer: Tokenizer) -> None:
    settings = WindowSettings(max_length=64, overlap=30, max_question_length=8)
    questions = [question(TEXT, None, "none"), question(TEXT, "시위", "misplaced", 0), question(TEXT, "시위", "right")]
    labelled = list(labelled_windows(questions, tokenizer, settings))
    assert {one.window.question for one in labelled} == {0, 2}
    assert all(one.start == one.end == NOWHERE for one in labelled if one.window.question == 0)


def test_byte_tokens_map_to_their_character() -> None:
    """The vocabulary has no Korean: a syllable has three tokens, and an answer covers whole syllables."""
    tokenizer = Tokenizer.train(["a bird has wings"] * 2, vocab_size=320)
    settings = WindowSettings(max_length=256, overlap=30)
    [one] = labelled_windows([question(TEXT, "15일")], tokenizer, settings)
    assert one.end - one.start + 1 == len("15") + 3
    low, high = one.window.characters(one.start, one.end)
    assert TEXT[low:high] == "15일"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (WindowSettings(max_length=300, overlap=30), "windows.max_length: must be <= 256, the encoder's positions, got 300"),
        (WindowSettings(max_length=256, overlap=29), "windows.overlap: must be >= 30, max_answer_length"),
        (
            WindowSettings(max_length=100, overlap=33),
            "windows.overlap: must be < 33 (max_length 100 minus max_question_length 64 and 3 special",
        ),
    ],
)
def test_invalid_settings_are_refused(tokenizer: Tokenizer, settings: WindowSettings, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        check_settings(settings, tokenizer, positions=256)
    assert str(caught.value).startswith(complaint)


def test_a_template_with_two_separators_is_followed(tokenizer: Tokenizer) -> None:
    """RoBERTa's template closes the first text before it opens the second."""
    cls, sep = tokenizer.special_id("cls"), tokenizer.special_id("sep")
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
    )
    roberta = Tokenizer(backend, tokenizer.settings)
    template = roberta.pair_template()
    assert (template.before, template.between, template.behind) == ([cls], [sep, sep], [sep])
    [window] = make_windows([question(TEXT, None)], roberta, WindowSettings(max_length=256, overlap=30))
    expected = backend.encode("언제 was it?", TEXT)
    assert window.ids == expected.ids
    assert window.first == expected.sequence_ids.index(1)


@pytest.mark.parametrize(("kept", "head"), [("head", 55), ("tail", 0), ("head-tail", 16)])
def test_a_truncated_paragraph_is_one_window_and_its_lost_answers_are_nowhere(tokenizer: Tokenizer, kept: Paragraphs, head: int) -> None:
    """The reference keeps whole tokens only: an answer that is cut, or spans what was left out, is not in the window."""
    context = " ".join(f"{number} {TEXT}" for number in range(4))
    pieces = tokenizer.pieces(context)
    settings = WindowSettings(max_length=64, paragraphs=kept, max_question_length=6)
    short = question("a bird has wings", "bird")
    assert list(make_windows([short], tokenizer, settings)) == list(
        make_windows([short], tokenizer, settings.replace(paragraphs="overlap", overlap=30))
    )
    [window] = make_windows([question(context, None)], tokenizer, settings)
    assert len(window.ids) == 64
    room = len(window.spans)
    kept_tokens = [*range(min(head, room)), *range(len(pieces.ids) - room + min(head, room), len(pieces.ids))]
    assert window.ids[window.first : window.stop] == [pieces.ids[token] for token in kept_tokens]
    found = 0
    for low in range(len(pieces.ids) - 3):
        begin, stop = pieces.spans[low][0], pieces.spans[low + 2][1]
        if context[begin:stop].strip() != context[begin:stop]:
            continue
        [one] = labelled_windows([question(context, context[begin:stop], start=begin)], tokenizer, settings)
        whole = [token for token, (first, last) in enumerate(pieces.spans) if last > begin and first < stop]
        places = [kept_tokens.index(token) for token in whole if token in kept_tokens]
        complete = len(places) == len(whole) and places[-1] - places[0] == len(whole) - 1
        assert (one.start == NOWHERE) is not complete
        if complete:
            found += 1
            assert one.window.characters(one.start, one.end) == (pieces.spans[whole[0]][0], pieces.spans[whole[-1]][1])
    assert found > 20
