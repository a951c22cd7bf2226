"""Files: JSON, text and tensors, read with errors that name file and line, written whole or not at all; bytes into text.

Text is decoded by byte order marks, declared encodings, UTF-8, and a guess for what is none of these.

Long jobs and indexes change files through a `Disk`. ``REAL`` is the real file system. Tests use disks that fail at a chosen call, run
out of space, write partially, or forget unsynced data: durability depends on the order of these calls. Reads and locks do not use a disk.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import hashlib
import io
import json
import logging
import os
import re
import stat
import uuid
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from quiver.encoder.errors import EmptyInputError, InputError

if TYPE_CHECKING:
    from torch import Tensor


logger = logging.getLogger(__name__)


def check_utf8(text: str, where: str) -> str:
    """Return a text unchanged if UTF-8 can hold it, as files, tokenizers and terminals demand, or raise InputError.

    Half of a surrogate pair cannot be written: it comes from an escape in JSON, and from bytes of a shell argument or a file name that are
    not UTF-8. Texts are checked where they come in; ``where`` says where.
    """
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"{where} contains an unpaired surrogate; replace the invalid character") from error
    return text


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a file that is missing, unreadable or not a UTF-8 JSON object is an InputError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: the file is missing") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    except ValueError as error:  # the only other ValueError: CPython refuses to convert integers of thousands of digits
        raise InputError(f"{path}: contains a number with too many digits") from error
    except RecursionError as error:
        raise InputError(f"{path}: JSON is nested too deeply") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def expand_home(path: str | Path) -> Path:
    """Replace ``~`` or ``~user`` at the start of a path by the home folder, or raise InputError if none is known."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path}: no home folder is known for {Path(path).parts[0]}; write the full path") from error


def check_target(path: Path) -> Path:
    """Check before a long computation that a file can be written, or raise InputError; returns the path, or the target of a link.

    A rename would replace whatever has that name, a link or, as root, even a device.
    """
    # A path without a name is a folder too: ".", "/", or a working folder that has been deleted.
    if not path.name or path.is_dir():
        raise InputError(f"{path}: cannot be written, it is a folder; name a file")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: cannot be written, it is a device, a pipe or a socket; name a file")
    # Not Path.resolve, which raises on circular links up to Python 3.12.
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():
        raise InputError(f"{path}: cannot be written, the symbolic link leads back to itself")
    folder = target.parent
    if not folder.is_dir():
        raise InputError(f"{path}: cannot be written, the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path}: cannot be written (no permission in the folder {folder})")
    return target


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path`` that takes its name when the block succeeds, and is removed otherwise.

    Readers see the old file or the new one, never a part of it, and the new one is on disk when the block has ended. A link is kept: its
    target is replaced. Errors are those of `check_target`.
    """
    target = check_target(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.touch(exist_ok=False)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        with naming(path, temporary):
            yield temporary
            with temporary.open("rb+") as written:  # Windows syncs no file that is open for reading only
                os.fsync(written.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Name a file in errors that name none or its temporary file: a full disk is reported for a descriptor only."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: otherwise a power failure can undo a rename."""
    if os.name == "nt":  # Windows cannot open a folder, and its file system journals renames itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# How Rust's standard library prints an operating system error.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file of contiguous tensors that share no storage; within `replacing`, to the temporary file.

    A failure is an OSError; safetensors raises its own `SafetensorError`, even for a full disk.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file  # imports PyTorch, which those who only read JSON need not wait for

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
        # safetensors 0.8 renames a temporary file that only its owner may read: a service of another user could not load the model.
        path.chmod(stat.S_IMODE(mode))
    except SafetensorError as error:
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write JSON with two spaces of indent, whole or not at all; NaN and infinity are a ValueError."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # Half of a surrogate pair, as in the name of a file that is not UTF-8, becomes an escape of JSON.
    write_text(path, text.encode("utf-8", "backslashreplace").decode("utf-8"))


_BLOCK = 1 << 20
_BOM = "\ufeff"
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of JSON that may be half of a surrogate pair."""


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers from 1, as `decoded_lines`, but without blank lines and ends.

    Lines end at a line feed only: other Unicode line separators may occur inside a text. A file of blank lines is an EmptyInputError.
    """
    found = False
    for number, text in decoded_lines(path):
        line = text.rstrip("\r\n")
        if line.strip():
            found = True
            yield number, line
    if not found:
        raise EmptyInputError(f"{path}: the file is empty")


def read_whole(path: Path) -> str:
    """Read a text file (UTF-8, or UTF-16 or UTF-32) without changing line ends; a byte order mark at the start is dropped."""
    return "".join(text for _, text in decoded_lines(path))


def decoded_lines(path: Path, *, legacy: bool = False) -> Generator[tuple[int, str], None, None]:
    """Yield lines of UTF-8, UTF-16 or UTF-32 with their numbers and ends; a byte order mark at the start is dropped.

    ``legacy`` accepts what spreadsheets write beside UTF-8 and UTF-16: UTF-8 with a few invalid bytes, which are replaced, and other
    encodings, which are guessed from all lines; what was assumed is logged once. An InputError if the file is missing, is a pipe or a
    device, is not UTF-8 (names the line), or is damaged gzip.
    """
    number, encoding, errors = 0, "utf-8", "strict"  # lines are decoded one by one, so that an error can name the line
    try:
        with open_binary(path) as file:
            buffered: Any = file
            if (wide := wide_encoding(buffered.peek(HEAD)[:HEAD])) not in ("", "utf-8-sig"):  # as PowerShell writes the output of a command
                encoding = wide
                for number, text in enumerate(io.TextIOWrapper(buffered, encoding, newline="\n"), start=1):
                    yield number, text
                return
            for number, raw in enumerate(file, start=1):
                try:
                    text = raw.decode(encoding, errors)
                except UnicodeDecodeError:
                    if not legacy or encoding != "utf-8":
                        raise
                    encoding, errors = _find_encoding(path, number)
                    text = raw.decode(encoding, errors)
                yield number, text.removeprefix(_BOM) if number == 1 else text
    except UnicodeDecodeError as error:
        found = f"not {encoding.upper()} ({error.reason} at byte {error.start} of the line)"
        raise InputError(f"{path}:{number}: {found}; convert the file") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: damaged gzip after line {number} ({error}); download the file again") from error


def _find_encoding(path: Path, first_bad: int) -> tuple[str, str]:
    """The encoding of a table that is not UTF-8 from a line on, and how errors are handled; it is logged once."""
    good, bad, lines, not_utf_8, size = 0, 0, 0, list[bytes](), 0
    with open_binary(path) as file:
        for raw in file:
            if raw.isascii():
                continue
            _, right, wrong = count_replaced(raw, "utf-8")
            good, bad, lines = good + right, bad + wrong, lines + (not wrong)
            if wrong and size < SAMPLE:
                not_utf_8.append(raw)
                size += len(raw)
    if good >= GOOD_PER_BAD * bad:
        warn_once(f"{path}:{first_bad}: not UTF-8, while most lines are; invalid bytes were replaced here and in what follows: {bad:,}")
        return "utf-8", "replace"
    encoding = guess_encoding(not_utf_8)
    if lines * 10 > bad or not encoding:  # a short line in another encoding can be valid UTF-8
        found = "not UTF-8, while other lines are; repair the line" if lines else "not UTF-8 and no other known encoding; convert the file"
        raise InputError(f"{path}:{first_bad}: {found}")
    warn_once(f"{path}: not UTF-8; read as {encoding.replace('cp125', 'Windows-125')}")
    return encoding, "strict"


@cache
def warn_once(message: str) -> None:
    """Log a warning at the first of several passes over a file."""
    logger.warning("%s", message)


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the objects of a JSON lines file with their line numbers, which errors name.

    Half of an escaped surrogate pair is refused: it is legal JSON but fails later in tokenizers and files.
    """
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: malformed JSON ({error})") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        if SURROGATE_ESCAPE.search(line):
            check_row(row, f"{path}:{number}")
        yield number, row


def check_row(row: Mapping[str, object], where: str) -> None:
    """Check that UTF-8 can hold the names and values of a JSON object; ``where`` is its position, for the error."""
    for name, value in row.items():
        check_utf8(name + json.dumps(value, ensure_ascii=False), f"{where}: {name!r}")


def open_binary(path: Path) -> BinaryIO:
    """Open a file for reading bytes, through gzip if its name ends in ``.gz``; what cannot be read is an InputError."""
    check_regular(path)
    try:
        return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def is_special(path: Path) -> bool:
    """Whether a path is a pipe, a socket or a device, or a link to one: opening it can wait forever, and it cannot be read twice."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_regular(path: Path) -> None:
    """Raise InputError for a pipe, a socket or a device."""
    if is_special(path):
        raise InputError(f"{path}: is a pipe, a socket or a device, which cannot be read twice; write its content to a file and name that")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file through `replacing`. Gzip output contains no time or name, so equal content gives equal bytes."""
    with replacing(path) as temporary, temporary.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                yield cast(BinaryIO, packed)
        else:
            yield raw


def write_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object per line, see `atomic_file`."""
    with atomic_file(path) as file:
        file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def cache_folder(name: str) -> Path:
    """Return the folder for what is kept between runs, which may not exist: ``$QUIVER_CACHE/name``, or in the user's cache folder."""
    if root := os.environ.get("QUIVER_CACHE"):
        return expand_home(root) / name
    return expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "quiver" / name


def mark_used(path: Path) -> None:
    """Set the time of an entry's last use to now."""
    with suppress(OSError):  # a read-only cache is not pruned by this user
        os.utime(path)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


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
    """Decode text whose encoding is marked, declared (as ``latin1``; empty if it is not), UTF-8 or guessed; ValueError if it is not text.

    A declaration counts only if the bytes agree. Where nearly all is UTF-8, or what is declared, the rest is replaced by U+FFFD. Returns
    the text without a byte order mark, and how it was read, such as ``utf-8`` or ``cp1252 by guess``.
    """
    encoding = wide_encoding(content)
    if encoding or b"\0" in content[:HEAD]:
        wide = content.decode(encoding, "replace") if encoding else ""
        # A last character that was cut off does not make it unreadable.
        if (not wide and len(content) > len(codecs.BOM_UTF32_LE)) or wide.count("\ufffd") * 10 > len(wide):
            raise ValueError("not text")
        return wide, encoding.removesuffix("-sig")
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

    ``head`` are the first bytes of a file, `HEAD` of them or all.
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
    is_western = False
    if western is not None:  # unless signs and letters show that it is in another encoding
        together = sum(min(len(re.findall(f"[{letters}]", western)) for letters in kinds) for kinds in _EXCLUSIVE)
        is_western = (len(_STRANGE.findall(western)) + len(_RARE.findall(western)) + together) * 10 < sum(runs)
    if is_western and long * 4 <= sum(runs):
        return _WESTERN[0]
    if sum(runs) < _FEWEST:
        return ""
    candidates = [*(() if long * 2 > sum(runs) else _WESTERN if is_western else _WESTERN[1:]), *_OTHERS]
    found = from_bytes(sample, cp_isolation=candidates, enable_fallback=False)
    # The library's own order ignores the signs, and takes cp1250 before cp1252.
    keys = {each.encoding: (round(each.chaos, 1), len(_STRANGE.findall(str(each))), -each.coherence) for each in found}
    return min((each for each in candidates if each in keys), key=lambda each: keys[each], default="")


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


_BUFFER = 1 << 20
# Errors of file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class _NamedFile(io.FileIO):
    """A file whose errors name it, as those of opening it do: a full disk is reported for a descriptor only."""

    def write(self, content: Any) -> int:
        with naming(Path(os.fsdecode(self.name))):
            return super().write(content)


class Disk:
    """The calls that change files, on the real file system; each may raise OSError."""

    def create(self, path: Path) -> BinaryIO:
        """Create a file and open it for writing; an existing file is an error. Its content is durable after ``sync_file``."""
        return io.BufferedWriter(_NamedFile(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o666)), _BUFFER)

    def sync_file(self, path: Path) -> None:
        """Make the content of a file durable."""
        with path.open("rb+") as file, naming(path):
            os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Make the names of a folder's entries durable."""
        sync_folder(path)

    def mkdir(self, path: Path) -> None:
        """Create a folder; an existing one is an error."""
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder atomically; a file at the target is replaced."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name atomically; an existing target is an error."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


REAL = Disk()
"""Default disk: the real file system."""


def write_file(path: Path, content: bytes, disk: Disk) -> None:
    """Write a new file with durable content; its name is durable only after its folder is synced."""
    with disk.create(path) as file:
        file.write(content)
    disk.sync_file(path)


def put_file(path: Path, content: bytes, disk: Disk) -> None:
    """Write a file atomically and durably; an existing file of that name is replaced."""
    temporary = path.with_name(f"{path.name}.tmp")
    if temporary.exists():  # left by a killed process; the caller is the only writer
        disk.unlink(temporary)
    write_file(temporary, content, disk)
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)


def link_if_absent(source: Path, target: Path, disk: Disk) -> None:
    """Rename a durable file atomically; an existing target is a FileExistsError, but on a file system without hard links replaced."""
    try:
        disk.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        disk.rename(source, target)
    else:
        disk.unlink(source)


def remove_tree(folder: Path, disk: Disk) -> None:
    """Remove a folder and its content; symbolic links are removed, not followed."""
    if folder.is_symlink():
        disk.unlink(folder)
        return
    for entry in sorted(folder.iterdir()):
        remove(entry, disk)
    disk.rmdir(folder)


def remove(path: Path, disk: Disk) -> None:
    """Remove a file, a symbolic link, or a folder with its content."""
    if path.is_dir():
        remove_tree(path, disk)
    else:
        disk.unlink(path)


def make_folders(folder: Path, disk: Disk) -> None:
    """Create a folder and its missing parents, each with a durable name."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    # A process that was killed may have created the last existing folder and not have made its name durable.
    with suppress(PermissionError):  # the process that made it could read its parent
        disk.sync_folder(folder.parent)
    for path in reversed(missing):
        disk.mkdir(path)
        disk.sync_folder(path.parent)
