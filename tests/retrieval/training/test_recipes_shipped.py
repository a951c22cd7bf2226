"""Every shipped recipe loads and says what a recipe has to say; three run their first updates on stand-ins of their data and model.

A stand-in has the layout of what was published, file names, columns and types, and a few dozen rows: `hub` says where each was read.
Models are of the recipe's own family, with two narrow layers. Overrides change sizes and nothing else.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from quiver.encoder import Encoder, Tokenizer, init_weights, save_encoder
from quiver.encoder.config import EncoderConfig
from quiver.encoder.presets import preset
from quiver.encoder.training.recipe_file import find_recipe, shipped_recipes
from quiver.eval.datasets.benchmarks import require
from quiver.eval.development import development_scorer
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.options import ModelFolder
from quiver.retrieval.training import run as training_run
from quiver.retrieval.training.model import build_model
from quiver.retrieval.training.recipe import LOSSES_BY_KIND, STDLIB_DOCSTRINGS, load_recipe

COUNT = 21
STEPS = 3
ROWS = 48

PAPER = (
    *(f"dpr-{model}" for model in ("bert-base", "roberta-base", "nomicbert", "gte-base", "modernbert-base")),
    *(f"dpr-{model}" for model in ("bert-large", "roberta-large", "gte-large", "modernbert-large", "modernbert-base-512")),
    *("colbert-modernbert-base", "colbert-modernbert-large", "jacolbertv25", "gte-moderncolbert"),
    *("mldr-modernbert-base", "coir-codesearchnet", "coir-stackoverflow-qa"),
)
"""Recipes at the scale of the papers; their data are on the Hugging Face Hub."""

SMALL = ("docstrings-dense", "docstrings-dense-small", "docstrings-colbert")
"""Recipes that run on a laptop."""

# Table 9 of the ModernBERT paper (arXiv:2412.13663), typed from it a second time: encoder -> single-vector, multi-vector.
TABLE_9 = {
    "bert-base": (5e-5, 8e-5),
    "roberta-base": (3e-5, 8e-5),
    "nomicbert": (5e-5, 1e-4),
    "gte-base": (5e-5, 8e-5),
    "modernbert-base": (8e-5, 1e-4),
    "bert-large": (3e-5, 1e-4),
    "roberta-large": (3e-5, 1e-5),
    "gte-large": (3e-5, 3e-5),
    "modernbert-large": (1e-4, 3e-5),
}

MODELS = {"answerdotai/ModernBERT-base": "modernbert-base"}
"""Hub id -> preset whose narrow copy replaces it; the folders are in the working directory, where a recipe looks first."""

BI_ENCODERS = {
    "Alibaba-NLP/gte-modernbert-base": ("gte-modernbert-base", "cls", 64),
    "runs/dpr-modernbert-base/model": ("modernbert-base", "mean", 64),
}

_WORDS = [
    first + second for first in ("ka", "lo", "mi", "nu", "pe", "ri", "so", "ta") for second in ("b", "d", "f", "g", "k", "l", "m", "n")
]


def _text(*seed: object) -> str:
    draw = random.Random(repr(seed))
    return " ".join(draw.choices(_WORDS, k=6))


# Data as they were published.


def _parquet(path: Path, columns: dict[str, Any], types: dict[str, Any] | None = None) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = None if types is None else arrow.schema(types)
    parquet.write_table(arrow.table(columns, schema=schema), path)


def _card(folder: Path, configs: dict[str, dict[str, str]], *, lists: dict[str, str] | None = None) -> None:
    """Write a data set card: configurations as name -> split -> files, and the item type of list columns of the config train."""
    lines = ["---"]
    if lists is not None:  # such a card has no num_bytes, which the library says aloud
        lines += ["dataset_info:", "- config_name: train", "  features:", "  - name: query_id", "    dtype: string"]
        for name, kind in lists.items():
            lines += [f"  - name: {name}", "    sequence:", "      value:", f"        dtype: {kind}"]
        lines += ["  splits:", "  - name: train", f"    num_examples: {ROWS}"]
    lines += ["configs:"]
    for name, splits in configs.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, files in splits.items():
            lines += [f"  - split: {split}", f"    path: {files}"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


def _triplets(hub: Path) -> None:
    """Card and files of sentence-transformers/msmarco-co-condenser-margin-mse-sym-mnrl-mean-v1: one config of eight is needed."""
    folder = hub / "sentence-transformers" / "msmarco-co-condenser-margin-mse-sym-mnrl-mean-v1"
    _card(folder, {"triplet-hard": {"train": "triplet-hard/train-*"}})
    columns = {name: [_text("msmarco", name, row) for row in range(ROWS)] for name in ("query", "positive", "negative")}
    _parquet(folder / "triplet-hard" / "train-00000-of-00001.parquet", columns)


def _distillation(hub: Path) -> None:
    """Card and files of lightonai/ms-marco-en-bge-gemma, which stores both lists as text although its card declares lists."""
    folder = hub / "lightonai" / "ms-marco-en-bge-gemma"
    files = {"queries": "english_queries.train.parquet", "documents": "english_collection.parquet", "train": "dataset.parquet"}
    _card(folder, {name: {"train": file} for name, file in files.items()}, lists={"document_ids": "string", "scores": "float32"})
    documents = [str(1000 + place) for place in range(200)]
    draw = random.Random(3)
    rows = [(draw.sample(documents, 32), [round(draw.random(), 4) for _ in range(32)]) for _ in range(ROWS)]
    columns = {"query_id": [f"{place}" for place in range(ROWS)], "document_ids": [repr(row[0]) for row in rows]}
    _parquet(folder / files["train"], {**columns, "scores": [repr(row[1]) for row in rows]})
    for name, keys in (("query", [f"{place}" for place in range(ROWS + 3)]), ("document", documents)):
        path = folder / files["queries" if name == "query" else "documents"]
        _parquet(path, {f"{name}_id": keys, "text": [_text(name, key) for key in keys]})


def _mldr(hub: Path) -> None:
    """The file and the fields of Shitao/MLDR (its MLDR.py, at fe896c5)."""
    rows = [
        {
            "query_id": f"q-en-{place}",
            "query": _text("mldr", place),
            "positive_passages": [{"docid": f"doc-en-{place}", "text": _text("long", place)}],
            "negative_passages": [{"docid": f"doc-en-{place}-{n}", "text": _text("other", place, n)} for n in range(place % 4)],
        }
        for place in range(ROWS)
    ]
    _lines(hub / "Shitao" / "MLDR" / "mldr-v1.0-en" / "train.jsonl.gz", rows)


def _lines(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def _collection(folder: Path, splits: Sequence[str]) -> None:
    _lines(folder / "corpus.jsonl", ({"_id": f"d{place}", "title": "", "text": _text(folder.name, place)} for place in range(ROWS)))
    _lines(folder / "queries.jsonl", ({"_id": f"q{place}", "text": _text(folder.name, "q", place)} for place in range(ROWS)))
    for number, split in enumerate(splits):
        own = range(ROWS) if number == 0 else range(4)
        (folder / "qrels").mkdir(exist_ok=True)
        (folder / "qrels" / f"{split}.tsv").write_text("".join(f"q{place}\td{place}\t1\n" for place in own), encoding="utf-8")


# Models.


def _narrow(name: str) -> EncoderConfig:
    """The preset's family and switches with two layers of 32."""
    config = preset(name)
    layers = tuple(config.layer_types[-1:] + config.layer_types[-1:]) if len(set(config.layer_types)) == 1 else ("global", "local")
    return replace(config, vocab_size=448, hidden_size=32, num_heads=4, intermediate_size=256, layer_types=layers)


def _vocabulary() -> Tokenizer:
    return Tokenizer.train([" ".join(_WORDS)] * 4, vocab_size=400, max_length=512)


def _models(work: Path) -> None:
    tokenizer = _vocabulary()
    for source, name in MODELS.items():
        folder = work / source
        save_encoder(init_weights(Encoder(_narrow(name)), seed=1), folder)
        tokenizer.save(folder)
    for source, (name, pooling, length) in BI_ENCODERS.items():
        settings = ModelFolder("dense", work / source, pooling=pooling, normalize=True, max_length=length)
        BiEncoder.from_parts(init_weights(Encoder(_narrow(name)), seed=1), tokenizer, settings).save_pretrained(work / source)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory and a folder of local copies of Hub data sets."""
    root = tmp_path_factory.mktemp("world")
    hub, work = root / "hub", root / "work"
    _triplets(hub)
    _distillation(hub)
    _mldr(hub)
    _collection(work / "nfcorpus", ["dev"])
    _collection(work / "nano", ["train"])
    _models(work)
    return root


@pytest.fixture
def _at_work(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world / "work")
    monkeypatch.setenv("QUIVER_HUB", str(world / "hub"))


SIZES = ("training.batch_size=4", "training.log_every=1", f"training.max_steps={STEPS}", "data.limit=")

# Recipe -> overrides beyond SIZES (published collections are folders here), and documents per row.
TRAINED = {
    "dpr-modernbert-base": (("development.data=nfcorpus", "training.accumulation=2"), 2),
    "gte-moderncolbert": (("development.data=nano",), 32),
    "mldr-modernbert-base": ((), 2),
}


@pytest.mark.usefixtures("_at_work")
@pytest.mark.parametrize("name", TRAINED)
def test_the_first_steps_of_each_recipe_run(name: str, world: Path) -> None:
    overrides, documents = TRAINED[name]
    recipe = load_recipe(name, [*SIZES, *overrides])
    out = world / "runs" / name
    scorer = None if recipe.development is None else development_scorer(recipe.development)
    record = training_run.train(recipe, out, scorer=scorer)
    result = record["result"]
    assert [step for step, _ in result["losses"]] == [1, 2, 3]
    assert all(math.isfinite(loss) and loss > 0 for _, loss in result["losses"])
    assert all(norm > 0 for _, norm in result["grad_norms"])
    assert record["data"]["documents_per_row"] == documents
    skipped = ROWS // 4 if name == "mldr-modernbert-base" else 0  # every fourth of its rows has no negative
    assert (record["data"]["rows"], record["data"]["skipped"]) == (ROWS - skipped, skipped)
    assert record["batch"]["effective"] == 4 * recipe.training.accumulation
    assert len(result["development"]) == (recipe.development is not None)
    trained = load_model(out / "model")
    assert isinstance(trained, ColBERT if recipe.kind == "colbert" else BiEncoder)
    rows = (f"{_text('q', place)}" for place in range(ROWS))
    start = build_model(recipe, rows)
    assert trained.card.dim == start.card.dim
    assert trained.card.document_length == start.card.document_length
    assert trained.card.fingerprint != start.card.fingerprint


def test_all_shipped_recipes_are_tested() -> None:
    assert len(shipped_recipes(tuple(LOSSES_BY_KIND))) == COUNT
    assert sorted([*PAPER, *SMALL, "quickstart"]) == shipped_recipes(tuple(LOSSES_BY_KIND))


def test_validate_accepts_all_shipped_recipes(quiver: Callable[..., Any]) -> None:
    done = quiver("validate", *(find_recipe(name) for name in shipped_recipes(tuple(LOSSES_BY_KIND))))
    assert (done.code, done.out.strip()) == (0, f"{COUNT} recipes checked, no problems")


@pytest.mark.parametrize("name", shipped_recipes(tuple(LOSSES_BY_KIND)))
def test_each_recipe_states_source_cost_and_expected_score(name: str) -> None:
    recipe = load_recipe(name)
    text = find_recipe(name).read_text(encoding="utf-8")
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert recipe.name == name
    assert text.startswith("# ")
    for key in ("Command", "Source" if name != "quickstart" else "Data", "Cost", "Expected"):
        assert any(line.startswith(f"# {key}: ") for line in head), key
    assert any(f"quiver train {name} --out runs/{name}" in line for line in head)
    if name != "quickstart":
        assert recipe.data.revision
    if name in PAPER:
        assert "not measured here" in recipe.cost
        assert "not measured here" in recipe.expected


@pytest.mark.parametrize("encoder", TABLE_9)
def test_learning_rates_are_those_of_the_paper(encoder: str) -> None:
    dense, tokens = TABLE_9[encoder]
    recipe = load_recipe(f"dpr-{encoder}")
    assert recipe.training.learning_rate == dense
    assert recipe.training.warmup_ratio == 0.05
    assert recipe.data.limit == 1_250_000
    # 8 GPUs: 64 x 8 for a base model, 16 x 32 for a large one; the update is the same.
    assert (recipe.training.batch_size, recipe.training.accumulation) == ((16, 32) if encoder.endswith("large") else (64, 8))
    if encoder.startswith("modernbert"):
        colbert = load_recipe(f"colbert-{encoder}")
        assert (colbert.training.learning_rate, colbert.data.documents_per_row) == (tokens, 32)
    else:
        size = "large" if encoder.endswith("large") else "base"
        listed = " ".join(find_recipe(f"colbert-modernbert-{size}").read_text(encoding="utf-8").replace("\n# ", " ").split())
        assert f"{recipe.model.init} {tokens:.0e}".replace("e-0", "e-") in listed


ALL = sorted(path.stem for path in find_recipe("quickstart").parent.glob("*.yaml"))
"""Recipes of all kinds."""

HUB = re.compile(r"hub://([\w.-]+/[\w.-]+)")


def header(name: str) -> dict[str, str]:
    """The head of a recipe: key -> text."""
    found: dict[str, str] = {}
    key = ""
    for line in find_recipe(name).read_text(encoding="utf-8").split("\n\n")[0].splitlines():
        if match := re.match(r"# (\w+): +(.*)", line):
            key = match[1]
            found[key] = match[2]
        elif key and line.startswith("#   "):
            found[key] += " " + line[1:].strip()
        else:
            key = ""
    return found


def sources(name: str) -> set[str]:
    """Everything under ``data`` and ``development`` of a recipe that names data."""
    described = yaml.safe_load(find_recipe(name).read_text(encoding="utf-8"))
    data, development = described["data"], described.get("development") or {}
    values = [data.get(key) for key in ("source", "train", "test", "development", "queries", "documents")]
    values += [source["path"] for source in data.get("sources", ())]
    values += [development.get("data")]
    return {one for value in values if value is not None for one in (value if isinstance(value, list) else [value])}


@pytest.mark.parametrize("name", ALL)
def test_one_command_fetches_or_makes_the_data_of_each_recipe(name: str) -> None:
    """Data are of a known kind, and the head names the command that gets them."""
    fetch = header(name)["Fetch"]
    for source in sources(name):
        if found := HUB.match(source):
            assert f"hf download --repo-type dataset {found[1]}" in fetch
        elif source == STDLIB_DOCSTRINGS or source.split("/")[:2] == ["data", "code"]:
            assert "quiver collections docstrings --out data/code" in fetch
        elif source.startswith("data/"):  # files, or a folder, downloaded with this name
            folder, file = source.rpartition("/")[::2] if Path(source).suffix else (source, "")
            made = re.search(rf"--(?:local-dir|output-dir) {re.escape(folder.partition('-ja')[0])}(?: |$)", fetch)
            assert made, source
            assert not file.startswith("KorQuAD") or re.search(rf"-O https://\S+/{re.escape(file)}(?: |$)", fetch), source
        else:
            assert require(source), source  # a published collection, downloaded by its name
    for command in re.findall(r"quiver collections docstrings.*?--out \S+", fetch):
        assert shlex.split(command) == ["quiver", "collections", "docstrings", "--out", "data/code"]


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_starts_from_a_hub_model_or_from_the_recipe_that_it_names(name: str) -> None:
    described = yaml.safe_load(find_recipe(name).read_text(encoding="utf-8"))
    init, head = described["model"]["init"], " ".join(header(name).values())
    if init.startswith("runs/"):
        before = init.split("/")[1]
        assert before in ALL or before == "enlarged"
        assert f"after {before}" in head or f"--out runs/{before}" in head
    else:
        assert init == "random" or init.count("/") == 1


def test_the_readme_has_command_source_cost_and_score_of_each_recipe() -> None:
    text = (find_recipe("quickstart").parent / "README.md").read_text(encoding="utf-8")
    for name in ALL:
        described = yaml.safe_load(find_recipe(name).read_text(encoding="utf-8"))
        [row] = [line for line in text.splitlines() if line.startswith(f"| [{name}]({name}.yaml) |")]
        for key in ("source", "cost", "expected"):
            assert f"| {described[key]} |" in row, (name, key)
        [command] = re.findall(r"`((?:quiver|torchrun) [^`]+)`", row)
        assert header(name)["Command"].startswith(command)
        for place in {found[1] for source in sources(name) if (found := HUB.match(source))}:
            assert place in text


def test_the_recipes_of_the_benchmarks_are_valid(quiver: Callable[..., Any]) -> None:
    files = sorted((Path(__file__).parents[3] / "docs" / "benchmarks" / "recipes").glob("*.yaml"))
    assert len(files) >= 12
    assert quiver("validate", *files).code == 0
    assert not {file.stem for file in files} & set(ALL) - {"pretrain-small", "qa-korquad-512", "qa-korquad-1024"}
