"""The mean of models: one model whose every weight is the mean of theirs.

Of checkpoints of one run it is better than the last of them more often than not, at no cost in use.

Source: averaging of the last checkpoints as in the Transformer, arXiv:1706.03762, section 6.1, and JaColBERTv2.5, arXiv:2407.20750.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import Tensor

from encoder.errors import InputError
from encoder.files import sync_folder
from encoder.hub import local_folder
from retrieval.biencoder import BiEncoder
from retrieval.colbert import ColBERT
from retrieval.records import ModelCard
from retrieval.training.loop.snapshot import open_snapshot_model


def average_models(sources: Sequence[str | Path]) -> BiEncoder | ColBERT:
    """Load models one after the other and average their weights.

    The sum is taken in float64 and rounded once, to the type that the first model's weights have; two models are in memory at a time.

    Args:
        sources: Folders or hub ids, at least one. A model that stands twice counts twice.

    Returns:
        The mean, with the settings that they all have.

    Raises:
        InputError: One is no model, or they differ in more than their weights: names the two and what.
    """
    if not sources:
        raise ValueError("an average needs at least one model")
    mean = open_snapshot_model(local_folder(sources[0]))
    sums = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in _weights(mean).items()}
    for source in sources[1:]:
        other = open_snapshot_model(local_folder(source))
        if difference := _difference(mean, other):
            raise InputError(f"{source} and {sources[0]} cannot be averaged: they differ in {difference}")
        for name, tensor in _weights(other).items():
            if tensor.is_floating_point():
                sums[name] += tensor
    with torch.no_grad():
        for name, tensor in _weights(mean).items():
            if tensor.is_floating_point():
                tensor.copy_(sums[name] / len(sources))
    return mean


def write_average(sources: Sequence[str | Path], out: Path, *, overwrite: bool = False) -> ModelCard:
    """Average models and write the mean, whole or not at all.

    Args:
        sources: As `average_models` takes them.
        out: Folder to write.
        overwrite: Replace a model that is there.

    Returns:
        The card of the mean.

    Raises:
        InputError: As `average_models`; or ``out`` is taken, is one of the sources, or cannot be written.
    """
    _refuse_target(sources, out, overwrite=overwrite)
    mean = average_models(sources)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(mkdtemp(prefix=f".{out.name}-unfinished-", dir=out.parent))
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        model = type(mean)(mean.encoder, mean.tokenizer, mean.settings, source=str(out))
        model.save(stage / "model")
        with ExitStack() as undo:
            if out.exists():
                out.rename(stage / "replaced")
                undo.callback((stage / "replaced").rename, out)
            (stage / "model").rename(out)
            undo.pop_all()
        sync_folder(out.parent)
    finally:
        shutil.rmtree(stage)
    return model.card


def _refuse_target(sources: Sequence[str | Path], out: Path, *, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file; --out names a folder")
    if any(Path(source).resolve().is_relative_to(out.resolve()) for source in sources):
        raise InputError(f"{out}: is, or holds, one of the models to be averaged; choose another --out")
    if out.is_dir() and any(out.iterdir()):
        if not (out / "config.json").is_file():
            raise InputError(f"{out}: not empty, and no model; choose another --out")
        if not overwrite:
            raise InputError(f"{out}: holds a model already; choose another --out, or --overwrite")


def _weights(model: BiEncoder | ColBERT) -> dict[str, Tensor]:
    """The model's own tensors by name; writing to them changes it."""
    return {
        f"{part}.{name}": tensor
        for part, module in (("encoder", model.encoder), ("projections", model.projections))
        for name, tensor in module.state_dict().items()
    }


def _difference(first: BiEncoder | ColBERT, second: BiEncoder | ColBERT) -> str | None:
    """What two models differ in beside their weights, in a word or two."""
    compared = {
        "kind": (first.settings.kind, second.settings.kind),
        "architecture": (asdict(first.encoder.config), asdict(second.encoder.config)),
        "vocabulary": (first.tokenizer.to_json(), second.tokenizer.to_json()),
        "the shapes of their weights": tuple({name: t.shape for name, t in _weights(model).items()} for model in (first, second)),
        "their settings": tuple(replace(model.settings, encoder_folder=Path(), projections=()) for model in (first, second)),
        "their Dense modules": tuple(
            [(one.activation, one.use_residual) for one in model.settings.projections] for model in (first, second)
        ),
    }
    return next((what for what, (one, other) in compared.items() if one != other), None)
