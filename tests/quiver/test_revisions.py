"""Revisions of models on the Hub: `OWNER/NAME@REVISION`, --revision, and model.revision, whose commit a run records and keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights
from quiver.encoder.checkpoints.checkpoint import downloaded_commit, local_folder
from quiver.encoder.files import read_json, write_json
from quiver.encoder.training.run_folder import RECIPE, recipe_changes, with_commit
from quiver.eval.nlu.recipes import load_glue_recipe, load_qa_recipe
from quiver.retrieval.index import open_index
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.options import ModelFolder
from quiver.retrieval.training.recipe import load_recipe

OLD, NEW = "a" * 40, "b" * 40
NAME = "owner/name"


@pytest.fixture
def refs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The branches of a model with two commits in a cache of the Hub; the main branch is at the old one."""
    repository = tmp_path / "hub" / "models--owner--name"
    tokenizer = Tokenizer.train(["owls have wings", "trout have fins"] * 2, vocab_size=320)
    sizes: Any = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "layer_types": ["global"], "max_positions": 32}
    for seed, commit in enumerate((OLD, NEW)):
        folder = repository / "snapshots" / commit
        encoder = init_weights(Encoder(EncoderConfig.modernbert(vocab_size=320, **sizes)), seed=seed)
        BiEncoder.from_parts(encoder, tokenizer, ModelFolder("dense", folder)).save_pretrained(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(OLD)
    (repository / "refs" / "next").write_text(NEW)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return repository / "refs"


@pytest.mark.usefixtures("refs")
def test_a_model_is_named_with_its_revision() -> None:
    assert downloaded_commit(local_folder(NAME)) == OLD
    for source, revision in ((f"{NAME}@next", None), (NAME, "next"), (NAME, NEW), (f"{NAME}@{NEW}", NEW)):
        assert downloaded_commit(local_folder(source, revision=revision)) == NEW
    with pytest.raises(InputError, match=r"owner/name@next: names a revision, and main is given too"):
        local_folder(f"{NAME}@next", revision="main")
    with pytest.raises(InputError, match=r"owner/name@other: no such folder"):
        local_folder(f"{NAME}@other")
    with pytest.raises(InputError, match="owner/name@: names no revision"):
        local_folder(f"{NAME}@")
    old, new = load_model(NAME), load_model(NAME, revision="next")
    assert old.card.fingerprint != new.card.fingerprint
    assert new.card.source == BiEncoder(NAME, revision="next").card.source == f"{NAME}@next"
    assert load_model(new.card.source).card == new.card


@pytest.mark.usefixtures("refs")
def test_an_index_is_searched_with_the_revision_that_built_it(quiver: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"id": n, "text": f"owls have wings {n}"}) + "\n" for n in range(3)))
    done = quiver("index", "build", tmp_path / "rows.jsonl", "--model", NAME, "--revision", "next", "--out", tmp_path / "index")
    assert done.code == 0, done.err
    assert open_index(tmp_path / "index").manifest.model.source == f"{NAME}@next"
    assert quiver("search", tmp_path / "index", "owls").code == 0
    for model in (tmp_path / "hub", "bm25", f"{NAME}@main"):
        refused = quiver("index", "build", tmp_path / "rows.jsonl", "--model", model, "--revision", "next", "--out", tmp_path / "other")
        assert (refused.code, "--revision is one of a model OWNER/NAME" in refused.err) == (2, True)


@pytest.mark.usefixtures("refs")
def test_an_evaluation_names_the_revision(quiver: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text('{"_id": "d", "text": "owls"}\n')
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "owls"}\n')
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    done = quiver("evaluate", "-m", NAME, "--revision", NEW, "-d", folder, "--no-bm25", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert read_json(tmp_path / "out" / "results.json")["system"]["source"] == f"{NAME}@{NEW}"


def test_a_run_keeps_the_commit_that_it_began_with(refs: Path, tmp_path: Path) -> None:
    recipe = load_recipe("docstrings-dense", [f"model.init={NAME}"])
    assert recipe.model.revision is None
    settled = with_commit(recipe)
    assert (settled.model.revision, settled.cost) == (OLD, recipe.cost)
    write_json(tmp_path / RECIPE, settled.model_dump())
    (refs / "main").write_text(NEW)
    assert with_commit(recipe).model.revision == NEW
    assert with_commit(recipe, resumed=tmp_path) == settled
    moved = load_recipe("docstrings-dense", [f"model.init={NAME}", f"model.revision={NEW}"])
    assert with_commit(moved, resumed=tmp_path).model.revision == NEW
    assert [change[0] for change in recipe_changes(settled.model_dump(), moved.model_dump())] == ["model.revision"]
    assert not recipe_changes(settled.model_dump(), recipe.model_dump()), "no revision stands for that of the run"


def test_local_folders_and_random_weights_have_no_commit(refs: Path, tmp_path: Path) -> None:
    for override in (f"model.init={refs}", f"model.init={tmp_path / 'absent'}"):
        recipe = load_recipe("docstrings-dense", [override])
        write_json(tmp_path / RECIPE, recipe.model_dump())
        assert with_commit(recipe, resumed=tmp_path) == recipe
    assert with_commit(load_recipe("quickstart")).model.revision is None


@pytest.mark.parametrize("load", [load_glue_recipe, load_qa_recipe, load_recipe], ids=["glue", "qa", "retrieval"])
def test_another_model_has_no_revision_of_the_recipes(load: Callable[..., Any], refs: Path) -> None:
    name = {load_glue_recipe: "glue-base", load_qa_recipe: "qa-korquad", load_recipe: "dpr-modernbert-base"}[load]
    pinned = load(name, ["model.revision=v1"])
    assert load(pinned.model_dump() if load is load_recipe else name, ["model.revision=v1", f"model.init={refs}"]).model.revision == "v1"
    recipe = load(name)
    assert recipe.model.revision is not None
    assert load(name, [f"model.init={NAME}"]).model.revision is None
    assert with_commit(load(name, [f"model.init={NAME}"])).model.revision == OLD
