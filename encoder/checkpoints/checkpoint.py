"""Load and save encoders: config.json, weights and LoRA adapters in the layouts of Hugging Face, in a folder or on its Hub.

A new family is a module with its `CheckpointFormat`, and its lines in `FORMATS` and `MODEL_TYPES` here.

Weights are read from safetensors, otherwise from ``pytorch_model.bin``; each whole or in shards. A ``.bin`` file is a pickle: it is read by
``torch.load(weights_only=True)``, which builds tensors and plain containers and refuses everything else, so nothing in the file is
executed. Loading is strict: every tensor of the encoder must be present with its shape, and every tensor of the file must belong to the
encoder or to a head; the latter are named in the log. Saving writes what the family's own code writes and loses nothing: the written
config.json is read again, and if the architectures differ the error names the field.

An adapter in the files of PEFT is added to its matrices when it is read: W + scale * B A, in float32 or wider, so that what is loaded,
hashed, exported or trained further is a plain model. What PEFT computes in another way (DoRA and other variants) is refused.

Shapes: D and O widths of a matrix's input and output, r the rank.
Source: LoRA, arXiv:2106.09685; rank-stabilized LoRA, arXiv:2312.03732; ``LoraConfig``, ``get_pattern_key``,
``check_target_module_exists`` and ``get_peft_model_state_dict`` of PEFT 0.21; ``maybe_load_adapters`` of transformers 5.3.
"""

from __future__ import annotations

import errno
import logging
import math
import pickle
import re
import struct
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quiver.encoder.checkpoints.bert import BERT, GTE, MOSAICBERT, NOMICBERT, ROBERTA, is_mosaicbert
from quiver.encoder.checkpoints.format import CheckpointFormat, ConfigReader, ConfigStyle, Task, TensorNames
from quiver.encoder.checkpoints.modernbert import MODERNBERT
from quiver.encoder.checkpoints.quiver import QUIVER
from quiver.encoder.config import EncoderConfig, Family
from quiver.encoder.errors import InputError, first_line
from quiver.encoder.files import expand_home, read_json, replacing, save_tensors, write_json
from quiver.encoder.model import Encoder, Uninitialized

logger = logging.getLogger(__name__)

FORMATS: dict[Family, CheckpointFormat] = {each.family: each for each in (MODERNBERT, BERT, ROBERTA, MOSAICBERT, NOMICBERT, GTE, QUIVER)}
MODEL_TYPES: dict[str, CheckpointFormat] = {
    "modernbert": MODERNBERT,
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "nomic_bert": NOMICBERT,
    "new": GTE,
    "gte": GTE,
    "quiver": QUIVER,
}
"""``model_type`` of config.json -> format; a MosaicBERT's file says bert."""

DISENTANGLED = "; its disentangled attention is not implemented, and quiver.encoder.load_adapter only encodes with it"


def families_with_head(task: Task) -> list[Family]:
    """Return the families whose checkpoints can hold a head of this task."""
    return [family for family, checkpoint_format in FORMATS.items() if task in checkpoint_format.heads]


def config_from_hf(hf: Mapping[str, Any]) -> EncoderConfig:
    """Convert a parsed config.json to an `EncoderConfig`; an InputError names a key that is not supported."""
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in MODEL_TYPES:
        why = DISENTANGLED * str(family).startswith("deberta")
        raise InputError(f"config.json: model_type must be one of {', '.join(sorted(MODEL_TYPES))}, got {family!r}{why}")
    keys, found = ConfigReader(hf), MODEL_TYPES[family]
    return (MOSAICBERT if found is BERT and is_mosaicbert(keys) else found).to_config(keys)


def config_to_hf(config: EncoderConfig, *, style: ConfigStyle = "v4") -> dict[str, Any]:
    """Convert an `EncoderConfig` to its family's config.json; an InputError names the field that its format cannot express."""
    written = FORMATS[config.family].to_hf(config, style)
    remedy = "use family quiver"
    try:
        again = config_from_hf(written)
    except InputError as error:
        raise InputError(f"a {config.family} config.json cannot hold this architecture ({error}); {remedy}") from error
    wanted, kept = _with_effect(config), _with_effect(again)
    if "cls_token_id" not in written:  # these families leave such ids to the tokenizer
        kept |= {key: wanted[key] for key in ("cls_token_id", "sep_token_id")}
    if lost := [name for name in wanted if name not in kept or wanted[name] != kept[name]]:
        raise InputError(f"a {config.family} config.json cannot hold {', '.join(f'{name} {wanted[name]!r}' for name in lost)}; {remedy}")
    return written


def _with_effect(config: EncoderConfig) -> dict[str, Any]:
    """Return the fields of an architecture that have an effect, given its other fields."""
    values = asdict(config)
    for kind in {"global", "local"} - (set(config.layer_types) if config.positions == "rope" else set()):
        del values[f"{kind}_theta"], values[f"{kind}_scaling"]
    if config.positions != "rope":
        del values["rotary_fraction"]
    if "local" not in config.layer_types:
        del values["window"]
    return values


# Folders and weight files.

# Files of a checkpoint of Quiver, sentence-transformers or PyLate; an asterisk matches slashes too.
PATTERNS = ["*.json", "*.safetensors", "artifact.metadata"]
# Folders with the same model for other runtimes, including copies of its configuration and tokenizer.
OTHER_RUNTIMES = ("onnx", "openvino")
# Keys of the config.json of an encoder and of a Dense module: only these have weights.
_OF_WEIGHTS = ("model_type", "in_features")


def local_folder(source: str | Path, *, revision: str | None = None) -> Path:
    """Return the folder of a model, downloaded from the Hugging Face Hub if it is not a local folder.

    ``OWNER/NAME@REVISION`` names a branch, tag or commit as ``revision`` does.
    """
    path = expand_home(source)
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{source}: is a file; a model is a folder")
    name, at, named = pin_source(source, revision).partition("@")
    if at and not named:
        raise InputError(f"{source}: names no revision after the @")
    folder = _fetched(name, named or None, PATTERNS)
    pickled = _pickled_weights(folder)
    return _fetched(name, named or None, [*PATTERNS, *pickled]) if pickled else folder


def pin_source(source: str | Path, revision: str | None) -> str:
    """Return ``OWNER/NAME@REVISION``, under which a model of the Hub is found again; without a revision, or for a folder, the source."""
    if revision is None or expand_home(source).is_dir():
        return str(source)
    name, _, named = str(source).partition("@")
    if named not in ("", revision):
        raise InputError(f"{source}: names a revision, and {revision} is given too; remove one of them")
    return f"{name}@{revision}"


def downloaded_commit(folder: Path) -> str | None:
    """Return the commit of a folder of the Hub's cache; None for another folder."""
    return folder.name if folder.parent.name == "snapshots" and is_commit(folder.name) else None


def is_commit(revision: str | None) -> bool:
    """Return whether a revision is a commit, which always names the same files, and not a branch or tag."""
    return re.fullmatch("[0-9a-f]{40}", revision or "") is not None


def _fetched(source: str | Path, revision: str | None, patterns: list[str]) -> Path:
    # Imported late: the Hub client is slow to import, and a local folder does not need it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    shown, ignored = pin_source(source, revision), [f"{name}/*" for name in OTHER_RUNTIMES]
    offline = constants.HF_HUB_OFFLINE  # the client asks the Hub for the files of a commit all the same, unless it is told not to
    try:
        snapshot = snapshot_download(
            str(source), revision=revision, allow_patterns=patterns, ignore_patterns=ignored, local_files_only=offline
        )
        return Path(snapshot)
    except HFValidationError as error:
        raise InputError(f"{source}: neither an existing folder nor a hub id such as OWNER/NAME") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if any(part in str(error) for part in ("HF_HUB_OFFLINE", "outgoing traffic")):  # the client's own messages are three sentences
            raise InputError(
                f"{shown}: no such folder, and the Hugging Face Hub cannot be asked because HF_HUB_OFFLINE is set; pass the folder of a"
                " model, or unset HF_HUB_OFFLINE"
            ) from error
        raise InputError(
            f"{shown}: no such folder, and downloading it from the Hugging Face Hub failed: {first_line(error)}; without a network, pass"
            " the folder of a model"
        ) from error


def _pickled_weights(snapshot: Path) -> list[str]:
    """Return patterns of the ``.bin`` files of a snapshot's folders without safetensors."""
    inside = sorted(path for path in snapshot.iterdir() if path.is_dir() and path.name not in OTHER_RUNTIMES)
    configs = (folder / "config.json" for folder in (snapshot, *inside) if not has_safetensors(folder))
    lacking = [path.parent for path in configs if path.is_file() and not read_json(path).keys().isdisjoint(_OF_WEIGHTS)]
    # An index may be left over from earlier shards, and whether there is a whole file is not known before it is asked for.
    files = {path for folder in lacking for path in (folder / PICKLED, *files_of(folder, PICKLED))}
    adapted = (folder for folder in (snapshot, *inside) if (folder / ADAPTER_CONFIG).is_file())
    files |= {folder / ADAPTER_PICKLED for folder in adapted if not (folder / ADAPTER_WEIGHTS).is_file()}
    return [escape(path.relative_to(snapshot).as_posix()) for path in sorted(files)]


SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
"""File names of a LoRA adapter, as PEFT writes them."""

# Files of torch.save since PyTorch 1.6 are ZIP archives, and only those can be memory-mapped.
_ZIP = b"PK\x03\x04"
# Errors of torch's restricted unpickler for a file that is not a checkpoint: its own error for what it refuses, and any of the others for
# damaged bytes.
_MALFORMED = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    struct.error,
)


def has_safetensors(folder: Path) -> bool:
    """Return whether there is a safetensors file or an index of such files; ``.bin`` files are ignored then."""
    return (folder / SAFETENSORS).is_file() or _find_weight_index(folder, SAFETENSORS).is_file()


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, which need not exist.

    As in transformers, a whole file is read before shards, because saving in one file may leave the index of earlier shards behind; and
    safetensors are read before ``.bin`` files.
    """
    return files_of(folder, SAFETENSORS if has_safetensors(folder) else PICKLED)


def files_of(folder: Path, name: str) -> list[Path]:
    """Return the file of that name if it exists, otherwise the shards that its index lists."""
    index = _find_weight_index(folder, name)
    if (folder / name).is_file() or not index.is_file():
        return [folder / name]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(f"{index}: weight_map must be an object from tensor name to file name")
    return [folder / shard for shard in sorted(set(weight_map.values()))]


def adapter_file(folder: Path) -> Path:
    """Return the file of a LoRA adapter's weights, which need not exist: safetensors are read before a ``.bin`` file."""
    pickled = folder / ADAPTER_PICKLED
    return pickled if pickled.is_file() and not (folder / ADAPTER_WEIGHTS).is_file() else folder / ADAPTER_WEIGHTS


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder's weight files, to the CPU, without its adapter (`read_state`).

    Tensors of ``.bin`` files may share memory with each other, and are views of the file until they are copied.
    """
    state: dict[str, Tensor] = {}
    for path in weight_files(folder):
        if not path.is_file():
            missing = f"{SAFETENSORS} is missing, and so is {PICKLED}" if path == folder / PICKLED else f"{path.name} is missing"
            raise InputError(f"{folder}: {missing}")
        state |= read_tensors(path)
    return state


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors or ``.bin`` file, to the CPU."""
    try:
        with path.open("rb"):  # safetensors calls every failure to open a file "No such file or directory"
            return load_file(path) if path.suffix == ".safetensors" else _read_pickled(path)
    except SafetensorError as error:
        raise InputError(f"{path}: corrupt checkpoint: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def _find_weight_index(folder: Path, name: str) -> Path:
    return folder / f"{name}.index.json"


def _read_pickled(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        mapped = file.read(len(_ZIP)) == _ZIP
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # for damaged files: about pickle protocols that do not exist
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a truncated file: torch looks for its end before its start
            raise
        raise InputError(f"{path}: corrupt checkpoint: truncated") from error
    except _MALFORMED as error:
        # PyTorch's own message recommends to execute the file.
        text = str(error)
        if refused := re.search(r"GLOBAL (\S+)", text):
            remedy = f"this pickle asks for {refused[1]}; use the model as safetensors"
            raise InputError(f"{path}: refused, and nothing in it was executed: {remedy}") from error
        if isinstance(error, pickle.UnpicklingError):
            inner = re.search(r"WeightsUnpickler error: (.+)", text)
            text = inner[1] if inner else "not a file of torch.save"
        reason = next(iter(text.strip().splitlines()), type(error).__name__)
        raise InputError(f"{path}: corrupt checkpoint: {reason}") from error
    tensors = content.values() if isinstance(content, dict) else [None]
    plain = all(isinstance(each, Tensor) and each.layout == torch.strided and each.device.type == "cpu" for each in tensors)
    if not plain or not all(isinstance(key, str) for key in content):
        raise InputError(f"{path}: must hold a dictionary of tensors by name, as torch.save(model.state_dict(), ...) writes it")
    return {key: tensor.detach() for key, tensor in content.items()}


def base_folder(folder: Path) -> Path:
    """Return the folder of config.json and the weights: for an adapter without weights beside it, the folder of its base."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file() or any(file.is_file() for file in weight_files(folder)):
        return folder
    settings = read_json(path)
    if (named := named_base(folder, settings)) is not None:
        base = named
    else:
        name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
        if not isinstance(name, str) or not name:
            raise InputError(f"{path}: base_model_name_or_path must name the model that the adapter belongs to, got {name!r}")
        try:
            base = local_folder(name, revision=revision if isinstance(revision, str) else None)
        except InputError as error:
            raise InputError(f"{path}: the base of this LoRA adapter cannot be loaded: {error}") from error
    if base.resolve() == folder.resolve() or (base / ADAPTER_CONFIG).is_file():
        raise InputError(f"{path}: base_model_name_or_path must be a model without an adapter of its own, got {base}")
    if not (base / "config.json").is_file():
        raise InputError(f"{path}: the base of this LoRA adapter, {base}, has no config.json")
    return base


def named_base(folder: Path, settings: Mapping[str, Any]) -> Path | None:
    """Local folder that an adapter names as its base: from the working directory, as in PEFT, or from the adapter's folder."""
    name = settings.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return None
    return next((path for path in (Path(name).expanduser(), folder / name) if (path / "config.json").is_file()), None)


# Encoders.


@dataclass(frozen=True)
class TheirTensor:
    """Tensors of a family's file that correspond to one of ours."""

    keys: tuple[str, ...]  # the family's keys without prefix; several are stacked in that order
    swapped: bool  # whether the two halves of its rows are swapped there


def their_keys(encoder: Encoder) -> dict[str, TheirTensor]:
    """Map our tensor names to the family's, without prefix."""
    config = encoder.config
    family = FORMATS[config.family].tensors
    keys = {}
    for ours in encoder.state_dict():
        module, _, parameter = ours.rpartition(".")
        layer = re.search(r"\d+", module)
        name = re.sub(r"\d+", "{}", module)
        theirs = family.theirs(name, layer[0] if layer else "", gated=config.mlp == "gated")
        if theirs is None:
            raise InputError(f"a {config.family} checkpoint cannot store {ours}; choose family quiver")
        keys[ours] = TheirTensor(tuple(f"{key}.{parameter}" for key in theirs), name in family.swapped)
    return keys


def load_encoder(source: str | Path, *, revision: str | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Encoder:
    """Load an encoder, in evaluation mode, with weights of a dtype on a device. A LoRA adapter in the folder is added to the weights.

    ``source`` is a folder with config.json and weights, or with a LoRA adapter that names its base, or a model id on the Hugging Face Hub,
    where ``revision`` is a branch, tag or commit.

    Raises:
        InputError: A file is missing or corrupt, the architecture is not supported, or the tensors do not match it.
    """
    folder = local_folder(source, revision=revision)
    base = base_folder(folder)
    try:
        config = config_from_hf(read_json(base / "config.json"))
    except InputError as error:
        if str(error).startswith(str(base)):
            raise
        raise InputError(f"{base}: {error}") from error
    with Uninitialized():
        encoder = Encoder(config)
    # Assigned: the stacked tensors are copies already, and copying them once more takes a third of a second for 90 MB.
    state = read_state(folder, FORMATS[config.family].tensors)
    encoder.load_state_dict(from_hf_state(encoder, state, where=str(folder)), strict=True, assign=True)
    return encoder.to(device=device, dtype=dtype).eval()


def read_state(folder: Path, family: TensorNames) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint to the CPU, with its LoRA adapter added if it has one."""
    base = base_folder(folder)
    state = read_weights(base)
    return add_adapter(folder, base, state, family) if (folder / ADAPTER_CONFIG).is_file() else state


def from_hf_state(encoder: Encoder, state: Mapping[str, Tensor], *, where: str) -> dict[str, Tensor]:
    """Rename and stack the tensors of a Hugging Face state dict."""
    family = FORMATS[encoder.config.family].tensors
    stripped = {family.current_name(key): tensor for key, tensor in state.items()}
    if len(stripped) < len(state):
        raise InputError(f"{where}: two tensors have the same name after their prefixes are removed")
    wanted = their_keys(encoder)
    known = {key for theirs in wanted.values() for key in theirs.keys}
    heads = sorted(key for key in stripped if family.heads.match(key))
    unknown = sorted(key for key in stripped.keys() - known - set(heads) if not family.buffers.search(key))
    missing = sorted(known - stripped.keys())
    if unknown or missing:
        complaint = "; ".join(
            f"{label} {', '.join(keys[:3])}" + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            for label, keys in (("missing", missing), ("unknown", unknown))
            if keys
        )
        raise InputError(f"{where}: the tensors do not fit config.json ({encoder.config.family}): {complaint}")
    if heads:
        logger.info("%s: ignored %d tensors of heads: %s", where, len(heads), ", ".join(heads))
    shapes = {name: tensor.shape for name, tensor in encoder.state_dict().items()}
    return {name: _ours(theirs, stripped, shapes[name], where) for name, theirs in wanted.items()}


def _ours(theirs: TheirTensor, state: Mapping[str, Tensor], shape: torch.Size, where: str) -> Tensor:
    """Stack one of our tensors from theirs."""
    parts = [state[key] for key in theirs.keys]
    required = (shape[0] // len(parts), *shape[1:])
    for key, part in zip(theirs.keys, parts, strict=True):
        if tuple(part.shape) != required:
            raise InputError(f"{where}: {key} has shape {tuple(part.shape)}, config.json requires {required}")
        if not part.is_floating_point():
            raise InputError(f"{where}: {key} holds {part.dtype}, not floating-point numbers; quantized checkpoints are not supported")
    stacked = torch.cat(parts)
    return _halves_swapped(stacked) if theirs.swapped else stacked


def _halves_swapped(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


def to_hf_state(encoder: Encoder, *, prefix: bool = False) -> dict[str, Tensor]:
    """Return an encoder's tensors under the family's names."""
    if encoder.prepacked == "int8":
        raise InputError("an encoder quantized to int8 cannot be saved; save it before optimize_for_inference")
    start = FORMATS[encoder.config.family].tensors.prefix if prefix else ""
    wanted = their_keys(encoder)
    state = {}
    for name, tensor in encoder.state_dict().items():
        theirs = wanted[name]
        whole = tensor.detach().cpu()
        parts = (_halves_swapped(whole) if theirs.swapped else whole).chunk(len(theirs.keys))
        for key, part in zip(theirs.keys, parts, strict=True):
            state[start + key] = part.clone(memory_format=torch.contiguous_format)
    return state


def save_encoder(encoder: Encoder, folder: str | Path, *, style: ConfigStyle = "v4", prefix: bool = False) -> None:
    """Write config.json and model.safetensors as the family's own code writes them, each as a whole, into a folder that may be new.

    ``style`` is the generation of ModernBERT's config keys; transformers 4 and 5 both read v4. ``prefix`` puts the family's prefix before
    every key. An InputError names the field that the family's format cannot express, and nothing is written.
    """
    config, state = config_to_hf(encoder.config, style=style), to_hf_state(encoder, prefix=prefix)
    write_checkpoint(Path(folder), state, config | {"torch_dtype": str(encoder.embeddings.tokens.weight.dtype).removeprefix("torch.")})


def write_checkpoint(folder: Path, state: Mapping[str, Tensor], hf: Mapping[str, Any]) -> None:
    """Write tensors and config.json, each file whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as temporary:
        save_tensors(state, temporary)
    # Shards and the adapter of an earlier checkpoint are no part of this one.
    for name in ("model.safetensors.index.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLED):
        (folder / name).unlink(missing_ok=True)
    for shard in folder.glob("model-*-of-*.safetensors"):
        shard.unlink()
    write_json(folder / "config.json", hf)


# LoRA adapters.

# Settings that do not change the result, or that `_Adapter` reads. Every other setting, known or not, must be switched off.
_READ = frozenset(
    {
        *("base_model_name_or_path", "revision", "peft_type", "peft_version", "task_type", "auto_mapping", "inference_mode"),
        "runtime_config",
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "lora_bias", "bias", "init_lora_weights"),
        *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
        "fan_in_fan_out",  # PEFT transposes only the layers of GPT-2; those of these families are nn.Linear
        *("megatron_core", "qalora_group_size", "loftq_config", "eva_config"),  # of no effect without another setting
    }
)
# Ways to start A and B that leave the base as it is; others (PiSSA, OLoRA, CorDA, LoftQ) also change the base, and PEFT repeats that.
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
_REMEDY = "merge it into its base with PEFT (merge_and_unload)"
_PREFIX = "base_model.model."
# What an adapter stores of one matrix, behind the name of the module.
_PARTS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "embedding_a",
    ".lora_embedding_B": "embedding_b",
}


def add_adapter(folder: Path, base: Path, state: dict[str, Tensor], family: TensorNames) -> dict[str, Tensor]:
    """Add the LoRA adapter of a folder to the tensors of its base, which may lie in the same folder."""
    adapter = _Adapter.read(folder)
    if base == folder:
        _check_base(folder, adapter.settings, state, family)
    merged = _merge_adapter(state, adapter, family)
    logger.info("%s: added the LoRA adapter of %d matrices to the weights of %s", folder / ADAPTER_CONFIG, len(adapter.updates), base)
    return merged


def _check_base(folder: Path, settings: Mapping[str, Any], state: Mapping[str, Tensor], family: TensorNames) -> None:
    """Refuse weights beside an adapter that are not those of its base, such as weights to which it has been added already."""
    base = named_base(folder, settings)
    if base is None or base.resolve() == folder.resolve() or not any(file.is_file() for file in weight_files(base)):
        return
    ours, theirs = ({family.current_name(key): tensor for key, tensor in each.items()} for each in (state, read_weights(base)))
    for key in sorted(ours.keys() & theirs.keys()):
        one, other = ours[key], theirs[key]
        # The same, or one is the other in lower precision.
        if not (torch.equal(one, other.to(one.dtype)) or torch.equal(one.to(other.dtype), other)):
            raise InputError(
                f"{folder}: the weights beside the LoRA adapter are not those of its base {base} ({key} differs), so it may have been "
                f"added to them already; delete {ADAPTER_CONFIG} to use them as they are, or the weights to use the base"
            )


@dataclass(frozen=True)
class _Adapter:
    """An adapter's files."""

    path: Path
    settings: Mapping[str, Any]
    updates: Mapping[str, Mapping[str, Tensor]]  # name of a module in the base to the tensors of its update, by the values of `_PARTS`
    replaced: Mapping[str, Tensor]  # name of a tensor of the base to the tensor in its place (trained biases, modules_to_save)

    @classmethod
    def read(cls, folder: Path) -> _Adapter:
        path = folder / ADAPTER_CONFIG
        settings = read_json(path)
        if settings.get("peft_type") != "LORA":
            raise InputError(f"{path}: peft_type must be LORA, got {settings.get('peft_type')!r}; {_REMEDY}")
        for key, value in settings.items():
            if key not in _READ and value not in (None, False, "", [], {}):
                raise InputError(f"{path}: {key} is not supported, got {value!r}; {_REMEDY}")
        if settings.get("init_lora_weights") not in _STARTS:
            start = settings["init_lora_weights"]
            raise InputError(f"{path}: init_lora_weights {start!r} is not supported, because it changes the base too; {_REMEDY}")
        file = adapter_file(folder)
        if not file.is_file():
            raise InputError(f"{folder}: {file.name} is missing, the weights of the adapter that {ADAPTER_CONFIG} describes")
        updates: dict[str, dict[str, Tensor]] = defaultdict(dict)
        replaced: dict[str, Tensor] = {}
        for key, tensor in read_tensors(file).items():
            name = key.removeprefix(_PREFIX)
            if part := next((part for part in _PARTS if name.endswith(part)), None):
                updates[name.removesuffix(part)][_PARTS[part]] = tensor
            elif ".lora_" in name:
                raise InputError(f"{file}: the tensor {key} is not supported; {_REMEDY}")
            else:
                replaced[name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = tensor
        if not updates and not replaced:
            raise InputError(f"{file}: it has no tensors")
        return cls(path, settings, updates, replaced)

    def scale(self, module: str, rank: int) -> float:
        """Scale of B A: alpha / r, or alpha / sqrt(r)."""
        wanted = self._by_pattern("rank_pattern", module, "r")
        if rank != wanted:
            raise InputError(f"{self.path}: the rank of {module} must be {rank}, as in the adapter's weights, got {wanted}")
        alpha = self._by_pattern("alpha_pattern", module, "lora_alpha")
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def check_target(self, module: str) -> None:
        """Refuse an update that PEFT would not read, because target_modules does not name its module."""

        def names(modules: Any) -> bool:  # a list by the end of a name, a text as a regular expression
            if not isinstance(modules, (str, list)):
                raise InputError(f"{self.path}: target_modules and exclude_modules must be a list or a regular expression, got {modules!r}")
            matches = [modules] if isinstance(modules, str) else [rf"(?:.*\.)?{re.escape(str(each))}" for each in modules]
            return any(self._match(each, module) for each in matches)

        targets, excluded = self.settings.get("target_modules"), self.settings.get("exclude_modules")
        if not (targets in (None, "all-linear") or names(targets)) or (excluded and names(excluded)):
            raise InputError(f"{self.path}: the adapter's weights have an update of {module}, which target_modules does not name")

    def _by_pattern(self, patterns: str, module: str, default: str) -> float:
        """Value of the first pattern that the end of a module's name matches, otherwise of the setting for all modules."""
        values = self.settings.get(patterns) or {}
        if not isinstance(values, Mapping):
            raise InputError(f"{self.path}: {patterns} must be an object from pattern to number, got {values!r}")
        found = next((value for pattern, value in values.items() if self._match(rf"(.*\.)?({pattern})", module)), None)
        value = self.settings.get(default, 8) if found is None else found  # PEFT's defaults of r and lora_alpha are 8
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InputError(f"{self.path}: {default if found is None else patterns} must be a number > 0, got {value!r}")
        return value

    def _match(self, pattern: str, module: str) -> bool:
        try:
            return re.fullmatch(pattern, module) is not None
        except re.error as error:
            raise InputError(f"{self.path}: {pattern!r} is not a regular expression ({error})") from error


def _merge_adapter(state: dict[str, Tensor], adapter: _Adapter, family: TensorNames) -> dict[str, Tensor]:
    """Add an adapter to the tensors of its base."""
    keys = {family.current_name(key): key for key in state}

    def found(name: str) -> str | None:
        """The file's key of a tensor; None for one of a head that the file lacks."""
        current = family.current_name(name)
        if current not in keys and not family.heads.match(current) and not family.buffers.search(current):
            raise InputError(f"{adapter.path}: the adapter changes {name}, which its base does not have")
        return keys.get(current)

    result = dict(state)
    for name, tensor in adapter.replaced.items():
        if (key := found(name)) is not None:
            _check_shape(adapter, name, tensor, state[key])
            result[key] = tensor
    for module, parts in adapter.updates.items():
        adapter.check_target(module)
        key = found(f"{module}.weight")
        if key is None:
            continue
        update, scale = _multiply_parts(adapter, module, parts)
        _check_shape(adapter, f"{module}.weight", update, result[key])
        result[key] = torch.add(_widen(result[key]), _widen(update), alpha=scale)
        if (bias := parts.get("bias")) is not None:
            bias_key = found(f"{module}.bias")
            if bias_key is None:
                raise InputError(f"{adapter.path}: the adapter changes {module}.bias, which its base does not have")
            result[bias_key] = torch.add(_widen(result[bias_key]), _widen(bias), alpha=scale)
    return result


def _multiply_parts(adapter: _Adapter, module: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    """B A of a matrix, (O, D), or of an embedding, (vocabulary, D); and its scale."""
    first, second = ("embedding_a", "embedding_b") if "embedding_a" in parts else ("a", "b")
    if parts.keys() - {"bias"} != {first, second}:
        got = ", ".join(sorted(name.strip(".") for name, part in _PARTS.items() if part in parts))
        raise InputError(f"{adapter.path}: the adapter's weights must have A and B of {module}, got {got}")
    a, b = _widen(parts[first]), _widen(parts[second])
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise InputError(f"{adapter.path}: A and B of {module} must be (r, D) and (O, r), got {tuple(a.shape)} and {tuple(b.shape)}")
    product = b @ a
    return (product.T if first == "embedding_a" else product), adapter.scale(module, len(a))


def _check_shape(adapter: _Adapter, name: str, given: Tensor, wanted: Tensor) -> None:
    if given.shape != wanted.shape:
        raise InputError(f"{adapter.path}: the adapter has {tuple(given.shape)} for {name}, its base {tuple(wanted.shape)}")


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
