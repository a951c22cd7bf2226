"""Evaluations of an index or a run by files of queries and judgements, without a corpus, and by judgements of files instead of passages."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest

from quiver.encoder.errors import InputError
from quiver.eval.datasets.benchmarks import Benchmark
from quiver.eval.evaluation import evaluate
from quiver.eval.report.retrieval import write_report
from quiver.retrieval.data.corpus import load_collection, read_qrels, read_queries, read_run
from quiver.retrieval.index import BuildOptions, build_index, open_index
from quiver.retrieval.records import Document
from quiver.retrieval.search.retrievers import IndexSearcher, SharedModel

MakeCollection = Callable[..., Path]

PASSAGES = [
    ("birds.md", "a bird has two wings and flies"),
    ("birds.md", "an owl hunts at night"),
    ("birds.md", "a bird near the sea"),
    ("sea/fish.md", "a fish swims in the deep sea"),
    ("sea/fish.md", "the deep sea is dark"),
    ("sea/salt.md", "the sea is deep and salt"),
    ("stone.md", "granite is a hard stone"),
    ("stone.md", "a stone lies near the bird"),
    ("stone.md", "stone upon stone"),
]
ASKED = {"q1": "bird wings", "q2": "deep sea fish", "q3": "granite stone", "q4": "night, or dark sea"}
JUDGED = {"q1": {"birds.md": 2, "stone.md": 1}, "q2": {"sea/salt.md": 2, "sea/fish.md": 1}, "q3": {"birds.md": 1}, "q4": {"birds.md": 1}}


def passages(*, size: int = 3) -> list[Document]:
    """The passages; with a smaller ``size`` the last words of each are a passage of their own."""
    found = []
    for number, (file, text) in enumerate(PASSAGES):
        words = text.split()
        parts = [text] if size == 3 else [" ".join(words[:-size]), " ".join(words[-size:])]
        found += [Document(f"{file}#{number}.{part}", each, metadata={"file": file}) for part, each in enumerate(parts)]
    return found


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Queries and judgements of files of passages, as arguments of ``evaluate``."""
    judged = [(query, file, grade) for query, grades in JUDGED.items() for file, grade in grades.items()]
    return {
        "queries": write_csv(tmp_path / "questions.csv", ("id", "question"), list(ASKED.items())),
        "qrels": write_csv(tmp_path / "answers.csv", ("query", "file", "grade"), judged),
    }


def grouped(run: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The best score of the passages of each file."""
    found: dict[str, dict[str, float]] = {}
    for query, scores in run.items():
        best = found.setdefault(query, {})
        for passage, value in scores.items():
            file = passage.partition("#")[0]
            best[file] = max(value, best.get(file, value))
    return found


def check_scores(
    measures: Mapping[str, float], run: Mapping[str, Mapping[str, float]], judged: Mapping[str, Mapping[str, int]] = JUDGED
) -> None:
    """Compare with what pytrec_eval computes for a run of files."""
    pytrec_eval = pytest.importorskip("pytrec_eval")
    ours = {"ndcg_cut_10": "ndcg@10", "recall_10": "recall@10", "map": "map"}
    evaluator = pytrec_eval.RelevanceEvaluator(
        {query: dict(grades) for query, grades in judged.items()}, {"ndcg_cut.10", "recall.10", "map"}
    )
    scored = evaluator.evaluate({query: dict(documents) for query, documents in run.items()})
    for theirs, name in ours.items() if "recall@10" in measures else [("ndcg_cut_10", "ndcg@10")]:
        mean = sum(scored.get(query, {}).get(theirs, 0.0) for query in judged) / len(judged)
        assert measures[name] == pytest.approx(mean), name


def test_an_index_and_a_run_need_no_corpus(make_collection: MakeCollection, tmp_path: Path) -> None:
    folder = make_collection()
    build_index(load_collection(folder, "test").documents, "bm25", tmp_path / "words")
    expected = evaluate(None, folder, index=tmp_path / "words", out=tmp_path / "expected").collections[0]
    (folder / "corpus.jsonl").unlink()
    queries, qrels, run = folder / "queries.jsonl", folder / "qrels" / "test.tsv", tmp_path / "expected" / "runs" / "tiny.test.trec"
    named = {key for documents in (*read_run(run).values(), *read_qrels(qrels).values()) for key in documents}
    for found in (
        evaluate(None, folder, index=tmp_path / "words"),
        evaluate(open_index(tmp_path / "words"), folder),
        evaluate(index=tmp_path / "words", queries=queries, qrels=qrels),
        evaluate(index=open_index(tmp_path / "words"), queries=queries, qrels=qrels),
        evaluate(None, folder, qrels=qrels, run=run),
        evaluate(None, queries=queries, qrels=qrels, run=run),
    ):
        [collection] = found.collections
        assert collection.measures == expected.measures
        assert (collection.key, collection.queries) == ("tiny.test" if "." in collection.key else "tiny", expected.queries)
        assert collection.documents == (len(named) if found.system.kind == "run" else expected.documents)
        assert not collection.baselines


def test_the_texts_of_the_index_are_those_of_the_baseline_and_of_the_worst_queries(
    model: Any, make_collection: MakeCollection, tmp_path: Path
) -> None:
    folder = make_collection()
    documents = list(load_collection(folder, "test").documents)
    retriever = IndexSearcher(build_index(documents, model), SharedModel(model), "index")
    expected = evaluate(retriever, folder).collections[0]
    found = evaluate(retriever, queries=folder / "queries.jsonl", qrels=folder / "qrels" / "test.tsv").collections[0]
    assert [base.measures for base in found.baselines] == [base.measures for base in expected.baselines]
    assert (found.worst, found.documents) == (expected.worst, expected.documents)
    untitled = build_index(documents, model, options=BuildOptions(use_title=False))
    retriever = IndexSearcher(untitled, SharedModel(model), "index")
    result = evaluate(retriever, queries=folder / "queries.jsonl", qrels=folder / "qrels" / "test.tsv")
    assert not result.collections[0].use_title, "the index decides about titles where there is no corpus"


def test_what_is_wrong_with_an_index_or_its_judgements_is_said(
    files: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = build_index(passages(), "bm25", tmp_path / "words")
    with pytest.raises(InputError, match="they are values of the field 'file': add --group-by file"):
        evaluate(index, **files)
    with pytest.raises(InputError, match="nowhere: no such folder"):
        evaluate(index=tmp_path / "nowhere", **files)
    with pytest.raises(InputError, match="queries and qrels in memory, and documents if they are given, go together, and without data"):
        evaluate(index, queries=[], qrels=files["qrels"])
    for queries, qrels, message in (
        ({"q1": "which"}, {"q2": ["a"]}, "qrels:1: query 'q2' is not among the collection's queries"),
        ({"q1": 3}, {"q1": ["a"]}, "queries: must be a list, a data frame or a data set, got a mapping"),
        ({"q1": "which"}, {"q1": {"a": "good"}}, "qrels:1: the grade"),
        (["which"], [{"query": "which", "file": "a"}], "queries:1: must be a mapping from field to value, got a str"),
        ([{"a": "x", "b": "y"}], [{"query": "which", "file": "a"}], "queries:1: no field for the text of the queries"),
        ({"q1": "which"}, {}, "qrels: no judgements"),
        ({"q1": "which"}, {"q1": 1}, "qrels: 'q1' must have {document id: grade} or ids of relevant documents, got int"),
        ({"q1": "which"}, {"q1": [{"id": "a"}]}, "qrels: 'q1' must have"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(index, queries=queries, qrels=qrels)  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"unknown collection 'query': .*in memory are given as queries= and qrels= \(--queries, --qrels\)"
    ):
        evaluate(index, pd.DataFrame([{"query": "which", "file": "a"}]))
    caplog.clear()
    assert evaluate(index, queries={"q1": "which"}, qrels={"q1": {"birds.md": 0}}, group_by="file").headline == 0
    assert "queries: no judgement has a grade above 0, so nothing is relevant and every score is 0" in caplog.text
    for rename, message in (
        ({"nowhere": "query"}, "--rename nowhere=query: no such field; the fields are"),
        ({"id": "kye"}, "--rename id=kye: a field of queries and judgements is called _id, id, .*, not 'kye'"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(index, **files, rename=rename)
    with pytest.raises(InputError, match="--rename nowhere=grade: no such field"):
        evaluate(index, queries=[{"id": 1, "text": "a"}], qrels=[{"query_id": 1, "file": "a"}], rename={"nowhere": "grade"})
    asked = write_csv(tmp_path / "asked.csv", ("question", "answer"), [("bird wings", "birds.md")])
    with pytest.raises(InputError, match=r"no field for the id of the queries; .* queries need none beside .*\(--rename FIELD=document\)"):
        evaluate(index, queries=asked, qrels=asked, group_by="file")
    headless = write_csv(tmp_path / "headless.csv", ("q1", "birds.md", "1"), [("q2", "fish.md", "1")])
    for given, example in (({"qrels": headless}, "query_id,document_id,grade"), ({"queries": headless}, "id,query")):
        read_as = f"first line of headless.csv is read as the names of its columns: if it is data, put a line such as {example} before it"
        with pytest.raises(InputError, match=rf"headless\.csv:2: no field for .* are q1, birds\.md, 1; the {read_as}$"):
            evaluate(index, **(files | given), group_by="file")
    rows = [{"question": "bird wings", "answer": "birds.md"}]
    for table in (asked, rows):
        with pytest.raises(InputError, match="'answer' would be the text of the queries and the document that answers them"):
            evaluate(index, queries=table, qrels=table, rename={"question": "query_id"}, group_by="file")
        assert evaluate(index, queries=table, qrels=table, rename={"answer": "document"}, group_by="file").collections[0].queries == 1
    with pytest.raises(InputError, match=r"rename \(--rename\) names fields of queries"):
        evaluate(index, rename={"a": "query"})


def test_fields_of_other_names_and_questions_in_memory(files: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = build_index(passages(), "bm25", tmp_path / "words")
    expected = evaluate(index, **files, group_by="file").collections[0].measures
    rows = [(ASKED[query], file, grade) for query, grades in JUDGED.items() for file, grade in grades.items()]
    names, rename = ("Frage", "Datei", "Note"), {"Frage": "query", "Datei": "document", "Note": "grade"}
    table = write_csv(tmp_path / "asked.csv", names, rows)
    frame = pd.DataFrame(rows, columns=names)
    datasets.DatasetDict({"test": datasets.Dataset.from_pandas(frame)}).save_to_disk(tmp_path / "saved")
    queries = {query: ASKED[query] for query in JUDGED}
    for asked, judged, others in (
        (table, table, rename),
        (tmp_path / "saved", tmp_path / "saved", rename),
        (frame, frame, rename),
        (frame, frame.convert_dtypes().assign(note=pd.NA), rename),
        (queries, {query: {file: np.int64(grade) for file, grade in grades.items()} for query, grades in JUDGED.items()}, {}),
        (datasets.Dataset.from_pandas(frame), frame.to_dict("records"), rename),
        (queries, JUDGED, {}),
    ):
        assert evaluate(index, queries=asked, qrels=judged, rename=others, group_by="file").collections[0].measures == expected
    assert not any("grade" in record.getMessage() for record in caplog.records)
    # A grade of another name is not passed over in silence.
    evaluate(index, queries=table, qrels=table, rename={"Frage": "query", "Datei": "document"}, group_by="file")
    assert "every document named is relevant; if 'Note' holds the grades, pass --rename Note=grade" in caplog.text
    relevant = {query: [file for file, grade in grades.items() if grade] for query, grades in JUDGED.items()}
    binary = {query: {file: min(grade, 1) for file, grade in grades.items()} for query, grades in JUDGED.items()}
    found = [evaluate(index, queries=queries, qrels=each, group_by="file").collections[0].measures for each in (relevant, binary)]
    assert found[0] == found[1]


def test_a_judged_file_that_is_gone_counts_as_not_found(files: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a refresh; most of them gone would be a mistake."""
    index = build_index(passages(), "bm25", tmp_path / "words")
    in_memory = evaluate(build_index(passages(), "bm25"), **files, group_by="file")
    assert in_memory.headline == evaluate(index, **files, group_by="file").headline
    with pytest.raises(InputError, match="pass only one index"):
        evaluate(index, index=tmp_path / "words", **files)
    with files["qrels"].open("a", encoding="utf-8") as file:
        file.write("q1,gone.md,2\n")
    found = evaluate(index, **files, group_by="file", out=tmp_path / "results")
    assert "1 of the 5 judged documents of questions, such as 'gone.md', are not values of the field 'file'" in caplog.text
    assert "they count as not found" in caplog.text
    queries = list(read_queries(files["queries"]))
    by_hand = grouped(index.search([query.text for query in queries], 100).to_run([query.id for query in queries]))
    check_scores(found.collections[0].measures, by_hand, JUDGED | {"q1": JUDGED["q1"] | {"gone.md": 2}})
    shown = {document.id: document.text for worst in found.collections[0].worst for document in worst.wanted}
    assert (shown["gone.md"], shown["stone.md"] != shown["gone.md"]) == ("(not among the documents)", True)


def test_files_are_ranked_by_their_best_passages(files: dict[str, Path], tmp_path: Path) -> None:
    index = build_index(passages(), "bm25", tmp_path / "words")
    found = evaluate(None, index=tmp_path / "words", **files, group_by="file", out=tmp_path / "results")
    queries = list(read_queries(files["queries"]))
    by_hand = grouped(index.search([query.text for query in queries], 100).to_run([query.id for query in queries]))
    [collection] = found.collections
    assert read_run(tmp_path / "results" / "runs" / "questions.trec") == {
        query: pytest.approx(scores) for query, scores in by_hand.items() if scores
    }
    check_scores(collection.measures, by_hand)
    assert (collection.key, collection.documents, collection.queries) == ("questions", 4, 4)
    assert found.system.label.endswith(", grouped by file")
    write_report([tmp_path / "results"], tmp_path / "report.md")
    assert "grouped by file" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert {shown.id for worst in collection.worst for shown in worst.wanted} <= {file for file, _ in PASSAGES}
    kept = evaluate(None, index=tmp_path / "words", **files, group_by="file", k=2)
    best = {query: dict(sorted(scores.items(), key=lambda each: (each[1], each[0]))[-2:]) for query, scores in by_hand.items()}
    assert max(map(len, by_hand.values())) > 2, "k counts files"
    check_scores(kept.collections[0].measures, best)


def test_a_collection_with_a_corpus_is_judged_by_the_values_of_a_field(make_collection: MakeCollection, tmp_path: Path) -> None:
    """The documents of a collection, cut into passages that name their document."""
    folder = make_collection()
    documents = list(load_collection(folder, "test").documents)
    cut = [
        Document(f"{document.id}#{part}", text, document.title, {"document": document.id})
        for document in documents
        for part, text in enumerate((document.text[:12], document.text[12:]))
    ]
    build_index(cut, "bm25", tmp_path / "words")
    found = evaluate(None, Benchmark.of_folder(folder), index=tmp_path / "words", group_by="document").collections[0]
    assert (found.documents, found.judgements) == (len(documents), sum(map(len, read_qrels(folder / "qrels" / "test.tsv").values())))
    assert found.measures["recall@10"] > 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "bm25"}, r"a model and BM25 rank the texts of a folder with corpus\.jsonl"),
        ({"index": "words"}, r"4 of the 4 judged documents of questions, such as 'birds\.md', are not in the index; .*--group-by"),
        ({"index": "words", "group_by": "page"}, "no document has the field 'page'; the fields are file"),
        ({"index": "plain", "group_by": "file"}, "was built with --no-text"),
        ({"run": "run.trec", "group_by": "file"}, r"group_by \(--group-by\) file: needs an index"),
        ({"model": "bm25", "group_by": "file"}, r"group_by \(--group-by\) file: needs an index"),
        ({"run": "run.trec", "fuse": ["bm25"]}, "BM25 ranks texts, and only the ids of the documents are known"),
        ({"index": "words", "split": "dev"}, "have no split"),
        ({"index": "words", "data": ["a", "b"]}, "is one local collection folder"),
        ({"index": "words", "data": "beir/scifact"}, "is one local collection folder"),
        ({"index": "words", "qrels": None}, "go together"),
        ({"index": "words", "qrels": "nowhere.csv"}, "nowhere.csv: no such file"),
    ],
)
def test_what_cannot_be_evaluated_without_a_corpus_is_refused(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    build_index(passages(), "bm25", "words")
    build_index(passages(), "bm25", "plain", options=BuildOptions(store_text=False))
    Path("run.trec").write_text("q1 Q0 birds.md 1 2.0 x\n", encoding="utf-8")
    given: dict[str, Any] = {"model": None, **files, **arguments}
    with pytest.raises(InputError, match=message):
        evaluate(given.pop("model"), **given)


def test_ids_of_frames_with_gaps_are_integers_and_repeated_clicks_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_index([Document("1", "owls have wings"), Document("2", "trout have fins")], "bm25", tmp_path / "words")
    queries = pd.DataFrame({"query_id": [1.0, 2.0], "text": ["wings", "fins"]})
    clicks = pd.DataFrame({"query_id": [1.0, 1.0, 2.0], "document_id": np.array([1, 1, 2], np.float32), "grade": [1.0, 2.0, 1.0]})

    def ask(**changed: Any) -> Any:
        return evaluate(index=tmp_path / "words", queries=queries, **{"qrels": clicks, "duplicate_judgements": "max", **changed})

    assert ask().collections[0].measures["ndcg@10"] == 1.0
    assert "1 of 3 judgements repeat a query and document; the highest grade was taken" in caplog.text
    with pytest.raises(InputError, match=r"qrels:2: document '1' is already judged for query '1' on line 1, with grade 1 instead of 2"):
        ask(duplicate_judgements="error")
    with pytest.raises(InputError, match=r"duplicate judgements \(--duplicate-judgements\) must be error, max or sum, got 'last'"):
        ask(duplicate_judgements="last")
    with pytest.raises(InputError, match=r"qrels:2: the query id is blank"):
        ask(qrels=pd.DataFrame({"query_id": [1.0, None], "document_id": ["1", "2"]}))
    with pytest.raises(InputError, match=r"qrels:1: the query id must be a string or an integer, got 1\.5"):
        ask(qrels=pd.DataFrame({"query_id": [1.5], "document_id": ["1"]}))
    assert ask(qrels={1: np.array([1, 1]), 2: np.array(["2"])}).collections[0].judgements == 2
    with pytest.raises(InputError, match=r"qrels: 1 must have .* or ids of relevant documents, got Series$"):
        ask(qrels={1: pd.Series([1], index=["1"])})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"queries": {"q": "owl \ud83d"}}, r"queries:1: 'text' contains an unpaired surrogate; replace the invalid character"),
        ({"qrels": {"q": {"a\udce9": 1}}}, r"qrels:1: the document id contains an unpaired surrogate"),
        ({"name": "\udce9"}, r"the name contains an unpaired surrogate"),
        ({"collection_name": "\udce9"}, r"a name of a collection \(--collection-name\) contains an unpaired surrogate"),
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_comes_in(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    index = build_index([Document("a", "owls have wings")], "bm25", tmp_path / "words")
    with pytest.raises(InputError, match=message):
        evaluate(index=index, **{"queries": {"q": "owl"}, "qrels": {"q": {"a": 1}}, **changed}, out=tmp_path / "out")
