"""``quiver estimate``: time, disk, memory and cost of an index before it is built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from quiver.cli import options
from quiver.cli.output import parse_memory, print_json, print_table, say
from quiver.encoder.config import EncoderConfig
from quiver.encoder.errors import InputError
from quiver.encoder.presets import PRESETS, preset
from quiver.retrieval.units import parse_size

if TYPE_CHECKING:
    from quiver.retrieval.data.source import SourceOptions
    from quiver.retrieval.models.biencoder import BiEncoder
    from quiver.retrieval.models.colbert import ColBERT
    from quiver.retrieval.planning import CorpusStatistics, ModelSize, Plan
    from quiver.retrieval.records import Document, Dtype

Collection: TypeAlias = Literal["msmarco", "beir", "billion"]

BILLION, PASSAGE = 1_000_000_000, "msmarco"


@dataclass(frozen=True)
class _Loaded:
    """A model, or a preset, which has no weights and no tokenizer."""

    size: ModelSize
    config: EncoderConfig
    model: BiEncoder | ColBERT | None


def estimate(
    model: Annotated[str, typer.Option("--model", "-m", help=f"Folder or hub id of the model, or a preset: {', '.join(PRESETS)}.")],
    docs: Annotated[float | None, typer.Option("--docs", min=1, help="Number of documents, such as 8.8e6.")] = None,
    collection: Annotated[
        Collection | None,
        typer.Option(
            "--preset-collection", help="Collection to estimate: MS MARCO passages, the fifteen BEIR collections, or a billion passages."
        ),
    ] = None,
    sample: Annotated[
        str | None, typer.Option("--sample", help="Corpus with typical texts, to count tokens and bytes per document.")
    ] = None,
    id_field: options.IdField = None,
    title_field: options.TitleField = None,
    text_fields: options.TextFields = None,
    lists: options.ListFields = None,
    columns: options.ColumnNames = None,
    passages: options.Passages = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    words: Annotated[
        float | None, typer.Option("--words", min=1, help="Mean number of words per document. Default: that of MS MARCO passages.")
    ] = None,
    kind: Annotated[
        Literal["dense", "colbert"],
        typer.Option("--kind", help="Model that a preset becomes: dense (one vector per text) or colbert (one per token)."),
    ] = "dense",
    dim: Annotated[
        int | None, typer.Option("--dim", min=1, help="Vector width, for presets. Default: the encoder's, or 128 for ColBERT.")
    ] = None,
    length: Annotated[
        int | None, typer.Option("--length", min=3, help="Longest document in tokens, for presets. Default: 512, or 180 for ColBERT.")
    ] = None,
    measured: Annotated[bool, typer.Option("--measure", help="Measure the rates of this machine on --sample.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Duration of --measure, in seconds.")] = 10.0,
    dtype: options.Dtype = None,
    device: options.Device = None,
    gpu: Annotated[
        Literal["h200", "h100", "a100", "l40s", "l4", "rtx4090"] | None,
        typer.Option(
            "--gpu", help="GPU to estimate the encoding rate of, from its arithmetic throughput; less accurate than measured rates."
        ),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of devices that encode in parallel.")] = 1,
    price: Annotated[
        float | None, typer.Option("--price-per-gpu-hour", min=0, help="Price of one encoding device per hour, in any currency.")
    ] = None,
    engine: options.Engine = "auto",
    text: options.StoreText = True,
    memory: options.BuildMemory = "2GB",
    search_memory: Annotated[str, typer.Option("--search-memory", help="Memory of a machine that searches, such as 64GB.")] = "64GB",
    formulas: Annotated[bool, typer.Option("--formulas", help="Print the formulas.")] = False,
    progress: options.Progress = True,
    as_json: options.Json = False,
) -> None:
    """Estimate tokens, hours, disk, memory, shards and cost of an index.

    Examples: quiver estimate --docs 8.8e6 --model MODEL --sample data/scifact --measure

    quiver estimate --model MODEL --sample products.csv --title name --text description

    quiver estimate --preset-collection msmarco --model modernbert-base --kind colbert --gpu h100 --price-per-gpu-hour 2.5 --formulas
    """
    from quiver.retrieval.data.source import DEFAULTS
    from quiver.retrieval.index.engines import engine_name, parse_engine
    from quiver.retrieval.planning import FORMULAS, Machine, Rates, estimated, make_plan, measure

    loaded = _load(model, kind, dim, length, dtype, device)
    if measured and sample is None:
        raise InputError("--measure needs real texts; pass --sample CORPUS")
    given = options.source_options(id_field, title_field, text_fields, lists, columns, passages, include, exclude)
    if sample is None and given != DEFAULTS:
        raise InputError("--id, --text and the other options of a source need one; pass --sample CORPUS")
    texts, count = _sampled(sample, given, loaded) if sample is not None else ([], 0)
    corpora = _corpora(loaded, docs, collection, (sample, texts, count), words)
    spec = parse_engine(engine)
    machine = Machine(parse_size(search_memory), parse_memory(memory), gpus, price)
    plans = {}
    known: dict[str, Rates] = {}
    for name, corpus in corpora.items():
        chosen = engine_name(spec.name, loaded.size.card, corpus.documents)
        found = Rates()
        if measured and loaded.model is not None:
            if chosen not in known:
                known[chosen] = measure(loaded.model, texts, name=chosen, settings=spec.settings, seconds=seconds, progress=progress)
            found = known[chosen]
        elif gpu is not None:
            found = estimated(loaded.config, gpu, tokens=corpus.tokens)
        plans[name] = make_plan(corpus, loaded.size, machine, found, engine=spec.name, settings=spec.settings, texts=text)
    if as_json:
        print_json({"plans": {name: each.to_json() for name, each in plans.items()}, "formulas": FORMULAS})
        return
    _print(plans)
    if formulas:
        print_table("Formulas", ("figure", "formula"), list(FORMULAS.items()))


def _load(name: str, kind: str, dim: int | None, length: int | None, dtype: Dtype | None, device: str | None) -> _Loaded:
    from quiver.retrieval.models.loading import load_model
    from quiver.retrieval.planning import ModelSize, matrix_weights
    from quiver.retrieval.records import ModelCard

    if name in PRESETS:
        if dtype is not None or device is not None:
            raise InputError("--dtype and --device apply only to models; a preset is not loaded")
        config = preset(name)
        width = dim or (config.hidden_size if kind == "dense" else 128)
        cut = length or (min(512, config.max_positions) if kind == "dense" else 180)
        similarity = "cosine" if kind == "dense" else "maxsim"
        card = ModelCard(name, "dense" if kind == "dense" else "colbert", "", width, similarity, 32, cut)  # type: ignore[arg-type]
        weights = matrix_weights(config)
        return _Loaded(ModelSize(name, card, weights), config, None)
    if dim is not None or length is not None:
        raise InputError("--dim and --length apply only to presets; a model has its own")
    model = load_model(name, dtype=dtype, device=device)
    weights = model.encoder.num_parameters
    return _Loaded(ModelSize(name, model.card, weights), model.encoder.config, model)


def _sampled(source: str, given: SourceOptions, loaded: _Loaded, size: int = 512) -> tuple[list[Document], int]:
    from quiver.retrieval.data.source import open_corpus, tokens_of
    from quiver.retrieval.planning import spread_over

    corpus = open_corpus(source, given) if loaded.model is None else open_corpus(source, given, tokens_of(loaded.model))
    count = sum(1 for _ in corpus)
    return spread_over(corpus, count, size), count


def _corpora(
    loaded: _Loaded,
    docs: float | None,
    collection: Collection | None,
    sampled: tuple[str | None, Sequence[Document], int],
    words: float | None,
) -> dict[str, CorpusStatistics]:
    """Corpora to estimate, by name."""
    from quiver.retrieval.planning import TEXTS, from_sample, from_words, text_lengths

    source, texts, count = sampled
    if (docs is None) == (collection is None) and not (source is not None and docs is None and collection is None):
        raise InputError("pass --docs or --preset-collection, or --sample alone to estimate for the sample itself")
    if source is not None and (words is not None or loaded.model is None):
        raise InputError("--sample needs a model with a tokenizer instead of a preset, and excludes --words")
    cut = loaded.size.card.document_length
    if collection is not None:
        return _collections(collection, cut)
    if not math.isfinite(docs or 0) or not math.isfinite(words or 0):
        raise InputError("--docs and --words must be finite numbers")
    documents = count if docs is None else round(docs)
    if source is not None and loaded.model is not None:
        model = loaded.model
        return {
            f"{documents:,} documents": from_sample(documents, texts, lambda each: text_lengths(model, each), use_title=True, source=source)
        }
    mean = words or TEXTS[PASSAGE]
    return {f"{documents:,} documents": from_words(documents, mean, length=cut, source=f"{mean:g} words a document")}


def _collections(collection: Collection, cut: int) -> dict[str, CorpusStatistics]:
    """Published collections, from the document counts of the registry and the words per document of the BEIR paper."""
    from quiver.eval.datasets.catalogue import beir
    from quiver.retrieval.planning import TEXTS, from_words

    counts: dict[str, int] = {}
    for entry in beir():
        name = entry.metadata.group or entry.name
        counts[name] = counts.get(name, 0) + (entry.metadata.documents or 0)
    if collection == "billion":
        return {"a billion passages": from_words(BILLION, TEXTS[PASSAGE], length=cut, source="words of MS MARCO's passages")}
    chosen = [PASSAGE] if collection == "msmarco" else list(counts)
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
        say(f"total cost: {sum(total):,.2f}")
    if first.rates.tokens_per_second is None:
        say("hours are unknown without a rate; pass --measure or --gpu")
    else:
        how = "measured" if first.rates.measured else "estimated, not measured"
        say(f"rate: {first.rates.tokens_per_second:,.0f} tokens/s, {how} ({first.rates.source})")


def _hours(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if value >= 0.1 else f"{value:.4f}"


def _size(value: float) -> str:
    return f"{value / 1e9:,.2f}" if value >= 1e8 else f"{value / 1e9:.4f}"
