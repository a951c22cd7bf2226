"""``quiver enlarge``: a larger encoder that begins with a smaller one's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from quiver.cli.output import JsonOption, OverwriteOption, print_json, say
from quiver.encoder import (
    PRESETS,
    Encoder,
    EncoderConfig,
    InputError,
    MaskedLM,
    Tokenizer,
    load_encoder,
    load_masked_lm,
    preset,
    save_encoder,
    save_masked_lm,
)
from quiver.encoder.checkpoints import config_from_hf
from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.files import read_json
from quiver.encoder.pretraining.tiling import enlarge as enlarge_encoder
from quiver.encoder.pretraining.tiling import enlarge_masked_lm
from quiver.retrieval.models.export.target import check_target, replacing_folder

TO_HELP = f"A config.json, or whose width, heads, MLP and layers to take: {', '.join(PRESETS)}."


def enlarge(
    model: Annotated[str, typer.Argument(help="The smaller encoder, with a masked-LM head or without: a folder, or a hub id.")],
    to: Annotated[str, typer.Option(help=TO_HELP)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model on the hub.")] = None,
    shared: Annotated[
        bool, typer.Option("--shared/--as-published", help="Copies share what they add up to, and it begins near to the smaller one.")
    ] = True,
    overwrite: Annotated[bool, OverwriteOption] = False,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Make a larger encoder of a smaller one, its weights tiled from the middle with wrap-around, to go on with pretraining.

    Example: quiver enlarge runs/base/model --to modernbert-large --out large-init
    """
    folder = local_folder(model, revision=revision)
    check_target(out, folder, overwrite=overwrite)
    hf = read_json(folder / "config.json")
    parent: Encoder | MaskedLM = load_masked_lm(folder) if _has_masked_lm(hf) else load_encoder(folder)
    small = parent.encoder.config if isinstance(parent, MaskedLM) else parent.config
    large = _architecture(to, small)
    with replacing_folder(out) as stage:
        if isinstance(parent, MaskedLM):
            save_masked_lm(enlarge_masked_lm(parent, large, shared=shared), stage)
        else:
            save_encoder(enlarge_encoder(parent, large, shared=shared), stage)
        if (folder / "tokenizer.json").is_file():
            Tokenizer.from_pretrained(folder).save(stage)
    sizes = {name: _sizes(config) for name, config in (("from", small), ("to", large))}
    if as_json:
        print_json({"folder": str(out), "head": isinstance(parent, MaskedLM), **sizes})
        return
    told = " -> ".join("{layers} layers of {width} with {heads} heads, MLP {intermediate}".format(**size) for size in sizes.values())
    say(f"model: {out} ({told})")


def _has_masked_lm(hf: dict[str, object]) -> bool:
    names = hf.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForMaskedLM") for name in names)


def _architecture(to: str, small: EncoderConfig) -> EncoderConfig:
    """What ``--to`` says: of a preset the sizes alone, for vocabulary, lengths and thetas are what the weights were trained with."""
    if to in PRESETS:
        sizes = preset(to)
        return replace(
            small,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            intermediate_size=sizes.intermediate_size,
            layer_types=sizes.layer_types,
        )
    path = Path(to)
    if path.suffix != ".json":
        raise InputError(f"--to {to}: neither a config.json nor a preset; there are {', '.join(PRESETS)}")
    try:
        return config_from_hf({key: value for key, value in read_json(path).items() if key != "head"})
    except InputError as error:
        raise InputError(str(error) if str(error).startswith(to) else f"{to}: {error}") from error


def _sizes(config: EncoderConfig) -> dict[str, int]:
    return {
        "layers": config.num_layers,
        "width": config.hidden_size,
        "heads": config.num_heads,
        "intermediate": config.intermediate_size,
    }
