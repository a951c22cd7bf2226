"""The layouts of the paper: its rows as published, our rows, and blanks where a number would not be comparable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from quiver.eval.metrics import DEFAULT
from quiver.eval.published import OVERVIEW_COLUMNS, TABLE_7, TABLE_8
from quiver.eval.report.compare import Significance, collections_by_key
from quiver.eval.report.paper import Layout, averages, paper_layouts, write_paper
from quiver.eval.results import CollectionResult, Results

MakeScored = Callable[..., CollectionResult]
MakeResults = Callable[..., Results]


@pytest.fixture
def beir(make_scored: MakeScored) -> Callable[..., list[CollectionResult]]:
    """All fifteen data sets of BEIR with one score; the forums of CQADupStack are twelve collections."""

    def make(score: float, *, msmarco: str) -> list[CollectionResult]:
        made = []
        for column in TABLE_7.columns:
            if column.data_set == "cqadupstack":
                made += [
                    make_scored(f"cqadupstack-{n}", score + (0.11 if n else -1.21) / 100, group="cqadupstack", group_size=12)
                    for n in range(12)
                ]
            else:
                made.append(make_scored(column.data_set, score, split=msmarco if column.data_set == "msmarco" else "test"))
        return made

    return make


def layout(layouts: Sequence[Layout], name: str) -> Layout:
    (found,) = [each for each in layouts if each.name == name]
    return found


def line(found: Layout, label: str) -> dict[str, float]:
    (row,) = [each for each in found.lines if each.label == label]
    return {title: cell for title, cell in zip(found.columns, row.cells, strict=True) if cell is not None}


def origins(found: Layout) -> list[str]:
    return [each.origin for each in found.lines]


def test_all_rows_of_the_paper_are_present(make_scored: MakeScored, make_results: MakeResults) -> None:
    results = [make_results("alpha", make_scored("scifact", 0.6)), make_results("beta", make_scored("scifact", 0.7), kind="colbert")]
    layouts = paper_layouts(results)
    assert [each.name for each in layouts] == ["table7", "table8", "table1"]
    for paper, ours in ((TABLE_7, "alpha"), (TABLE_8, "beta")):
        table = layout(layouts, f"table{paper.number}")
        assert [row.label for row in table.lines] == [*(row.name for row in paper.rows), "BM25 (pyserini)", ours]
        for row in paper.rows:
            assert line(table, row.name) == {**row.scores, "Average": row.average}
    assert origins(layout(layouts, "table1"))[:11] == ["paper"] * 11


def test_a_complete_row_has_an_average_and_a_difference(beir: Callable[..., list[CollectionResult]], make_results: MakeResults) -> None:
    table = layout(paper_layouts([make_results("alpha", *beir(0.4, msmarco="test"))], against="ModernBERT-base"), "table7")
    assert table.lines[-2].measured == "15 of 15"
    assert line(table, "alpha")["CQADupstack"] == pytest.approx(40.0)  # a mean over the forums, different from each score
    assert line(table, "alpha")["Average"] == pytest.approx(40.0)
    difference = line(table, "alpha minus ModernBERT-base")
    assert difference["NFCorpus"] == pytest.approx(40.0 - 23.7)
    assert difference["Quora"] == pytest.approx(40.0 - 85.9)
    assert difference["Average"] == pytest.approx(40.0 - 41.6)
    assert len(difference) == 16


@pytest.mark.parametrize("split", ["dev", "test"])
def test_msmarco_is_dev_as_beir_has_it_or_test_as_table_7_seems_to_have(
    beir: Callable[..., list[CollectionResult]], make_results: MakeResults, split: str
) -> None:
    layouts = paper_layouts(
        [make_results("alpha", *beir(0.4, msmarco=split)), make_results("beta", *beir(0.4, msmarco=split), kind="colbert")]
    )
    single, multiple = layout(layouts, "table7"), layout(layouts, "table8")
    assert line(single, "alpha")["MSMARCO"] == pytest.approx(40.0)
    assert single.lines[-1].measured == "15 of 15"
    assert any("TREC DL 2019" in note and "not comparable" in note for note in single.notes)
    assert ("MSMARCO" in line(multiple, "beta")) == (split == "dev")
    assert multiple.lines[-1].measured == ("15 of 15" if split == "dev" else "14 of 15")
    overview = layout(layouts, "table1")
    assert line(overview, "alpha") == {"DPR BEIR": pytest.approx(40.0)}
    assert line(overview, "beta") == ({"ColBERT BEIR": pytest.approx(40.0)} if split == "dev" else {})


def test_table_1_has_columns_for_domain_long_text_and_code(make_scored: MakeScored, make_results: MakeResults) -> None:
    languages = [make_scored(f"coir-codesearchnet-{n}", 0.1 * n, group="coir-codesearchnet", group_size=6) for n in range(6)]
    zero_shot = make_results("zero", make_scored("mldr-en", 0.3), *languages)
    tuned = make_results("tuned", make_scored("mldr-en", 0.5, in_domain=True), make_scored("coir-stackoverflow-qa", 0.7), languages[0])
    colbert = make_results("late", make_scored("mldr-en", 0.8), kind="colbert")
    table = layout(paper_layouts([zero_shot, tuned, colbert], against="ModernBERT-large"), "table1")
    assert table.columns == OVERVIEW_COLUMNS
    assert line(table, "zero") == {"DPR MLDR OOD": pytest.approx(30.0), "CSN": pytest.approx(25.0)}
    assert line(table, "tuned") == {"DPR MLDR ID": pytest.approx(50.0), "SQA": pytest.approx(70.0)}
    assert line(table, "late") == {"ColBERT MLDR OOD": pytest.approx(80.0)}
    assert line(table, "late minus ModernBERT-large") == {"ColBERT MLDR OOD": pytest.approx(80.0 - 80.4)}
    counts = {row.label: row.measured for row in table.lines if row.origin == "measured"}
    assert counts == {"zero": "MLDR 1 of 1, CSN 6 of 6", "tuned": "MLDR 1 of 1, CSN 1 of 6, SQA 1 of 1", "late": "MLDR 1 of 1"}


def test_superscripts_compare_measured_rows_only(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    low = {f"q{number}": number / 20 for number in range(9)}
    high = {query: score + 0.3 for query, score in low.items()}
    # The scores of the tables are those of results.json.
    measures = {name: {"measures": dict.fromkeys(DEFAULT, score)} for name, score in (("low", 0.2), ("high", 0.5))}
    folders = [
        make_folder(
            name,
            dict.fromkeys(("scifact", "cosqa"), scores),
            bm25={"scifact": low},
            changed=dict.fromkeys(("scifact", "cosqa"), measures[level]),
            kind=kind,
        )
        for name, scores, level, kind in (
            ("alpha", low, "low", "dense"),
            ("beta", high, "high", "dense"),
            ("gamma", high, "high", "colbert"),
        )
    ]
    write_paper(folders, tmp_path / "paper.md", against="ModernBERT-base")
    _, seven, eight, *_ = (tmp_path / "paper.md").read_text(encoding="utf-8").split("\n## ")
    rows = {line.split("|")[1].strip(): line for line in seven.splitlines() if line.startswith("| ")}
    # bm25 is A, alpha B, beta C; gamma, a ColBERT, is not in Table 7, and cosqa, which bm25 lacks, is not tested.
    assert "nothing is tested against them" in seven
    assert {label: line.count("<sup>") for label, line in rows.items() if "<sup>" in line} == {"C beta": 1}
    assert "50.0<sup>AB</sup>" in rows["C beta"]
    assert {"A bm25", "beta minus ModernBERT-base"} < rows.keys()
    assert "50.0<sup>A</sup>" in eight


def test_an_average_of_the_paper_has_superscripts_where_all_its_data_sets_were_tested(
    beir: Callable[..., list[CollectionResult]], make_results: MakeResults
) -> None:
    results = [make_results(name, *beir(score, msmarco="test")) for name, score in (("alpha", 0.4), ("beta", 0.5))]
    (name,) = {*averages(collections_by_key(results))} - {"average of Table 8"}
    assert name == "average of Table 7"
    assert len(averages(collections_by_key(results))[name]) == 15
    found = Significance({(name, "ndcg@10", "beta"): ["alpha"]}, "A rule.")
    layouts = paper_layouts(results, significance=found)
    seven = layout(layouts, "table7")
    (beta,) = [each for each in seven.lines if each.label == "beta"]
    average = seven.columns.index("Average")
    alpha = next(each.key for each in seven.lines if each.label == "alpha")
    assert alpha is not None
    assert [place for place, letters in enumerate(beta.better_than) if letters] == [average]
    assert beta.better_than[average] == (alpha.letter,)
    assert any(note.startswith("A rule. Published rows") for note in seven.notes)
    (overview,) = [each for each in layout(layouts, "table1").lines if each.label == "beta"]
    assert overview.better_than[OVERVIEW_COLUMNS.index("DPR BEIR")] == (alpha.letter,)
