"""TREC runs: order, round trip, and malformed files."""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import ranked, read_run, write_run


def test_the_order_is_score_as_float32_then_id_both_descending() -> None:
    assert ranked({"a": 30.0, "c": 30.0 + 1e-7, "b": 30.0, "z": -1.0, "top": 31.0}) == ["top", "c", "b", "a", "z"]
    assert ranked({"10": 1.0, "9": 1.0, "É": 1.0, "e": 1.0}) == ["É", "e", "9", "10"]
    assert ranked({}) == []


def test_a_run_is_written_as_trec_text(tmp_path: Path) -> None:
    write_run({"q2": {"a": 0.5, "b": 2.0}, "q1": {"a": 1 / 3}, "q3": {}}, tmp_path / "r.trec", tag="bm25")
    assert (tmp_path / "r.trec").read_text() == "q2 Q0 b 1 2 bm25\nq2 Q0 a 2 0.5 bm25\nq1 Q0 a 1 0.333333343 bm25\n"


def test_a_space_in_an_id_is_written_as_a_sign(tmp_path: Path) -> None:
    run = {"q 1": {"PDF exports/a b.pdf": 2.0, "c": 1.0}}
    write_run(run, tmp_path / "r.trec", tag="x")
    assert (tmp_path / "r.trec").read_text("utf-8").splitlines()[0] == "q\u24201 Q0 PDF\u2420exports/a\u2420b.pdf 1 2 x"
    assert read_run(tmp_path / "r.trec") == run


@pytest.mark.parametrize("name", ["r.trec", "r.trec.gz"])
def test_a_run_read_again_has_the_same_order_and_float32_scores(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    run = {
        f"q{query}": {f"d{rng.integers(10**6)}": float(score) for score in rng.standard_normal(300) * 10.0 ** rng.integers(-20, 20)}
        for query in range(20)
    }
    run["q0"] = {"a": 1.0, "b": 1.0 + 1e-9, "c": np.float32(1.0)}
    write_run(run, tmp_path / name, tag="x")
    again = read_run(tmp_path / name)
    assert list(again) == list(run)
    for query, scores in run.items():
        assert list(again[query]) == ranked(scores) == ranked(again[query])
        assert {document: np.float32(score) for document, score in again[query].items()} == {d: np.float32(s) for d, s in scores.items()}
    if name.endswith(".gz"):
        assert gzip.decompress((tmp_path / name).read_bytes()).startswith(b"q0 Q0 c 1 1 x\n")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"q\n1": {"a": 1.0}}, r"the query id 'q\\n1'"),
        ({"q": {"a\u2420b": 1.0}}, "document id"),
        ({"": {"a": 1.0}}, "the query id ''"),
        ({"q": {"a\tb": 1.0}}, r"the document id 'a\\tb'"),
        ({"q": {"a": float("nan")}}, "query 'q', document 'a': the score is nan"),
        ({"q": {"a": float("inf")}}, "the score is inf"),
    ],
)
def test_ids_and_scores_outside_the_format_are_refused_without_a_file(
    tmp_path: Path, run: dict[str, dict[str, float]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        write_run({"fine": {"a": 1.0}, **run}, tmp_path / "r.trec", tag="x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q1 Q0 d2 2 0.5", "expected 6 columns"),
        ("q1 Q0 d2 2 0.5 my system", "got 7"),
        ("q1 Q0 d2 2 high x", "must be a number, got 'high'"),
        ("q1 Q0 d2 2 nan x", "must be finite, got 'nan'"),
        ("q1 Q0 d2 2 -inf x", "must be finite"),
        ("q1 Q0 d1 2 0.5 x", "document 'd1' is repeated for query 'q1'"),
    ],
)
def test_a_malformed_line_is_reported_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "r.trec"
    path.write_text(f"q1 Q0 d1 1 1.5 x\n{line}\n")
    with pytest.raises(InputError, match=re.escape(f"{path}:2: ") + ".*" + re.escape(message)):
        read_run(path)


def test_an_interrupted_write_keeps_the_old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.trec"
    write_run({"q": {"old": 1.0}}, path, tag="x")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_run({"q": {"new": 1.0}}, path, tag="x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.trec"]
    assert read_run(path) == {"q": {"old": 1.0}}


@pytest.mark.parity
def test_pytrec_eval_ranks_in_the_same_order(tmp_path: Path) -> None:
    pytrec_eval = pytest.importorskip("pytrec_eval")
    rng = np.random.default_rng(1)
    scores = {f"d{number}": float(rng.integers(0, 6) + rng.integers(0, 2) * 1e-9) for number in range(60)}
    for place, document in enumerate(ranked(scores), start=1):
        measured = pytrec_eval.RelevanceEvaluator({"q": {document: 1}}, {"recip_rank"}).evaluate({"q": scores})
        np.testing.assert_allclose(measured["q"]["recip_rank"], 1 / place)
