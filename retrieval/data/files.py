"""Documents of files: Markdown, text, reStructuredText, HTML, PDF, notebooks and source code, cut into passages.

A passage is a document with the id ``path#number``. Its metadata say where it is: ``file``, ``type``, ``start`` and ``end`` (characters of
the file's text), and ``line`` and ``end_line``, or ``page`` and ``end_page`` (PDF), or ``cell`` and ``end_cell`` (notebooks), all from 1.
The text of HTML is its conversion to Markdown, and the line is that of the source; the text of a PDF is what its pages say; that of a
notebook is its Markdown and its code, without outputs.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import EntryPosition, flat_metadata
from quiver.retrieval.data.passages import Kind, PassageRules, TokenSpans, cut, line_starts, title_of
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
    ".ipynb": "notebook",
}
_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("readme", "license", "copying", "authors", "changelog", "contributing", "notice", "todo"), "text"),
    **dict.fromkeys(("makefile", "dockerfile", "gnumakefile", "rakefile", "gemfile", "jenkinsfile"), "code"),
}
_KINDS: Mapping[str, Kind] = {
    "markdown": "markdown",
    "html": "markdown",
    "notebook": "markdown",
    "rst": "rst",
    "python": "python",
    "code": "code",
}
# Folders of installed packages and of caches. They and what is hidden are read only if a pattern names them.
_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "venv", "site-packages", "bower_components"})
_VERSION_CONTROL = frozenset({".git", ".hg", ".svn"})  # they hold copies of files, and passwords; no message recommends to read them


# No terminal prints the first, no index stores the others: bytes that are not UTF-8 come as lone surrogates.
_NO_NAME = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_SHOWN_NAMES = 3  # names of skipped folders in a message
_OTHER_TYPES = "files of other types left out"


class FileText(NamedTuple):
    """The text of a file.

    Attributes:
        text: The text.
        unit: What ``places`` number: lines, pages or cells.
        places: First character of a line, page or cell, and its number, ascending.
        title: Title that the file gives itself, such as that of an HTML page.
        encoding: Encoding that the text was read in.
        begin: First character of what passages are cut from; what is before it is front matter.
        metadata: Fields of the front matter.
        remark: What the output should count, such as front matter that is not read.
    """

    text: str
    unit: Literal["line", "page", "cell"]
    places: Sequence[tuple[int, int]]
    title: str = ""
    encoding: str = "utf-8"
    begin: int = 0
    metadata: Metadata = MappingProxyType({})
    remark: str = ""


class UnreadableFileError(InputError):
    """A file that is left out, because its content is not what its name says."""


def type_of(path: Path) -> str | None:
    """The type of a file by its name, such as ``markdown``; None if it is not a type that is read.

    Example:
        >>> type_of(Path("a/README")), type_of(Path("b.PDF")), type_of(Path("c.png"))
        ('text', 'pdf', None)
    """
    return _TYPES.get(path.suffix.lower()) or _NAMES.get(path.name.lower())


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnreadableFileError(f"{path}: cannot be read ({error.strerror})") from error


def read_file(path: Path, content: bytes, kind: str) -> FileText:
    """Read the text of a file.

    Args:
        path: Name of the file, for errors.
        content: Its bytes.
        kind: Its type, as `type_of` returns it.

    Raises:
        UnreadableFileError: The content is binary, damaged or encrypted.
        InputError: The library that reads files of this type is not installed.
    """
    if kind == "pdf":
        return _read_pdf(path, content)
    text, encoding = _decode(path, content)
    if kind == "html":
        return _read_html(path, text)._replace(encoding=encoding)
    if kind == "notebook":
        return _read_notebook(path, text)
    file = FileText(text, "line", [(start, number) for number, start in enumerate(line_starts(text), start=1)], encoding=encoding)
    return _with_front_matter(file) if kind == "markdown" else file


# Versions of readers, part of the checksum of a file: after a change a refresh reads files again that have not changed.
_READERS = {"markdown": b"front matter 1\0"}
# Fields that every passage of a file has.
_OF_PASSAGES = ("file", "type", "line", "end_line", "start", "end")
# YAML between two lines of three dashes at the start of a file, as Jekyll, Hugo, Obsidian, Quarto and Pandoc read it.
_FRONT_MATTER = re.compile(r"---[ \t]*\r?\n(.*?)^(?:---|\.\.\.)[ \t]*\r?$\s*", re.DOTALL | re.MULTILINE)


def _with_front_matter(file: FileText) -> FileText:
    """Take the title and the metadata of a file from its front matter; what is not such YAML stays text."""
    front = _FRONT_MATTER.match(file.text)
    if front is None:
        return file
    import yaml

    unread = file._replace(remark="front matter left in the text, because it is no YAML of fields")
    loader = _front_matter_loader()
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(front[1], loader)):
            return unread  # a few lines of aliases can stand for gigabytes
        fields = _plain(yaml.load(front[1], loader))
        if not isinstance(fields, dict):
            return unread
        title = fields.get("title")
        fields = {f"front_matter.{name}" if name in _OF_PASSAGES else name: value for name, value in fields.items()}
        metadata = flat_metadata(fields, where="front matter")
    except (yaml.YAMLError, InputError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return unread  # explicit tags such as !!int raise what the library's constructors raise
    title = title if isinstance(title, str | int | float) else ""
    begin = front.end() if file.text[front.end() :].strip() else 0  # a note of front matter alone is found by it
    return file._replace(title=" ".join(str(title).split()), begin=begin, metadata=metadata or {})


@cache
def _front_matter_loader() -> Any:
    """A safe loader with the numbers and truth values of YAML 1.2: ``no`` is text, and so are ``01234``, ``12:30`` and dates."""
    import yaml

    class Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
        pass

    ours = {
        "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
        "int": (r"-?(?:0|[1-9][0-9]{0,17})", "-0123456789"),
        "float": (r"-?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+]?[0-9]+)?", "-0123456789"),
    }
    replaced = {f"tag:yaml.org,2002:{name}" for name in (*ours, "timestamp")}
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in replaced]
        for first, resolvers in Loader.yaml_implicit_resolvers.items()
    }
    for name, (pattern, first) in ours.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{pattern})$"), list(first))
    return Loader


def _plain(value: object) -> Any:
    """The value of YAML without what no index stores."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | set):
        return [_plain(each) for each in (value if isinstance(value, list) else sorted(value, key=str)) if each is not None]
    return value


def _decode(path: Path, content: bytes) -> tuple[str, str]:
    """Decode UTF-8, UTF-16 with a byte order mark, or else Windows-1252."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        encodings = ["utf-16"]
    elif b"\0" in content[:8192]:
        encodings = []
    else:
        encodings = ["utf-8-sig", "cp1252"]
    for encoding in encodings:
        try:
            return content.decode(encoding), encoding.removesuffix("-sig")
        except UnicodeDecodeError:
            continue
    raise UnreadableFileError(f"{path}: not text")


_LINE_MARK = re.compile("\ue000([0-9]+)\ue001")
_BLOCKS = ("p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "pre", "td", "th", "blockquote", "div", "section", "dt", "dd", "figcaption")
_NO_TEXT = ("script", "style", "template", "noscript", "svg", "head", "nav")


def _read_html(path: Path, text: str) -> FileText:
    """Convert HTML to Markdown; marks put before each block say in which line of the source it began."""
    try:
        from bs4 import BeautifulSoup
        from bs4.element import PreformattedString
        from markdownify import MarkdownConverter
    except ImportError as error:
        raise _missing(path, "HTML", "beautifulsoup4 and markdownify", "*.html") from error

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a page looks like XML or like a file's name
        soup = BeautifulSoup(text.replace("\ue000", "").replace("\ue001", ""), "html.parser")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    for tag in soup(list(_NO_TEXT)):
        tag.decompose()
    for comment in soup.find_all(string=lambda each: isinstance(each, PreformattedString)):  # and declarations and instructions
        comment.extract()
    for tag in soup(list(_BLOCKS)):
        tag.insert(0, f"\ue000{tag.sourceline or 1}\ue001")
    try:
        marked = MarkdownConverter(heading_style="ATX", strip=["img"], escape_asterisks=False, escape_underscores=False).convert_soup(soup)
    except RecursionError as error:
        raise UnreadableFileError(f"{path}: the HTML is nested too deeply") from error
    places, length = [(0, 1)], 0
    for line in marked.splitlines(keepends=True):
        if marks := _LINE_MARK.findall(line):  # a heading's or a list's sign is before the mark, so the place is that of the whole line
            places.append((length, int(marks[0])))
        length += len(_LINE_MARK.sub("", line))
    return FileText(_LINE_MARK.sub("", marked), "line", places, title)


# What pypdf 7 raises on damaged files beside its own errors: values and lookups (numbers, keys, operands), None or null where a dictionary
# is expected, arithmetic, its own assertions, recursion, filters that it lacks (NotImplementedError is a RuntimeError).
_PDF_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError)


def _read_pdf(path: Path, content: bytes) -> FileText:
    try:
        import pypdf
        from pypdf.errors import DependencyError, PyPdfError
    except ImportError as error:
        raise _missing(path, "PDF", "pypdf", "*.pdf") from error
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of each deviation from the standard
    parts, places, length = list[str](), list[tuple[int, int]](), 0
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        locked = reader.is_encrypted and not reader.decrypt("")
        for number, page in enumerate(() if locked else reader.pages, start=1):
            part = _storable(page.extract_text()) + "\n\n"
            places.append((length, number))
            parts.append(part)
            length += len(part)
        title = "" if locked else _storable(str((reader.metadata.title if reader.metadata else None) or "").strip())
    except (PyPdfError, DependencyError, *_PDF_ERRORS) as error:  # AES needs a package that pypdf does not bring
        raise UnreadableFileError(f"{path}: the PDF cannot be read ({' '.join(str(error).split()) or type(error).__name__})") from error
    if locked:
        raise UnreadableFileError(f"{path}: the PDF needs a password")
    return FileText("".join(parts), "page", places or [(0, 1)], title)


def _read_notebook(path: Path, text: str) -> FileText:
    """The Markdown and the code of a notebook, the code in fences."""
    try:
        notebook = json.loads(text)
        language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python")
        sources = [(cell["cell_type"], _cell_source(cell["source"])) for cell in notebook["cells"]]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableFileError(f"{path}: not a notebook of format 4 ({type(error).__name__}: {error})") from error
    parts, places, length = list[str](), list[tuple[int, int]](), 0
    for number, (kind, source) in enumerate(sources, start=1):
        if source.strip():
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", source)), default=0))
            part = f"{fence}{language}\n{source}\n{fence}\n\n" if kind == "code" else f"{source}\n\n"
            places.append((length, number))
            parts.append(part)
            length += len(part)
    return FileText("".join(parts), "cell", places or [(0, 1)])


def _storable(text: str) -> str:
    """The text without lone surrogates, which come from damaged fonts and escapes and which no index can store."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _cell_source(source: object) -> str:
    if not isinstance(source, str | list):
        raise TypeError(f"the source of a cell must be text, got {type(source).__name__}")
    return _storable(source if isinstance(source, str) else "".join(source))


def _missing(path: Path, kind: str, library: str, pattern: str) -> InputError:
    return InputError(
        f"{path}: reading {kind} needs {library}: pip install 'quiver-retrieval[files]', or leave it out with --exclude '{pattern}'"
    )


def to_passages(name: str, kind: str, file: FileText, rules: PassageRules, token_spans: TokenSpans) -> list[Document]:
    """Cut the text of a file into passages.

    Args:
        name: Path of the file, with ``/``; ids and titles begin with it.
        kind: Its type.
        file: Its text.
        rules: Where it is cut.
        token_spans: Finds tokens.
    """
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
        metadata: Metadata = {
            "file": name,
            "type": kind,
            file.unit: begin,
            f"end_{file.unit}": max(begin, end),
            "start": start,
            "end": stop,
        }
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
    wanted = _to_regex(pattern.strip("/"))
    parts = path.split("/")
    candidates = parts if "/" not in pattern.strip("/") else ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(wanted.fullmatch(each) for each in candidates)


def _to_regex(pattern: str) -> re.Pattern[str]:
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(tokens.get(part, re.escape(part)) for part in parts), re.DOTALL | re.IGNORECASE)


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
        """Start a pass.

        Args:
            unchanged: Whether a file with a path and a checksum can be skipped.

        Raises:
            InputError: A library is missing, or a folder or the only file of the source cannot be read.
        """
        skipped, digests, read = _Skipped(), dict[str, str](), 0
        self.unreachable = []
        for inner, path in self._files(skipped):
            kind, name = type_of(path) or "text", self._labelled(inner)
            try:
                content = _bytes_of(path)
                digests[name] = hashlib.sha256(_READERS.get(kind, b"") + content).hexdigest()
                file = None if unchanged(name, digests[name]) else read_file(path, content, kind)
            except UnreadableFileError as error:
                if self.root.is_file():
                    raise
                logger.info("%s", error)
                skipped.add("unreadable", name)
                if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                    self.unreachable.append(name)
                continue
            read += 1
            if file is not None:
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
                if self._is_chosen(prefix + name, skipped):
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
        self._first: dict[str, str] = {}
        self.hidden: list[str] = []  # paths of files and folders that are hidden or hold packages

    def add(self, what: str, name: str, *, kind: str = "") -> None:
        self._counts[what] += 1
        self._first.setdefault(what, name)
        if kind:
            self._kinds[kind] += 1

    def note_encoding(self, name: str, encoding: str) -> None:
        if encoding != "utf-8":
            self.add(f"read as {encoding}", name)

    def log(self, root: Path, read: int, hidden: str) -> None:
        """Log one line."""
        parts = [f"{root}: files read: {read:,}", *([hidden] if hidden else [])]
        for what, count in self._counts.items():
            kinds = [kind for kind, _ in self._kinds.most_common(5)]
            parts.append(f"{what}: {count:,} ({', '.join(kinds) if what == _OTHER_TYPES else f'such as {self._first[what]}'})")
        logger.log(logging.WARNING if len(parts) > 1 else logging.INFO, "%s", "; ".join(parts))
