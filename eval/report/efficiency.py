"""A run of ``quiver bench encoder`` as Markdown, with the paper's figures beside it.

The report is a function of the results alone and adds no number that is not in them, except the paper's, which are marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from quiver.encoder.files import write_text
from quiver.eval.bench.encoder.results import EncoderBenchmark, LibraryTimes, SetTimes, Spread
from quiver.eval.bench.index.results import IndexBenchmark
from quiver.eval.bench.training.results import TrainingBenchmark
from quiver.eval.published import EFFICIENCY_SETS, EFFICIENCY_SOURCE, ENCODER_EFFICIENCY, TABLE_10, EncoderEfficiency
from quiver.eval.report.tables import escape, table

MEBIBYTE = 2**20

LARGEST_LENGTHS = (512, 8_192)
"""Tokens of a document in the paper's search for the largest batch."""


def write_efficiency_report(benchmark: EncoderBenchmark, path: Path) -> None:
    """Write the report; one already there is replaced."""
    write_text(path, render_efficiency(benchmark))


def render_efficiency(benchmark: EncoderBenchmark) -> str:
    """The report as Markdown."""
    parts = [f"# Encoder benchmark: {escape(benchmark.model)}", _conditions(benchmark)]
    for times in benchmark.sets:
        parts += [f"## {escape(set_title(times))}", table(*set_table(times))]
    if benchmark.largest_batches:
        parts += ["## Largest batch", _largest_explained(benchmark), table(*largest_table(benchmark))]
    if has_paper_sets(benchmark):
        parts += _beside_the_paper(benchmark)
    if benchmark.not_run:
        parts += ["## Not run", table(["", "Why"], [[each.what, each.reason] for each in benchmark.not_run])]
    return "\n\n".join([*parts, "## Where", *where(benchmark)]) + "\n"


def set_title(times: SetTimes) -> str:
    """A set in one line."""
    spread = f"{times.shortest:,}" if times.shortest == times.longest else f"{times.shortest:,} to {times.longest:,}"
    batches = f", batches of {times.batch_documents:,}" if times.batch_documents else ""
    return f"{times.name}: {times.documents:,} documents of {spread} tokens, {times.tokens:,} in all{batches}"


def set_table(times: SetTimes) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a set: throughput is the median round's, with mean and standard deviation behind it."""
    header = ["", "tokens/s", "mean ± sd", "documents/s", "time / Quiver's", "over the rounds", "max difference"]
    trained = any(each.gradient_difference is not None for each in times.libraries)
    measured = any(each.memory is not None for each in times.libraries)
    header += ["gradient difference"] * trained + ["peak MiB"] * measured
    return header, [_set_row(each, times, trained=trained, measured=measured) for each in times.libraries]


def _set_row(library: LibraryTimes, times: SetTimes, *, trained: bool, measured: bool) -> list[str]:
    speed = library.tokens_per_second
    row = [
        library.name,
        f"{speed.median:,.0f}",
        f"{speed.mean:,.0f} ± {speed.deviation:,.0f}",
        f"{speed.median * times.documents / times.tokens:,.1f}",
        f"{library.ratio.median:.2f}",
        f"{library.ratio.lowest:.2f} to {library.ratio.highest:.2f}",
        f"{library.max_difference:.1e}",
    ]
    if trained:
        row.append("" if library.gradient_difference is None else f"{library.gradient_difference:.1e}")
    if measured:
        row.append("" if library.memory is None else f"{library.memory.above / MEBIBYTE:,.0f}")
    return row


def largest_table(benchmark: EncoderBenchmark) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the largest batches."""
    return ["", "tokens", "largest batch", "failed at", "why"], [
        [each.library, f"{each.length:,}", f"{each.documents:,}", "" if each.failed is None else f"{each.failed:,}", each.reason or ""]
        for each in benchmark.largest_batches
    ]


def has_paper_sets(benchmark: EncoderBenchmark) -> bool:
    """Whether anything was measured that the paper measured too; it has no training steps."""
    return not benchmark.settings.train and any(times.name in EFFICIENCY_SETS for times in benchmark.sets)


def paper_table(benchmark: EncoderBenchmark, published: Sequence[EncoderEfficiency]) -> tuple[list[str], list[list[str]]]:
    """Table 2's columns: largest batch and thousands of tokens a second, ours above the paper's; a dash is what there is not."""
    header = ["", "BS 512", "fixed 512", "variable 256", "BS 8,192", "fixed 8,192", "variable 4,096"]
    batches = {(each.library, each.length): each.documents for each in benchmark.largest_batches}
    rows = []
    for name in _libraries(benchmark):
        found = {length: batches[name, length] for length in LARGEST_LENGTHS if (name, length) in batches}
        rows.append(
            _paper_row(f"{name}, this run", found, {key: each.tokens_per_second.mean / 1000 for key, each in _times(benchmark, name)})
        )
    rows += [_paper_row(f"{each.model} {each.size}, paper", each.largest_batch, each.kilotokens) for each in published]
    return header, rows


def _paper_row(label: str, batches: Mapping[int, int], kilotokens: Mapping[str, float]) -> list[str]:
    short, long = (f"{batches[length]:,}" if length in batches else "-" for length in LARGEST_LENGTHS)
    speeds = [f"{kilotokens[name]:,.1f}" if name in kilotokens else "-" for name in EFFICIENCY_SETS]
    return [label, short, *speeds[:2], long, *speeds[2:]]


def _libraries(benchmark: EncoderBenchmark) -> list[str]:
    return list(dict.fromkeys(each.name for times in benchmark.sets for each in times.libraries))


def _times(benchmark: EncoderBenchmark, library: str) -> Iterator[tuple[str, LibraryTimes]]:
    for times in benchmark.sets:
        yield from ((times.name, each) for each in times.libraries if each.name == library)


def _beside_the_paper(benchmark: EncoderBenchmark) -> Iterator[str]:
    yield "## Beside the paper"
    yield f"The paper's figures are {EFFICIENCY_SOURCE}. Ours are from the processor named below: compare rows of one source, not across."
    yield "Table 2: largest batch (BS) and thousands of tokens a second, means."
    yield table(*paper_table(benchmark, ENCODER_EFFICIENCY))
    yield "Table 11: seconds for a whole set of 8,192 documents; ours are scaled up to its number of tokens."
    yield table(["", *EFFICIENCY_SETS], [*_own_runtimes(benchmark), *_published_runtimes()])


def _own_runtimes(benchmark: EncoderBenchmark) -> Iterator[list[str]]:
    tokens = {times.name: times.tokens for times in benchmark.sets}
    for name in _libraries(benchmark):
        cells = dict.fromkeys(EFFICIENCY_SETS, "-")
        for key, each in _times(benchmark, name):
            if key in cells:
                scale = TABLE_10[key].tokens / tokens[key]
                cells[key] = _seconds(each, scale)
        yield [f"{name}, this run", *cells.values()]


def _seconds(library: LibraryTimes, scale: float) -> str:
    spread = Spread.of([scale * each for each in library.seconds])
    return f"{spread.mean:,.1f} ± {spread.deviation:,.2f}"


def _published_runtimes() -> Iterator[list[str]]:
    for row in ENCODER_EFFICIENCY:
        cells = [row.runtimes.get(name) for name in EFFICIENCY_SETS]
        yield [
            f"{row.model} {row.size}, paper",
            *("-" if cell is None else f"{cell.seconds:,.1f} ± {cell.deviation:.2f}" for cell in cells),
        ]


def _conditions(benchmark: EncoderBenchmark) -> str:
    settings = benchmark.settings
    work = "forward and backward through a loss over all states" if settings.train else "inference"
    return (
        f"{escape(benchmark.family)}, {benchmark.parameters / 1e6:,.1f} million parameters, {settings.dtype}, {work}, on {settings.device}."
        f" {settings.rounds} rounds in one process, every library once a round in turn, every other round backwards; a first round is not"
        " counted. Padding is no token. Time / Quiver's is the median over the rounds of a round's seconds divided by Quiver's. Peak memory"
        " is what a run takes beyond the loaded model, in a fresh process."
    )


def _largest_explained(benchmark: EncoderBenchmark) -> str:
    budget = benchmark.settings.memory_gib
    within = "the GPU" if budget is None else f"{budget:g} GiB"
    return f"Documents of one batch that fit into {within}, weights included, by bisection in fresh processes."


def where(benchmark: EncoderBenchmark | TrainingBenchmark | IndexBenchmark) -> Iterator[str]:
    """Machine, versions and command as Markdown."""
    provenance = benchmark.provenance
    facts = {
        "Processor": benchmark.processor,
        "Platform": provenance.platform,
        "Threads": str(provenance.threads),
        "Load before": ", ".join(f"{each:.2f}" for each in benchmark.load_average),
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(provenance.versions.items())),
        "Date": provenance.date,
    }
    yield table(["", ""], [[name, fact] for name, fact in facts.items() if fact])
    if provenance.command is not None:
        yield "    " + provenance.command.replace("\n", "\n    ")
