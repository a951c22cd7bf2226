"""Mining of docstrings: each rule on its own source text, a split without leaks, and the written files."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import load_collection
from quiver.retrieval.data.docstrings import (
    MAX_CODE_CHARACTERS,
    TRAINING_PAIRS,
    Pair,
    Splits,
    deduplicate,
    mine,
    read_file,
    split_by_module,
    split_pairs,
    summary,
    write_collection,
)
from quiver.retrieval.training.data import prepare_rows
from quiver.retrieval.training.recipe import DataSection

BODY = "a = x\n    return a"


def pairs_of(tmp_path: Path, source: str, module: str = "sample") -> list[Pair]:
    path = tmp_path / f"{module}.py"
    path.write_text(dedent(source), encoding="utf-8")
    return read_file(path, module)


def function(name: str = "scale", docstring: str = "Scale a value up.", body: str = BODY) -> str:
    return f'def {name}(x):\n    """{docstring}"""\n    {body}\n'


@pytest.fixture(scope="module")
def stdlib() -> list[Pair]:
    return mine()


def test_a_pair_is_the_first_paragraph_and_the_source_without_its_docstring(tmp_path: Path) -> None:
    [pair] = pairs_of(
        tmp_path,
        '''
        class Shelf:
            """A class docstring is nobody's query."""

            @property
            # why this is here
            def width(self):
                """The width of
                the   shelf, in metres.

                Measured twice.
                """

                # the left edge
                left = self.left
                return self.right - left  # trailing

            height = 3
        ''',
    )
    assert pair == Pair(
        id="sample.Shelf.width:7",
        query="The width of the shelf, in metres.",
        code="@property\n# why this is here\ndef width(self):\n"
        "    # the left edge\n    left = self.left\n    return self.right - left  # trailing",
        module="sample",
        function="Shelf.width",
        line=7,
    )


def test_functions_are_found_in_every_block_but_not_inside_functions(tmp_path: Path) -> None:
    source = '''
        if flag:
            def one(x):
                """Number one of them."""
                def inner(y):
                    """Number none of them."""
                    z = y
                    return z
                return inner
        elif other:
            async def two(x):
                """Number two of them."""
                a = x
                return a
        try:
            import fast
        except ImportError:
            def three(x):
                """Number three of them."""
                a = x
                return a
        class Outer:
            class Inner:
                def four(self):
                    """Number four of them."""
                    a = self
                    return a
        match flag:
            case 1:
                def five(x):
                    """Number five of them."""
                    a = x
                    return a
    '''
    assert [pair.function for pair in pairs_of(tmp_path, source)] == ["one", "two", "three", "Outer.Inner.four", "five"]


@pytest.mark.parametrize("name", ["test_scale", "latest", "TestScale", "__call__", "__init__"])
def test_names_of_tests_and_dunders_are_dropped(tmp_path: Path, name: str) -> None:
    assert pairs_of(tmp_path, function(name)) == []
    assert len(pairs_of(tmp_path, function("_private"))) == 1


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("a = x\n    return a", True),
        ("return [\n        x,\n    ]", True),
        ("return x", False),
        ("# a comment\n\n    # another\n    return x", False),
        ("pass", False),
        ("raise NotImplementedError(\n        'later'\n    )", False),
        ("", False),
    ],
)
def test_short_and_empty_bodies_are_dropped(tmp_path: Path, body: str, kept: bool) -> None:
    assert bool(pairs_of(tmp_path, function(body=body))) is kept


def test_code_on_the_line_of_the_docstring_is_kept(tmp_path: Path) -> None:
    source = '''
        def one(x): """Größe of a thing."""; return [
            x,
            x]
        def two(x):
            """Width of a thing."""  # 2 m
            a = x
            return a
        def three(x):
            "Depth of a thing."; a = x
            return a
        def four(x):
            r"""The fourth \\d of them."""
            return "é", [
                x]
    '''
    assert [pair.code for pair in pairs_of(tmp_path, source)] == [
        "def two(x):\n    # 2 m\n    a = x\n    return a",
        "def three(x):\n    a = x\n    return a",
        'def four(x):\n    return "é", [\n        x]',
    ]
    ascii_only = source.replace("Größe", "Size")
    assert pairs_of(tmp_path, ascii_only)[0].code == "def one(x): return [\n    x,\n    x]"


def test_long_functions_are_truncated_after_a_line(tmp_path: Path) -> None:
    [pair] = pairs_of(tmp_path, function(body="\n    ".join(f"value_{number} = x" for number in range(500))))
    assert MAX_CODE_CHARACTERS - 30 < len(pair.code) <= MAX_CODE_CHARACTERS
    assert pair.code.splitlines()[-1].endswith(" = x")
    [one_line] = pairs_of(tmp_path, function(body=f"a = {'x' * 9_000}\n    return a", docstring="One very long line."))
    assert one_line.code == "def scale(x):"


@pytest.mark.parametrize(
    ("docstring", "query"),
    [
        ("Open the file.", "Open the file."),
        ("Open it.", None),
        ("  ", None),
        ("Open the file\nfor reading.\n\nMore.", "Open the file for reading."),
        ("Open the file.\n    \nMore.", "Open the file."),
        ("Open the file.\n:param path: where", "Open the file."),
        ("Open the file.\n@param path: where", "Open the file."),
        ("Open the file.\nArgs:\n  path: where", "Open the file."),
        ("Open the file.\nParameters\n----------", "Open the file."),
        ("Open the file.\n>>> f()", "Open the file."),
        (">>> open('a file')\n1", None),
        (":class:`Path` is what this returns.", ":class:`Path` is what this returns."),
        ("Return ``x`` scaled by 2.", "Return ``x`` scaled by 2."),
        ("Datei öffnen und lesen.", None),
        ("See https://example.org for the rules.", None),
        ("f(x, y=0, *, z) -> (a, b)", None),
        ("one " * 256, ("one " * 256).strip()),
        ("one " * 257, None),
    ],
)
def test_a_summary_is_the_first_paragraph_if_it_is_text(docstring: str, query: str | None) -> None:
    assert summary(docstring) == query


def test_repeated_pairs_are_removed_and_the_first_is_kept() -> None:
    first = Pair("m.f:1", "Scale a value up.", "def f(alpha, beta):\n    gamma = alpha\n    return gamma", "m", "f", 1)
    pairs = [
        first,
        replace(first, id="m.g:1", code="def g(delta, eta):\n    return delta"),  # the query again
        replace(first, id="m.h:1", query="scale a Value up.", code="def h(theta):\n    return theta.iota"),  # in another case
        replace(first, id="m.i:1", query="Another query entirely."),  # the code again
        replace(first, id="m.j:1", query="And one more.", code=first.code + "  # f"),  # nearly the code
        replace(first, id="m.k:1", query="Something else here.", code="def k(kappa, mu):\n    nu = kappa\n    return nu"),
    ]
    assert [pair.id for pair in deduplicate(pairs)] == ["m.f:1", "m.k:1"]


@pytest.mark.parametrize(
    "content", [b"def f(:\n", b"x = 1\x00\n", b"# -*- coding: utf-8 -*-\n\xff = 1\n", b"# -*- coding: no-such -*-\n", b"print 1\n"]
)
def test_a_file_that_does_not_parse_has_no_pairs(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.py"
    path.write_bytes(content)
    assert read_file(path, "broken") == []


@pytest.mark.parametrize("seed", [0, 1, 12])
def test_the_split_shares_no_package_query_or_code(stdlib: list[Pair], seed: int) -> None:
    train, test = split_by_module(stdlib, held_out=0.15, seed=seed)
    assert {pair.top_level for pair in train}.isdisjoint(pair.top_level for pair in test)
    assert {pair.query.casefold() for pair in train}.isdisjoint(pair.query.casefold() for pair in test)
    assert {pair.code for pair in train}.isdisjoint(pair.code for pair in test)
    assert 0.14 * len(stdlib) < len(test) <= 0.15 * len(stdlib)
    assert Counter(train) + Counter(test) == Counter(stdlib)
    assert (train, test) == split_by_module(stdlib, held_out=0.15, seed=seed)


def test_a_training_pair_that_is_also_held_out_is_dropped() -> None:
    base = Pair("", "Scale a value up.", "def f(): ...", "", "f", 1)
    unique = [
        replace(base, id=f"{module}:{row}", query=f"{module} {row}", code=f"{module}{row}", module=f"{module}.part")
        for module in "abcd"
        for row in range(3)
    ]
    _, [*held_out] = split_by_module(unique, held_out=0.25, seed=3)
    [test_module] = {pair.top_level for pair in held_out}
    train_module = next(module for module in "abcd" if module != test_module)
    leak_query = replace(base, id="q", query=held_out[0].query.upper(), code="own code", module=train_module)
    leak_code = replace(base, id="c", query="own query", code=held_out[1].code, module=train_module)
    train, test = split_by_module([*unique, leak_query, leak_code], held_out=0.25, seed=3)
    assert test == held_out
    assert [pair.id for pair in train] == [pair.id for pair in unique if pair.top_level != test_module]


def test_a_single_package_cannot_be_split() -> None:
    with pytest.raises(InputError, match="no package is small enough to hold out 20% of 1 pairs"):
        split_by_module([Pair("m.f:1", "q", "c", "m", "f", 1)], held_out=0.2, seed=0)


def test_the_written_collection_can_be_loaded_split_by_split_and_trained_on(tmp_path: Path, stdlib: list[Pair]) -> None:
    splits = split_pairs(stdlib)
    write_collection(splits, tmp_path / "new" / "folder")
    pairs = [*splits.train, *splits.dev, *splits.test]
    for name, split in splits._asdict().items():
        collection = load_collection(tmp_path / "new" / "folder", name)
        assert [(document.id, document.text, document.title) for document in collection.documents] == [
            (pair.id, pair.code, "") for pair in pairs
        ]
        assert collection.qrels == {f"query:{pair.id}": {pair.id: 1} for pair in split}
        texts = {query.id: query.text for query in collection.queries}
        assert [texts[f"query:{pair.id}"] for pair in split] == [pair.query for pair in split]
        assert texts.keys().isdisjoint(document.id for document in collection.documents)
    document = next(iter(collection.documents))
    pair = pairs[0]
    assert document.metadata == {"package": pair.top_level, "module": pair.module, "function": pair.function, "line": pair.line}
    rows = prepare_rows(DataSection(train=(str(tmp_path / "new" / "folder" / TRAINING_PAIRS),)), tmp_path / "rows", seed=0)
    assert [(row["query"], row["document_1"]) for row in rows] == [(pair.query, pair.code) for pair in splits.train]
    judged = prepare_rows(DataSection(train=(str(tmp_path / "new" / "folder"),), format="beir"), tmp_path / "rows", seed=0)
    assert sorted(row["query"] for row in judged) == sorted(row["query"] for row in rows)


def test_equal_pairs_give_equal_bytes_and_a_collection_is_not_overwritten(tmp_path: Path, stdlib: list[Pair]) -> None:
    splits = Splits(stdlib[:5], stdlib[5:8], stdlib[8:12])
    for name in ("a", "b"):
        write_collection(splits, tmp_path / name)
    one, other = (
        {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (tmp_path / "a", tmp_path / "b")
    )
    assert one == other
    assert len(one) == 6
    with pytest.raises(InputError, match="already contains a collection; remove it, or choose another --out"):
        write_collection(splits, tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        write_collection(splits, tmp_path / "file" / "below")
