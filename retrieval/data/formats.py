"""The text of a file of each type: how it is decoded, and how documents of other programs become Markdown.

The text of HTML, Word, PowerPoint, Excel, EPUB and e-mail files is their conversion to Markdown; that of a PDF is what its pages say; that
of a notebook is its Markdown and its code, without outputs.
"""

from __future__ import annotations

import datetime
import email
import email.policy
import io
import json
import logging
import posixpath
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from email.message import EmailMessage
from functools import cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.parsers.expat import ExpatError

from quiver.encoder.errors import InputError
from quiver.encoder.files import decode
from quiver.retrieval.data.entries import flat_metadata
from quiver.retrieval.data.html import ConvertedPage, convert_html
from quiver.retrieval.data.passages import line_starts
from quiver.retrieval.records import Metadata

READERS = b"2\0"
"""Version of the readers, part of the checksum of a file: after a change a refresh reads files again that have not changed."""

EXTRA = "pip install 'quiver-retrieval[files]'"
"""Command that installs the libraries of all types."""

_HTML_LIBRARIES = "selectolax, beautifulsoup4 and markdownify"

NO_TEXT: Mapping[str, str] = {
    "pdf": "the pages are pictures, such as scans, and need OCR, for instance by ocrmypdf",
    "html": "frames, or text that scripts write",
    "xlsx": "empty sheets, or formulas without results: open it in a spreadsheet program and save it",
}
"""Type -> why a file that can be read may have no text."""

# Where files name their encoding: the WHATWG's prescan (longer: some pages put scripts first), XML 1.0, PEP 263, CSS, Emacs, vim, LaTeX.
_HEAD = 1 << 14
_COMMENT = re.compile(rb"<!--.*?-->", re.DOTALL)
_META = re.compile(rb"<meta\s[^>]*?charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_XML_DECLARATION = re.compile(rb"\A\s*<\?xml\b[^>]*?\bencoding\s*=\s*[\"']([\w.:-]+)")
_CODING = re.compile(rb"\A(?:.*\n)?[ \t\f]*(?:#|//|/\*|;|--|%).*?coding[:=][ \t]*([-\w.]+)")
_EMACS = re.compile(rb"\A(?:.*\n)?.*?-\*-.*?coding:[ \t]*([-\w.]+).*?-\*-")
_CHARSET = re.compile(rb'\A@charset "([^"]+)";')
_VIM = re.compile(rb"\b(?:vim?|ex):.*?\b(?:fileencoding|fenc)=([-\w]+)")
_LATEX = re.compile(rb"^[^%\n]*\\usepackage\[([\w-]+)\]\{inputenc\}", re.MULTILINE)

# Fields that every passage of a file has.
_OF_PASSAGES = ("file", "type", "line", "end_line", "start", "end")
# YAML between two lines of three dashes at the start of a file, as Jekyll, Hugo, Obsidian, Quarto and Pandoc read it.
_FRONT_MATTER = re.compile(r"---[ \t]*\r?\n(.*?)^(?:---|\.\.\.)[ \t]*\r?$\s*", re.DOTALL | re.MULTILINE)

# What readers raise on damaged files beside their own errors: values and lookups (numbers, keys, operands), None or null where a dictionary
# is expected, arithmetic, assertions, recursion, filters that pypdf lacks (NotImplementedError is a RuntimeError), passwords of archives
# (RuntimeError), XML (ParseError of both libraries is a SyntaxError).
_DAMAGED = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError, SyntaxError, EOFError),
    *(OSError, ExpatError, zipfile.BadZipFile, zlib.error),
)
_OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # of files of Office 97, and of encrypted files of later versions
_UNPACKED = 128 << 20  # bytes that any archive may unpack to
_MESSAGES = 20  # messages within each other that are read
_RATIO = 20  # how many times its size a larger archive may unpack to; XML reaches 10 to 15


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


def read_file(path: Path, content: bytes, kind: str) -> FileText:
    """Read the text of a file of a type that `quiver.retrieval.data.files.type_of` returns.

    Raises:
        UnreadableFileError: The content is binary, damaged or encrypted, or would unpack to far more than a document has.
        InputError: The library that reads files of this type is not installed.
    """
    if kind not in _CONVERTED:
        text, encoding = _decode(path, content, kind)
        if kind == "notebook":
            return _read_notebook(path, text)
        file = _by_lines(text)._replace(encoding=encoding)
        return _with_front_matter(file) if kind == "markdown" else file
    name, libraries, read = _CONVERTED[kind]
    try:
        return read(path, content)
    except InputError:
        raise
    except ImportError as error:
        raise InputError(f"{path}: reading {name} needs {libraries}: {EXTRA}, or leave it out with --exclude '*{path.suffix}'") from error
    except _DAMAGED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnreadableFileError(f"{path}: the {name} cannot be read ({reason})") from error


def _decode(path: Path, content: bytes, kind: str) -> tuple[str, str]:
    try:
        return decode(content, _declared_encoding(content, kind))
    except ValueError as error:
        raise UnreadableFileError(f"{path}: not text") from error


def _by_lines(text: str) -> FileText:
    return FileText(text, "line", [(start, number) for number, start in enumerate(line_starts(text), start=1)])


def _declared_encoding(content: bytes, kind: str) -> str:
    """The encoding that a text names itself; empty if it names none."""
    head = content[:_HEAD]
    if kind == "html":
        patterns, head = [_META], _COMMENT.sub(b"", head)
    elif kind in ("python", "code"):
        patterns = [_CODING, _CHARSET]
    else:
        patterns = [_LATEX]
    patterns = [_XML_DECLARATION, *patterns, _EMACS]
    found = next((match for each in patterns if (match := each.search(head))), None)
    if found is None:
        lines = content[:_HEAD].splitlines()[:5] + content[-_HEAD:].splitlines()[-5:]
        found = next((match for line in lines if (match := _VIM.search(line))), None)
    return found[1].decode("ascii", "ignore") if found else ""


def _read_html(path: Path, content: bytes) -> FileText:
    text, encoding = _decode(path, content, "html")
    page = convert_html(text, xml=path.suffix.lower() == ".xhtml")
    return FileText(page.text, "line", page.places, page.title, encoding)


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


def _read_pdf(path: Path, content: bytes) -> FileText:
    import pypdf
    from pypdf.errors import DependencyError, PyPdfError

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of each deviation from the standard
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        locked = reader.is_encrypted and not reader.decrypt("")
        texts = [_storable(page.extract_text()) + "\n\n" for page in (() if locked else reader.pages)]
        title = "" if locked else _storable(str((reader.metadata.title if reader.metadata else None) or "").strip())
    except (PyPdfError, DependencyError) as error:  # AES needs a package that pypdf does not bring
        raise ValueError(str(error)) from error
    if locked:
        raise UnreadableFileError(f"{path}: the PDF needs a password")
    return _join_texts("page", enumerate(texts, start=1))._replace(title=title)


def _read_notebook(path: Path, text: str) -> FileText:
    """The Markdown and the code of a notebook, the code in fences."""
    try:
        notebook = json.loads(text)
        language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python")
        sources = [(cell["cell_type"], _cell_source(cell["source"])) for cell in notebook["cells"]]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableFileError(f"{path}: not a notebook of format 4 ({type(error).__name__}: {error})") from error
    parts = list[tuple[int, str]]()
    for number, (kind, source) in enumerate(sources, start=1):
        if source.strip():
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", source)), default=0))
            parts.append((number, f"{fence}{language}\n{source}\n{fence}\n\n" if kind == "code" else f"{source}\n\n"))
    return _join_texts("cell", parts)


def _storable(text: str) -> str:
    """The text without lone surrogates, which come from damaged fonts and escapes and which no index can store."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _cell_source(source: object) -> str:
    if not isinstance(source, str | list):
        raise TypeError(f"the source of a cell must be text, got {type(source).__name__}")
    return _storable(source if isinstance(source, str) else "".join(source))


def _open_archive(path: Path, content: bytes) -> zipfile.ZipFile:
    """Open a document that is a ZIP archive, unless it is encrypted, or a bomb of compressed data or of XML entities."""
    if content.startswith(_OLD_OFFICE):
        raise UnreadableFileError(f"{path}: the file needs a password, or is in the format of Office 97")
    archive = zipfile.ZipFile(io.BytesIO(content))
    size = sum(member.file_size for member in archive.infolist())
    if size > max(_UNPACKED, _RATIO * len(content)):
        raise UnreadableFileError(f"{path}: the file would unpack to {size >> 20:,} MiB, far more than documents do; it is not read")
    for member in archive.infolist():
        if member.filename.endswith((".xml", ".rels", ".opf")):
            with archive.open(member) as file:
                if b"<!ENTITY" in file.read(_HEAD):
                    raise UnreadableFileError(f"{path}: the file defines XML entities, which can fill the memory; it is not read")
    return archive


def _read_docx(path: Path, content: bytes) -> FileText:
    """Read what mammoth converts: headings, lists, tables, text boxes, footnotes and accepted changes, without pictures."""
    import mammoth

    _open_archive(path, content)
    styles = "p[style-name='Title'] => h1:fresh\np[style-name='Subtitle'] => p:fresh"
    page = mammoth.convert_to_html(io.BytesIO(content), style_map=styles, convert_image=lambda image: [])
    return _by_lines(_storable(convert_html(page.value, headers=True).text))


def _read_pptx(path: Path, content: bytes) -> FileText:
    """Read slides: titles are headings, and what the speaker notes is a quotation."""
    from pptx import Presentation
    from pptx.exc import PythonPptxError

    _open_archive(path, content)
    try:
        slides = enumerate(Presentation(io.BytesIO(content)).slides, start=1)
        texts = [(number, _storable("\n\n".join(part for part in _slide_parts(slide) if part))) for number, slide in slides]
        return _join_texts("page", ((number, text.rstrip("\n") + "\n\n") for number, text in texts if text.strip()))
    except PythonPptxError as error:
        raise ValueError(str(error)) from error


def _slide_parts(slide: Any) -> Iterator[str]:
    title = slide.shapes.title
    if title is not None and title.has_text_frame and title.text_frame.text.strip():
        yield f"# {' '.join(title.text_frame.text.split())}"
    for shape in _flat_shapes(slide.shapes):
        if title is not None and shape.shape_id == title.shape_id:
            continue
        if shape.has_text_frame:
            lines = [(paragraph.level, " ".join(paragraph.text.split())) for paragraph in shape.text_frame.paragraphs]
            lines = [line for line in lines if line[1]]
            listed = len(lines) > 1 and shape.is_placeholder  # bullets are the layout's
            yield "\n".join(f"{'  ' * level}* {text}" if listed else text for level, text in lines)
        elif getattr(shape, "has_table", False):
            yield "\n".join(_table_lines([[_cell_text(cell.text) for cell in row.cells] for row in shape.table.rows]))
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        notes = slide.notes_slide.notes_text_frame.text.split("\n")
        yield "\n".join(f"> {line}" for line in notes if line.strip())


def _flat_shapes(shapes: Iterable[Any]) -> Iterator[Any]:
    """The shapes of a slide, those of groups included."""
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _flat_shapes(shape.shapes)
        else:
            yield shape


def _read_xlsx(path: Path, content: bytes) -> FileText:
    """Read the sheets of a workbook: each is a heading with tables, which empty rows separate. The lines are its rows."""
    import openpyxl
    from openpyxl.utils.exceptions import InvalidFileException

    _open_archive(path, content)
    try:
        book = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
        return _join_texts("line", ((number, f"{_storable(row)}\n") for sheet in book.worksheets for number, row in _sheet_rows(sheet)))
    except InvalidFileException as error:
        raise ValueError(str(error)) from error


def _sheet_rows(sheet: Any) -> Iterator[tuple[int, str]]:
    """The numbers of the rows of a sheet, and the rows as lines of Markdown tables."""
    sheet.reset_dimensions()  # each row has its own cells: a single cell in the last corner would make billions of empty ones
    block, heading = list[tuple[int, Mapping[int, str]]](), f"# {sheet.title}\n\n"
    for number, row in enumerate(chain(sheet.iter_rows(values_only=True), [()]), start=1):
        cells = {column: text for column, value in enumerate(row) if (text := _cell_text(value))}
        if cells:
            block.append((number, cells))
        elif block:
            columns = sorted({column for _, each in block for column in each})
            lines = _table_lines([[each.get(column, "") for column in columns] for _, each in block])
            lines[0] = heading + lines[0]
            lines[-1] += "\n"
            yield from zip((place for place, _ in block), lines, strict=True)
            block, heading = [], ""


def _table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a Markdown table whose first row is the header; the line below the header belongs to it. One column is plain lines."""
    if len(rows[0]) == 1:
        return [row[0] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"{lines[0]}\n|{' --- |' * len(rows[0])}", *lines[1:]]


def _cell_text(value: object) -> str:
    if isinstance(value, datetime.datetime) and not (value.hour or value.minute or value.second):
        value = value.date()
    text = value.isoformat(*([" "] if isinstance(value, datetime.datetime) else [])) if isinstance(value, datetime.date) else str(value)
    return "" if value is None else " ".join(text.split()).replace("|", "\\|")


def _join_texts(unit: Literal["line", "page", "cell"], parts: Iterable[tuple[int, str]]) -> FileText:
    """The numbered parts of a document, one after the other."""
    texts, places, length = list[str](), list[tuple[int, int]](), 0
    for number, text in parts:
        places.append((length, number))
        texts.append(text)
        length += len(text)
    return FileText("".join(texts), unit, places or [(0, 1)])


def _read_epub(path: Path, content: bytes) -> FileText:
    """Read the chapters of a book in the order in which it is read."""
    archive = _open_archive(path, content)
    names = set(archive.namelist())
    container = ElementTree.fromstring(archive.read("META-INF/container.xml"))
    package = next(each.attrib["full-path"] for each in container.iterfind(".//{*}rootfile"))
    root = ElementTree.fromstring(archive.read(package))
    named = {item.attrib["id"]: item.attrib for item in root.iterfind(".//{*}manifest/{*}item")}
    chapters = [named[each.attrib["idref"]] for each in root.iterfind(".//{*}spine/{*}itemref") if each.attrib["idref"] in named]
    files = [posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(each["href"]))) for each in chapters]
    if "META-INF/encryption.xml" in names:
        encryption = ElementTree.fromstring(archive.read("META-INF/encryption.xml"))
        if {unquote(each.attrib.get("URI", "")) for each in encryption.iterfind(".//{*}CipherReference")} & {*files}:
            raise UnreadableFileError(f"{path}: the book is encrypted (DRM)")
    pages = [_convert_bytes(archive.read(name), xml=True) for name in files if name in names]
    title = next((" ".join((each.text or "").split()) for each in root.iterfind(".//{*}metadata/{*}title")), "")
    return _by_lines("\n\n".join(page.text for page in pages if page.text.strip()))._replace(title=_storable(title))


def _convert_bytes(content: bytes, *, xml: bool = False, declared: str = "") -> ConvertedPage:
    text, _ = decode(content, declared or _declared_encoding(content, "html"))
    return convert_html(text, xml=xml)


def _read_eml(path: Path, content: bytes) -> FileText:
    """Read a message: subject (as heading), sender, recipients, date, text, names of attachments; then the messages attached to it."""
    if not re.match(rb"(?:From .*\r?\n)?(?:[!-9;-~]+[ \t]*:.*\r?\n)", content):
        raise UnreadableFileError(f"{path}: not an e-mail message")
    message = email.message_from_bytes(content, policy=email.policy.default)
    fields = {name: _header(message, name) for name in ("from", "to", "cc", "date")}
    metadata = flat_metadata({name: text for name, text in fields.items() if text}, where="headers")
    text = _storable("\n\n".join(part for part in _message_parts(message, 1) if part) + "\n")
    return _by_lines(text)._replace(title=_storable(_header(message, "subject")), metadata=metadata or {})


def _header(message: EmailMessage, name: str) -> str:
    value = " ".join(str(message.get(name) or "").split())
    if name == "date" and value:
        date = getattr(message["date"], "datetime", None)
        return date.isoformat() if date is not None else value
    return _storable(value)


def _message_parts(message: EmailMessage, level: int) -> Iterator[str]:
    """The parts of a message as Markdown; a message in it is a section below it."""
    yield f"{'#' * min(level, 6)} {_header(message, 'subject')}".rstrip()
    yield "\n".join(f"{name.capitalize()}: {text}" for name in ("from", "to", "cc", "date") if (text := _header(message, name)))
    body = message.get_body(preferencelist=("plain", "html"))
    text = _part_text(body) if isinstance(body, EmailMessage) else ""
    if not text.strip() and isinstance(other := message.get_body(preferencelist=("html",)), EmailMessage):
        text = _part_text(other)
    yield text.strip()
    attached = [part for part in message.iter_attachments() if isinstance(part, EmailMessage)] if message.is_multipart() else []
    if names := [name for part in attached if (name := part.get_filename())]:
        yield f"Attachments: {', '.join(names)}"
    for part in attached:
        if level < _MESSAGES and part.get_content_type() == "message/rfc822" and isinstance(inner := part.get_content(), EmailMessage):
            yield from _message_parts(inner, level + 1)


def _part_text(part: EmailMessage) -> str:
    """The text of a part of a message."""
    content, declared = part.get_payload(decode=True), part.get_content_charset("")
    if not isinstance(content, bytes):
        return ""
    if part.get_content_subtype() == "html":
        return _convert_bytes(content, declared=declared).text
    return decode(content, declared)[0]


_CONVERTED: Mapping[str, tuple[str, str, Callable[[Path, bytes], FileText]]] = {
    "html": ("HTML", _HTML_LIBRARIES, _read_html),
    "pdf": ("PDF", "pypdf", _read_pdf),
    "docx": ("DOCX", f"mammoth, {_HTML_LIBRARIES}", _read_docx),
    "pptx": ("PPTX", "python-pptx", _read_pptx),
    "xlsx": ("XLSX", "openpyxl", _read_xlsx),
    "epub": ("EPUB", _HTML_LIBRARIES, _read_epub),
    "eml": ("EML", _HTML_LIBRARIES, _read_eml),
}
"""Type -> its name in messages, the libraries that read it, and the function that does."""
