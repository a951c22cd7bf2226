"""Export a model in another library's layout, with a model card, or with more positions.

An export is written to a temporary folder that replaces the target by one rename. In a git clone, such as one of a Hub repository, the
files are replaced one by one, so that its history and other files stay. If a layout cannot express a model without changing its vectors,
exporting fails; if only one of several libraries would read it differently, a warning is logged and the card omits that library.
"""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quiver.encoder import Encoder, InputError, Tokenizer
from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.files import read_json, sync_folder, write_json, write_text
from quiver.encoder.pretraining.position_extension import extend_checkpoint
from quiver.encoder.tokenizer import SPECIAL_TOKENS
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.card import Origin, check_languages, left_out, render_card
from quiver.retrieval.models.export.onnx import require_libraries, write_onnx
from quiver.retrieval.models.export.pylate import write_colbert
from quiver.retrieval.models.export.sentence_transformers import transformer_settings, write_dense, write_encoder, write_multi_vector
from quiver.retrieval.models.export.stanford import is_stanford, write_stanford
from quiver.retrieval.models.export.tokenizer_rules import ignores_outer_space
from quiver.retrieval.models.loading import Kind, ModelFolder, load_parts, read_model_folder, warn_if_bare

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


RUN_SCHEMA = "quiver-run/2"
"""``schema`` of a run.json that a card is made from; `quiver.retrieval.training.run_record` says what stands in it."""

ColBERTWriter = Callable[[Path, ModelFolder, Encoder, Tokenizer], None]


@dataclass(frozen=True)
class Scores:
    """What a model scored, in the Hub's shape.

    Attributes:
        where: The folder of results, for errors.
        fingerprint: Of the model that was scored; None where the results do not know.
        entries: Of ``model-index``: ``task``, ``dataset`` and ``metrics`` each.
    """

    where: str
    fingerprint: str | None
    entries: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: Where.
        layout: A key of `LAYOUTS`.
        kind: Of the model.
        fingerprint: Of the model that was exported.
        bytes: Size of all files.
        left_out: What the layout does not hold.
    """

    folder: Path
    layout: str
    kind: Kind
    fingerprint: str
    bytes: int
    left_out: tuple[str, ...]


def _bare(folder: Path, model: BiEncoder | ColBERT) -> None:
    write_encoder(folder, model.encoder, model.tokenizer)


def _sentence_transformer(folder: Path, model: BiEncoder | ColBERT) -> None:
    length = model.card.document_length
    write_dense(folder, model.settings, model.encoder, model.tokenizer, max_length=length)


def _colbert(write: ColBERTWriter) -> Callable[[Path, BiEncoder | ColBERT], None]:
    def writer(folder: Path, model: BiEncoder | ColBERT) -> None:
        write(folder, _explicit_skiplist(model.settings, model.tokenizer), model.encoder, model.tokenizer)

    return writer


LAYOUTS: Mapping[str, Mapping[Kind, Callable[[Path, BiEncoder | ColBERT], None]]] = {
    "sentence-transformers": {"dense": _sentence_transformer, "colbert": _colbert(write_multi_vector)},
    "pylate": {"colbert": _colbert(write_colbert)},
    "hf": {"dense": _bare, "colbert": _bare},
    "stanford": {"colbert": _colbert(write_stanford)},
    "onnx": {"dense": write_onnx, "colbert": write_onnx},
}
"""Layout -> kind of model -> what writes it.

sentence-transformers: bi-encoders for 5 and 6, ColBERT models (``MultiVectorEncoder``) for 6. pylate: for PyLate 1.6, and for
sentence-transformers 6. hf: the encoder and its tokenizer alone. stanford: for Stanford's ColBERT, PyLate and sentence-transformers 6.
onnx: a padded graph from token ids to vectors, compared with our own.
"""


def export_model(
    source: str | Path,
    out: Path,
    *,
    layout: str,
    revision: str | None = None,
    run: Path | None = None,
    scores: Sequence[Scores] = (),
    languages: Sequence[str] = (),
    overwrite: bool = False,
) -> Exported:
    """Write a model in another library's layout, weights in float32, with a README.md that tells where it is from.

    Args:
        source: Any model that Quiver opens: folder or hub id.
        out: Folder to write; its name is the model's in the card.
        layout: A key of `LAYOUTS`.
        revision: Of ``source`` on the hub.
        run: Folder of the training that made it, with ``run.json``.
        scores: What it scored.
        languages: ISO 639 codes of the languages it was trained on.
        overwrite: Replace an export that is there, once the new one is written; a clone of a repository keeps its other files.

    Raises:
        InputError: The source is no model, the layout does not hold it, the run or the scores are of another model, a language is
            none, or ``out`` cannot be written; nothing is left there.
    """
    if layout not in LAYOUTS:
        raise InputError(f"unknown layout {layout!r}; there are {', '.join(LAYOUTS)}")
    if layout == "onnx":
        require_libraries()
    check_languages(languages)
    check_target(out, local_folder(source, revision=revision), overwrite=overwrite)
    model = _load(source, revision)
    kind = model.settings.kind
    if kind not in LAYOUTS[layout]:
        fitting = ", ".join(name for name, kinds in LAYOUTS.items() if kind in kinds)
        raise InputError(f"{source}: a bi-encoder, and the layout {layout} is for ColBERT models; --layout must be one of {fitting}")
    fingerprint = model.card.fingerprint
    record = None if run is None else _record(run, fingerprint)
    origin = Origin(out.resolve().name, record, _entries(scores, fingerprint), languages)
    missing = left_out(model.settings) if layout == "hf" else []
    if missing:
        logger.warning("%s: the layout hf holds the encoder alone; not in it: %s", source, ", ".join(missing))
    with replacing_folder(out) as stage:
        LAYOUTS[layout][kind](stage, model)
        written = Tokenizer.from_pretrained(stage)
        if layout not in ("hf", "onnx") and not ignores_outer_space(written):
            logger.warning(
                "%s: sentence-transformers 6 sees white space around texts, which this tokenizer cannot be made to strip: "
                "it gives other vectors for such texts, and for prompts that are not pooled",
                source,
            )
        write_text(stage / "README.md", render_card(model, layout, origin=origin, written=written))
        size = sum(file.stat().st_size for file in stage.rglob("*") if file.is_file())
    return Exported(out, layout, kind, fingerprint, size, tuple(missing))


def _load(source: str | Path, revision: str | None) -> BiEncoder | ColBERT:
    """Not `quiver.retrieval.models.loading.load_model`: it packs the matrices for inference, which is lost work here."""
    parts = load_parts(source, revision=revision)
    warn_if_bare(parts, source)
    model: type[BiEncoder] | type[ColBERT] = ColBERT if parts.settings.kind == "colbert" else BiEncoder
    return model(parts.encoder, parts.tokenizer, parts.settings, source=str(source))


def _explicit_skiplist(settings: ModelFolder, tokenizer: Tokenizer) -> ModelFolder:
    """A skipped word that is no token stands for [UNK] in PyLate and here, and for nothing in sentence-transformers 6."""
    colbert = settings.colbert
    words = tuple(dict.fromkeys(word if tokenizer.token_id(word) is not None else _unknown(tokenizer) for word in colbert.skiplist))
    return replace(settings, colbert=replace(colbert, skiplist=tuple(word for word in words if word is not None)))


def _unknown(tokenizer: Tokenizer) -> str | None:
    """The text of [UNK]; None if the tokenizer has none."""
    token = tokenizer.settings.get("unk_token", SPECIAL_TOKENS["unk"])
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and tokenizer.token_id(text) is not None else None


def _record(run: Path, fingerprint: str) -> Mapping[str, Any]:
    path = run / "run.json"
    record = read_json(path)
    if record.get("schema") != RUN_SCHEMA:
        raise InputError(f"{path}: not the record of a training run ({RUN_SCHEMA})")
    found = (record.get("model") or {}).get("fingerprint")
    if found != fingerprint:
        raise InputError(f"{path}: the record of another model (fingerprint {_short(found)}, the exported one has {_short(fingerprint)})")
    return record


def _entries(scores: Sequence[Scores], fingerprint: str) -> list[Mapping[str, Any]]:
    """All entries.

    Raises:
        InputError: They are another model's, or two are of the same data.
    """
    found: list[tuple[str, Mapping[str, Any]]] = []
    for each in scores:
        if each.fingerprint != fingerprint:
            theirs, ours = _short(each.fingerprint), _short(fingerprint)
            raise InputError(f"{each.where}: scores of another model (fingerprint {theirs}, the exported one has {ours})")
        for entry in each.entries:
            same = [where for where, known in found if known["dataset"] == entry["dataset"]]
            if same:
                raise InputError(f"{each.where}: scores of {entry['dataset']['name']} too, as {same[0]}; give one of them")
            found.append((each.where, entry))
    return [entry for _, entry in found]


def _short(fingerprint: str | None) -> str:
    return (fingerprint or "unknown")[:12]


# The old weights, in whatever form, and what is made of them; git's history would bring them along too.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.tflite")
OTHER_FORMS = ("onnx", "openvino", ".git", ".cache")

ST_SETTINGS = "config_sentence_transformers.json"


@dataclass(frozen=True)
class Lengthened:
    """What was written.

    Attributes:
        folder: Where.
        positions: Of a text, before and after.
        max_length: Tokens that texts (of a ColBERT model: documents) are cut to, before and after; None where no limit was set.
    """

    folder: Path
    positions: tuple[int, int]
    max_length: tuple[int | None, int]


def lengthen_model(
    source: str | Path, out: Path, *, factor: int, max_length: int | None = None, revision: str | None = None, overwrite: bool = False
) -> Lengthened:
    """Write a model with ``factor`` times as many positions, whole or not at all.

    Args:
        source: Folder or hub id.
        out: Folder to write.
        factor: k >= 1.
        max_length: Tokens that texts are cut to from now on; all positions by default. Queries of ColBERT models stay as they are.
        revision: Branch, tag or commit on the hub.
        overwrite: Replace a model that is there.

    Raises:
        InputError: It is no model with absolute positions, or one in Stanford's layout; ``max_length`` is beyond its positions; or
            ``out`` cannot be written. Nothing is left there.
    """
    folder = local_folder(source, revision=revision)
    settings = read_model_folder(folder)
    if is_stanford(folder):
        raise InputError(f"{source}: a folder of Stanford's ColBERT; write it anew with quiver export --layout pylate, and extend that")
    _check_lengthen_target(out, folder, overwrite=overwrite)
    inner = settings.encoder_folder.relative_to(folder)
    try:
        with replacing_folder(out) as stage:
            shutil.copytree(folder, stage, dirs_exist_ok=True, ignore=_skip_old_weights(settings.encoder_folder))
            config = extend_checkpoint(settings.encoder_folder, stage / inner, factor)
            wanted = config.max_positions if max_length is None else max_length
            if not 3 <= wanted <= config.max_positions:
                raise InputError(f"{source}: max_length must be 3 to {config.max_positions}, its new number of positions, got {wanted}")
            _write_limits(stage, stage / inner, wanted)
            kept = _length_limit(read_model_folder(stage))
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    return Lengthened(out, (config.max_positions // factor, config.max_positions), (_length_limit(settings), kept or config.max_positions))


def _length_limit(settings: ModelFolder) -> int | None:
    return settings.colbert.document_length if settings.kind == "colbert" else settings.max_length


def _check_lengthen_target(out: Path, source: Path, *, overwrite: bool) -> None:
    """As `quiver.retrieval.models.export.export.check_target`, for a folder whose files are not those of an export."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file; --out names a folder")
    if source.resolve().is_relative_to(out.resolve()) or out.resolve().is_relative_to(source.resolve()):
        raise InputError(f"{out}: is, holds or lies in the model to be extended; choose another --out")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise InputError(f"{out}: not empty; choose another --out, or --overwrite")
    if not (out / "config.json").is_file() and not (out / "modules.json").is_file():
        raise InputError(f"{out}: holds something other than a model, which is not replaced; choose another --out")


def _skip_old_weights(encoder: Path) -> Callable[[str, list[str]], Collection[str]]:
    """What `shutil.copytree` leaves out: all forms of the encoder's weights. Those of the modules behind it are copied."""
    weights = shutil.ignore_patterns(*WEIGHTS)

    def names_left_out(folder: str, names: list[str]) -> Collection[str]:
        left = {name for name in names if name in OTHER_FORMS}
        return left | weights(folder, names) if Path(folder) == encoder else left

    return names_left_out


def _write_limits(folder: Path, encoder: Path, wanted: int) -> None:
    """Put the new limit wherever the layouts have one already; a folder that says none is limited by its number of positions alone."""
    for path, keys in (
        (transformer_settings(encoder), ("max_seq_length", "document_length")),
        (folder / ST_SETTINGS, ("document_length",)),
    ):
        values = read_json(path) if path.is_file() else {}
        changed = {key: wanted for key in keys if values.get(key) is not None}
        if changed:
            write_json(path, values | changed)
