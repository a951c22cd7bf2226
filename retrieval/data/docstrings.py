"""Docstring -> function pairs mined from Python source: a code search collection that needs no download.

The rules are CodeSearchNet's, as its Python parser applies them; where the paper leaves a rule open, the choice is stated
at the constant or function that makes it. Source is read, never imported. Nothing here knows of models or indexes.

- Functions and methods with a docstring, at module or class level. A function inside a function is part of its
  parent's text and would only be a near-duplicate of it.
- The query is the docstring's first paragraph; the document is the source, decorators and comments included, without
  the docstring.
- Out go names with ``test`` in them, dunder methods, bodies that only pass or raise, short bodies, queries that are not
  English text, repeated code, repeated queries, and near-duplicates.

The standard library differs from interpreter to interpreter, and the pairs with it: compare figures only where the
version of Python is the same.

Source: CodeSearchNet, arXiv:1909.09436, section 2; its parser, github.com/github/CodeSearchNet at e792e1c,
function_parser/parsers/python_parser.py; the 256-token and URL rules are those of CodeXGLUE's AdvTest,
arXiv:2102.04664.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quiver.encoder.errors import InputError
from quiver.encoder.files import atomic_file
from quiver.retrieval.data.near_duplicates import first_of_each
from quiver.retrieval.data.python_sources import package_files, stdlib_files
from quiver.retrieval.progress import progress_bar

logger = logging.getLogger(__name__)

MIN_TOKENS = 3
"""Blank-separated tokens a query has at least."""

MAX_TOKENS = 256
"""Blank-separated tokens a query has at most."""

MIN_BODY_LINES = 2
"""Lines of code below the signature at least; docstring, blank lines and comment lines are not counted.

The paper drops implementations of fewer than three lines; we count the signature as one of them, however it is wrapped.
"""

MAX_CODE_CHARACTERS = 4_000
"""A function longer than this is cut after its last whole line within; about 1,000 tokens."""

_WORD = re.compile(r"[\"'`(]*[A-Za-z][A-Za-z'-]*[\"'`)]*[.,:;!?]*")
"""A blank-separated token that reads as an English word, its punctuation included."""

_END_OF_SUMMARY = re.compile(
    r"\s*(?:>>>"  # a doctest
    r"|:\w+[^:`]*:(?!`)|@\w+[^:]*:"  # a reStructuredText or Epydoc field; :class:`X` is prose
    r"|(?:Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?)\s*:?\s*$)"  # a Google or NumPy section
)
"""A docstring line that ends the first paragraph as a blank line does."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Pair:
    """One docstring and the function it describes.

    Attributes:
        id: ``module.function:line``, unique within one interpreter's packages.
        query: First paragraph of the docstring, blanks normalised.
        code: Source without the docstring, dedented, at most ``MAX_CODE_CHARACTERS`` long.
        module: Dotted name of the module.
        function: Qualified name inside the module, ``Class.method``.
        line: Line of ``def`` in the file, from 1.
    """

    id: str
    query: str
    code: str
    module: str
    function: str
    line: int

    @property
    def top_level(self) -> str:
        """The package or single module that the function belongs to, ``asyncio`` for ``asyncio.tasks``."""
        return self.module.partition(".")[0]


def mine(*, packages: Sequence[str] = (), stdlib: bool = True, progress: bool = False) -> list[Pair]:
    """Pairs of the running interpreter's standard library and of installed packages.

    Args:
        packages: Import names of installed packages (``sklearn``, not ``scikit-learn``).
        stdlib: Read the standard library, without its tests, IDLE and the turtle demos.
        progress: Draw a bar on standard error.

    Returns:
        Pairs in the order of module and line, the standard library before the packages. Of duplicates the first one stays.

    Raises:
        InputError: A package is not installed, has no Python source, or belongs to the standard library.
        ValueError: Neither the standard library nor a package is asked for.
    """
    if not stdlib and not packages:
        raise ValueError("nothing to mine: stdlib is False and packages is empty")
    files = stdlib_files() if stdlib else {}
    for package in packages:
        files.update(package_files(package))
    mined: list[Pair] = []
    with progress_bar("mining", len(files), enabled=progress) as advance:
        for module, path in files.items():
            mined += read_file(path, module)
            advance(1)
    pairs = deduplicate(mined)
    logger.info("%d files, %d functions that pass the rules, %d after removing duplicates", len(files), len(mined), len(pairs))
    return pairs


def read_file(path: Path, module: str) -> list[Pair]:
    """Pairs of one source file in the order of their lines; duplicates are still in.

    A file that this interpreter cannot decode or parse (Python 2, a template) has none; it is logged.

    Args:
        path: A ``.py`` file.
        module: Dotted name that the pairs carry.
    """
    try:
        with tokenize.open(path) as file:
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the compiler thinks of others' escapes is not the caller's concern
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:  # ValueError: undecodable bytes, or a NUL in the source
        logger.info("%s is not read: %s", path, error)
        return []
    # Not splitlines(): that also breaks at form feeds, which the standard library has, and line numbers would drift.
    lines = source.split("\n")
    found = (_pair(node, name, module, lines) for node, name in _functions(tree))
    return [pair for pair in found if pair is not None]


def summary(docstring: str) -> str | None:
    r"""First paragraph of a cleaned docstring as a query, or None where it is not English text of a fit length.

    A query is ``MIN_TOKENS`` to ``MAX_TOKENS`` tokens, ASCII characters only, and holds no URL. At least half of its tokens
    are words, which are letters, hyphens and apostrophes, punctuation aside: that leaves out bare signatures, grammar
    rules and lists of names.

    Example:
        >>> summary("Return the number of\n  open files.\n\nNeeds /proc.")
        'Return the number of open files.'
        >>> summary("f(x, y=0) -> z") is None
        True
    """
    paragraph: list[str] = []
    for line in docstring.split("\n"):
        if not line.strip() or _END_OF_SUMMARY.match(line):
            break
        paragraph.append(line)
    tokens = " ".join(paragraph).split()
    words = sum(_WORD.fullmatch(token) is not None for token in tokens)
    query = " ".join(tokens)
    fits = MIN_TOKENS <= len(tokens) <= MAX_TOKENS and 2 * words >= len(tokens)
    return query if fits and query.isascii() and "://" not in query else None


def deduplicate(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs without repeated queries (case ignored), repeated code, and near-duplicate code; the first one stays.

    A query that two functions answer would have one of its two right answers judged wrong, so its repetitions go too.
    """
    queries: set[str] = set()
    codes: set[str] = set()
    unique: list[Pair] = []
    for pair in pairs:
        if pair.query.casefold() in queries or pair.code in codes:
            continue
        queries.add(pair.query.casefold())
        codes.add(pair.code)
        unique.append(pair)
    return [unique[row] for row in first_of_each([pair.code for pair in unique])]


def split_by_module(pairs: Sequence[Pair], *, held_out: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Training pairs and held-out pairs that share no package, no query and no code.

    Packages are held out in the order of a hash of seed and name; one that would push the held-out side above its share is
    passed over. A training pair whose query or code also stands on the held-out side is dropped.

    Args:
        pairs: From ``mine``; the order is kept on both sides.
        held_out: Largest share of the pairs that may be held out, between 0 and 1, both excluded.
        seed: Any integer; equal seeds give equal splits on every platform.

    Raises:
        ValueError: ``held_out`` is out of range.
        InputError: No package is small enough for the held-out side.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be between 0 and 1, got {held_out}")
    sizes: dict[str, int] = {}
    for pair in pairs:
        sizes[pair.top_level] = sizes.get(pair.top_level, 0) + 1
    chosen: set[str] = set()
    room = int(held_out * len(pairs))
    for package in sorted(sizes, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest()):
        if sizes[package] <= room:
            chosen.add(package)
            room -= sizes[package]
    if not chosen:
        raise InputError(
            f"none of {len(sizes)} packages fits into {held_out:.0%} of {len(pairs)} pairs; mine more packages or hold out more"
        )
    test = [pair for pair in pairs if pair.top_level in chosen]
    queries, codes = {pair.query.casefold() for pair in test}, {pair.code for pair in test}
    train = [pair for pair in pairs if pair.top_level not in chosen and pair.query.casefold() not in queries and pair.code not in codes]
    return train, test


def write_collection(pairs: Sequence[Pair], folder: Path) -> None:
    """Write a BEIR folder: ``corpus.jsonl``, ``queries.jsonl``, ``qrels/test.tsv``; one relevant function a query.

    A query's id is its function's with ``query:`` before it: harnesses that take a document with the query's own id out of
    its results would otherwise take out the answer.

    Args:
        pairs: Functions to search and the queries that ask for them.
        folder: Made where it is missing; the three files are replaced.

    Raises:
        InputError: The folder cannot be written.
    """
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    _write_rows(folder / "corpus.jsonl", ({"_id": pair.id, "title": "", "text": pair.code} for pair in pairs))
    _write_rows(folder / "queries.jsonl", ({"_id": f"query:{pair.id}", "text": pair.query} for pair in pairs))
    with atomic_file(folder / "qrels" / "test.tsv") as file:
        file.write(b"query-id\tcorpus-id\tscore\n")
        file.writelines(f"query:{pair.id}\t{pair.id}\t1\n".encode() for pair in pairs)


def write_pairs(pairs: Iterable[Pair], path: Path) -> None:
    """Write training rows ``{"query": ..., "positive": ...}``, one JSON object a line.

    Args:
        pairs: Rows in their order.
        path: ``.jsonl`` or ``.jsonl.gz``; its folder is made where it is missing. Equal pairs give equal bytes.

    Raises:
        InputError: The path ends in something else, or cannot be written.
    """
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise InputError(f"{path}: training pairs are written as .jsonl or .jsonl.gz; change the name")
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_rows(path, ({"query": pair.query, "positive": pair.code} for pair in pairs))


def _write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    with atomic_file(path) as file:
        file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _functions(tree: ast.Module) -> Iterator[tuple[_Function, str]]:
    """Functions and methods with their qualified names, also those under ``if``, ``try`` or ``with``, in source order."""
    # A stack of our own: generated modules chain more elif branches than Python recurses.
    pending: list[tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        node, scope = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, f"{scope}{node.name}"
        elif isinstance(node, ast.Module | ast.stmt | ast.ExceptHandler | ast.match_case):
            inner = f"{scope}{node.name}." if isinstance(node, ast.ClassDef) else scope
            pending.extend((child, inner) for child in reversed(list(ast.iter_child_nodes(node))))


def _pair(node: _Function, function: str, module: str, lines: Sequence[str]) -> Pair | None:
    """The pair of one function, or None where a rule excludes it."""
    docstring = ast.get_docstring(node)
    if docstring is None or _excluded_name(node.name) or all(isinstance(one, ast.Pass | ast.Raise) for one in node.body[1:]):
        return None
    query = summary(docstring)
    if query is None:
        return None
    head, body = _around_docstring(node, lines)
    if sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in body) < MIN_BODY_LINES:
        return None
    indent = head[0][: len(head[0]) - len(head[0].lstrip())]
    code = "\n".join(line.removeprefix(indent) for line in [*head, *body])
    if len(code) > MAX_CODE_CHARACTERS:
        code = code[:MAX_CODE_CHARACTERS].rpartition("\n")[0] or code[:MAX_CODE_CHARACTERS]
    return Pair(f"{module}.{function}:{node.lineno}", query, code, module, function, node.lineno)


def _excluded_name(name: str) -> bool:
    # "latest" has the four letters too: CodeSearchNet asks for the substring, and so does this.
    return "test" in name.lower() or (name.startswith("__") and name.endswith("__"))


def _around_docstring(node: _Function, lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Source lines above and below the docstring; what shares a line with it (a signature, a statement) is kept."""
    docstring = node.body[0]
    end_line = docstring.end_lineno or docstring.lineno
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    head, body = list(lines[start - 1 : docstring.lineno - 1]), list(lines[end_line : node.end_lineno])
    while body and not body[0].strip():
        del body[0]
    # Columns of the syntax tree count UTF-8 bytes.
    before = lines[docstring.lineno - 1].encode()[: docstring.col_offset].decode()
    after = lines[end_line - 1].encode()[docstring.end_col_offset :].decode().lstrip(" ;")
    if before.strip():
        head.append(before + after)
    elif after:
        body.insert(0, before + after)
    return head, body
