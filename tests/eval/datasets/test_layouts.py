"""Finding the files of a table by the repository's card, valid or not."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.datasets.sources import HubTable, table_files

TABLE = HubTable("a/b", ("default", "qrels"), "test", ("data/test-*.parquet", "test.tsv"))


def card(front: str) -> str:
    return f"---\n{front}\n---\n# A data set\n"


def split(config: str, name: str, path: str) -> str:
    return f"configs:\n- config_name: {config}\n  data_files:\n  - split: {name}\n    path: {path}"


@pytest.mark.parametrize(
    ("front", "names", "found"),
    [
        (split("default", "test", "x/*"), ["x/2.jsonl", "x/1.jsonl", "y.jsonl"], ["x/1.jsonl", "x/2.jsonl"]),
        (split("qrels", "test", "[a.jsonl, b.jsonl]"), ["b.jsonl", "a.jsonl"], ["a.jsonl", "b.jsonl"]),
        (split("default", "train", "a.jsonl"), ["a.jsonl", "test.tsv"], ["test.tsv"]),
        ("configs:\n- config_name: default\n  data_files: a.jsonl", ["a.jsonl", "test.tsv"], ["a.jsonl"]),
        ("configs:\n- config_name: default\n  data_files: [b.jsonl, a.jsonl]", ["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
        ("configs:\n- config_name: other\n  data_files: a.jsonl", ["a.jsonl", "test.tsv"], ["test.tsv"]),
        ("configs: none of your business", ["test.tsv"], ["test.tsv"]),
        ("license: mit", ["data/test-0.parquet", "test.tsv"], ["data/test-0.parquet"]),
        ("- a list", ["test.tsv"], ["test.tsv"]),
    ],
)
def test_the_card_takes_precedence_over_the_usual_names(front: str, names: Sequence[str], found: list[str]) -> None:
    assert table_files(TABLE, card(front), names) == found


def test_the_only_split_is_used_if_the_table_allows_it() -> None:
    front = card(split("corpus", "train", "c-*.parquet"))
    corpus = HubTable("a/b", ("corpus",), "corpus", any_split=True)
    assert table_files(corpus, front, ["c-0.parquet", "c-1.parquet"]) == ["c-0.parquet", "c-1.parquet"]
    with pytest.raises(InputError, match="a/b: no files for corpus, split corpus"):
        table_files(HubTable("a/b", ("corpus",), "corpus"), front, ["c-0.parquet"])


def test_a_star_matches_within_one_folder() -> None:
    front = card(split("default", "test", "data/*"))
    assert table_files(TABLE, front, ["data/a.jsonl", "data/old/b.jsonl", "data.jsonl"]) == ["data/a.jsonl"]
    front = front.replace("data/*", "data/**")
    assert table_files(TABLE, front, ["data/a.jsonl", "data/old/b.jsonl"]) == ["data/a.jsonl", "data/old/b.jsonl"]


@pytest.mark.parametrize(
    ("front", "names", "message"),
    [
        ("configs: [", ["test.tsv"], "a/b: the front matter of README.md is not YAML"),
        ("license: mit", [], "a/b: no files for default or qrels, split test; files in the repository: (none)"),
        ("license: mit", [f"{n}.txt" for n in range(10)], "7.txt and 2 more"),
        (
            "configs:\n- config_name: default\n  data_files: a.csv",
            ["a.csv"],
            "a/b: unsupported file a.csv; supported formats: .parquet, .jsonl",
        ),
    ],
)
def test_unreadable_cards_are_reported_in_one_line(front: str, names: Sequence[str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as error:
        table_files(TABLE, card(front), names)
    assert "\n" not in str(error.value)
