"""Change a tokenizer's rules so that other libraries give the token ids that Quiver gives."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from quiver.encoder import InputError, Tokenizer

# What str.strip() takes for white space.
_SPACE, _OTHER = r"[\s\x1c-\x1f]", r"[^\s\x1c-\x1f]"
_BLANKS = " {2,}"
OUTER = rf"\A{_SPACE}+(?={_OTHER})|(?<={_OTHER}){_SPACE}+\z|\A(?!{_BLANKS}\z){_SPACE}+\z"
"""What is stripped: outer white space, and a text that is nothing else; but for runs of blanks, which may be added tokens."""

_PROBES = ("wings", "two  words   and\n\tmore", "Éire", "7", "(a)", "東")
_AROUND = (" {}", "{} ", "\n{}\r\n", "\t{}\u3000", "  \u00a0{}\x1c")


def ignores_outer_space(tokenizer: Tokenizer) -> bool:
    """Whether white space around a text changes no id.

    Example:
        >>> tokenizer = Tokenizer.train(["a bird has wings"], vocab_size=320)
        >>> ignores_outer_space(tokenizer), ignores_outer_space(with_strip(tokenizer))
        (False, True)
    """
    return _agree(tokenizer, tokenizer, _PROBES)


def with_strip(tokenizer: Tokenizer, *, prefixes: Collection[str] = ()) -> Tokenizer:
    """The tokenizer for whoever does not strip texts: what it makes of a text is what this one makes of the stripped text.

    Exact but for texts of blanks alone, two or more, and texts that themselves hold a special token: around it white space is stripped
    too where the rules normalise more than Unicode's composition, and of a run of blanks before [MASK], which takes those before it
    along, a token may be left.

    Args:
        tokenizer: It is not changed.
        prefixes: Tokens that stand before a text, behind which it is stripped too.

    Returns:
        ``tokenizer`` itself if white space around a text is nothing to it, or if there is no way: `ignores_outer_space` tells.
    """
    rules = json.loads(tokenizer.to_json())
    inner, added = rules["normalizer"], rules["added_tokens"]
    if ignores_outer_space(tokenizer) or any(token["special"] and token["normalized"] for token in added):
        return tokenizer
    # A token that is found before the rules are applied cuts a text into pieces, each of which would be stripped. Composition leaves
    # special tokens as they are, and makes none: they can as well be found behind it.
    composes = inner is None or inner["type"] == "NFC"
    flags = {token["content"]: True for token in added if token["special"] and composes and token["content"] not in prefixes}
    seen = [token["content"] for token in added if token["normalized"] or token["content"] in flags]
    probes = [*_PROBES, *(f"a{content}b {content} c" for content in seen)]
    if any(content.isspace() and not re.fullmatch(_BLANKS, content) for content in seen):  # nothing would be left of that token
        return tokenizer
    stripping = {"type": "Replace", "pattern": {"Regex": OUTER}, "content": ""}
    rules["normalizer"] = {"type": "Sequence", "normalizers": [stripping, *([inner] if inner else [])]}
    changed = _rebuilt(tokenizer, rules, flags)
    return changed if _agree(changed, tokenizer, probes) else tokenizer


def without_strip(tokenizer: Tokenizer) -> Tokenizer:
    """What `with_strip` was given; any other tokenizer as it is."""
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
    """The tokenizer of a model folder, `without_strip`: texts come to it stripped.

    Raises:
        InputError: ``tokenizer.json`` is missing or cannot be read.
    """
    return without_strip(Tokenizer.from_pretrained(folder))


def _rebuilt(tokenizer: Tokenizer, rules: dict[str, Any], flags: Mapping[str, bool]) -> Tokenizer:
    """A tokenizer of other rules, and for each token in ``flags`` whether it is found behind the normalizer."""
    rules = rules | {"added_tokens": _flagged(rules["added_tokens"], flags)}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(rules)), _flagged(tokenizer.settings, flags))


def _flagged(value: Any, flags: Mapping[str, bool]) -> Any:
    """JSON with the flag of each token set wherever one is described: transformers goes by tokenizer_config.json too."""
    if isinstance(value, list):
        return [_flagged(one, flags) for one in value]
    if not isinstance(value, dict):
        return value
    content = value.get("content")
    if isinstance(content, str):
        return value | ({"normalized": flags[content]} if content in flags else {})
    return {key: _flagged(one, flags) for key, one in value.items()}


def _agree(changed: Tokenizer, original: Tokenizer, probes: Collection[str]) -> bool:
    """Whether one makes of texts with white space around them what the other makes of them stripped."""
    spaced = [around.format(probe) for probe in probes for around in _AROUND]
    stripped = [text.strip() for text in spaced]
    return changed.encode(spaced, max_length=256).ids == original.encode(stripped, max_length=256).ids


# A word, a capital with an accent, a number, punctuation, a character that is a word: what tokenizers cut differently at their start.
PROBES = ("wings", "Éire", "7", "(a)", "東")


def reads_as_token(tokenizer: Tokenizer, text: str, token: str) -> bool:
    """Whether any text behind ``text`` has the ids that it has alone, with those of ``token`` behind the first.

    Args:
        tokenizer: The vocabulary.
        text: What is put before a text.
        token: What is to come of it.

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
    """A tokenizer that reads each prefix as one token wherever it stands.

    Args:
        tokenizer: Has the prefixes as tokens; it is not changed.
        prefixes: Empty ones are left out.

    Raises:
        InputError: A prefix cannot be read so.
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
            raise InputError(f"the prefix {prefix!r} before a text is not read as one token by this tokenizer, nor can it be made to be")
    return result


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer.encode(texts, max_length=64).ids
