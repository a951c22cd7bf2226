"""The commands in the heads of recipes run, on stand-ins of the published repositories: the same files, configs and columns, few rows."""

from __future__ import annotations

import gzip
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, save_encoder
from quiver.encoder.files import read_json
from quiver.encoder.training.recipe_file import find_recipe
from quiver.eval.datasets.benchmarks import find
from quiver.eval.results import Results, read_results
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.options import ModelFolder
from quiver.retrieval.training.recipe import load_recipe

pytest.importorskip("pylate.models")
pytestmark = pytest.mark.slow

WORDS = ("oak", "elm", "ash", "fir", "yew", "bay", "fig", "box")
LANGUAGES = ("python", "javascript", "go", "ruby", "java", "php")
QRELS = "CoIR-Retrieval/CodeSearchNet-python-qrels"

SMALL = ("training.batch_size=2", "training.accumulation=1", "training.max_steps=2", "training.log_every=1")
"""Changes that make a training run short; model, data, loss and development collections are those of the recipe."""

# Front matter of lightonai/ms-marco-en-bge at 11e6ffa1.
SCORED_CARD = b"""---
dataset_info:
  - config_name: queries
    features: [{name: query_id, dtype: string}, {name: text, dtype: string}]
  - config_name: documents
    features: [{name: document_id, dtype: string}, {name: text, dtype: string}]
  - config_name: train
    features:
      - {name: query_id, dtype: string}
      - {name: document_ids, sequence: {value: {dtype: string}}}
      - {name: scores, sequence: {value: {dtype: float32}}}
configs:
  - {config_name: queries, data_files: [{split: train, path: english_queries.train.parquet}]}
  - {config_name: documents, data_files: [{split: train, path: english_collection.parquet}]}
  - {config_name: train, data_files: [{split: train, path: dataset.parquet}]}
---
"""


def training_repositories(published: Any) -> dict[str, dict[str, bytes]]:
    """Repositories that recipes train on; those of MLDR and CoIR are evaluated too."""
    texts = [f"{word} is a tree with leaves" for word in WORDS]
    triplets = [
        {"query": f"what is {word}", "positive": text, "negative": f"{word} is no fish"} for word, text in zip(WORDS, texts, strict=True)
    ]
    scored = [
        {"query_id": str(n), "document_ids": [str(100 + (n + k) % 40) for k in range(32)], "scores": [1 - k / 32 for k in range(32)]}
        for n in range(8)
    ]
    asked = [{"query_id": str(n), "text": f"what is {word}"} for n, word in enumerate(WORDS)]
    answers = [{"document_id": str(100 + n), "text": f"text {n} of {WORDS[n % 8]}"} for n in range(40)]
    long = published.mldr_hub("en")["Shitao/MLDR"]
    passages = [{"docid": f"doc-{n}", "text": text} for n, text in enumerate(texts)]
    rows = [
        {
            "query_id": f"q{n}",
            "query": f"what is {word}",
            "positive_passages": [passages[n]],
            "negative_passages": passages[:n] or passages[1:],
        }
        for n, word in enumerate(WORDS)
    ]
    coir = {**published.coir_hub("CodeSearchNet-python"), **published.coir_hub("stackoverflow-qa")}
    judged = published.parquet([{"query_id": row["query-id"], "corpus_id": row["corpus-id"], "score": 1} for row in published.qrels])
    for repository in (QRELS, "CoIR-Retrieval/stackoverflow-qa-qrels"):
        coir[repository]["data/train-00000-of-00001.parquet"] = judged
    return {
        "sentence-transformers/msmarco-co-condenser-margin-mse-sym-mnrl-mean-v1": {
            "README.md": published.card({name: {"train": f"{name}/train-*"} for name in ("triplet", "triplet-hard")}),
            "triplet/train-00000-of-00001.parquet": published.parquet(triplets[:1]),
            "triplet-hard/train-00000-of-00002.parquet": published.parquet(triplets[:4]),
            "triplet-hard/train-00001-of-00002.parquet": published.parquet(triplets[4:]),
        },
        "lightonai/ms-marco-en-bge": {
            "README.md": SCORED_CARD,
            "dataset.parquet": published.parquet(scored),
            "english_queries.train.parquet": published.parquet(asked),
            "english_collection.parquet": published.parquet(answers),
        },
        "lightonai/ms-marco-en-bge-gemma": {
            "README.md": published.card({part: {"train": f"{part}/*.parquet"} for part in ("train", "queries", "documents")}),
            "train/0.parquet": published.parquet([{key: str(value) for key, value in row.items()} for row in scored]),
            "queries/0.parquet": published.parquet(asked),
            "documents/0.parquet": published.parquet(answers),
        },
        "answerdotai/MMARCO-japanese-32-scored-triplets": {
            "README.md": published.card({"default": {"M3_full_normalized": "data/M3_full_normalized-*"}}),
            "data/M3_full_normalized-00000-of-00001.parquet": published.parquet(
                [
                    {"query_id": n, "pos_id": 100 + n, "neg_ids": [120 + k for k in range(31)], "pos_score": 1.0, "neg_scores": [0.5] * 31}
                    for n in range(8)
                ]
            ),
        },
        "Shitao/MLDR": {**long, "mldr-v1.0-en/train.jsonl.gz": gzip.compress(published.jsonl(rows))},
        "CoIR-Retrieval/CodeSearchNet": code_repository(published),
        **coir,
    }


def code_repository(published: Any) -> dict[str, bytes]:
    """CoIR-Retrieval/CodeSearchNet: three configs for each of six languages, in which ids repeat."""
    configs: dict[str, dict[str, str]] = {}
    files: dict[str, bytes] = {}
    for language in LANGUAGES:
        about = {"title": "", "partition": "train", "language": language, "meta_information": {"resource": ""}}
        texts = {
            "queries": [{"_id": f"q{n}", "text": f"def {language}_{word}(): pass", **about} for n, word in enumerate(WORDS)],
            "corpus": [{"_id": f"c{n}", "text": f"{word} in {language}", **about} for n, word in enumerate(WORDS)],
        }
        judged = [{"query-id": f"q{n}", "corpus-id": f"c{n}", "score": 1} for n in range(len(WORDS))]
        for part, splits in {
            **{part: {part: rows} for part, rows in texts.items()},
            "qrels": {"train": judged[:4], "test": judged[4:]},
        }.items():
            configs[f"{language}-{part}"] = {split: f"{language}-{part}/{split}-*" for split in splits}
            files |= {f"{language}-{part}/{split}-00000-of-00001.parquet": published.parquet(rows) for split, rows in splits.items()}
    return {"README.md": published.card(configs), **files}


@pytest.fixture
def workplace(published: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory: local copies of the repositories, the encoder in a cache of the Hub, in ``start`` a bi-encoder of it."""
    copies = training_repositories(published)
    for entry in find("nanobeir"):
        copies |= published.nano_hub(entry.sources["hub"].documents.repository.partition("/")[2])
    for entry in find("beir"):
        if entry.key.startswith("beir/cqadupstack"):
            copies |= published.mteb_hub(entry.sources["mteb"].documents.repository)
        else:
            copies |= published.beir_hub(entry.name)
            copies[f"BeIR/{entry.name}-qrels"]["dev.tsv"] = published.tsv(published.qrels[:1])
    published.write(tmp_path / "hub", {f"{name}/{file}": content for name, files in copies.items() for file, content in files.items()})
    sizes = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "layer_types": ("global", "local"), "max_positions": 8192}
    tokenizer = Tokenizer.train([f"{word} is a tree with leaves; a fish swims in go" for word in WORDS], vocab_size=320, max_length=8192)
    encoder = init_weights(Encoder(EncoderConfig.modernbert(vocab_size=320, **sizes)), seed=1)
    for section in (load_recipe(name).model for name in ("dpr-modernbert-base", "gte-moderncolbert", "jacolbertv25")):
        model = tmp_path / "models" / f"models--{section.init.replace('/', '--')}" / "snapshots" / str(section.revision)
        save_encoder(encoder, model)
        tokenizer.save(model)
    settings = ModelFolder("dense", tmp_path, pooling="mean", normalize=True, similarity="cosine", max_length=8192)
    BiEncoder.from_parts(encoder, tokenizer, settings).save_pretrained(tmp_path / "start")
    monkeypatch.setenv("QUIVER_HUB", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "models"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(name: str) -> list[list[str]]:
    """The commands of a recipe's head that train and evaluate, without torchrun."""
    head = find_recipe(name).read_text(encoding="utf-8").split("\n\n")[0]
    lines = re.sub(r" \\\n# +", " ", head).splitlines()
    found = [match[0] for line in lines if (match := re.search(r"(?<=quiver )(?:train|evaluate) .*?--out \S+", line))]
    return [shlex.split(command) for command in found]


def run_head(name: str, quiver: Callable[..., Any]) -> tuple[dict[str, Any], list[Results]]:
    """Run the commands of a recipe's head; the record of the run, and the results."""
    train, *evaluations = commands(name)
    done = quiver(*train, *SMALL, "--overwrite", "--device", "cpu", "--no-progress")
    assert done.code == 0, done.err
    results = []
    for evaluate in evaluations:
        done = quiver(*evaluate, "--no-bm25", "--device", "cpu", "--no-progress")
        assert done.code == 0, done.err
        results.append(read_results(Path(evaluate[-1])))
    return read_json(Path(train[-1]) / "run.json"), results


def splits(results: Results) -> dict[str, str]:
    return {each.name: each.split for each in results.collections}


@pytest.mark.parametrize(("name", "families"), [("dpr", ("beir", "mldr/en", "coir")), ("dpr-modernbert-base-512", ("beir",))])
def test_dpr_is_scored_on_the_splits_of_table_7_and_selected_on_four_collections(
    workplace: Path, quiver: Callable[..., Any], name: str, families: tuple[str, ...]
) -> None:
    record, [results] = run_head(name, quiver)
    [scored] = record["result"]["development"]
    selected = {f"ndcg@10 {collection}.test" for collection in ("nfcorpus", "scifact", "trec-covid", "fiqa")}
    assert set(scored) == selected | {"step", "seconds", "ndcg@10"}
    assert splits(results) == {entry.name: "test" for family in families for entry in find(family)}
    assert results.system.document_length == 8192


def test_colberts_are_scored_at_the_lengths_of_the_paper(workplace: Path, quiver: Callable[..., Any]) -> None:
    record, [short, long] = run_head("colbert", quiver)
    assert record["data"]["documents_per_row"] == 32
    assert (short.system.document_length, long.system.document_length) == (510, 8192)
    assert splits(short) == {entry.name: "dev" if entry.name == "msmarco" else "test" for entry in find("beir")}
    assert splits(long) == {"mldr-en": "test"}


@pytest.mark.parametrize(
    ("name", "collections", "rows"),
    [
        ("mldr", "mldr/en", 8),
        ("codesearchnet", "coir/codesearchnet", 24),
        ("stackqa", "coir/stackoverflow-qa", 3),
        ("finetune-codesearchnet-python", "coir/codesearchnet", 3),
        ("finetune-stackoverflow-qa", "coir/stackoverflow-qa", 3),
    ],
)
def test_recipes_in_domain_train_and_are_scored(
    workplace: Path, quiver: Callable[..., Any], name: str, collections: str, rows: int
) -> None:
    (workplace / "runs" / "dpr-modernbert-base").mkdir(parents=True)
    (workplace / "start").rename(workplace / "runs" / "dpr-modernbert-base" / "model")
    record, [results] = run_head(name, quiver)
    assert record["data"]["rows"] == rows
    assert set(splits(results)) == {entry.name for entry in find(collections)}
    assert all(each.in_domain for each in results.collections)


def test_gte_moderncolbert_trains_on_lists_stored_as_text(workplace: Path, quiver: Callable[..., Any]) -> None:
    record, _ = run_head("gte-moderncolbert", quiver)
    assert (record["data"]["documents_per_row"], record["model"]["document_length"]) == (32, 300)
    assert len([key for key in record["result"]["development"][-1] if key.startswith("ndcg@10 ")]) == 13


def test_jacolbert_trains_on_texts_that_the_command_of_its_head_converts(workplace: Path, quiver: Callable[..., Any]) -> None:
    pytest.importorskip("schedulefree")
    head = find_recipe("jacolbertv25").read_text(encoding="utf-8")
    convert = re.sub(r"^# {12,14}", "", head[head.index("#              python -c") : head.index("# Cost:")], flags=re.MULTILINE)
    (workplace / "data" / "mmarco-ja").mkdir(parents=True)
    for file, numbers, changes in (
        ("japanese_queries.train.tsv", range(8), {}),
        ("japanese_collection.tsv", range(100, 160), {"query_id": "document_id", "queries": "documents"}),
    ):
        (workplace / file).write_text("".join(f"{n}\t文章 {n}\n" for n in numbers), encoding="utf-8")
        command = convert.replace("japanese_queries.train.tsv", file)
        for was, now in changes.items():
            command = command.replace(was, now)
        subprocess.run(["bash", "-c", command.replace("python", sys.executable)], check=True)
    record, _ = run_head("jacolbertv25", quiver)
    assert (record["data"]["rows"], record["data"]["documents_per_row"]) == (8, 32)
