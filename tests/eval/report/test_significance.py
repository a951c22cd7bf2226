"""Superscripts of reports: which systems a score is significantly better than."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path

import pytest

from quiver.eval.metrics import holm, paired_tests
from quiver.eval.report.compare import compare_results, significance
from quiver.eval.report.retrieval import write_report
from quiver.eval.results import FILE, read_results
from tests.eval.paired import compare_parts

MakeFolder = Callable[..., Path]
Queries = Mapping[str, float]

LOW = [0.10, 0.25, 0.30, 0.45, 0.50, 0.15, 0.20, 0.35]
GAINS = [0.05, 0.10, 0.15, 0.20, 0.25, 0.30, 0.35, 0.40]


def of(scores: Sequence[float]) -> dict[str, float]:
    return {f"q{number}": score for number, score in enumerate(scores)}


def three(queries: int) -> dict[str, dict[str, float]]:
    """Systems on the same queries: beta gains on one and loses on another as much as alpha; gamma beats both on all of them."""
    mixed = [score + change for score, change in zip(LOW, [0.04, -0.04, 0, 0, 0, 0, 0, 0], strict=True)]
    high = [score + gain for score, gain in zip(LOW, GAINS, strict=True)]
    return {name: of(scores[:queries]) for name, scores in (("alpha", LOW), ("beta", mixed), ("gamma", high))}


def exact_p(first: Queries, second: Queries) -> float:
    """The share of all assignments of signs with a sum at least as far from 0, by enumeration."""
    differences = [second[query] - first[query] for query in first]
    sums = [abs(sum(sign * each for sign, each in zip(signs, differences, strict=True))) for signs in product((1, -1), repeat=len(first))]
    return sum(each >= abs(sum(differences)) - 1e-12 for each in sums) / len(sums)


def better(folders: Sequence[Path], measure: str = "ndcg@10") -> dict[tuple[str, str], list[str]]:
    found = significance(folders, [read_results(folder) for folder in folders]).better
    return {(name, label): list(others) for (name, of_measure, label), others in found.items() if of_measure == measure}


def cells(text: str, row: str) -> list[str]:
    """Cells of the first Markdown row of a system."""
    line = next(each for each in text.splitlines() if each.startswith("|") and row in each.split("|")[1])
    return [cell.strip() for cell in line.split("|")[1:-1]]


@pytest.mark.parametrize(("queries", "expected"), [(8, ["alpha", "beta"]), (7, ["alpha", "beta"]), (6, None)])
def test_superscripts_by_hand(queries: int, expected: list[str] | None, make_folder: MakeFolder) -> None:
    systems = three(queries)
    folders = [make_folder(name, {"scifact": scores}) for name, scores in systems.items()]
    p = {(a, b): exact_p(systems[a], systems[b]) for a, b in combinations(systems, 2)}
    # All gains are of one sign: 2 of 2**n assignments. With six queries p is below 0.05, but three times p is not.
    assert p["alpha", "gamma"] == p["beta", "gamma"] == 2 / 2**queries
    assert p["alpha", "beta"] == 1.0
    assert (max(sorted(holm(list(p.values())))[:2]) < 0.05) == (expected is not None)
    for measure in ("ndcg@10", "map"):
        found = better(folders, measure)
        assert found == ({("scifact.test", "gamma"): expected} if expected else {})


def test_scipy_finds_the_same_p() -> None:
    stats = pytest.importorskip("scipy.stats")
    systems = three(8)
    for first, second in combinations(systems.values(), 2):
        differences = [second[query] - first[query] for query in first]
        other = stats.permutation_test((differences,), sum, permutation_type="samples", n_resamples=float("inf")).pvalue
        ((_, p),) = paired_tests([([list(first.values())], [list(second.values())])])
        assert p == pytest.approx(other)


def test_the_test_is_that_of_compare(make_folder: MakeFolder) -> None:
    systems = three(8)
    one, other = ({"a": systems[name], "b": of(LOW[:5])} for name in ("alpha", "gamma"))
    compared = compare_parts(one, other, weights=[0.25, 0.75])
    sides = [[list(part.values()) for part in parts.values()] for parts in (one, other)]
    assert paired_tests([(sides[0], sides[1])], weights=[0.25, 0.75]) == [(pytest.approx(compared.difference), compared.p)]
    folders = [make_folder(name, {"scifact": systems[name]}) for name in ("alpha", "gamma")]
    (pairing,) = compare_results(*folders).pairings
    assert pairing.measures["ndcg@10"].verdict == "better"
    assert better(folders)["scifact.test", "gamma"] == ["alpha"]
    assert better(folders[::-1])["scifact.test", "gamma"] == ["alpha"]


def test_a_baseline_of_other_documents_has_a_row_and_tests_of_its_own(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Such as BM25 over passages beside BM25 over whole documents."""
    systems = three(8)
    floors = {"alpha": systems["alpha"], "beta": systems["gamma"]}
    folders = [make_folder(name, {"scifact": systems[name]}, bm25={"scifact": floor}) for name, floor in floors.items()]
    results = json.loads((folders[1] / FILE).read_text())
    results["collections"][0]["baselines"][0]["measures"]["ndcg@10"] = 0.75
    (folders[1] / FILE).write_text(json.dumps(results))
    assert better(folders) == {("scifact.test", "bm25 of beta"): ["bm25", "alpha", "beta"]}
    write_report(folders, tmp_path / "report.md")
    rows = {name: cells((tmp_path / "report.md").read_text(), name)[1] for name in ("bm25 of beta", "alpha")}
    assert {name: cell[:5] for name, cell in rows.items()} == {"bm25 of beta": "**75.", "alpha": "50.00"}
    assert [pairing.system for pairing in compare_results("bm25", *folders).pairings] == ["alpha", "beta"]  # each beside its own


def test_averages_of_the_same_data_sets_are_one_test(make_folder: MakeFolder) -> None:
    names = ["scifact", "cosqa", "fiqa"]
    systems = {name: dict.fromkeys(names, of(scores)) for name, scores in (("alpha", LOW[:3]), ("beta", [each + 0.1 for each in LOW[:3]]))}
    folders = [make_folder(name, scores) for name, scores in systems.items()]
    results = [read_results(folder) for folder in folders]
    first, last = ["scifact.test", "cosqa.test"], ["cosqa.test", "fiqa.test"]
    # Six queries, all gains of one sign: p = 2/64 is below 0.05, and twice as much is not.
    once, twice, two = (
        significance(folders, results, averages=averages)
        for averages in ({"one": first}, {"one": first, "same": first}, {"one": first, "other": last})
    )
    assert once.better == {("one", "ndcg@10", "beta"): ["alpha"]}
    assert twice.better == {(name, "ndcg@10", "beta"): ["alpha"] for name in ("one", "same")}
    assert "on 3 data sets, and apart on the average, for" in once.method
    assert twice.method == once.method
    assert two.better == {}
    assert "on 3 data sets, and apart on 2 averages, for" in two.method


def test_every_format_shows_superscripts_and_names_the_test(make_folder: MakeFolder, tmp_path: Path) -> None:
    folders = [make_folder(name, {"scifact": scores}) for name, scores in three(8).items()]
    texts = {}
    for suffix in ("md", "html", "tex"):
        write_report(folders, tmp_path / f"report.{suffix}")
        texts[suffix] = (tmp_path / f"report.{suffix}").read_text(encoding="utf-8")
        for words in ("paired sign-flip test", "correction over 3 pairs of systems"):
            assert words in texts[suffix]
    assert texts["md"].count("<sup>AB</sup>") == 1 + 7  # the data set; all measures of the collection
    assert texts["html"].count(">AB</sup>") == 1 + 7
    assert r"\textsuperscript{AB}" in texts["tex"]
    assert r"\textsuperscript{\phantom{AA}}" in texts["tex"]
    assert re.search(r"^C gamma &", texts["tex"], flags=re.MULTILINE)
