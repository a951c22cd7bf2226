"""Quiver models in MTEB's evaluate: scores, texts, own ids, depth and candidates agree with an MTEB model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.eval.baselines import QuiverSearch
from quiver.eval.metrics import score

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Import mteb before the first test here: collecting the tests, in each process, should not take the seconds that this takes."""
    global datasets, mteb, retrieval_tasks
    mteb = pytest.importorskip("mteb")
    datasets = pytest.importorskip("datasets")
    retrieval_tasks = pytest.importorskip("mteb.abstasks.retrieval")


DOCUMENTS = {
    "d1": ("Wings", "a bird has two wings and flies"),
    "d2": ("Fish", " a fish swims in the deep sea "),
    "d3": ("", "granite is a hard stone"),
    "d4": ("", "birds and fish are animals"),
    "d5": ("Sea", "the sea is deep and salt"),
    "q2": ("Deep", "deep sea fish"),
}
QUERIES = {"q1": "bird wings", "q2": "deep sea fish", "q3": "granite"}
QRELS = {"q1": {"d1": 2, "d4": 1}, "q2": {"d2": 1, "d5": 2, "d3": 0}, "q3": {"d3": 1}}


def rows(texts: Mapping[str, Any]) -> Any:
    return datasets.Dataset.from_list([{"id": key, "text": text} for key, text in texts.items()])


def corpus(documents: Mapping[str, tuple[str, str]] = DOCUMENTS) -> Any:
    return datasets.Dataset.from_list([{"id": key, "title": title, "text": text} for key, (title, text) in documents.items()])


def task(queries: Any = None, *, own_ids: bool = False, top_ranked: object = None, depths: Sequence[int] = (1, 3, 10, 1000)) -> Any:
    """A retrieval task whose data are given here."""

    class Tiny(retrieval_tasks.AbsTaskRetrieval):
        metadata = mteb.TaskMetadata(
            name="QuiverTiny",
            dataset={"path": "nowhere/tiny", "revision": "1"},
            description="Documents about animals.",
            type="Retrieval" if top_ranked is None else "Reranking",
            category="t2t",
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )
        ignore_identical_ids = own_ids
        k_values = depths

        def load_data(self, num_proc: int | None = None, **_: object) -> None:
            qrels = {query: dict(grades) for query, grades in QRELS.items()}
            split = {"corpus": corpus(), "queries": rows(QUERIES) if queries is None else queries, "relevant_docs": qrels}
            self.dataset = {"default": {"test": split | {"top_ranked": top_ranked}}}
            self.data_loaded = True

    return Tiny()


def evaluated(model: Any, of: Any) -> dict[str, float]:
    result = mteb.evaluate(model, of, cache=None, co2_tracker=False, encode_kwargs={"show_progress_bar": False}, raise_error=True)
    scores: dict[str, float] = result.task_results[0].scores["test"][0]
    return scores


class Recorder:
    """An MTEB encoder with the same vectors that records the texts MTEB gives it."""

    @property
    def mteb_model_meta(self) -> Any:
        return mteb.models.ModelMeta.create_empty()

    def __init__(self, model: Any) -> None:
        self.model = model
        self.texts: dict[str, list[str]] = {}

    def encode(self, inputs: Any, *, prompt_type: Any = None, **_: object) -> NDArray[np.float32]:
        texts = [text for batch in inputs for text in batch["text"]]
        self.texts[prompt_type.value] = texts
        vectors: NDArray[np.float32] = self.model.encode_texts(texts, prompt_type.value).vectors
        return vectors

    def similarity(self, one: Any, other: Any) -> Any:
        return np.asarray(one) @ np.asarray(other).T

    def similarity_pairwise(self, one: Any, other: Any) -> Any:
        return (np.asarray(one) * np.asarray(other)).sum(axis=1)


def searched(model: QuiverSearch, *, top_k: int = 10, top_ranked: Any = None, queries: Any = None) -> Mapping[str, Mapping[str, float]]:
    of = task()
    common: dict[str, Any] = {"task_metadata": of.metadata, "hf_split": "test", "hf_subset": "default"}
    common |= {"encode_kwargs": {"show_progress_bar": False}, "num_proc": None}
    model.index(corpus(), **common)
    run: Mapping[str, Mapping[str, float]] = model.search(
        rows(QUERIES) if queries is None else queries, top_k=top_k, top_ranked=top_ranked, **common
    )
    return run


def texts_of(model: Any) -> dict[str, list[str]]:
    return {role: texts for role, texts in model.encoded if texts}


@pytest.mark.parametrize("own_ids", [False, True])
def test_scores_agree_with_an_mteb_model_and_with_our_metrics(model: Any, own_ids: bool) -> None:
    """q2 is also a document id; it is the first hit unless the task ignores own ids."""
    found = evaluated(QuiverSearch(model), task(own_ids=own_ids))
    theirs = evaluated(Recorder(model), task(own_ids=own_ids))
    for name in ("ndcg_at_10", "ndcg_at_1", "map_at_1000", "recall_at_3", "mrr_at_10", "precision_at_10"):
        assert found[name] == pytest.approx(theirs[name], abs=1e-6), name
    run = {
        query: {document: value for document, value in scores.items() if not (own_ids and document == query)}
        for query, scores in searched(QuiverSearch(model), top_k=1000).items()
    }
    assert found["ndcg_at_10"] == pytest.approx(score(QRELS, run, ["ndcg@10"]).means["ndcg@10"], abs=1e-5)


CONVERSATIONS = {
    "strings": [["a bird", "and wings"], ["deep sea"], ["granite"]],
    "turns": [[{"role": "user", "content": text}, {"role": "assistant", "content": "wings"}] for text in QUERIES.values()],
    "texts": list(QUERIES.values()),
}


@pytest.mark.filterwarnings("ignore:Conversations are a list of strings")
@pytest.mark.parametrize("instructed", [False, True])
@pytest.mark.parametrize("kind", sorted(CONVERSATIONS))
def test_texts_are_joined_as_mteb_does(model: Any, kind: str, instructed: bool) -> None:
    queries = [{"id": key, "text": text} for key, text in zip(QUERIES, CONVERSATIONS[kind], strict=True)]
    if instructed:
        queries = [{**row, "instruction": "Find animals."} for row in queries]
    recorder = Recorder(model)
    evaluated(recorder, task(datasets.Dataset.from_list(queries)))
    model.encoded.clear()
    evaluated(QuiverSearch(model), task(datasets.Dataset.from_list(queries)))
    found = texts_of(model)
    assert found["query"] == recorder.texts["query"]
    assert found["document"] == recorder.texts["document"]
    assert found["document"][:2] == ["Wings a bird has two wings and flies", "Fish  a fish swims in the deep sea"]


CANDIDATES = {"q1": ["d3", "d1", "d5", "d1"], "q2": ["d4"]}


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_only_candidates_are_scored_in_reranking(model: Any, token_model: Any, kind: str) -> None:
    searching = model if kind == "dense" else token_model
    whole = searched(QuiverSearch(searching), top_k=1000)
    run = searched(QuiverSearch(searching), top_ranked=CANDIDATES)
    assert list(run) == list(QUERIES)
    assert (set(run["q1"]), set(run["q2"]), run["q3"]) == ({"d1", "d3", "d5"}, {"d4"}, {})
    for query, documents in run.items():
        for document, value in documents.items():
            assert value == pytest.approx(whole[query][document], abs=1e-6)
    assert next(iter(run["q1"])) == "d1"
    assert list(searched(QuiverSearch(searching), top_k=1, top_ranked=CANDIDATES)["q1"]) == ["d1"]


def test_unknown_candidate_is_named(model: Any) -> None:
    with pytest.raises(InputError, match="the candidate 'd9' of query 'q1' is not in the corpus"):
        searched(QuiverSearch(model), top_ranked={"q1": ["d1", "d9"]})
