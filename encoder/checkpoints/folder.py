"""Model folders, local or from the Hugging Face Hub, the bases of LoRA adapters, and weight files.

Weights are read from safetensors, otherwise from ``pytorch_model.bin``; each whole or in shards. A ``.bin`` file is a pickle: it is read by
``torch.load(weights_only=True)``, which builds tensors and plain containers and refuses everything else, so nothing in the file is
executed.
"""

from __future__ import annotations

import errno
import pickle
import re
import struct
import warnings
from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quiver.encoder.errors import InputError, first_line
from quiver.encoder.files import expand_home, read_json

# Files of a checkpoint of Quiver, sentence-transformers or PyLate; an asterisk matches slashes too.
PATTERNS = ["*.json", "*.safetensors", "artifact.metadata"]
# Folders with the same model for other runtimes, including copies of its configuration and tokenizer.
OTHER_RUNTIMES = ("onnx", "openvino")
# Keys of the config.json of an encoder and of a Dense module: only these have weights.
_OF_WEIGHTS = ("model_type", "in_features")


def local_folder(source: str | Path, *, revision: str | None = None) -> Path:
    """Return the folder of a model, downloaded from the Hugging Face Hub if it is not a local folder."""
    path = expand_home(source)
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{source}: is a file; a model is a folder")
    folder = _fetched(source, revision, PATTERNS)
    pickled = _pickled_weights(folder)
    return _fetched(source, revision, [*PATTERNS, *pickled]) if pickled else folder


def _fetched(source: str | Path, revision: str | None, patterns: list[str]) -> Path:
    # Imported late: the Hub client is slow to import, and a local folder does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    ignored = [f"{name}/*" for name in OTHER_RUNTIMES]
    try:
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=patterns, ignore_patterns=ignored))
    except HFValidationError as error:
        raise InputError(f"{source}: neither an existing folder nor a hub id such as OWNER/NAME") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if "HF_HUB_OFFLINE" in str(error):  # three sentences of the client, which end with advice to set it to 0
            raise InputError(
                f"{source}: no such folder, and the Hugging Face Hub cannot be asked because HF_HUB_OFFLINE is set; pass the folder of a"
                " model, or unset HF_HUB_OFFLINE"
            ) from error
        raise InputError(
            f"{source}: no such folder, and downloading it from the Hugging Face Hub failed: {first_line(error)}; without a network, pass"
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
    return (folder / SAFETENSORS).is_file() or _index(folder, SAFETENSORS).is_file()


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, which need not exist.

    As in transformers, a whole file is read before shards, because saving in one file may leave the index of earlier shards behind; and
    safetensors are read before ``.bin`` files.
    """
    return files_of(folder, SAFETENSORS if has_safetensors(folder) else PICKLED)


def files_of(folder: Path, name: str) -> list[Path]:
    """Return the file of that name if it exists, otherwise the shards that its index lists."""
    index = _index(folder, name)
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
    """Read all tensors of a folder's weight files, to the CPU, without its adapter (`quiver.encoder.checkpoints.checkpoint.read_state`).

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


def _index(folder: Path, name: str) -> Path:
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
    if not isinstance(content, dict) or not all(map(_is_named_tensor, content.items())):
        raise InputError(f"{path}: must hold a dictionary of tensors by name, as torch.save(model.state_dict(), ...) writes it")
    return {key: tensor.detach() for key, tensor in content.items()}


def _is_named_tensor(item: tuple[object, object]) -> bool:
    key, value = item
    return isinstance(key, str) and isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


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
