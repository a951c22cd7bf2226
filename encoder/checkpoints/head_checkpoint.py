"""Load and save encoders with a task head, in the layouts of transformers and the families' own code.

The settings of each task's head are a table, `SETTINGS`. A head must be complete, unless the caller gives a seed for missing weights.
ModernBERT's config.json has keys for the head; in the other families most settings follow from the layers, and another value is refused. A
quiver config.json keeps them under the key ``head``, with ModernBERT's names.

Shapes: C labels.
Source: the configurations of ModernBERT, BERT and RoBERTa in transformers 5.3.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from quiver.encoder.checkpoints import ConfigStyle, config_from_hf, config_to_hf
from quiver.encoder.checkpoints.checkpoint import (
    FORMATS,
    base_folder,
    families_with_head,
    from_hf_state,
    local_folder,
    read_state,
    to_hf_state,
    write_checkpoint,
)
from quiver.encoder.checkpoints.format import AUTO_CLASSES, TO_HF_ACTIVATION, ConfigReader, HeadLayout, Task, TensorNames
from quiver.encoder.config import EncoderConfig, Family
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.encoder.heads import (
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
from quiver.encoder.model import Encoder, Uninitialized

logger = logging.getLogger(__name__)

AnyHead = TypeVar("AnyHead", MaskedLM, SequenceClassifier, SpanQA)


@dataclass(frozen=True)
class Setting:
    """A setting of a head: how config.json expresses it."""

    name: str  # argument of the head's class
    read: Callable[[ConfigReader, EncoderConfig], Any]  # reads it from config.json
    value: Callable[[Any], Any]  # its value in a model
    write: Callable[[Any, EncoderConfig], dict[str, Any]]  # its keys in config.json, by value and the family's default
    # Its value in families without keys for it. None: all families have the keys; otherwise only ModernBERT and Quiver.
    default: Callable[[EncoderConfig], Any] | None = None
    fixed_key: str | None = None  # in families without keys for it, a key that is nevertheless allowed with the default

    def has_keys(self, config: EncoderConfig) -> bool:
        """Return whether the family's config.json has keys for it."""
        return self.default is None or config.family in SHARED_TRANSFORM


def _transform_setting(family_transform: Callable[[EncoderConfig], TransformConfig], *, may_be_absent: bool = False) -> Setting:
    """The layer before the last matrix: bias and activation have keys, the rest follows from the family."""

    def read(keys: ConfigReader, config: EncoderConfig) -> TransformConfig:
        return replace(family_transform(config), bias=keys.flag("classifier_bias"), activation=keys.activation("classifier_activation"))

    def write(transform: TransformConfig | None, config: EncoderConfig) -> dict[str, Any]:
        default = family_transform(config)
        activation = None if transform is None else TO_HF_ACTIVATION.get(transform.activation)
        if transform is None or activation is None or replace(transform, bias=default.bias, activation=default.activation) != default:
            raise _not_expressible("transform", transform, config)
        return {"classifier_bias": transform.bias, "classifier_activation": activation}

    def value(model: Head) -> TransformConfig | None:
        return None if model.transform is None else model.transform.config

    return Setting("transform", read, value, write, default=(lambda _: None) if may_be_absent else family_transform)


def _one_of(key: str, choices: tuple[str, ...], default: str | None) -> Callable[[ConfigReader, EncoderConfig], Any]:
    def read(keys: ConfigReader, _config: EncoderConfig) -> Any:
        value = keys.hf.get(key)
        if value is not None and value not in choices:
            raise keys.error(key, f"must be one of {', '.join(choices)}")
        return default if value is None else value

    return read


def _under(key: str) -> Callable[[Any, EncoderConfig], dict[str, Any]]:
    return lambda value, _config: {key: value}


def _read_dropout(keys: ConfigReader, config: EncoderConfig) -> float:
    dropout = keys.number("classifier_dropout", head_dropout(config))
    if not 0 <= dropout < 1:
        raise keys.error("classifier_dropout", "must be >= 0 and < 1")
    return dropout


def _read_labels(keys: ConfigReader, _config: EncoderConfig) -> tuple[int, tuple[str, ...] | None]:
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


def _write_labels(labels: tuple[int, tuple[str, ...] | None], _config: EncoderConfig) -> dict[str, Any]:
    count, names = labels
    numbered = dict(enumerate(names or (f"LABEL_{number}" for number in range(count))))
    return {"id2label": {str(number): name for number, name in numbered.items()}, "label2id": {name: i for i, name in numbered.items()}}


SETTINGS: dict[Task, tuple[Setting, ...]] = {
    "masked_lm": (
        _transform_setting(masked_lm_transform),
        Setting(
            "decoder_bias",
            read=lambda keys, config: keys.flag("decoder_bias", decoder_has_bias(config)),
            value=lambda model: model.decoder.bias is not None,
            write=_under("decoder_bias"),
            default=decoder_has_bias,
            fixed_key="decoder_bias",
        ),
        Setting(
            "tied",
            read=lambda keys, _: keys.flag("tie_word_embeddings", True),
            value=lambda model: model.decoder.weight is None,
            write=_under("tie_word_embeddings"),
        ),
    ),
    "classifier": (
        Setting(
            "pooling",
            read=_one_of("classifier_pooling", get_args(ClassifierPooling), "cls"),
            value=lambda model: model.pooling,
            write=_under("classifier_pooling"),
            default=lambda _: "cls",
            fixed_key="classifier_pooling",
        ),
        Setting("labels", read=_read_labels, value=lambda model: (model.num_labels, model.label_names), write=_write_labels),
        Setting(
            "problem_type",
            read=_one_of("problem_type", get_args(ProblemType), None),
            value=lambda model: model.problem_type,
            write=_under("problem_type"),
        ),
        Setting("dropout", read=_read_dropout, value=lambda model: model.dropout.p, write=_under("classifier_dropout")),
        _transform_setting(classifier_transform),
    ),
    "span_qa": (
        _transform_setting(masked_lm_transform, may_be_absent=True),
        Setting(
            "dropout",
            read=_read_dropout,
            value=lambda model: None if model.transform is None else model.dropout.p,
            write=_under("classifier_dropout"),
            default=lambda _: None,
        ),
    ),
}
TASKS: dict[type[Head], Task] = {MaskedLM: "masked_lm", SequenceClassifier: "classifier", SpanQA: "span_qa"}


def _read_settings(task: Task, keys: ConfigReader, config: EncoderConfig) -> dict[str, Any]:
    """Read the arguments of a head's class."""
    found = {}
    for setting in SETTINGS[task]:
        if setting.has_keys(config):
            found[setting.name] = setting.read(keys, config)
        elif setting.default is not None:
            found[setting.name] = setting.default(config)
            if setting.fixed_key is not None:
                keys.require(setting.fixed_key, found[setting.name])
    return found


def _not_expressible(name: str, value: object, config: EncoderConfig) -> InputError:
    shown = str(value).lower() if isinstance(value, bool) else value
    return InputError(f"{name}: a {config.family} config.json cannot express {shown}")


@dataclass(frozen=True)
class _Opened:
    """A folder after reading."""

    where: str  # the folder, for errors
    encoder: Encoder  # with its weights
    layout: HeadLayout  # layout of the head for the requested task
    keys: ConfigReader  # settings of the head
    tensors: dict[str, Tensor]  # the head's tensors in the file, under our names


def load_head(  # noqa: PLR0913 - settings of three kinds of heads
    kind: type[AnyHead],
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_labels: int | None = None,
    pooling: ClassifierPooling | None = None,
    problem_type: ProblemType | None = None,
    new_head_seed: int | None = None,
) -> AnyHead:
    """Load an encoder with a task head, in evaluation mode.

    The decoder of a `MaskedLM` is tied to the token embedding, unless config.json unties it or the file contains another matrix.

    Args:
        kind: `MaskedLM`, `SequenceClassifier` or `SpanQA`.
        source: A folder with config.json and weights (`quiver.encoder.checkpoints.checkpoint`), or a model id on the Hub.
        revision: Branch, tag or commit on the Hub.
        dtype: Dtype of the weights in memory.
        device: Device of the weights.
        num_labels: For a classifier: C; default: that of config.json. With ``new_head_seed`` it may differ from the file's: then the label
            matrix is initialised anew.
        pooling: For a classifier: vector of a sequence; default: config.json's, or its first token.
        problem_type: For a classifier: how labels are read; default: config.json's.
        new_head_seed: Seed for missing weights of the head, which the log lists; None: missing weights are an error.

    Raises:
        InputError: As `quiver.encoder.checkpoints.checkpoint.load_encoder`; or the head is incomplete, or a setting of it is not supported.
        ValueError: A setting of classifiers is given for another head.
    """
    overrides = {"pooling": pooling, "problem_type": problem_type}
    if kind is not SequenceClassifier and not {num_labels, pooling, problem_type} <= {None}:
        raise ValueError(f"num_labels, pooling and problem_type are settings of a SequenceClassifier, not of a {kind.__name__}")
    task = TASKS[kind]
    opened = _open(source, revision, task)
    with _naming(opened.where):
        settings = _read_settings(task, opened.keys, opened.encoder.config)
        settings |= {name: value for name, value in overrides.items() if value is not None}
        if task == "masked_lm":
            opened.keys.require("sparse_pred_ignore_index", IGNORE_INDEX)
            own, embedding = opened.tensors.get("decoder.weight"), opened.encoder.embeddings.tokens.weight
            if settings["tied"] and own is not None and not torch.equal(own.to(embedding.dtype), embedding):
                settings["tied"] = False
                text = "%s: config.json ties the decoder to the embedding, but the file holds two different matrices; both are kept"
                logger.warning(text, opened.where)
            if settings["tied"]:
                opened.tensors.pop("decoder.weight", None)
    if task == "classifier":
        stored, names = settings.pop("labels")
        wanted = stored if num_labels is None else num_labels
        settings |= {"num_labels": wanted, "label_names": names if wanted == stored else None}
        out = opened.tensors.get("out.weight")
        if num_labels is not None and new_head_seed is not None and out is not None and len(out) != num_labels:
            _drop_out(opened.tensors)
    model = kind(opened.encoder, **settings)
    return _fill(model, opened, new_head_seed).to(device=device, dtype=dtype).eval()


def _open(source: str | Path, revision: str | None, task: Task) -> _Opened:
    folder = local_folder(source, revision=revision)
    hf = read_json(base_folder(folder) / "config.json")
    with _naming(str(folder)):
        settings = ConfigReader(hf)
        inner = settings.inner("head")
        config = config_from_hf({key: value for key, value in hf.items() if key != "head"})
        if config.family not in families_with_head(task):
            raise InputError(f"config.json: {_no_head(config.family, task)}")
    layout = FORMATS[config.family].heads[task]
    family = FORMATS[config.family].tensors
    tensors, rest = _split(read_state(folder, family), family, layout)
    with Uninitialized():
        encoder = Encoder(config)
    encoder.load_state_dict(from_hf_state(encoder, rest, where=str(folder)), assign=True)
    names = hf.get("architectures")
    named = str(names[0]).partition("For")[2] if isinstance(names, list) and names else ""
    if named not in ("", layout.architecture.partition("For")[2]):  # a class of another task; XLM-R's classes count as RoBERTa's
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
        tensor, shape, required = given[name], tuple(given[name].shape), tuple(wanted[name].shape)
        if shape != required:
            raise InputError(f"{where}: {theirs[name]} has shape {shape}, expected {required}")
        if not tensor.is_floating_point():
            raise InputError(f"{where}: {theirs[name]} holds {tensor.dtype}, not floating-point numbers")
    if missing and seed is not None:
        init_head(model, seed=seed)
        logger.warning("%s: initialized at random with seed %d, to be trained: %s", where, seed, ", ".join(missing))
    model.load_state_dict(model.state_dict() | given)
    return model


def save_head(model: Head, folder: str | Path, *, style: ConfigStyle = "v4") -> None:
    """Write an encoder with its task head as transformers writes it; folder and style are those of `save_encoder`.

    An InputError names a setting of the head that the family's config.json cannot express.
    """
    config, task = model.encoder.config, TASKS[type(model)]
    settings: dict[str, Any] = {}
    for setting in SETTINGS[task]:
        value = setting.value(model)
        if setting.has_keys(config):
            settings |= setting.write(value, config)
        elif setting.default is not None and value != setting.default(config):
            raise _not_expressible(setting.name, value, config)
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
    write_checkpoint(Path(folder), state, hf)


def _no_head(family: Family, task: Task) -> str:
    return f"family {family} has no {task} head; families that have one: {', '.join(families_with_head(task))}"
