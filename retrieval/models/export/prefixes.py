"""Whether a text before a text is read as one token inserted behind [CLS].

PyLate and Stanford ColBERT insert the id of a marker; sentence-transformers 6 writes the marker before the text and tokenises both.
Which of the two a tokenizer gives the same ids for can only be asked of the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import tokenizers

from quiver.encoder import InputError, Tokenizer

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
