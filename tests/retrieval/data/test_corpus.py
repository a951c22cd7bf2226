"""Readers of collections: accepted forms, and errors that name file and line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import SPACE, load_collection, read_documents, read_qrels, read_queries, read_run, write_run
from quiver.retrieval.records import Document, Query


def lines(path: Path, *rows: str | bytes) -> Path:
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else row.encode() for row in rows) + b"\n")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "birds"
    (root / "qrels").mkdir(parents=True)
    lines(
        root / "corpus.jsonl",
        '{"_id": "d1", "title": "Wing", "text": "flies"}',
        '{"_id": "d2", "title": "T", "text": " "}',
        '{"_id": "d3", "text": "c"}',
    )
    lines(root / "queries.jsonl", '{"_id": "q2", "text": "b"}', '{"_id": "q9", "text": "z"}', '{"_id": "q1", "text": "a"}')
    lines(root / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", "q1\td1\t2", "q2\td3\t0", "q2\td1\t-1")
    lines(root / "qrels" / "dev.tsv", "q9\td2\t1")
    return root


def test_documents_of_all_forms_are_read(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "c.jsonl",
        '{"_id": "a", "title": "t", "text": "x", "metadata": {"year": 1}}',
        '{"id": 7, "title": null, "text": ""}',
        "",
        '{"_id": "c", "id": "other", "text": "\\ud83d\\ude00 \u2028"}',
    )
    assert list(read_documents(path)) == [
        Document("a", "x", "t", {"year": 1}),
        Document("7", "", ""),
        Document("c", "\U0001f600 \u2028", "", {"id": "other"}),
    ]


def test_gzip_and_folder_give_the_same_documents(tmp_path: Path) -> None:
    plain = lines(tmp_path / "corpus.jsonl", '{"_id": "a", "text": "x"}')
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz" / "corpus.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_documents(plain)) == list(read_documents(tmp_path)) == list(read_documents(tmp_path / "gz")) == [Document("a", "x")]
    (tmp_path / "corpus.jsonl.gz").write_bytes(b"")
    with pytest.raises(InputError, match=r"both corpus\.jsonl and corpus\.jsonl\.gz"):
        list(read_documents(tmp_path))


GOOD = '{"_id": "a", "text": "x"}'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "malformed JSON"),
        ("[" * 100_000, "malformed JSON"),
        ('["a"]', "expected a JSON object"),
        ('{"text": "x"}', "'_id' (or 'id') must be a string or an integer, got nothing"),
        ('{"_id": null, "text": "x"}', "got nothing"),
        ('{"_id": true, "text": "x"}', "got true"),
        ('{"_id": 1.5, "text": "x"}', "got 1.5"),
        ('{"_id": " ", "text": "x"}', "the id is blank"),
        ('{"_id": "", "id": "b", "text": "x"}', "the id is blank"),
        ('{"_id": "b"}', "'text' must be a string, got nothing"),
        ('{"_id": "b", "text": 3}', "'text' must be a string, got 3"),
        ('{"_id": "b", "text": "x", "title": ["y"]}', "'title' must be a string"),
        ('{"_id": "b", "text": "\\ud83d"}', "'text' contains an unpaired surrogate; replace the invalid character"),
        ('{"_id": "a", "text": "y"}', "id 'a' is already used on line 1"),
        (b'{"_id": "b", "text": "\xe9"}', "not UTF-8"),
    ],
)
def test_a_bad_document_names_file_and_line(tmp_path: Path, bad: str | bytes, message: str) -> None:
    path = lines(tmp_path / "c.jsonl", GOOD, "", bad)
    with pytest.raises(InputError, match=re.escape(f"{path}:3: ") + ".*" + re.escape(message)):
        list(read_documents(path))


@pytest.mark.parametrize(
    ("bad", "message"), [("q2", "expected 2 columns"), ("q2\ta\tb", "got 3"), ("\ta", "the id is blank"), ("q1\tb", "used on line 1")]
)
def test_a_bad_query_line_names_file_and_line(tmp_path: Path, bad: str, message: str) -> None:
    path = lines(tmp_path / "q.tsv", "q1\ta", bad)
    with pytest.raises(InputError, match=re.escape(f"{path}:2: ") + ".*" + message):
        list(read_queries(path))


def test_queries_and_judgements_are_read_from_every_kind_of_table(tmp_path: Path) -> None:
    asked = [{"qid": 1, "lang": "en", "Question": "what, then?"}, {"qid": 2, "lang": "en", "Question": "why"}]
    judged = [{"question_id": 1, "file": "a.md", "relevance": 2}, {"question_id": 2, "file": "b.md", "relevance": 0}]
    lines(tmp_path / "q.csv", "qid,lang,Question", '1,en,"what, then?"', "2,en,why")
    lines(tmp_path / "q.tsv", "qid\tlang\tQuestion", "1\ten\twhat, then?", "2\ten\twhy")
    lines(tmp_path / "q.jsonl", *map(json.dumps, asked))
    (tmp_path / "q.json").write_text(json.dumps(asked), encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist(asked), tmp_path / "q.parquet")
    for suffix in ("csv", "tsv", "jsonl", "json", "parquet"):
        assert list(read_queries(tmp_path / f"q.{suffix}")) == [Query("1", "what, then?"), Query("2", "why")], suffix
    lines(tmp_path / "a.csv", "question_id,file,relevance", "1,a.md,2", "2,b.md,0")
    lines(tmp_path / "a.jsonl", *map(json.dumps, judged))
    parquet.write_table(pyarrow.Table.from_pylist(judged), tmp_path / "a.parquet")
    for suffix in ("csv", "jsonl", "parquet"):
        assert read_qrels(tmp_path / f"a.{suffix}") == {"1": {"a.md": 2}, "2": {"b.md": 0}}, suffix
    assert read_qrels(lines(tmp_path / "b.csv", "file;query", "a.md;1", "b.md;1")) == {"1": {"a.md": 1, "b.md": 1}}


def test_a_row_may_have_a_list_of_documents_and_a_query_several_rows(tmp_path: Path) -> None:
    asked = [{"question": "what flies", "relevant": ["owl.md", "bat.md"]}, {"question": "what swims", "relevant": ["trout.md"]}]
    table = lines(tmp_path / "asked.jsonl", *map(json.dumps, asked))
    found = load_collection(None, "asked", queries=table, qrels=table)
    assert found.qrels == {"1": {"owl.md": 1, "bat.md": 1}, "2": {"trout.md": 1}}
    table = lines(tmp_path / "asked.csv", "query_id,query,passage_id,relevance", "a,what flies,p1,2", "a,what flies,p2,1", "b,why,p1,0")
    found = load_collection(None, "asked", queries=table, qrels=table)
    assert (found.queries, found.qrels) == ((Query("a", "what flies"), Query("b", "why")), {"a": {"p1": 2, "p2": 1}, "b": {"p1": 0}})
    for header, first in (("id,question,file", "7,what flies,owl.md"), ("_id,text,file,note", "7,what flies,owl.md,x")):
        found = load_collection(None, "asked", queries=lines(table, header, first), qrels=table)
        assert (found.queries, found.qrels) == ((Query("7", "what flies"),), {"7": {"owl.md": 1}}), header
    for header, first in (("question,file,note", "what flies,owl.md,seen"), ("question,file,lang,note", "what flies,owl.md,en,seen")):
        found = load_collection(None, "asked", queries=lines(table, header, first), qrels=table)
        assert (found.queries, found.qrels) == ((Query("1", "what flies"),), {"1": {"owl.md": 1}}), header
    lines(table, "query_id,query,passage_id", "a,what flies,p1", "a,what swims,p2")
    with pytest.raises(InputError, match="id 'a' is already used on line 2"):
        list(read_queries(table))


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ";"), ("tsv", "\t")])
def test_one_table_of_questions_and_answering_files_needs_no_ids(tmp_path: Path, suffix: str, separator: str) -> None:
    rows = (("question", "file"), ("what flies", "owl.md"), ("what swims", "trout.md"), ("what flies", "bat.md"))
    table = lines(tmp_path / f"asked.{suffix}", *map(separator.join, rows))
    collection = load_collection(None, "asked", queries=table, qrels=table)
    assert collection.queries == (Query("1", "what flies"), Query("2", "what swims"))
    assert collection.qrels == {"1": {"owl.md": 1, "bat.md": 1}, "2": {"trout.md": 1}}
    others = lines(tmp_path / "others.csv", "query,document", "what flies,heron.md", "why,no.md")
    with pytest.raises(InputError, match=r"others\.csv:3: query 'why' is not among the collection's queries; add what"):
        load_collection(None, "asked", queries=table, qrels=others)
    by_id = lines(tmp_path / "by_id.csv", "query,document", "q1,heron.md")
    with pytest.raises(
        InputError, match=rf"asked\.{suffix}: no field for the id of the queries, and .*by_id\.csv does not name their texts"
    ):
        load_collection(None, "asked", queries=table, qrels=by_id)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        (
            "q.csv",
            ["number,lang,topic", "1,en,owls"],
            "q.csv:2: no field for the text of the queries; call it text, query, question or query_text (--rename FIELD=query); the fields",
        ),
        ("q.csv", ["number,lang,text", "1,en,owls"], "q.csv:2: no field for the id of the queries; call it _id, id, query-id, "),
        ("q.csv", ["id,text"], "q.csv: no queries, only a header"),
        ("a.csv", ["id,year,document", "1,2020,a"], "a.csv:2: no field for the query's id; call it query-id, "),
        ("a.csv", ["query,where,when", "1,a,2"], "a.csv:2: no field for the document's id; call it corpus-id, "),
        ("a.csv", ["query,file,grade", "1,a,2", "1,b,much"], 'a.csv:3: the grade must be an integer of at most 9 digits, got "much"'),
        ("a.csv", ["query,file", "1,a", "1,"], "a.csv:3: the document id is blank"),
        ("a.csv", ["query,file"], "a.csv: no judgements, only a header"),
    ],
)
def test_a_table_without_what_is_needed_names_the_fields(tmp_path: Path, name: str, rows: list[str], message: str) -> None:
    path = lines(tmp_path / name, *rows)
    with pytest.raises(InputError, match=re.escape(message)):
        list(read_queries(path)) if name.startswith("q") else read_qrels(path)


@pytest.mark.parametrize(
    "rows", [["query-id\tcorpus-id\tscore", "q 1\td1\t1", "q 1\td2\t-1", "q2\td1\t+3"], ["q 1\td1\t1", "q 1\td2\t-1", "q2\td1\t3\r"]]
)
def test_qrels_are_read_with_and_without_header(tmp_path: Path, rows: list[str]) -> None:
    assert read_qrels(lines(tmp_path / "test.tsv", *rows)) == {"q 1": {"d1": 1, "d2": -1}, "q2": {"d1": 3}}


@pytest.mark.parametrize("separator", [" ", "\t", "   "])
def test_qrels_in_trec_format_are_read(tmp_path: Path, separator: str) -> None:
    path = lines(tmp_path / "qrels.txt", *(separator.join(row) for row in (("q1", "0", "d1", "1"), ("q1", "0", "d2", "0"))))
    assert read_qrels(path) == {"q1": {"d1": 1, "d2": 0}}


@pytest.mark.parametrize(
    ("rows", "line", "message"),
    [
        (["q1\td1\tone"], 1, 'the grade must be an integer of at most 9 digits, got "one"'),
        (["query-id\tcorpus-id\tscore", "q1\td1\tscore"], 2, 'the grade must be an integer of at most 9 digits, got "score"'),
        (["q1\td1\t1", "query-id\tcorpus-id\tscore"], 2, "must be an integer"),
        (["q1\td1\t1.5"], 1, "must be an integer"),
        (["q1\td1\t1000000000"], 1, "at most 9 digits"),
        (["q1\td1\t-" + "1" * 400], 1, "at most 9 digits"),
        (["q1\td1\t1", "q1\td2\t" + "0" * 5000], 2, f'got "{"0" * 39}...'),
        (["q1\td1\t1_0"], 1, "must be an integer"),
        (["q1\td1\t\u0661"], 1, "must be an integer"),
        (["q1\td1\t1", "q1\td2"], 2, "expected 3 (query, document, grade; tab-separated) columns, got 2"),
        (["q1 0 d1 1", "q1\td2\t1"], 2, "got 3"),
        (["q1 d1 1"], 1, "expected 3 tab-separated or 4"),
        (["q1\td1\t1", "q1\td1\t0"], 2, "document 'd1' is already judged for query 'q1' on line 1"),
        (["q1\t \t1"], 1, "the document id is blank"),
        (["\td1\t1"], 1, "the query id is blank"),
    ],
)
def test_bad_qrels_name_file_and_line(tmp_path: Path, rows: list[str], line: int, message: str) -> None:
    path = lines(tmp_path / "test.tsv", *rows)
    with pytest.raises(InputError, match=re.escape(f"{path}:{line}: ") + ".*" + re.escape(message)):
        read_qrels(path)


def test_a_collection_has_the_judged_queries_in_file_order(folder: Path) -> None:
    collection = load_collection(folder, "test")
    assert (collection.name, collection.split, collection.empty_texts) == ("birds", "test", 1)
    assert [document.id for document in collection.documents] == ["d1", "d2", "d3"]
    assert collection.queries == (Query("q2", "b"), Query("q1", "a"))
    assert collection.qrels == {"q1": {"d1": 2}, "q2": {"d3": 0, "d1": -1}}


def test_the_documents_of_a_collection_stay_on_disk(folder: Path) -> None:
    documents = load_collection(folder, "test").documents
    assert len(documents) == 3
    assert list(documents) == list(documents)
    lines(folder / "corpus.jsonl", '{"_id": "d1", "text": "flies"}', '{"_id": "d2", "text": " "}')
    with pytest.raises(InputError, match=r"corpus\.jsonl: changed while in use: 3 documents at first, 2 now"):
        list(documents)
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(InputError, match=r"no corpus\.jsonl or"):
        list(documents)


@pytest.mark.parametrize("split", ["../qrels/test", "sub/test", "/etc/passwd", "..", ".", "test/"])
def test_a_split_must_be_a_name_and_not_a_path(folder: Path, split: str) -> None:
    lines(folder / "qrels" / "..tsv", "q1\td1\t1")
    (folder / "qrels" / "sub").mkdir()
    lines(folder / "qrels" / "sub" / "test.tsv", "q1\td1\t1")
    with pytest.raises(InputError, match="a split must be the name of a file" if split != ".." else "no split"):
        load_collection(folder, split)


def test_a_missing_split_is_reported_with_the_existing_ones(folder: Path) -> None:
    with pytest.raises(InputError, match=r"no split 'train'; existing splits: dev, test"):
        load_collection(folder, "train")


def test_an_unknown_query_in_the_qrels_is_reported_with_its_line(folder: Path) -> None:
    path = lines(folder / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", "q1\td1\t1", "qX\td1\t1")
    message = f"{path}:3: query 'qX' is not among the collection's queries; add what is missing, or leave out its judgements"
    with pytest.raises(InputError, match=re.escape(message)):
        load_collection(folder, "test")


def test_all_missing_files_of_a_collection_are_named_at_once(tmp_path: Path) -> None:
    message = (
        r"no corpus\.jsonl or corpus\.jsonl\.gz in this folder; no queries\.jsonl or .*; .*test\.tsv: no split 'test'; .*no qrels/\*\.tsv"
    )
    with pytest.raises(InputError, match=message):
        load_collection(tmp_path, "test")
    lines(tmp_path / "test.tsv", "q1\td1\t1")
    message = r": no queries\.jsonl or .*; .*test\.tsv: no split 'test'; move test\.tsv to qrels/, or name it with --qrels"
    with pytest.raises(InputError, match=message):
        load_collection(tmp_path, "test", needs_corpus=False)


def test_judged_documents_that_are_missing_stay_judged_unless_all_are(folder: Path) -> None:
    lines(folder / "qrels" / "test.tsv", "q1\td1\t1", "q1\tdX\t1", "q2\tdY\t1")
    collection = load_collection(folder, "test")
    assert collection.missing == ("dX", "dY")
    assert collection.qrels == {"q1": {"d1": 1, "dX": 1}, "q2": {"dY": 1}}
    lines(folder / "qrels" / "test.tsv", "q1\tdoc1\t1", "q2\tdoc2\t1")
    message = r"test\.tsv:1: document 'doc1' is not in the corpus, and none of the 2 judged documents is; .* ids, such as 'd1'"
    with pytest.raises(InputError, match=message):
        load_collection(folder, "test")


CLICKS = {
    "a.csv": (",", "time,query_id,document_id,grade"),
    "a.jsonl": ("", "time,query_id,document_id,grade"),
    "a.tsv": ("\t", ""),
    "a.trec": (" ", ""),
}


def clicks(folder: Path, name: str, rows: list[tuple[str, str, str]]) -> Path:
    """A log of judgements in one of the formats, with a time in tables."""
    separator, header = CLICKS[name]
    timed = [(f"2026-01-0{number}", *row) for number, row in enumerate(rows, start=1)]
    if name.endswith(".jsonl"):
        return lines(folder / name, *(json.dumps(dict(zip(header.split(","), row, strict=True))) for row in timed))
    made = {"a.csv": timed, "a.tsv": rows, "a.trec": [(query, "0", document, grade) for query, document, grade in rows]}[name]
    return lines(folder / name, *[header] * bool(header), *(separator.join(row) for row in made))


@pytest.mark.parametrize("name", CLICKS)
def test_repeated_judgements_are_kept_once_or_give_the_grade_that_is_asked_for(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = clicks(tmp_path, name, [("q", "a", "1"), ("q", "a", "1"), ("q", "b", "0"), ("q", "a", "1")])
    assert read_qrels(path) == read_qrels(path, "max") == {"q": {"a": 1, "b": 0}}
    assert [record.getMessage() for record in caplog.records][:1] == [f"{path}: 2 of 4 judgements repeat a query and document; kept once"]
    assert read_qrels(path, "sum") == {"q": {"a": 3, "b": 0}}
    path = clicks(tmp_path, name, [("q", "a", "1"), ("q", "a", "3")])
    with pytest.raises(InputError, match=r": document 'a' is already judged for query 'q' on line \d, with grade 1 instead of 3; .*"):
        read_qrels(path)
    assert (read_qrels(path, "max"), read_qrels(path, "sum")) == ({"q": {"a": 3}}, {"q": {"a": 4}})


@pytest.mark.parametrize("name", CLICKS)
def test_grades_may_be_floats_without_a_fraction(tmp_path: Path, name: str) -> None:
    path = clicks(tmp_path, name, [("q", "a", "1.0"), ("q", "b", "2.00"), ("q", "c", "-1.")])
    assert read_qrels(path) == {"q": {"a": 1, "b": 2, "c": -1}}
    with pytest.raises(InputError, match=r': the grade must be an integer of at most 9 digits, got "0\.5"'):
        read_qrels(clicks(tmp_path, name, [("q", "a", "1.0"), ("q", "b", "0.5")]))


def test_grades_may_have_a_decimal_comma(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("query_id;document;grade\nq;a;1,0\nq;b;2,00\n", encoding="utf-8")
    assert read_qrels(path) == {"q": {"a": 1, "b": 2}}
    for text in ("1,000", "1,5"):
        path.write_text(f"query_id;document;grade\nq;a;{text}\n", encoding="utf-8")
        with pytest.raises(InputError, match=rf'the grade must be an integer of at most 9 digits, got "{text}"'):
            read_qrels(path)


IDS = ["a\u00a0b", "at 10.00\u202fAM.txt", "\u3000x", "y\u2028z", "n\u0085l", "v\x0bt", "f\x0cf", "s\x1cs", "\u2003"]


def test_ids_may_hold_any_white_space_but_tabs_and_line_ends(tmp_path: Path) -> None:
    run = {key: {other: float(score) for score, other in enumerate(reversed(IDS), start=1)} for key in IDS}
    write_run(run, tmp_path / "r.trec", tag="t")
    assert read_run(tmp_path / "r.trec") == run
    judged = [key for key in IDS if key.strip()]
    written = [key.replace(" ", SPACE) for key in judged]
    rows = [f"{key}  0 \t {key} 1 " for key in written]
    assert read_qrels(lines(tmp_path / "q.txt", *rows)) == {key: {key: 1} for key in judged}
    for key in ("two\tcolumns", "two\nlines", "", SPACE):
        with pytest.raises(InputError, match="which a TREC run cannot hold"):
            write_run({"q": {key: 1.0}}, tmp_path / "r.trec", tag="t")


@pytest.mark.data
def test_the_real_collections_load(quiver_data: Path) -> None:
    sizes = {}
    for corpus in sorted(quiver_data.glob("*/corpus.jsonl")):
        collection = load_collection(corpus.parent, "test")
        sizes[collection.name] = (len(collection.documents), len(collection.queries))
        assert {query.id for query in collection.queries} == set(collection.qrels)
        assert json.loads(corpus.read_text(encoding="utf-8").split("\n", 1)[0])["_id"] == next(iter(collection.documents)).id
    assert sizes == {
        "cosqa": (6267, 500),
        "cranfield": (1400, 225),
        "designdocs_long": (2322, 1190),
        "pycodesearch": (11406, 2000),
        "scifact": (5183, 300),
        "tldr_nl2cmd": (4571, 3730),
    }
