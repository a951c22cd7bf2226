"""sentence-transformers' own evaluators give a `BiEncoder` the scores that they give the same model of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver import BiEncoder
from quiver.encoder import InputError

library = pytest.importorskip("sentence_transformers")
evaluation = pytest.importorskip("sentence_transformers.evaluation")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.parity

ANIMALS = ["owls", "trout", "foxes", "bees", "whales", "ants", "larks", "eels", "bats", "newts"]
DEEDS = ["fly by night", "swim in rivers", "hide in dens", "collect pollen", "sing under water", "carry leaves", "sing at dawn"]
CORPUS = {f"{animal} {number}": f"{animal} {deed}" for animal in ANIMALS for number, deed in enumerate(DEEDS)}
QUERIES = {animal: f"what do {animal} do" for animal in ANIMALS}
RELEVANT = {animal: {f"{animal} {number}" for number in (0, 3)} for animal in ANIMALS}
FIRST, SECOND = list(CORPUS.values())[:60], list(CORPUS.values())[10:70]
SCORES = [number % 7 / 6 for number in range(60)]
FUNCTIONS = ["cosine", "dot", "euclidean", "manhattan"]


def retrieval(**settings: Any) -> Any:
    return evaluation.InformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT, write_csv=False, **settings)


def similarity(**settings: Any) -> Any:
    return evaluation.EmbeddingSimilarityEvaluator(FIRST, SECOND, SCORES, write_csv=False, **settings)


def reranking(**settings: Any) -> Any:
    others = ANIMALS[:5]
    samples = [
        {
            "query": QUERIES[animal],
            "positive": [CORPUS[f"{animal} 0"]],
            "negative": [CORPUS[f"{other} 0"] for other in others if other != animal],
        }
        for animal in ANIMALS
    ]
    return evaluation.RerankingEvaluator(samples, write_csv=False, **settings)


def nano(**settings: Any) -> Any:
    return evaluation.NanoBEIREvaluator(["msmarco", "nq"], write_csv=False, **settings)


EVALUATORS: dict[str, Callable[[Any], Any]] = {
    "retrieval": lambda teacher: retrieval(),
    "retrieval with prompts, cut": lambda teacher: retrieval(query_prompt="q: ", corpus_prompt_name="document", truncate_dim=64),
    "retrieval by own functions": lambda teacher: retrieval(score_functions={"cos": library.util.cos_sim, "dot": library.util.dot_score}),
    "similarity": lambda teacher: similarity(),
    "similarity in float32": lambda teacher: similarity(precision="float32"),
    "similarity in ubinary": lambda teacher: similarity(precision="ubinary", similarity_fn_names=["dot", "manhattan"]),
    "similarity by all functions": lambda teacher: similarity(similarity_fn_names=FUNCTIONS, truncate_dim=128, batch_size=7),
    "triplets": lambda teacher: evaluation.TripletEvaluator(FIRST, SECOND, FIRST[::-1], similarity_fn_names=FUNCTIONS, write_csv=False),
    "pairs": lambda teacher: evaluation.BinaryClassificationEvaluator(FIRST, SECOND, [round(each) for each in SCORES], write_csv=False),
    "re-ranking": lambda teacher: reranking(),
    "re-ranking one by one": lambda teacher: reranking(use_batched_encoding=False, truncate_dim=100),
    "paraphrases": lambda teacher: evaluation.ParaphraseMiningEvaluator(
        CORPUS, [(f"{animal} 0", f"{animal} {number}") for animal in ANIMALS for number in (1, 2)], write_csv=False
    ),
    "distance to a teacher": lambda teacher: evaluation.MSEEvaluator(FIRST, SECOND, teacher_model=teacher, write_csv=False),
    "translations": lambda teacher: evaluation.TranslationEvaluator(FIRST, SECOND, write_csv=False),
    "NanoBEIR": lambda teacher: nano(query_prompts="query: "),
    "several": lambda teacher: evaluation.SequentialEvaluator([retrieval(name="a"), similarity(name="b")]),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(minilm: Path) -> list[Any]:
    """The same model in sentence-transformers and in Quiver."""
    prompts = {"query": "question: ", "document": "text: "}
    return [opened(str(minilm), device="cpu", prompts=prompts) for opened in (library.SentenceTransformer, BiEncoder)]


@pytest.fixture(autouse=True)
def small_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the collections of NanoBEIR on the Hub."""
    tables = {
        "corpus": [{"_id": key, "text": text} for key, text in CORPUS.items()],
        "queries": [{"_id": key, "text": text} for key, text in QUERIES.items()],
        "qrels": [{"query-id": query, "corpus-id": document} for query, found in RELEVANT.items() for document in sorted(found)],
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda path, subset, **options: datasets.Dataset.from_list(tables[subset]))


@pytest.mark.parametrize("name", EVALUATORS)
def test_an_evaluator_gives_the_scores_of_sentence_transformers(name: str, models: list[Any]) -> None:
    theirs, ours = ({key: float(value) for key, value in EVALUATORS[name](models[0])(model).items()} for model in models)
    assert ours.keys() == theirs.keys()
    assert len(theirs) > 0
    assert ours == pytest.approx(theirs, abs=1e-4)  # tied ranks may change places by the last bit of a score


def test_scores_are_stored_and_written(models: list[Any], tmp_path: Path) -> None:
    evaluator = evaluation.InformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT, name="animals")
    theirs, ours = (model.evaluate(evaluator, str(tmp_path / f"{type(model).__name__}" / "scores")) for model in models)
    assert models[1].model_card_data.eval_results_dict[evaluator] == ours
    assert ours == pytest.approx(theirs, abs=1e-5)
    rows = [(tmp_path / type(model).__name__ / "scores" / evaluator.csv_file).read_text().count("\n") for model in models]
    assert rows == [2, 2]


@pytest.mark.parametrize("width", [None, 9, 384])
def test_vectors_are_cut_inside_a_block(models: list[Any], width: int | None) -> None:
    name = "truncate_embeddings" if hasattr(models[0], "truncate_embeddings") else "truncate_sentence_embeddings"
    found = []
    for model in models:
        with getattr(model, name)(width):
            found.append(model.encode(FIRST[:3]))
            dim = model.get_sentence_embedding_dimension()
        assert dim == (width or 384)
        assert model.truncate_dim is None
    np.testing.assert_allclose(*found, atol=1e-5)


@pytest.mark.parametrize("call", ["encode", "encode_query", "encode_document"])
def test_token_embeddings_are_those_of_sentence_transformers(models: list[Any], call: str) -> None:
    texts = ["a bird", "", "which animal flies by night " * 100]
    theirs, ours = (getattr(model, call)(texts, output_value="token_embeddings", batch_size=2) for model in models)
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(other, one.detach(), atol=2e-5, rtol=0)
    single = models[1].encode("a bird", output_value="token_embeddings")
    torch.testing.assert_close(single, models[1].encode(["a bird"], output_value="token_embeddings")[0], atol=1e-5, rtol=0)
    with pytest.raises(InputError, match="output_value must be sentence_embedding or token_embeddings, got None"):
        models[1].encode(texts, output_value=None)


def test_precision_none_is_float32_and_similarities_have_the_librarys_names(models: list[Any], minilm: Path) -> None:
    theirs, ours = (model.encode(FIRST[:3], None, None, 32, False, "sentence_embedding", None) for model in models)
    assert (ours.dtype, theirs.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert BiEncoder(minilm, device="cpu", similarity_fn_name=library.SimilarityFunction.DOT_PRODUCT).similarity_fn_name == "dot"
