"""Every shipped recipe loads and says what a recipe has to say."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quiver.encoder.training.recipe_file import RENAMED, find_recipe, shipped_recipes
from quiver.eval.datasets.benchmarks import require
from quiver.eval.published import TABLE_1
from quiver.retrieval.training.recipe import LOSSES_BY_KIND, STDLIB_DOCSTRINGS, load_recipe

TABLES = ("dpr", "colbert", "mldr", "codesearchnet", "stackqa")
"""Recipes of the ModernBERT paper with a table of encoders."""

# Tables 1 and 9 of the ModernBERT paper (arXiv:2412.13663): encoder -> row of Table 1, learning rate of DPR and of ColBERT, typed from the
# paper a second time.
ENCODERS = {
    "bert-base": ("BERT-base", 5e-5, 8e-5),
    "roberta-base": ("RoBERTa-base", 3e-5, 8e-5),
    "nomicbert": ("NomicBERT-base", 5e-5, 1e-4),
    "gte-base": ("GTE-en-MLM-base", 5e-5, 8e-5),
    "modernbert-base": ("ModernBERT-base", 8e-5, 1e-4),
    "bert-large": ("BERT-large", 3e-5, 1e-4),
    "roberta-large": ("RoBERTa-large", 3e-5, 1e-5),
    "gte-large": ("GTE-en-MLM-large", 3e-5, 3e-5),
    "modernbert-large": ("ModernBERT-large", 1e-4, 3e-5),
}

RETRIEVERS = shipped_recipes(tuple(LOSSES_BY_KIND))


def test_validate_accepts_all_shipped_recipes(quiver: Callable[..., Any]) -> None:
    done = quiver("validate", *sorted({find_recipe(name) for name in RETRIEVERS}))
    assert (done.code, done.out.strip()) == (0, f"{len(RETRIEVERS)} recipes checked, no problems")
    for table in TABLES:
        assert quiver("validate", table, "--encoder", "bert-base").out.strip() == "1 recipe checked, no problems"


@pytest.mark.parametrize("name", RETRIEVERS)
def test_each_recipe_states_source_cost_and_expected_score(name: str) -> None:
    recipe, file = load_recipe(name), find_recipe(name)
    text = file.read_text(encoding="utf-8")
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert recipe.name == name == (file.stem if recipe.encoder is None or name == file.stem else f"{file.stem}-{recipe.encoder}")
    assert text.startswith("# ")
    for key in ("Command", "Source" if name != "quickstart" else "Data", "Cost", "Expected"):
        assert any(line.startswith(f"# {key}: ") for line in head), key
    train = f"{name} --out runs/{name}" if name == file.stem else f"{file.stem} --encoder modernbert-base"
    assert any(f"quiver train {train}" in line for line in head)
    if name != "quickstart":
        assert recipe.data.revision
    if not name.startswith(("quickstart", "docstrings")):
        assert "not measured here" in recipe.cost
        assert "not measured here" in recipe.expected


@pytest.mark.parametrize("encoder", ENCODERS)
def test_rows_have_the_learning_rates_and_scores_of_the_paper(encoder: str) -> None:
    name, dense, tokens = ENCODERS[encoder]
    dpr, colbert, mldr, functions, answers = (load_recipe(table, {"encoder": encoder}) for table in TABLES)
    assert [recipe.training.learning_rate for recipe in (dpr, functions, answers, colbert)] == [dense, dense, dense, tokens]
    assert {recipe.training.warmup_ratio for recipe in (dpr, colbert, functions, answers)} == {0.05}
    assert (dpr.data.limit, colbert.data.documents_per_row) == (1_250_000, 32)
    # 8 GPUs: 64 x 8 for a base model, 16 x 32 for a large one; the update is the same.
    for recipe in (dpr, functions):
        assert (recipe.training.batch_size, recipe.training.accumulation) == ((16, 32) if encoder.endswith("large") else (64, 8))
    assert mldr.model.init == f"runs/dpr-{encoder}/model"
    assert {recipe.model.init for recipe in (colbert, functions, answers)} == {dpr.model.init}
    assert {recipe.model.max_length for recipe in (mldr, functions, answers)} == {dpr.model.max_length}
    [scores] = [row.scores for row in TABLE_1 if row.name == name]
    published = {
        dpr: ("DPR BEIR", "DPR MLDR OOD", "CSN", "SQA"),
        colbert: ("ColBERT BEIR", "ColBERT MLDR OOD"),
        mldr: ("DPR MLDR ID", "DPR MLDR OOD"),
        functions: ("CSN",),
        answers: ("SQA",),
    }
    for recipe, columns in published.items():
        assert re.findall(r"\d+\.\d", recipe.expected) == [str(scores[column]) for column in columns]


def test_former_names_are_answered_with_the_new_ones(quiver: Callable[..., Any]) -> None:
    assert {"dpr-bert-base", "colbert-modernbert-large", "mldr-modernbert-base", "dpr-modernbert-base-512"} <= set(RETRIEVERS)
    for former, name in RENAMED.items():
        assert name in RETRIEVERS
        assert quiver("train", former, "--dry-run").err.strip().endswith(f"the recipe {former!r} is now called {name!r}")


def test_recipes_lists_every_row_with_its_expected_score(quiver: Callable[..., Any]) -> None:
    listed = {row["name"]: row for row in json.loads(quiver("recipes", "--json").out)}
    assert set(listed) == set(shipped_recipes())
    assert listed["mldr-gte-large"]["expected"].startswith("nDCG@10 48.9 on MLDR-en, before this training 36.4")
    assert (listed["mldr-gte-large"]["command"], listed["mldr-gte-large"]["encoder"]) == ("quiver train", "gte-large")
    assert all(row["expected"] for row in listed.values() if row["kind"] != "sweep")


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


def leaves(name: str) -> Iterator[tuple[str, object]]:
    """Dotted paths and values in a recipe's file."""
    todo: list[tuple[str, object]] = [("", yaml.safe_load(find_recipe(name).read_text(encoding="utf-8")))]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dict):
            todo += [(f"{path}.{key}", inner) for key, inner in value.items()]
        else:
            yield path, value


def sources(name: str) -> set[str]:
    """Everything under ``data`` and ``development`` of a recipe's file that names data."""
    keys = {"source", "train", "test", "development", "queries", "documents"}
    found = [value for path, value in leaves(name) if path.startswith(".data.") and path.split(".")[-1] in keys]
    found += [value for path, value in leaves(name) if path == ".development.data"]
    found += [source["path"] for path, value in leaves(name) if path == ".data.sources" for source in value]
    return {one for value in found if value is not None for one in (value if isinstance(value, list) else [value])}


def test_no_recipe_is_a_near_copy_of_another() -> None:
    stated = {name: {(path, str(value)) for path, value in leaves(name)} for name in ALL}
    for one, two in itertools.combinations(ALL, 2):
        assert len(stated[one] & stated[two]) <= 2 / 3 * min(len(stated[one]), len(stated[two])), (
            f"{one} and {two}: let one extend the other"
        )


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


@pytest.mark.parametrize("name", RETRIEVERS)
def test_a_recipe_starts_from_a_hub_model_or_from_the_recipe_that_it_names(name: str) -> None:
    init, head = load_recipe(name).model.init, " ".join(header(name).values())
    if init.startswith("runs/"):
        before = init.split("/")[1]
        assert before in shipped_recipes()
        assert f"after {find_recipe(before).stem}" in head or f"--out runs/{before}" in head
    else:
        assert init == "random" or init.count("/") == 1


def test_the_readme_has_command_source_cost_and_score_of_each_recipe() -> None:
    text = (find_recipe("quickstart").parent / "README.md").read_text(encoding="utf-8")
    for name in ALL:
        described = yaml.safe_load(find_recipe(name).read_text(encoding="utf-8"))
        [row] = [line for line in text.splitlines() if line.startswith(f"| [{name}]({name}.yaml) |")]
        # A table has a score per row, which quiver recipes lists; a sweep ends with a table of its own.
        for key in ("source", "cost", "expected") if described["kind"] != "sweep" and "encoders" not in described else ("source",):
            assert f"| {described[key]} |" in row, (name, key)
        [command] = re.findall(r"`((?:quiver|torchrun) [^`]+)`", row)
        assert header(name)["Command"].startswith(command)
        for place in {found[1] for source in sources(name) if (found := HUB.match(source))}:
            assert place in text


def test_the_recipes_of_the_benchmarks_are_valid(quiver: Callable[..., Any]) -> None:
    files = sorted((Path(__file__).parents[3] / "docs" / "benchmarks" / "recipes").glob("*.yaml"))
    assert len(files) >= 12
    assert quiver("validate", *files).code == 0
    assert not {file.stem for file in files} & set(ALL) - {"pretrain-small"}
