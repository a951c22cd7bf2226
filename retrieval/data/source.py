"""Open a corpus by its name: a BEIR folder, tables, files of text and code, or standard input.

Everything that reads a corpus opens it here. A corpus is read as often as it is iterated, one document at a time, and checked while it is
read: every error names file and line.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from quiver.encoder.errors import EmptyInputError, InputError
from quiver.encoder.files import check_regular, expand_home, is_special, naming
from quiver.encoder.tokenizer import Tokenizer
from quiver.retrieval.data.entries import EntryPosition, unique
from quiver.retrieval.data.files import FileChoice, FolderFiles, type_of
from quiver.retrieval.data.hub import HUB, IR, HubSource, hub_documents, ir_documents
from quiver.retrieval.data.passages import WORDS, PassageRules, PassageTokens, Span, TokenSpans, cut, parse_passages
from quiver.retrieval.data.tables import Columns, are_numbered, find_jsonl, is_delimited, is_table, read_given, read_tables, tables_of
from quiver.retrieval.records import DenseModel, Document, Metadata, SourceOptions, TokenModel

logger = logging.getLogger(__name__)

STANDARD_INPUT = "-"
"""Source that reads JSON lines from standard input."""

IN_MEMORY = ""
"""Source of rows in memory, which cannot be read again by a name."""

_BY_STRUCTURE = "headings,functions"  # how files are cut
_TOKENS = 256  # maximum tokens of a passage, if the model reads that many
_BEIR = ("corpus.jsonl", "corpus.jsonl.gz")
_SURROGATE = re.compile("[\ud800-\udfff]")  # stands for a byte that cannot be decoded
_NOT_TABLES = "--id, --title, --text, --list and --columns name fields of tables, and these are files of text or code; remove them"
_SUFFIXES = ".jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow"
_PROBE = "numbered"  # label of which it is seen whether rows get one

DEFAULTS = SourceOptions()
"""Options that fit most sources."""

ReadDocuments: TypeAlias = Callable[[], Iterator[tuple[EntryPosition, Document]]]


@dataclass(frozen=True)
class Corpus:
    """An opened corpus; each iteration reads it from the start.

    Attributes:
        source: Its name; paths are absolute.
        options: How documents are made of it.
        read: Function that starts a pass over the documents and their positions.
        numbered: Tells whether its ids are paths of files or numbers of rows, because the data have none.
        labelled: Opens it again with a label, see `SourceOptions`.
        measured: Opens it again with passages in the tokens of a model; None if the tokens were given.
    """

    source: str
    options: SourceOptions
    read: Callable[[], Iterator[tuple[EntryPosition, Document]]] = field(repr=False)
    numbered: Callable[[], bool] = field(default=bool, repr=False)
    labelled: Callable[[str], Corpus] | None = field(default=None, repr=False)
    measured: Callable[[PassageTokens], Corpus] | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[Document]:
        return (document for _, document in unique(self.read))


def open_corpus(source: Any, options: SourceOptions = DEFAULTS, tokens: PassageTokens | None = None, *, taken_over: bool = False) -> Corpus:
    """Open a corpus.

    Args:
        source: One of

            - a folder with ``corpus.jsonl[.gz]`` (BEIR's layout);
            - a table with the suffix ``.jsonl``, ``.ndjson``, ``.json``, ``.csv`` or ``.tsv`` (each also with ``.gz``), ``.parquet`` or
              ``.arrow``, or a folder of such tables, which are read in the order of their names;
            - a folder of Markdown, text, reStructuredText, HTML, PDF, ``.docx``, ``.pptx``, ``.xlsx``, ``.epub``, ``.eml``, notebooks and
              source code, or one such file, cut into passages;
            - ``hub://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]``, a data set of the Hugging Face Hub, or ``ir:NAME``, one of ir_datasets;
            - ``-``: JSON lines from standard input, which are kept in a temporary file;
            - a data frame of pandas or polars, a data set of the datasets library, or a list of mappings.
        options: Fields of the documents, files and passages.
        tokens: The tokens that passages are measured in, see `tokens_of`; None for words until an index is built of the corpus, which
            measures in the tokens of its model.
        taken_over: Whether the options are those of another source of an index; errors then say so.

    Raises:
        InputError: The source does not exist or is of no known type, or the description of the passages is malformed. Malformed entries are
            found while the corpus is iterated.

    Example:
        >>> from quiver import SourceOptions, open_corpus
        >>> list(open_corpus([{"sku": 7, "about": "Boils water."}], SourceOptions(id="sku", text="about")))
        [Document(id='7', text='Boils water.', title='', metadata=None)]
    """
    opened = _open(source, options, tokens or WORDS, taken_over=taken_over)
    if opened.source == STANDARD_INPUT:  # which cannot be opened again
        return opened
    opened = replace(opened, labelled=lambda label: open_corpus(source, replace(options, label=label), tokens, taken_over=taken_over))
    if tokens is not None:
        return opened
    return replace(opened, measured=partial(open_corpus, source, options, taken_over=taken_over))


def _open(source: Any, options: SourceOptions, tokens: PassageTokens, *, taken_over: bool) -> Corpus:
    columns = Columns(
        options.id, options.title, options.text, options.columns, taken_over=taken_over, lists=options.lists, label=options.label
    )
    if not isinstance(source, str | Path):
        _refuse("documents", "they have no files to choose and no columns without names", options.include, options.exclude, options.columns)
        given = partial(read_given, source, columns)
        read = _rows_or_passages("documents", given, options, tokens)
        return Corpus(IN_MEMORY, options, read, numbered=lambda: _is_numbered(partial(read_given, source), columns))
    if has_no_path(source):
        _refuse(str(source), "it has no files to choose and no columns without a header", options.include, options.exclude, options.columns)
    if str(source) == STANDARD_INPUT:
        return _standard_input(options, columns, tokens)
    if isinstance(source, str) and source.startswith((HUB, IR)):
        if source.startswith(HUB):
            HubSource.parse(source)
        documents = hub_documents if source.startswith(HUB) else ir_documents
        read = _rows_or_passages(source, partial(documents, source, columns), options, tokens)
        return Corpus(source, options, read, numbered=lambda: _is_numbered(partial(documents, source), columns))
    path = expand_home(source)
    if _SURROGATE.search(str(path.absolute())):
        raise InputError(f"{str(path)!a}: the name is not in the encoding of the file system (UTF-8), so no index can store it; rename it")
    check_regular(path)
    if _is_files(path, options):
        return Corpus(str(path.absolute()), options, _files(path, options, tokens), numbered=lambda: True)
    found = _tables(path, options)
    if is_beir(path):
        _refuse(str(path), "a BEIR folder is read whole", options.include, options.exclude)
    if not any(is_delimited(file) for file in found):
        _refuse(str(path), "names of columns are for CSV and TSV files", options.columns)
    tables = partial(read_tables, found, columns)
    read = _rows_or_passages(str(path), tables, options, tokens)
    return Corpus(str(path.absolute()), options, read, numbered=partial(are_numbered, found, columns))


def emptied_corpus(source: str, options: SourceOptions, *, files: bool) -> Corpus:
    """A source of an index of which nothing is left to read; ``files`` says whether its documents were passages of files."""
    read: ReadDocuments = _files(Path(source), options) if files else lambda: iter(())
    return Corpus(source, options, read, numbered=lambda: files)


def _is_numbered(read: Callable[[Columns], Iterator[tuple[EntryPosition, Document]]], columns: Columns) -> bool:
    """Whether rows get numbers as ids."""
    first = next(read(columns._replace(label=_PROBE)), None)
    return first is not None and first[1].id.startswith(f"{_PROBE}#")


def holds_files(source: str | Path) -> bool:
    """Whether a source is read as files of text and code if no option names a field; otherwise it holds rows."""
    path = expand_home(source)
    return not has_no_path(source) and _is_files(path, DEFAULTS)


def holds_delimited(source: str | Path) -> bool:
    """Whether a source of rows holds CSV or TSV; raises InputError if it does not exist or is of no known type."""
    path = expand_home(source)
    return not has_no_path(source) and any(map(is_delimited, _tables(path, DEFAULTS)))


def is_beir(path: Path) -> bool:
    """Whether a folder has BEIR's layout."""
    return any((path / name).is_file() for name in _BEIR)


def has_no_path(source: str | Path) -> bool:
    """Whether a source is standard input or a data set of a library."""
    return str(source) == STANDARD_INPUT or (isinstance(source, str) and source.startswith((HUB, IR)))


def _files(path: Path, options: SourceOptions, tokens: PassageTokens = WORDS) -> FolderFiles:
    return FolderFiles(path, FileChoice(options.include, options.exclude), _rules(options, tokens), tokens.spans, options.label)


def tokens_of(model: DenseModel | TokenModel) -> PassageTokens:
    """The tokens of a model, and how many of them it reads of a document beside its prompt and special tokens."""
    tokenizer = getattr(model, "tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        return WORDS
    used = len(tokenizer.encode([model.card.document_prompt], max_length=1 << 20).ids[0])
    return PassageTokens(lambda text: tokenizer.pieces(text).spans, model.card.document_length - used)


def _rules(options: SourceOptions, tokens: PassageTokens) -> PassageRules:
    rules = parse_passages(options.passages or _BY_STRUCTURE, tokens=min(_TOKENS, max(tokens.length or _TOKENS, 16)))
    if rules.tokens is not None and tokens.length is not None and rules.tokens > tokens.length:
        logger.warning("passages have up to %d tokens, but the model reads only %d of a document", rules.tokens, tokens.length)
    return rules


def _is_files(path: Path, options: SourceOptions) -> bool:
    """Whether a source is read as files of text and code."""
    if options.names_fields or is_beir(path):
        return False
    if path.is_dir():
        return not _files(path, options).is_empty()
    return path.is_file() and not is_table(path) and (type_of(path) is not None or bool(options.include))


def _rows_or_passages(source: str, read: ReadDocuments, options: SourceOptions, tokens: PassageTokens) -> ReadDocuments:
    """The rows of a table as documents, or their passages if the options ask for them."""
    if not options.passages:
        return read
    rules = _rules(options, tokens)
    if rules.functions:
        raise InputError(f"{source}: --passages functions is for source files; rows of tables are cut by headings (of Markdown) and tokens")
    return partial(_cut_documents, read, rules, tokens.spans)


def _cut_documents(read: ReadDocuments, rules: PassageRules, token_spans: TokenSpans) -> Iterator[tuple[EntryPosition, Document]]:
    """Cut documents of a table; the metadata of a passage name its document and its characters."""
    for position, document in read():
        spans = cut(document.text, "markdown" if rules.headings else "text", rules, token_spans, title=document.title) or [
            Span(0, len(document.text))
        ]
        for number, span in enumerate(spans, start=1):
            metadata: Metadata = {**(document.metadata or {}), "document": document.id, "start": span.start, "end": span.end}
            yield position, Document(f"{document.id}#{number}", document.text[span.start : span.end], document.title, metadata)


def _refuse(source: str, reason: str, *given: Sequence[str]) -> None:
    """Refuse options that would be ignored."""
    if any(given):
        raise InputError(f"{source}: {reason}; remove --include, --exclude and --columns")


def _tables(path: Path, options: SourceOptions) -> Sequence[Path]:
    """The tables of a source; raises InputError if there are none."""
    if path.is_dir():
        if is_beir(path):
            return [find_jsonl(path, "corpus")]
        choice = FileChoice(options.include, options.exclude)
        found = [file for file in tables_of(path) if choice.has(file.name)]
        if special := sorted(file.name for file in path.iterdir() if is_special(file)):
            logger.warning("%s: pipes, sockets and devices left out: %d (such as %s)", path, len(special), special[0])
        if not found:
            files = _files(path, options)
            if not files.is_empty():
                raise InputError(f"{path}: {_NOT_TABLES}")
            hidden = files.skipped() or ("change or remove --include and --exclude" if options.include or options.exclude else "")
            raise EmptyInputError(
                f"{path}: no corpus.jsonl[.gz], no tables ({_SUFFIXES}) and no files of text or code to read in this folder"
                + (f"; {hidden}" if hidden else "")
            )
        return found
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if not is_table(path) and type_of(path) is not None:
        raise InputError(f"{path}: {_NOT_TABLES}")
    if not is_table(path):
        raise InputError(
            f"{path}: unsupported type; documents are read from tables ({_SUFFIXES}), and from files of text and code such as .md or .pdf"
        )
    return [path]


def _standard_input(options: SourceOptions, columns: Columns, tokens: PassageTokens) -> Corpus:
    """Keep standard input in a temporary file, which is removed together with the corpus."""
    folder = tempfile.TemporaryDirectory(prefix="quiver-")
    spool = Path(folder.name) / "standard-input.jsonl"
    with naming(spool), spool.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)

    def read(kept: object = folder) -> Iterator[tuple[EntryPosition, Document]]:
        del kept  # the default argument keeps the folder as long as this function exists
        shown = Path("standard input")
        try:
            yield from read_tables([spool], columns, shown)
        except InputError as error:
            raise InputError(str(error).replace(str(spool), str(shown))) from error

    return Corpus(STANDARD_INPUT, options, _rows_or_passages(STANDARD_INPUT, read, options, tokens))
