"""Hard negatives against ``mine_hard_negatives`` of sentence-transformers with equal settings and a real model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.retrieval.data.docstrings import mine, split_by_module
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.training.mining.negatives import Margin, MiningSystem, Output, Ranks, Rules, mine_negatives
from quiver.retrieval.training.mining.teacher_scores import load_teacher, score_rows
from quiver.retrieval.training.mining.texts import PairSource
from quiver.retrieval.training.recipe import DataSection

sentence_transformers = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.parity

COUNT = 60
NEGATIVES = 4


@pytest.fixture(scope="module")
def pairs() -> list[dict[str, str]]:
    """Docstrings and functions of the standard library, short ones; two queries have two positives."""
    found = [pair for pair in split_by_module(mine(), held_out=0.15, seed=1)[0] if len(pair.code) < 400][::25][:COUNT]
    rows = [{"query": pair.query, "positive": pair.code} for pair in found]
    assert len({row["query"] for row in rows}) == len({row["positive"] for row in rows}) == COUNT
    return [*rows, *({"query": rows[place]["query"], "positive": rows[place + 10]["positive"]} for place in (2, 5))]


@pytest.fixture(scope="module")
def reference(minilm: Path) -> Any:
    return sentence_transformers.SentenceTransformer(str(minilm), device="cpu")


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache of the vectors of each library: the texts are the same for every setting."""
    return tmp_path_factory.mktemp("vectors")


@pytest.mark.parametrize(
    ("rules", "settings"),
    [
        (Rules(NEGATIVES, Ranks(1, 30)), {"relative_margin": 0.05, "range_max": 30}),
        (Rules(NEGATIVES, Ranks(1, 30), (Margin("margin-pos", 0.1),)), {"absolute_margin": 0.1, "range_max": 30}),
        (Rules(NEGATIVES, Ranks(1, 30), (Margin("max-score", 0.3),)), {"max_score": 0.3, "range_max": 30}),
        (Rules(NEGATIVES, Ranks(6, 30), ()), {"range_min": 5, "range_max": 30}),
    ],
    ids=["perc-pos", "margin-pos", "max-score", "ranks"],
)
def test_the_same_negatives(
    rules: Rules, settings: dict[str, Any], pairs: list[dict[str, str]], minilm: Path, reference: Any, vectors: Path, tmp_path: Path
) -> None:
    theirs = sentence_transformers.util.mine_hard_negatives(
        datasets.Dataset.from_list(pairs),
        reference,
        num_negatives=NEGATIVES,
        output_format="n-tuple",
        output_scores=True,
        verbose=False,
        cache_folder=str(vectors / "theirs"),
        **settings,
    )
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    system = MiningSystem(load_model(minilm), cache=vectors / "ours")
    mine_negatives(PairSource((str(file),)), system, tmp_path / "out", rules=rules, output=Output())
    ours = [json.loads(line) for line in gzip.decompress((tmp_path / "out" / "train.jsonl.gz").read_bytes()).splitlines()]
    whole = {(row["query"], row["positive"]): row for row in ours if len(row["negatives"]) == NEGATIVES}
    # They drop what is short, as data.short_rows: skip does; rows of one query need not be neighbours there.
    assert len(theirs) == len(whole) > COUNT / 3
    for row in theirs:
        mined = whole[row["query"], row["positive"]]
        assert mined["negatives"] == [row[f"negative_{place}"] for place in range(1, NEGATIVES + 1)]
        assert mined["scores"] == pytest.approx(row["scores"], abs=1e-5)


def test_scores_of_a_folder_of_bge_m3s_layout(bge_m3: Path, tmp_path: Path) -> None:
    long = "how wide is a local layer of number 7 " * 9
    texts = ["a bird has wings", "the sea is deep, 128 wide?", "which layer", long, "\u00e9 wings", ""]
    rows = [{"query": query, "positive": texts[0], "negatives": texts[1:]} for query in texts[:-1]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(train=(str(tmp_path / "rows.jsonl"),), document_fields=("positive", "negatives"))
    score_rows(section, load_teacher(str(bge_m3)), tmp_path / "out")
    reference = sentence_transformers.SentenceTransformer(str(bge_m3), device="cpu")
    expected = reference.similarity(reference.encode_query(texts[:-1]), reference.encode_document(texts)).numpy()
    ours = [json.loads(line)["scores"] for line in gzip.decompress((tmp_path / "out" / "train.jsonl.gz").read_bytes()).splitlines()]
    np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=0)
    assert np.ptp(expected) > 0.1
