"""Change a tokenizer's rules so that other libraries produce the same token ids as Quiver.

White space: Quiver and sentence-transformers 5 strip white space around a text, sentence-transformers 6 leaves it to the tokenizer. A
tokenizer that keeps it (byte-level ones do) is exported with a stripping rule, which is removed on loading. The rule is not tokenizers'
``Strip``: that would also apply to the pieces between special tokens, and would delete the added tokens of ModernBERT's vocabulary that are
white space.

Prefixes: PyLate and Stanford ColBERT insert the id of a marker; sentence-transformers 6 writes the marker before the text and tokenizes
both. Whether both give the same ids is found out by trying.

Source: what sentence-transformers 5.3 and 6.2 do with a text before tokenizing; tokenizers 0.22 (``AddedVocabulary``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from quiver.encoder import InputError, Tokenizer

# White space as str.strip() defines it.
_SPACE, _OTHER = r"[\s\x1c-\x1f]", r"[^\s\x1c-\x1f]"
_BLANKS = " {2,}"
OUTER = rf"\A{_SPACE}+(?={_OTHER})|(?<={_OTHER}){_SPACE}+\z|\A(?!{_BLANKS}\z){_SPACE}+\z"
"""Pattern of the stripping rule: outer white space, or a text of white space only, except runs of spaces, which may be added tokens."""

_PROBES = ("wings", "two  words   and\n\tmore", "Éire", "7", "(a)", "東")
_AROUND = (" {}", "{} ", "\n{}\r\n", "\t{}\u3000", "  \u00a0{}\x1c")


def ignores_outer_space(tokenizer: Tokenizer) -> bool:
    """Test whether white space around a text leaves the token ids unchanged.

    Example:
        >>> tokenizer = Tokenizer.train(["a bird has wings"], vocab_size=320)
        >>> ignores_outer_space(tokenizer), ignores_outer_space(with_strip(tokenizer))
        (False, True)
    """
    return _agree(tokenizer, tokenizer, _PROBES)


def with_strip(tokenizer: Tokenizer, *, prefixes: Collection[str] = ()) -> Tokenizer:
    """Add a rule that strips white space around texts, for libraries that do not strip them.

    There are two exceptions: texts of two or more spaces only, and texts that contain a special token. Around such a token white space is
    also stripped if the tokenizer normalizes more than Unicode composition; and of a run of spaces before [MASK], which absorbs spaces
    before it, one token may remain.

    Args:
        tokenizer: Tokenizer; not modified.
        prefixes: Tokens that may precede a text; white space after them is stripped too.

    Returns:
        A tokenizer with the rule; ``tokenizer`` itself if the rule is not needed or cannot be added (see `ignores_outer_space`).
    """
    rules = json.loads(tokenizer.to_json())
    inner, added = rules["normalizer"], rules["added_tokens"]
    if ignores_outer_space(tokenizer) or any(token["special"] and token["normalized"] for token in added):
        return tokenizer
    # A special token that is found before normalization cuts a text into pieces, and each piece would be stripped. Unicode composition
    # neither changes nor creates special tokens, so they can be found after it.
    composes = inner is None or inner["type"] == "NFC"
    flags = {token["content"]: True for token in added if token["special"] and composes and token["content"] not in prefixes}
    seen = [token["content"] for token in added if token["normalized"] or token["content"] in flags]
    probes = [*_PROBES, *(f"a{content}b {content} c" for content in seen)]
    if any(content.isspace() and not re.fullmatch(_BLANKS, content) for content in seen):  # the rule would delete that token
        return tokenizer
    stripping = {"type": "Replace", "pattern": {"Regex": OUTER}, "content": ""}
    rules["normalizer"] = {"type": "Sequence", "normalizers": [stripping, *([inner] if inner else [])]}
    changed = _rebuilt(tokenizer, rules, flags)
    return changed if _agree(changed, tokenizer, probes) else tokenizer


def without_strip(tokenizer: Tokenizer) -> Tokenizer:
    """Remove the rule that `with_strip` adds; other tokenizers are returned unchanged."""
    text = tokenizer.to_json()
    if json.dumps(OUTER) not in text:
        return tokenizer
    rules = json.loads(text)
    normalizer = rules["normalizer"] or {}
    first, *rest = normalizer.get("normalizers") or [{}]
    if first.get("type") != "Replace" or first["pattern"].get("Regex") != OUTER:
        return tokenizer
    rules["normalizer"] = rest[0] if rest else None
    return _rebuilt(tokenizer, rules, {token["content"]: False for token in rules["added_tokens"] if token["special"]})


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a model folder, without the rule of `with_strip`.

    Raises:
        InputError: ``tokenizer.json`` is missing or cannot be read.
    """
    return without_strip(Tokenizer.from_pretrained(folder))


def _rebuilt(tokenizer: Tokenizer, rules: dict[str, Any], flags: Mapping[str, bool]) -> Tokenizer:
    """A tokenizer with other rules; ``flags`` says for each token whether it is found after normalization."""
    rules = rules | {"added_tokens": _flagged(rules["added_tokens"], flags)}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(rules)), _flagged(tokenizer.settings, flags))


def _flagged(value: Any, flags: Mapping[str, bool]) -> Any:
    """JSON with the flags set wherever a token is described; transformers also reads tokenizer_config.json."""
    if isinstance(value, list):
        return [_flagged(one, flags) for one in value]
    if not isinstance(value, dict):
        return value
    content = value.get("content")
    if isinstance(content, str):
        return value | ({"normalized": flags[content]} if content in flags else {})
    return {key: _flagged(one, flags) for key, one in value.items()}


def _agree(changed: Tokenizer, original: Tokenizer, probes: Collection[str]) -> bool:
    """Whether ``changed`` gives texts with outer white space the ids that ``original`` gives the stripped texts."""
    spaced = [around.format(probe) for probe in probes for around in _AROUND]
    stripped = [text.strip() for text in spaced]
    return changed.encode(spaced, max_length=256).ids == original.encode(stripped, max_length=256).ids


# Beginnings that tokenizers split differently: a word, an accented capital, a number, punctuation, a character that is a word.
PROBES = ("wings", "Éire", "7", "(a)", "東")


def reads_as_token(tokenizer: Tokenizer, text: str, token: str) -> bool:
    """Test whether a prompt is tokenized as one token inserted after [CLS].

    Args:
        tokenizer: Tokenizer.
        text: Prompt put before texts.
        token: Expected token.

    Example:
        >>> tokenizer = Tokenizer.train(["a bird has wings"], vocab_size=320)
        >>> _ = tokenizer.add_token("[Q] ")
        >>> reads_as_token(tokenizer, "[Q] ", "[Q] "), reads_as_token(tokenizer, "bird ", "[Q] ")
        (True, False)
    """
    found = tokenizer.token_id(token)
    alone, together = _ids(tokenizer, PROBES), _ids(tokenizer, [text + probe for probe in PROBES])
    return all(both == [*one[:1], found, *one[1:]] for one, both in zip(alone, together, strict=True))


def with_prefixes(tokenizer: Tokenizer, prefixes: Sequence[str]) -> Tokenizer:
    """Make each prefix one token wherever it occurs.

    Args:
        tokenizer: Tokenizer that has the prefixes as tokens; not modified.
        prefixes: Prefixes; empty ones are ignored.

    Raises:
        InputError: A prefix cannot be made one token.
    """
    wanted = [prefix for prefix in prefixes if prefix and not reads_as_token(tokenizer, prefix, prefix)]
    if not wanted:
        return tokenizer
    rules = json.loads(tokenizer.to_json())
    kept = [token for token in rules["added_tokens"] if token["content"] not in wanted]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": tokenizer.token_id(prefix), "content": prefix, **flags} for prefix in wanted]
    rules["added_tokens"] = sorted(kept + added, key=lambda token: token["id"])
    result = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(rules)), tokenizer.settings)
    for prefix in wanted:
        if not reads_as_token(result, prefix, prefix):
            raise InputError(f"this tokenizer splits the prefix {prefix!r} into several tokens, and cannot be changed to keep it whole")
    return result


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer.encode(texts, max_length=64).ids
