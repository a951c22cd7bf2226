"""Comparisons of results folders: numbers equal eval.metrics, and everything omitted is listed."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiver.cli.main import main
from quiver.encoder.errors import InputError
from quiver.eval.metrics import DEFAULT, holm
from quiver.eval.report.compare import Comparison, Pairing, compare_results, comparison_report, write_comparison
from quiver.eval.report.formats import render_markdown
from tests.eval.paired import compare_parts, compare_queries

MakeFolder = Callable[..., Path]


def _scores(seed: int, queries: int = 40, shift: float = 0.0) -> dict[str, float]:
    rng = random.Random(0)
    noise = random.Random(seed)
    return {f"q{number:02d}": min(1.0, max(0.0, rng.random() + shift + noise.uniform(-0.2, 0.2))) for number in range(queries)}


def _rows(report: str, heading: str) -> list[list[str]]:
    """Cells of the first table after a heading, without header and rule."""
    section = report[report.index(heading) :]
    lines = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[0].splitlines()][2:]


def _of(pairings: Sequence[Pairing], system: str, data_set: str) -> Pairing:
    (found,) = (pairing for pairing in pairings if (pairing.system, pairing.data_set) == (system, data_set))
    return found


def test_two_folders_are_compared(make_folder: MakeFolder) -> None:
    first = {"scifact": _scores(1), "cosqa": _scores(2, 30)}
    second = {"cosqa": _scores(3, 30), "scifact": _scores(4, shift=0.1)}
    comparison = compare_results(make_folder("alpha", first), make_folder("beta", second))
    assert (comparison.baseline, comparison.systems, comparison.unpaired) == ("alpha", ("beta",), ())
    assert [(each.data_set, each.parts, each.queries) for each in comparison.pairings] == [
        ("scifact.test", ("scifact.test",), 40),
        ("cosqa.test", ("cosqa.test",), 30),
    ]
    raw = []
    for pairing, name in zip(comparison.pairings, first, strict=True):
        assert list(pairing.measures) == list(DEFAULT)
        paired, expected = pairing.measures["ndcg@10"].paired, compare_queries(first[name], second[name])
        assert replace(paired, gained=(), lost=()) == replace(expected, gained=(), lost=())
        assert [change.query for change in paired.gained] == [change.query for change in expected.gained]
        assert {change.part for change in (*paired.gained, *paired.lost)} == {f"{name}.test"}
        assert pairing.measures["map"].paired.difference == pytest.approx(paired.difference / 2)
        raw.append(paired.p)
    assert [pairing.measures["ndcg@10"].corrected for pairing in comparison.pairings] == holm(raw)
    assert {measured.family for pairing in comparison.pairings for measured in pairing.measures.values()} == {2}


def test_a_group_counts_once_in_the_average(make_folder: MakeFolder) -> None:
    forums = {name: {"group": "forums", "group_size": 2} for name in ("forum-a", "forum-b")}
    first = {"forum-a": _scores(1, 10), "scifact": _scores(2, 40), "forum-b": _scores(3, 20)}
    second = {"forum-a": _scores(4, 10), "scifact": _scores(5, 40), "forum-b": _scores(6, 20)}
    # The second folder holds local copies, which are not marked as parts of a group.
    comparison = compare_results(make_folder("alpha", first, changed=forums), make_folder("beta", second))
    assert [(each.data_set, each.parts) for each in comparison.pairings] == [
        ("forums", ("forum-a.test", "forum-b.test")),
        ("scifact.test", ("scifact.test",)),
    ]
    names = ("forum-a", "forum-b")
    pooled = compare_parts({name: first[name] for name in names}, {name: second[name] for name in names})
    group = _of(comparison.pairings, "beta", "forums")
    assert group.queries == 30
    assert group.measures["ndcg@10"].paired.p == pooled.p
    assert group.measures["ndcg@10"].paired.interval == pooled.interval
    (average,) = comparison.averages
    assert (average.data_set, average.queries) == ("average of 2 data sets", 70)
    both = average.measures["ndcg@10"]
    apart = [pairing.measures["ndcg@10"].paired.difference for pairing in comparison.pairings]
    assert both.paired.difference == pytest.approx(sum(apart) / 2, abs=1e-15)
    assert (both.corrected, both.family) == (both.paired.p, 1)


SHALLOW = ("ndcg@10", "map", "mrr@10", "recall@10", "p@10")


def test_p_values_are_corrected_over_the_comparisons_that_have_the_measure(make_folder: MakeFolder, tmp_path: Path) -> None:
    def both(source: str, seed: int) -> Path:
        """A folder with one collection scored to depth 1000 and one to depth 10."""
        folder = make_folder(source, {"scifact": _scores(seed), "cosqa": _scores(seed + 10)}, changed={"cosqa": {"k": 10}})
        content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        for name in set(DEFAULT) - set(SHALLOW):
            del content["collections"][1]["measures"][name]
        (folder / "results.json").write_text(json.dumps(content), encoding="utf-8")
        return folder

    comparison = compare_results(both("alpha", 1), both("beta", 2), both("gamma", 3))
    assert [(each.data_set, len(each.measures)) for each in comparison.pairings] == [("scifact.test", 7), ("cosqa.test", 5)] * 2
    deep = [each.measures["recall@100"] for each in comparison.pairings if "recall@100" in each.measures]
    assert [each.corrected for each in deep] == holm([each.paired.p for each in deep])
    assert ({each.family for each in deep}, comparison.pairings[0].measures["map"].family) == ({2}, 4)
    assert [tuple(each.measures) for each in comparison.averages] == [SHALLOW, SHALLOW]
    report = render_markdown(comparison_report(comparison))
    assert "covers 4 comparisons of each measure, fewer if some systems lack the measure, but not" in report
    assert "fewer" not in render_markdown(
        comparison_report(compare_results(tmp_path / "alpha", make_folder("delta", {"scifact": _scores(9)})))
    )


def test_collections_of_only_one_system_are_listed(make_folder: MakeFolder) -> None:
    both = _scores(1)
    comparison = compare_results(make_folder("alpha", {"a": both, "b": both}), make_folder("beta", {"b": both, "c": both}))
    assert [each.data_set for each in comparison.pairings] == ["b.test"]
    assert [(each.collection, each.has, each.lacks) for each in comparison.unpaired] == [
        ("a.test", "alpha", "beta"),
        ("c.test", "beta", "alpha"),
    ]
    assert _rows(render_markdown(comparison_report(comparison)), "## Not compared") == [
        ["a.test", "alpha", "beta"],
        ["c.test", "beta", "alpha"],
    ]


def _clear_and_unclear(make_folder: MakeFolder) -> Comparison:
    same = _scores(1)
    up = {query: score + 0.1 for query, score in same.items()}
    barely = {query: score + (0.02 if number % 2 else -0.019) for number, (query, score) in enumerate(same.items())}
    down = {query: score - 0.1 for query, score in same.items()}
    return compare_results(
        make_folder("alpha", {"up": same, "barely": same, "down": same}), make_folder("be*ta", {"up": up, "barely": barely, "down": down})
    )


def test_a_difference_that_is_not_significant_gives_a_caution(make_folder: MakeFolder) -> None:
    report = render_markdown(comparison_report(_clear_and_unclear(make_folder)))
    rows = {row[0]: row for row in _rows(report, "## nDCG@10")}
    assert {name: row[6] for name, row in rows.items()} == {
        "up.test": "better",
        "barely.test": "not significant",
        "down.test": "worse",
        "average of 3 data sets": "not significant",
    }
    assert rows["up.test"][4:] == ["+10.00", "+10.00 to +10.00", "better", r"\< 0.0001", r"\< 0.0001", "40 / 0 / 0"]
    cautions = [line for line in report.splitlines() if line.startswith("**Caution:**")]
    assert len(cautions) == 1
    assert (
        r"difference between be\*ta and alpha is not significant on barely.test (+0.05 points over 40 queries, corrected p 0."
        in cautions[0]
    )
    assert "average of 3 data sets (" in cautions[0]
    assert "Holm's correction covers 3 comparisons of each measure" in report


def test_every_format_and_the_terminal_give_the_verdict(
    make_folder: MakeFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = _clear_and_unclear(make_folder)
    verdicts = [each.measures["ndcg@10"].verdict for each in (*comparison.pairings, *comparison.averages)]
    assert sorted(verdicts) == ["better", "not significant", "not significant", "worse"]
    for suffix in (".md", ".html", ".tex"):
        file = tmp_path / f"comparison{suffix}"
        write_comparison(comparison, file)
        text = file.read_text(encoding="utf-8")
        # Cells with nothing but a verdict.
        shown = re.findall(r"(?:\| |>|& )(better|worse|not significant)(?: \||<| &| \\\\)", text)
        assert shown[:4] == verdicts, suffix
    monkeypatch.setattr(sys, "argv", ["quiver", "report", "compare", str(tmp_path / "alpha"), str(tmp_path / "be*ta")])
    main()
    assert re.findall("better|worse|unclear", capsys.readouterr().out) == [each.replace("not significant", "unclear") for each in verdicts]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data_sha256": "e" * 64}, r"scifact\.test is different data in .*beta and in .*alpha"),
        ({"k": 100}, r"scored with k=1000 in .*alpha and k=100 in .*beta"),
        ({"use_title": False}, r"scored with use_title=True in .*alpha and use_title=False in"),
        ({"exclude_self": True}, r"scored with exclude_self=False in .*alpha and exclude_self=True in"),
        (
            {"split": "dev", "data_sha256": "e" * 64},
            r"nothing to compare: no collection was scored for .*: alpha on scifact\.test; beta on scifact\.dev",
        ),
        ({"per_query": None}, r"beta: results\.json names no file with scores per query for scifact\.test"),
        ({"queries": 41}, "holds scores of 40 queries, but results.json says 41"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(changed: Mapping[str, Any], message: str, make_folder: MakeFolder) -> None:
    first = make_folder("alpha", {"scifact": _scores(1)})
    second = make_folder("beta", {"scifact": _scores(2)}, changed={"scifact": changed})
    with pytest.raises(InputError, match=message):
        compare_results(first, second)


def test_different_queries_and_invalid_scores_are_refused(make_folder: MakeFolder, tmp_path: Path) -> None:
    first = make_folder("alpha", {"scifact": {"a": 0.5, "b": 0.5}})
    with pytest.raises(InputError, match=r"hold scores of different queries of scifact\.test"):
        compare_results(first, make_folder("beta", {"scifact": {"a": 0.5, "c": 0.5}}))
    with pytest.raises(
        InputError, match=r"the ndcg@10 of query 'b' is missing or not a number; type: quiver evaluate .* --out .*gamma --overwrite"
    ):
        compare_results(first, make_folder("gamma", {"scifact": {"a": 0.5, "b": float("nan")}}))
    with pytest.raises(InputError, match="at least one folder"):
        compare_results(first)
    with pytest.raises(InputError, match="no such folder"):
        compare_results(first, tmp_path / "nowhere")
