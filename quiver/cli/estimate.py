"""``quiver estimate``: time, disk, memory and cost of an index before it is built; how well the sizes of a model fit GPUs."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import typer

from quiver.cli import options
from quiver.cli.options import command, group_with_default, help_alone, option, print_json, print_table, say
from quiver.encoder.errors import InputError
from quiver.encoder.presets import PRESETS, preset
from quiver.retrieval.options import Dtype, SourceOptions, parse_size

if TYPE_CHECKING:
    from quiver.retrieval.models.biencoder import BiEncoder
    from quiver.retrieval.models.colbert import ColBERT
    from quiver.retrieval.planning import CorpusStatistics
    from quiver.retrieval.records import Document, ModelCard

Collection: TypeAlias = Literal["msmarco", "beir", "billion"]

PASSAGE = "msmarco"

app = typer.Typer(
    cls=group_with_default("index"),
    invoke_without_command=True,
    callback=help_alone,
    help="Estimate an index before it is built, or how well the sizes of a model fit GPUs. Without a command: quiver estimate index.",
    epilog="Examples: quiver estimate --docs 8.8e6 --model MODEL; quiver estimate shape --width 768 --heads 12 --mlp 1152 --gpu h100",
)


@app.command("index")
@command
def estimate(
    *,
    model: str = option(..., f"Folder or hub id of the model, or a preset: {', '.join(PRESETS)}.", "-m"),
    docs: float | None = option(None, "Number of documents, such as 8.8e6.", min=1),
    collection: Collection | None = option(
        None, "MS MARCO passages, the fifteen BEIR collections, or a billion passages.", "--preset-collection"
    ),
    sample: str | None = option(None, "Corpus with typical texts, to count tokens and bytes per document."),
    given: SourceOptions,
    words: float | None = option(None, "Mean number of words per document. Default: that of MS MARCO passages.", min=1),
    kind: Literal["dense", "colbert"] = option("dense", "Model of a preset: dense (one vector per text) or colbert (one per token)."),
    dim: int | None = option(None, "Vector width, for presets. Default: the encoder's, or 128 for ColBERT.", min=1),
    length: int | None = option(None, "Longest document in tokens, for presets. Default: 512, or 180 for ColBERT.", min=3),
    measure: bool = option(False, "Measure the rates of this machine on --sample."),
    seconds: float = option(10.0, "Duration of --measure, in seconds.", min=0.1),
    dtype: Dtype | None = options.MODEL_DTYPE,
    device: str | None = options.DEVICE,
    gpu: Literal["h200", "h100", "a100", "l40s", "l4", "rtx4090"] | None = option(
        None, "GPU to estimate the encoding rate of, from its arithmetic throughput; less accurate than measured rates."
    ),
    gpus: int = option(1, "Number of devices that encode in parallel.", min=1),
    price_per_gpu_hour: float | None = option(None, "Price of one encoding device per hour, in any currency.", min=0),
    engine: str = options.ENGINE,
    text: bool = options.STORE_TEXT,
    memory: int = options.MEMORY,
    search_memory: int = option("64GB", "Memory of a machine that searches, such as 64GB.", parse=parse_size),
    formulas: bool = option(False, "Print the formulas."),
    output: options.Output,
) -> None:
    """Estimate tokens, hours, disk, memory, shards and cost of an index.

    Examples: quiver estimate --docs 8.8e6 --model MODEL --sample data/scifact --measure

    quiver estimate --model MODEL --sample products.csv --title name --text description

    quiver estimate --preset-collection msmarco --model modernbert-base --kind colbert --gpu h100 --price-per-gpu-hour 2.5 --formulas
    """
    from quiver.retrieval.index.engines import parse_engine
    from quiver.retrieval.models.loading import load_model
    from quiver.retrieval.planning import FORMULAS, Machine, estimate_index, estimate_rate, index_size, matrix_weights, measure_rate
    from quiver.retrieval.records import ModelCard

    loaded: BiEncoder | ColBERT | None = None
    if model in PRESETS:
        if dtype is not None or device is not None:
            raise InputError("--dtype and --device apply only to models; a preset is not loaded")
        config = preset(model)
        if kind == "dense":
            card = ModelCard(model, kind, "", dim or config.hidden_size, "cosine", 32, length or min(512, config.max_positions))
        else:
            card = ModelCard(model, kind, "", dim or 128, "maxsim", 32, length or 180)
        weights = matrix_weights(config)
    else:
        if dim is not None or length is not None:
            raise InputError("--dim and --length apply only to presets; a model has its own")
        loaded = load_model(model, dtype=dtype, device=device)
        config, card, weights = loaded.encoder.config, loaded.card, loaded.encoder.num_parameters
    if sample is None and (measure or given != SourceOptions()):
        wants = "--measure needs real texts" if measure else "--id, --text and the other options of a source need one"
        raise InputError(f"{wants}; pass --sample CORPUS")
    texts, count = _sampled(sample, given, loaded) if sample is not None and loaded is not None else ([], 0)
    corpora = _corpora(card, docs, collection, words, sample, texts, count, loaded)
    spec, machine = parse_engine(engine), Machine(search_memory, memory, gpus, price_per_gpu_hour)
    rate = measure_rate(loaded, texts, seconds=seconds) if measure and loaded is not None else None
    plans: dict[str, dict[str, Any]] = {}
    for name, corpus in corpora.items():
        size = index_size(corpus, card, name=spec.name, settings=spec.settings, texts=text)
        speed = estimate_rate(config, gpu, tokens=corpus.tokens) if rate is None and gpu is not None else rate
        figures = estimate_index(corpus, size, machine, dim=card.dim, weights=weights, rate=speed)
        rates = {"tokens_per_second": speed, "measured": measure}
        plans[name] = {"corpus": asdict(corpus), "index": asdict(size), "rates": rates, **figures}
    if output.json:
        print_json({"plans": plans, "formulas": FORMULAS})
        return
    _print(f"{model}: {card.kind}, width {card.dim}", plans)
    if formulas:
        print_table("Formulas", ("figure", "formula"), list(FORMULAS.items()))


@app.command("shape")
@command
def estimate_shape(
    *,
    width: int = option(..., "Width of the hidden states.", min=1),
    heads: int = option(..., "Number of attention heads.", min=1),
    mlp: int = option(..., "Width of the gated MLP: 1152 for modernbert-base, whose first matrix has 2 x 1152 outputs.", min=1),
    gpu: Literal["t4", "a10", "l4", "rtx3090", "rtx4090", "a100", "h100"] | None = option(None, "GPU to estimate for. Default: all."),
    output: options.Output,
) -> None:
    """Show how full the weight matrices of a layer make the tiles of tensor cores and the multiprocessors of GPUs.

    Tiles have 128 x 256 weights. A multiprocessor computes one at a time, so the last wave occupies only some multiprocessors.

    Example: quiver estimate shape --width 768 --heads 12 --mlp 1152 --gpu h100
    """
    from quiver.retrieval.planning import MULTIPROCESSORS, matrix_shapes

    if width % heads:
        raise InputError(f"--width {width} is not divisible by --heads {heads}")
    gpus, shapes = MULTIPROCESSORS if gpu is None else (gpu,), matrix_shapes(width, mlp)
    if output.json:
        print_json({"head_width": width // heads, "matrices": list(map(asdict, shapes))})
        return
    rows = []
    for each in shapes:
        counts = (f"{each.inputs:,} x {each.outputs:,}", "yes" if each.aligned else "no", f"{each.tiles:,}", f"{each.tile_fill:.1%}")
        rows.append((each.name, *counts, *(f"{each.last_wave[name]:.0%}" for name in gpus)))
    header = ("matrix", "shape", "x 64", "tiles", "tiles full", *(f"{name} ({MULTIPROCESSORS[name]})" for name in gpus))
    print_table("Tensor cores: sides that are multiples of 64, tiles of 128 x 256; share of multiprocessors in the last wave", header, rows)
    say(f"head width: {width // heads}, {'' if width // heads % 64 == 0 else 'not '}a multiple of 64")


def _sampled(source: str, given: SourceOptions, model: BiEncoder | ColBERT, size: int = 512) -> tuple[list[Document], int]:
    """Documents chosen evenly from a corpus, and the number of all of them."""
    from quiver.retrieval.data.source import open_corpus, tokens_of

    corpus = open_corpus(source, given, tokens_of(model))
    count = sum(1 for _ in corpus)
    step = max(1, count // size)
    return list(islice(corpus, 0, step * size, step)), count


def _corpora(
    card: ModelCard,
    docs: float | None,
    collection: Collection | None,
    words: float | None,
    sample: str | None,
    texts: list[Document],
    count: int,
    model: BiEncoder | ColBERT | None,
) -> dict[str, CorpusStatistics]:
    """Corpora to estimate, by name; published ones by the counts of the registry and the words per document of the BEIR paper."""
    from quiver.eval.datasets.catalogue import beir
    from quiver.retrieval.planning import TEXTS, statistics_of_sample, statistics_of_words

    if (docs is not None) + (collection is not None) != 1 and not (sample is not None and docs is None):
        raise InputError("pass --docs or --preset-collection, or --sample alone to estimate for the sample itself")
    if sample is not None and (words is not None or model is None):
        raise InputError("--sample needs a model with a tokenizer instead of a preset, and excludes --words")
    cut = card.document_length
    if collection == "billion":
        source = "words of MS MARCO's passages"
        return {"a billion passages": statistics_of_words(1_000_000_000, TEXTS[PASSAGE], length=cut, source=source)}
    if collection is not None:
        counts: dict[str, int] = {}
        for entry in beir():
            name = entry.metadata.group or entry.name
            counts[name] = counts.get(name, 0) + (entry.metadata.documents or 0)
        chosen = [PASSAGE] if collection == "msmarco" else list(counts)
        return {name: statistics_of_words(counts[name], TEXTS[name], length=cut, source="BEIR, Table 1") for name in chosen}
    documents = count if docs is None else round(docs)
    if sample is not None and model is not None:
        return {f"{documents:,} documents": statistics_of_sample(documents, texts, model, source=sample)}
    mean = words or TEXTS[PASSAGE]
    return {f"{documents:,} documents": statistics_of_words(documents, mean, length=cut, source=f"{mean:g} words a document")}


def _print(title: str, plans: dict[str, dict[str, Any]]) -> None:
    rows = []
    for name, each in plans.items():
        hours, cost, index = each["encoding_hours"], each["cost"], each["index"]
        encode = "-" if hours is None else f"{hours:,.2f}" if hours >= 0.1 else f"{hours:.4f}"
        sizes = (index["disk"], each["build_memory"], each["search_memory"])
        price = "-" if cost is None else f"{cost:,.2f}"
        counts = (f"{each['corpus']['documents']:,}", f"{each['tokens'] / 1e6:,.1f}", encode)
        gigabytes = (f"{size / 1e9:,.2f}" if size >= 1e8 else f"{size / 1e9:.4f}" for size in sizes)
        rows.append((name, index["engine"], *counts, *gigabytes, f"{each['shards']:,}", price))
    header = ("", "engine", "documents", "M tokens", "encode (h)", "disk (GB)", "build (GB)", "search (GB)", "shards", "cost")
    print_table(title, header, rows)
    costs = [each["cost"] for each in plans.values() if each["cost"] is not None]
    if len(plans) > 1 and len(costs) == len(plans):
        say(f"total cost: {sum(costs):,.2f}")
    rates = next(iter(plans.values()))["rates"]
    if rates["tokens_per_second"] is None:
        say("hours are unknown without a rate; pass --measure or --gpu")
    else:
        say(f"rate: {rates['tokens_per_second']:,.0f} tokens/s, {'measured' if rates['measured'] else 'estimated, not measured'}")
