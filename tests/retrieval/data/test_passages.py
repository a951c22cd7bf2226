"""Passages: they cover the text, stay within their tokens, and begin where headings, functions and blocks do."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.encoder import Tokenizer
from quiver.encoder.errors import InputError
from quiver.retrieval.data.passages import Kind, PassageRules, Span, cut, parse_passages, word_spans

BY_STRUCTURE = PassageRules(headings=True, functions=True, tokens=256)
PIECES = [
    *("# Title\n", "## Part ##\n", "Setext\n===\n", "---\n", "```py\n", "# no heading\n", "```\n", "word ", "two words. ", "\n", "\n\n"),
    *("\r\n", "\r", "def f(x):\n    return x\n", "class A:\n    y = 1\n    def g(self):\n        pass\n", "@d\n", "# comment\n", "x = 1\n"),
    *("\f", "\u2028", "é中\U0001f600", "int main() {\n", "}\n", "====\nOver\n====\n", "~~~~\n", " ", "\t", "    indented\n", '"""', "\0"),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=40).map("".join)
TOKENIZER = Tokenizer.train(["a bird has wings and two words"] * 2, vocab_size=320)


def spans_of(text: str, kind: Kind, rules: PassageRules = BY_STRUCTURE) -> list[Span]:
    return cut(text, kind, rules, word_spans)


@pytest.mark.parametrize("kind", get_args(Kind))
@given(text=texts, tokens=st.none() | st.integers(16, 40), structure=st.booleans(), pieces=st.booleans())
def test_passages_cover_the_text_and_none_is_blank(kind: Kind, text: str, tokens: int | None, structure: bool, pieces: bool) -> None:
    rules = PassageRules(structure, structure, tokens)
    spans = cut(text, kind, rules, (lambda part: TOKENIZER.pieces(part).spans) if pieces else word_spans, title="a.md")
    assert "".join(text[span.start : span.end] for span in spans) == (text if text.strip() else "")
    assert all(text[span.start : span.end].strip() for span in spans)


@given(text=texts, tokens=st.integers(16, 40), overlap=st.integers(0, 8), title=st.sampled_from(["", "docs/a.md", "w " * 60]))
def test_overlapping_passages_cover_the_text_and_keep_the_limit(text: str, tokens: int, overlap: int, title: str) -> None:
    spans = cut(text, "text", PassageRules(tokens=tokens, overlap=overlap), word_spans, title=title)
    covered = 0
    for span in spans:
        assert span.start <= covered < span.end or (covered == 0 and span.start == 0)
        covered = span.end
        assert len(word_spans(text[span.start : span.end])) <= max(16, tokens)
    assert covered == (len(text) if text.strip() else 0)


def test_consecutive_passages_share_the_wanted_tokens() -> None:
    text = " ".join(f"w{number}" for number in range(100))
    spans = cut(text, "text", PassageRules(tokens=40, overlap=10), word_spans)
    parts = [text[span.start : span.end].split() for span in spans]
    assert all(len(part) <= 40 for part in parts)
    assert [before[-10:] for before in parts[:-1]] == [after[:10] for after in parts[1:]]


def test_a_long_passage_is_cut_at_its_last_paragraph_line_sentence_or_word() -> None:
    words = "w " * 12
    for end in ("\n\n", "\n", "x. ", " "):
        text = words + end + words
        first, _ = cut(text, "text", PassageRules(tokens=16), word_spans)
        assert text[: first.end].endswith(end) or end == " "


def test_the_limit_includes_the_title_but_leaves_half_of_it() -> None:
    text = "w " * 200
    for title, limit in (("", 64), ("t " * 20, 44), ("t " * 100, 32)):
        sizes = [len(word_spans(text[s.start : s.end])) for s in cut(text, "text", PassageRules(tokens=64), word_spans, title=title)]
        assert max(sizes) <= limit
        assert len(sizes) == -(-200 // limit)


ENDS = st.sampled_from([" "] * 12 + [". ", ". ", "\n", "\n\n"])


def paths(text: str, kind: Kind) -> list[tuple[str, tuple[str, ...]]]:
    return [(text[span.start : span.end], span.path) for span in spans_of(text, kind)]


def test_markdown_is_cut_at_headings_with_their_path() -> None:
    text = "---\ntitle: x\n# no\n---\nintro\n\n# A #\na\n## B\n```sh\n# no heading\n```\nSetext\n------\ns\n# C\n#no\n    # no\n"
    assert [(part[:6], path) for part, path in paths(text, "markdown")] == [
        ("---\nti", ()),
        ("# A #\n", ("A",)),
        ("## B\n`", ("A", "B")),
        ("Setext", ("A", "Setext")),
        ("# C\n#n", ("C",)),
    ]


@pytest.mark.parametrize(
    ("line", "path"),
    [
        *(("# a # b", ("a # b",)), ("## a ##  ", ("a",)), ("# C#", ("C#",))),
        *(("#", ()), ("### ###", ()), ("####### a", ()), ("#a", ()), ("    # a", ())),
    ],
)
def test_headings_are_those_of_commonmark(line: str, path: tuple[str, ...]) -> None:
    assert [found for _, found in paths(f"{line}\nwords\n", "markdown")] == [path]


def test_a_heading_with_a_million_spaces_is_read_at_once() -> None:
    assert paths("# a" + " " * 1_000_000 + "b\n", "markdown")[0][1][0].startswith("a  ")


def test_restructuredtext_levels_follow_the_order_of_styles() -> None:
    text = "====\nTop\n====\na\n\nPart\n----\nb\n\nSub\n~~~\nc\n\nNext\n----\nd\n"
    assert [path for _, path in paths(text, "rst")] == [("Top",), ("Top", "Part"), ("Top", "Part", "Sub"), ("Top", "Next")]


PYTHON = '''"""Module."""
import os

# about f
@decorator
def f(x):
    """# not a comment"""
    def inner(): pass
    return x

CONSTANT = 1

class A(B):
    """Doc."""
    y = 1

    # about g
    def g(self):
        pass

    z = 2

    async def h(self): ...

if os:
    pass
'''


def test_python_is_cut_at_functions_classes_and_methods_and_keeps_the_rest() -> None:
    parts = paths(PYTHON, "python")
    assert [(part.strip().splitlines()[0].strip(), path) for part, path in parts] == [
        ('"""Module."""', ()),
        ("# about f", ("f",)),
        ("CONSTANT = 1", ()),
        ("class A(B):", ("A",)),
        ("# about g", ("A", "g")),
        ("z = 2", ("A",)),
        ("async def h(self): ...", ("A", "h")),
        ("if os:", ()),
    ]


def test_python_with_a_syntax_error_is_cut_at_blocks() -> None:
    text = "print 'two'\n\n" + "def f():\n" + "    a = b\n" * 40 + "\ndef g():\n" + "    a = b\n" * 40
    assert [part.split("(")[0] for part, _ in paths(text, "python")] == ["print 'two'\n\n", "def f", "def g"]


def test_other_code_is_cut_at_blocks_of_the_left_margin_and_small_ones_are_joined() -> None:
    body = "    call(a, b);\n" * 20
    text = f"#include <x>\n\nint a;\n\nint f() {{\n{body}\n    more();\n}}\n\nint g() {{\n{body}}}\n"
    assert [part.partition("\n")[0] for part, _ in paths(text, "code")] == ["#include <x>", "int f() {", "int g() {"]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("headings", PassageRules(True, False, 256)),
        ("headings, functions", PassageRules(True, True, 256)),
        ("tokens:128,overlap:32", PassageRules(False, False, 128, 32)),
        ("whole", PassageRules()),
    ],
)
def test_descriptions_are_parsed(text: str, rules: PassageRules) -> None:
    assert parse_passages(text) == rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "expected headings") for text in ("", "lines", "headings:2", "tokens", "headings,headings", "whole,headings")),
        ("tokens:x", "tokens must be a number of tokens, got 'x'"),
        ("tokens:15", "tokens must be >= 16, got 15"),
        ("tokens:64,overlap:33", "overlap must be at most half of the tokens (64), got 33"),
    ],
)
def test_malformed_descriptions_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse_passages(text)
