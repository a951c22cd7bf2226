"""A model written for another library, with its card.

Every layout is whole or not there (`quiver.retrieval.models.export.target`). What cannot be said in a layout without changing vectors is an
error, not an approximation; where one library of several would read it otherwise, a warning, and the card does not name that library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quiver.encoder import Encoder, InputError, Tokenizer
from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.files import read_json, write_text
from quiver.encoder.tokenizer import SPECIAL_TOKENS
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.card import Origin, render_card
from quiver.retrieval.models.export.dense import write_dense
from quiver.retrieval.models.export.languages import check_languages
from quiver.retrieval.models.export.modules import write_encoder
from quiver.retrieval.models.export.multi_vector import write_multi_vector
from quiver.retrieval.models.export.onnx_graph import require_libraries, write_onnx
from quiver.retrieval.models.export.pylate import write_colbert
from quiver.retrieval.models.export.stanford import write_stanford
from quiver.retrieval.models.export.target import check_target, replacing_folder
from quiver.retrieval.models.export.usage import left_out
from quiver.retrieval.models.export.white_space import ignores_outer_space
from quiver.retrieval.models.model_folder import ModelFolder, load_parts, warn_if_bare
from quiver.retrieval.models.model_settings import Kind

logger = logging.getLogger(__name__)

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
