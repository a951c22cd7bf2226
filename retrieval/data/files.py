"""Documents of files: Markdown, text, HTML, PDF, office and e-mail files, e-books, notebooks and source code, cut into passages.

A passage is a document with the id ``path#number``. Its metadata say where it is: ``file``, ``type``, ``start`` and ``end`` (characters of
the file's text), and ``line`` and ``end_line``, or ``page`` and ``end_page`` (PDF; slides), or ``cell`` and ``end_cell`` (notebooks), all
from 1. Lines are those of the file (of a workbook: rows of the sheet), or of the Markdown that a document is converted to.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quiver.encoder.errors import EmptyInputError, InputError
from quiver.encoder.files import is_special
from quiver.retrieval.data.entries import EntryPosition
from quiver.retrieval.data.formats import NO_TEXT, READERS, FileText, UnreadableFileError, read_file
from quiver.retrieval.data.passages import Kind, PassageRules, TokenSpans, cut, title_of
from quiver.retrieval.data.tables import is_table
from quiver.retrieval.records import Document, Metadata

logger = logging.getLogger(__name__)

_MARKDOWN = (".md", ".markdown", ".mdx", ".qmd", ".rmd")
_RST = (".rst", ".rest")
_HTML = (".html", ".htm", ".xhtml")
_TEXT = (".txt", ".text", ".adoc", ".org", ".tex", ".toml", ".yaml", ".yml", ".ini", ".cfg")
_CODE = (
    *(".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".cu", ".cuh", ".m", ".mm", ".java", ".kt", ".kts", ".scala", ".groovy", ".gradle"),
    *(".js", ".jsx", ".mjs", ".cjs", ".ts", ".tsx", ".vue", ".svelte", ".css", ".scss", ".less", ".go", ".rs", ".rb", ".php", ".pl", ".pm"),
    *(".swift", ".cs", ".fs", ".vb", ".sh", ".bash", ".zsh", ".fish", ".ps1", ".bat", ".r", ".jl", ".lua", ".sql", ".hs", ".ml", ".mli"),
    *(".ex", ".exs", ".erl", ".clj", ".dart", ".f90", ".f", ".pas", ".zig", ".nim", ".proto", ".cmake", ".tf", ".s", ".asm", ".v", ".sv"),
)
_TYPES: Mapping[str, str] = {
    **dict.fromkeys(_MARKDOWN, "markdown"),
    **dict.fromkeys(_RST, "rst"),
    **dict.fromkeys(_TEXT, "text"),
    **dict.fromkeys(_HTML, "html"),
    **dict.fromkeys(_CODE, "code"),
    ".py": "python",
    ".pyi": "python",
    ".pdf": "pdf",
    **dict.fromkeys((".docx", ".docm"), "docx"),
    **dict.fromkeys((".pptx", ".pptm"), "pptx"),
    **dict.fromkeys((".xlsx", ".xlsm"), "xlsx"),
    ".epub": "epub",
    ".eml": "eml",
    ".ipynb": "notebook",
}
_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("readme", "license", "copying", "authors", "changelog", "contributing", "notice", "todo"), "text"),
    **dict.fromkeys(("makefile", "dockerfile", "gnumakefile", "rakefile", "gemfile", "jenkinsfile"), "code"),
}
_KINDS: Mapping[str, Kind] = {
    "markdown": "markdown",
    "html": "markdown",
    **dict.fromkeys(("notebook", "docx", "pptx", "xlsx", "epub", "eml"), "markdown"),
    "rst": "rst",
    "python": "python",
    "code": "code",
}
# Folders of installed packages and of caches. They and what is hidden are read only if a pattern names them.
_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "venv", "site-packages", "bower_components"})
_VERSION_CONTROL = frozenset({".git", ".hg", ".svn"})  # they hold copies of files, and passwords; no message recommends to read them

# No terminal prints the first, no index stores the others: bytes that are not UTF-8 come as lone surrogates.
_NO_NAME = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_SHOWN_NAMES = 3  # names of skipped folders, or of files without text, in a message
_WITHOUT_TEXT = "files without text"
_OTHER_TYPES = "files of other types left out"


def type_of(path: Path) -> str | None:
    """The type of a file by its name, such as ``markdown``; None if it is not a type that is read."""
    return _TYPES.get(path.suffix.lower()) or _NAMES.get(path.name.lower())


def to_passages(name: str, kind: str, file: FileText, rules: PassageRules, token_spans: TokenSpans) -> list[Document]:
    """Cut the text of a file, whose path has ``/`` and begins ids and titles, into passages."""
    base = title_of(name, (file.title,) if file.title else ())
    starts = [start for start, _ in file.places]
    documents = []
    spans = cut(file.text[file.begin :], _KINDS.get(kind, "text"), rules, token_spans, title=base)
    for number, span in enumerate(spans, start=1):
        start, stop = file.begin + span.start, file.begin + span.end
        text = file.text[start:stop]
        first = start + len(text) - len(text.lstrip())
        last = start + len(text.rstrip()) - 1
        begin, end = (file.places[max(bisect_right(starts, place) - 1, 0)][1] for place in (first, last))
        place = {file.unit: begin, f"end_{file.unit}": max(begin, end), "start": start, "end": stop}
        metadata: Metadata = {"file": name, "type": kind, **place}
        path = span.path[1:] if span.path[:1] == (file.title,) else span.path
        documents.append(Document(f"{name}#{number}", text, title_of(base, path), {**file.metadata, **metadata}))
    return documents


@dataclass(frozen=True)
class FileChoice:
    """Which files of a folder are read.

    Attributes:
        include: Patterns, at least one of which a path must match; empty for every file of a known type. A file of unknown type that is
            included is read as text, unless the pattern is one of wildcards alone, such as ``*``. Hidden files and folders, and folders
            of packages, are read if a pattern names them, such as ``.github`` or ``node_modules/**``.
        exclude: Patterns of paths that are left out.
        opened: Name of hidden files and folders, or of folders of packages, that are read as others are.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    opened: str = ""

    def has(self, path: str) -> bool:
        """Whether a file is read, whatever its type."""
        return not self.leaves_out(path) and (not self.include or any(matches(path, pattern) for pattern in self.include))

    def has_unknown(self, path: str) -> bool:
        """Whether a file of unknown type is read as text."""
        return any(matches(path, pattern) for pattern in self.include if pattern.strip("*/"))

    def names(self, name: str) -> bool:
        """Whether a pattern names a file or folder that is otherwise skipped; ``*`` does not name one that is hidden."""
        parts = (self.opened, *(part for pattern in self.include for part in pattern.split("/")))
        return any(part == name or (part.startswith(".") and matches(name, part)) for part in parts)

    @property
    def has_only_hidden(self) -> bool:
        """Whether each pattern names what is otherwise skipped, as if it were read beside the other files."""
        return bool(self.include) and all(any(_is_skipped(part, folder=True) for part in each.split("/")) for each in self.include)

    def leaves_out(self, path: str) -> bool:
        """Whether a file or folder is left out."""
        return any(matches(path, pattern) for pattern in self.exclude)


def _is_skipped(name: str, *, folder: bool) -> bool:
    return name.startswith(".") or (folder and name in _SKIPPED_FOLDERS)


def matches(path: str, pattern: str) -> bool:
    """Whether a relative path, or a folder that it is in, matches a pattern.

    A pattern without ``/`` is compared with names, others with whole paths. ``*`` and ``?`` match within a name, ``**`` over folders. Upper
    and lower case are the same, as for the suffixes of the known types.

    Example:
        >>> [matches("docs/old/a.md", pattern) for pattern in ("*.MD", "old", "docs/*.md", "docs/**/*.md", "docs/", "md")]
        [True, True, False, True, True, False]
    """
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.strip("/"))
    wanted = re.compile("".join(tokens.get(piece, re.escape(piece)) for piece in pieces), re.DOTALL | re.IGNORECASE)
    parts = path.split("/")
    candidates = parts if "/" not in pattern.strip("/") else ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(wanted.fullmatch(each) for each in candidates)


class FolderFiles:
    """The passages of a folder's files, or of one file; each pass reads the files again.

    Args:
        root: The folder, or one file.
        choice: Files to read.
        rules: Where texts are cut.
        token_spans: Finds tokens.
        label: What the paths begin with in ids and the field ``file``; for one file the path. Empty for the path in the folder.

    Attributes:
        digests: Path -> checksum of the bytes, for every file of the last pass.
        unreachable: Paths that exist and could not be opened in the last pass; what they hold is unknown.
    """

    def __init__(self, root: Path, choice: FileChoice, rules: PassageRules, token_spans: TokenSpans, label: str = "") -> None:
        self.root, self.digests, self.unreachable = root, dict[str, str](), list[str]()
        self._choice, self._rules, self._token_spans, self._label = choice, rules, token_spans, label
        self._logged = False

    def __call__(self, unchanged: Callable[[str, str], bool] = lambda name, digest: False) -> Iterator[tuple[EntryPosition, Document]]:
        """Start a pass; ``unchanged`` says whether a file with a path and a checksum can be skipped.

        Raises:
            InputError: A library is missing, or a folder or the only file of the source cannot be read.
        """
        skipped, digests, read = _Skipped(), dict[str, str](), 0
        self.unreachable = []
        for inner, path in self._files(skipped):
            kind, name = type_of(path) or "text", self._labelled(inner)
            try:
                content = path.read_bytes()
                digests[name] = hashlib.sha256(READERS + content).hexdigest()
                file = None if unchanged(name, digests[name]) else read_file(path, content, kind)
            except (UnreadableFileError, OSError) as error:
                message = f"{path}: cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
                if self.root.is_file():
                    raise UnreadableFileError(message) from error
                logger.info("%s", message)
                skipped.add("unreadable", name)
                if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                    self.unreachable.append(name)
                continue
            read += 1
            if file is not None:
                if content.strip() and not file.text.strip():
                    self._note_no_text(path, name, kind, skipped)
                    read -= 1
                    continue
                skipped.note_encoding(name, file.encoding)
                if file.remark:
                    skipped.add(file.remark, name)
                    logger.info("%s: %s", path, file.remark)
                for number, document in enumerate(to_passages(inner, kind, file, self._rules, self._token_spans), start=1):
                    metadata = {**(document.metadata or {}), "file": name}
                    yield EntryPosition(path, number), document._replace(id=f"{name}#{number}", metadata=metadata)
        self.digests = digests
        if not self._logged:
            self._logged = True
            skipped.log(self.root, read, self._hidden(skipped))

    def _note_no_text(self, path: Path, name: str, kind: str, skipped: _Skipped) -> None:
        """Count a file that has content and no text; raises EmptyInputError if it is the only file of the source."""
        reason = f" ({NO_TEXT[kind]})" if kind in NO_TEXT else ""
        if self.root.is_file():
            raise EmptyInputError(f"{path}: the file has no text{reason}")
        logger.info("%s: no text%s", path, reason)
        skipped.add(f"{kind} {_WITHOUT_TEXT}{reason}", name)

    def _labelled(self, path: str) -> str:
        """The path of a file in ids and metadata."""
        if not self._label:
            return path
        return self._label if self.root.is_file() else f"{self._label}/{path}"

    def is_empty(self) -> bool:
        """Whether there is no file to read."""
        return next(self._files(_Skipped()), None) is None

    def skipped(self) -> str:
        """Describe the hidden files and the files of package folders that are left out; empty if there are none."""
        skipped = _Skipped()
        for _ in self._files(skipped):
            pass
        return self._hidden(skipped)

    def _files(self, skipped: _Skipped) -> Iterator[tuple[str, Path]]:
        """The files to read, by path, in order."""
        if self.root.is_file():
            yield self.root.name, self.root
            return
        yield from self._walk(self.root, skipped, _raise_unreadable)

    def _walk(self, top: Path, skipped: _Skipped, onerror: Callable[[OSError], None] | None) -> Iterator[tuple[str, Path]]:
        """The files to read in one of the folders."""
        for folder, inner, names in os.walk(top, onerror=onerror):
            here = Path(folder).relative_to(self.root).as_posix()
            prefix = "" if here == "." else f"{here}/"
            kept = []
            for name in sorted(inner):
                if (Path(folder) / name).is_symlink():
                    skipped.add("links to folders that were left out", prefix + name)
                elif self._choice.leaves_out(prefix + name):
                    continue
                elif _is_skipped(name, folder=True) and not self._choice.names(name):
                    skipped.hidden += [prefix + name] if name not in _VERSION_CONTROL else []
                else:
                    kept.append(name)
            inner[:] = kept
            for name in sorted(names):
                if not self._is_chosen(prefix + name, skipped):
                    continue
                if is_special(Path(folder) / name):
                    skipped.add("pipes, sockets and devices left out", prefix + name)
                else:
                    yield prefix + name, Path(folder) / name

    def _is_chosen(self, path: str, skipped: _Skipped) -> bool:
        name = path.rpartition("/")[2]
        if _is_skipped(name, folder=False) and not self._choice.names(name):
            skipped.hidden.append(path)
            return False
        if not self._choice.has(path):
            if self._choice.has_only_hidden and type_of(Path(name)) is not None and not self._choice.leaves_out(path):
                skipped.add("other files left out (--include '*' reads them too)", path)
            return False
        if _NO_NAME.search(path):
            skipped.add("names with control characters or without an encoding left out", ascii(path))
            return False
        if is_table(Path(name)):
            skipped.add("tables left out", path)
            return False
        if type_of(Path(name)) is None and not self._choice.has_unknown(path):
            skipped.add(_OTHER_TYPES, path, kind=Path(name).suffix or name)
            return False
        return True

    def _hidden(self, skipped: _Skipped) -> str:
        """How many files would be read if they were not hidden and not in folders of packages, by the names of these."""
        found: Counter[str] = Counter()
        for path in skipped.hidden:
            name = path.rpartition("/")[2]
            opened = FolderFiles(self.root, replace(self._choice, opened=name), self._rules, self._token_spans)
            if (self.root / path).is_dir():
                found[name] += sum(1 for _ in opened._walk(self.root / path, _Skipped(), None))  # what cannot be opened does not count
            else:
                found[name] += opened._is_chosen(path, _Skipped())
        counts = [f"{name}: {count:,}" for name, count in found.most_common() if count]
        if not counts:
            return ""
        shown = ", ".join(counts[:_SHOWN_NAMES]) + (", ..." if counts[_SHOWN_NAMES:] else "")
        others = "" if self._choice.include else "--include '*' "
        left_out = f"hidden files and files of package folders left out: {found.total():,} ({shown})"
        return f"{left_out}; to read those of a name too: {others}--include NAME"


def _raise_unreadable(error: OSError) -> None:
    """A folder whose files are unknown must not look like an empty one."""
    raise InputError(f"{error.filename}: cannot be read ({error.strerror}); leave it out with --exclude") from error


class _Skipped:
    """Counts what was left out, for one line."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._names: dict[str, list[str]] = {}
        self.hidden: list[str] = []  # paths of files and folders that are hidden or hold packages

    def add(self, what: str, name: str, *, kind: str = "") -> None:
        self._counts[what] += 1
        names = self._names.setdefault(what, [])
        if len(names) < _SHOWN_NAMES:
            names.append(name)
        if kind:
            self._kinds[kind] += 1

    def note_encoding(self, name: str, encoding: str) -> None:
        if encoding != "utf-8":
            self.add(f"read as {encoding}", name)

    def log(self, root: Path, read: int, hidden: str) -> None:
        """Log one line."""
        parts = [f"{root}: files read: {read:,}", *([hidden] if hidden else [])]
        for what, count in self._counts.items():
            names = self._names[what][: None if _WITHOUT_TEXT in what else 1]
            kinds = [kind for kind, _ in self._kinds.most_common(5)]
            parts.append(f"{what}: {count:,} ({', '.join(kinds) if what == _OTHER_TYPES else 'such as ' + ', '.join(names)})")
        logger.log(logging.WARNING if len(parts) > 1 else logging.INFO, "%s", "; ".join(parts))
