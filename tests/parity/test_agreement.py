"""beir, mteb and Quiver give one score for one model: on a collection made to set them apart, and on real ones with a real model.

Each harness searches and scores with its own code; what is shared is the model. beir and mteb round to five digits. One difference is
known: a judged query that the run does not answer counts 0 here, as in trec_eval -c, and is left out of their means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.eval import evaluate
from quiver.eval.baselines import DenseRetriever, IndexRetriever, QuiverSearch
from quiver.eval.metrics import score
from quiver.retrieval.records import DenseEncoding, ModelCard, Role, TextTokens

evaluation = pytest.importorskip("beir.retrieval.evaluation")
dense_search = pytest.importorskip("beir.retrieval.search.dense")
pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Import mteb before the first test here: collecting the tests, in each process, should not take the seconds that this takes."""
    global datasets, mteb, retrieval_tasks
    mteb = pytest.importorskip("mteb")
    datasets = pytest.importorskip("datasets")
    retrieval_tasks = pytest.importorskip("mteb.abstasks.retrieval")


Corpus = Mapping[str, Mapping[str, str]]
Qrels = Mapping[str, Mapping[str, int]]


def by_beirs_search(model: Any, corpus: Corpus, queries: Mapping[str, str], qrels: Qrels) -> dict[str, float]:
    """Everything but the model is beir's."""
    search = dense_search.DenseRetrievalExactSearch(DenseRetriever(model), show_progress_bar=False)
    function = "cos_sim" if model.card.similarity == "cosine" else "dot"
    return by_beir(evaluation.EvaluateRetrieval(search, score_function=function), corpus, queries, qrels)


def by_beir(harness: Any, corpus: Corpus, queries: Mapping[str, str], qrels: Qrels) -> dict[str, float]:
    run = harness.retrieve(corpus, queries)
    ndcg, mean_precision, recall, _ = harness.evaluate(dict(qrels), run, [3, 10, 100])
    return {name.lower(): value for name, value in {**ndcg, **mean_precision, **recall}.items()}


def by_mteb(model: Any, corpus: Corpus, queries: Mapping[str, str], qrels: Qrels) -> dict[str, float]:
    class Local(retrieval_tasks.AbsTaskRetrieval):
        metadata = mteb.TaskMetadata(
            name="QuiverLocal",
            dataset={"path": "nowhere/local", "revision": "1"},
            description="A collection that is here already.",
            type="Retrieval",
            category="t2t",
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )
        ignore_identical_ids = True

        def load_data(self, num_proc: int | None = None, **_: object) -> None:
            documents = [{"id": key, "title": fields.get("title", ""), "text": fields["text"]} for key, fields in corpus.items()]
            split = {"corpus": datasets.Dataset.from_list(documents), "top_ranked": None}
            split["queries"] = datasets.Dataset.from_list([{"id": key, "text": text} for key, text in queries.items()])
            split["relevant_docs"] = {query: dict(grades) for query, grades in qrels.items()}
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    result = mteb.evaluate(model, Local(), cache=None, co2_tracker=False, encode_kwargs={"show_progress_bar": False})
    scores = result.task_results[0].scores["test"][0]
    return {name.replace("_at_", "@"): value for name, value in scores.items() if isinstance(value, float)}


# Titles decide q1; d2, d6 and d7 tie on q2, and their order is by id; q2 and q4 are documents as well; grades go from 0 to 3.
CORPUS = {
    "d1": {"title": "bird wings", "text": "a bird has two wings and flies"},
    "d2": {"title": "fish", "text": "a fish swims in the deep sea"},
    "d3": {"title": "", "text": "granite is a hard stone"},
    "d4": {"title": "wings", "text": "a bird flies"},
    "d5": {"title": "sea", "text": "the sea is deep and salt"},
    "d6": {"title": "fish", "text": "a fish swims in the deep sea"},
    "d7": {"title": "fish", "text": "a fish swims in the deep sea"},
    "q2": {"title": "", "text": "deep sea fish"},
    "q4": {"title": "salt", "text": "salt"},
}
QUERIES = {"q1": "bird wings", "q2": "deep sea fish", "q3": "granite", "q4": "salt"}
QRELS = {"q1": {"d1": 1, "d4": 3}, "q2": {"d2": 3, "d5": 2, "d6": 1, "d7": 0}, "q3": {"d3": 1}, "q4": {"d5": 2, "d1": 1}}


class Counting:
    """Counts each word at a place of its own: scores are whole numbers, and equal ones are equal in every library."""

    words = sorted({word for fields in CORPUS.values() for word in f"{fields['title']} {fields['text']}".split()})
    card = ModelCard("counting", "dense", "0" * 64, len(words), "dot", 512, 512)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        counts = [[text.lower().split().count(word) for word in self.words] for text in texts]
        lengths = np.array([len(text.split()) for text in texts], np.int32)
        vectors = np.array(counts, np.float32).reshape(-1, len(self.words))
        return DenseEncoding(vectors, TextTokens(lengths, np.zeros(len(texts), bool), lengths == 0))


class MtebCounting:
    """The same as a model of mteb's own, which mteb searches itself."""

    @property
    def mteb_model_meta(self) -> Any:
        return mteb.models.ModelMeta.create_empty()

    def encode(self, inputs: Any, *, prompt_type: Any = None, **_: object) -> NDArray[np.float32]:
        return Counting().encode_texts([text for batch in inputs for text in batch["text"]], prompt_type.value).vectors

    def similarity(self, one: Any, other: Any) -> Any:
        return np.asarray(one) @ np.asarray(other).T

    def similarity_pairwise(self, one: Any, other: Any) -> Any:
        return (np.asarray(one) * np.asarray(other)).sum(axis=1)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The collection as a BEIR folder; a folder called quora drops the document with the query's own id."""
    folder = tmp_path / "quora"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"_id": key, **fields}) + "\n" for key, fields in CORPUS.items()))
    (folder / "queries.jsonl").write_text("".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in QUERIES.items()))
    judged = [f"{query}\t{document}\t{grade}" for query, grades in QRELS.items() for document, grade in grades.items()]
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n")
    return folder


def test_three_harnesses_one_score(tiny: Path) -> None:
    ours = evaluate(Counting(), tiny, baselines=(), k=1000).collections[0]
    assert ours.exclude_self
    theirs = {
        "beir": by_beirs_search(Counting(), CORPUS, QUERIES, QRELS),
        "beir, our index": by_beir(evaluation.EvaluateRetrieval(IndexRetriever(Counting())), CORPUS, QUERIES, QRELS),
        "mteb": by_mteb(MtebCounting(), CORPUS, QUERIES, QRELS),
        "mteb, our index": by_mteb(QuiverSearch(Counting()), CORPUS, QUERIES, QRELS),
    }
    for name, scores in theirs.items():
        assert scores["ndcg@10"] == round(ours.measures["ndcg@10"], 5), name
        assert scores["recall@100"] == round(ours.measures["recall@100"], 5), name
    # By hand: the three fish tie on q2, and the greater id comes first, so d7 (0), d6 (1), d2 (3), then d5 (2).
    q2 = (1 / np.log2(3) + 3 / np.log2(4) + 2 / np.log2(5)) / (3 + 2 / np.log2(3) + 1 / np.log2(4))
    q1 = (1 + 3 / np.log2(3)) / (3 + 1 / np.log2(3))
    q4 = 2 + 1 / np.log2(1 + rank_of("d1", QUERIES["q4"], without={"q4"}))
    assert ours.measures["ndcg@10"] == pytest.approx((q1 + q2 + 1 + q4 / (2 + 1 / np.log2(3))) / 4, abs=1e-9)


def rank_of(document: str, query: str, *, without: set[str]) -> int:
    """The rank of a document by a naive ranking: score, then id, both descending."""
    texts = {key: f"{fields['title']} {fields['text']}".split() for key, fields in CORPUS.items() if key not in without}
    order = sorted(texts, key=lambda key: (sum(texts[key].count(word) for word in query.split()), key), reverse=True)
    return order.index(document) + 1


class Mute:
    """A search that answers nothing to one query."""

    def __init__(self, search: QuiverSearch, query: str) -> None:
        self._search, self._query = search, query
        self.mteb_model_meta = search.mteb_model_meta
        self.index = search.index

    def search(self, queries: Any, **arguments: Any) -> dict[str, Any]:
        run = self._search.search(queries, **arguments)
        return {query: documents for query, documents in run.items() if query != self._query}


def test_the_one_difference_is_a_query_that_is_not_answered() -> None:
    run = IndexRetriever(Counting()).search(CORPUS, QUERIES, 10)
    answered = {query: documents for query, documents in run.items() if query != "q1"}
    ours = score(QRELS, answered, ["ndcg@10"]).means["ndcg@10"]
    over_three = score({query: QRELS[query] for query in answered}, answered, ["ndcg@10"]).means["ndcg@10"]
    assert ours == pytest.approx(over_three * 3 / 4)
    beir, _, _, _ = evaluation.EvaluateRetrieval.evaluate(QRELS, answered, [10])
    assert beir["NDCG@10"] == round(over_three, 5)
    assert by_mteb(Mute(QuiverSearch(Counting()), "q1"), CORPUS, QUERIES, QRELS)["ndcg@10"] == round(over_three, 5)
    # An empty answer is one that scores 0, everywhere.
    empty = {**answered, "q1": {}}
    assert score(QRELS, empty, ["ndcg@10"]).means["ndcg@10"] == ours
    beir, _, _, _ = evaluation.EvaluateRetrieval.evaluate(QRELS, empty, [10])
    assert beir["NDCG@10"] == round(ours, 5)
