"""The three formats of training data, read with `prepare_rows`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.docstrings import Pair, split_pairs
from quiver.retrieval.training.data import TrainingRows, prepare_rows, rows_of_pairs
from quiver.retrieval.training.recipe import STDLIB_DOCSTRINGS, DataSection

TRIPLET = ("positive", "negative")


def rows_of(section: DataSection, work: Path, seed: int = 1) -> list[dict[str, Any]]:
    return list(prepare_rows(section, work / "work", seed=seed))


def documents(row: dict[str, Any]) -> list[str]:
    return [row[name] for name in row if name.startswith("document_")]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.csv", "rows.csv.gz", "rows.TSV"])
def test_rows_of_texts_are_read_back(write: Callable[..., Path], tmp_path: Path, triplets: list[dict[str, Any]], name: str) -> None:
    rows = prepare_rows(DataSection(train=(str(write(name, triplets)),), document_fields=TRIPLET), tmp_path / "work", seed=0)
    assert list(rows) == [{"query": f"q{n}", "document_1": f"p{n}", "document_2": f"n{n}"} for n in range(7)]
    assert (len(rows), rows.documents_per_row, rows.scored, rows.counts.skipped) == (7, 2, False, 0)
    assert list(rows.texts()) == [text for row in triplets for text in row.values()]


def test_prepared_rows_are_used_again(write: Callable[..., Path], tmp_path: Path, triplets: list[dict[str, Any]]) -> None:
    section = DataSection(train=(str(write("rows.jsonl", triplets)),), document_fields=TRIPLET)
    first = prepare_rows(section, tmp_path / "work", seed=0)
    files = {path: path.stat().st_ino for path in (tmp_path / "work").rglob("*")}
    again = prepare_rows(section, tmp_path / "work", seed=0)
    assert {path: path.stat().st_ino for path in (tmp_path / "work").rglob("*")} == files
    assert (list(again), again.counts) == (list(first), first.counts)


def test_equal_data_have_equal_checksums_in_any_format(write: Callable[..., Path], tmp_path: Path, ids: DataSection) -> None:
    by_ids = prepare_rows(ids, tmp_path / "work", seed=0)
    texts = [
        {
            "query": f"query {n}",
            "docs": [f"document {n}", f"document {n + 1}"],
            "last": f"document {n + 5}",
            "scores": str([n + 0.5, 0.25, -1]),
        }
        for n in range(4)
    ]
    section = DataSection(train=("texts.jsonl",), document_fields=("docs.0", "docs.1", "last"), score_fields=("scores",))
    for name in ("texts.jsonl", "texts.parquet"):
        same = prepare_rows(section.replace(train=(str(write(name, texts)),)), tmp_path / "work", seed=0)
        assert (same.counts.sha256, same.scored, same.documents_per_row) == (by_ids.counts.sha256, True, 3)
        assert list(same) == list(by_ids)
    columns = [
        {"query": row["query"], "first": row["docs"][0], "second": row["docs"][1], "last": row["last"], "scores": row["scores"]}
        for row in texts
    ]
    section = section.replace(document_fields=("first", "second", "last"))
    for name in ("texts.csv", "texts.csv.gz", "texts.tsv", "columns.jsonl"):
        same = prepare_rows(section.replace(train=(str(write(name, columns)),)), tmp_path / "work", seed=0)
        assert (same.counts.sha256, list(same)) == (by_ids.counts.sha256, list(by_ids))
    section = section.replace(document_fields=("docs.0", "docs.1", "last"))
    sums = {by_ids.counts.sha256}
    for change in ({"query": "query  0"}, {"last": "document 6"}, {"scores": [0.5, 0.25, -1.0000001]}):
        path = write("other.jsonl", [{**texts[0], **change}, *texts[1:]])
        sums.add(prepare_rows(section.replace(train=(str(path),)), tmp_path / "work", seed=0).counts.sha256)
    sums.add(prepare_rows(section.replace(train=(str(write("order.jsonl", texts[::-1])),)), tmp_path / "work", seed=0).counts.sha256)
    assert len(sums) == 5


def test_rows_of_ids_are_resolved(ids: DataSection, tmp_path: Path) -> None:
    rows = prepare_rows(ids, tmp_path / "work", seed=0)
    assert rows[1] == {
        "query": "query 1",
        "document_1": "document 1",
        "document_2": "document 2",
        "document_3": "document 6",
        "scores": [1.5, 0.25, -1.0],
    }
    assert list(rows.texts())[:4] == ["query 0", "document 0", "document 1", "document 5"]


def test_each_source_of_rows_has_its_own_queries_and_documents(write: Callable[..., Path], tmp_path: Path) -> None:
    """Languages of CodeSearchNet count their functions from 1: an id names another text in each of them."""
    parts: dict[str, list[str]] = {"train": [], "queries": [], "documents": []}
    for language in ("go", "ruby"):
        parts["train"].append(str(write(f"{language}.jsonl", [{"query_id": f"q{n}", "document_ids": [f"c{n}"]} for n in (1, 2)])))
        texts = [{"query_id": f"q{n}", "document_id": f"c{n}", "text": f"{language} {n}"} for n in (1, 2)]
        parts["queries"].append(str(write(f"{language}-texts.parquet", texts)))
        parts["documents"].append(parts["queries"][-1])
    section = DataSection(format="ids", query_field="query_id", document_fields=("document_ids",), **parts)
    rows = prepare_rows(section, tmp_path / "work", seed=0)
    expected = [f"{language} {n}" for language in ("go", "ruby") for n in (1, 2)]
    assert list(rows) == [{"query": text, "document_1": text} for text in expected]
    shared = section.replace(train=parts["train"][:1])  # texts of one source of rows in several files
    with pytest.raises(InputError, match="have the same id and different texts"):
        prepare_rows(shared, tmp_path / "work", seed=0)
    write("ruby.jsonl", [{"query_id": "q3", "document_ids": ["c1"]}])
    with pytest.raises(InputError, match=r"ruby\.jsonl:1: query '2/q3' is not in .*go-texts\.parquet, .*ruby-texts\.parquet; in all 1 ids"):
        prepare_rows(section, tmp_path / "work", seed=0)


def test_missing_ids_are_counted_and_the_first_is_named(ids: DataSection, write: Callable[..., Path], tmp_path: Path) -> None:
    rows = [
        {"query_id": 0, "document_ids": ["d0", "d1"]},
        {"query_id": 1, "document_ids": ["d2", "d99", "d98"][:2]},
        {"query_id": 77, "document_ids": ["d97", "d3"]},
    ]
    path = write("train.jsonl", rows)
    section = ids.replace(score_fields=())
    with pytest.raises(InputError) as caught:
        prepare_rows(section, tmp_path / "work", seed=0)
    assert str(caught.value) == f"{path}:2: document 'd99' is not in {ids.documents[0]}; in all 3 ids of 2 rows have no text"
    write("train.jsonl", rows[2:])
    with pytest.raises(InputError, match=rf"^{path}:1: query '77' is not in {ids.queries[0]}; in all 2 ids of 1 rows have no text"):
        prepare_rows(section, tmp_path / "work", seed=0)
    assert [path.name for path in (tmp_path / "work").iterdir() if path.is_dir()] == []


def test_an_id_with_two_texts_is_refused(ids: DataSection, write: Callable[..., Path], tmp_path: Path) -> None:
    entries = [{"document_id": f"d{n % 9}", "text": f"document {n % 9}"} for n in range(12)]
    write("documents.jsonl.gz", entries)
    assert len(rows_of(ids, tmp_path)) == 4
    write("documents.jsonl.gz", [*entries, {"document_id": "d4", "text": "something else"}])
    with pytest.raises(InputError, match=r"documents\.jsonl\.gz: rows 5 and 13 have the same id and different texts"):
        rows_of(ids, tmp_path)


def test_blank_texts_are_excluded_by_id(ids: DataSection, write: Callable[..., Path], tmp_path: Path) -> None:
    entries = [{"document_id": f"d{n}", "text": "" if n in (1, 6) else f"document {n}"} for n in range(9)]
    path = write("documents.jsonl.gz", entries)  # the positive of row 1; a negative of rows 0 and 1
    with pytest.raises(InputError, match=rf"train.jsonl:2: the text of 'd1' in {path} is blank; .*data.short_rows: skip"):
        rows_of(ids.replace(documents_per_row=2), tmp_path)
    with pytest.raises(InputError, match=r"train.jsonl:1: the row has 2 documents \(and 1 blank or repeated ones\), 3 are needed"):
        rows_of(ids.replace(documents_per_row=3), tmp_path)
    rows = prepare_rows(ids.replace(short_rows="skip", documents_per_row=2), tmp_path / "work", seed=0)
    assert (len(rows), rows.counts.skipped, rows.counts.copies) == (3, 1, 1)
    assert (documents(rows[0]), rows[0]["scores"]) == (["document 0", "document 5"], [0.5, -1])


def test_copies_among_the_documents_of_a_row_are_excluded(write: Callable[..., Path], tmp_path: Path) -> None:
    rows = [
        {"query": "q0", "positive": "p", "negatives": ["a", "b", "c"], "scores": [4, 3, 2, 1]},
        {"query": "q1", "positive": "p", "negatives": [" p\n", "b", "b ", "", "c"], "scores": [9, 8, 7, 6, 5, 4]},
        {"query": "q2", "positive": "p", "negatives": ["p", "b", "p"], "scores": [1, 1, 1, 1]},
    ]
    path = write("rows.jsonl", rows)
    section = DataSection(train=(str(path),), document_fields=("positive", "negatives"), score_fields=("scores",), documents_per_row=3)
    with pytest.raises(InputError, match=r"rows.jsonl:3: the row has 2 documents \(and 2 blank or repeated ones\), 3 are needed; .*skip"):
        prepare_rows(section, tmp_path / "work", seed=0)
    kept = prepare_rows(section.replace(short_rows="skip"), tmp_path / "work", seed=0)
    assert [(documents(row), row["scores"]) for row in kept] == [(["p", "a", "b"], [4, 3, 2]), (["p", "b", "c"], [9, 7, 4])]
    assert (kept.counts.skipped, kept.counts.copies) == (1, 5)
    drawn = prepare_rows(section.replace(short_rows="skip", negatives="random"), tmp_path / "work", seed=0)
    assert list(drawn.texts()) == ["q0", "p", "a", "b", "c", "q1", "p", "b", "c"]


def test_several_positives_make_several_rows(write: Callable[..., Path], tmp_path: Path) -> None:
    """The fields of cfli/msmarco_train_m3 and of FlagEmbedding's own examples."""
    rows = [{"query": "q", "pos": ["a", "b"], "neg": ["n", "m"], "pos_scores": [3, 2], "neg_scores": [1, 0], "prompt": "", "type": "x"}]
    section = DataSection(
        train=(str(write("rows.jsonl", rows)),), document_fields=("pos", "neg"), score_fields=("pos_scores", "neg_scores"), positives="each"
    )
    assert rows_of(section, tmp_path) == [
        {"query": "q", "document_1": "a", "document_2": "n", "document_3": "m", "scores": [3, 1, 0]},
        {"query": "q", "document_1": "b", "document_2": "n", "document_3": "m", "scores": [2, 1, 0]},
    ]
    assert len(rows_of(section.replace(limit=1), tmp_path)) == 1


def test_short_rows_are_refused_or_skipped(write: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"query": f"q{n}", "positive": "p", "negatives": ["a", "b", "c", "d"][: n % 4]} for n in (2, 1, 3, 0)]
    path = write("rows.jsonl", [*rows, {"query": "q", "positive": None, "negatives": ["a", "b"]}, {"query": "r", "positive": "p"}])
    section = DataSection(train=(str(path),), document_fields=("positive", "negatives"), documents_per_row=3)
    with pytest.raises(InputError, match=rf"^{path}:2: the row has 2 documents, 3 are needed; .*data.short_rows: skip"):
        prepare_rows(section.replace(short_rows="error"), tmp_path / "work", seed=0)
    kept = prepare_rows(section.replace(short_rows="skip"), tmp_path / "work", seed=0)
    assert list(kept) == [{"query": f"q{n}", "document_1": "p", "document_2": "a", "document_3": "b"} for n in (2, 3)]
    assert kept.counts.skipped == 4
    with pytest.raises(InputError, match=r"data.train: no rows in .* \(6 skipped\)"):
        prepare_rows(section.replace(short_rows="skip", documents_per_row=9), tmp_path / "work", seed=0)


def test_sources_follow_each_other_and_each_is_checked(write: Callable[..., Path], tmp_path: Path, triplets: list[dict[str, Any]]) -> None:
    one, two = write("one.jsonl", triplets[:3]), write("two.parquet", triplets[3:])
    section = DataSection(train=(str(one), str(two)), document_fields=TRIPLET)
    assert [row["query"] for row in rows_of(section, tmp_path)] == [f"q{n}" for n in range(7)]
    write("two.parquet", [{"query": "q", "pos": "p"}])
    with pytest.raises(InputError, match=rf"^{two}:1: no field 'positive'; .*the row's fields are query, pos"):
        rows_of(section, tmp_path)


def test_rows_beyond_the_limit_are_not_read(write: Callable[..., Path], tmp_path: Path, triplets: list[dict[str, Any]]) -> None:
    path = write("rows.jsonl", triplets)
    path.write_bytes(path.read_bytes() + b"{broken")
    section = DataSection(train=(str(path),), document_fields=TRIPLET, limit=7)
    assert len(rows_of(section, tmp_path)) == 7
    with pytest.raises(InputError, match=r"rows.jsonl:8: malformed JSON"):
        rows_of(section.replace(limit=8), tmp_path)


def test_rows_are_shuffled_before_the_limit(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write("rows.jsonl", [{"query": f"q{n}", "positive": f"p{n}"} for n in range(3000)])
    section = DataSection(train=(str(path),), shuffle=True)
    orders = {seed: [row["query"] for row in rows_of(section, tmp_path, seed)] for seed in (1, 2)}
    assert orders[1] != orders[2]
    assert sorted(orders[1]) == sorted(orders[2]) == sorted(f"q{n}" for n in range(3000))
    limited = prepare_rows(section.replace(limit=40), tmp_path / "work", seed=1)
    assert [row["query"] for row in limited] == orders[1][:40]
    assert list(limited.texts())[::2] == orders[1][:40]


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    corpus = [
        {"_id": "d1", "title": "Wings", "text": "two of them"},
        {"_id": "d2", "text": "fins"},
        {"_id": "d3", "title": "", "text": "no"},
    ]
    queries = [{"_id": "q1", "text": "what flies"}, {"_id": "q2", "text": "what swims"}, {"_id": "q3", "text": "unjudged"}]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq2\td2\t1\nq1\td1\t2\nq1\td3\t0\nq2\td1\t1\n")
    return folder


def test_judgements_of_a_beir_folder_make_rows(beir: Path, tmp_path: Path) -> None:
    section = DataSection(train=(str(beir),), format="beir")
    expected = [("what swims", "fins"), ("what swims", "Wings two of them"), ("what flies", "Wings two of them")]
    assert [(row["query"], row["document_1"]) for row in rows_of(section, tmp_path)] == expected
    twice = section.replace(train=(str(beir), str(beir) + "/"), limit=4)
    assert [(row["query"], row["document_1"]) for row in rows_of(twice, tmp_path)] == [*expected, expected[0]]
    with pytest.raises(InputError, match=r"no split 'dev'; existing splits: train"):
        rows_of(section.replace(split="dev"), tmp_path)
    with pytest.raises(InputError, match="1 documents, 2 are needed"):
        rows_of(section.replace(documents_per_row=2, short_rows="error"), tmp_path)
    (beir / "qrels" / "train.tsv").write_text("q1\td9\t1\n")
    with pytest.raises(InputError, match=r"train.tsv:1: document 'd9' is not in the corpus"):
        rows_of(section, tmp_path)
    (beir / "qrels" / "train.tsv").write_text("q1\td1\t0\n")
    with pytest.raises(InputError, match="no rows in"):
        rows_of(section, tmp_path)


PAIRS: Sequence[Pair] = [Pair(f"m.f{n}:1", f"does {n}", f"def f{n}(): ...", f"m{n % 20}", f"f{n}", 1) for n in range(40)]


def test_mined_pairs_are_prepared(tmp_path: Path) -> None:
    rows = rows_of_pairs(PAIRS, tmp_path / "work")
    assert [(row["query"], row["document_1"]) for row in rows] == [(pair.query, pair.code) for pair in PAIRS]
    assert (
        rows_of_pairs(PAIRS[:-1], tmp_path / "work").counts.sha256
        != rows.counts.sha256
        == rows_of_pairs(PAIRS, tmp_path / "work").counts.sha256
    )
    with pytest.raises(InputError, match="no rows"):
        rows_of_pairs([], tmp_path / "work")

    def prepare(section: DataSection, seed: int) -> TrainingRows:
        return prepare_rows(section, tmp_path / "work", seed=seed, mine_pairs=lambda *, progress: list(PAIRS))

    section = DataSection(train=(STDLIB_DOCSTRINGS,))
    mined = prepare(section, 3)
    assert [row["query"] for row in mined] == [pair.query for pair in split_pairs(PAIRS).train]
    assert len(PAIRS) > len(mined) > 0.8 * len(PAIRS)
    assert len(prepare(section.replace(limit=5), 3)) == 5
    assert prepare(section, 4).counts.sha256 == mined.counts.sha256  # a query of dev or test is in no run, whatever its seed


def test_half_a_surrogate_pair_is_refused_in_its_row(write: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "q", "positive": "p"}\n{"query": "q", "positive": "\\ud800"}\n')
    with pytest.raises(InputError, match=r"rows.jsonl:2: 'positive' contains an unpaired surrogate; replace the invalid character"):
        rows_of(DataSection(train=(str(path),)), tmp_path)
