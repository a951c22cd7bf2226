"""Load and save encoders with a task head, in the layouts of transformers and the families' own code.

Loading is strict: a head must be complete, unless the caller gives a seed for missing weights. ModernBERT's config.json has keys for the
head; in the other families it follows from the layers, and a setting without a key is refused. A quiver config.json keeps the settings of
the head under the key ``head``, with ModernBERT's names.

Shapes: C labels.
Source: the configurations of ModernBERT, BERT and RoBERTa in transformers 5.3.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from quiver.encoder.checkpoints import ConfigStyle, config_from_hf, config_to_hf
from quiver.encoder.checkpoints.checkpoint import from_hf_state, to_hf_state, write_checkpoint
from quiver.encoder.checkpoints.families import FORMATS, families_with_head
from quiver.encoder.checkpoints.family import AUTO_CLASSES, TO_HF_ACTIVATION, ConfigReader, HeadLayout, Task, TensorNames
from quiver.encoder.checkpoints.folder import local_folder, read_weights
from quiver.encoder.config import EncoderConfig, Family
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.encoder.heads import (
    CLASSIFIER_POOLINGS,
    IGNORE_INDEX,
    SHARED_TRANSFORM,
    ClassifierPooling,
    Head,
    MaskedLM,
    ProblemType,
    SequenceClassifier,
    SpanQA,
    TransformConfig,
    classifier_transform,
    decoder_has_bias,
    head_dropout,
    init_head,
    masked_lm_transform,
)
from quiver.encoder.model import Encoder

logger = logging.getLogger(__name__)

Value = TypeVar("Value", bound=str)


def read_transform(keys: ConfigReader, default: TransformConfig, config: EncoderConfig) -> TransformConfig:
    """Read the layer before the last matrix; only ModernBERT's keys can change it."""
    if config.family not in SHARED_TRANSFORM:
        return default
    return replace(default, bias=keys.flag("classifier_bias"), activation=keys.activation("classifier_activation"))


def read_dropout(keys: ConfigReader, config: EncoderConfig) -> float:
    """Read the dropout before the label matrix."""
    dropout = keys.number("classifier_dropout", head_dropout(config))
    if not 0 <= dropout < 1:
        raise keys.error("classifier_dropout", "must be >= 0 and < 1")
    return dropout


def read_labels(keys: ConfigReader) -> tuple[int, tuple[str, ...] | None]:
    """Read the number of labels, and their names if config.json has them."""
    names = keys.inner("id2label")
    if names is None:
        count = keys.integer("num_labels", 2)
        if count < 1:
            raise keys.error("num_labels", "must be >= 1")
        return count, None
    ordered = [names.hf.get(str(number)) for number in range(len(names.hf))]
    if not ordered or not all(isinstance(name, str) for name in ordered):
        raise keys.error("id2label", 'must name the labels "0", "1", ...')
    if keys.integer("num_labels", len(ordered)) != len(ordered):
        raise keys.error("num_labels", f"must be {len(ordered)}, the number of labels in id2label")
    return len(ordered), tuple(str(name) for name in ordered)


def one_of(keys: ConfigReader, key: str, known: dict[Value, Any]) -> Value | None:
    """Read a value that is one of ``known``; None if config.json does not set it."""
    value = keys.hf.get(key)
    if value is None:
        return None
    for one in known:
        if value == one:
            return one
    raise keys.error(key, f"must be one of {', '.join(known)}")


def transform_settings(transform: TransformConfig, default: TransformConfig, config: EncoderConfig) -> dict[str, Any]:
    """Write what `read_transform` reads.

    Raises:
        InputError: The family's config.json has no key for it.
    """
    if config.family not in SHARED_TRANSFORM:
        if transform != default:
            raise InputError(f"transform: a {config.family} config.json cannot express {transform}")
        return {}
    activation = TO_HF_ACTIVATION.get(transform.activation)
    if activation is None or replace(transform, bias=default.bias, activation=default.activation) != default:
        raise InputError(f"transform: a {config.family} config.json cannot express {transform}")
    return {"classifier_bias": transform.bias, "classifier_activation": activation}


AnyHead = TypeVar("AnyHead", MaskedLM, SequenceClassifier, SpanQA)


@dataclass(frozen=True)
class _Opened:
    """A folder after reading.

    Attributes:
        where: The folder, for errors.
        encoder: With its weights.
        layout: Layout of the head for the requested task.
        keys: Settings of the head.
        tensors: The head's tensors in the file, under our names.
    """

    where: str
    encoder: Encoder
    layout: HeadLayout
    keys: ConfigReader
    tensors: dict[str, Tensor]


def load_masked_lm(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    new_head_seed: int | None = None,
) -> MaskedLM:
    """Load a masked language model, in evaluation mode.

    The decoder is tied to the token embedding, unless config.json unties it or the file contains another matrix.

    Args:
        source: A folder with config.json and weights (`quiver.encoder.checkpoints.folder`), or a model id on the Hub.
        revision: Branch, tag or commit on the Hub.
        dtype: Dtype of the weights in memory.
        device: Device of the weights.
        new_head_seed: Seed for missing weights of the head, which the log lists; None: missing weights are an error.

    Raises:
        InputError: As `quiver.encoder.checkpoints.checkpoint.load_encoder`; or the head is incomplete, or a setting of it is not supported.
    """
    opened = _open(source, revision, "masked_lm")
    keys, config = opened.keys, opened.encoder.config
    with _naming(opened.where):
        keys.require("sparse_pred_ignore_index", IGNORE_INDEX)
        transform = read_transform(keys, masked_lm_transform(config), config)
        bias = decoder_has_bias(config)
        if config.family in SHARED_TRANSFORM:
            bias = keys.flag("decoder_bias", bias)
        else:
            keys.require("decoder_bias", bias)
        tied = keys.flag("tie_word_embeddings", True) and not _has_own_decoder(opened)
    if tied:
        opened.tensors.pop("decoder.weight", None)
    model = MaskedLM(opened.encoder, transform=transform, decoder_bias=bias, tied=tied)
    return _fill(model, opened, new_head_seed).to(device=device, dtype=dtype).eval()


def load_classifier(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_labels: int | None = None,
    pooling: ClassifierPooling | None = None,
    problem_type: ProblemType | None = None,
    new_head_seed: int | None = None,
) -> SequenceClassifier:
    """Load a classifier of sequences, in evaluation mode.

    Args:
        source: A folder with config.json and weights (`quiver.encoder.checkpoints.folder`), or a model id on the Hub.
        revision: Branch, tag or commit on the Hub.
        dtype: Dtype of the weights in memory.
        device: Device of the weights.
        num_labels: C; default: that of config.json. With ``new_head_seed`` it may differ from the file's: then the label matrix is
            initialised anew.
        pooling: Vector of a sequence; default: config.json's, or its first token.
        problem_type: How labels are read; default: config.json's.
        new_head_seed: Seed for missing weights of the head, which the log lists; None: missing weights are an error.

    Raises:
        InputError: As `quiver.encoder.checkpoints.checkpoint.load_encoder`; or the head is incomplete, or a setting of it is not supported.
    """
    opened = _open(source, revision, "classifier")
    keys, config = opened.keys, opened.encoder.config
    with _naming(opened.where):
        if config.family not in SHARED_TRANSFORM:
            keys.require("classifier_pooling", "cls")
        stored, names = read_labels(keys)
        wanted = stored if num_labels is None else num_labels
        model = SequenceClassifier(
            opened.encoder,
            wanted,
            pooling=pooling or one_of(keys, "classifier_pooling", CLASSIFIER_POOLINGS) or "cls",
            problem_type=problem_type or one_of(keys, "problem_type", dict.fromkeys(get_args(ProblemType))),
            dropout=read_dropout(keys, config),
            transform=read_transform(keys, classifier_transform(config), config),
            label_names=names if wanted == stored else None,
        )
    out = opened.tensors.get("out.weight")
    if num_labels is not None and new_head_seed is not None and out is not None and len(out) != num_labels:
        _drop_out(opened.tensors)
    return _fill(model, opened, new_head_seed).to(device=device, dtype=dtype).eval()


def load_span_qa(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    new_head_seed: int | None = None,
) -> SpanQA:
    """Load a model that answers with spans, in evaluation mode.

    Args:
        source: A folder with config.json and weights (`quiver.encoder.checkpoints.folder`), or a model id on the Hub.
        revision: Branch, tag or commit on the Hub.
        dtype: Dtype of the weights in memory.
        device: Device of the weights.
        new_head_seed: Seed for missing weights of the head, which the log lists; None: missing weights are an error.

    Raises:
        InputError: As `quiver.encoder.checkpoints.checkpoint.load_encoder`; or the head is incomplete, or a setting of it is not supported.
    """
    opened = _open(source, revision, "span_qa")
    keys, config = opened.keys, opened.encoder.config
    dropout = transform = None
    if config.family in SHARED_TRANSFORM:
        with _naming(opened.where):
            dropout = read_dropout(keys, config)
            transform = read_transform(keys, masked_lm_transform(config), config)
    model = SpanQA(opened.encoder, dropout=dropout, transform=transform)
    return _fill(model, opened, new_head_seed).to(device=device, dtype=dtype).eval()


def _open(source: str | Path, revision: str | None, task: Task) -> _Opened:
    folder = local_folder(source, revision=revision)
    hf = read_json(folder / "config.json")
    with _naming(str(folder)):
        settings = ConfigReader(hf)
        inner = settings.inner("head")
        config = config_from_hf({key: value for key, value in hf.items() if key != "head"})
        if config.family not in families_with_head(task):
            raise InputError(f"config.json: {_no_head(config.family, task)}")
    layout = FORMATS[config.family].heads[task]
    tensors, rest = _split(read_weights(folder), FORMATS[config.family].tensors, layout)
    encoder = Encoder(config)
    encoder.load_state_dict(from_hf_state(encoder, rest, where=str(folder)))
    if _is_of_other_task(hf, layout):
        _drop_out(tensors)
    keys = ConfigReader({}) if config.family == "quiver" and inner is None else inner or settings
    return _Opened(str(folder), encoder, layout, keys, tensors)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Add the folder to errors about its config.json."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _split(state: dict[str, Tensor], family: TensorNames, layout: HeadLayout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a file's tensors into those of the head, under our names, and the others."""
    ours = {f"{theirs.format('')}.{kind}": f"{module}.{kind}" for module, theirs in layout.modules.items() for kind in ("weight", "bias")}
    second = {theirs: name for name, theirs in layout.tensors.items()}
    head: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for key, tensor in state.items():
        name = family.current_name(key)
        if name in ours:
            head[ours[name]] = tensor
        elif name in second:
            head.setdefault(second[name], tensor)
        else:
            rest[key] = tensor
    return head, rest


def _is_of_other_task(hf: dict[str, Any], layout: HeadLayout) -> bool:
    """Return whether config.json names a class of another task; XLM-R's classes count as RoBERTa's."""
    names = hf.get("architectures")
    kind = str(names[0]).partition("For")[2] if isinstance(names, list) and names else ""
    return kind not in ("", layout.architecture.partition("For")[2])


def _drop_out(tensors: dict[str, Tensor]) -> None:
    """Drop a last matrix of another task: ``classifier.weight`` is its name in more than one."""
    for name in ("out.weight", "out.bias"):
        tensors.pop(name, None)


def _their_names(ours: str, layout: HeadLayout, prefix: str) -> list[str]:
    """Return the possible names of one of our tensors in a file, that of its module last."""
    module, _, kind = ours.rpartition(".")
    own = [layout.tensors[ours]] if ours in layout.tensors else []
    return [*own, f"{layout.modules[module].format(prefix)}.{kind}"]


def _head_tensors(model: Head) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("encoder.")}


def _fill(model: AnyHead, opened: _Opened, seed: int | None) -> AnyHead:
    """Fill a head from the file, and initialise missing weights if there is a seed."""
    where, given, wanted = opened.where, opened.tensors, _head_tensors(model)
    theirs = {name: _their_names(name, opened.layout, "")[0] for name in wanted.keys() | given.keys()}
    if unknown := sorted(theirs[name] for name in given.keys() - wanted.keys()):
        raise InputError(f"{where}: the file contains {', '.join(unknown)}, which the head of config.json does not have")
    missing = sorted(theirs[name] for name in wanted.keys() - given.keys())
    if missing and seed is None:
        raise InputError(
            f"{where}: the head of {opened.layout.architecture} is incomplete: missing {', '.join(missing)}; "
            "pass new_head_seed to initialize the missing weights at random, and train them"
        )
    for name in (name for name in wanted if name in given):
        tensor, shape, asked = given[name], tuple(given[name].shape), tuple(wanted[name].shape)
        if shape != asked:
            raise InputError(f"{where}: {theirs[name]} has shape {shape}, expected {asked}")
        if not tensor.is_floating_point():
            raise InputError(f"{where}: {theirs[name]} holds {tensor.dtype}, not floating-point numbers")
    if missing and seed is not None:
        init_head(model, seed=seed)
        logger.warning("%s: initialized at random with seed %d, to be trained: %s", where, seed, ", ".join(missing))
    model.load_state_dict(model.state_dict() | given)
    return model


def _has_own_decoder(opened: _Opened) -> bool:
    """Return whether the file has a decoder matrix that differs from the embedding, contrary to its own config.json."""
    own, embedding = opened.tensors.get("decoder.weight"), opened.encoder.embeddings.tokens.weight
    if own is None or torch.equal(own.to(embedding.dtype), embedding):
        return False
    logger.warning(
        "%s: config.json ties the decoder to the embedding, but the file holds two different matrices; both are kept", opened.where
    )
    return True


def save_masked_lm(model: MaskedLM, folder: str | Path, *, style: ConfigStyle = "v4") -> None:
    """Write a masked language model as transformers writes it.

    Args:
        model: The model.
        folder: Created if necessary; each file is replaced as a whole.
        style: Generation of ModernBERT's config keys; transformers 4 and 5 both read v4.

    Raises:
        InputError: The family's config.json cannot express the head; the message names the setting.
    """
    config = model.encoder.config
    settings = transform_settings(model.transform.config, masked_lm_transform(config), config)
    settings["tie_word_embeddings"] = model.decoder.weight is None
    has_bias = model.decoder.bias is not None
    if config.family in SHARED_TRANSFORM:
        settings["decoder_bias"] = has_bias
    elif has_bias != decoder_has_bias(config):
        raise InputError(f"decoder_bias: a {config.family} config.json cannot express {str(has_bias).lower()}")
    _save(model, Path(folder), "masked_lm", settings, style)


def save_classifier(model: SequenceClassifier, folder: str | Path, *, style: ConfigStyle = "v4") -> None:
    """Write a classifier of sequences as transformers writes it.

    Args:
        model: The model.
        folder: Created if necessary; each file is replaced as a whole.
        style: Generation of ModernBERT's config keys; transformers 4 and 5 both read v4.

    Raises:
        InputError: The family's config.json cannot express the head; the message names the setting.
    """
    config = model.encoder.config
    settings = transform_settings(model.transform.config, classifier_transform(config), config)
    if config.family in SHARED_TRANSFORM:
        settings["classifier_pooling"] = model.pooling
    elif model.pooling != "cls":
        raise InputError(f"pooling: a {config.family} config.json cannot express {model.pooling}")
    names = model.label_names or tuple(f"LABEL_{number}" for number in range(model.num_labels))
    settings |= {
        "classifier_dropout": model.dropout.p,
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": model.problem_type,
    }
    _save(model, Path(folder), "classifier", settings, style)


def save_span_qa(model: SpanQA, folder: str | Path, *, style: ConfigStyle = "v4") -> None:
    """Write a model that answers with spans as transformers writes it.

    Args:
        model: The model.
        folder: Created if necessary; each file is replaced as a whole.
        style: Generation of ModernBERT's config keys; transformers 4 and 5 both read v4.

    Raises:
        InputError: The family's config.json cannot express the head; the message names the setting.
    """
    config = model.encoder.config
    settings: dict[str, Any] = {}
    if config.family in SHARED_TRANSFORM and model.transform is not None:
        settings = transform_settings(model.transform.config, masked_lm_transform(config), config)
        settings["classifier_dropout"] = model.dropout.p
    elif (model.transform is None) is (config.family in SHARED_TRANSFORM):
        raise InputError(f"transform: a {config.family} config.json cannot express whether the head has a transform")
    _save(model, Path(folder), "span_qa", settings, style)


def _save(model: Head, folder: Path, task: Task, settings: dict[str, Any], style: ConfigStyle) -> None:
    config = model.encoder.config
    if config.family not in families_with_head(task):
        raise InputError(_no_head(config.family, task))
    layout, prefix = FORMATS[config.family].heads[task], FORMATS[config.family].tensors.prefix
    hf = config_to_hf(config, style=style) | {"architectures": [layout.architecture]}
    hf |= {"head": settings} if config.family == "quiver" else settings
    if "auto_map" in hf:  # the family's own code: name its class for this task too
        code = hf["auto_map"]["AutoModelForMaskedLM"].rpartition(".")[0]
        hf["auto_map"] = {**hf["auto_map"], AUTO_CLASSES[task]: f"{code}.{layout.architecture}"}
    state = to_hf_state(model.encoder, prefix=True)
    # transformers ties both names of a decoder's bias if the decoder is tied, and otherwise reads both.
    both = isinstance(model, MaskedLM) and model.decoder.weight is not None
    for name, tensor in _head_tensors(model).items():
        for theirs in _their_names(name, layout, prefix)[: None if both else 1]:
            state[theirs] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    hf["torch_dtype"] = str(model.encoder.embeddings.tokens.weight.dtype).removeprefix("torch.")
    write_checkpoint(folder, state, hf)


def _no_head(family: Family, task: Task) -> str:
    return f"family {family} has no {task} head; families that have one: {', '.join(families_with_head(task))}"
