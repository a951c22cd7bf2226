"""Results in a terminal and in a notebook: tables, comparisons and charts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quiver.encoder import InputError
from quiver.eval.report.formats import render_markdown
from quiver.eval.report.retrieval import results_report
from quiver.eval.results import CollectionResult, Results, with_common_names

MakeCollection = Callable[..., CollectionResult]
MakeResults = Callable[..., Results]


def test_results_show_a_row_per_collection_and_system(make_scored: MakeCollection, make_results: MakeResults) -> None:
    results = make_results("/home/me/model", make_scored("scifact", 0.645, floor=0.665), make_scored("nfcorpus", 0.3))
    header, *rows = [line.split() for line in repr(results).splitlines()[1:]]
    assert header[:3] == ["collection", "system", "ndcg@10"]
    assert [row[:3] for row in rows] == [
        ["scifact.test", "me/model", "64.5"],
        ["scifact.test", "bm25", "66.5"],
        ["nfcorpus.test", "me/model", "30.0"],
    ]
    assert "<td>66.5</td>" in results._repr_html_()


def test_a_comparison_gives_differences_where_both_have_scores(make_scored: MakeCollection, make_results: MakeResults) -> None:
    first = make_results("first", make_scored("scifact", 0.6), make_scored("nfcorpus", 0.3))
    second = make_results("second", make_scored("scifact", 0.65), make_scored("fiqa", 0.4))
    compared = first.compare(second)
    assert compared.header == ("collection", "first", "second", "difference")
    one, other = (make_results(f"/home/me/{run}/model", make_scored("scifact", 0.6)) for run in ("one", "other"))
    assert one.compare(other).header == ("collection", "one/model", "other/model", "difference")
    assert compared.rows == (("scifact.test", "60.0", "65.0", "+5.0"), ("nfcorpus.test", "30.0", "", ""), ("fiqa.test", "", "40.0", ""))


def test_results_on_other_data_are_not_compared(make_scored: MakeCollection, make_results: MakeResults) -> None:
    first = make_results("first", make_scored("scifact", 0.6))
    with pytest.raises(InputError, match="different data"):
        first.compare(make_results("second", make_scored("scifact", 0.6, data_sha256="1" * 64)))
    with pytest.raises(InputError, match="at least one other"):
        first.compare()
    with pytest.raises(InputError, match=r"no collection in common \(.*first: scifact\.test; .*second: nfcorpus\.test\)"):
        first.compare(make_results("second", make_scored("nfcorpus", 0.6)))
    with pytest.raises(InputError, match="none of the results has the measure 'ndcg@7'"):
        first.compare(first, measure="ndcg@7")


def test_the_same_questions_are_one_collection_under_any_name(make_scored: MakeCollection, make_results: MakeResults) -> None:
    """Data in memory have no name of their own; systems of one name on them are told apart, not averaged."""
    data = {"data_sha256": "d" * 64}
    first = make_results("first", make_scored("scifact", 0.6, **data))
    other = make_results("second", make_scored("queries", 0.7, split="", **data))
    assert first.compare(other).rows == (("scifact.test", "60.0", "70.0", "+10.0"),)
    assert "2 systems on 1 collection." in render_markdown(results_report([first, other]))
    both = make_results("both", make_scored("scifact", 0.6, **data), make_scored("copy", 0.6, **data))
    assert [each.key for each in with_common_names([both])[0].collections] == ["scifact.test", "copy.test"]


def test_a_plot_has_a_bar_per_collection_and_system(make_scored: MakeCollection, make_results: MakeResults) -> None:
    pytest.importorskip("matplotlib")
    results = make_results("org/model", make_scored("scifact", 0.645, floor=0.665), make_scored("nfcorpus", 0.3))
    figure: Any = results.plot()
    shown = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert all(name in shown for name in ("model on scifact.test", "bm25 on scifact.test", "model on nfcorpus.test"))
    with pytest.raises(InputError, match="no collection has the measure 'ndcg@7'"):
        results.plot("ndcg@7")
    named, abbreviated = ([bar.get_width() for bar in results.plot(name).axes[0].patches] for name in ("recall@10", "R@10"))
    assert named == abbreviated
