"""The folder of an export: what may be replaced there, and how.

A new folder is whole or not there, and so is one that takes the place of an earlier export. A clone of a repository, of the Hugging Face
Hub's for instance, is written into file by file once all are made: its history and whatever else lies in it stay.
"""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quiver.encoder import InputError
from quiver.encoder.files import sync_folder

logger = logging.getLogger(__name__)

FILES = frozenset(
    {
        "README.md",
        "artifact.metadata",
        "config.json",
        "config_sentence_transformers.json",
        "model.onnx",
        "model.onnx.data",
        "model.safetensors",
        "modules.json",
        "onnx_config.json",
        "sentence_bert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
)
"""What an export writes."""

MODULE = re.compile(r"\d+_(Dense|MultiVectorMask|Normalize|Pooling)")
MODULE_FILES = frozenset({"config.json", "model.safetensors"})

GIT = ".git"
_KEPT = frozenset({GIT, ".gitattributes", ".gitignore"})


def check_target(out: Path, source: Path, *, overwrite: bool) -> None:
    """Say before a model is loaded that it cannot be written there.

    Args:
        out: Folder to write.
        source: Folder of the model.
        overwrite: Replace an export that is there.

    Raises:
        InputError: ``out`` is a file, or holds the model itself, an export that is not to be replaced, or something else.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file; --out names a folder")
    if source.resolve().is_relative_to(out.resolve()):
        raise InputError(f"{out}: the model to be exported lies there; choose another --out")
    found = {} if not out.exists() else dict(_contents(out))
    clone = (out / GIT).exists()
    foreign = [path for path, ours in found.items() if not ours]
    if not any(found.values()) and (clone or not foreign):
        return
    if not overwrite:
        raise InputError(f"{out}: not empty; choose another --out, or --overwrite")
    if not clone and not any(Path(name) in found for name in ("modules.json", "config.json")):
        raise InputError(f"{out}: holds something other than a model, which is not replaced; choose another --out")
    if not clone and foreign:
        raise InputError(f"{out}: holds {foreign[0]}, which no export writes, and is not replaced; choose another --out")


@contextmanager
def replacing_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place when the block ends without an error, and vanishes otherwise."""
    target = out.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = target.with_name(f".{target.name}.{uuid.uuid4().hex}.unfinished")
    stage.mkdir()
    try:
        yield stage
        if (target / GIT).exists():
            _write_into(target, stage)
        else:
            _put(stage, target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)  # a leftover must not hide what went wrong
    sync_folder(target.parent)


def _put(stage: Path, target: Path) -> None:
    old = stage.with_suffix(".replaced")
    if target.exists():
        target.rename(old)
    try:
        stage.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_into(clone: Path, stage: Path) -> None:
    before = dict(_contents(clone))
    made = {path.relative_to(stage) for path in stage.rglob("*")}
    for path in sorted(made):  # a folder before what is in it
        if (stage / path).is_dir():
            (clone / path).mkdir(exist_ok=True)
        else:
            (stage / path).replace(clone / path)
    for path in sorted((path for path, ours in before.items() if ours and path not in made), reverse=True):
        if not (clone / path).is_dir():
            (clone / path).unlink()
        elif not any((clone / path).iterdir()):
            (clone / path).rmdir()
    sync_folder(clone)
    if left := [str(path) for path, ours in before.items() if not ours]:
        logger.warning("%s: left there, since no export writes it: %s", clone, ", ".join(left))


def _contents(folder: Path) -> Iterator[tuple[Path, bool]]:
    """What lies in a folder, sorted, and in a clone but for git's; relative to it, with whether an export writes that."""
    kept = _KEPT if (folder / GIT).exists() else frozenset[str]()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] not in kept:
            yield name, _is_ours(name, folder=path.is_dir() and not path.is_symlink())


def _is_ours(name: Path, *, folder: bool) -> bool:
    if len(name.parts) == 1:
        return bool(MODULE.fullmatch(name.name)) if folder else name.name in FILES
    return not folder and len(name.parts) == 2 and bool(MODULE.fullmatch(name.parts[0])) and name.name in MODULE_FILES
