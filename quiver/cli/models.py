"""Commands that turn a model into another one: export, enlarge, extend-positions."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from quiver.cli import options
from quiver.cli.options import argument, command, option, print_result
from quiver.encoder.config import EncoderConfig, Tiling
from quiver.encoder.errors import InputError
from quiver.encoder.presets import PRESETS, preset

if TYPE_CHECKING:
    from quiver.encoder import Encoder, MaskedLM
    from quiver.retrieval.models.export.export import ModelScores

Layout: TypeAlias = Literal["sentence-transformers", "pylate", "hf", "stanford", "onnx"]
"""Libraries to export for."""


@command
def export(
    model: str = argument("Model folder or hub id, in any layout that Quiver reads."),
    *,
    layout: Layout = option(
        ...,
        "Layout to write. sentence-transformers: bi-encoders for versions 5 and 6, ColBERT models for 6; pylate: ColBERT models for PyLate"
        " 1.6 and sentence-transformers 6; hf: the encoder alone, for transformers; stanford: ColBERT models for Stanford's ColBERT; onnx:"
        " a graph for ONNX Runtime, verified against Quiver's vectors; that of a bi-encoder searches without PyTorch"
        " (quiver search --model).",
    ),
    out: Path = option(..., "Folder to write. Its name becomes the model name in the model card.", "-o"),
    run_folder: Path | None = option(None, "Run folder of the training, with run.json, for the model card."),
    results: tuple[Path, ...] = option((), "Results folder of quiver evaluate, for the scores in the model card. Repeatable."),
    language: tuple[str, ...] = option((), "Language for the model card, as an ISO 639 code such as en. Repeatable."),
    revision: str | None = options.REVISION,
    overwrite: bool = options.OVERWRITE,
    json: bool = options.JSON,
) -> None:
    """Export a model in the layout of another library, with the same vectors and a model card.

    Example: quiver export runs/mine/model --layout sentence-transformers --out my-model --run-folder runs/mine --results results/mine
    """
    from quiver.retrieval.models.export.export import export_model

    exported = export_model(
        options.at_revision(model, revision),
        out,
        layout=layout,
        run=run_folder,
        scores=[_read_model_scores(folder) for folder in results],
        languages=language,
        overwrite=overwrite,
    )
    lines = [f"model: {exported.folder} ({exported.layout}, {exported.bytes / 1e6:,.1f} MB)"]
    if exported.layout == "onnx" and exported.kind == "dense":
        command = f"quiver search INDEX 'your question' --model {shlex.quote(str(exported.folder))}"
        lines.append(f"search an index of the model without PyTorch: {command}")
    print_result({**asdict(exported), "folder": str(exported.folder)}, *lines, json=json)


def _read_model_scores(folder: Path) -> ModelScores:
    """Read a results folder as entries of the Hub's ``model-index``."""
    import yaml

    from quiver.eval.report.hub import render_model_index
    from quiver.eval.results import read_results
    from quiver.retrieval.models.export.export import ModelScores

    found = read_results(folder)
    [index] = next(yaml.safe_load_all(render_model_index(found)))["model-index"]
    return ModelScores(str(folder), found.system.fingerprint, index["results"], found.system.dtype or "float32")


@command
def enlarge(
    model: str = argument("Folder or hub id of the smaller encoder, with or without a masked-LM head."),
    *,
    to: str = option(..., f"Architecture of the larger encoder: a config.json, or the sizes of a preset: {', '.join(PRESETS)}."),
    out: Path = options.MODEL_OUT,
    revision: str | None = options.REVISION,
    shared: bool = option(
        True, "Divide weights among copies of a column, so that outputs stay close; or copy them.", "--shared/--as-published"
    ),
    tiling: Tiling = option(
        "wraparound",
        "Where values beyond the smaller encoder's come from: around it, which is in the centre (wraparound); random values around the"
        " centre (random-edges); or copies one after the other (from-edge).",
    ),
    seed: int = options.SEED,
    overwrite: bool = options.OVERWRITE,
    json: bool = options.JSON,
) -> None:
    """Initialize a larger encoder by tiling the weights of a smaller one, to continue pretraining.

    Example: quiver enlarge runs/base/model --to modernbert-large --out large-init
    """
    from quiver.encoder import MaskedLM, Tokenizer, load_encoder, load_head, save_encoder, save_head
    from quiver.encoder.checkpoints.checkpoint import local_folder
    from quiver.encoder.files import read_json
    from quiver.encoder.pretraining.tiling import enlarge as enlarge_encoder
    from quiver.encoder.pretraining.tiling import enlarge_masked_lm
    from quiver.retrieval.models.export.export import check_target, replacing_folder

    folder = local_folder(model, revision=revision)
    check_target(out, folder, overwrite=overwrite)
    hf = read_json(folder / "config.json")
    names = hf.get("architectures")
    has_head = isinstance(names, list) and any(str(name).endswith("ForMaskedLM") for name in names)
    parent: Encoder | MaskedLM = load_head(MaskedLM, folder) if has_head else load_encoder(folder)
    small = parent.encoder.config if isinstance(parent, MaskedLM) else parent.config
    large = _architecture(to, small)
    with replacing_folder(out) as stage:
        if isinstance(parent, MaskedLM):
            save_head(enlarge_masked_lm(parent, large, shared=shared, tiling=tiling, seed=seed), stage)
        else:
            save_encoder(enlarge_encoder(parent, large, shared=shared, tiling=tiling, seed=seed), stage)
        if (folder / "tokenizer.json").is_file():
            Tokenizer.from_pretrained(folder).save(stage)
    sizes = {name: _sizes(config) for name, config in (("from", small), ("to", large))}
    change = " -> ".join("{layers} layers of {width} with {heads} heads, MLP {intermediate}".format(**size) for size in sizes.values())
    print_result({"folder": str(out), "head": has_head, **sizes}, f"model: {out} ({change})", json=json)


def _architecture(to: str, small: EncoderConfig) -> EncoderConfig:
    """Architecture that ``--to`` names. A preset gives only sizes: the weights fix vocabulary, lengths and RoPE thetas."""
    from quiver.encoder.checkpoints import config_from_hf
    from quiver.encoder.files import read_json

    if to in PRESETS:
        sizes = ("hidden_size", "num_heads", "intermediate_size", "layer_types")
        return replace(small, **{name: getattr(preset(to), name) for name in sizes})
    path = Path(to)
    if path.suffix != ".json":
        raise InputError(f"--to {to}: neither a config.json nor a preset; the presets are {', '.join(PRESETS)}")
    try:
        return config_from_hf({key: value for key, value in read_json(path).items() if key != "head"})
    except InputError as error:
        raise InputError(str(error) if str(error).startswith(to) else f"{to}: {error}") from error


def _sizes(config: EncoderConfig) -> dict[str, int]:
    sizes = {"layers": config.num_layers, "width": config.hidden_size, "heads": config.num_heads}
    return {**sizes, "intermediate": config.intermediate_size}


@command
def extend_positions(
    model: str = argument("Folder or hub id of a model with absolute positions (BERT, RoBERTa, MiniLM, ...)."),
    *,
    factor: int = option(..., "Factor by which the number of positions grows: 2, 4, 8, ...", min=1),
    out: Path = option(..., "Model folder to write, in the layout of the model.", "-o"),
    max_length: int | None = option(None, "Length that texts are truncated to, in tokens. Default: the number of positions."),
    plot: Path | None = option(None, "Figure of the old and new embeddings to write; .svg or .png."),
    revision: str | None = options.REVISION,
    overwrite: bool = options.OVERWRITE,
    json: bool = options.JSON,
) -> None:
    """Interpolate the absolute position embeddings of a model, so that it accepts longer texts.

    Fine-tune the result briefly: the embedding of position p moves to position factor * p.

    Example: quiver extend-positions sentence-transformers/all-MiniLM-L6-v2 --factor 2 --out minilm-1024
    """
    from quiver.encoder.checkpoints.checkpoint import local_folder
    from quiver.encoder.files import check_target
    from quiver.eval.report.positions import check_format, write_position_plot
    from quiver.retrieval.models.export.export import lengthen_model

    if plot is not None:
        check_format(plot)
        check_target(plot)
    folder = local_folder(model, revision=revision)
    done = lengthen_model(folder, out, factor=factor, max_length=max_length, overwrite=overwrite)
    if plot is not None:
        write_position_plot(folder, done.folder, plot)
    (positions, more), (length, longer) = done.positions, done.max_length
    cut = f"{'' if length is None else f'{length:,} -> '}{longer:,}"
    lines = [f"model: {done.folder} ({positions:,} -> {more:,} positions; texts are truncated to {cut} tokens)"]
    lines += [] if plot is None else [f"plot: {plot}"]
    record = {**asdict(done), "folder": str(done.folder), "plot": None if plot is None else str(plot)}
    print_result(record, *lines, json=json)
