"""What is evaluated and under which policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from encoder.errors import InputError
from eval.benchmark import Benchmark, Policy, cut, depth, resolve


def test_a_folder_is_a_benchmark(make_collection: Callable[..., Path]) -> None:
    folder = make_collection()
    benchmark = resolve(folder, "test")
    assert benchmark == Benchmark("tiny", folder, "test", Policy(exclude_self=False, use_title=True))
    collection = benchmark.load()
    assert (len(collection.documents), len(collection.queries)) == (5, 3)


@pytest.mark.parametrize("name", ["arguana", "quora", "ArguAna"])
def test_collections_whose_queries_are_documents_exclude_them(make_collection: Callable[..., Path], name: str) -> None:
    assert resolve(make_collection(name), "test").policy == Policy(exclude_self=True)


@pytest.mark.parametrize("name", ["fiqa", "scifact", "arguana-like"])
def test_no_other_collection_does(make_collection: Callable[..., Path], name: str) -> None:
    assert resolve(make_collection(name), "test").policy == Policy()


def test_the_name_does_not_depend_on_how_the_path_is_written(make_collection: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_collection("arguana")
    monkeypatch.chdir(folder)
    assert {resolve(path, "test").name for path in (".", f"{folder}/", str(folder), folder)} == {"arguana"}


def test_a_link_keeps_its_name_and_its_policy(make_collection: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_collection("beir")
    link = tmp_path / "arguana"
    link.symlink_to(folder, target_is_directory=True)
    for path in (link, f"{link}/", link / "qrels" / ".."):
        benchmark = resolve(path, "test")
        assert (benchmark.name, benchmark.policy) == ("arguana", Policy(exclude_self=True))
    assert resolve(folder, "test").policy == Policy()
    assert len(resolve(link, "test").load().documents) == 5


@pytest.mark.parametrize("data", ["no-such-collection", "missing/folder"])
def test_an_unknown_name_says_what_was_looked_for(data: str) -> None:
    with pytest.raises(InputError, match=rf"unknown collection '{data}': no such folder; give a BEIR folder .*qrels/dev\.tsv"):
        resolve(data, "dev")


def test_a_file_is_no_collection(make_collection: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="no such folder"):
        resolve(make_collection() / "corpus.jsonl", "test")


RUN = {"a": {"c": 1.0, "a": 9.0, "b": 2.0}, "z": {"a": 1.0, "b": 1.0}}


def test_cut_keeps_the_best_in_trec_order() -> None:
    assert cut(RUN, 1, Policy()) == {"a": {"a": 9.0}, "z": {"b": 1.0}}


def test_cut_excludes_the_query_and_keeps_k_others() -> None:
    policy = Policy(exclude_self=True)
    assert depth(2, policy) == 3
    assert cut(RUN, 2, policy) == {"a": {"b": 2.0, "c": 1.0}, "z": {"a": 1.0, "b": 1.0}}


def test_cut_changes_nothing_it_was_given() -> None:
    run = {query: dict(scores) for query, scores in RUN.items()}
    kept = cut(run, 5, Policy(exclude_self=True))
    kept["z"]["new"] = 1.0
    assert run == RUN
