"""The GPU benchmark: everything that a GPU runs, in stages, with one time limit, beside other libraries; and its report.

A stage (`quiver.eval.bench.gpu_stages.STAGES`) runs in a child process and gets the time that is left in proportion to its weight. What it
measured is written to ``results.json`` when it is done, so that the same command goes on with the next stage. A stage that failed is
listed with its error and runs again.

Without a GPU the same stages run in a small form on the CPU. Those figures say nothing about GPUs.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic.dataclasses import dataclass

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, write_json
from quiver.encoder.pretraining.task import peak_flops
from quiver.encoder.schema import RECORD, parse_record
from quiver.eval.bench import encoder, training
from quiver.eval.bench.child import Child, ChildError
from quiver.eval.bench.gpu_stages import NO_TIME, ONLY_MODEL, STAGES, partial_file
from quiver.eval.bench.harness import Recording
from quiver.eval.bench.report import (
    REPORT,
    Column,
    backend,
    draw_speed,
    make_report,
    over_rounds,
    rows_table,
    single,
    value_range,
    variant,
)
from quiver.eval.bench.results import OWN, Benchmark, Case, NotRun, Row
from quiver.eval.report.charts import PALETTE, new_figure, style
from quiver.eval.report.formats import Block, Figure, Paragraph, Report, Section, Table, table, write, write_folder
from quiver.eval.results import Provenance, read_versioned
from quiver.retrieval.models.loading import check_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

logger = logging.getLogger(__name__)

SCHEMA = "quiver-benchmark-gpu/1"
"""Name and version of the format: the value of ``schema`` in ``results.json``."""

RESULTS, LOG = "results.json", "stages.log"
"""Files in the output folder, beside the report: the results, and what the stages printed."""

# Time of a stage beyond its share before it is stopped, as a share and in seconds; never beyond the time of the whole benchmark.
_GRACE_SHARE, _GRACE = 0.25, 15.0


@dataclass(frozen=True, config=RECORD)
class Settings:
    """Settings of the GPU benchmark.

    Attributes:
        device: ``cuda``, or ``cpu`` for the small form.
        minutes: Time for all stages of a call.
        seed: Random seed of weights, ids, texts and vectors.
    """

    device: Literal["cuda", "cpu"]
    minutes: float = 8.5
    seed: int = 42


@dataclass(frozen=True, config=RECORD)
class StageResult:
    """What a stage measured.

    Attributes:
        name: A key of `quiver.eval.bench.gpu_stages.STAGES`.
        failure: Why it failed; None if it is done.
        seconds: Time that it took, loading included.
        allowed: Time that it was given, in seconds.
        date: End of the stage: UTC, ISO 8601, to the second.
        cases: Measurements.
        not_run: What was not measured, and why.
        notes: What was shortened.

    A stage that failed has the cases that it had measured before.
    """

    name: str
    failure: str | None
    seconds: float
    allowed: float
    date: str
    cases: tuple[Case, ...]
    not_run: tuple[NotRun, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, config=RECORD)
class Results:
    """The content of ``results.json``.

    Attributes:
        settings: Settings of the last call.
        stages: The stages so far, in the order of `quiver.eval.bench.gpu_stages.STAGES`.
        processor: Name of the GPU or CPU.
        peak_flops: Peak FLOP/s of the GPU in bfloat16 by its data sheet; None if it is not known.
        load_average: See `quiver.eval.bench.results.Benchmark`.
        provenance: Command, versions and machine of the last call.
    """

    settings: Settings
    stages: tuple[StageResult, ...]
    processor: str
    peak_flops: float | None
    load_average: tuple[float, ...]
    provenance: Provenance

    def case(self, name: str) -> Case | None:
        """The case with a name; None if it was not measured."""
        return next((case for stage in self.stages for case in stage.cases if case.name == name), None)

    def benchmark(self) -> Benchmark:
        """The same results as a benchmark of one subject, for reports."""
        failed = [NotRun(f"stage {stage.name}", stage.failure) for stage in self.stages if stage.failure is not None]
        missing = [NotRun(f"stage {name}", "not yet run") for name in STAGES if name not in {stage.name for stage in self.stages}]
        return Benchmark(
            subject="gpu",
            name=self.processor,
            metadata={},
            settings=asdict(self.settings),
            cases=tuple(case for stage in self.stages for case in stage.cases),
            not_run=(*failed, *missing, *(each for stage in self.stages for each in stage.not_run)),
            processor=self.processor,
            load_average=self.load_average,
            provenance=self.provenance,
        )


RunStage: TypeAlias = Callable[[str, Settings, float, float, Path], StageResult]
"""Runs a stage; see `run_in_child`."""


def run_in_child(name: str, settings: Settings, allowed: float, limit: float, out: Path) -> StageResult:
    """Run a stage in a child process.

    Args:
        name: A key of `quiver.eval.bench.gpu_stages.STAGES`.
        settings: Settings of the benchmark.
        allowed: Time that the stage should take, in seconds.
        limit: Time after which the child is killed, in seconds.
        out: Output folder, for models and the log.
    """
    started = time.time()
    arguments = {
        "stage": name,
        "device": settings.device,
        "until": started + allowed,
        "folder": str((out / "work").absolute()),
        "seed": settings.seed,
    }
    # All models are local: nothing may wait for a network. A machine with a GPU may be asked for the small form. Tokenizers and malloc work
    # as in any other process: what they take is part of the time from text to vectors.
    environment = {"HF_HUB_OFFLINE": "1"} | ({} if settings.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})
    failure: str | None = None
    answer: Mapping[str, Any] = {"cases": [], "not_run": [], "notes": []}
    partial = partial_file(out / "work", name)
    partial.unlink(missing_ok=True)
    try:
        with Child(
            "quiver.eval.bench.gpu_stages:open_stage",
            arguments,
            label=name,
            environment=environment,
            log=out / LOG,
            timeout=limit,
        ) as child:
            answer = child.info
    except ChildError as error:
        failure = f"{error} (see {LOG})"
        if partial.is_file():
            answer = read_json(partial)
    partial.unlink(missing_ok=True)
    record = {
        "name": name,
        "failure": failure,
        "seconds": time.time() - started,
        "allowed": allowed,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **answer,
    }
    return parse_record(StageResult, record, source=f"the answer of stage {name}")


def bench_gpu(
    out: Path,
    settings: Settings,
    *,
    stages: Sequence[str] | None = None,
    overwrite: bool = False,
    command: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    run_stage: RunStage = run_in_child,
    clock: Callable[[], float] = time.monotonic,
) -> Results:
    """Run the stages that ``out`` does not hold yet, and write results and report after each.

    Args:
        out: Output folder.
        settings: Settings of the benchmark.
        stages: Names of the stages to run; None for all.
        overwrite: Start over if there are results.
        command: Command line to record.
        say: Receives a line before and after each stage.
        run_stage: Runs a stage.
        clock: Clock in seconds.

    Raises:
        InputError: A stage is unknown, there is no GPU, or ``out`` holds results of other settings, another device or other versions.
    """
    wanted = list(dict.fromkeys(stages or STAGES))
    if unknown := [name for name in wanted if name not in STAGES]:
        raise InputError(f"unknown stage {unknown[0]!r}; choose from {', '.join(STAGES)}")
    check_device(settings.device)
    recording = Recording("gpu", settings.device, settings, command).benchmark(metadata={}, cases=[], not_run=[], device=settings.device)
    results = Results(
        settings,
        (),
        recording.processor,
        peak_flops() if settings.device == "cuda" else None,
        recording.load_average,
        recording.provenance,
    )
    if (out / RESULTS).is_file() and not overwrite:
        results = _continued(results, read_results(out / RESULTS), out)
    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        (out / LOG).unlink(missing_ok=True)
    done = {stage.name for stage in results.stages if stage.failure is None}
    remaining = [name for name in STAGES if name in wanted and name not in done]
    if done:
        say(
            f"{out / RESULTS} holds {', '.join(name for name in STAGES if name in done)}; going on with {', '.join(remaining) or 'nothing'}"
        )
    until = clock() + 60 * settings.minutes
    for number, name in enumerate(remaining):
        weights = [STAGES[each][1] for each in remaining[number:]]
        left = until - clock()
        if left < 1:
            say(f"{name}: no time left; repeat the command to go on")
            break
        allowed = left * weights[0] / sum(weights)
        say(f"{name}: at most {allowed:.0f} s")
        found = run_stage(name, settings, allowed, min(left, allowed * (1 + _GRACE_SHARE) + _GRACE), out)
        others = [stage for stage in results.stages if stage.name != name]
        results = replace(results, stages=tuple(sorted([*others, found], key=lambda stage: list(STAGES).index(stage.name))))
        write_json(out / RESULTS, as_record(results))
        write(report(results), out / REPORT)
        say(f"{name}: {found.failure or 'done'}, {found.seconds:.0f} s")
        for line in (*found.notes, *(f"not run: {each.what}: {each.reason}" for each in found.not_run)):
            say(f"  {line}")
    write_folder(report(results), out)
    return results


def read_results(path: Path) -> Results:
    """Read a ``results.json``.

    Raises:
        InputError: The file is missing, damaged, or of another format or version.
    """
    return parse_record(Results, read_versioned(path, SCHEMA, command="quiver bench gpu --overwrite"), source=str(path))


def _continued(new: Results, old: Results, out: Path) -> Results:
    """The old results under the new provenance.

    Raises:
        InputError: They were measured under other conditions.
    """
    conditions = {
        "device": (old.settings.device, new.settings.device),
        "seed": (old.settings.seed, new.settings.seed),
        "processor": (old.processor, new.processor),
        "versions": (old.provenance.versions, new.provenance.versions),
    }
    for name, (before, now) in conditions.items():
        if before != now:
            changed = _difference(before, now) if isinstance(before, Mapping) and isinstance(now, Mapping) else f"{before}, now {now}"
            raise InputError(f"{out / RESULTS}: other {name} ({changed}); choose another --out, or add --overwrite to start over")
    return replace(new, stages=old.stages)


def _difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name, 'missing')}, now {now.get(name, 'missing')}" for name in names)


# Targets.


@dataclass(frozen=True)
class Target:
    """A figure that the encoder should reach on one H200 in bfloat16.

    Attributes:
        name: What is measured.
        wanted: The figure in words.
        least: Lowest value that meets it; None if ``most`` is given.
        most: Highest value that meets it; None if ``least`` is given.
        spec: Format of a value.
    """

    name: str
    wanted: str
    least: float | None = None
    most: float | None = None
    spec: str = ",.2f"

    def is_met(self, value: float) -> bool:
        """Whether a value meets the target."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


Measure: TypeAlias = Callable[[Results], "float | None"]
"""A figure from the results; None if it was not measured."""


def _speed(results: Results, name: str, which: str = OWN) -> float | None:
    row = _row(results, name, which)
    return None if row is None else row.series["tokens_per_second"].median


def _row(results: Results, name: str, which: str, variant: str | None = None) -> Row | None:
    case = results.case(name)
    rows = () if case is None else case.rows
    return next((row for row in rows if row.backend == which and variant in (None, row.variant)), None)


def _best_other(results: Results, name: str) -> float | None:
    """How many times longer the fastest other library takes; the median over the rounds of the ratio in a round."""
    case = results.case(name)
    ratios = [row.series["time_ratio"].median for row in case.rows if not row.backend.startswith(OWN)] if case is not None else []
    return min(ratios, default=None)


def _quotient(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _largest_ratio(results: Results, length: int) -> float | None:
    """Quiver's largest batch divided by the largest of transformers; None if a search ended early, which gives no limit."""
    case = results.case("base largest batch")
    rows = [row for row in (case.rows if case else ()) if row.values["length"] == length]
    if any(row.values["reason"] == NO_TIME for row in rows):
        return None
    found = {row.backend: float(row.values["documents"] or 0) for row in rows}
    others = [documents for name, documents in found.items() if name != OWN]
    return _quotient(found.get(OWN), max(others, default=None))


def _end_to_end(results: Results, name: str) -> float | None:
    """Speed from text to vectors as a share of the model's own."""
    return _quotient(_speed(results, name), _speed(results, name, ONLY_MODEL))


def _query_p50(results: Results) -> float | None:
    case = results.case("queries")
    own = [float(row.values["p50"] or 0) for row in (case.rows if case else ()) if row.backend.startswith(OWN)]
    return min(own, default=None)


_TOKENS_OF_A_MILLION = 110_000_000


def _maxsim_seconds(results: Results) -> float | None:
    """Seconds for 1,000 queries and 1 million documents of 110 tokens: the measured time, extrapolated by queries and token vectors."""
    case, row = results.case("MaxSim search"), _row(results, "MaxSim search", OWN)
    if case is None or row is None:
        return None
    pairs = float(case.metadata["queries"] or 0) * float(case.metadata["vectors"] or 0)
    return row.series["seconds"].median * 1_000 * _TOKENS_OF_A_MILLION / pairs


TARGETS: Sequence[tuple[Target, Measure]] = (
    (
        Target("base, fixed 512", "1.8 million tokens/s", least=1.8e6, spec=",.0f"),
        lambda results: _speed(results, "base fixed-512"),
    ),
    (
        Target("base, variable 256: share of the speed of fixed 512", "within 3 %", least=0.97),
        lambda results: _quotient(_speed(results, "base variable-256"), _speed(results, "base fixed-512")),
    ),
    (
        Target("base, fixed 8,192: time of transformers' best backend / Quiver's", "at least 2", least=2),
        lambda results: _best_other(results, "base fixed-8192"),
    ),
    (
        Target("base, variable 4,096: time of transformers' best backend / Quiver's", "at least 4", least=4),
        lambda results: _best_other(results, "base variable-4096"),
    ),
    (
        Target("base, largest batch of 512 tokens / transformers'", "at least 2", least=2),
        lambda results: _largest_ratio(results, 512),
    ),
    (
        Target("base, largest batch of 8,192 tokens / transformers'", "at least 2", least=2),
        lambda results: _largest_ratio(results, 8_192),
    ),
    (
        Target("text to vectors / the model alone, mean 256 tokens", "at least 0.85", least=0.85),
        lambda results: _end_to_end(results, "texts variable-256"),
    ),
    (
        Target("text to vectors / the model alone, mean 4,096 tokens", "at least 0.85", least=0.85),
        lambda results: _end_to_end(results, "texts variable-4096"),
    ),
    (Target("MLM step: time of transformers / Quiver's", "at least 2", least=2), lambda results: _best_other(results, "training MLM")),
    (
        Target("MNRL step: time of sentence-transformers / Quiver's", "at least 2", least=2),
        lambda results: _best_other(results, "training MNRL"),
    ),
    (
        Target("ColBERT distillation step: time of PyLate / Quiver's", "at least 2", least=2),
        lambda results: _best_other(results, "training distillation"),
    ),
    (Target("query at batch 1, median", "under 2 ms", most=2), _query_p50),
    (Target("exact MaxSim, 1,000 queries over 1 million documents of 110 tokens, extrapolated", "under 60 s", most=60), _maxsim_seconds),
)
"""The targets on one H200 in bfloat16. An H100 has the same bf16 rate and 0.7 of the memory rate."""


# Report.

_LAST_COLUMNS = (Column("time / quiver's", over_rounds("time_ratio", ".2f")), Column("range", value_range("time_ratio"), numeric=False))

QUERY_COLUMNS = (
    Column("backend", backend, numeric=False),
    Column("p50, ms", single("p50", ",.3f")),
    Column("p95, ms", single("p95", ",.3f")),
    *_LAST_COLUMNS,
)

SEARCH_COLUMNS = (
    Column("backend", backend, numeric=False),
    Column("seconds", over_rounds("seconds", ",.3f")),
    Column("range", value_range("seconds", ",.3f"), numeric=False),
    Column("queries/s", single("queries_per_second", ",.1f")),
)

KERNEL_COLUMNS = (
    Column("kernel", variant, numeric=False),
    Column("share", single("share", ".1%")),
    Column("ms", single("seconds", ",.3f", scale=1000)),
    Column("calls", single("calls", ",.0f")),
)

TEST_COLUMNS = (Column("test", variant, numeric=False), Column("message", single("message"), numeric=False))

_COLUMNS: Mapping[str, Sequence[Column]] = {
    "tests": TEST_COLUMNS,
    "encoder-base": encoder.SPEED_COLUMNS,
    "encoder-large": encoder.SPEED_COLUMNS,
    "texts": encoder.SPEED_COLUMNS,
    "training": training.COLUMNS,
    "queries": QUERY_COLUMNS,
    "search": SEARCH_COLUMNS,
    "profile": KERNEL_COLUMNS,
}
"""Stage -> columns of its cases."""

SMALL_FORM = "This is the small form on a CPU: tiny models and data, to test the benchmark. Its figures say nothing about GPUs."


def report(results: Results) -> Report:
    """Make the report: targets, then the stages, then what was not run and the machine. Charts are left out without matplotlib."""
    cuda = results.settings.device == "cuda"
    dtype = "bfloat16 where the GPU has it, autocast to bfloat16 in training" if cuda else "float32"
    conditions = (
        f"{'' if cuda else SMALL_FORM + ' '}Weights are random; {dtype}. Every backend runs once per round, in reverse order in every other"
        " round; time / quiver's is the median over the rounds of a backend's time divided by Quiver's in the same round. Padding is not"
        " counted as tokens. Token ids come in equal batches for all backends; with texts every library forms its own batches of its"
        " default size. quiver-model is Quiver's model on texts that are tokenized, packed and on the device; quiver-no-graphs is Quiver"
        " without CUDA graphs. Peak memory is what a pass allocates beyond the loaded models."
    )
    sections: list[Block] = [Section("Targets", (_targets(results),))] if cuda else []
    sections += [_section(results, stage) for stage in results.stages if stage.cases or stage.notes]
    made = make_report(results.benchmark(), conditions=conditions, sections=sections, draw=None, alt="")
    return replace(made, title=f"GPU benchmark: {results.processor}" if cuda else "GPU benchmark in its small form on a CPU")


def _targets(results: Results) -> Table:
    rows = []
    for target, measure in TARGETS:
        value = measure(results)
        verdict = "not measured" if value is None else "yes" if target.is_met(value) else "no"
        rows.append([target.name, target.wanted, "" if value is None else format(value, target.spec), verdict])
    caption = "The targets are those for one H200. An H100 has the same bf16 rate and 0.7 of the memory rate."
    return table(["", "target", "measured", "met"], rows, name="Targets", caption=caption)


def _section(results: Results, stage: StageResult) -> Section:
    blocks: list[Block] = [Paragraph(f"Shortened: {'; '.join(stage.notes)}.")] if stage.notes else []
    for case in stage.cases:
        columns = encoder.LARGEST_COLUMNS if case.name.endswith(encoder.LARGEST_BATCH) else _COLUMNS[stage.name]
        inner: list[Block] = [Paragraph(text)] if (text := _described(results, case)) else []
        if case.rows:
            inner.append(rows_table("", columns, case.rows))
        blocks.append(Section(case.title, tuple(inner)))
    if importlib.util.find_spec("matplotlib") is not None:
        blocks += _figures(stage)
    return Section(STAGES[stage.name][0], tuple(blocks), note=f"{stage.seconds:.0f} s")


def _described(results: Results, case: Case) -> str:
    """Sentences about a case whose figures are not in its rows."""
    facts = case.metadata
    if case.name == "MaxSim search" and results.settings.device == "cuda" and (extrapolated := _maxsim_seconds(results)) is not None:
        return f"Extrapolated by queries and token vectors to 1,000 queries over 1 million documents of 110 tokens: {extrapolated:,.1f} s."
    if "flops_per_second" not in facts:
        return ""
    rate = float(facts["flops_per_second"] or 0)
    shares = [f"{_unit(rate)}"]
    product = results.case("matrix product")
    if case is not product and product is not None:
        shares.append(f"{rate / float(product.metadata['flops_per_second'] or 1):.1%} of the rate of the matrix product measured here")
    if results.peak_flops is not None:
        shares.append(f"{rate / results.peak_flops:.1%} of the peak in bfloat16 by the data sheet, {_unit(results.peak_flops)}")
    if case is product:
        return ", ".join(shares) + "."
    busy = "" if facts["busy"] is None else f" Kernels ran for {float(facts['busy'] or 0):.1%} of that time."
    milliseconds = 1000 * float(facts["seconds"] or 0)
    return (
        f"{milliseconds:,.2f} ms without the profiler; {int(facts['kernels'] or 0):,} kernel calls.{busy} By the FLOPs of the products"
        f" and of attention within its windows: {', '.join(shares)}. Shares below are of the kernels' time."
    )


def _unit(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def _figures(stage: StageResult) -> Iterator[Figure]:
    """Charts of a stage: speeds for stages with tokens per second, shares for profiles."""
    title = STAGES[stage.name][0]
    timed = {case.name: case.rows for case in stage.cases if any("tokens_per_second" in row.series for row in case.rows)}
    if timed:
        alt = f"{title}: tokens per second of each backend, and its time relative to Quiver's"
        yield Figure(
            title, lambda: draw_speed(title, {name.replace(" ", "\n"): rows for name, rows in timed.items()}), alt, file=f"{stage.name}.svg"
        )
    profiled = {case.title.partition(",")[0]: case.rows for case in stage.cases if any("share" in row.values for row in case.rows)}
    if profiled:
        alt = f"{title}: share of each kernel in the time of all kernels"
        yield Figure(title, lambda: draw_shares(profiled), alt, file=f"{stage.name}.svg")


def draw_shares(profiled: Mapping[str, Sequence[Row]]) -> Drawing:
    """Draw the share of each kernel, one panel per profile.

    Args:
        profiled: Title -> rows with the value ``share``.
    """
    heights = [len(rows) for rows in profiled.values()]
    with style():
        figure = new_figure(8.0, 0.8 * len(heights) + 0.22 * sum(heights), layout="constrained")
        panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        for position, (axes, (title, rows)) in enumerate(zip(panels, profiled.items(), strict=True)):
            for place, row in enumerate(rows):
                share = float(row.values["share"] or 0)
                axes.barh(place, 100 * share, color=PALETTE[1 + position])
                axes.annotate(f"{share:.1%}", (100 * share, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
            axes.set_yticks(range(len(rows)), [row.variant for row in rows], fontsize=7)
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.margins(x=0.12)
            axes.set_title(title, fontsize=9, loc="left")
            axes.set_xlabel("% of the kernels' time")
        return figure


def as_record(results: Results) -> dict[str, Any]:
    """Convert results to parsed JSON."""
    return {"schema": SCHEMA, **asdict(results)}
