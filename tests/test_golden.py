"""What the first version gave on real collections: scores, and packed batches of pretraining."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from quiver import BiEncoder, evaluate
from quiver.encoder import Tokenizer
from quiver.encoder.pretraining.corpus import open_corpus
from quiver.encoder.pretraining.recipe import load_pretraining_recipe
from quiver.encoder.pretraining.run import prepare
from quiver.encoder.pretraining.stream import PhaseStream
from quiver.encoder.training.processes import Processes

WIDTH = 64
PROSE = dict.fromkeys(("name", "description", "source", "cost", "expected"), "golden")
pytestmark = [pytest.mark.data, pytest.mark.slow]

# all-MiniLM-L6-v2 and BM25, nDCG@10.
SCORES = {"cranfield": (0.50900, 0.46400), "cosqa": (0.59263, 0.28414), "scifact": (0.64508, 0.65685)}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("collection", [pytest.param(name, marks=[] if name == "cranfield" else pytest.mark.exhaustive) for name in SCORES])
def test_scores(collection: str, minilm: Path, quiver_data: Path, tmp_path: Path) -> None:
    results = evaluate(BiEncoder(minilm), quiver_data / collection, out=tmp_path / "out")
    [found] = results.collections
    assert (found.measures["ndcg@10"], found.baselines[0].measures["ndcg@10"]) == pytest.approx(SCORES[collection], abs=1e-4)


def test_packed_batches_of_pretraining(quiver_data: Path, tmp_path: Path) -> None:
    abstracts = read_lines(quiver_data / "scifact" / "corpus.jsonl")[:600]
    write_lines(tmp_path / "abstracts.jsonl", ({"title": row["title"], "text": row["text"]} for row in abstracts))
    code = read_lines(quiver_data / "cosqa" / "corpus.jsonl")[:600]
    (tmp_path / "code.txt").write_text("".join(" ".join(row["text"].split()) + "\n" for row in code), encoding="utf-8")
    short = {"name": "short", "tokens": 8000, "context": 64, "batch_size": 16, "micro_batch": 4, "warmup_tokens": 1600}
    long = {"name": "long", "tokens": 10_000, "context": 128, "global_theta": 160_000, "batch_size": 8, "micro_batch": 2}
    mix = [{"source": "abstracts", "times": 2}, {"source": "code", "times": 0.5}]
    phase = {"global_theta": 10_000, "learning_rate": 3e-3}
    recipe = PROSE | {
        "kind": "pretraining",
        "model": {
            "init": "random",
            "tokenizer": "train",
            "layers": 4,
            "hidden_size": WIDTH,
            "heads": 2,
            "intermediate_size": 96,
            "window": 16,
            "global_every": 3,
            "vocabulary": {"size": 1024, "unused": 16},
            "decoder_bias": "frequencies",
        },
        "data": {
            "sources": [
                {"name": "abstracts", "path": str(tmp_path / "abstracts.jsonl")},
                {"name": "code", "path": str(tmp_path / "code.txt"), "lines": True},
            ],
            "held_out": 0.02,
            "held_out_tokens": 2000,
        },
        "phases": [phase | short | {"batch_warmup_tokens": 2400}, phase | long | {"decay_tokens": 5000, "mix": mix}],
        "training": {"seed": 7, "log_every": 1, "evaluate_every": 5},
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    resolved = load_pretraining_recipe(tmp_path / "recipe.json")
    prepare(resolved, tmp_path / "run")
    corpus = open_corpus(tmp_path / "run" / "corpus")
    tokenizer = Tokenizer.from_pretrained(tmp_path / "run" / "tokenizer")
    digests = []
    for number in range(2):
        total = hashlib.sha256()
        rows = (row for update in PhaseStream(resolved, number, corpus, tokenizer, Processes()).updates() for row in update.rows)
        for row, _ in zip(rows, range(20), strict=False):
            for part in (row.batch.ids, row.batch.cu_seqlens, row.labels):
                total.update(part.numpy().tobytes())
        digests.append(total.hexdigest())
    assert digests == [
        "7c124b1383a4f7b91de6606268387b979bebe50e437a7f1004b766902152e821",
        "5cfb389d1d2602dd85411abc268a19684cb8ff0b5eebada658de6a35d552699f",
    ]
