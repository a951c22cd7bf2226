"""The type of a column of CSV and TSV: one, decided by all of its cells, as pandas decides it where that loses nothing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from quiver.retrieval.data.source import SourceOptions, open_corpus
from quiver.retrieval.index import build_index


def column(folder: Path, cells: list[str], separator: str = ",", suffix: str = "csv") -> list[Any]:
    """The values of a column, None where a document has none."""
    path = folder / f"a.{suffix}"
    path.write_text(f"id{separator}text{separator}x\n" + "".join(f"{n}{separator}t{separator}{cell}\n" for n, cell in enumerate(cells)))
    return [(document.metadata or {}).get("x") for document in open_corpus(path)]


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["0.5", "1e-05", "2.5E-5", "7"], [0.5, 1e-5, 2.5e-5, 7.0]),
        ([".5", "5.", "-0", "1e3"], [0.5, 5.0, -0.0, 1000.0]),
        (["7", "", " 8 ", "-9"], [7, None, 8, -9]),
        (["9007199254740993", "-9223372036854775808"], [9007199254740993, -(2**63)]),
        (["True", "false", "TRUE", ""], [True, False, True, None]),
        (["1", "NA", "n/a", "nan", "null", "None", "#N/A", "<NA>"], [1, *[None] * 7]),
        (["true", "NA"], [True, None]),
        (["2021/6/1", "NaN", "2021-11-12"], ["2021-06-01", None, "2021-11-12"]),
        (["", "  ", ""], [None, None, None]),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_cells_of_one_type_become_its_values_and_blanks_are_missing(
    tmp_path: Path, cells: list[str], values: list[Any], suffix: str
) -> None:
    found = column(tmp_path, cells, "\t" if suffix == "tsv" else ",", suffix)
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


@pytest.mark.parametrize(
    "cells",
    [
        ["90210", "02139"],  # leading zeros
        ["1", "-007"],
        ["0.5", "00.5"],
        ["12", "+49301234"],  # the plus sign of a telephone number
        ["0x1F", "12"],
        ["45%", "7"],
        ["1e5", "lamp", "2e7"],  # a code of a product
        ["12345678901234567890", "1"],  # beyond 64 bits
        ["9007199254740993", "0.5"],  # an integer that no float is
        ["1e999", "1"],
        ["inf", "1.5"],
        ["NA", "DE", "US"],  # Namibia
        ["2021-06-01", "06/01/2021"],
        ["2021/06/01", "soon"],
        ["true", "1"],
        ["true", "yes"],
        ["1_000", "1"],
        ["1.250,50", "3"],
        ["\N{ARABIC-INDIC DIGIT ONE}", "1"],
        ["$5", "5"],
        ["$5", "€5"],
        *[[str(number) for number in range(300)] + ["late"]],
    ],
)
def test_one_cell_of_another_type_makes_all_of_them_strings(tmp_path: Path, cells: list[str]) -> None:
    quoted = [f'"{cell}"' for cell in cells]
    assert column(tmp_path, quoted) == cells


def test_columns_have_the_types_of_pandas(tmp_path: Path) -> None:
    table = 'id,text,n,f,b,s,gap,q,blank\n007,a,1,0.1,True,x,,"5",\n008,b,-2,1e-7,False,1,3,"6",\n009,c,3,1E+20,True,2.5,,"7",\n'
    (tmp_path / "a.csv").write_text(table)
    frame = pd.read_csv(io.StringIO(table))
    documents = list(open_corpus(tmp_path / "a.csv"))
    assert [document.id for document in documents] == ["007", "008", "009"]
    for name in ("n", "f", "b", "q", "s"):
        assert [(document.metadata or {})[name] for document in documents] == frame[name].tolist()
    assert [(document.metadata or {}).get("gap") for document in documents] == [None, 3, None]
    assert all("blank" not in (document.metadata or {}) for document in documents)


def test_the_tables_of_a_folder_decide_together(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text,zip,year\n1,a,90210,2001\n")
    (tmp_path / "b.tsv").write_text("id\ttext\tzip\tyear\n2\tb\t02139\t\n3\tc\t\t2002.5\n")
    assert [document.metadata for document in open_corpus(tmp_path)] == [
        {"zip": "90210", "year": 2001.0}, {"zip": "02139"}, {"year": 2002.5}
    ]  # fmt: skip


def test_values_of_lists_have_one_type(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text,codes,years,mixed\n1,a,"7, 12",2001;2002,"[1, ""x""]"\n2,b,007,,3\n')
    (tmp_path / "a.jsonl").write_text('{"text": "a", "codes": "7, 12"}\n{"text": "b", "codes": "007"}\n')
    options = SourceOptions(lists=("codes", "years", "mixed"))
    assert [document.metadata for document in open_corpus(tmp_path / "a.csv", options)] == [
        {"codes": ["7", "12"], "years": [2001, 2002], "mixed": ["1", "x"]}, {"codes": ["007"], "mixed": ["3"]}
    ]  # fmt: skip
    options = SourceOptions(lists=("codes",))
    assert [document.metadata for document in open_corpus(tmp_path / "a.jsonl", options)] == [{"codes": ["7", "12"]}, {"codes": ["007"]}]


def test_a_late_cell_that_decides_a_column_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert column(tmp_path, [*map(str, range(150)), "n/d"])[0] == "0"
    list(open_corpus(tmp_path / "a.csv"))
    (told,) = [record.getMessage() for record in caplog.records if "strings" in record.getMessage()]
    assert told == f"{tmp_path / 'a.csv'}:152: the column 'x' holds strings because of 'n/d'; the 150 values before it are integers"


def test_fields_of_several_types_are_told(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"id": "a", "text": "owls", "zip": "02139", "price": 1}, {"id": "b", "text": "trout", "zip": 90210, "price": 2.5}]
    build_index(rows, "bm25")
    (told,) = [record.getMessage() for record in caplog.records if "several types" in record.getMessage()]
    assert told.startswith("field 'zip' has values of several types, such as string and '90210', and is of strings")
