"""The whole walk on a tiny collection with a model whose vectors anybody can compute."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder.errors import InputError
from quiver.eval.datasets.benchmarks import Benchmark, Policy
from quiver.eval.evaluation import evaluate
from quiver.eval.metrics import DEFAULT
from quiver.eval.report.retrieval import write_report
from quiver.eval.results import read_results
from quiver.retrieval.data.corpus import read_run
from quiver.retrieval.models.options import ModelOptions
from quiver.retrieval.records import Role

MakeCollection = Callable[..., Path]


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


FILES = [
    "per_query/tiny.test.bm25.json",
    "per_query/tiny.test.json",
    "queries/tiny.test.json",
    "results.json",
    "runs/tiny.test.bm25.trec",
    "runs/tiny.test.trec",
]


def test_end_to_end(model: Any, make_collection: MakeCollection, tmp_path: Path) -> None:
    folder, out = make_collection(), tmp_path / "out" / "bag"
    results = evaluate(model, folder, out=out, command="quiver evaluate --model bag")
    assert _files(out) == FILES
    assert read_results(out) == results

    scored = results.collections[0]
    assert (scored.name, scored.split, scored.documents, scored.queries, scored.judgements) == ("tiny", "test", 5, 3, 6)
    assert (scored.k, scored.use_title, scored.exclude_self, scored.unanswered) == (1000, True, False, 0)
    # "Wings a bird has two wings and flies" has 8 words, so titles count; no text has more.
    assert (scored.truncated.documents, scored.truncated.queries, scored.empty_texts) == (0, 0, 0)
    assert scored.seconds.keys() == {"encode_queries", "encode_documents", "index", "search", "bm25", "check", "other"}
    assert (scored.group, scored.group_size, scored.in_domain, scored.licence, scored.revision) == (None, 1, False, None, None)
    assert scored.interval.low <= scored.measures["ndcg@10"] <= scored.interval.high
    assert scored.index.recall == {"overlap@10": 1.0, "overlap@100": 1.0}
    # 15 documents are found, all five for each query, and the judges saw 2, 3 and 1 of them.
    np.testing.assert_allclose(scored.judged, (2 / 5 + 3 / 5 + 1 / 5) / 3, rtol=1e-12)
    assert json.loads((out / "queries" / "tiny.test.json").read_text(encoding="utf-8"))["q3"] == "granite"
    assert list(scored.measures) == list(DEFAULT)
    assert results.system.source == "bag of words"
    assert results.provenance.command == "quiver evaluate --model bag"

    # By hand: d1 shares both words of q1; d4 has neither "bird" nor "wings" and ties with the rest at 0 behind it,
    # ordered by id descending: d5, d4. q2 and q3 find their documents first.
    by_query = json.loads((out / "per_query" / "tiny.test.json").read_text(encoding="utf-8"))
    expected = (2 + 1 / np.log2(4)) / (2 + 1 / np.log2(3))
    np.testing.assert_allclose([by_query[query]["ndcg@10"] for query in ("q1", "q2", "q3")], [expected, 1, 1], rtol=1e-12)
    np.testing.assert_allclose(scored.measures["ndcg@10"], (expected + 2) / 3, rtol=1e-12)
    np.testing.assert_allclose(json.loads((out / "results.json").read_text(encoding="utf-8"))["ndcg@10"], (expected + 2) / 3, rtol=1e-12)


@pytest.mark.parametrize("engine", ["exact", "faiss-dense:factory=Flat"])
def test_exact_search_runs_where_the_model_is(model: Any, make_collection: MakeCollection, engine: str) -> None:
    """``meta`` stands for a GPU that is not there. With FAISS, the exact search that measures the overlap runs there."""
    folder = make_collection()
    expected = evaluate(model, folder, engine=engine)
    placed = SimpleNamespace(card=model.card, encode_texts=model.encode_texts, device=torch.device("meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        evaluate(placed, folder, engine=engine)
    placed.device = torch.device("cpu")
    assert evaluate(placed, folder, engine=engine).collections[0].measures == expected.collections[0].measures


def test_a_model_with_a_vector_a_token_takes_the_same_walk(token_model: Any, make_collection: MakeCollection, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results = evaluate(token_model, make_collection(), out=out, baselines=())
    assert (results.system.kind, results.system.similarity) == ("colbert", "maxsim")
    run = read_run(out / "runs" / "tiny.test.trec")
    assert (run["q1"]["d1"], run["q2"]["d2"], run["q2"]["d5"], run["q3"]["d3"]) == (2.0, 3.0, 2.0, 1.0)
    assert results.collections[0].measures["mrr@10"] == 1.0


@pytest.mark.parametrize("broken", ["qrels/test.tsv", "corpus.jsonl", "queries.jsonl"])
def test_bad_data_stops_before_anything_is_encoded_or_written(
    model: Any, make_collection: MakeCollection, tmp_path: Path, broken: str
) -> None:
    bad, out = make_collection("bad"), tmp_path / "out"
    with (bad / broken).open("a", encoding="utf-8") as file:
        file.write("{not a line of this file\n")
    with pytest.raises(InputError, match=Path(broken).name):
        evaluate(model, bad, out=out)
    with pytest.raises(InputError, match=rf"none of 2 collections can be evaluated; .*{Path(broken).name}"):
        evaluate(model, [bad, tmp_path / "nowhere"], out=out)
    assert model.encoded == []
    assert not out.exists()


def test_a_collection_that_cannot_be_read_does_not_stop_the_others(
    model: Any, make_collection: MakeCollection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad, out = make_collection("good"), make_collection("bad"), tmp_path / "out"
    sound = (bad / "queries.jsonl").read_text(encoding="utf-8")
    (bad / "queries.jsonl").write_text("{not a query\n", encoding="utf-8")
    given = [bad, good, tmp_path / "nowhere"]
    found = evaluate(model, given, out=out, baselines=())
    assert [each.key for each in found.collections] == ["good.test"]
    assert [(each.key, each.reason.count("\n")) for each in found.failed] == [(str(tmp_path / "nowhere"), 0), ("bad.test", 0)]
    assert found.headline is None  # an average is blank where a member is missing
    assert read_results(out) == found
    assert repr(found).endswith(f"\nnot evaluated: {tmp_path / 'nowhere'}, bad.test")
    assert f"bad.test: not evaluated: {bad / 'queries.jsonl'}:1: malformed JSON" in caplog.text
    write_report([out], tmp_path / "report.md")
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "**Not evaluated:** bad.test: " in report
    assert "1 of 3" in report  # in place of an average
    # The same call evaluates the rest, and keeps what is finished.
    (bad / "queries.jsonl").write_text(sound, encoding="utf-8")
    model.encoded.clear()
    again = evaluate(model, [bad, good], out=out, baselines=())
    assert [each.key for each in again.collections] == ["bad.test", "good.test"]
    assert [role for role, _ in model.encoded] == ["query", "document"]  # of one collection
    assert again.collections[1] == found.collections[0]
    assert (again.failed, read_results(out)) == ((), again)
    assert not (out / ".unfinished").exists()
    with pytest.raises(InputError, match="already holds results"):
        evaluate(model, [bad, good], out=out, baselines=())


def test_a_judged_document_that_the_corpus_lacks_counts_as_not_found(
    model: Any, make_collection: MakeCollection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    qrels = {"q1": {"d1": 2, "gone": 1}, "q2": {"d2": 1}, "q3": {"lost": 1}}
    found = evaluate(model, make_collection(qrels=qrels), out=tmp_path / "out", baselines=()).collections[0]
    run = read_run(tmp_path / "out" / "runs" / "tiny.test.trec")
    pytrec_eval = pytest.importorskip("pytrec_eval")
    expected = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut_10", "recall_10"}).evaluate(run)
    for ours, theirs in (("ndcg@10", "ndcg_cut_10"), ("recall@10", "recall_10")):
        assert found.measures[ours] == pytest.approx(sum(each[theirs] for each in expected.values()) / 3)
    assert (found.missing, found.queries, found.judgements) == (2, 3, 4)
    told = [record.getMessage() for record in caplog.records if "judged documents" in record.getMessage()]
    assert told == ["tiny: 2 of 4 judged documents are not in the corpus, such as 'gone'; counted as not found"]
    assert read_results(tmp_path / "out").collections[0].missing == 2
    write_report([tmp_path / "out"], tmp_path / "report.md", title="Birds and fish")
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert report.startswith("# Birds and fish\n")
    assert "2 judged documents of tiny.test. They count as not found." in report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k must be >= 1"),
        ({"baselines": ("bm26",)}, "unknown baseline 'bm26'; known: bm25"),
        ({"split": "dev"}, "dev"),
        ({"data": []}, "no collection was given"),
        ({"data": "nowhere"}, "unknown collection 'nowhere'"),
    ],
)
def test_bad_options_stop_early(model: Any, make_collection: MakeCollection, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = make_collection()
    with pytest.raises(InputError, match=message):
        evaluate(model, change.pop("data", folder), out=tmp_path / "out", **change)
    assert model.encoded == []
    assert not (tmp_path / "out").exists()


def test_ids_that_a_run_cannot_hold_are_found_first(model: Any, make_collection: MakeCollection, tmp_path: Path) -> None:
    rows = [{"_id": "d\n1", "text": "bird"}, {"_id": "d 2", "text": "stone"}]
    folder = make_collection(queries={"q": "bird"}, qrels={"q": {"d 2": 1}})
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(InputError, match=r"the id 'd\\n1' is empty, or has \u2420, a tab or a line end, which a TREC run cannot hold"):
        evaluate(model, folder, out=tmp_path / "out")
    assert model.encoded == []
    expected = evaluate(model, folder, baselines=()).collections[0].measures
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows).replace("\\n", "-"), encoding="utf-8")
    assert evaluate(model, folder, out=tmp_path / "out", baselines=()).collections[0].measures == expected  # a space can be written
    assert set(read_run(tmp_path / "out" / "runs" / "tiny.test.trec")["q"]) == {"d-1", "d 2"}


def test_what_is_finished_when_a_run_is_stopped_is_not_done_again(model: Any, make_collection: MakeCollection, tmp_path: Path) -> None:
    others = {key: ("", f"{word} and something else") for key, word in (("d1", "wings"), ("d2", "fish"), ("d3", "stone"))}
    first, out = make_collection("first"), tmp_path / "out"
    second = make_collection("second", documents=others, qrels={"q1": {"d1": 1}, "q2": {"d2": 1}})

    class Stopping:
        """Breaks at the second document encoding, as a machine that goes down in the second collection."""

        card = model.card
        calls = 0

        def encode_texts(self, texts: list[str], role: Role, *, progress: bool = False) -> Any:
            self.calls += role == "document"
            if self.calls == 2:
                raise KeyboardInterrupt
            return model.encode_texts(texts, role)

    with pytest.raises(KeyboardInterrupt):
        evaluate(Stopping(), [first, second], out=out)
    assert not (out / "results.json").exists()
    model.encoded.clear()
    results = evaluate(model, [first, second], out=out)
    assert [role for role, _ in model.encoded] == ["query", "document"]
    assert model.encoded[1][1] == ["wings and something else", "fish and something else", "stone and something else"]
    assert [collection.key for collection in results.collections] == ["first.test", "second.test"]
    assert read_results(out) == results
    assert not (out / ".unfinished").exists()


def test_what_was_finished_with_other_settings_is_not_thrown_away_silently(
    model: Any, make_collection: MakeCollection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = make_collection(), tmp_path / "out"
    _stopped_at_the_end(model, folder, out, monkeypatch)
    model.encoded.clear()
    others: list[dict[str, Any]] = [{"k": 5}, {"engine": "faiss-dense:factory=Flat"}]
    for settings in others:
        with pytest.raises(
            InputError, match=r"unfinished run with other settings: settings\.(k|engine) was .*, or --overwrite to start over"
        ):
            evaluate(model, folder, out=out, **settings)
    # It is still there, and can be finished.
    evaluate(model, folder, out=out)
    assert model.encoded == []
    (out / "results.json").unlink()
    _stopped_at_the_end(model, folder, out, monkeypatch)
    model.encoded.clear()
    assert evaluate(model, folder, out=out, overwrite=True, k=5).collections[0].k == 5
    assert model.encoded


def _stopped_at_the_end(model: Any, data: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation whose collections are finished and whose results were never written."""
    module = importlib.import_module("quiver.eval.evaluation")
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_results", lambda results, folder: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, data, out=out)


def test_a_second_evaluation_in_one_folder_is_refused(model: Any, make_collection: MakeCollection, tmp_path: Path) -> None:
    folder, out = make_collection(), tmp_path / "out"

    class Meanwhile:
        """While it encodes, another evaluation begins to write into the same folder."""

        card = model.card

        def encode_texts(self, texts: list[str], role: Role, *, progress: bool = False) -> Any:
            with pytest.raises(InputError, match="is evaluating there; wait for it"):
                evaluate("bm25", folder, out=out)
            return model.encode_texts(texts, role)

    results = evaluate(Meanwhile(), folder, out=out)
    assert len(model.encoded) == 2
    assert read_results(out) == results
    assert _files(out) == FILES


def test_overwriting_leaves_nothing_of_the_old_results(make_collection: MakeCollection, tmp_path: Path) -> None:
    first, second, out = make_collection("first"), make_collection("second"), tmp_path / "out"
    evaluate("bm25", [first, second], out=out)
    (out / "report.html").write_text("of the old results", encoding="utf-8")
    (out / "note.txt").write_text("mine", encoding="utf-8")
    evaluate("bm25", first, out=out, overwrite=True)
    assert _files(out) == ["note.txt", "per_query/first.test.json", "queries/first.test.json", "results.json", "runs/first.test.trec"]


@pytest.mark.parametrize("change", ["data", "policy"])
def test_what_was_finished_otherwise_is_scored_again(
    model: Any, make_collection: MakeCollection, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = make_collection(), tmp_path / "out"
    _stopped_at_the_end(model, folder, out, monkeypatch)
    model.encoded.clear()
    data: Any = folder
    if change == "data":
        with (folder / "corpus.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"_id": "d6", "text": "one more"}\n')
    else:
        data = Benchmark.of_folder(folder, policy=Policy(use_title=False))
    result = evaluate(model, data, out=out).collections[0]
    assert model.encoded
    assert (result.documents, result.use_title) == ((6, True) if change == "data" else (5, False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "bm25", "engine": "faiss-dense:factory=Flat"}, "bm25 has no engine"),
        ({"model": "bm25", "dtype": "int8"}, "bm25 has no engine, dtype, device, batch size, library"),
        ({"model": "bm25", "library": "pylate"}, "no engine, dtype, device, batch size, library"),
        ({"model": "bm25", "model_options": ModelOptions(truncate_dim=9)}, "length, prompt or width; leave out"),
        ({"model": "bm25", "batch_tokens": 9}, "no engine, dtype, device, batch size, library"),
        ({"model": "folder", "library": "pylate", "dtype": "int8"}, "dtype, device and batch size are only available for library quiver"),
        ({"library": "pylate"}, "the given model is loaded already"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    model: Any, make_collection: MakeCollection, options: dict[str, Any], message: str
) -> None:
    system = options.pop("model", model)
    with pytest.raises(InputError, match=message):
        evaluate(system, make_collection(), **options)
