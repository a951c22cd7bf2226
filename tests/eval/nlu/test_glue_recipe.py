"""The shipped recipes have the settings of Table 6, and all problems of a recipe are reported."""

from __future__ import annotations

from typing import Literal

import pytest

from quiver.encoder.schema import SchemaError
from quiver.encoder.training.recipe_file import find_recipe
from quiver.eval.nlu.glue_tasks import TASKS
from quiver.eval.nlu.recipes import GLUE_KINDS, load_glue_recipe

# Table 6 of the ModernBERT paper (arXiv:2412.13663): task -> learning rate, weight decay and epochs of the base and of the large model.
TABLE_6 = {
    "cola": {"base": (8e-5, 1e-6, 5), "large": (3e-5, 8e-6, 5)},
    "mnli": {"base": (5e-5, 5e-6, 1), "large": (3e-5, 1e-5, 1)},
    "mrpc": {"base": (5e-5, 5e-6, 10), "large": (8e-5, 5e-6, 2)},
    "qnli": {"base": (8e-5, 5e-6, 2), "large": (3e-5, 5e-6, 2)},
    "qqp": {"base": (5e-5, 5e-6, 10), "large": (5e-5, 8e-6, 2)},
    "rte": {"base": (5e-5, 1e-5, 3), "large": (5e-5, 8e-6, 3)},
    "sst2": {"base": (8e-5, 1e-5, 2), "large": (1e-5, 1e-6, 3)},
    "stsb": {"base": (8e-5, 5e-6, 10), "large": (8e-5, 1e-5, 10)},
}


@pytest.mark.parametrize("size", ["base", "large"])
def test_the_shipped_recipes_have_the_settings_of_the_paper(size: Literal["base", "large"]) -> None:
    name = f"glue-{size}"
    recipe = load_glue_recipe(name)
    assert (recipe.name, recipe.model.init) == (name, f"answerdotai/ModernBERT-{size}")
    assert f"quiver glue {name} --out" in find_recipe(name, GLUE_KINDS).read_text(encoding="utf-8")
    assert set(recipe.model.from_mnli) == {"rte", "mrpc", "stsb"}
    assert recipe.trained == ["cola", "sst2", "qqp", "mnli", "qnli", "mrpc", "stsb", "rte"]
    for task in TASKS:
        updates = recipe.updates(task)
        assert updates is not None
        assert (updates.learning_rate, updates.weight_decay, updates.epochs) == TABLE_6[task][size]
    assert recipe.training.decoupled_decay
    assert recipe.training.patience is not None


def test_overrides_remove_and_change_tasks() -> None:
    recipe = load_glue_recipe("glue-base", ["tasks.qqp=", "tasks.cola.epochs=1", "training.seed=2", "model.from_mnli=rte"])
    assert "qqp" not in recipe.trained
    assert recipe.trained[-1] == "rte"
    cola = recipe.updates("cola")
    assert cola is not None
    assert (cola.epochs, cola.learning_rate, recipe.training.seed) == (1, 8e-5, 2)


def test_all_problems_of_a_recipe_are_reported_at_once() -> None:
    with pytest.raises(SchemaError) as caught:
        load_glue_recipe("glue-base", ["tasks.wnli.epochs=1", "tasks.cola.epochs=0", "training.patience=0", "model.from_mnli=[cola, rtf]"])
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "model.from_mnli.1",
        "tasks.cola.epochs",
        "tasks.wnli",
        "training.patience",
    ]
    with pytest.raises(SchemaError, match="tasks: must name at least one task"):
        load_glue_recipe("glue-base", [f"tasks.{task}=" for task in TASKS])
    with pytest.raises(SchemaError, match="MNLI cannot start from itself"):
        load_glue_recipe("glue-base", ["model.from_mnli=mnli"])
