"""Hard negatives: rules computed by hand, runs against a brute-force search, and killed runs."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.encoder import InputError
from quiver.encoder.work_folder import WorkFolder
from quiver.eval.datasets.benchmarks import Policy
from quiver.eval.rankers import StreamedWords
from quiver.retrieval.data.corpus import load_collection
from quiver.retrieval.index import BuildOptions, build_index, delete_documents, open_index
from quiver.retrieval.records import Document
from quiver.retrieval.search.bm25 import PARAMETERS
from quiver.retrieval.training.data import prepare_rows
from quiver.retrieval.training.mining import negatives
from quiver.retrieval.training.mining.negatives import (
    Margin,
    MiningSystem,
    Output,
    Ranks,
    Rules,
    choose_negatives,
    mine_negatives,
    parse_margins,
    parse_ranks,
    rankable,
)
from quiver.retrieval.training.mining.searchers import BM25Searcher, Ranked
from quiver.retrieval.training.mining.texts import BeirSource, PairSource, TextTableWriter, content_id
from quiver.retrieval.training.recipe import DataSection

WORDS = [f"w{number}" for number in range(40)]


def sentences(count: int, *, seed: int, most: int = 6) -> list[str]:
    """Distinct texts of a few words."""
    draw, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        found[" ".join(draw.sample(WORDS, draw.randint(1, most)))] = None
    return list(found)


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def pairs_file(folder: Path, *, count: int = 60) -> tuple[Path, list[tuple[str, str]]]:
    queries, documents = sentences(count, seed=1), sentences(count, seed=2, most=9)
    pairs = list(zip(queries, documents, strict=True))
    # A query with two positives, a positive of two queries, and a pair that comes twice.
    pairs += [(queries[0], documents[7]), (queries[3], documents[0]), (queries[5], documents[5])]
    return write_lines(folder / "pairs.jsonl.gz", [{"query": query, "pos": document, "extra": 1} for query, document in pairs]), pairs


@cache
def vectors(kind: Callable[[], Any], text: str) -> NDArray[np.float64]:
    found: NDArray[np.float64] = kind().encode_texts([text], "document").vectors[0].astype(np.float64)
    return found


def similarity(model: Any, query: str, document: str) -> float:
    product = vectors(type(model), query) @ vectors(type(model), document).T
    return float(product if product.ndim == 0 else product.max(axis=1).sum())


def brute_force(model: Any, pairs: Sequence[tuple[str, str]], corpus: Sequence[str], rules: Rules) -> list[tuple[str, str, list[str]]]:
    """Expected result by comparing every query with every document: query, positive, negatives."""
    positives: dict[str, list[str]] = {}
    for query, document in pairs:
        if document not in positives.setdefault(query, []):
            positives[query].append(document)
    expected = []
    for query, relevant in positives.items():
        # Rounded once, as an index gives them: what is equal then is a tie, and goes to the greater id.
        scores = {text: float(np.float32(similarity(model, query, text))) for text in corpus}
        same = {" ".join(text.lower().split()) for text in (*relevant, query)}
        others = [text for text in corpus if " ".join(text.lower().split()) not in same]
        ranking = sorted(others, key=lambda text: (scores[text], content_id(text)), reverse=True)
        candidates = ranking[rules.ranks.first - 1 : rules.ranks.last]
        lowest = min(scores[text] for text in relevant)
        for margin in rules.margins:
            limit = {"perc-pos": lowest * margin.value, "margin-pos": lowest - margin.value, "max-score": margin.value}[margin.name]
            candidates = [text for text in candidates if scores[text] <= limit]
        expected += [(query, positive, candidates[: rules.negatives]) for positive in relevant]
    return expected


def test_ranks_margins_and_copies_by_hand() -> None:
    found = Ranked(np.array([10, 4, 5, 6, 7, 8]), np.array([0.9, 0.8, 0.79, 0.7, 0.6, 0.5], np.float32))
    same = np.array([10, 4, 4, 6, 7, 8])  # 5 is a copy of 4
    rules = Rules(negatives=2, ranks=Ranks(1, 4), margins=(Margin("perc-pos", 0.9), Margin("margin-pos", 0.25)))
    picked = choose_negatives(found, rankable(same, np.array([10])), 0.9, rules, query=0)
    assert picked.chosen.rows.tolist() == [7, 8]
    assert picked.chosen.scores.tolist() == pytest.approx([0.6, 0.5])
    assert (picked.suspects.rows.tolist(), picked.ranks.tolist()) == ([4, 6], [1, 2])  # below 0.81, above 0.65
    assert picked.dropped == {"perc-pos": 0, "margin-pos": 2}
    assert (picked.candidates, picked.left_out) == (4, 2)


def test_a_random_choice_depends_on_seed_and_query_alone() -> None:
    found = Ranked(np.arange(50), np.linspace(1, 0, 50, dtype=np.float32))

    def draw(seed: int, query: int) -> list[int]:
        rules = Rules(negatives=5, ranks=Ranks(11, 40), margins=(), choice="random", seed=seed)
        rows: list[int] = choose_negatives(found, rankable(np.arange(50), np.array([-1])), 1.0, rules, query=query).chosen.rows.tolist()
        return rows

    drawn = [draw(seed, query) for seed in range(4) for query in range(4)]
    assert draw(2, 3) == drawn[11]
    assert len({tuple(rows) for rows in drawn}) == 16
    for rows in drawn:
        assert rows == sorted(set(rows))
        assert 10 <= min(rows) <= max(rows) < 40
    assert set().union(*(draw(seed, 0) for seed in range(200))) == set(range(10, 40))


@pytest.mark.parametrize("text", ["10", "a-b", "5-", "-3", "1-2-3", ""])
def test_invalid_ranks_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="FIRST-LAST"):
        parse_ranks(text)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["perc=0.9"], "perc-pos=VALUE, margin-pos=VALUE, max-score=VALUE"),
        (["perc-pos"], "perc-pos=VALUE"),
        (["perc-pos=much"], "must be a finite number"),
        (["perc-pos=nan"], "must be a finite number"),
        (["none", "max-score=1"], "or none; got"),
        (["max-score=1", "max-score=2"], "given twice"),
    ],
)
def test_invalid_margins_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_margins(texts)
    assert parse_margins(["none"]) == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"negatives": 0}, "negatives must be >= 1, got 0"),
        ({"ranks": Ranks(0, 5)}, "got 0-5"),
        ({"ranks": Ranks(6, 5)}, "got 6-5"),
        ({"ranks": Ranks(6, 10), "negatives": 6}, "hold 5 documents, fewer than 6 negatives"),
        ({"margins": parse_margins(["perc-pos=95"])}, "perc-pos must be a share of the positive's score, above 0 and at most 1 .*; got 95"),
        ({"margins": parse_margins(["perc-pos=0"])}, "perc-pos must be a share .*; got 0"),
        ({"margins": parse_margins(["perc-pos=-1"])}, "perc-pos must be a share .*; got -1"),
        ({"margins": parse_margins(["max-score=3", "margin-pos=-0.1"])}, "margin-pos must be a distance .*, at least 0; got -0.1"),
        ({"margins": (Margin("max-score", float("nan")),)}, "max-score must be a finite score; got nan"),
    ],
)
def test_rules_that_cannot_be_met_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Rules(**values)


RULES = [
    Rules(negatives=4, ranks=Ranks(1, 30)),
    Rules(negatives=3, ranks=Ranks(5, 12), margins=()),
    Rules(negatives=50, ranks=Ranks(1, 60), margins=(Margin("margin-pos", 0.5), Margin("max-score", 2.0))),
]


@pytest.mark.parametrize("rules", RULES, ids=["perc-pos", "ranks", "two margins"])
@pytest.mark.parametrize("kind", ["word_sum", "word_by_word"])
def test_negatives_of_pairs_equal_brute_force(
    kind: str, rules: Rules, request: pytest.FixtureRequest, tmp_path: Path, small_parts: None
) -> None:
    model = request.getfixturevalue(kind)
    path, pairs = pairs_file(tmp_path)
    corpus = list(dict.fromkeys(document for _, document in pairs))
    record = mine_negatives(
        PairSource((str(path),), positive_field="pos"), MiningSystem(model), tmp_path / "out", rules=rules, output=Output(suspects=100)
    )
    rows = read_lines(tmp_path / "out" / "train.jsonl.gz")
    expected = brute_force(model, pairs, corpus, rules)
    assert [(row["query"], row["positive"], row["negatives"]) for row in rows] == expected
    for row in rows:
        documents = [row["positive"], *row["negatives"]]
        assert row["document_ids"] == [content_id(text) for text in documents]
        assert row["scores"] == pytest.approx([similarity(model, row["query"], text) for text in documents], rel=1e-6, abs=1e-6)
    result = record["result"]
    assert (result["queries"], result["rows"]) == (60, 62)
    assert result["rows_short"] == sum(len(negatives) < rules.negatives for *_, negatives in expected)
    assert result["rows_without_negatives"] == sum(not negatives for *_, negatives in expected)
    suspects = read_lines(tmp_path / "out" / "suspects.jsonl.gz")
    assert len(suspects) == result["suspects"] == sum(result["dropped"].values())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mining.json", "suspects.jsonl.gz", "train.jsonl.gz"]
    assert json.loads((tmp_path / "out" / "mining.json").read_text()) == json.loads(json.dumps(record))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of seven queries."""
    monkeypatch.setattr(negatives, "QUERIES_PER_PART", (7, 7))


def test_copies_of_the_positive_and_the_query_are_not_negatives(word_sum: Any, tmp_path: Path) -> None:
    corpus = ["w1 w2 w3", " W1  w2 w3", "w1 w2\tW3 ", "w1 w2", "W1 W2", "w1 w3", "w1 w3", "", "   ", "w9"]
    write_lines(tmp_path / "corpus.jsonl", [{"_id": f"d{place}", "text": text} for place, text in enumerate(corpus)])
    path = write_lines(tmp_path / "pairs.jsonl", [{"query": "w1 w2", "positive": "w1 w2 w3"}])
    rules = Rules(negatives=4, ranks=Ranks(1, 4), margins=())
    source = PairSource((str(path),), corpus=tmp_path / "corpus.jsonl")
    record = mine_negatives(source, MiningSystem(word_sum), tmp_path / "out", rules=rules, output=Output())
    (row,) = read_lines(tmp_path / "out" / "train.jsonl.gz")
    assert row["document_ids"][0] == "d0"  # the positive is found in the corpus by its text
    assert sorted(row["negatives"]) == ["w1 w3", "w9"]
    assert record["result"]["copies"] == 7  # two of the positive, two of the query, one of "w1 w3", two blank
    assert record["data"]["documents"] == 10


def test_positives_missing_from_the_corpus_are_added(word_sum: Any, tmp_path: Path) -> None:
    path, pairs = pairs_file(tmp_path)
    corpus = [*sentences(25, seed=7, most=8), pairs[4][1]]
    write_lines(tmp_path / "corpus.jsonl", [{"_id": f"d{place}", "text": text} for place, text in enumerate(corpus)])
    rules = Rules(negatives=6, ranks=Ranks(1, 40))
    source = PairSource((str(path),), positive_field="pos", corpus=tmp_path)
    record = mine_negatives(source, MiningSystem(word_sum), tmp_path / "out", rules=rules, output=Output())
    everything = list(dict.fromkeys([*corpus, *(document for _, document in pairs)]))
    assert record["data"]["documents"] == len(everything)
    rows = read_lines(tmp_path / "out" / "train.jsonl.gz")
    assert [(row["query"], row["positive"], row["negatives"]) for row in rows] == brute_force(word_sum, pairs, everything, rules)
    assert {key for row in rows for key in row["document_ids"] if key.startswith("d")} > {"d25"}


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    documents = sentences(50, seed=3)
    titled = [{"_id": f"d{place}", "title": "w0" if place % 3 else "", "text": text} for place, text in enumerate(documents)]
    write_lines(folder / "corpus.jsonl", titled)
    queries = sentences(12, seed=4)
    queries[3] = queries[2].upper()  # the same query under another id
    write_lines(folder / "queries.jsonl", [{"_id": f"q{place}", "text": text} for place, text in enumerate(queries)])
    grades = ["query-id\tcorpus-id\tscore"]
    grades += [f"q{place}\td{place}\t1" for place in range(10)] + ["q0\td20\t2", "q0\td21\t0", "q11\td5\t0"]
    (folder / "qrels" / "train.tsv").write_text("\n".join(grades) + "\n")
    return folder


def test_a_beir_folder_is_mined_by_its_judgements(beir: Path, word_sum: Any, tmp_path: Path) -> None:
    rules = Rules(negatives=50, ranks=Ranks(1, 50), margins=())
    record = mine_negatives(BeirSource(beir), MiningSystem(word_sum), tmp_path / "out", rules=rules, output=Output())
    rows = read_lines(tmp_path / "out" / "train.jsonl.gz")
    assert [(row["query_id"], row["document_ids"][0]) for row in rows] == [
        ("q0", "d0"),
        ("q0", "d20"),
        *((f"q{place}", f"d{place}") for place in range(1, 10)),
    ]
    assert record["data"]["without_positive"] == 1
    by_query = {row["query_id"]: row for row in rows}
    assert "d21" in by_query["q0"]["document_ids"]  # judged, and not relevant
    assert not {"d0", "d20"} & set(by_query["q0"]["document_ids"][1:])
    for key in ("q2", "q3"):  # what is relevant for one is no negative of the other
        assert not {"d2", "d3"} & set(by_query[key]["document_ids"][1:])
    contents = {document.id: document.content() for document in load_collection(beir, "train").documents}
    for row in rows:
        assert [row["positive"], *row["negatives"]] == [contents[key] for key in row["document_ids"]]


@pytest.mark.parametrize("system", ["word_sum", "word_by_word", "bm25"])
def test_the_last_rank_is_reached_despite_many_copies(system: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A corpus with 15 copies of each text gives the same negatives as the corpus without copies."""
    texts = [f"w0 {text}" for text in sentences(60, seed=8, most=4)]
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"query": f"w0 {text}", "positive": text} for text in texts[:12]])
    model = None if system == "bm25" else request.getfixturevalue(system)
    rules, rows, records = Rules(negatives=20, ranks=Ranks(1, 40), margins=()), {}, {}
    for copies in (1, 15):
        folder = tmp_path / str(copies)
        folder.mkdir()
        corpus = [{"_id": f"{place:02}-{copy}", "text": text} for copy in range(copies) for place, text in enumerate(texts)]
        write_lines(folder / "corpus.jsonl", corpus)
        source = PairSource((str(pairs),), corpus=folder)
        records[copies] = mine_negatives(source, MiningSystem(model), folder / "out", rules=rules, output=Output())["result"]
        rows[copies] = read_lines(folder / "out" / "train.jsonl.gz")
    assert records[15]["rows_short"] == records[1]["rows_short"] == 0
    assert records[15]["candidates"] == records[1]["candidates"] == 12 * 40
    assert all(len(set(row["negatives"])) == 20 for row in rows[15])
    if model is not None:  # to BM25 a corpus of copies has other word frequencies
        for alone, among in zip(rows[1], rows[15], strict=True):
            assert among["scores"] == pytest.approx(alone["scores"], rel=1e-6)


@pytest.mark.parametrize("kind", ["word_sum", "word_by_word"])
def test_an_index_and_its_model_mine_the_same_negatives(kind: str, request: pytest.FixtureRequest, beir: Path, tmp_path: Path) -> None:
    model = request.getfixturevalue(kind)
    rules = Rules(negatives=5, ranks=Ranks(2, 30))
    index = build_index(beir, model, tmp_path / "index")
    for name, system in (("by-model", MiningSystem(model)), ("by-index", MiningSystem(model, index))):
        mine_negatives(BeirSource(beir), system, tmp_path / name, rules=rules, output=Output())
    for name in ("train.jsonl.gz", "suspects.jsonl.gz"):
        by_model, by_index = (read_lines(tmp_path / system / name) for system in ("by-model", "by-index"))
        # An index on the disk rounds exact scores once; vectors in memory give the scores of a float32 product.
        assert [close(row) for row in by_model] == by_index
        assert by_model


def close(row: dict[str, Any]) -> dict[str, Any]:
    """A row that compares equal if its scores differ by at most 1e-6."""
    return {name: pytest.approx(value, abs=1e-6) if "score" in name else value for name, value in row.items()}


@pytest.mark.parametrize("with_index", [False, True])
def test_relevant_documents_without_a_text_are_left_out_and_counted(
    beir: Path, word_sum: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, with_index: bool
) -> None:
    lines = (beir / "corpus.jsonl").read_text().splitlines()
    part = tmp_path / "part.jsonl" if with_index else beir / "corpus.jsonl"
    part.write_text("\n".join(lines[:7]) + "\n")
    index = build_index(part, word_sum, tmp_path / "part") if with_index else None
    rules = Rules(negatives=1, ranks=Ranks(1, 5), margins=())
    record = mine_negatives(BeirSource(beir), MiningSystem(word_sum, index), tmp_path / "out", rules=rules, output=Output())
    rows = read_lines(tmp_path / "out" / "train.jsonl.gz")
    assert [row["document_ids"][0] for row in rows] == [f"d{place}" for place in range(7)]
    assert (record["data"]["missing_positives"], record["data"]["without_positive"]) == (4, 4)
    assert "4 of 11 relevant judgements name documents that are not in" in caplog.text


@pytest.mark.parametrize("ids", [False, True])
def test_mined_rows_can_be_trained_on(ids: bool, beir: Path, word_sum: Any, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    out = tmp_path / "out"
    rules = Rules(negatives=4, ranks=Ranks(1, 5), margins=(Margin("max-score", 1.0),))
    mine_negatives(BeirSource(beir), MiningSystem(word_sum), out, rules=rules, output=Output(ids=ids))
    rows = read_lines(out / "train.jsonl.gz")
    fields: dict[str, Any] = {"document_fields": ("positive", "negatives")}
    if ids:
        assert set(rows[0]) == {"query_id", "document_ids", "scores"}
        sources = {name: str(out / f"{name}.jsonl.gz") for name in ("queries", "documents")}
        fields = {"format": "ids", "query_field": "query_id", "document_fields": ("document_ids",), **sources}
        used = {key for row in rows for key in row["document_ids"]}
        assert {row["document_id"] for row in read_lines(out / "documents.jsonl.gz")} == used
    section = DataSection(train=(str(out / "train.jsonl.gz"),), score_fields=("scores",), documents_per_row=5, short_rows="skip", **fields)
    (tmp_path / "work").mkdir()
    prepared = prepare_rows(section, tmp_path / "work", seed=1)
    whole = [row for row in rows if len(row["scores"]) == 5]
    assert 0 < len(prepared) == len(whole) < len(rows)
    assert prepared.counts.skipped == len(rows) - len(whole)
    contents = {document.id: document.content() for document in load_collection(beir, "train").documents}
    for row, mined in zip((prepared[place] for place in range(len(prepared))), whole, strict=True):
        assert [row[f"document_{place}"] for place in range(1, 6)] == [contents[key] for key in mined["document_ids"]]
        assert row["scores"] == mined["scores"]


def test_mining_and_evaluation_use_the_same_bm25(beir: Path, tmp_path: Path) -> None:
    collection = load_collection(beir, "train")
    documents = list(collection.documents)
    searcher = BM25Searcher(
        [query.text for query in collection.queries],
        (document.content() for document in documents),
        [document.id for document in documents],
        searchable=len(documents),
    )
    expected = StreamedWords(Policy(), collection).search(collection.queries, 20).to_run([query.id for query in collection.queries])
    asked = np.arange(len(collection.queries))
    also = [np.arange(place, len(documents)) for place in asked]
    for place, (ranked, scores) in enumerate(searcher.search(asked, 20, also=also)):
        found = {documents[row].id: float(score) for row, score in zip(ranked.rows, ranked.scores, strict=True)}
        wanted = expected[collection.queries[place].id]
        assert list(found) == list(dict(sorted(wanted.items(), key=lambda hit: (hit[1], hit[0]), reverse=True)))
        assert found == pytest.approx(wanted, rel=1e-6)
        of = dict(zip(also[place].tolist(), scores.tolist(), strict=True))
        common = [row for row in ranked.rows.tolist() if row >= place]
        assert [of[row] for row in common] == [found[documents[row].id] for row in common]


def test_bm25_mines_negatives(tmp_path: Path) -> None:
    path, _ = pairs_file(tmp_path)
    rules = Rules(negatives=3, ranks=Ranks(2, 20), margins=(), choice="random")
    record = mine_negatives(
        PairSource((str(path),), positive_field="pos"), MiningSystem(None), tmp_path / "out", rules=rules, output=Output()
    )
    assert record["system"] == {"name": "bm25", **PARAMETERS}
    rows = read_lines(tmp_path / "out" / "train.jsonl.gz")
    assert sum(len(row["negatives"]) == 3 for row in rows) > 40
    for row in rows:
        assert all(set(row["query"].split()) & set(text.split()) for text in row["negatives"])
    blank = write_lines(tmp_path / "blank.jsonl", [{"query": "a", "positive": "a b"}])
    with pytest.raises(InputError, match="no document contains a word"):
        mine_negatives(PairSource((str(blank),)), MiningSystem(None), tmp_path / "none", rules=rules, output=Output())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"query": "a", "pos": "b"}], "pairs.jsonl:1: no field 'positive'; the row's fields are query, pos"),
        ([{"query": "a", "positive": "b"}, {"query": " ", "positive": "b"}], "pairs.jsonl:2: the field 'query' is blank"),
        ([{"query": "a", "positive": "b"}, {"query": "a", "positive": []}], "pairs.jsonl:2: the field 'positive' has no positive"),
        ([{"query": "a", "positive": ["b", " "]}], "pairs.jsonl:1: the field 'positive' holds a blank positive"),
        ([{"query": "a", "positive": 7}], "pairs.jsonl:1: the field 'positive' must hold text, got 7"),
    ],
)
def test_malformed_pairs_are_refused(rows: list[Any], message: str, word_sum: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(InputError, match=message):
        mine_negatives(PairSource((str(path),)), MiningSystem(word_sum), tmp_path / "out", rules=Rules(), output=Output())
    assert not (tmp_path / "out").exists()


def test_a_list_of_positives_is_one_row_each(word_sum: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", [{"query": "w1", "positive": ["w1 w2", "w1 w3"]}, {"query": "w4", "positive": "w4 w5"}])
    rules = Rules(negatives=1, ranks=Ranks(1, 3), margins=())
    mine_negatives(PairSource((str(path),)), MiningSystem(word_sum), tmp_path / "out", rules=rules, output=Output())
    rows = read_lines(tmp_path / "out" / "train.jsonl.gz")
    assert [(row["query"], row["positive"], len(row["negatives"])) for row in rows] == [
        ("w1", "w1 w2", 1),
        ("w1", "w1 w3", 1),
        ("w4", "w4 w5", 1),
    ]
    assert rows[0]["negatives"] == ["w4 w5"]


def stopped(source: PairSource, model: Any, out: Path, monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """A run that fails once some parts are written."""

    class StopError(Exception):
        pass

    written, plain = 0, WorkFolder.save

    def write(self: WorkFolder, part: str, content: bytes) -> None:
        nonlocal written
        written += 1
        if written > after:
            raise StopError
        plain(self, part, content)

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "save", write)
        with pytest.raises(StopError):
            mine_negatives(source, MiningSystem(model), out, rules=Rules(), output=Output())


def test_parts_of_another_job_are_not_used(
    word_sum: Any, other_word_sum: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_parts: None
) -> None:
    path, _ = pairs_file(tmp_path)
    source, out = PairSource((str(path),), positive_field="pos"), tmp_path / "out"
    stopped(source, word_sum, out, monkeypatch, after=3)
    with pytest.raises(InputError, match=r"holds an unfinished run with other settings: rules\.negatives was 7, is 3;"):
        mine_negatives(source, MiningSystem(word_sum), out, rules=Rules(negatives=3), output=Output())
    index = build_index(write_lines(tmp_path / "corpus.jsonl", [{"_id": "d", "text": "w1"}]), word_sum, tmp_path / "index")
    with pytest.raises(InputError, match=r'other settings: index was null, is "exact-dense";'):
        mine_negatives(source, MiningSystem(word_sum, index), out, rules=Rules(), output=Output())
    with pytest.raises(InputError, match="other settings: system was"):
        mine_negatives(source, MiningSystem(other_word_sum), out, rules=Rules(), output=Output())
    content = path.read_bytes()
    write_lines(path, [{"query": "w1", "pos": "w2"}])
    with pytest.raises(InputError, match="other settings: data was"):
        mine_negatives(source, MiningSystem(word_sum), out, rules=Rules(), output=Output())
    path.write_bytes(content)
    word_sum.card = replace(word_sum.card, source="elsewhere")  # where a model lies does not matter
    assert mine_negatives(source, MiningSystem(word_sum), out, rules=Rules(), output=Output())["result"]["queries"] == 60
    with pytest.raises(InputError, match="holds a finished result"):
        mine_negatives(source, MiningSystem(word_sum), out, rules=Rules(), output=Output())
    record = mine_negatives(source, MiningSystem(word_sum), out, rules=Rules(negatives=2), output=Output(), overwrite=True)
    assert record["rules"]["negatives"] == 2
    assert max(len(row["negatives"]) for row in read_lines(out / "train.jsonl.gz")) == 2


def test_an_index_of_another_model_or_corpus_or_without_texts_is_refused(
    beir: Path, word_sum: Any, other_word_sum: Any, tmp_path: Path
) -> None:
    bare = build_index(beir, word_sum, tmp_path / "bare", options=BuildOptions(store_text=False))
    other = build_index([Document("x", "wings")], word_sum, tmp_path / "other")
    missing = r"beir: 11 of 11 relevant judgements name documents that are not in .*other, such as 'd0'"
    for index, model, message in (
        (bare, other_word_sum, "built with word-sum-a"),
        (bare, word_sum, "bare: built without texts"),
        (other, word_sum, missing),
    ):
        with pytest.raises(InputError, match=message):
            mine_negatives(BeirSource(beir), MiningSystem(model, index), tmp_path / "out", rules=Rules(), output=Output())
    assert not (tmp_path / "out").exists()


def test_texts_of_an_index_are_those_of_its_living_documents(word_sum: Any, tmp_path: Path) -> None:
    build_index([Document(f"d{number}", f"w{number}") for number in range(4)], word_sum, tmp_path / "index")
    delete_documents(tmp_path / "index", ["d1"])
    with TextTableWriter(tmp_path, index=open_index(tmp_path / "index")) as writer:
        assert writer.number(["w3", "new"]).tolist() == [2, 3]
    assert list(writer.table()) == ["w0", "w2", "w3", "new"]
