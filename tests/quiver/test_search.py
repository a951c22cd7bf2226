"""``quiver search`` with fusion, re-ranking and explanations, and ``quiver index export``."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console

from quiver.cli.search import explanation_json, explanation_view
from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.retrieval.data.corpus import read_run
from quiver.retrieval.index import BuildOptions, add_documents, build_index, delete_documents, open_index
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.records import Document
from quiver.retrieval.search.bm25 import WordScore, word_index
from quiver.retrieval.search.explain import Explanation, QueryTokenMatch, Token
from quiver.retrieval.search.retrievers import Explained
from quiver.retrieval.search.search import Fusion, fuse

DOCUMENTS = [
    Document("d1", "A bird has wings, and a bird flies.", "Birds", {"year": 1999}),
    Document("d2", "The sea is deep [bold] \x1b[31m and no bird swims in it", metadata={"year": 2005}),
    Document("d3", "retrieval finds documents", metadata={"year": 2020}),
    Document("d4", "filler words come first " * 30 + "and far behind them a bird with wings"),
]
QUERY = "bird wings"

Quiver = Callable[..., Any]


class Built(NamedTuple):
    """Two models, and an index of each over the same documents."""

    dense: Path
    colbert: Path
    dense_model: Path
    colbert_model: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    tokenizer = Tokenizer.train([document.content() for document in DOCUMENTS], vocab_size=320)
    config = EncoderConfig.modernbert(
        vocab_size=384, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global"], max_positions=256
    )
    encoder = init_weights(Encoder(config), seed=3)
    BiEncoder.from_parts(encoder, tokenizer, ModelFolder("dense", folder, max_length=200, normalize=True)).save_pretrained(
        folder / "dense-model"
    )
    for prefix in ("[Q] ", "[D] "):
        tokenizer.add_token(prefix)
    colbert = ColBERTSettings(query_length=16, document_length=250)
    torch.manual_seed(3)  # the projection's weights decide which tokens meet
    settings = ModelFolder("colbert", folder, projections=(Projection(32, 16),), similarity="maxsim", colbert=colbert)
    ColBERT.from_parts(encoder, tokenizer, settings).save_pretrained(folder / "colbert-model")
    for kind in ("dense", "colbert"):
        build_index(DOCUMENTS, load_model(folder / f"{kind}-model"), folder / kind)
    return Built(folder / "dense", folder / "colbert", folder / "dense-model", folder / "colbert-model")


def found(quiver: Quiver, *arguments: object) -> list[dict[str, Any]]:
    done = quiver("search", *arguments, "--json")
    assert done.code == 0, done.err
    hits: list[dict[str, Any]] = json.loads(done.out)
    return hits


def scores(hits: list[dict[str, Any]]) -> dict[str, float]:
    return {hit["id"]: hit["score"] for hit in hits}


def test_json_holds_whole_texts_and_the_table_their_beginnings(quiver: Quiver, built: Built) -> None:
    texts = {document.id: document.content() for document in DOCUMENTS}
    assert len(texts["d4"]) > 700
    assert {hit["id"]: hit["text"] for hit in found(quiver, built.dense, QUERY)} == texts
    shown = " ".join(quiver("search", built.dense, QUERY).out.replace("│", " ").split())
    assert shown.count("filler") < 10
    assert "far behind them" not in shown
    assert quiver("search", built.dense, *QUERY.split()).out == quiver("search", built.dense, QUERY).out  # quotes may be left out
    swapped = quiver("search", QUERY, "at", "sea", built.dense)
    said = f"the index comes first, then the query: quiver search {built.dense} '{QUERY} at sea'"
    assert (swapped.code, swapped.err) == (2, f"quiver: error: {QUERY}: no such folder; {said}\n")
    shown = quiver("search", built.dense, QUERY, "--filter", "year>=2005")
    assert ("year" in shown.out, "2005" in shown.out, "2020" in shown.out) == (True, True, True)


def test_bm25_is_fused_with_an_index(quiver: Quiver, built: Built) -> None:
    vectors = scores(found(quiver, built.dense, QUERY))
    hits = found(quiver, built.dense, QUERY, "--fuse", "bm25")
    words = word_index(open_index(built.dense)).search([QUERY], 100).to_run(["q"])["q"]
    assert set(words) == {"d1", "d2", "d4"}
    assert scores(hits) == pytest.approx(fuse([vectors, words], Fusion()))
    assert [hit["id"] for hit in hits] == list(fuse([vectors, words], Fusion()))
    first = next(hit for hit in hits if hit["id"] == "d3")
    assert first["lists"]["bm25"] is None
    assert first["lists"][built.dense.name]["score"] == pytest.approx(vectors["d3"])
    options = ("--fuse", "bm25", "--fusion", "weighted", "--normalize", "z-score", "--weights", "0.3,2", "--candidates", 3)
    hits = found(quiver, built.dense, QUERY, "-k", 2, *options)
    shallow = dict(list(vectors.items())[:3])
    expected = fuse([shallow, words], Fusion("weighted", (0.3, 2.0), normalise="z-score"))
    assert scores(hits) == pytest.approx(dict(list(expected.items())[:2]))
    hits = found(quiver, built.dense, QUERY, "--fuse", "bm25", "--filter", "year>=2000")
    assert set(scores(hits)) == {"d2", "d3"}
    done = quiver("search", built.dense, QUERY, "--fuse", "bm25")
    assert done.code == 0, done.err
    assert "bm25" in done.out


def test_two_indexes_are_fused_and_written_as_a_run(quiver: Quiver, built: Built, tmp_path: Path) -> None:
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "bird wings"}\n{"_id": "q2", "text": "deep sea"}\n')
    run = tmp_path / "run.trec"
    done = quiver("search", built.dense, "--queries", tmp_path / "queries.jsonl", "--out", run, "--fuse", built.colbert, "-k", 3)
    assert done.code == 0, done.err
    written = read_run(run)
    for query, text in (("q1", QUERY), ("q2", "deep sea")):
        lists = [scores(found(quiver, index, text)) for index in (built.dense, built.colbert)]
        assert written[query] == pytest.approx(dict(list(fuse(lists, Fusion()).items())[:3]))


def test_the_model_of_a_ranking_with_weight_0_is_not_loaded(quiver: Quiver, built: Built) -> None:
    missing = ("--model", "no-such-folder")
    assert quiver("search", built.dense, QUERY, "--fuse", "bm25", "--weights", "1,1", *missing).code == 2
    hits = found(quiver, built.dense, QUERY, "--fuse", "bm25", "--weights", "0,1", *missing)
    assert [list(hit["lists"]) for hit in hits] == [["bm25"]] * 3


def test_explanations_are_printed_as_json(quiver: Quiver, built: Built) -> None:
    hits = found(quiver, built.colbert, QUERY, "--explain", "--fuse", "bm25")
    texts = {document.id: document.content() for document in DOCUMENTS}
    assert [hit["text"] for hit in hits] == [texts[hit["id"]] for hit in hits]
    for hit in hits:
        tokens = hit["explained"][built.colbert.name]
        assert tokens["score"] == pytest.approx(hit["lists"][built.colbert.name]["score"], rel=1e-5)
        assert sum(match["similarity"] for match in tokens["matches"]) == pytest.approx(tokens["score"], rel=1e-5)
        asked = [QUERY[slice(*match["query_span"])] for match in tokens["matches"] if match["query_span"]]
        assert "".join(asked).replace(" ", "") == "birdwings"
        assert any(match["document_span"] for match in tokens["matches"])
        words = hit["explained"]["bm25"]
        assert [word["word"] for word in words["words"]] == ["bird", "wings"]
        assert words["score"] == pytest.approx(0 if hit["lists"]["bm25"] is None else hit["lists"]["bm25"]["score"])
    (dense, *_) = found(quiver, built.dense, QUERY, "--explain")
    assert dense["explained"] == {built.dense.name: {"score": pytest.approx(dense["score"], rel=1e-5), "matches": []}}
    (reranked, *_) = found(quiver, built.dense, QUERY, "--explain", "--rerank", built.colbert_model)
    assert list(reranked["explained"]) == [built.colbert_model.name]
    assert reranked["explained"][built.colbert_model.name]["score"] == pytest.approx(reranked["score"], rel=1e-5)


def drawn(explained: dict[str, Explained], *, colour: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=colour, color_system="standard" if colour else None)
    for view in explanation_view("bird  wings", explained):
        console.print(view)
    return file.getvalue()


def test_an_explanation_is_printed_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = "much\x07 filler " * 100 + "a big\nBird \x1b[31m flies " + "and more " * 100
    where = text.index("Bird")
    matches = (
        QueryTokenMatch(Token("[CLS]", None), Token("filler", (0, 4)), 0.5),
        QueryTokenMatch(Token("bird", (0, 4)), Token("Bird", (where, where + 4)), 0.91),
        QueryTokenMatch(Token("wings", (6, 11)), Token("flies", (where + 11, where + 16)), 0.45),
        QueryTokenMatch(Token("[MASK]", None), Token("[SEP]", None), 0.25),
        QueryTokenMatch(Token("[MASK]", None), Token("Bird", (where, where + 4)), 0.25),
    )
    explained: dict[str, Explained] = {
        "colbert": Explanation("d", 2.36, text, matches),
        "bm25": [WordScore("bird", 1.25), WordScore("wings", 0.0)],
        "dense": Explanation("d", 0.5, None, ()),
    }
    plain = drawn(explained, colour=False)
    assert "\x1b" not in plain
    assert "\x07" not in plain
    assert "a big Bird  [31m flies and more" in plain
    assert len(plain.split("colbert")[0]) < 700  # a part of the text, and the beginning is not it
    assert plain.strip().startswith("…")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in plain.splitlines() if line.startswith("│")]
    assert rows == [["bird", "Bird", "0.9100"], ["wings", "flies", "0.4500"], ["[CLS], 2 [MASK]", "", "1.0000"], ["sum", "", "2.3600"]]
    assert "bm25: bird 1.2500 (not in the text: wings)" in plain
    assert "dense: similarity 0.5000" in plain
    coloured = drawn(explained, colour=True)
    assert "\x1b[1;32mBird\x1b[0m" in coloured
    assert "\x1b[33mflies\x1b[0m" in coloured
    assert "\x1b[31m" not in coloured
    content = explanation_json(explained)
    assert json.loads(json.dumps(content))["colbert"]["matches"][1] == {
        "query_token": "bird",
        "query_span": [0, 4],
        "document_token": "Bird",
        "document_span": [where, where + 4],
        "similarity": 0.91,
    }
    nothing = explanation_json({"colbert": Explanation("d", -np.inf, "", ())})
    assert json.dumps(nothing, allow_nan=False) == '{"colbert": {"score": null, "matches": []}}'
    assert content["bm25"] == {"score": 1.25, "words": [{"word": "bird", "score": 1.25}, {"word": "wings", "score": 0.0}]}


def test_options_that_need_texts_are_refused_for_an_index_without_texts(quiver: Quiver, built: Built, tmp_path: Path) -> None:
    build_index(DOCUMENTS, load_model(built.dense_model), tmp_path / "bare", options=BuildOptions(store_text=False))
    for options, message in (
        (("--fuse", "bm25"), "which BM25 needs"),
        (("--rerank", built.colbert_model), "the index stores no texts, which a model needs for re-ranking"),
    ):
        done = quiver("search", tmp_path / "bare", QUERY, *options)
        assert (done.code, done.err.count("\n")) == (2, 1), done.err
        assert message in done.err
    hits = found(quiver, tmp_path / "bare", QUERY, "--rerank", built.colbert)
    assert all(hit["text"] for hit in hits)  # the other index keeps them
    done = quiver("search", built.dense, "--queries", built.dense / "FORMAT", "--out", tmp_path / "r", "--explain")
    assert "--explain explains the results of one query text" in done.err


@pytest.mark.parametrize("second", [(), ("--fuse", "bm25"), ("--rerank", "{colbert_model}")], ids=" ".join)
def test_search_reports_that_nothing_was_found(quiver: Quiver, built: Built, tmp_path: Path, second: tuple[str, ...]) -> None:
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "xylophone"}\n')
    (tmp_path / "ids").write_text("unknown\n")
    more = [option.format(**built._asdict()) for option in second]
    for asked in (["--filter", "year<1900", *more], ["--ids", tmp_path / "ids", *more]):
        for shown in ((), ("--explain",)):
            done = quiver("search", built.colbert, "xylophone", *asked, *shown)
            assert (done.code, done.out.partition(";")[0].strip()) == (0, "nothing found: none of 4 documents matches the filter"), done.err
            assert ("values of year: " in done.out) == ("--filter" in asked)
            assert found(quiver, built.dense, "xylophone", *asked, *shown) == []
        done = quiver("search", built.dense, "--queries", tmp_path / "queries.jsonl", "--out", tmp_path / "run", *asked)
        assert (done.code, done.out) == (0, f"{tmp_path / 'run'}: 1 queries, 0 documents; no results for 1 of them\n"), done.err
        assert (tmp_path / "run").read_text() == ""


def test_values_in_a_message_are_short_and_without_control_characters(quiver: Quiver, tmp_path: Path) -> None:
    values = ("\x1b]0;title\x07red\nblue", "y" * 500)
    build_index([Document(str(n), "words", metadata={"kind": value}) for n, value in enumerate(values)], "bm25", tmp_path / "index")
    done = quiver("search", tmp_path / "index", "words", "--filter", "kind = 'none'")
    assert f"values of kind: ]0;title red blue (1), {'y' * 40} (1)" in " ".join(done.out.split())
    assert "\x1b" not in done.out


def test_search_refuses_to_fuse_indexes_without_a_common_document(quiver: Quiver, built: Built, tmp_path: Path) -> None:
    others = [document._replace(id=f"other-{document.id}") for document in DOCUMENTS[:3]]
    build_index(others, load_model(built.dense_model), tmp_path / "others")
    done = quiver("search", built.dense, QUERY, "--fuse", tmp_path / "others")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "none of its 3 document ids is among the 4 of" in done.err
    assert quiver("search", built.dense, QUERY, "--fuse", tmp_path / "others", "--weights", "1,0").code == 0


def test_search_warns_when_fused_indexes_share_only_some_documents(
    quiver: Quiver, built: Built, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(built.dense_model)
    build_index([*DOCUMENTS[:2], Document("d9", "a new one")], model, tmp_path / "some")
    add_documents(tmp_path / "some", DOCUMENTS[2:3], model)
    delete_documents(tmp_path / "some", ["d1"])  # of d1 to d4 it still has d2 and d3
    assert quiver("search", built.dense, QUERY, "--fuse", tmp_path / "some").code == 0
    assert "2 documents are in both, 4 in one and 3 in the other (40% in common)" in caplog.text
    caplog.clear()
    assert quiver("search", built.dense, QUERY, "--fuse", built.colbert).code == 0
    assert caplog.text == ""
    build_index([DOCUMENTS[0]._replace(text="another passage"), *DOCUMENTS[1:]], model, tmp_path / "cut")
    assert quiver("search", built.dense, QUERY, "--fuse", tmp_path / "cut").code == 0
    assert "of 4 in both that were compared, 1 have another text; to fuse one index with BM25 over its own texts: " in caplog.text


def test_lengths_prompts_and_width_by_option_are_remembered_by_the_index(quiver: Quiver, built: Built, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"_id": each.id, "text": each.text}) + "\n" for each in DOCUMENTS))
    given = ("--document-length", 20, "--query-prompt", "find: ", "--document-prompt", "text: ", "--truncate-dim", 8)
    done = quiver("index", "build", tmp_path / "corpus.jsonl", "--model", built.dense_model, "--out", tmp_path / "i", *given, "--json")
    assert done.code == 0, done.err
    model = json.loads(done.out)["model"]
    assert (model["query_prompt"], model["document_prompt"], model["document_length"], model["dim"]) == ("find: ", "text: ", 20, 8)
    index = open_index(tmp_path / "i")
    assert scores(found(quiver, tmp_path / "i", QUERY)) == pytest.approx({hit.id: hit.score for hit in index.search(QUERY, 10)})
    refused = quiver("index", "build", tmp_path / "corpus.jsonl", "--model", "bm25", "--out", tmp_path / "w", *given)
    assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
