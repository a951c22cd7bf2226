"""Mine docstring -> function pairs from Python source: a code search collection that needs no download.

The rules are those of CodeSearchNet's Python parser; where the paper leaves a rule open, the constant or function that implements it says
what was chosen. Source files are parsed, never imported.

- The query is the first paragraph of the docstring of a function or method at module or class level. The document is its source without
  the docstring, with decorators, comments and nested functions.
- Excluded are names containing ``test``, dunder methods, bodies that only pass or raise, short bodies, queries that are not English text,
  repeated code, repeated queries, and near-duplicates.

The standard library differs between Python versions, and so do the pairs: compare scores only within one version.
Source: CodeSearchNet, arXiv:1909.09436, section 2; its parser, github.com/github/CodeSearchNet at e792e1c,
function_parser/parsers/python_parser.py; the 256-token and URL rules are those of CodeXGLUE's AdvTest, arXiv:2102.04664.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.metadata
import importlib.util
import keyword
import logging
import math
import re
import sys
import sysconfig
import tokenize
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from quiver.encoder.errors import InputError
from quiver.encoder.files import write_json_lines
from quiver.encoder.progress import progress_bar
from quiver.retrieval.data.corpus import write_beir
from quiver.retrieval.records import Document, Metadata, Query

logger = logging.getLogger(__name__)

_APPLICATIONS = frozenset({"idlelib", "turtledemo"})
"""Packages of the standard library that are programs rather than libraries."""

_TEST = re.compile(r"(^|_)tests?(_|$)|^conftest$")
"""Module names of tests; ``unittest`` and ``doctest`` do not match."""

SET_SIMILARITY = Fraction(8, 10)
"""Minimum Jaccard similarity of two sets of identifiers. A fraction, so that 0.8 times a count rounds up exactly."""

MULTISET_SIMILARITY = Fraction(7, 10)
"""Minimum Jaccard similarity of two multisets of identifiers."""

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")

MIN_TOKENS = 3
"""Minimum number of blank-separated tokens of a query."""

MAX_TOKENS = 256
"""Maximum number of blank-separated tokens of a query."""

MIN_BODY_LINES = 2
"""Minimum lines of code after the signature, without docstring, blank lines and comments.

The paper drops implementations of fewer than three lines; the signature counts as one of them.
"""

MAX_CODE_CHARACTERS = 4_000
"""Maximum length of a function, about 1,000 tokens; longer ones are truncated after a whole line."""

_WORD = re.compile(r"[\"'`(]*[A-Za-z][A-Za-z'-]*[\"'`)]*[.,:;!?]*")
"""A blank-separated token that looks like an English word, with punctuation."""

_END_OF_SUMMARY = re.compile(
    r"\s*(?:>>>"  # a doctest
    r"|:\w+[^:`]*:(?!`)|@\w+[^:]*:"  # a reStructuredText or Epydoc field; :class:`X` is prose
    r"|(?:Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?)\s*:?\s*$)"  # a Google or NumPy section
)
"""A docstring line that ends the first paragraph, like a blank line."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef

HELD_OUT = 0.15
"""Maximum share of the pairs that training never sees."""

TEST = 2 / 3
"""Maximum share of the held-out pairs that are the split ``test``; the others are ``dev``."""

SPLIT_SEED = 12
"""Seed of `split_pairs`, the same for everybody: a model trained on ``docstrings:stdlib`` has seen no query of ``dev`` and ``test``."""

TRAINING_PAIRS = "train.jsonl.gz"
"""File of a collection with its training pairs."""


def stdlib_files() -> dict[str, Path]:
    """List the source files of the standard library, module -> file, without IDLE and the turtle demos; those written in C have none."""
    root = Path(sysconfig.get_path("stdlib"))
    files: dict[str, Path] = {}
    for name in sorted(sys.stdlib_module_names - _APPLICATIONS):  # excludes site-packages and the test package
        if (root / name).is_dir():
            files.update(_files_below(root / name, name))
        elif (root / f"{name}.py").is_file():
            files[name] = root / f"{name}.py"
    if not files:
        raise InputError(f"{root}: the source of the standard library is missing; install it, or mine only packages")
    return files


def package_files(package: str) -> dict[str, Path]:
    """List the source files of an installed package by its top-level import name, module -> file.

    Raises:
        InputError: The package is not installed, has no Python source, or belongs to the standard library.
    """
    if package in sys.stdlib_module_names:
        raise InputError(f"{package!r} belongs to the standard library, which is always mined as a whole; name only installed packages")
    # find_spec would import the parent of a dotted name, and a script's __main__ has no spec.
    spec = importlib.util.find_spec(package) if package.isidentifier() and package != "__main__" else None
    if spec is None:
        raise InputError(f"package {package!r} is not installed{_hint(package, importlib.metadata.packages_distributions())}")
    files: dict[str, Path] = {}
    for folder in spec.submodule_search_locations or ():
        files.update(_files_below(Path(folder), package))
    if spec.submodule_search_locations is None and spec.origin is not None and spec.origin.endswith(".py"):
        files[package] = Path(spec.origin)
    if not files:
        raise InputError(f"package {package!r} has no Python source where it is installed")
    return files


def _hint(name: str, distributions: Mapping[str, list[str]]) -> str:
    """Suggestion for a name that was not found; ``distributions`` maps import names to distributions."""
    wanted = name.lower().replace("_", "-")
    imports = sorted(module for module, owners in distributions.items() if wanted in {owner.lower().replace("_", "-") for owner in owners})
    if imports:
        return f": it is the name of a distribution; use its import name {' or '.join(imports)}"
    close = difflib.get_close_matches(name, distributions, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; install it, or use its top-level import name"


def _files_below(folder: Path, package: str) -> dict[str, Path]:
    """Module name -> file of a package folder and its subpackages, sorted by name."""
    if not folder.is_dir():  # a namespace package of an editable install lists a placeholder folder
        return {}
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if not path.stem.isidentifier() or _TEST.search(path.stem):
            continue
        if path.suffix == ".py" and path.is_file():
            files[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
        elif path.suffix == "" and path.is_dir() and not path.is_symlink():  # a link may point to a parent folder
            files.update(_files_below(path, f"{package}.{path.stem}"))
    return files


def first_of_each(texts: Sequence[str]) -> list[int]:
    """Return the rows of texts that are not near-duplicates of an earlier returned row, ascending.

    Two texts are near-duplicates if the Jaccard similarity of their sets of identifiers is at least `SET_SIMILARITY` and that of their
    multisets at least `MULTISET_SIMILARITY`. Words in comments and strings count as identifiers, Python keywords do not. The search is
    exact: such sets share one of their few rarest members, so only texts that do are compared. A text without identifiers is not a
    duplicate.

    Source: Allamanis 2019, arXiv:1812.06469 (measure and thresholds); the prefix filter is Chaudhuri, Ganti and Kaushik 2006, "A primitive
    operator for similarity joins in data cleaning".

    Example:
        >>> first_of_each(["total = a + b + c + d", "total = a+b + c + d # sum", "total = x * y", "TOTAL = a + b + c + d"])
        [0, 2, 3]
    """
    bags = [Counter(word for word in _IDENTIFIER.findall(text) if not keyword.iskeyword(word)) for text in texts]
    frequency = Counter(word for bag in bags for word in bag)
    kept: list[int] = []
    by_rare_word: defaultdict[str, list[int]] = defaultdict(list)
    for row, bag in enumerate(bags):
        words = sorted(bag, key=lambda word: (frequency[word], word))
        # Prefix filter: two sets that share at least ceil(t * n) of n words share one of the first n - ceil(t * n) + 1 in any common order.
        rare = words[: len(words) - math.ceil(SET_SIMILARITY * len(words)) + 1]
        candidates = {earlier for word in rare for earlier in by_rare_word[word]}
        if any(_similar(bag, bags[earlier]) for earlier in candidates):
            continue
        kept.append(row)
        for word in rare:
            by_rare_word[word].append(row)
    return kept


def _similar(first: Counter[str], second: Counter[str]) -> bool:
    shared = len(first.keys() & second.keys())
    if shared < SET_SIMILARITY * (len(first) + len(second) - shared):
        return False
    overlap = sum((first & second).values())
    return overlap >= MULTISET_SIMILARITY * (first.total() + second.total() - overlap)


@dataclass(frozen=True)
class Pair:
    """A docstring and the function that it describes.

    Attributes:
        id: ``module.function:line``, unique within the packages of one interpreter.
        query: First paragraph of the docstring, with normalized white space.
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
    def metadata(self) -> Metadata:
        """Fields of the function's document: its package, module, qualified name and line."""
        return {"package": self.top_level, "module": self.module, "function": self.function, "line": self.line}

    @property
    def top_level(self) -> str:
        """Top-level package or module of the function, such as ``asyncio`` for ``asyncio.tasks``."""
        return self.module.partition(".")[0]


def mine(*, packages: Sequence[str] = (), stdlib: bool = True, progress: bool = False) -> list[Pair]:
    """Mine pairs from the standard library, without its tests, IDLE and the turtle demos, and installed packages.

    Args:
        packages: Import names of installed packages (``sklearn``, not ``scikit-learn``).
        stdlib: Include the standard library.
        progress: Show a progress bar on standard error.

    Returns:
        Pairs in the order of module and line, the standard library first, without duplicates.

    Raises:
        InputError: A package is not installed, has no Python source, or belongs to the standard library.
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
    """Mine the pairs of one source file, in the order of lines, with duplicates.

    A file that cannot be decoded or parsed (Python 2, a template) is logged and gives no pairs.
    """
    try:
        with tokenize.open(path) as file:
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in other people's code
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:  # ValueError: undecodable bytes, or a NUL in the source
        logger.info("%s: skipped (%s)", path, error)
        return []
    # Not splitlines(), which also splits at form feeds, so that line numbers would be wrong.
    lines = source.split("\n")
    found = (_pair(node, name, module, lines) for node, name in _functions(tree))
    return [pair for pair in found if pair is not None]


def summary(docstring: str) -> str | None:
    r"""Return the first paragraph of a cleaned docstring as a query, or None if it is not English text of suitable length.

    A query has ``MIN_TOKENS`` to ``MAX_TOKENS`` tokens, only ASCII characters and no URL. At least half of its tokens are words of letters,
    hyphens and apostrophes, which excludes bare signatures, grammar rules and lists of names.

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
    """Remove pairs with a repeated query (case-insensitive), repeated code or near-duplicate code; the first one is kept.

    If two functions had the same query, one of its two correct answers would be judged wrong.
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
    """Split pairs into training and held-out pairs that share no package, query or code; both keep the order.

    Packages are held out in the order of a hash of seed and name, as long as the share ``held_out`` is not exceeded. Training pairs whose
    query or code is also held out are dropped. Equal seeds give equal splits on every platform.

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
            f"no package is small enough to hold out {held_out:.0%} of {len(pairs)} pairs; mine more packages or increase held_out"
        )
    test = [pair for pair in pairs if pair.top_level in chosen]
    queries, codes = {pair.query.casefold() for pair in test}, {pair.code for pair in test}
    train = [pair for pair in pairs if pair.top_level not in chosen and pair.query.casefold() not in queries and pair.code not in codes]
    return train, test


class Splits(NamedTuple):
    """Pairs for training, development and test; no two of them share a package, a query or a function."""

    train: list[Pair]
    dev: list[Pair]
    test: list[Pair]


def split_pairs(pairs: Sequence[Pair]) -> Splits:
    """Split pairs from `mine` by package, in the same way everywhere: about 85 % train, 5 % dev and 10 % test."""
    train, held_out = split_by_module(pairs, held_out=HELD_OUT, seed=SPLIT_SEED)
    return Splits(train, *split_by_module(held_out, held_out=TEST, seed=SPLIT_SEED))


def write_collection(splits: Splits, folder: Path) -> None:
    """Write pairs as a BEIR folder, with training pairs; equal pairs give equal bytes.

    ``corpus.jsonl`` holds all functions, with ``package``, ``module``, ``function`` and ``line`` as metadata; ``queries.jsonl`` all
    docstrings; ``qrels`` the splits train, dev and test, in which each query has one relevant function; `TRAINING_PAIRS` the rows
    ``{"query": ..., "positive": ...}`` of train. A query's id is its function's id with the prefix ``query:``, since harnesses that
    remove the document with the query's own id from the results would otherwise remove the answer.
    """
    pairs = [*splits.train, *splits.dev, *splits.test]
    write_beir(
        folder,
        (Document(pair.id, pair.code, metadata=pair.metadata) for pair in pairs),
        (Query(f"query:{pair.id}", pair.query) for pair in pairs),
        {name: [(f"query:{pair.id}", pair.id, 1) for pair in split] for name, split in splits._asdict().items()},
    )
    write_json_lines(folder / TRAINING_PAIRS, ({"query": pair.query, "positive": pair.code} for pair in splits.train))


def _functions(tree: ast.Module) -> Iterator[tuple[_Function, str]]:
    """Functions and methods with their qualified names, including those under ``if``, ``try`` or ``with``, in source order."""
    # An explicit stack, since generated modules chain more elif branches than Python's recursion limit.
    pending: list[tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        node, scope = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, f"{scope}{node.name}"
        elif isinstance(node, ast.Module | ast.stmt | ast.ExceptHandler | ast.match_case):
            inner = f"{scope}{node.name}." if isinstance(node, ast.ClassDef) else scope
            pending.extend((child, inner) for child in reversed(list(ast.iter_child_nodes(node))))


def _pair(node: _Function, function: str, module: str, lines: Sequence[str]) -> Pair | None:
    """The pair of a function; None if a rule excludes it."""
    docstring = ast.get_docstring(node)
    # CodeSearchNet also excludes names such as "latest", which contain the substring.
    is_excluded = "test" in node.name.lower() or (node.name.startswith("__") and node.name.endswith("__"))
    if docstring is None or is_excluded or all(isinstance(one, ast.Pass | ast.Raise) for one in node.body[1:]):
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


def _around_docstring(node: _Function, lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Source lines before and after the docstring; code on the docstring's own lines (a signature, a statement) is kept."""
    docstring = node.body[0]
    end_line = docstring.end_lineno or docstring.lineno
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    head, body = list(lines[start - 1 : docstring.lineno - 1]), list(lines[end_line : node.end_lineno])
    while body and not body[0].strip():
        del body[0]
    # The syntax tree counts columns in UTF-8 bytes.
    before = lines[docstring.lineno - 1].encode()[: docstring.col_offset].decode()
    after = lines[end_line - 1].encode()[docstring.end_col_offset :].decode().lstrip(" ;")
    if before.strip():
        head.append(before + after)
    elif after:
        body.insert(0, before + after)
    return head, body
