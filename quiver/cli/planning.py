"""``quiver plan``: like bench.py beside it, a file of retrieval that may import eval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from quiver.cli.output import JsonOption, ProgressOption, print_json, print_table, say, show_progress
from quiver.cli.settings import EngineOption, parse_memory
from quiver.encoder import PRESETS, EncoderConfig, InputError, preset
from quiver.eval.datasets.beir import beir
from quiver.retrieval.data.corpus import read_documents
from quiver.retrieval.index.engine_table import engine_name, parse_engine
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.planning import (
    DEVICES,
    FORMULAS,
    TEXTS,
    Corpus,
    Machine,
    ModelSize,
    Plan,
    Rates,
    estimated,
    from_sample,
    from_words,
    make_plan,
    read_rates,
)
from quiver.retrieval.planning.corpora import spread_over
from quiver.retrieval.planning.measuring import measure, text_lengths
from quiver.retrieval.planning.plan import matrix_weights
from quiver.retrieval.records import Document, ModelCard
from quiver.retrieval.units import parse_size

BILLION, PASSAGE = 1_000_000_000, "msmarco"


class Collection(str, Enum):
    """What is planned without a corpus at hand."""

    MSMARCO = "msmarco"
    BEIR = "beir"
    BILLION = "billion"


class ModelKind(str, Enum):
    """What a preset is to become."""

    DENSE = "dense"
    COLBERT = "colbert"


@dataclass(frozen=True)
class _Loaded:
    """A model as it is planned with; a preset has no weights and no tokenizer."""

    size: ModelSize
    config: EncoderConfig
    model: BiEncoder | ColBERT | None


def plan(
    model: Annotated[str, typer.Option("--model", "-m", help=f"Folder or hub id, or a preset: {', '.join(PRESETS)}.")],
    docs: Annotated[float | None, typer.Option("--docs", min=1, help="Documents, such as 8.8e6.")] = None,
    collection: Annotated[
        Collection | None, typer.Option("--preset-collection", help="MS MARCO's passages, BEIR's fifteen data sets, or a billion passages.")
    ] = None,
    sample: Annotated[
        Path | None, typer.Option("--sample", help="A corpus whose texts are like those planned: tokens and bytes are counted in it.")
    ] = None,
    words: Annotated[float | None, typer.Option(min=1, help="Or the words of a document; by default those of MS MARCO's passages.")] = None,
    kind: Annotated[ModelKind, typer.Option(help="Of a preset: one vector a text, or one a token.")] = ModelKind.DENSE,
    dim: Annotated[
        int | None, typer.Option(min=1, help="Of a preset: width of a vector; by default the encoder's, or 128 a token.")
    ] = None,
    length: Annotated[int | None, typer.Option(min=3, help="Of a preset: tokens of a document; by default 512, of a ColBERT 180.")] = None,
    engine: Annotated[str, EngineOption] = "auto",
    text: Annotated[bool, typer.Option("--text/--no-text", help="The texts are kept in the index.")] = True,
    rates: Annotated[
        list[Path] | None,
        typer.Option("--rates", help="A file of quiver bench encoder --json or quiver bench index --json; may be repeated."),
    ] = None,
    measured: Annotated[bool, typer.Option("--measure", help="Time this machine on --sample.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of --measure.")] = 10.0,
    device: Annotated[
        str | None,
        typer.Option(help=f"Estimate instead, from the arithmetic of one of {', '.join(DEVICES)}; less sure than a measurement."),
    ] = None,
    devices: Annotated[int, typer.Option("--devices", min=1, help="That encode side by side.")] = 1,
    price: Annotated[float | None, typer.Option("--price-per-gpu-hour", min=0, help="Of a device that encodes.")] = None,
    memory: Annotated[str, typer.Option("--memory", help="Of a machine that searches.")] = "64GB",
    build_memory: Annotated[
        str, typer.Option("--build-memory", help="Of a build beside the model, as quiver index build --memory.")
    ] = "2GB",
    explain: Annotated[bool, typer.Option("--explain", help="Show the formulas.")] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Say what an index will take: tokens, hours, disk, memory, shards and cost.

    Examples: quiver plan --docs 8.8e6 --model MODEL --sample data/scifact --measure

    quiver plan --preset-collection msmarco --model modernbert-base --kind colbert --device h100 --price-per-gpu-hour 2.5 --explain
    """
    loaded = _load(model, kind.value, dim, length)
    if measured and sample is None:
        raise InputError("--measure times the model on real texts: give --sample CORPUS")
    texts, count = _sampled(sample) if sample is not None else ([], 0)
    corpora = _corpora(loaded, docs, collection, (sample, texts, count), words)
    spec = parse_engine(engine)
    machine = Machine(parse_size(memory), parse_memory(build_memory), devices, price)
    plans = {}
    known: dict[str, Rates] = {}
    for name, corpus in corpora.items():
        chosen = engine_name(spec.name, loaded.size.card, corpus.documents)
        found = read_rates(rates or [], tokens=corpus.tokens, kind=loaded.size.card.kind)
        if measured and loaded.model is not None:
            if chosen not in known:
                shown = show_progress(progress)
                known[chosen] = measure(loaded.model, texts, name=chosen, settings=spec.settings, seconds=seconds, progress=shown)
            found = known[chosen].filled(found)
        if device is not None:
            found = found.filled(estimated(loaded.config, device, tokens=corpus.tokens))
        plans[name] = make_plan(corpus, loaded.size, machine, found, engine=spec.name, settings=spec.settings, texts=text)
    if as_json:
        print_json({"plans": {name: each.to_json() for name, each in plans.items()}, "formulas": FORMULAS})
        return
    _print(plans)
    if explain:
        print_table("Formulas", ("figure", "formula"), list(FORMULAS.items()))


def _load(name: str, kind: str, dim: int | None, length: int | None) -> _Loaded:
    if name in PRESETS:
        config = preset(name)
        width = dim or (config.hidden_size if kind == "dense" else 128)
        cut = length or (min(512, config.max_positions) if kind == "dense" else 180)
        similarity = "cosine" if kind == "dense" else "maxsim"
        card = ModelCard(name, "dense" if kind == "dense" else "colbert", "", width, similarity, 32, cut)  # type: ignore[arg-type]
        weights = matrix_weights(config)
        return _Loaded(ModelSize(name, card, weights, 4 * weights), config, None)
    if dim is not None or length is not None:
        raise InputError("--dim and --length are for presets; a model has its own")
    model = load_model(name)
    weights = model.encoder.num_parameters
    return _Loaded(ModelSize(name, model.card, weights, 4 * weights), model.encoder.config, model)


def _sampled(path: Path, size: int = 512) -> tuple[list[Document], int]:
    count = sum(1 for _ in read_documents(path))
    return spread_over(read_documents(path), count, size), count


def _corpora(
    loaded: _Loaded,
    docs: float | None,
    collection: Collection | None,
    sampled: tuple[Path | None, Sequence[Document], int],
    words: float | None,
) -> dict[str, Corpus]:
    """What is planned, by name."""
    path, texts, count = sampled
    if (docs is None) == (collection is None) and not (path is not None and docs is None and collection is None):
        raise InputError("give --docs, --preset-collection, or --sample alone for the corpus itself")
    if path is not None and (words is not None or loaded.model is None):
        raise InputError("--sample is counted by a model's tokenizer: give a model instead of a preset, and no --words")
    cut = loaded.size.card.document_length
    if collection is not None:
        return _collections(collection, cut)
    documents = count if docs is None else round(docs)
    if path is not None and loaded.model is not None:
        model = loaded.model
        return {
            f"{documents:,} documents": from_sample(
                documents, texts, lambda each: text_lengths(model, each), use_title=True, source=str(path)
            )
        }
    mean = words or TEXTS[PASSAGE]
    return {f"{documents:,} documents": from_words(documents, mean, length=cut, source=f"{mean:g} words a document")}


def _collections(collection: Collection, cut: int) -> dict[str, Corpus]:
    """The published ones, by their numbers of documents in the registry of collections and their words in BEIR's paper."""
    counts: dict[str, int] = {}
    for entry in beir():
        name = entry.facts.group or entry.name
        counts[name] = counts.get(name, 0) + (entry.facts.documents or 0)
    if collection is Collection.BILLION:
        return {"a billion passages": from_words(BILLION, TEXTS[PASSAGE], length=cut, source="words of MS MARCO's passages")}
    chosen = [PASSAGE] if collection is Collection.MSMARCO else list(counts)
    return {name: from_words(counts[name], TEXTS[name], length=cut, source="BEIR, Table 1") for name in chosen}


def _print(plans: dict[str, Plan]) -> None:
    rows = []
    for name, each in plans.items():
        rows.append(
            (
                *(name, each.index.engine, f"{each.corpus.documents:,}", f"{each.tokens / 1e6:,.1f}", _hours(each.encoding_hours)),
                *(_hours(each.indexing_hours), _size(each.index.disk), _size(each.build_memory), _size(each.search_memory)),
                *(f"{each.shards:,}", "-" if each.cost is None else f"{each.cost:,.2f}"),
            )
        )
    header = ("", "engine", "documents", "M tokens", "encode (h)", "index (h)", "disk (GB)", "build (GB)", "search (GB)", "shards", "cost")
    first = next(iter(plans.values()))
    print_table(f"{first.model.name}: {first.model.card.kind}, width {first.model.card.dim}", header, rows)
    total = [each.cost for each in plans.values() if each.cost is not None]
    if len(plans) > 1 and len(total) == len(plans):
        say(f"cost of all: {sum(total):,.2f}")
    if first.rates.tokens_per_second is None:
        say("hours are not known: give --measure, --rates FILE or --device")
    else:
        how = "measured" if first.rates.measured else "estimated, not measured"
        say(f"rate: {first.rates.tokens_per_second:,.0f} tokens/s, {how} ({first.rates.source})")


def _hours(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if value >= 0.1 else f"{value:.4f}"


def _size(value: float) -> str:
    return f"{value / 1e9:,.2f}" if value >= 1e8 else f"{value / 1e9:.4f}"
