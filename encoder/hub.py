"""Where a model lies: a folder, or a Hugging Face hub id that is fetched into the hub's cache."""

from __future__ import annotations

from pathlib import Path

from encoder.errors import InputError
from encoder.files import expand_home

# Everything a checkpoint of ours, of sentence-transformers or of PyLate consists of; no pickles, no ONNX, no images.
PATTERNS = ["*.json", "*.safetensors", "*/config.json", "*/model.safetensors", "artifact.metadata"]


def local_folder(source: str | Path, *, revision: str | None = None) -> Path:
    """The folder of a model, fetched from the hub if it is not a folder.

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
    # Imported late: the hub client is slow to import and a local folder does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=PATTERNS))
    except HFValidationError as error:
        raise InputError(f"{source}: no such folder, and not a hub id") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{source}: no such folder, and the hub did not give it: {reason}") from error
