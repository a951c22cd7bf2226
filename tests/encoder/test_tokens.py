"""Tokenising: the ids transformers gives, counted truncation, special tokens, trained vocabularies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quiver.encoder import InputError, Tokenizer

CORPUS = [f"def read_{name}(path):\n    return open(path).{name}()" for name in ("lines", "bytes", "words", "rows")] * 5
TEXTS = ["def read_lines(path):", "", "  ünïcode ❤ \t tabs\n\nnewlines ", "a" * 300, "[MASK] and [CLS] in text"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(CORPUS, vocab_size=384, max_length=64)


@pytest.mark.parity
def test_ids_are_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_pretrained(tmp_path)
    assert len(ours) == len(theirs) == 384
    for max_length in (3, 8, 64):
        assert ours.encode(TEXTS, max_length=max_length).ids == theirs(TEXTS, truncation=True, max_length=max_length)["input_ids"]
    assert (theirs.cls_token_id, theirs.mask_token_id) == (ours.special_id("cls"), ours.special_id("mask"))
    assert theirs.model_max_length == ours.max_length == 64


@pytest.mark.parity
@pytest.mark.parametrize(
    "settings",
    [
        {"do_lower_case": False},
        {"strip_accents": False},
        {"strip_accents": True, "do_lower_case": False},
        {"tokenize_chinese_chars": False},
        {"truncation_side": "left"},
        {"additional_special_tokens": ["hello"]},
        {"added_tokens_decoder": {"7592": {"content": "hello", "special": True, "lstrip": False, "rstrip": False}}},
    ],
    ids=str,
)
def test_settings_that_change_ids_are_followed(minilm: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(minilm / name, tmp_path / name)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    texts = ["Ünïcode CAFÉ é 中文字 Hello unhello", "one two three four five " * 9]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)(texts, truncation=True, max_length=20)["input_ids"]
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.encode(texts, max_length=20).ids == theirs
    assert ours.encode(texts, max_length=20).ids != Tokenizer.from_pretrained(minilm).encode(texts, max_length=20).ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"truncation_side": "middle"}, "truncation_side must be right or left, got 'middle'"),
        ({"additional_special_tokens": ["<nowhere>"]}, "the token '<nowhere>' is not in tokenizer.json"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder must be an object"),
        ({"additional_special_tokens": [5]}, "an added token must be text, got 5"),
    ],
)
def test_settings_that_cannot_be_followed_are_errors(
    tokenizer: Tokenizer, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    with pytest.raises(InputError) as caught:
        Tokenizer.from_pretrained(tmp_path)
    assert message in str(caught.value)


def test_truncation_is_counted(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode(TEXTS, max_length=10_000)
    assert not any(whole.truncated)
    lengths = [len(ids) for ids in whole.ids]
    for max_length in (2, 5, max(lengths) - 1, max(lengths)):
        cut = tokenizer.encode(TEXTS, max_length=max_length)
        assert cut.truncated == [length > max_length for length in lengths]
        assert [len(ids) for ids in cut.ids] == [min(length, max_length) for length in lengths]
        assert all(ids[0] == tokenizer.special_id("cls") and ids[-1] == tokenizer.special_id("sep") for ids in cut.ids)


def test_a_poor_corpus_is_filled_with_unused_tokens() -> None:
    tokenizer = Tokenizer.train(["ab ab"], vocab_size=320)
    assert len(tokenizer) == 320
    assert tokenizer.token_id("[unused0]") is not None


def test_identifiers_share_their_words_with_text(tmp_path: Path) -> None:
    texts = ["def readLines(path): read_lines, read the lines of path, HTTPServer"] * 3
    tokenizer = Tokenizer.train(texts, vocab_size=400, split="identifiers")
    read, lines = tokenizer.token_id("read"), tokenizer.token_id("lines")
    assert read is not None
    assert lines is not None
    for text in ("to read lines", "read_lines", "readLines", "READ  LINES"):
        ids = tokenizer.encode([text], max_length=32).ids[0]
        assert read in ids, text
        assert lines in ids, text
    tokenizer.save(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).encode(texts, max_length=64).ids == tokenizer.encode(texts, max_length=64).ids


def test_tokens_can_be_added(tokenizer: Tokenizer, tmp_path: Path) -> None:
    fresh = Tokenizer.train(CORPUS, vocab_size=384)
    before = len(fresh)
    fresh.encode(["[Q] x"], max_length=8)
    added = fresh.add_token("[Q] ")
    assert fresh.add_token("[Q] ") == added == before
    assert added in fresh.encode(["[Q] x"], max_length=8).ids[0]
    fresh.save(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).token_id("[Q] ") == added


def test_bad_input_says_what_is_wrong(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_length must be >= 2, the number of special tokens, got 1"):
        tokenizer.encode(["x"], max_length=1)
    with pytest.raises(InputError, match="vocab_size must be >= 261"):
        Tokenizer.train(CORPUS, vocab_size=200)
    with pytest.raises(InputError, match="split must be one of words, identifiers, got 'letters'"):
        Tokenizer.train(CORPUS, vocab_size=384, split="letters")
    with pytest.raises(InputError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a special token must be one of"):
        tokenizer.special_id("eos")


def test_unused_tokens_stand_behind_the_special_ones() -> None:
    """As in ModernBERT's 50,368: merges, five special tokens, 83 unused ones."""
    rich = [" ".join(f"w{number:x}q{number * 7919 % 4096:x}" for number in range(start, start + 40)) for start in range(0, 2000, 40)]
    tokenizer = Tokenizer.train(rich, vocab_size=448, unused=83)
    assert len(tokenizer) == 448
    assert [tokenizer.special_id(name) for name in ("unk", "cls", "sep", "pad", "mask")] == [360, 361, 362, 363, 364]
    assert [tokenizer.token_id(f"[unused{number}]") for number in range(83)] == list(range(365, 448))
    assert tokenizer.token_id("[unused83]") is None
    with pytest.raises(InputError, match=r"vocab_size must be >= 344 \(256 bytes and 5 special tokens and 83 unused ones\), got 320"):
        Tokenizer.train(rich, vocab_size=320, unused=83)
