"""The codes by which the Hugging Face Hub knows a model's languages; it refuses a card with any other.

Source: ISO 639-1; what the Hub says of a card's ``language``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from quiver.encoder import InputError

_TWO_LETTERS = (
    "aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo es et eu fa ff fi "
    "fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv "
    "kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm "
    "rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa "
    "wo xh yi yo za zh zu"
)
ISO_639_1 = frozenset(_TWO_LETTERS.split())
"""The codes of two letters."""

SPECIAL = frozenset({"code", "multilingual"})
"""What the Hub takes beside languages."""

_THREE_LETTERS = re.compile(r"[a-z]{3}")  # ISO 639-3 has some 7,900 of them


def check_languages(codes: Iterable[str]) -> None:
    """Say that something is no code of a language.

    Raises:
        InputError: Names it.

    Example:
        >>> check_languages(["en", "yue", "code"])
    """
    for code in codes:
        if code not in ISO_639_1 | SPECIAL and not _THREE_LETTERS.fullmatch(code):
            special = ", ".join(sorted(SPECIAL))
            raise InputError(f"no language is called {code!r}; give its ISO 639 code, such as en, ko or yue, or one of {special}")
