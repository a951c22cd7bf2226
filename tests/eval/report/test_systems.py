"""Labels and rows of systems, and results that must not share a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.report.compare import check_data, rows, system_keys
from quiver.eval.report.retrieval import system_properties
from quiver.eval.results import HEADLINE, CollectionResult, IndexUsed, Results, label_systems

MakeScored = Callable[..., CollectionResult]
MakeResults = Callable[..., Results]


@pytest.mark.parametrize(
    ("first", "second", "labels"),
    [
        ({"source": "a/one"}, {"source": "/x/a/two"}, ["one", "two"]),
        ({"source": "x/a/model"}, {"source": "/y/a/model"}, ["x/a/model", "y/a/model"]),
        ({"source": "model"}, {"source": "/y/a/model/"}, ["model", "a/model"]),
        ({"source": "a/model"}, {"source": "org/other", "name": "model"}, ["a/model", "model"]),
        ({"source": "a/run.trec", "kind": "run"}, {"source": "a/b + run.trec", "kind": "fusion"}, ["run.trec", "a/b + run.trec"]),
        ({"fingerprint": "1" * 64}, {"fingerprint": "2" * 64}, ["a/model (111111111111)", "a/model (222222222222)"]),
        ({"fingerprint": "1" * 64}, {"fingerprint": None}, ["a/model (111111111111)", "a/model (fingerprint None)"]),
        ({"dtype": "float32"}, {"dtype": "int8"}, ["a/model (dtype float32)", "a/model (dtype int8)"]),
        (
            {"query_length": 32, "library": "pylate"},
            {"query_length": 64},
            ["a/model (library pylate, query length 32)", "a/model (library quiver, query length 64)"],
        ),
    ],
)
def test_labels_distinguish_systems(
    first: Mapping[str, object], second: Mapping[str, object], labels: list[str], make_scored: MakeScored, make_results: MakeResults
) -> None:
    results = [make_results(**{"source": "a/model", **fields}) for fields in (first, second)]
    results = [replace(each, collections=(make_scored("scifact", 0.5),)) for each in results]
    assert [label for label, _ in label_systems(results)] == labels


def test_several_bm25_have_colours_of_their_own_and_no_length(make_scored: MakeScored, make_results: MakeResults) -> None:
    own = [make_results(name, make_scored("scifact", 0.5, floor=0.4), kind="bm25", query_length=2**31 - 1) for name in ("words", "titles")]
    results = [*own, make_results("model", make_scored("scifact", 0.5, floor=0.4))]
    named = label_systems(results)
    keys = system_keys(rows(named), named)
    assert {label: key.colour for label, key in keys.items()} == {"bm25": 0, "words": 1, "titles": 2, "model": 3}
    assert "Query length" not in system_properties(results[0])
    assert system_properties(results[2])["Query length"] == "256 tokens"


def test_bm25_as_a_system_shares_the_row_of_the_baseline(make_scored: MakeScored, make_results: MakeResults) -> None:
    bm25 = make_results("bm25", make_scored("scifact", 0.6), make_scored("cosqa", 0.3), kind="bm25")
    results = [make_results("alpha", make_scored("scifact", 0.7, floor=0.6)), bm25]
    below, above = rows(label_systems(results))
    assert (below.label, above.label) == ("bm25", "alpha")
    assert list(below.scores) == ["scifact.test", "cosqa.test"]
    # A baseline has no share of judged documents; a system does.
    assert below.scores["scifact.test"].judged == 0.125
    others = [make_results("alpha", make_scored("scifact", 0.7, floor=0.5)), bm25]  # as of passages of another length
    assert [(row.label, row.scores["scifact.test"].measures[HEADLINE]) for row in rows(label_systems(others))] == [
        ("bm25 of alpha", 0.5),
        ("alpha", 0.7),
        ("bm25", 0.6),
    ]
    scored = ((0.5, "exact"), (0.4, "ivf"), (0.3, "hnsw"))  # of one system: its label names the index
    several = [make_results("alpha", make_scored("scifact", 0.7, floor=floor, index=IndexUsed(name, {}))) for floor, name in scored]
    shown = {row.label: row.scores["scifact.test"].measures[HEADLINE] for row in rows(label_systems(several)) if "bm25" in row.label}
    assert shown == {"bm25": 0.5, "bm25 of alpha [ivf]": 0.4, "bm25 of alpha [hnsw]": 0.3}


def test_results_that_cannot_share_a_table_are_refused(make_scored: MakeScored, make_results: MakeResults) -> None:
    first = make_results("alpha", make_scored("scifact", 0.5, floor=0.4))
    with pytest.raises(InputError, match=r"scifact\.test: beta and alpha were evaluated on different data"):
        check_data([first, make_results("beta", make_scored("scifact", 0.5, data_sha256="e" * 64))])
    with pytest.raises(InputError, match=r"two of the given folders hold scores of alpha on scifact\.test"):
        check_data([first, first])
    with pytest.raises(InputError, match="no results to report"):
        check_data([])
