"""Evaluations of runs, indexes, fusions and re-rankings: the numbers of their parts, combined by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.evaluation import evaluate
from quiver.eval.metrics import score
from quiver.eval.rankers import index_truncated
from quiver.eval.report.compare import compare_results
from quiver.eval.report.retrieval import reported_folders, results_report, write_report
from quiver.retrieval.data.corpus import load_collection, read_run
from quiver.retrieval.index import build_index, delete_documents, open_index
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ModelOptions
from quiver.retrieval.search.retrievers import FusedRetriever, IndexSearcher, OpenIndexes, SharedModel
from quiver.retrieval.search.search import Fusion, fuse_runs
from tests.retrieval.models.small import make_colbert, make_tokenizer

MakeCollection = Callable[..., Path]


def test_a_run_scores_what_the_system_that_wrote_it_scores(model: Any, make_collection: MakeCollection, tmp_path: Path) -> None:
    folder = make_collection()
    expected = evaluate(model, folder, out=tmp_path / "model").collections[0]
    for run in (tmp_path / "model" / "runs" / "tiny.test.trec", tmp_path / "model" / "runs"):
        found = evaluate(None, folder, run=run, name="given")
        assert found.collections[0].measures == expected.measures
        assert (found.system.kind, found.system.label, found.collections[0].index.kind) == ("run", "given", "run")


def test_an_index_is_searched_by_its_own_model(model: Any, make_collection: MakeCollection) -> None:
    folder = make_collection()
    documents = list(load_collection(folder, "test").documents)
    retriever = IndexSearcher(build_index(documents, model), SharedModel(model), "index")
    found, expected = evaluate(retriever, folder), evaluate(model, folder)
    assert found.collections[0].measures == expected.collections[0].measures
    assert found.collections[0].index.kind == "exact"
    lacking = IndexSearcher(build_index(documents[1:], model), SharedModel(model), "index")
    with pytest.raises(InputError, match=f"document '{documents[0].id}' of tiny.test is not in the index"):
        evaluate(lacking, folder)


def test_a_fusion_is_that_of_the_runs_of_its_parts(model: Any, make_collection: MakeCollection, tmp_path: Path) -> None:
    folder, fusion = make_collection(), Fusion(weights=(1, 2))
    evaluate(model, folder, out=tmp_path / "model")
    found = evaluate(model, folder, fuse=["bm25"], fusion=fusion, candidates=100, name="hybrid", out=tmp_path / "hybrid")
    parts = [read_run(tmp_path / "model" / "runs" / f"tiny.test{part}.trec") for part in ("", ".bm25")]
    collection = load_collection(folder, "test")
    by_hand = score(collection.qrels, fuse_runs(parts, fusion)).means
    assert found.collections[0].measures == {name: pytest.approx(by_hand[name]) for name in found.collections[0].measures}
    left_out = {"recall@1000", "map"}
    assert by_hand.keys() - found.collections[0].measures.keys() == left_out, "a fusion of 100 candidates has no rank 1000, as MAP has"
    assert (found.collections[0].k, found.collections[0].kept) == (1000, 100)
    assert found.collections[0].index.parameters == {"method": "rrf", "constant": 60.0, "weights": "1, 2", "candidates": 100}
    # The report that a first evaluation wrote takes the second system, and remembers both.
    page = tmp_path / "model" / "report.md"
    write_report([tmp_path / "model"], page)
    write_report([*reported_folders(page), tmp_path / "hybrid"], page)
    assert [each.resolve() for each in reported_folders(page)] == [tmp_path / "model", tmp_path / "hybrid"]
    text = page.read_text(encoding="utf-8")
    assert "hybrid" in text
    assert "the first 1,000 are kept for each query, the first 100 of a fusion or a re-ranking" in text


def test_a_run_that_is_not_deep_enough_for_a_measure_is_cautioned(
    make_collection: MakeCollection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_collection()
    whole = evaluate("bm25", folder, out=tmp_path / "bm25").collections[0]
    lines = (tmp_path / "bm25" / "runs" / "tiny.test.trec").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "run").write_text("".join(line for line in lines if int(line.split()[3]) <= 2), encoding="utf-8")
    found = evaluate(None, folder, run=tmp_path / "run", out=tmp_path / "shallow").collections[0]
    assert (found.kept, found.documents, found.named_by) == (2, whole.documents, "")
    assert found.caution == (
        "the run holds at most 2 documents per query; MAP and measures with a deeper cut count the relevant documents beyond as not found"
    )
    assert f"tiny.test: {found.caution}" in caplog.text
    write_report([tmp_path / "shallow"], tmp_path / "report.md")
    assert f"run: {found.caution}." in (tmp_path / "report.md").read_text(encoding="utf-8")
    (folder / "corpus.jsonl").unlink()
    named = evaluate(None, folder, run=tmp_path / "run").collections[0]
    assert named.named_by == " named by the run and the judgements"
    assert named.measures == found.measures


@pytest.mark.parametrize(
    ("line", "message"),
    [("q9 Q0 d1 1 1.0 x", "none of its 1 queries is judged"), ("q1 Q0 nowhere 1 1.0 x", "document 'nowhere' is not in tiny.test")],
)
def test_a_run_of_another_collection_is_refused(make_collection: MakeCollection, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "run").write_text(line + "\n")
    with pytest.raises(InputError, match=message):
        evaluate(None, make_collection(), run=tmp_path / "run")


def test_what_cannot_be_evaluated_is_refused(model: Any, make_collection: MakeCollection, tmp_path: Path) -> None:
    folder = make_collection()
    for arguments, message in (
        ({}, "nothing to evaluate"),
        ({"fuse": ["bm25"]}, "nothing to evaluate"),
        ({"index": tmp_path, "run": tmp_path}, "pass only one of"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(None, folder, **arguments)
    with pytest.raises(InputError, match="a fusion needs a second system"):
        evaluate(model, folder, fusion=Fusion())
    (tmp_path / "other.md").write_text("text\n")
    with pytest.raises(InputError, match="not a report"):
        reported_folders(tmp_path / "other.md")


def test_options_are_refused_where_nothing_uses_them(model: Any, make_collection: MakeCollection, tmp_path: Path) -> None:
    folder = make_collection()
    build_index(load_collection(folder, "test").documents, "bm25", tmp_path / "words")
    no_model = "no model encodes the collection, so leave out engine"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"engine": "ivf-dense"}, no_model),
        ({"dtype": "bfloat16"}, no_model),
        ({"batch_tokens": 8}, no_model),
        ({"model_options": ModelOptions(query_prompt="q")}, no_model),
        ({"effort": "fast"}, "BM25 and runs have no search effort"),
    ]
    systems: list[dict[str, Any]] = [{"index": tmp_path / "words"}, {"fuse": ["bm25", str(tmp_path / "words")]}]
    for (given, message), system in itertools.product(cases, systems):
        with pytest.raises(InputError, match=message):
            evaluate(None, folder, **system, **given)
    with pytest.raises(InputError, match="candidates are those of a fusion or a re-ranking"):
        evaluate(model, folder, candidates=50)


def test_an_index_reports_the_documents_that_its_model_truncated(model: Any, make_collection: MakeCollection, tmp_path: Path) -> None:
    folder = make_collection(documents={"long": ("", "owl " * 3000), "short": ("", "owls")}, qrels={"q1": {"long": 1}})
    documents = list(load_collection(folder, "test").documents)
    index = build_index(documents, model, tmp_path / "index")
    cut = evaluate(IndexSearcher(index, SharedModel(model), "index"), folder).collections[0].truncated
    assert (cut.documents, cut) == (1, evaluate(model, folder).collections[0].truncated)
    delete_documents(tmp_path / "index", ["long"])
    assert index_truncated(open_index(tmp_path / "index")) == 0


def test_a_fused_retriever_scores_what_the_same_fusion_by_name_scores(model: Any, make_collection: MakeCollection, tmp_path: Path) -> None:
    folder, fusion = make_collection(), Fusion(weights=(1, 2))
    documents = list(load_collection(folder, "test").documents)
    index = build_index(documents, model, tmp_path / "index")
    build_index(documents, "bm25", tmp_path / "words")
    opened = OpenIndexes()
    parts = IndexSearcher(index, SharedModel(model), "index"), opened.vectors(tmp_path / "words")
    found = evaluate(FusedRetriever(parts, fusion, 5), folder)
    named = evaluate(model, folder, fuse=[tmp_path / "words"], fusion=fusion, candidates=5)
    assert found.collections[0].measures == named.collections[0].measures
    assert "recall@10" not in found.collections[0].measures, "5 candidates have no rank 10"
    assert found.collections[0].index.parameters == {"method": "rrf", "constant": 60.0, "weights": "1, 2", "candidates": 5}
    assert (found.system.kind, found.system.source) == ("fusion", "index + words")
    other = evaluate(FusedRetriever(parts, Fusion(weights=(2, 1)), 5), folder)
    assert other.system.fingerprint != found.system.fingerprint
    results_report([found, other])  # both may stand in one report
    lacking = IndexSearcher(build_index(documents[1:], model), SharedModel(model), "lacking")
    with pytest.raises(InputError, match="is not in the index"):
        evaluate(FusedRetriever([parts[0], lacking]), folder)


def test_a_re_ranking_by_an_index_of_other_documents_is_refused(make_collection: MakeCollection, tmp_path: Path) -> None:
    folder = make_collection()
    documents = list(load_collection(folder, "test").documents)
    make_colbert(make_tokenizer([document.text for document in documents], max_length=64)).save_pretrained(tmp_path / "colbert")
    build_index(documents, str(tmp_path / "colbert"), tmp_path / "whole")
    build_index(documents[1:], str(tmp_path / "colbert"), tmp_path / "lacking")
    with pytest.raises(InputError, match=f"document '{documents[0].id}' of tiny.test is not in the index"):
        evaluate("bm25", folder, rerank=tmp_path / "lacking")
    found = evaluate("bm25", folder, rerank=tmp_path / "whole", candidates=20)
    assert found.system.source == "bm25 > whole"
    settings = found.collections[0].index.parameters
    assert (settings["candidates"], str(settings["first"]).startswith("bm25 (variant lucene")) == (20, True)
    loaded, named = (evaluate("bm25", folder, rerank=each) for each in (ColBERT(tmp_path / "colbert"), tmp_path / "colbert"))
    assert (loaded.system, loaded.collections[0].measures) == (named.system, named.collections[0].measures)


def test_a_folder_of_runs_is_fused_and_an_index_is_no_run(model: Any, make_collection: MakeCollection, tmp_path: Path) -> None:
    folder = make_collection()
    evaluate(model, folder, out=tmp_path / "model")
    runs = tmp_path / "model" / "runs"
    found = evaluate("bm25", folder, fuse=[runs], baselines=())
    assert found.collections[0].measures == evaluate("bm25", folder, fuse=[runs / "tiny.test.trec"], baselines=()).collections[0].measures
    other = make_collection(name="other")
    with pytest.raises(InputError, match="a run belongs to one collection, but 2 are given"):
        evaluate("bm25", [folder, other], fuse=[runs / "tiny.test.trec"])
    build_index(load_collection(folder, "test").documents, "bm25", tmp_path / "words")
    with pytest.raises(InputError, match="words: an index; pass --index"):
        evaluate(None, folder, run=tmp_path / "words")


@pytest.mark.data
@pytest.mark.slow
def test_a_hybrid_of_minilm_and_bm25_is_better_than_minilm_on_cranfield(quiver_data: Path, minilm: Path, tmp_path: Path) -> None:
    evaluate(minilm, quiver_data / "cranfield", out=tmp_path / "minilm", cache=tmp_path / "vectors")
    evaluate(minilm, quiver_data / "cranfield", fuse=["bm25"], name="hybrid", out=tmp_path / "hybrid", cache=tmp_path / "vectors")
    measured = compare_results(tmp_path / "minilm", tmp_path / "hybrid").pairings[0].measures["ndcg@10"]
    assert (measured.paired.first, measured.paired.second) == (pytest.approx(0.5090, abs=5e-5), pytest.approx(0.5513, abs=5e-5))
    assert (measured.verdict, measured.corrected < 0.001) == ("better", True)
