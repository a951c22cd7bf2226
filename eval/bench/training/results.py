"""What the training benchmark found, and under which conditions: the fields of its ``results.json``.

Everything is stored as measured, step by step; ratios are of one step to the same step of the other side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quiver.encoder.files import write_json
from quiver.eval.bench.encoder.results import OWN, NotRun, PeakMemory, Spread
from quiver.eval.decoding import encode, read_record
from quiver.eval.provenance import Provenance

SCHEMA = "quiver-training-benchmark/1"
"""Name and version of the format, the value of ``schema`` in the file."""


@dataclass(frozen=True)
class TrainingSettings:
    """How a benchmark is run.

    Attributes:
        losses: Kind of model (``dense``, ``colbert``) -> name of a loss that a recipe may have; the kinds that are measured.
        threads: Threads on a CPU; None for torch's default.
        rounds: Timed steps of each side.
        seed: Of texts, rows, teacher scores and new weights.
        batch_size: Rows of a batch; None leaves it to the workload.
        dropout: Drop out as the checkpoint says. Both sides draw their own, so losses are not compared.
        peers: Measure the other libraries too.
        memory: Measure peak memory too, in a fresh process for each side and workload.
    """

    losses: Mapping[str, str]
    threads: int | None = None
    rounds: int = 5
    seed: int = 42
    batch_size: int | None = None
    dropout: bool = False
    peers: bool = True
    memory: bool = False


@dataclass(frozen=True)
class SideTimes:
    """What one library needed for the steps.

    Attributes:
        name: ``quiver``, ``sentence-transformers`` or ``pylate``.
        seconds: Wall clock of each step: tokenising, forward, backward, clipping, update. A first step is not counted.
        processor_seconds: What all threads of the process worked in each step. Where others use the machine too, their ratio
            says more than that of the wall clock; on a GPU it says nothing.
        tokens_per_second: Over the steps; padding and query expansion are no tokens.
        ratios: Its seconds divided by Quiver's, step by step: 2 is twice as slow as Quiver.
        ratio: Their spread.
        processor_ratio: The spread of the same ratios of processor seconds.
        losses: Of each step, the one that is not timed first.
        max_loss_difference: The largest difference from Quiver's loss of the same step; None with dropout.
        memory: Its peak memory; None where it was not measured.
    """

    name: str
    seconds: tuple[float, ...]
    processor_seconds: tuple[float, ...]
    tokens_per_second: Spread
    ratios: tuple[float, ...]
    ratio: Spread
    processor_ratio: Spread
    losses: tuple[float, ...]
    max_loss_difference: float | None
    memory: PeakMemory | None


@dataclass(frozen=True)
class WorkloadTimes:
    """One kind of model on one workload.

    Attributes:
        workload: Its name.
        kind: ``dense`` or ``colbert``.
        loss: As a recipe names it.
        rows: Rows of a batch.
        documents: Documents of a row.
        tokens: Tokens of each timed step: those of all texts after truncation, special tokens, prompts and prefixes included.
        padded: Places of each timed step where every column of a batch is padded to one length, as the other side does it; None
            without one.
        longest: Tokens of the longest text.
        sides: Quiver first.
    """

    workload: str
    kind: str
    loss: str
    rows: int
    documents: int
    tokens: tuple[int, ...]
    padded: tuple[int, ...] | None
    longest: int
    sides: tuple[SideTimes, ...]


@dataclass(frozen=True)
class TrainingBenchmark:
    """A run of ``quiver bench train``.

    Attributes:
        model: Preset, folder or hub id.
        family: Its architecture's family.
        parameters: Weights of the encoder.
        settings: How it was run.
        workloads: What was measured.
        not_run: Libraries, workloads and children that were left out.
        processor: The CPU's or GPU's name.
        load_average: Running processes over the last 1, 5 and 15 minutes when the benchmark began; empty where the system
            does not tell.
        provenance: Command, versions, machine.
    """

    model: str
    family: str
    parameters: int
    settings: TrainingSettings
    workloads: tuple[WorkloadTimes, ...]
    not_run: tuple[NotRun, ...]
    processor: str
    load_average: tuple[float, ...]
    provenance: Provenance


@dataclass
class Steps:
    """What is taken down of a side while it trains.

    Attributes:
        losses: Of each step, one more than are timed.
        processor_seconds: Of each step, likewise.
        seconds: Wall clock of each timed step.
    """

    losses: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    seconds: Sequence[float] = ()


def side_times(steps: Mapping[str, Steps], tokens: Sequence[int], *, comparable: bool) -> tuple[SideTimes, ...]:
    """Put together what was timed of each side.

    Args:
        steps: Of each side; `quiver.eval.bench.encoder.results.OWN` is among them.
        tokens: Of each timed step.
        comparable: The losses are to be compared.

    Returns:
        One a side, in the order of ``steps``, without memory.
    """
    own = steps[OWN]
    sides = []
    for name, each in steps.items():
        ratios = _ratios(each.seconds, own.seconds)
        apart = max(abs(loss - quiver) for loss, quiver in zip(each.losses, own.losses, strict=True))
        sides.append(
            SideTimes(
                name=name,
                seconds=tuple(each.seconds),
                processor_seconds=tuple(each.processor_seconds[1:]),
                tokens_per_second=Spread.of([count / seconds for count, seconds in zip(tokens, each.seconds, strict=True)]),
                ratios=ratios,
                ratio=Spread.of(ratios),
                processor_ratio=Spread.of(_ratios(each.processor_seconds[1:], own.processor_seconds[1:])),
                losses=tuple(each.losses),
                max_loss_difference=apart if comparable else None,
                memory=None,
            )
        )
    return tuple(sides)


def _ratios(seconds: Sequence[float], own: Sequence[float]) -> tuple[float, ...]:
    return tuple(each / quiver for each, quiver in zip(seconds, own, strict=True))


def with_memory(times: WorkloadTimes, memory: Mapping[str, PeakMemory]) -> WorkloadTimes:
    """The same workload with the memory of the sides that were measured."""
    return replace(times, sides=tuple(replace(each, memory=memory.get(each.name)) for each in times.sides))


def to_json(benchmark: TrainingBenchmark) -> dict[str, object]:
    """A benchmark as parsed JSON."""
    return encode(benchmark, SCHEMA)


def write_training_benchmark(benchmark: TrainingBenchmark, path: Path) -> None:
    """Write a benchmark as JSON, whole or not at all."""
    write_json(path, to_json(benchmark))


def read_training_benchmark(path: Path) -> TrainingBenchmark:
    """Read what `write_training_benchmark` wrote.

    Raises:
        InputError: The file is missing, damaged, or of another program or version.
    """
    return read_record(TrainingBenchmark, path, schema=SCHEMA, command="quiver bench train")
