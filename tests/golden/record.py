"""Golden outputs: what Quiver gives for fixed inputs, recorded through its command line and its public names.

    python record.py OUT.json                          # everything; 15 to 25 minutes of one core
    python record.py OUT.json --only train.mnrl --only glue
    python record.py OUT.json --only rankings          # a prefix of names before a dot
    python record.py OUT.json --work FOLDER            # keep models, indexes, runs and vectors there; another recording goes on with them
    python record.py OUT.json --compare golden.json    # and compare
    python record.py --list

QUIVER_DATA names the folder of the collections. All that may be renamed stands in ``interface.py``; inputs are made in ``fixtures.py``;
what counts as equal stands in ``compare.py``.

With ``--work`` vectors are taken from its cache: use a fresh folder for each version that is compared.

An item is a mapping from a kind of value to named values, see `compare.KINDS`.
"""

# ruff: noqa: T201 - scripts that print

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import compare
import fixtures
from interface import NEW, arguments, file, first_url, name, quiver, start, value

Item = dict[str, Any]
DIGITS = 7

# ---- Reading what a command has written.


def rounded(numbers: Any) -> Any:
    """Numbers, also in lists, with so many significant digits as are compared."""
    if isinstance(numbers, list | tuple):
        return [rounded(each) for each in numbers]
    return float(f"{float(numbers):.{DIGITS}g}")


def sha256(path: Path) -> str:
    """Checksum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_run(path: Path, *, k: int) -> dict[str, str]:
    """A TREC run as query -> "document score document score ...", the first k of each."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        query, _, document, _, score, _ = line.split()
        ranking = found.setdefault(query, [])
        if len(ranking) < 2 * k:
            ranking += [document, f"{float(score):.5f}"]
    return {query: " ".join(ranking) for query, ranking in found.items()}


def read_log(run: Path) -> dict[str, list[Any]]:
    """The quantities of a run's log: key -> [[step, value], ...]; without what depends on time."""
    found: dict[str, list[Any]] = {}
    for line in fixtures.read_lines(run / file("log")):
        for key, number in line.items():
            if key != "step" and "seconds" not in key and "per_second" not in key:
                found.setdefault(key, []).append([line["step"], rounded(number)])
    return found


# Keys of JSON files that a version, a date or a machine decides, and files that describe a model to people.
CHANGING = {"__version__", "transformers_version", "version", "date", "created", "torch_version", "_name_or_path"}
CARD = "README.md"


def plain(content: Any, replaced: Mapping[str, str]) -> Any:
    """Parsed JSON without what changes; paths become names."""
    if isinstance(content, dict):
        return {key: plain(each, replaced) for key, each in content.items() if key not in CHANGING}
    if isinstance(content, list):
        return [plain(each, replaced) for each in content]
    if isinstance(content, str):
        for path, short in replaced.items():
            content = content.replace(path, short)
    return content


def checkpoint(folder: Path, *, work: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A folder's files: path -> parsed JSON, or sha256; and of its vocabulary the checksum of the parsed JSON. The model card apart."""
    exact: dict[str, Any] = {}
    cards: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        where = str(path.relative_to(folder))
        if path.name == CARD:
            cards[where] = path.read_text(encoding="utf-8").replace(str(work), "WORK").replace(version("quiver-retrieval"), "VERSION")
        elif path.suffix in (".json", ".metadata"):
            content = plain(json.loads(path.read_text(encoding="utf-8")), {str(work): "WORK"})
            whole = json.dumps(content, sort_keys=True)
            exact[where] = content if len(whole) < 4000 else "sha256 of JSON " + hashlib.sha256(whole.encode()).hexdigest()
        else:
            exact[where] = "sha256 " + sha256(path)
    return exact, cards


# ---- a. Evaluation.

# Engine and search effort of an evaluation; the first version wrote both as one factory string.
HNSW = {"engine": "faiss-dense:factory=HNSW32,Flat,bits=16", "effort": "efSearch=128"}
INDEXES: dict[str, dict[str, str | bool]] = {
    "exact": {},
    "hnsw": {**HNSW} if NEW else {"index": "HNSW32,Flat?efSearch=128"},
    "int8": {"int8": "int8" if NEW else True},
}


def evaluation(collection: str, engine: str, work: Path) -> Item:
    """Scores of all-MiniLM-L6-v2 on a collection."""
    out = work / f"evaluate-{collection}-{engine}"
    quiver(
        "evaluate",
        model=fixtures.minilm(),
        data=fixtures.data_folder() / collection,
        out=out,
        **INDEXES[engine],
        cache=work / "vectors",
        no_bm25=engine != "exact",
        overwrite=True,
        cwd=work,
    )
    [found] = json.loads((out / file("results")).read_text())["collections"]
    measures = {key: rounded(number) for key, number in found["measures"].items()}
    measures["judged"] = rounded(found["judged"])
    measures |= {key: rounded(found["interval"][key]) for key in ("low", "high")}
    if engine == "hnsw":
        measures |= {key: rounded(number) for key, number in found["index"]["recall"].items()}
    for baseline in found["baselines"]:
        measures |= {f"{baseline['name']} {key}": rounded(number) for key, number in baseline["measures"].items()}
    counts = {
        key: found[key] for key in ("documents", "queries", "judgements", "unanswered", "truncated", "empty_texts", "data_sha256", "split")
    }
    return {
        "measures" if engine == "exact" else "measures_approximate": measures,
        "exact": counts,
        "bits": {"run": found["run"]["sha256"]},
    }


# ---- b. ColBERT.


def build(work: Path, label: str, corpus: Path, model: Path, engine: str, settings: Mapping[str, object] = {}) -> Path:
    """An index, built anew, without calibration, whose choice depends on time."""
    out = work / "indexes" / label
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(exist_ok=True)
    given = [f"{key}={each}" for key, each in settings.items()]
    one = f"{value(engine)}:{','.join(given)}" if given else value(engine)
    chosen: dict[str, object] = {"engine": one} if NEW else {"engine": value(engine), "set": given}
    quiver("index build", corpus, model=model, out=out, seed=3, no_calibrate=True, cwd=work, **chosen)
    return out


def search(work: Path, index: Path, queries: Path, *, k: int, **options: object) -> dict[str, str]:
    """The rankings of a file of queries."""
    run = work / f"{index.name}.trec"
    quiver("search", index, queries=queries, run=run, k=k, cwd=work, **options)
    return read_run(run, k=k)


def exported_colbert(work: Path) -> Path:
    """The seeded ColBERT over all-MiniLM-L6-v2, written by Quiver in PyLate's layout."""
    out = work / "colbert-exported"
    if not out.is_dir():
        quiver("export", fixtures.minilm_colbert(work), layout=value("pylate"), out=out, cwd=work)
    return out


def first_queries(corpus: Path, count: int) -> Path:
    """The first queries of a corpus as a file."""
    rows = fixtures.read_lines(corpus / "queries.jsonl")[:count]
    return fixtures.write_lines(corpus / f"queries-{count}.jsonl", rows)


def colbert_scores(work: Path) -> Item:
    """Vectors of a few texts, and the rankings of 20 queries over 500 documents by exact MaxSim."""
    corpus, folder = fixtures.corpus(work, 500, 20, words=400), exported_colbert(work)
    index = build(work, "colbert", corpus, folder, "exact")
    model = name("ColBERT")(folder)
    query = fixtures.read_lines(corpus / "queries.jsonl")[0]["text"]
    document = fixtures.read_lines(corpus / "corpus.jsonl")[0]["text"]
    [one], [other] = model.encode_query([query]), model.encode_document([document])
    return {
        "rankings": {"exact": search(work, index, corpus / "queries.jsonl", k=20)},
        "values": {"query": rounded(one[:, :4].tolist()), "document": rounded(other[::8, :4].tolist())},
        "exact": {"shapes": [list(one.shape), list(other.shape)], "fingerprint": model.card.fingerprint},
    }


# ---- c. Engines.

ENGINES: dict[str, tuple[str, Mapping[str, object]]] = {
    "dense.exact": ("exact-dense", {}),
    "dense.auto": ("auto", {}),
    "dense.pq": ("pq-dense", {}),
    "dense.pq-8-coordinates-16-bits": ("pq-dense", {"dsub": 8, "bits": 16}),
    "dense.ivf": ("ivf-dense", {}),
    "dense.ivf-16-lists": ("ivf-dense", {"nlist": 16, "dsub": 4}),
    "dense.faiss-hnsw": ("faiss-dense", {"factory": "HNSW32,Flat"}),
    "dense.faiss-ivf-sq8": ("faiss-dense", {"factory": "IVF16,SQ8"}),
    "tokens.exact": ("exact-tokens", {}),
    "tokens.ivf": ("ivf-tokens", {}),
    "tokens.ivf-3.5-bits": ("ivf-tokens", {"bits": 3.5}),
    "tokens.ivf-2-bits-pooled": ("ivf-tokens", {"bits": 2, "pool_factor": 2, "clustering": "flat"}),
}
EXACT = ("dense.exact", "dense.auto", "tokens.exact")
# Beside these, which have 200 queries, 50 are enough.
FULL = ("dense.exact", "dense.pq", "dense.ivf", "dense.faiss-hnsw", "tokens.exact", "tokens.ivf")


def ranking(engine: str, work: Path) -> Item:
    """Rankings of an engine at each effort."""
    dense = engine.startswith("dense.")
    corpus = fixtures.corpus(work, 1000, 200, words=40) if dense else fixtures.corpus(work, 300, 200, words=60)
    model = fixtures.minilm() if dense else exported_colbert(work)
    index = build(work, engine, corpus, model, *ENGINES[engine])
    queries = first_queries(corpus, 200 if engine in FULL else 50)
    found = {"balanced": search(work, index, queries, k=10)}
    if engine not in EXACT:
        few = first_queries(corpus, 50)
        found["fast"] = search(work, index, few, k=10, effort=value("fast"))
        found["exact"] = search(work, index, few, k=10, effort=value("exact"))
    info = json.loads(quiver("index info", index, json=True, cwd=work))
    kept = {key: info[key] for key in ("engine", "settings", "documents", "fields", "kind") if key in info}
    return {"rankings" if engine in EXACT else "rankings_approximate": found, "exact": {"info": kept}}


def hybrid(work: Path) -> Item:
    """Words beside vectors, ColBERT behind them, conditions."""
    corpus = fixtures.corpus(work, 1000, 200, words=40)
    index = build(work, "hybrid", corpus, fixtures.minilm(), "exact")
    queries = first_queries(corpus, 50)
    few = first_queries(corpus, 10)
    return {
        "rankings": {
            "with bm25": search(work, index, queries, k=10, **{"with": value("bm25")}),
            "filter": search(work, index, queries, k=10, filter=["year>=2000", "year!=2010"]),
            "rerank": search(work, index, few, k=10, rerank=exported_colbert(work)),
        }
    }


def _texts_alone(path: Path) -> bool:
    return path.parts[0] == "FORMAT" or path.name.startswith(("ids.", "documents.", "metadata"))


def index_files(work: Path) -> Item:
    """Checksums of the files of indexes: those of texts, ids and metadata; those of vectors, which follow their last bits."""
    corpus = fixtures.corpus(work, 300, 200, words=60)
    exact: Item = {}
    bits: Item = {}
    models = {"dense": fixtures.tiny_biencoder(work), "tokens": fixtures.tiny_colbert(work)}
    for engine in ("exact-dense", "pq-dense", "ivf-dense", "exact-tokens", "ivf-tokens"):
        index = build(work, f"files-{engine}", corpus, models[engine.partition("-")[2]], engine)
        for path in sorted(index.rglob("*")):
            where = path.relative_to(index)
            if path.is_file() and where.parts[0] in ("FORMAT", "codec", "segments"):
                short = "/".join(["CODEC" if part.startswith("c-") else part for part in where.parts])
                (exact if _texts_alone(where) else bits)[f"{engine} {short}"] = sha256(path)
    return {"exact": exact, "bits": bits}


# ---- d. Checkpoints.


def _batch() -> Any:
    ids = [[(7 * place + 11 * row) % 600 + 8 for place in range(length)] for row, length in enumerate((5, 37, 100))]
    return name("pack_ids")(ids)


def family(label: str, work: Path) -> Item:
    """A seeded encoder of a family, loaded and written again; its hidden states, trainable and frozen."""
    import torch

    first = fixtures.once(work / f"family-{label}", lambda folder: fixtures.save_seeded(fixtures.configs()[label], folder))
    again = work / f"family-{label}-again"
    shutil.rmtree(again, ignore_errors=True)
    encoder = name("load_encoder")(first).eval()
    name("save_encoder")(encoder, again)
    places, batch = [0, 4, 5, 20, 41, 42, 100, 141], _batch()
    with torch.inference_mode():
        hidden = encoder(batch)
        frozen = name("freeze")(encoder)(batch)
    exact, _ = checkpoint(again, work=work)
    return {
        "exact": exact,
        "values": {
            "hidden states": rounded(hidden[places, :6].tolist()),
            "frozen": rounded(frozen[places, :6].tolist()),
            "norms": rounded(hidden[places].norm(dim=1).tolist()),
        },
    }


def heads(work: Path) -> Item:
    """Models with heads of two families, loaded and written again, and what they give."""
    import torch

    kinds = {
        "masked_lm": ("MaskedLM", {}),
        "classifier": ("SequenceClassifier", {"num_labels": 3}),
        "span_qa": ("SpanQA", {}),
    }
    exact: Item = {}
    values: Item = {}
    for label in ("modernbert", "bert"):
        for kind, (class_name, settings) in kinds.items():
            first, again = work / f"head-{label}-{kind}", work / f"head-{label}-{kind}-again"
            for folder in (first, again):
                shutil.rmtree(folder, ignore_errors=True)
            model = name(class_name)(name("init_weights")(name("Encoder")(fixtures.configs()[label]), seed=1), **settings)
            name("init_head")(model, seed=1)
            save = name("save_head") if NEW else name(f"save_{kind}")
            load = partial(name("load_head"), name(class_name)) if NEW else name(f"load_{kind}")
            save(model, first)
            fixtures.reseed(first / "model.safetensors")
            opened = load(first).eval()
            save(opened, again)
            with torch.inference_mode():
                batch = _batch()
                labels = torch.where(torch.arange(batch.ids.numel()) % 4 == 0, batch.ids, -100)
                given = opened(batch, labels) if kind == "masked_lm" else opened(batch)
            tensors = [given] if isinstance(given, torch.Tensor) else [torch.as_tensor(each) for each in given]
            found, _ = checkpoint(again, work=work)
            exact |= {f"{label} {kind} {path}": content for path, content in found.items()}
            values[f"{label} {kind}"] = [rounded(each.float().reshape(-1)[:40:5].tolist()) for each in tensors]
    return {"exact": exact, "values": values}


def initialisation(work: Path) -> Item:
    """The weights that a seed gives: the checksum of the checkpoint."""
    found = {}
    for label, config in fixtures.configs().items():
        folder = work / f"init-{label}"
        shutil.rmtree(folder, ignore_errors=True)
        name("save_encoder")(name("init_weights")(name("Encoder")(config), seed=5), folder)
        found[label] = sha256(folder / "model.safetensors")
    return {"bits": found}


LAYOUTS = {
    "dense": ("sentence-transformers", "hf", "onnx"),
    "colbert": ("sentence-transformers", "pylate", "stanford", "hf", "onnx"),
}


def export(kind: str, layout: str, work: Path) -> Item:
    """The files of an exported model."""
    source = fixtures.tiny_biencoder(work) if kind == "dense" else fixtures.tiny_colbert(work)
    out = work / "exported" / f"{kind}-{layout}"
    out.parent.mkdir(exist_ok=True)
    told = json.loads(quiver("export", source, layout=value(layout), out=out, overwrite=True, json=True, cwd=work))
    exact, cards = checkpoint(out, work=work)
    if layout == "onnx":  # the graph has the names of the exporter's versions; that its vectors are ours the export checks itself
        exact = {path: content for path, content in exact.items() if ".onnx" not in path}
        exact["graph"] = onnx_signature(out)
    exact |= {key: told[key] for key in ("fingerprint", "kind", "left_out")}
    return {"exact": exact, "cards": cards}


def onnx_signature(folder: Path) -> dict[str, Any]:
    """Inputs and outputs of the graphs."""
    import onnx

    def described(values: Any) -> list[Any]:
        found = []
        for each in values:
            tensor = each.type.tensor_type
            found.append([each.name, tensor.elem_type, [axis.dim_param or axis.dim_value for axis in tensor.shape.dim]])
        return found

    return {
        str(path.relative_to(folder)): [
            described((graph := onnx.load(path, load_external_data=False).graph).input),
            described(graph.output),
        ]
        for path in sorted(folder.rglob("*.onnx"))
    }


def export_minilm(work: Path) -> Item:
    """all-MiniLM-L6-v2 written as sentence-transformers has it."""
    out = work / "exported" / "minilm"
    out.parent.mkdir(exist_ok=True)
    told = json.loads(
        quiver("export", fixtures.minilm(), layout=value("sentence-transformers"), out=out, overwrite=True, json=True, cwd=work)
    )
    exact, cards = checkpoint(out, work=work)
    shutil.rmtree(out)
    return {"exact": exact | {"fingerprint": told["fingerprint"]}, "cards": cards}


# ---- e. Training.


def training(command: str, recipe: Path, label: str, work: Path) -> Path:
    """A run, begun anew."""
    out = work / "runs" / label
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(exist_ok=True)
    quiver(command, recipe, out=out, cwd=work)
    return out


def retriever(loss: str, work: Path) -> Item:
    """The log of 20 updates, and the checksum of the weights behind them."""
    recipe = fixtures.random_recipe(work) if loss == "random" else fixtures.retriever_recipe(work, loss)
    run = training("train", recipe, loss, work)
    weights = {str(path.relative_to(run)): sha256(path) for path in sorted(fixtures.model_of(run).rglob("*.safetensors"))}
    return {"losses": read_log(run), "bits": weights}


def pretraining(work: Path) -> Item:
    """The log of two phases; the vocabulary."""
    run = training("pretrain", fixtures.pretraining_recipe(work), "pretraining", work)
    vocabulary = hashlib.sha256(json.dumps(json.loads((run / file("tokenizer") / "tokenizer.json").read_text())).encode()).hexdigest()
    return {
        "losses": read_log(run),
        "bits": {"weights": sha256(fixtures.model_of(run) / "model.safetensors")},
        "exact": {"tokenizer.json": vocabulary},
    }


# ---- f. Packed batches.


def packed_stream(work: Path) -> Item:
    """The first 20 packed batches of each phase: checksums of ids, limits of sequences, labels."""
    out = work / "runs" / "stream"
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(exist_ok=True)
    recipe = fixtures.pretraining_recipe(work)
    quiver("pretrain", recipe, out=out, prepare=True, cwd=work)
    resolved = name("load_pretraining_recipe")(recipe)
    corpus = name("open_corpus")(out / file("corpus"))
    vocabulary = name("Tokenizer").from_pretrained(out / file("tokenizer"))
    found: Item = {}
    for phase in range(len(resolved.phases)):
        stream = name("PhaseStream")(resolved, phase, corpus, vocabulary, name("Processes")())
        lines: list[Any] = []
        whole = hashlib.sha256()
        for row in (row for update in stream.updates() for row in update.rows):
            parts = [row.batch.ids, row.batch.cu_seqlens, row.labels]
            for part in parts:
                whole.update(part.numpy().tobytes())
            lines.append([[str(part.dtype), list(part.shape), int(part.sum())] for part in parts])
            if len(lines) == 20:
                break
        found[f"phase {phase}"] = {"sha256": whole.hexdigest(), "batches": lines}
    return {"exact": found}


# ---- g. GLUE and answers.


def glue(work: Path) -> Item:
    """Losses and scores of the eight tasks."""
    run = training("glue", fixtures.glue_recipe(work), "glue", work)
    told = json.loads((run / file("results")).read_text())
    losses: Item = {}
    measures: Item = {"average": rounded(told["average"]["value"])}
    predictions: Item = {}
    for task in fixtures.TASKS:
        losses |= {f"{task} {key}": values for key, values in read_log(run / task).items()}
        scores = told["runs"][task]["scores"]
        measures |= {f"{task} {key}": rounded(number) for key, number in scores["measures"].items()}
        predictions[task] = sha256(run / task / file("predictions"))
    return {"losses": losses, "measures": measures, "bits": predictions}


def _flat(content: Any, where: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(content, dict):
        for key, each in content.items():
            yield from _flat(each, f"{where}.{key}" if where else str(key))
    elif isinstance(content, list):
        for place, each in enumerate(content):
            yield from _flat(each, f"{where}.{place}")
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield where, rounded(content)


def answers(work: Path) -> Item:
    """Losses of a fine-tuning on spans; its scores, and those of the three official scripts on further questions."""
    run = training("qa train", fixtures.qa_recipe(work), "qa", work)
    told = json.loads((run / file("results")).read_text())
    measures = {f"test {key}": number for key, number in _flat({key: told[key] for key in ("scores", "by_length")})}
    bits = {"test": sha256(run / file("predictions"))}
    for official in ("squad_v1", "squad_v2", "korquad_v1"):
        data = fixtures.questions(work / "questions" / f"{official}.json", 7, 60, unanswerable=official == "squad_v2")
        out = work / "runs" / f"qa-{official}"
        lengths = {"max_length": 40, "overlap": 10, "max_question_length": 8, "max_answer_length": 6}
        quiver("qa evaluate", model=fixtures.model_of(run), data=data, official=official, out=out, overwrite=True, cwd=work, **lengths)
        told = json.loads((out / file("results")).read_text())
        kept = {key: told[key] for key in ("scores", "answerable", "unanswerable") if told.get(key)}
        measures |= {f"{official} {key}": number for key, number in _flat(kept)}
        bits[official] = sha256(out / file("predictions"))
    return {"losses": read_log(run), "measures": measures, "bits": bits}


# ---- h. The service.


def openapi(work: Path) -> Item:
    """The schema that the service describes itself by, and the shape of its answers to one search."""
    corpus = fixtures.corpus(work, 300, 200, words=60)
    dense = build(work, "served-dense", corpus, fixtures.tiny_biencoder(work), "exact")
    colbert = build(work, "served-colbert", corpus, fixtures.tiny_colbert(work), "exact")
    words = arguments("serve", f"dense={dense}", f"colbert={colbert}", port=0, json=True, **{"with": value("bm25")})
    process = start(words, cwd=work)
    try:
        url = first_url(process)
        with urllib.request.urlopen(f"{url}/openapi.json", timeout=60) as answer:
            schema = json.load(answer)
    finally:
        process.terminate()
        process.wait(60)
    schema.get("info", {}).pop("version", None)
    return without_prose(json.loads(json.dumps(schema, sort_keys=True)))


def without_prose(schema: Any) -> Item:
    """A schema, its descriptions and summaries apart: they come from docstrings, which may change."""
    prose: dict[str, str] = {}

    def stripped(content: Any, where: str) -> Any:
        if isinstance(content, list):
            return [stripped(each, f"{where}.{place}") for place, each in enumerate(content)]
        if not isinstance(content, dict):
            return content
        told = {key for key in ("description", "summary") if isinstance(content.get(key), str)}
        prose.update({f"{where}.{key}".lstrip("."): content[key] for key in sorted(told)})
        return {key: stripped(each, f"{where}.{key}") for key, each in content.items() if key not in told}

    return {"exact": {"openapi": stripped(schema, "")}, "cards": prose}


ITEMS: dict[str, Callable[[Path], Item]] = {
    **{
        f"checkpoint.{label}": partial(family, label)
        for label in ("modernbert", "bert", "roberta", "mosaicbert", "nomicbert", "gte", "quiver")
    },
    "checkpoint.heads": heads,
    "checkpoint.initialisation": initialisation,
    **{f"export.{kind}.{layout}": partial(export, kind, layout) for kind, layouts in LAYOUTS.items() for layout in layouts},
    "export.minilm": export_minilm,
    **{f"train.{loss}": partial(retriever, loss) for loss in (*fixtures.LOSSES, "random")},
    "pretrain.losses": pretraining,
    "pretrain.stream": packed_stream,
    "glue": glue,
    "qa": answers,
    "service.openapi": openapi,
    "colbert.scores": colbert_scores,
    **{f"rankings.{engine}": partial(ranking, engine) for engine in ENGINES},
    "rankings.hybrid": hybrid,
    "index.files": index_files,
    **{
        f"evaluate.{collection}.{engine}": partial(evaluation, collection, engine)
        for collection in ("cranfield", "cosqa", "scifact")
        for engine in INDEXES
    },
}
"""Name -> what records it, cheap ones first."""


def about() -> dict[str, Any]:
    """What decides the last bits: two recordings of equal ``machine`` are compared to the bit where that is promised."""
    import torch

    packages = ("torch", "numpy", "tokenizers", "safetensors", "faiss-cpu", "numba", "sentence-transformers", "pylate", "transformers")
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []:
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    machine = f"{processor}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    return {"machine": machine, "python": platform.python_version(), "packages": {each: version(each) for each in packages}}


def chosen(only: list[str]) -> list[str]:
    """The items that some names or prefixes mean; all for none."""
    for wanted in only:
        if not any(item == wanted or item.startswith(f"{wanted}.") for item in ITEMS):
            raise SystemExit(f"no item {wanted!r}; there are {', '.join(ITEMS)}")
    return [item for item in ITEMS if not only or any(item == wanted or item.startswith(f"{wanted}.") for wanted in only)]


def record(items: list[str], work: Path, out: Path | None) -> dict[str, Any]:
    """Record items, one after the other; what is there is written behind each."""
    import torch

    torch.set_num_threads(1)
    recording: dict[str, Any] = {"about": about(), "seconds": {}, "items": {}}
    if out is not None and out.is_file():  # further items of a recording
        earlier = json.loads(out.read_text(encoding="utf-8"))
        if earlier["about"] == recording["about"]:
            recording = earlier
    for item in items:
        begun = time.perf_counter()
        recording["items"].pop(item, None)
        try:
            recording["items"][item] = ITEMS[item](work)
        except Exception:  # the others are recorded all the same; this one is missing, which a comparison tells
            traceback.print_exc()
        recording["seconds"][item] = round(time.perf_counter() - begun, 1)
        print(f"{item}: {recording['seconds'][item]} s", file=sys.stderr, flush=True)
        if out is not None:
            write(out, recording)
    return recording


def write(path: Path, recording: dict[str, Any]) -> None:
    """A recording with a line for each named value, so that a difference is a line of a diff."""
    ordered = {item: recording["items"][item] for item in ITEMS if item in recording["items"]}
    lines = [f' "about": {json.dumps(recording["about"])}', f' "seconds": {json.dumps(recording["seconds"])}']
    entries = []
    for item, kinds in ordered.items():
        parts = []
        for kind, values in kinds.items():
            named = ",\n".join(f"    {json.dumps(key)}: {json.dumps(each, ensure_ascii=False)}" for key, each in values.items())
            parts.append(f'   "{kind}": {{\n{named}\n   }}')
        entries.append(f'  "{item}": {{\n' + ",\n".join(parts) + "\n  }")
    lines.append(' "items": {\n' + ",\n".join(entries) + "\n }")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="File to write; items that it has from this machine stay.")
    parser.add_argument("--only", action="append", default=[], help="An item, or what stands before the dot of several; repeatable.")
    parser.add_argument("--work", type=Path, help="Folder for what is made on the way; by default one that is removed in the end.")
    parser.add_argument("--compare", type=Path, help="A recording to compare the new one with; exit status 1 if they differ.")
    parser.add_argument("--list", action="store_true", help="Print the items.")
    given = parser.parse_args()
    if given.list:
        print("\n".join(ITEMS))
        return 0
    if given.out is None and given.compare is None:
        parser.error("give OUT.json, or --compare")
    items = chosen(given.only)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    with tempfile.TemporaryDirectory() as temporary:
        work = (given.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        recording = record(items, work, given.out)
    if given.compare is None:
        return int(any(item not in recording["items"] for item in items))
    golden = json.loads(given.compare.read_text(encoding="utf-8"))
    return compare.report(golden, recording, items)


if __name__ == "__main__":
    sys.exit(main())
