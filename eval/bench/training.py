"""Training benchmark: training steps of Quiver, compared with sentence-transformers, PyLate and transformers on the transformers encoder.

All backends start from the same weights and run the same batches, in turns in one process. The differences between their losses are part
of the result.

Synthetic texts have exactly the drawn number of tokens, counted by the tokenizer of the trained model. Their lengths are uniform, so
padding costs little. MS MARCO's passages are mostly short (55.98 words on average, BEIR, arXiv:2104.08663, Table 1); padding costs more
on them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from quiver.encoder.errors import InputError
from quiver.encoder.progress import Advance, progress_bar
from quiver.encoder.tokenizer import Tokenizer
from quiver.eval.bench.child import Answer, measure_memory
from quiver.eval.bench.encoder_backends import Settings as EncoderSettings
from quiver.eval.bench.encoder_backends import transformers_reason
from quiver.eval.bench.harness import (
    MemoryRun,
    Pass,
    Recording,
    naming_out_of_memory,
    quiet_libraries,
    time_rounds,
    torch_threads,
    with_memory,
)
from quiver.eval.bench.report import (
    PEAK,
    Column,
    backend,
    draw_speed,
    make_report,
    over_rounds,
    rows_table,
    short_name,
    single,
    value_range,
)
from quiver.eval.bench.results import OWN, Benchmark, Case, NotRun, Scalar, Series, with_ratios
from quiver.eval.bench.results import Row as ResultRow
from quiver.eval.bench.training_backends import (
    ENGLISH,
    LIBRARIES,
    LOSSES,
    SCORED,
    Backend,
    InitialModel,
    Row,
    Settings,
    Workload,
    load_backend,
    open_model,
    write_initial_model,
)
from quiver.eval.report.formats import Report, Section
from quiver.retrieval.data.corpus import load_collection
from quiver.retrieval.models.loading import default_device
from quiver.retrieval.training.model import require_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

Texts: TypeAlias = tuple[str, list[str]]
"""A query and its documents."""

Source: TypeAlias = Callable[[Workload, Tokenizer, random.Random], Iterator[Texts]]
"""Yields the texts of rows, without end or as many as there are: (workload, tokenizer, random generator) -> texts."""

# Synthetic texts need at least this number of words of ENGLISH that are single tokens.
_FEWEST_WORDS = 50

WORKLOADS: Mapping[str, Workload] = {
    # Triplets, as in the paper's recipe; the longest document has PyLate's default document length for ColBERT.
    "msmarco": Workload("msmarco", queries=(8, 20), documents=(20, 180), max_length=180, per_row=2, rows=32),
    "long": Workload("long", queries=(8, 20), documents=(1_600, 2_048), max_length=2_048, per_row=1, rows=4),
}
"""Name -> workload."""


def synthetic_source(workload: Workload, tokenizer: Tokenizer, generator: random.Random) -> Iterator[Texts]:
    """Yield synthetic texts of uniform lengths.

    Raises:
        InputError: Too few of the words are single tokens of the tokenizer.
    """
    write = text_writer(tokenizer, generator)
    while True:
        documents = [write(generator.randint(*workload.documents)) for _ in range(workload.per_row)]
        yield write(generator.randint(*workload.queries)), documents


def text_writer(tokenizer: Tokenizer, generator: random.Random) -> Callable[[int], str]:
    """Return a function that makes a text with a given number of tokens, but at least those of one word.

    Raises:
        InputError: Too few words of `ENGLISH` are single tokens of the tokenizer.
    """
    first, *others = ENGLISH.split()
    alone, *pairs = tokenizer.encode([first, *(f"{first} {word}" for word in others)], max_length=64).ids
    words = [word for word, ids in zip(others, pairs, strict=True) if len(ids) == len(alone) + 1]
    if len(words) < _FEWEST_WORDS:
        raise InputError(f"the model's tokenizer has only {len(words)} common English words as single tokens; give texts with --data")

    def write(tokens: int) -> str:
        return " ".join([first, *generator.choices(words, k=max(0, tokens - len(alone)))])

    return write


def texts_of_collection(folder: Path, split: str) -> Source:
    """Return a source of queries with one relevant document each and random others; tokenizers truncate the texts.

    Args:
        folder: A BEIR folder.
        split: Split of the judgements.

    Raises:
        InputError: The folder is not a collection, the split does not exist, or no query has a relevant document.
    """
    collection = load_collection(folder, split)
    relevant = {query: [document for document, grade in judged.items() if grade > 0] for query, judged in collection.qrels.items()}
    queries = [query for query in collection.queries if relevant[query.id]]
    if not queries:
        raise InputError(f"{folder}: no query of split {split!r} has a relevant document")

    def rows(workload: Workload, tokenizer: Tokenizer, generator: random.Random) -> Iterator[Texts]:
        del tokenizer
        contents = {document.id: document.content() for document in collection.documents}
        everything = list(contents)
        for query in generator.sample(queries, len(queries)):
            drawn = generator.sample(everything, min(len(everything), workload.per_row + len(relevant[query.id])))
            others = [document for document in drawn if document not in relevant[query.id]]
            chosen = [generator.choice(relevant[query.id]), *others][: workload.per_row]
            yield query.text, [contents[document] for document in chosen]

    return rows


def make_batches(
    workload: Workload, source: Source, tokenizer: Tokenizer, *, count: int, size: int, scored: bool, seed: int
) -> list[list[Row]]:
    """Make the batches of a case.

    Args:
        workload: Lengths and documents per row.
        source: Source of the texts.
        tokenizer: The model's tokenizer.
        count: Number of batches.
        size: Rows per batch.
        scored: Add a random teacher score for every document.
        seed: Equal seeds give equal batches.

    Raises:
        InputError: The source has too few rows, or a row has too few documents.
    """
    generator = random.Random(seed)
    found = list(islice(source(workload, tokenizer, generator), count * size))
    if len(found) < count * size:
        raise InputError(
            f"{workload.name}: {count} batches of {size} rows need {count * size} queries, found {len(found)}; reduce --rounds"
        )
    rows = []
    for query, documents in found:
        if len(documents) < workload.per_row:
            raise InputError(f"{workload.name}: a row needs {workload.per_row} documents, and the corpus has too few")
        row: Row = {"query": query} | {f"document_{position}": text for position, text in enumerate(documents, start=1)}
        rows.append(row | ({"scores": [generator.uniform(-3, 9) for _ in documents]} if scored else {}))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@dataclass(frozen=True)
class _Plan:
    """A kind of model with a workload, to be measured."""

    kind: str
    workload: Workload
    batches: list[list[Row]]
    backends: list[str]

    @property
    def name(self) -> str:
        return f"{self.workload.name}, {self.kind}"


def bench_training(
    model: str,
    workloads: Sequence[Workload],
    settings: Settings,
    *,
    source: Source = synthetic_source,
    command: str | None = None,
    progress: bool = False,
) -> Benchmark:
    """Time training steps of Quiver and of sentence-transformers, PyLate or transformers.

    Args:
        model: Preset, folder or Hugging Face Hub id of the encoder that all backends start from.
        workloads: The workloads; those with longer texts than the model's positions are left out.
        settings: Settings of the benchmark.
        source: Source of the texts.
        command: Command line to record.
        progress: Show progress bars.

    Returns:
        One case per workload and kind of model, with Quiver as the first row.

    Raises:
        InputError: A library that the losses are from is not installed, a loss does not suit its kind of model, or no workload fits the
            model.
        ValueError: rounds < 1.
    """
    _check_settings(settings)
    recording = Recording("training", model, settings, command)
    with torch_threads(settings.threads), TemporaryDirectory(prefix="quiver-bench-") as folder:
        encoder, tokenizer = open_model(model, seed=settings.seed)
        config, parameters = encoder.config, encoder.num_parameters
        fitting = [workload for workload in workloads if workload.max_length <= config.max_positions]
        not_run = [
            NotRun(workload.name, f"texts of {workload.max_length:,} tokens, the model has {config.max_positions:,} positions")
            for workload in workloads
            if workload not in fitting
        ]
        if not fitting:
            raise InputError(f"{model}: {not_run[0].what} has {not_run[0].reason}; choose another --workload or --model")
        reason = transformers_reason(config, EncoderSettings()) if settings.baselines else None
        if reason is not None:
            not_run += [NotRun(LIBRARIES[kind], reason) for kind in settings.losses]
        compared = settings.baselines and reason is None
        with quiet_libraries():
            initial = write_initial_model(Path(folder), encoder, tokenizer, settings, compared=compared)
        del encoder
        plans = [_plan(kind, workload, tokenizer, settings, source, compared) for workload in fitting for kind in settings.losses]
        with progress_bar("timing", sum(len(plan.backends) for plan in plans) * (settings.rounds + 1), enabled=progress) as advance:
            cases = [_time_case(plan, initial, settings, advance) for plan in plans]
        if settings.memory and default_device() == "cpu":
            cases, failed = with_memory(cases, [_memory_run(plan, initial, settings) for plan in plans], progress=progress)
            not_run += failed
        metadata: Mapping[str, Scalar] = {"family": config.family, "parameters": parameters}
        return recording.benchmark(metadata=metadata, cases=cases, not_run=not_run, device=default_device())


def _check_settings(settings: Settings) -> None:
    if settings.rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {settings.rounds}")
    for kind, loss in settings.losses.items():
        if kind not in LOSSES:
            raise InputError(f"kind must be one of {', '.join(LOSSES)}, got {kind!r}")
        if loss not in LOSSES[kind]:
            raise InputError(f"the loss of a {kind} model must be one of {', '.join(LOSSES[kind])}, got {loss!r}")
        require_extra(kind)


def _plan(kind: str, workload: Workload, tokenizer: Tokenizer, settings: Settings, source: Source, compared: bool) -> _Plan:
    size = settings.batch_size or workload.rows
    scored = settings.losses[kind] in SCORED
    batches = make_batches(workload, source, tokenizer, count=settings.rounds + 1, size=size, scored=scored, seed=settings.seed)
    return _Plan(kind, workload, batches, [OWN, *([LIBRARIES[kind]] if compared else [])])


def _time_case(plan: _Plan, initial: InitialModel, settings: Settings, advance: Advance) -> Case:
    loss = settings.losses[plan.kind]
    with quiet_libraries():
        backends = {name: load_backend(name, plan.kind, plan.workload, settings, initial) for name in plan.backends}
    losses: dict[str, list[float]] = {name: [] for name in backends}
    passes = {name: _pass(name, backend, plan, losses[name]) for name, backend in backends.items()}
    for warm_up in passes.values():
        warm_up()
        advance(1)
    timings = time_rounds(passes, rounds=settings.rounds, seconds=settings.seconds, advance=advance)
    timed = plan.batches[1 : len(losses[OWN])]
    memory: dict[str, Any] = dict.fromkeys(backends)
    if settings.memory and default_device() == "cuda":
        # The allocator counts exactly what a step adds, whatever else is in memory.
        memory = {name: measure_memory(partial(each.step, timed[-1]), on_cuda=True)["above"] for name, each in backends.items()}
    lengths = [backends[OWN].lengths(batch) for batch in timed]
    tokens = [sum(each) for each in lengths]
    rows = []
    for name, timing in timings.items():
        series = {
            "seconds": Series.of(timing.seconds),
            "processor_seconds": Series.of(timing.processor_seconds),
            "tokens_per_second": Series.of([count / each for count, each in zip(tokens, timing.seconds, strict=True)]),
            "tokens": Series.of(tokens),
            "loss": Series.of(losses[name]),
        }
        if name != OWN:
            series["padded_tokens"] = Series.of([backends[name].padded_tokens(batch) for batch in timed])
        difference = max(abs(loss - own) for loss, own in zip(losses[name], losses[OWN], strict=True))
        values = {"max_loss_difference": None if settings.dropout else difference, "memory_above": memory[name]}
        rows.append(ResultRow(name, series, {quantity: value for quantity, value in values.items() if value is not None}))
    padded = [row.series["padded_tokens"].median for row in rows if row.backend != OWN]
    documents = "one document" if plan.workload.per_row == 1 else f"{plan.workload.per_row} documents"
    return Case(
        name=plan.name,
        title=f"{plan.name} ({loss}): {len(timed[0])} rows of {'' if plan.kind == 'mlm' else 'a query and '}{documents},"
        f" {median(tokens):,.0f} tokens per step{f', {padded[0]:,.0f} with padding' if padded else ''}",
        metadata={
            "workload": plan.workload.name,
            "kind": plan.kind,
            "loss": loss,
            "rows": len(timed[0]),
            "documents": plan.workload.per_row,
            "longest": max(map(max, lengths)),
        },
        rows=with_ratios(rows, {"seconds": "time_ratio", "processor_seconds": "processor_ratio"}),
    )


def _pass(name: str, backend: Backend, plan: _Plan, losses: list[float]) -> Pass:
    """A pass that trains on the next batch and appends the loss."""
    remaining = iter(plan.batches)

    def step() -> None:
        with naming_out_of_memory(name, f"{plan.workload.name} in batches of {len(plan.batches[0])}"):
            losses.append(backend.step(next(remaining)))

    return step


def _memory_run(plan: _Plan, initial: InitialModel, settings: Settings) -> MemoryRun:
    common = {
        "encoder": str(initial.encoder),
        "folders": {kind: str(folder) for kind in ("colbert", "mlm") if (folder := getattr(initial, kind)) is not None},
        "kind": plan.kind,
        "workload": asdict(plan.workload),
        "settings": asdict(settings),
    }
    target = "quiver.eval.bench.training:open_training"
    return MemoryRun(target, lambda name: {"backend": name, **common}, {"batches": plan.batches})


def open_training(
    backend: str, encoder: str, folders: dict[str, str], kind: str, workload: dict[str, Any], settings: dict[str, Any]
) -> tuple[Callable[[dict[str, Any]], Answer], Answer]:
    """Target of child processes: measures the memory of training steps.

    Args:
        backend: ``quiver`` or the library of the kind.
        encoder: See `InitialModel`.
        folders: The other fields of `InitialModel`.
        kind: Kind of model.
        workload: The fields of `Workload`.
        settings: The fields of `Settings`.

    Returns:
        The function for requests ``{"batches": [...]}``, and an empty first answer. The first batch is not measured.
    """
    chosen = Settings(**settings)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    initial = InitialModel(Path(encoder), **{name: Path(folder) for name, folder in folders.items()})
    trained = load_backend(backend, kind, Workload(**workload), chosen, initial)

    def reply(request: dict[str, Any]) -> Answer:
        first, *others = request["batches"]
        trained.step(first[:2])  # allocates the optimizer's state, which a run always holds

        def run() -> None:
            for batch in others:
                trained.step(batch)

        return measure_memory(run, on_cuda=default_device() == "cuda")

    return reply, {}


COLUMNS = (
    Column("backend", backend, numeric=False),
    Column("ms/step", over_rounds("seconds", scale=1000)),
    Column("tokens/s", over_rounds("tokens_per_second")),
    Column("time / quiver's", over_rounds("time_ratio", ".2f")),
    Column("range", value_range("time_ratio"), numeric=False),
    Column("CPU time / quiver's", over_rounds("processor_ratio", ".2f")),
    Column("max loss difference", single("max_loss_difference", ".1e")),
    PEAK,
)


def report(benchmark: Benchmark) -> Report:
    """Make the report of a training benchmark."""
    return make_report(
        benchmark,
        conditions=_conditions(benchmark),
        sections=[Section(case.title, (rows_table("", COLUMNS, case.rows),)) for case in benchmark.cases],
        draw=lambda: draw(benchmark),
        alt="Tokens per second of each backend, and its time relative to Quiver's",
    )


def draw(benchmark: Benchmark) -> Drawing:
    """Draw the chart of a training benchmark."""
    work = f"{short_name(benchmark.name)}: training step, {benchmark.settings['dtype']}"
    title = f"{work}\n{benchmark.processor}, threads: {benchmark.provenance.threads}"
    return draw_speed(title, {case.name.replace(", ", "\n"): case.rows for case in benchmark.cases})


def _conditions(benchmark: Benchmark) -> str:
    dropout = "with the checkpoint's dropout, so that losses are not compared" if benchmark.settings["dropout"] else "without dropout"
    return (
        f"{benchmark.metadata['family']}, {float(benchmark.metadata['parameters'] or 0) / 1e6:,.1f} million "
        f"parameters in the encoder, {benchmark.settings['dtype']},"
        f" {dropout}. {benchmark.settings['rounds']} steps of each backend in one process, in turns, every other round in reverse; a first"
        " step is not counted. A step is tokenizing, forward, backward, clipping and update. The baseline is the library's own"
        " model on transformers' encoder (sdpa), with the same initial weights, batches and optimizer. Padding and query expansion are not"
        " counted as tokens. Time / quiver's is the median over the steps of a backend's time divided by Quiver's time of the same step."
        " Peak memory is what the steps take beyond the loaded model and the optimizer's state, in a fresh process."
    )
