"""The list of packages is complete, the wheel has one package at its top, and every doctest passes."""

from __future__ import annotations

import doctest
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import quiver
from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.eval.results import Results, ScoreTable, read_results
from quiver.retrieval.index import Index
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import ColBERTSettings, Kind, ModelFolder
from quiver.retrieval.models.pooling import Projection
from quiver.retrieval.records import Hit, Hits, QueryHits

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = {"encoder": "quiver.encoder", "retrieval": "quiver.retrieval", "eval": "quiver.eval", "quiver": "quiver"}
# Kernels import Triton, which CPU builds of torch do not bring; tests/test_triton.py runs them.
NEEDS_TRITON = re.compile(r"quiver\.(encoder\.gpu|retrieval\.models)\.triton_\w+")


def packages() -> set[str]:
    """Every folder with files: setuptools warns of one that is not listed, even if it holds templates alone."""
    found = {"quiver.recipes"}
    for folder, name in FOLDERS.items():
        for path in (REPOSITORY / folder).rglob("*.*"):
            inner = path.parent.relative_to(REPOSITORY / folder).parts
            if path.is_file() and "__pycache__" not in inner:
                found.add(".".join((name, *inner)))
    return found


def modules() -> list[str]:
    found = [module.name for module in pkgutil.walk_packages(quiver.__path__, "quiver.")]
    for folder, name in FOLDERS.items():
        for path in (REPOSITORY / folder).rglob("*.py"):
            inner = path.relative_to(REPOSITORY / folder).with_suffix("").parts
            found.append(".".join((name, *inner)).removesuffix(".__init__"))
    return sorted({name for name in found if not NEEDS_TRITON.fullmatch(name) and not name.endswith("__main__")})


def test_pyproject_lists_every_package() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    listed = text.partition("packages = [\n")[2].partition("\n]")[0]
    assert re.findall(r'"([\w.]+)"', listed) == sorted(packages())


ANIMALS = [{"id": "owl", "text": "owls have wings", "year": 2012}, {"id": "trout", "text": "trout have fins", "year": 2008}]


class Examples:
    """What the examples in docstrings use without making it, by the names of the methods."""

    def __init__(self, root: Path) -> None:
        self.root, self.numbers = root, itertools.count()

    def tiny_model(self, kind: Kind) -> str:
        """A model with random weights; 32 dimensions, or 8 per token."""
        folder = self.root / kind
        if not folder.exists():
            tokenizer = Tokenizer.train(["owls have wings", "trout have fins", "which animal has wings"] * 2, vocab_size=320)
            for prefix in ("[Q] ", "[D] "):
                tokenizer.add_token(prefix)
            layers = {"num_heads": 2, "intermediate_size": 48, "layer_types": ["global", "local"], "max_positions": 64}
            encoder = init_weights(Encoder(EncoderConfig.modernbert(vocab_size=330, hidden_size=32, **layers)), seed=1)
            if kind == "dense":
                BiEncoder.from_parts(encoder, tokenizer, ModelFolder("dense", folder, max_length=64)).save_pretrained(folder)
            else:
                settings = ModelFolder("colbert", folder, projections=(Projection(32, 8),), colbert=ColBERTSettings(document_length=60))
                ColBERT.from_parts(encoder, tokenizer, settings).save_pretrained(folder)
        return str(folder)

    def tiny_index(self) -> str:
        """A dense index of two documents."""
        folder = self.root / "index"
        if not folder.exists():
            quiver.build_index(ANIMALS, BiEncoder(self.tiny_model("dense"), device="cpu"), folder)
        return str(folder)

    def tiny_collection(self) -> str:
        """A BEIR folder whose two queries are the texts of its documents."""
        folder = self.root / "animals"
        if not folder.exists():
            (folder / "qrels").mkdir(parents=True)
            for name, prefix in (("corpus", ""), ("queries", "about-")):
                lines = [json.dumps({"_id": f"{prefix}{row['id']}", "text": row["text"]}) + "\n" for row in ANIMALS]
                (folder / f"{name}.jsonl").write_text("".join(lines))
            rows = "".join(f"about-{row['id']}\t{row['id']}\t1\n" for row in ANIMALS)
            (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)
        return str(folder)

    def tiny_results(self) -> str:
        """The results of the dense model on that collection."""
        folder = self.root / "results"
        if not folder.exists():
            quiver.evaluate(self.tiny_model("dense"), self.tiny_collection(), out=folder, baselines=(), device="cpu")
        return str(folder)

    def tiny_recipe(self) -> str:
        """A recipe of two updates."""
        path, rows = self.root / "recipe.json", self.root / "rows.jsonl"
        if not path.exists():
            rows.write_text("".join(json.dumps({"query": row["id"], "positive": row["text"]}) + "\n" for row in ANIMALS * 2))
            described = dict.fromkeys(("name", "description", "source", "cost", "expected"), "an example")
            training = {"epochs": 1, "batch_size": 2, "learning_rate": 1e-2, "warmup_ratio": 0, "scheduler": "linear", "weight_decay": 0.01}
            training |= {"max_grad_norm": 1.0, "seed": 7, "dtype": "float32", "no_duplicates": False, "log_every": 1}
            data = {"train": str(rows), "document_fields": ["positive"]}
            model = {"init": self.tiny_model("dense"), "pooling": "mean", "normalize": True, "max_length": 24}
            loss = {"name": "mnrl"}
            path.write_text(json.dumps({**described, "kind": "dense", "model": model, "data": data, "loss": loss, "training": training}))
        return str(path)

    def new_folder(self) -> Path:
        """An empty folder."""
        folder = self.root / f"new-{next(self.numbers)}"
        folder.mkdir()
        return folder

    def names(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in vars(Examples) if name.startswith(("tiny_", "new_"))}


@pytest.fixture(scope="module")
def example_names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return Examples(tmp_path_factory.mktemp("examples")).names()


@pytest.mark.parametrize("name", modules())
def test_the_examples_in_docstrings_are_right(name: str, example_names: dict[str, Any]) -> None:
    result = doctest.testmod(importlib.import_module(name), extraglobs=example_names)
    assert result.failed == 0
    assert sys.modules[name].__doc__


PUBLIC = (
    *(getattr(quiver, name) for name in quiver.__all__ if name != "__version__"),
    *(Index, Hits, QueryHits, Hit, Results, ScoreTable, read_results),
)
"""The public names, and what they return: docs/python.md is about them."""


def documented(public: Any) -> Iterator[tuple[str, Any, str]]:
    """A public function or class and the public methods and properties of the class: qualified name, object, docstring."""
    yield public.__qualname__, public, public.__doc__
    for name in dir(public) if inspect.isclass(public) else ():
        owner = next(each for each in public.__mro__ if name in vars(each))
        raw = vars(owner)[name]
        if not name.startswith("_") and owner.__module__.startswith("quiver.") and isinstance(raw, METHODS):
            yield f"{public.__qualname__}.{name}", raw, raw.__doc__


METHODS = (FunctionType, classmethod, staticmethod, property, cached_property)


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__qualname__)
def test_every_public_name_and_method_has_an_example(public: Any, example_names: dict[str, Any]) -> None:
    """The test above runs them, but for those of cached properties, which doctest does not find."""
    module = sys.modules[public.__module__]
    without = []
    for name, found, text in documented(public):
        example = doctest.DocTestParser().get_doctest(text or "", {**vars(module), **example_names}, name, module.__file__, None)
        if not example.examples:
            without.append(name)
        elif isinstance(found, cached_property):
            assert doctest.DocTestRunner().run(example).failed == 0
    assert not without


def test_the_public_names_can_be_imported() -> None:
    assert {"BiEncoder", "ColBERT", "Document", "InputError", "build_index", "evaluate", "open_corpus", "open_index", "train"} < set(
        quiver.__all__
    )
    for name in quiver.__all__:
        assert getattr(quiver, name) is not None
    assert re.match(r"\d+\.\d+", quiver.__version__)
