"""Bytes into text: byte order marks, declared encodings, UTF-8, and a guess for what is none of these."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins with the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_FEWEST = 4  # bytes beyond ASCII that a guess needs, and characters that prove UTF-8
# Labels of the WHATWG's Encoding Standard that Python does not know.
_LABELS = {
    "windows-949": "cp949",
    "dos-874": "cp874",
    "windows-874": "cp874",
    "iso-8859-8-i": "iso8859-8",
    "iso-8859-8-e": "iso8859-8",
    "cn-big5": "big5",
    "koi": "koi8-r",
    "koi8": "koi8-r",
    "windows-31j": "cp932",
    "gb_2312-80": "gb18030",
    "unicode-1-1-utf-8": "utf-8",
    "ansinew": "cp1252",  # of LaTeX's inputenc
    "applemac": "mac-roman",
}
# Encodings that are read as the larger ones that contain them, as the Encoding Standard says: those who declare them use the larger ones.
_LARGER = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "euc_kr": "cp949",
    "shift_jis": "cp932",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "big5": "big5hkscs",
    # A declaration that can be read byte by byte is not itself in one of these.
    **dict.fromkeys(("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "utf-8-sig"), "utf-8"),
}
_SHIFTED = frozenset({"iso2022_jp", "iso2022_jp_1", "iso2022_jp_2", "iso2022_jp_3", "iso2022_kr", "hz"})  # their bytes are all ASCII
_BY_PAIRS = frozenset({"cp932", "cp949", "gb18030", "big5hkscs", "euc_jp", *_SHIFTED})  # wrong bytes are found
_NOT_OF_TEXTS = frozenset({"idna", "punycode", "raw-unicode-escape", "unicode-escape", "undefined", "utf-7"})
_WESTERN = ("cp1252", "cp1250", "iso8859_2", "cp1254", "mac_roman", "cp850")
_OTHERS = (
    *("cp1251", "koi8_r", "cp1253", "cp1255", "cp1256", "cp874", "cp932", "euc_jp", "cp949", "gb18030", "big5", "cp866"),
    *("koi8_u", "iso8859_5", "mac_cyrillic", "iso8859_6"),
)
# Signs between letters, and controls: the text of a wrong encoding.
_STRANGE = re.compile(r"(?<=[^\W\d_])(?:[^\w\s\x00-\x7f\u2018-\u201d\u2013\u2014\u2026\xab\xbb\xb7]|[¹³¼¾])(?=[^\W\d_])|[\x80-\x9f]")
# What central European and Turkish texts have in Windows-1252, and western ones hardly: letters, and kinds of letters that no western
# language has together (Czech, Hungarian, Turkish).
_RARE = re.compile("[šŠžŽŸ]|œ(?![uiedt])")
_EXCLUSIVE = (("øØ", "ìùÌÙ"), ("õûÕÛ", "öüÖÜ", "áéíóÁÉÍÓ"), ("þðýÞÐÝ", "üçÜÇ"))
_JIS = re.compile(rb"\x1b\$[@B]")  # begins Japanese text among ASCII bytes


def decode(content: bytes, declared: str = "") -> tuple[str, str]:
    """Decode text whose encoding is marked, declared, UTF-8 or guessed.

    A declaration counts only if the bytes agree. Where nearly all is UTF-8, or what is declared, the rest is replaced by U+FFFD.

    Args:
        content: The bytes.
        declared: Encoding that the text names itself, such as ``latin1``; empty if it names none.

    Returns:
        The text without a byte order mark, and how it was read, such as ``utf-8`` or ``cp1252 by guess``.

    Raises:
        ValueError: This is not text.

    Example:
        >>> decode("Größe".encode("cp1252")), decode("서울".encode("euc-kr"), "euc-kr")
        (('Größe', 'cp1252 by guess'), ('서울', 'cp949'))
    """
    encoding = wide_encoding(content)
    if encoding or b"\0" in content[:HEAD]:
        return _decode_wide(content, encoding)
    codec = _codec_of(declared) or ("iso2022_jp" if _JIS.search(content) else "")
    if content.isascii() and codec not in _SHIFTED:
        return content.decode("ascii"), "utf-8"
    utf_8 = _decode_strictly(content, "utf-8")
    # Of saved pages that were converted to UTF-8, many still declare what they were before. Text in other encodings is hardly ever valid
    # UTF-8, except a few characters of two bytes.
    is_utf_8 = utf_8 is not None and (codec not in _BY_PAIRS or len(utf_8) - len(utf_8.encode("ascii", "ignore")) > _FEWEST)
    text = None if is_utf_8 else _decode_strictly(content, codec)
    if text is not None:
        return text, codec
    return (utf_8, "utf-8") if utf_8 is not None else _decode_damaged(content, codec)


def _decode_damaged(content: bytes, declared: str) -> tuple[str, str]:
    """Decode text that is neither UTF-8 nor what it declares, as the one that it nearly is, or by a guess."""
    for encoding, least in ((declared, 10), ("utf-8", GOOD_PER_BAD)):
        if encoding:
            text, good, bad = count_replaced(content, encoding)
            if good >= least * bad:
                return text, f"{encoding} with invalid bytes replaced"
    if encoding := guess_encoding(content.splitlines()):
        return content.decode(encoding, "replace"), f"{encoding} by guess"
    raise ValueError("not text")


SAMPLE = 1 << 16
"""Bytes that a guess looks at."""

GOOD_PER_BAD = 2
"""Valid characters beyond ASCII per invalid one, from which on a text is UTF-8 with errors; in other encodings nearly all are invalid."""


HEAD = 8192
"""Bytes at the start of a file in which a NUL shows that it is UTF-16 or not text."""


def wide_encoding(head: bytes) -> str:
    """The encoding of a byte order mark, or UTF-16 without one, where each second byte is often NUL; empty for others.

    Args:
        head: The first bytes of a file, `HEAD` of them or all.

    Example:
        >>> wide_encoding("owl".encode("utf-16-le")), wide_encoding("owl".encode("utf-8-sig")), wide_encoding(b"owl")
        ('utf-16-le', 'utf-8-sig', '')
    """
    if marked := next((encoding for mark, encoding in _MARKS if head.startswith(mark)), ""):
        return marked
    head = head[:HEAD]
    for encoding, high, low in (("utf-16-le", head[1::2], head[::2]), ("utf-16-be", head[::2], head[1::2])):
        if high.count(0) * 3 > len(high) and not low.count(0):
            return encoding
    return ""


def count_replaced(content: bytes, encoding: str) -> tuple[str, int, int]:
    """Decode with U+FFFD for invalid bytes; count the valid characters beyond ASCII and the invalid ones."""
    text = content.decode(encoding, "replace")
    bad = text.count("\ufffd") - (content.count(b"\xef\xbf\xbd") if encoding == "utf-8" else 0)
    return text, len(text) - len(text.encode("ascii", "ignore")) - bad, bad


def guess_encoding(lines: Iterable[bytes]) -> str:
    """Guess the encoding of lines that are not UTF-8; empty if they seem to be no text.

    Windows-1252 is preferred, the most frequent encoding of one byte a character, unless the letters are those of other languages.
    """
    from charset_normalizer import from_bytes

    sample = b"\n".join(dict.fromkeys(line for line in lines if not line.isascii()))[:SAMPLE]
    runs = [len(run) for run in re.findall(rb"[\x80-\xff]+", sample)]
    long = sum(run for run in runs if run > 2)  # western words have single letters beyond ASCII
    western = _decode_strictly(sample, "cp1252")
    is_western = western is not None and _count_strange(western) * 10 < sum(runs)
    if is_western and long * 4 <= sum(runs):
        return _WESTERN[0]
    if sum(runs) < _FEWEST:
        return ""
    candidates = [*(() if long * 2 > sum(runs) else _WESTERN if is_western else _WESTERN[1:]), *_OTHERS]
    found = from_bytes(sample, cp_isolation=candidates, enable_fallback=False)
    # The library's own order ignores the signs, and takes cp1250 before cp1252.
    keys = {each.encoding: (round(each.chaos, 1), len(_STRANGE.findall(str(each))), -each.coherence) for each in found}
    return min((each for each in candidates if each in keys), key=lambda each: keys[each], default="")


def _count_strange(western: str) -> int:
    """How many signs and letters of a text in Windows-1252 show that it is in another encoding."""
    together = (min(len(re.findall(f"[{letters}]", western)) for letters in kinds) for kinds in _EXCLUSIVE)
    return len(_STRANGE.findall(western)) + len(_RARE.findall(western)) + sum(together)


def _codec_of(label: str) -> str:
    """Python's name of a declared encoding, as browsers understand it; empty if it is unknown."""
    name = re.sub("-(?:unix|dos|mac)$", "", label.strip().lower())  # Emacs adds the ends of lines
    for each in (name, name.removeprefix("x-").removeprefix("x-")):
        try:
            codec = codecs.lookup(_LABELS.get(each, each)).name
            "".encode(codec)  # refuses codecs between bytes, such as hex
        except (LookupError, ValueError):
            continue
        return "" if codec in _NOT_OF_TEXTS else _LARGER.get(codec, codec)
    return ""


def _decode_strictly(content: bytes, encoding: str) -> str | None:
    try:
        return content.decode(encoding)
    except (UnicodeDecodeError, LookupError):
        return None


def _decode_wide(content: bytes, encoding: str) -> tuple[str, str]:
    """Decode text with a mark; a last character that was cut off does not make it unreadable."""
    text = content.decode(encoding, "replace") if encoding else ""
    if (not text and len(content) > len(codecs.BOM_UTF32_LE)) or text.count("\ufffd") * 10 > len(text):
        raise ValueError("not text")
    return text, encoding.removesuffix("-sig")
