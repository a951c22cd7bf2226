"""The list of packages is complete, the wheel has one package at its top, and every doctest passes."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import quiver
from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import Projection
from quiver.retrieval.models.loading import ColBERTSettings, Kind, ModelFolder

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = {"encoder": "quiver.encoder", "retrieval": "quiver.retrieval", "eval": "quiver.eval", "quiver": "quiver"}
# Kernels import Triton, which CPU builds of torch do not bring; tests/test_triton.py runs them.
NEEDS_TRITON = re.compile(r"quiver\.(encoder\.gpu|retrieval\.models)\.triton_\w+")


def packages() -> set[str]:
    found = {"quiver.recipes"}
    for folder, name in FOLDERS.items():
        for path in (REPOSITORY / folder).rglob("__init__.py"):
            inner = path.parent.relative_to(REPOSITORY / folder).parts
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


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], str]:
    """Folders of small models with random weights, by their kind, for the examples in docstrings."""
    root = tmp_path_factory.mktemp("models")

    def make(kind: Kind) -> str:
        folder = root / kind
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

    return make


@pytest.mark.parametrize("name", modules())
def test_the_examples_in_docstrings_are_right(name: str, tiny_model: Callable[[Kind], str]) -> None:
    result = doctest.testmod(importlib.import_module(name), extraglobs={"tiny_model": tiny_model})
    assert result.failed == 0
    assert sys.modules[name].__doc__


def test_the_public_names_can_be_imported() -> None:
    assert set(quiver.__all__) >= {"BiEncoder", "ColBERT", "Document", "InputError", "build_index", "evaluate", "open_index", "train"}
    for name in quiver.__all__:
        assert getattr(quiver, name) is not None
    assert re.match(r"\d+\.\d+", quiver.__version__)
