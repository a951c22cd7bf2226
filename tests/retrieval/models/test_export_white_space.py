"""Exported tokenizers strip white space: they give the ids of stripped texts, and are restored when they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from quiver.encoder import Tokenizer
from quiver.retrieval.models.export.sentence_transformers import ignores_outer_space, read_tokenizer, with_strip, without_strip

TEXTS = ["a bird  has wings", "def f(x):\n    return x\n"] * 3
RAW = [
    " a bird\n",
    "two  words   and a run",
    "\n    return x\n\n  y \t",
    "a title [SEP] a text ",
    "  [SEP]  x [CLS]\n",
    "x\x1c",
    "\u3000\u00a0é\u0085",
    " \u2028x\u2029",
    " ",
    "\n \t",
    "",
]


def byte_level(*, blanks: bool = False, split: str = "words") -> Tokenizer:
    """Train a byte-level tokenizer like ModernBERT's, with ``blanks`` also its added tokens of white space only."""
    trained = Tokenizer.train(TEXTS, vocab_size=400, max_length=64, split=split)
    backend = tokenizers.Tokenizer.from_str(trained.to_json())
    backend.add_tokens([tokenizers.AddedToken(" " * length, normalized=True) for length in (2, 3, 4)] if blanks else [])
    made = Tokenizer(backend, trained.settings)
    for prefix in ("[Q] ", "[D] "):
        made.add_token(prefix)
    return made


def ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer.encode(texts, max_length=64).ids


@pytest.mark.parametrize("blanks", [False, True])
def test_a_text_with_outer_white_space_has_the_ids_of_the_stripped_text(blanks: bool) -> None:
    plain = byte_level(blanks=blanks)
    changed = with_strip(plain, prefixes=("[Q] ", "[D] "))
    stripped = ids(plain, [text.strip() for text in RAW])
    assert ids(plain, RAW) != stripped
    assert ids(changed, RAW) == stripped
    assert not ignores_outer_space(plain)
    assert ignores_outer_space(changed)
    # Behind a prefix too.
    assert ids(changed, ["[Q]  \n a bird "]) == ids(plain, ["[Q] a bird"])


@pytest.mark.parametrize(("blanks", "split"), [(False, "words"), (True, "words"), (False, "identifiers")])
def test_reading_an_exported_tokenizer_restores_the_original(tmp_path: Path, blanks: bool, split: str) -> None:
    plain = byte_level(blanks=blanks, split=split)
    described = {"content": "[SEP]", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    plain.settings["added_tokens_decoder"] = {str(plain.token_id("[SEP]")): described | {"special": True}}
    before = json.dumps(plain.settings)
    changed = with_strip(plain, prefixes=("[Q] ", "[D] "))
    changed.save(tmp_path)
    again = read_tokenizer(tmp_path)
    assert again.to_json() == plain.to_json() != changed.to_json()
    assert again.settings["added_tokens_decoder"] == plain.settings["added_tokens_decoder"]
    assert json.dumps(plain.settings) == before
    assert without_strip(plain) is plain


def test_transformers_reads_the_rule_from_both_tokenizer_files(tmp_path: Path) -> None:
    """For added tokens, tokenizer_config.json takes precedence over tokenizer.json."""
    transformers = pytest.importorskip("transformers")
    plain = byte_level(blanks=True)
    described = {"content": "[SEP]", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    plain.settings["added_tokens_decoder"] = {str(plain.token_id("[SEP]")): described}
    with_strip(plain).save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(RAW)["input_ids"] == ids(plain, [text.strip() for text in RAW])


@pytest.mark.parametrize("token", ["[X]", "wings ", "\n"])
def test_a_tokenizer_that_cannot_have_the_rule_is_not_changed(token: str) -> None:
    trained = Tokenizer.train(TEXTS, vocab_size=400, max_length=64)
    backend = tokenizers.Tokenizer.from_str(trained.to_json())
    special = token == "[X]"
    (backend.add_special_tokens if special else backend.add_tokens)([tokenizers.AddedToken(token, normalized=True, special=special)])
    made = Tokenizer(backend, trained.settings)
    assert with_strip(made) is made
    assert not ignores_outer_space(made)
