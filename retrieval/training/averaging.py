"""Average models: every weight is the mean of the models' weights.

The average of the last checkpoints of a run is usually better than the last one, at no cost in use.

Source: averaging of the last checkpoints as in the Transformer, arXiv:1706.03762, section 6.1, and JaColBERTv2.5, arXiv:2407.20750.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.errors import InputError
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.export import check_target, replacing_folder
from quiver.retrieval.records import ModelCard
from quiver.retrieval.training.state import load_trainable


def average_models(sources: Sequence[str | Path]) -> BiEncoder | ColBERT:
    """Load models one by one and average their weights.

    Weights are summed in float64 and rounded once to the dtype of the first model; two models are in memory at a time.

    Args:
        sources: Folders or Hub ids, at least one. A model that occurs twice counts twice.

    Returns:
        The average, with the common settings.

    Raises:
        InputError: A source is not a model, or two models differ in more than their weights (names both and the difference).
    """
    if not sources:
        raise ValueError("an average needs at least one model")
    mean = load_trainable(local_folder(sources[0]))
    if len(sources) == 1:
        return mean
    sums = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in _weights(mean).items()}
    for source in sources[1:]:
        other = load_trainable(local_folder(source))
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
    """Average models and write the result by one rename (into a git clone, file by file).

    Args:
        sources: See `average_models`.
        out: Target folder.
        overwrite: Replace an existing model.

    Returns:
        The card of the average.

    Raises:
        InputError: The models cannot be averaged (see `average_models`); or ``out`` is a file, contains one of the sources, holds a model
            and ``overwrite`` is False, holds other files, or cannot be written.
    """
    if any(Path(source).resolve().is_relative_to(out.resolve()) for source in sources):
        raise InputError(f"{out}: is or contains one of the models to average; choose another --out")
    for source in sources:
        check_target(out, Path(source), overwrite=overwrite)
    mean = average_models(sources)
    model = type(mean)(mean.encoder, mean.tokenizer, mean.settings, source=str(out))
    try:
        with replacing_folder(out) as folder:
            model.save(folder)
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    return model.card


def _weights(model: BiEncoder | ColBERT) -> dict[str, Tensor]:
    """Tensors of the model by name, not copied."""
    return {
        f"{part}.{name}": tensor
        for part, module in (("encoder", model.encoder), ("projections", model.projections))
        for name, tensor in module.state_dict().items()
    }


def _difference(first: BiEncoder | ColBERT, second: BiEncoder | ColBERT) -> str | None:
    """Difference of two models besides their weights, in words; None if there is none."""
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
