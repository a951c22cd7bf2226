"""Every shipped recipe loads and says what a recipe has to say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quiver.encoder.training.recipe_file import find_recipe, shipped_recipes
from quiver.eval.datasets.benchmarks import require
from quiver.retrieval.training.recipe import LOSSES_BY_KIND, STDLIB_DOCSTRINGS, load_recipe

PAPER = (
    *(f"dpr-{model}" for model in ("bert-base", "roberta-base", "nomicbert", "gte-base", "modernbert-base")),
    *(f"dpr-{model}" for model in ("bert-large", "roberta-large", "gte-large", "modernbert-large", "modernbert-base-512")),
    *("colbert-modernbert-base", "colbert-modernbert-large", "jacolbertv25", "gte-moderncolbert"),
    *("mldr-modernbert-base", "coir-codesearchnet", "coir-stackoverflow-qa"),
)
"""Recipes at the scale of the papers; their data are on the Hugging Face Hub."""


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


def test_validate_accepts_all_shipped_recipes(quiver: Callable[..., Any]) -> None:
    done = quiver("validate", *(find_recipe(name) for name in shipped_recipes(tuple(LOSSES_BY_KIND))))
    assert (done.code, done.out.strip()) == (0, f"{len(shipped_recipes(tuple(LOSSES_BY_KIND)))} recipes checked, no problems")


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
    data, development = described.get("data", {}), described.get("development") or {}
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
    if described["kind"] == "sweep":
        assert described["recipe"] in ALL
        return
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
    assert not {file.stem for file in files} & set(ALL) - {"pretrain-small"}
