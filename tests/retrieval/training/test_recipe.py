"""Recipes: each problem with its path, all problems at once, overrides, shipped recipes, and writing and reading back."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quiver.encoder.errors import InputError
from quiver.encoder.schema import Rule, SchemaError, SectionRule, validate
from quiver.encoder.training.recipe_file import find_recipe, shipped_recipes
from quiver.retrieval.training.recipe import LOSSES_BY_KIND, RULES, Recipe, load_recipe

RANDOM: dict[str, Any] = {
    "name": "sample",
    "description": "A sample.",
    "kind": "dense",
    "source": "none",
    "cost": "none",
    "expected": "none",
    "model": {
        "init": "random",
        "tokenizer": "train",
        "architecture": {
            "family": "modernbert",
            "hidden_size": 64,
            "layers": 2,
            "heads": 2,
            "intermediate_size": 96,
            "vocab_size": 512,
            "max_positions": 128,
            "global_every": 3,
            "window": 16,
            "global_theta": 10000.0,
            "local_theta": 10000.0,
        },
        "pooling": "mean",
        "normalize": True,
        "max_length": 64,
        "query_prompt": "search_query: ",
    },
    "data": {"train": "rows.jsonl.gz", "document_fields": ["positive", "negative"], "limit": 100},
    "loss": {"name": "mnrl"},
    "training": {
        "epochs": 1.5,
        "batch_size": 8,
        "learning_rate": 8e-5,
        "warmup_ratio": 0.05,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "seed": 12,
        "dtype": "bfloat16",
        "scheduler": "cosine",
        "no_duplicates": False,
        "log_every": 10,
    },
}

PRETRAINED: dict[str, Any] = {"model.init": "a/b", "model.tokenizer": ..., "model.architecture": ...}
"""Changes to the sample: it starts from a checkpoint."""

COLBERT: dict[str, Any] = {
    "kind": "colbert",
    "model.pooling": ...,
    "model.normalize": ...,
    "model.max_length": ...,
    "model.query_prompt": ...,
    "model.colbert": {"document_length": 100},
    "loss.name": "contrastive",
}
"""Changes to the sample: it is a ColBERT."""

IDS: dict[str, Any] = {"data.format": "ids", "data.queries": "queries.jsonl", "data.documents": "documents.parquet"}
"""Changes to the sample: its rows hold ids."""

TEACHER: dict[str, Any] = {"data.score_fields": "scores", "loss.name": "kl"}
"""Changes to the sample: it learns from a teacher."""


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The sample recipe with settings replaced by dotted path; ``...`` removes one."""
    recipe = copy.deepcopy(RANDOM)
    for path, value in copy.deepcopy(changes).items():
        *parents, name = path.split(".")
        section = recipe
        for parent in parents:
            section = section[parent]
        if value is ...:
            del section[name]
        else:
            section[name] = value
    return recipe


def write(folder: Path, recipe: object, name: str = "sample.yaml") -> Path:
    path = folder / name
    path.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe), encoding="utf-8")
    return path


def problems(path: Path, overrides: list[str] | None = None) -> list[str]:
    with pytest.raises(SchemaError) as caught:
        load_recipe(path, overrides or [])
    assert isinstance(caught.value, InputError)
    assert str(caught.value).startswith(f"{path}: ")
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def test_a_recipe_is_read_with_its_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, RANDOM))
    assert recipe.training.learning_rate == 8e-5
    assert recipe.model.query_prompt == "search_query: "
    assert recipe.model.architecture is not None
    assert recipe.model.architecture.window == 16
    assert recipe.data.train == ("rows.jsonl.gz",)
    assert recipe.data.document_fields == ("positive", "negative")
    assert (recipe.data.score_fields, recipe.data.documents_per_row, recipe.training.max_steps) == ((), None, None)
    assert (recipe.loss.scale, recipe.training.accumulation, recipe.training.lora, recipe.development) == (20.0, 1, None, None)


@pytest.mark.parametrize(
    "changes",
    [
        PRETRAINED,
        COLBERT,
        PRETRAINED | COLBERT,
        IDS,
        TEACHER,
        TEACHER | IDS | {"training.batch_size": 1},
        COLBERT | TEACHER | {"loss.name": "distillation"},
        {"data.train": ["rows.jsonl", "hub://owner/name@1234/config/train"], "data.document_fields": "positive"},
        {"data.train": "docstrings:stdlib"},
        {"loss.name": "cached_mnrl", "loss.gather_across_devices": True, "loss.matryoshka_dims": [64, 32]},
        {"training.optimizer": "schedule_free_adamw", "training.scheduler": "constant"},
        {"training.average_checkpoints": 4, "training.keep_checkpoints": 4, "development": {"data": "scifact"}},
        {"development": {"data": "scifact", "keep_best": True}, "training.max_length": 32},
        {"training.lora": {"rank": 64, "alpha": 8, "dropout": 0.99}},
        {"loss.temperature": 1, "loss.mini_batch_size": 32, "loss.teacher_scores": "as_they_are"},  # not read, and the defaults
        COLBERT | {"loss.scale": 20.0, "loss.name": "cached_contrastive", "loss.temperature": 0.05, "loss.mini_batch_size": 4},
    ],
)
def test_valid_combinations_of_settings_are_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = load_recipe(write(tmp_path, changed(changes)))
    again = tmp_path / "again.json"
    again.write_text(json.dumps(recipe.model_dump()))
    assert load_recipe(again) == recipe


def test_numbers_that_yaml_parses_as_text_are_read_as_numbers(tmp_path: Path) -> None:
    text = yaml.safe_dump(RANDOM).replace("8.0e-05", "8e-5").replace("seed: 12", "seed: 0012").replace("limit: 100", "limit: 1e2")
    assert text.count("8e-5") == text.count("0012") == text.count("1e2") == 1
    recipe = load_recipe(write(tmp_path, text))
    assert (recipe.training.learning_rate, recipe.training.seed, recipe.data.limit) == (8e-5, 12, 100)


RANDOM_ONLY = "only for init: random; 'a/b' brings its own: add model.{}=null, or take a recipe of a trained model (docstrings-dense)"

PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"model.architecture.heads": 3}, "model.architecture.heads: must divide hidden_size 64, got 3"),
    ({"model.architecture.heads": 64}, "model.architecture.heads: must give an even head width times rotary_fraction, got 1 times 1.0"),
    ({"model.architecture.window": 15}, "model.architecture.window: must be a multiple of 2, got 15"),
    ({"model.architecture.vocab_size": 256}, "model.architecture.vocab_size: must be >= 261, got 256"),
    ({"model.architecture.norm": "batchnorm"}, "model.architecture.norm: must be one of layernorm, rmsnorm; got 'batchnorm'"),
    ({"model.architecture": ...}, "model.architecture: required for init: random"),
    ({"model.tokenizer": ...}, "model.tokenizer: required for init: random"),
    ({"model.init": "a/b", "model.tokenizer": None}, f"model.architecture: {RANDOM_ONLY.format('architecture')}"),
    ({"model.init": "a/b", "model.architecture": None}, f"model.tokenizer: {RANDOM_ONLY.format('tokenizer')}"),
    ({"model.max_length": 129}, "model.max_length: must be <= architecture.max_positions 128, got 129"),
    (COLBERT | {"model.colbert.query_length": 129}, "model.colbert.query_length: must be <= architecture.max_positions 128, got 129"),
    (COLBERT | {"model.colbert": {}}, "model.colbert.document_length: must be <= architecture.max_positions 128, got 180"),
    ({"model.max_length": 2}, "model.max_length: must be >= 3, got 2"),
    (
        COLBERT | {"model.colbert": {"document_length": 8}, "model.architecture.max_positions": 16},
        "model.colbert.query_length: must be <= architecture.max_positions 16, got 32",
    ),
    ({"model.only_if_bare": ["poling"]}, "model.only_if_bare: must name settings such as pooling or colbert.query_length, got ('poling',)"),
    *(
        (COLBERT | {f"model.{name}": value}, f"model.{name}: only for kind: dense, but kind is colbert")
        for name, value in (
            ("pooling", "cls"),
            ("normalize", True),
            ("normalize", False),
            ("max_length", 64),
            ("query_prompt", "q"),
            ("document_prompt", "d"),
        )
    ),
    ({"model.colbert": {"document_length": 100}}, "model.colbert: only for kind: colbert, but kind is dense"),
    (
        COLBERT | {"model.colbert": {"document_length": 129}},
        "model.colbert.document_length: must be <= architecture.max_positions 128, got 129",
    ),
    (
        {"data.score_fields": ["scores"], "loss": {"name": "kl"}, "data.short_rows": "fewer"},
        "data.short_rows: fewer needs a loss with in-batch negatives; with data.score_fields use repeat, skip or error",
    ),
    (
        {"data.score_fields": ["scores"], "loss": {"name": "kl"}, "data.label_field": "label"},
        "data.label_field: the losses of data.score_fields learn from the scores alone; remove one of the two",
    ),
    (
        {"data.format": "beir", "data.label_field": "label"},
        "data.label_field: the judgements of a BEIR folder have grades already; remove it",
    ),
    ({"data.train": []}, "data.train: must name at least one source"),
    ({"data.train": ["rows.jsonl", " "]}, "data.train.1: must not be blank, got ' '"),
    ({"data.train": ["rows.jsonl", "docstrings:stdlib"]}, "data.train: docstrings:stdlib cannot be mixed with other sources"),
    (IDS | {"data.queries": None}, "data.queries: required for format: ids"),
    (IDS | {"data.documents": None}, "data.documents: required for format: ids"),
    *(
        (
            IDS | {"data.train": ["a.jsonl", "b.jsonl", "c.jsonl"], f"data.{name}": ["a.jsonl", "b.jsonl"]},
            f"data.{name}: must be one source, or one for each source of data.train, in the same order",
        )
        for name in ("queries", "documents")
    ),
    (IDS | {"data.format": "texts", "data.documents": None}, "data.queries: only for format: ids, but format is texts"),
    (IDS | {"data.format": "beir", "data.queries": None}, "data.documents: only for format: ids, but format is beir"),
    (
        TEACHER | {"data.format": "beir"},
        "data.format: beir folders have no teacher scores; run quiver mine and quiver teacher-scores first, and train on their rows",
    ),
    ({"data.document_fields": []}, "data.document_fields: must name at least one field"),
    ({"data.document_fields": ["text", "text"]}, "data.document_fields: names a field twice: ('text', 'text')"),
    ({"data.document_fields": ["query", "text"]}, "data.document_fields: must not contain query_field 'query'"),
    (
        {"data.format": "beir", "data.positives": "each"},
        "data.positives: format: beir already makes one row per relevant document; remove it",
    ),
    ({"data.limit": 7}, "data.limit: must be >= training.batch_size 8, got 7"),
    ({"loss.scale": 0}, "loss.scale: must be > 0, got 0"),
    (
        {"loss.name": "mnlr"},
        "loss.name: must be one of mnrl, cached_mnrl, margin_mse, kl, contrastive, cached_contrastive, distillation; "
        "got 'mnlr', did you mean 'mnrl'?",
    ),
    (
        {"kind": "dense", "loss.name": "contrastive"},
        "loss.name: contrastive cannot train kind: dense; the losses of dense are mnrl, cached_mnrl, margin_mse, kl, "
        "of colbert contrastive, cached_contrastive, distillation",
    ),
    ({"loss.name": "kl"}, "loss.name: kl needs teacher scores: name their fields in data.score_fields"),
    (
        {"data.score_fields": "scores"},
        "data.score_fields: mnrl does not use teacher scores: remove it, or choose margin_mse or kl or distillation",
    ),
    ({"training.batch_size": 1}, "loss.name: mnrl takes its negatives from the batch: training.batch_size must be >= 2"),
    *(
        (changes | {f"loss.{setting}": value}, f"loss.{setting}: {problem}; remove it")
        for changes, setting, value, problem in (
            (TEACHER, "gather_across_devices", True, "kl does not use it (only mnrl, cached_mnrl, contrastive, cached_contrastive do)"),
            ({}, "temperature", 0.05, "mnrl does not use it (only kl, contrastive, cached_contrastive do)"),
            (COLBERT, "scale", 50, "contrastive does not use it (only mnrl, cached_mnrl do)"),
            ({}, "mini_batch_size", 8, "mnrl does not use it (only cached_mnrl, cached_contrastive do)"),
            (TEACHER, "student_scores", "as_they_are", "kl does not use it (only distillation do)"),
            ({}, "teacher_scores", "minmax", "mnrl does not use it (only margin_mse, kl, distillation do)"),
        )
    ),
    (COLBERT | {"loss.matryoshka_dims": [64, 32]}, "loss.matryoshka_dims: only for kind: dense, but kind is colbert"),
    ({"loss.matryoshka_dims": [32, 64]}, "loss.matryoshka_dims: must be descending, such as [384, 256, 128]; got (32, 64)"),
    ({"loss.matryoshka_dims": [64, 64]}, "loss.matryoshka_dims: must be descending, such as [384, 256, 128]; got (64, 64)"),
    ({"loss.matryoshka_dims": [64, 0]}, "loss.matryoshka_dims.1: must be >= 1, got 0"),
    ({"training.learning_rate": -1}, "training.learning_rate: must be > 0, got -1"),
    ({"training.warmup_ratio": 5}, "training.warmup_ratio: must be <= 1, got 5"),
    ({"training.seed": 2**32}, "training.seed: must be <= 4294967295, got 4294967296"),
    ({"training.max_steps": 0}, "training.max_steps: must be >= 1, got 0"),
    ({"training.lora": {"rank": 4, "alpha": 8, "dropout": 1}}, "training.lora.dropout: must be < 1, got 1"),
    ({"training.lora": {"rank": 65, "alpha": 8}}, "training.lora.rank: must be <= architecture.hidden_size 64, got 65"),
    (
        {"training.optimizer": "schedule_free_adamw"},
        "training.optimizer: schedule_free_adamw has its own schedule: training.scheduler must be constant, got cosine",
    ),
    (
        {"training.sharding": "full", "training.optimizer": "schedule_free_adamw", "training.scheduler": "constant"},
        "training.sharding: full needs training.optimizer: adamw",
    ),
    (
        {"training.sharding": "full", "training.lora": {"rank": 4, "alpha": 8}},
        "training.sharding: full cannot be combined with training.lora; remove one of them",
    ),
    ({"training.average_checkpoints": 3}, "training.keep_checkpoints: must be >= training.average_checkpoints 3, got 2"),
    (
        {"training.average_checkpoints": 2, "development": {"data": "scifact", "keep_best": True}},
        "training.average_checkpoints: cannot be combined with development.keep_best; remove one of them",
    ),
    ({"training.max_length": 65}, "training.max_length: must be <= model.max_length 64, got 65"),
    (COLBERT | {"training.max_length": 101}, "training.max_length: must be <= model.colbert.document_length 100, got 101"),
    ({"development": {"data": []}}, "development.data: must name at least one collection; development=null trains without one"),
]
"""Changes to the sample recipe, and the problem that is reported."""


@pytest.mark.parametrize(("changes", "problem"), PROBLEMS)
def test_each_rule_reports_its_problem(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    assert problems(write(tmp_path, changed(changes))) == [problem]


def test_every_rule_has_a_test() -> None:
    """Each rule is broken by one of the changes, so a new rule needs a new entry in the table."""
    broken: set[int] = set()

    def noting(number: int, rule: Rule | SectionRule) -> SectionRule:
        def asked(*values: object) -> list[str]:
            found = rule.problems(*values)
            broken.update({number} if found else ())
            return found

        return SectionRule(rule.fields, asked)

    watched = [noting(number, rule) for number, rule in enumerate(RULES)]
    assert validate(Recipe, RANDOM, watched)[1] == []
    assert broken == set()
    for changes, _ in PROBLEMS:
        validate(Recipe, changed(changes), watched)
    assert [(rule.fields, rule.message) for number, rule in enumerate(RULES) if number not in broken] == []


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    recipe = changed(
        {
            "name": ...,
            "model.architecture.window": 15,
            "model.max_length": 500,
            "training.batch_size": "many",
            "training.dype": "float32",
            "data.document_fields": ["a", "b", "a", " "],
            "loss.matryoshka_dims": [0, "x"],
        }
    )
    path = write(tmp_path, yaml.safe_dump(recipe) + "kind: dense\n")
    repeated = path.read_text(encoding="utf-8").splitlines().index("kind: dense") + 1
    assert problems(path, ["training.seed=-1", "lr=3"]) == [
        f"line {len(path.read_text(encoding='utf-8').splitlines())}: the key 'kind' stands in line {repeated} already",
        "name: missing",
        "model.architecture.window: must be a multiple of 2, got 15",
        "data.document_fields.3: must not be blank, got ' '",
        "loss.matryoshka_dims.0: must be >= 1, got 0",
        "loss.matryoshka_dims.1: must be a number, got 'x'",
        "training.batch_size: must be a number, got 'many'",
        "training.seed: must be >= 0, got -1",
        "training.dype: unknown key, did you mean 'dtype'?",
        f"lr: unknown key; the keys are {', '.join(Recipe.model_fields)}",
        "model.max_length: must be <= architecture.max_positions 128, got 500",
    ]


def test_overrides_replace_settings_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, RANDOM)
    overrides = [
        "training.batch_size=4",
        "training.batch_size=64",
        "training.learning_rate=3e-4",
        "training.no_duplicates=true",
        "data.limit=",
        "data.documents_per_row=null",
        "data.train=[a.jsonl, 'b, c.jsonl']",
        'data.document_fields=["positive", "negatives.*.text: x"]',
        "loss.matryoshka_dims=[64, 32]",
        "training.lora.rank=4",
        "training.lora.alpha=8",
        "data.revision=''",
        'name="a = b"',
        "model.query_prompt=query: ",
        "model.architecture.layers=7",
    ]
    recipe = load_recipe(path, overrides)
    assert (recipe.training.batch_size, recipe.training.learning_rate, recipe.training.no_duplicates) == (64, 3e-4, True)
    assert (recipe.data.limit, recipe.data.documents_per_row, recipe.data.revision, recipe.name) == (None, None, "", "a = b")
    assert recipe.data.train == ("a.jsonl", "b, c.jsonl")
    assert recipe.data.document_fields == ("positive", "negatives.*.text: x")
    assert recipe.loss.matryoshka_dims == (64, 32)
    assert recipe.training.lora is not None
    assert (recipe.training.lora.rank, recipe.training.lora.alpha) == (4, 8.0)
    assert recipe.model.query_prompt == "query: "
    assert recipe.model.architecture is not None
    assert recipe.model.architecture.layers == 7
    assert load_recipe(path).training.batch_size == 8


def test_overrides_can_unset_a_section_and_create_one(tmp_path: Path) -> None:
    pretrained = ["model.init=a/b", "model.architecture=null", "model.tokenizer=null"]
    assert load_recipe(write(tmp_path, RANDOM), pretrained).model.architecture is None
    empty = write(tmp_path, changed({"model.architecture": None}))
    shape = [f"model.architecture.{key}={value}" for key, value in RANDOM["model"]["architecture"].items()]
    assert load_recipe(empty, shape) == load_recipe(write(tmp_path, RANDOM))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("training.batch_size", "override 'training.batch_size': must read section.setting=value"),
        ("=3", "override '=3': must read section.setting=value"),
        ("training..seed=3", "override 'training..seed=3': must read section.setting=value"),
        ("training.seed.x=3", "override 'training.seed.x=3': training.seed is not a section"),
        ("training.batchsize=3", "training.batchsize: unknown key, did you mean 'batch_size'?"),
        ("trainig.seed=3", "trainig: unknown key, did you mean 'training'?"),
        ("training.seed=[1, 2]", "training.seed: must be a number, got a list"),
        ("loss.matryoshka_dims=[32, 64]", "loss.matryoshka_dims: must be descending, such as [384, 256, 128]; got (32, 64)"),
        ("data.train=[a", "override 'data.train=[a': line 1: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("name='open", 'override "name=\'open": line 1: not YAML: found unexpected end of stream'),
    ],
)
def test_an_invalid_override_is_refused(tmp_path: Path, override: str, problem: str) -> None:
    assert problems(write(tmp_path, RANDOM), [override]) == [problem]


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: gr\xfcn\n")
    with pytest.raises(InputError, match=r"latin\.yaml: not UTF-8 \(.* at byte 8\)"):
        load_recipe(tmp_path / "latin.yaml")
    with pytest.raises(InputError, match=r"none\.yaml: there is no such file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(InputError, match=r"there is no such file; quickstart alone names the shipped recipe"):
        load_recipe(tmp_path / "quickstart.yaml")
    (tmp_path / "old.yaml").mkdir()
    for folder in (tmp_path, tmp_path / "old.yaml"):
        with pytest.raises(
            InputError, match=rf"^{re.escape(str(folder))}: is a folder; name the recipes in it, such as {re.escape(str(folder))}/\*\.yaml$"
        ):
            load_recipe(folder)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_written_recipe_loads_as_the_same_recipe(tmp_path: Path, suffix: str) -> None:
    awkward = changed(
        {
            "name": "null",
            "description": "1e5",
            "data.revision": "007",
            "data.document_fields": ["1", "null", "a.*.b"],
            "model.document_prompt": " #: ",
            "training.learning_rate": 1e-7,
        }
    )
    shipped = [load_recipe(name) for name in shipped_recipes(tuple(LOSSES_BY_KIND))]
    for recipe in (load_recipe(write(tmp_path, RANDOM)), load_recipe(write(tmp_path, awkward)), *shipped):
        path = tmp_path / f"written.{suffix}"
        path.write_text(yaml.safe_dump(recipe.model_dump()) if suffix == "yaml" else json.dumps(recipe.model_dump()), encoding="utf-8")
        assert load_recipe(path) == recipe


def test_an_unknown_recipe_name_is_refused() -> None:
    with pytest.raises(InputError, match=r"^no shipped recipe 'quikstart'; did you mean 'quickstart'\?$"):
        find_recipe("quikstart")
    with pytest.raises(InputError, match=r"^no shipped recipe 'dpr-modernbert'; did you mean 'dpr-modernbert-(base|large)' or "):
        find_recipe("dpr-modernbert")
    with pytest.raises(InputError) as caught:
        load_recipe("zzz")
    files = sorted({find_recipe(name).stem for name in shipped_recipes(tuple(LOSSES_BY_KIND))})
    assert str(caught.value) == f"no shipped recipe 'zzz'; give the path of a .yaml file, or one of {', '.join(files)}"
