"""Open a model with another library: which library is the caller's choice, never guessed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home
from quiver.eval.baselines.checkpoint import check_present, is_late_interaction
from quiver.eval.baselines.pylate import PyLateModel
from quiver.eval.baselines.sentence_transformers import MultiVectorModel, SentenceTransformersModel
from quiver.retrieval.protocols import DenseModel, TokenModel


def _sentence_transformers(source: str | Path, device: str | None) -> DenseModel | TokenModel:
    if is_late_interaction(str(expand_home(source))):
        return MultiVectorModel(source, device=device)
    return SentenceTransformersModel(source, device=device)


def _pylate(source: str | Path, device: str | None) -> TokenModel:
    return PyLateModel(source, device=device)


LIBRARIES: Mapping[str, Callable[[str | Path, str | None], DenseModel | TokenModel]] = {
    "sentence-transformers": _sentence_transformers,
    "pylate": _pylate,
}
"""Name of a library, as pip has it -> how it opens a model."""


def load_peer(library: str, source: str | Path, *, device: str | None = None) -> DenseModel | TokenModel:
    """Open a model with another library, for `eval.evaluation` to score.

    Args:
        library: A key of `LIBRARIES`.
        source: Folder or hub id.
        device: Where it runs; by default where the library puts it.

    Raises:
        InputError: The library is unknown or not installed, or it cannot run this model.
    """
    if library not in LIBRARIES:
        raise InputError(f"unknown library {library!r}; there are {', '.join(LIBRARIES)}")
    if importlib.util.find_spec(library.replace("-", "_")) is None:
        raise InputError(f"{source}: {library} is not installed: pip install {library}")
    check_present(str(expand_home(source)))
    return LIBRARIES[library](source, device)
