"""Export a model in another library's layout, with a model card, or with more positions.

If a layout cannot express a model without changing its vectors, exporting fails; if only one of several libraries would read it
differently, a warning is logged and the card omits that library.
"""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quiver.encoder import Encoder, InputError, Tokenizer
from quiver.encoder.checkpoints.checkpoint import base_folder, local_folder
from quiver.encoder.files import read_json, sync_folder, write_json, write_text
from quiver.encoder.pretraining.position_extension import extend_checkpoint
from quiver.encoder.tokenizer import SPECIAL_TOKENS
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.card import CardMetadata, check_languages, left_out, render_card
from quiver.retrieval.models.export.onnx import require_libraries, write_onnx
from quiver.retrieval.models.export.sentence_transformers import (
    ignores_outer_space,
    read_tokenizer,
    transformer_settings,
    write_colbert,
    write_dense,
    write_encoder,
    write_multi_vector,
)
from quiver.retrieval.models.export.stanford import write_stanford
from quiver.retrieval.models.loading import build_model, with_dtype
from quiver.retrieval.models.options import Kind, ModelFolder, is_stanford
from quiver.retrieval.models.pretrained import load_parts, read_model_folder, warn_if_bare
from quiver.retrieval.records import Dtype

logger = logging.getLogger(__name__)

FILES = frozenset({
    "README.md", "artifact.metadata", "config.json", "config_sentence_transformers.json", "model.onnx", "model.onnx.data",
    "model.safetensors", "modules.json", "onnx_config.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json",
})  # fmt: skip
"""Files that exports write."""

MODULE = re.compile(r"\d+_(Dense|MultiVectorMask|Normalize|Pooling)")
MODULE_FILES = frozenset({"config.json", "model.safetensors"})

GIT = ".git"
_GIT_FILES = frozenset({GIT, ".gitattributes", ".gitignore"})


def check_target(out: Path, source: Path, *, overwrite: bool, any_files: bool = False) -> None:
    """Check, before a model is loaded, that it can be written to a folder.

    Args:
        out: Target folder.
        source: Folder of the model.
        overwrite: Replace an existing model.
        any_files: Replace a model folder whatever other files it holds.

    Raises:
        InputError: ``out`` is a file, lies in the model's folder or holds it, is not empty and ``overwrite`` is False, or holds other files
            than those of an export.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; --out must name a folder")
    if source.resolve().is_relative_to(out.resolve()) or (any_files and out.resolve().is_relative_to(source.resolve())):
        raise InputError(f"{out}: contains the model to export, or lies in its folder; choose another --out")
    found = dict(_list_contents(out)) if out.exists() else {}
    clone = not any_files and (out / GIT).exists()
    foreign = [] if any_files else [path for path, ours in found.items() if not ours]
    if not found or (clone and not any(found.values())):
        return
    if not overwrite:
        raise InputError(f"{out}: not empty; choose another --out, or add --overwrite")
    if not clone and not any(Path(name) in found for name in ("modules.json", "config.json")):
        raise InputError(f"{out}: not overwritten, since it does not hold a model; choose another --out")
    if not clone and foreign:
        raise InputError(f"{out}: not overwritten, since it holds {foreign[0]}, which exports do not write; choose another --out")


@contextmanager
def replacing_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``out`` at the end of the block, and is deleted if an error occurs.

    In a git clone, its files are moved one by one, and files that exports write but this one did not are deleted.
    """
    target = out.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = target.with_name(f".{target.name}.{uuid.uuid4().hex}.unfinished")
    stage.mkdir()
    try:
        yield stage
        if (target / GIT).exists():
            _move_into_clone(stage, target)
        else:
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
    finally:
        shutil.rmtree(stage, ignore_errors=True)  # an error here must not hide the original one
    sync_folder(target.parent)


def _move_into_clone(stage: Path, clone: Path) -> None:
    before, made = dict(_list_contents(clone)), sorted(path.relative_to(stage) for path in stage.rglob("*"))
    for path in made:  # folders before their content
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
        logger.warning("%s: kept files that exports do not write: %s", clone, ", ".join(left))


def _list_contents(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Relative paths in a folder, sorted, without git's files, each with whether exports write it."""
    kept = _GIT_FILES if (folder / GIT).exists() else frozenset[str]()
    for path in sorted(folder.rglob("*")):
        name, is_folder = path.relative_to(folder), path.is_dir() and not path.is_symlink()
        if name.parts[0] in kept:
            continue
        if len(name.parts) == 1:
            yield name, bool(MODULE.fullmatch(name.name)) if is_folder else name.name in FILES
        else:
            module = len(name.parts) == 2 and MODULE.fullmatch(name.parts[0]) is not None
            yield name, module and not is_folder and name.name in MODULE_FILES


RUN_SCHEMA = "quiver-run/2"  # supported value of ``schema`` in run.json (`quiver.retrieval.training.run`)

ColBERTWriter = Callable[[Path, ModelFolder, Encoder, Tokenizer], None]


@dataclass(frozen=True)
class ModelScores:
    """Scores for the card: their folder, fingerprint and dtype of the scored model, entries of the Hub's ``model-index``."""

    where: str
    fingerprint: str | None
    entries: Sequence[Mapping[str, Any]]
    dtype: Dtype = "float32"


@dataclass(frozen=True)
class Exported:
    """Result of an export: the folder, the size of its files, and the parts of the model that the layout does not store."""

    folder: Path
    layout: str
    kind: Kind
    fingerprint: str
    bytes: int
    left_out: tuple[str, ...]


def _export_dense(folder: Path, model: BiEncoder | ColBERT) -> None:
    write_dense(folder, model.settings, model.encoder, model.tokenizer, max_length=model.card.document_length)


def _export_encoder(folder: Path, model: BiEncoder | ColBERT) -> None:
    write_encoder(folder, model.encoder, model.tokenizer)


def _export_colbert(write: ColBERTWriter, folder: Path, model: BiEncoder | ColBERT) -> None:
    # Skiplist words that are not tokens mean [UNK] in PyLate and Quiver; sentence-transformers 6 ignores them.
    tokenizer, colbert = model.tokenizer, model.settings.colbert
    token = tokenizer.settings.get("unk_token", SPECIAL_TOKENS["unk"])
    unknown = token.get("content") if isinstance(token, dict) else token
    words = dict.fromkeys(word if tokenizer.token_id(word) is not None else unknown for word in colbert.skiplist)
    skiplist = tuple(word for word in words if isinstance(word, str) and tokenizer.token_id(word) is not None)
    write(folder, replace(model.settings, colbert=replace(colbert, skiplist=skiplist)), model.encoder, tokenizer)


LAYOUTS: Mapping[str, Mapping[Kind, Callable[[Path, BiEncoder | ColBERT], None]]] = {
    "sentence-transformers": {"dense": _export_dense, "colbert": partial(_export_colbert, write_multi_vector)},
    "pylate": {"colbert": partial(_export_colbert, write_colbert)},
    "hf": {"dense": _export_encoder, "colbert": _export_encoder},
    "stanford": {"colbert": partial(_export_colbert, write_stanford)},
    "onnx": {"dense": write_onnx, "colbert": write_onnx},
}
"""Layout -> kind of model -> writer.

sentence-transformers: bi-encoders for versions 5 and 6, ColBERT models (``MultiVectorEncoder``) for 6. pylate: for PyLate 1.6 and
sentence-transformers 6. hf: only the encoder and its tokenizer. stanford: for Stanford's ColBERT, PyLate and sentence-transformers 6. onnx:
a padded graph from token ids to vectors.
"""


def export_model(
    source: str | Path,
    out: Path,
    *,
    layout: str,
    run: Path | None = None,
    scores: Sequence[ModelScores] = (),
    languages: Sequence[str] = (),
    overwrite: bool = False,
) -> Exported:
    """Write a model in another library's layout, with float32 weights and a model card.

    Args:
        source: Folder or Hub id of a model, also ``ID@REVISION``.
        out: Target folder; its name is the name of the model in the card.
        layout: A key of `LAYOUTS`.
        run: Run folder of the model's training, with ``run.json``.
        scores: Scores of the model.
        languages: ISO 639 codes of the training languages.
        overwrite: Replace an existing export once the new one is complete; a git clone keeps its other files.

    Raises:
        InputError: The source is not a model, the layout cannot express it, the run or the scores belong to another model, a language is
            unknown, or ``out`` cannot be written. ``out`` is unchanged then.
    """
    if layout not in LAYOUTS:
        raise InputError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    if layout == "onnx":
        require_libraries()
    check_languages(languages)
    check_target(out, local_folder(source), overwrite=overwrite)
    parts = load_parts(source)  # not prepacked, unlike those of load_model
    warn_if_bare(parts, source)
    model = build_model(parts, source)
    kind = model.settings.kind
    if kind not in LAYOUTS[layout]:
        fitting = ", ".join(name for name, kinds in LAYOUTS.items() if kind in kinds)
        raise InputError(f"{source} is a bi-encoder, but the layout {layout} is for ColBERT models; --layout must be one of {fitting}")
    fingerprint = model.card.fingerprint
    record = None if run is None else _read_run_record(run, fingerprint)
    _check_scores(scores, model)
    metadata = CardMetadata(out.resolve().name, record, [entry for each in scores for entry in each.entries], languages)
    missing = left_out(model.settings) if layout == "hf" else []
    if missing:
        logger.warning("%s: the layout hf stores only the encoder, without %s", source, ", ".join(missing))
    with replacing_folder(out) as stage:
        LAYOUTS[layout][kind](stage, model)
        written = Tokenizer.from_pretrained(stage)
        if layout not in ("hf", "onnx") and not ignores_outer_space(written):
            logger.warning(
                "%s: sentence-transformers 6 does not strip white space around texts, and no stripping rule can be added to this "
                "tokenizer: its vectors differ for such texts, and for prompts that are not pooled",
                source,
            )
        write_text(stage / "README.md", render_card(model, layout, metadata=metadata, written=written))
        size = sum(file.stat().st_size for file in stage.rglob("*") if file.is_file())
    return Exported(out, layout, kind, fingerprint, size, tuple(missing))


def _read_run_record(run: Path, fingerprint: str) -> Mapping[str, Any]:
    path = run / "run.json"
    record = read_json(path)
    if record.get("schema") != RUN_SCHEMA:
        raise InputError(f"{path}: not the record of a training run (schema {RUN_SCHEMA})")
    found = (record.get("model") or {}).get("fingerprint")
    if found != fingerprint:
        theirs, ours = _shorten_fingerprint(found), _shorten_fingerprint(fingerprint)
        raise InputError(f"{path}: belongs to another model (fingerprint {theirs}, the exported one has {ours})")
    return record


def _check_scores(scores: Sequence[ModelScores], model: BiEncoder | ColBERT) -> None:
    """Check that scores are those of the model, and one of each data set."""
    found: list[tuple[str, object]] = []
    for each in scores:
        fingerprint = with_dtype(model, each.dtype).card.fingerprint
        if each.fingerprint != fingerprint:
            theirs, ours = _shorten_fingerprint(each.fingerprint), _shorten_fingerprint(fingerprint)
            raise InputError(f"{each.where}: scores of another model (fingerprint {theirs}, the exported one has {ours})")
        for entry in each.entries:
            if same := [where for where, dataset in found if dataset == entry["dataset"]]:
                raise InputError(f"{each.where} and {same[0]} both hold scores of {entry['dataset']['name']}; pass only one of them")
            found.append((each.where, entry["dataset"]))


def _shorten_fingerprint(fingerprint: str | None) -> str:
    return (fingerprint or "unknown")[:12]


# Files of the old weights and of formats made from them. Git's history would contain them too.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.tflite")
OTHER_FORMS = ("onnx", "openvino", ".git", ".cache")


@dataclass(frozen=True)
class Lengthened:
    """Result of `lengthen_model`: positions and maximum tokens of a text (for ColBERT, of a document), before and after."""

    folder: Path
    positions: tuple[int, int]
    max_length: tuple[int | None, int]


def lengthen_model(source: str | Path, out: Path, *, factor: int, max_length: int | None = None, overwrite: bool = False) -> Lengthened:
    """Write a model with ``factor`` times as many absolute positions (`quiver.encoder.pretraining.position_extension`).

    Weights, tokenizer and length limits change; all other files are copied. Folders of sentence-transformers and PyLate and bare encoders
    are supported, but not Stanford's.

    Args:
        source: Folder or Hub id, also ``ID@REVISION``.
        out: Target folder.
        factor: Factor >= 1.
        max_length: New maximum tokens of a text (for ColBERT, of a document); by default the number of positions.
        overwrite: Replace an existing model.

    Raises:
        InputError: The model has no absolute positions or is in Stanford's layout, ``max_length`` exceeds its positions, or ``out`` cannot
            be written. ``out`` is unchanged then.
    """
    folder = local_folder(source)
    settings = read_model_folder(folder)
    if is_stanford(folder):
        raise InputError(f"{source}: Stanford's layout is not supported; first convert the model with quiver export --layout pylate")
    check_target(out, folder, overwrite=overwrite, any_files=True)
    inner, weights = settings.encoder_folder.relative_to(folder), shutil.ignore_patterns(*WEIGHTS)

    def skip(within: str, names: list[str]) -> Collection[str]:
        """All forms of the encoder's weights, but not those of the other modules."""
        left = {name for name in names if name in OTHER_FORMS}
        return left | weights(within, names) if Path(within) == settings.encoder_folder else left

    try:
        with replacing_folder(out) as stage:
            shutil.copytree(folder, stage, dirs_exist_ok=True, ignore=skip)
            if base_folder(settings.encoder_folder) != settings.encoder_folder:  # an adapter may leave the tokenizer to its base
                read_tokenizer(settings.encoder_folder).save(stage / inner)
            config = extend_checkpoint(settings.encoder_folder, stage / inner, factor)
            wanted = config.max_positions if max_length is None else max_length
            if not 3 <= wanted <= config.max_positions:
                raise InputError(f"{source}: max_length must be 3 to {config.max_positions} (the new number of positions), got {wanted}")
            for path, keys in (  # without a limit only the number of positions applies
                (transformer_settings(stage / inner), ("max_seq_length", "document_length")),
                (stage / "config_sentence_transformers.json", ("document_length",)),
            ):
                values = read_json(path) if path.is_file() else {}
                if changed := {key: wanted for key in keys if values.get(key) is not None}:
                    write_json(path, values | changed)
            kept = _length_limit(read_model_folder(stage))
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    return Lengthened(out, (config.max_positions // factor, config.max_positions), (_length_limit(settings), kept or config.max_positions))


def _length_limit(settings: ModelFolder) -> int | None:
    return settings.colbert.document_length if settings.kind == "colbert" else settings.max_length
