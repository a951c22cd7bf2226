"""Where a model lies: a folder, or a Hugging Face hub id that is fetched into the hub's cache."""

from __future__ import annotations

from glob import escape
from pathlib import Path

from quiver.encoder.checkpoints.weight_files import PICKLED, files_of, has_safetensors
from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home, read_json

# Everything that a checkpoint of ours, of sentence-transformers or of PyLate consists of; an asterisk stands for slashes too.
PATTERNS = ["*.json", "*.safetensors", "artifact.metadata"]
# The same model for other runtimes, with copies of its configuration and its tokenizer.
OTHER_RUNTIMES = ("onnx", "openvino")
# Keys of the config.json of an encoder and of a Dense module: only these have weights.
_OF_WEIGHTS = ("model_type", "in_features")


def local_folder(source: str | Path, *, revision: str | None = None) -> Path:
    """The folder of a model, fetched from the hub if it is not a folder.

    Weights are fetched as safetensors; ``pytorch_model.bin`` files only for a folder that has no safetensors there.

    Args:
        source: A folder, or a hub id such as ``answerdotai/ModernBERT-base``.
        revision: Branch, tag or commit on the hub.

    Raises:
        InputError: It is neither a folder nor a model that the hub (or its cache, offline) has.
    """
    path = expand_home(source)
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{source}: a model is a folder, this is a file")
    folder = _fetched(source, revision, PATTERNS)
    pickled = _pickled_weights(folder)
    return _fetched(source, revision, [*PATTERNS, *pickled]) if pickled else folder


def _fetched(source: str | Path, revision: str | None, patterns: list[str]) -> Path:
    # Imported late: the hub client is slow to import and a local folder does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    ignored = [f"{name}/*" for name in OTHER_RUNTIMES]
    try:
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=patterns, ignore_patterns=ignored))
    except HFValidationError as error:
        raise InputError(f"{source}: no such folder, and not a hub id") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{source}: no such folder, and the hub did not give it: {reason}") from error


def _pickled_weights(snapshot: Path) -> list[str]:
    """Patterns of the ``.bin`` files of a snapshot's folders that lack safetensors."""
    inside = sorted(path for path in snapshot.iterdir() if path.is_dir() and path.name not in OTHER_RUNTIMES)
    files = [path for folder in (snapshot, *inside) if _lacks_safetensors(folder) for path in files_of(folder, PICKLED)]
    return [escape(path.relative_to(snapshot).as_posix()) for path in files]


def _lacks_safetensors(folder: Path) -> bool:
    config = folder / "config.json"
    return not has_safetensors(folder) and config.is_file() and not read_json(config).keys().isdisjoint(_OF_WEIGHTS)
