"""What the encoder benchmark found, and under which conditions: the fields of its ``results.json``.

Everything is stored as measured; ratios are kept round by round, because their spread says how far to trust their median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev

from quiver.encoder.files import write_json
from quiver.eval.decoding import encode, read_record
from quiver.eval.provenance import Provenance

SCHEMA = "quiver-encoder-benchmark/1"
"""Name and version of the format, the value of ``schema`` in the file."""

OWN = "quiver"
"""The library that all others are compared with."""


@dataclass(frozen=True)
class Settings:
    """How a benchmark is run.

    Attributes:
        device: Where all libraries run: ``cpu`` or ``cuda``.
        dtype: Of the weights: ``float32``, ``bfloat16`` or ``float16``.
        threads: Threads on a CPU; None for torch's default.
        rounds: Timed passes over a set by each library.
        seed: Of random weights and token ids.
        train: Forward and backward through a loss over all states, instead of inference.
        batch_size: Documents of a batch; None leaves it to ``batch_tokens``.
        batch_tokens: Tokens of an average batch; None for the device's default.
        memory: Measure peak memory too, in a fresh process for each library and set.
        largest_batch: Search for the largest batch of fixed length that fits, too.
        memory_gib: What the largest batch has to fit into; None for all of the GPU.
    """

    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None
    rounds: int = 10
    seed: int = 42
    train: bool = False
    batch_size: int | None = None
    batch_tokens: int | None = None
    memory: bool = False
    largest_batch: bool = False
    memory_gib: float | None = None


@dataclass(frozen=True)
class Spread:
    """Values of the rounds in short.

    Attributes:
        median: Their median.
        mean: Their mean.
        deviation: Their standard deviation; 0 for a single round.
        lowest: The lowest.
        highest: The highest.
    """

    median: float
    mean: float
    deviation: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one or more values."""
        return cls(median(values), fmean(values), stdev(values) if len(values) > 1 else 0.0, min(values), max(values))


@dataclass(frozen=True)
class PeakMemory:
    """Memory of a fresh process that runs a set once.

    Attributes:
        before: Bytes it holds with the model loaded and warm: its resident set (libraries and weights) on a CPU, what torch has
            allocated on CUDA.
        above: Bytes more at the peak of the run: what the activations take.
        reserved: Bytes that torch had taken from the GPU at the peak, fragments among them; None on a CPU.
    """

    before: int
    above: int
    reserved: int | None


@dataclass(frozen=True)
class LibraryTimes:
    """What one library needed for a set.

    Attributes:
        name: ``quiver``, a variant of it, or a peer.
        seconds: Wall clock of each round; loading and a first round to warm up are not counted.
        tokens_per_second: Over the rounds; padding is no token.
        ratios: Its seconds divided by Quiver's, round by round: 2 is twice as slow as Quiver.
        ratio: Their spread.
        max_difference: Largest absolute difference of its output (hidden states, or vectors of texts) from Quiver's.
        gradient_difference: In training, the largest difference of the embedding's gradient from Quiver's, as a share of the
            largest gradient; None otherwise.
        memory: Its peak memory; None where it was not measured.
    """

    name: str
    seconds: tuple[float, ...]
    tokens_per_second: Spread
    ratios: tuple[float, ...]
    ratio: Spread
    max_difference: float
    gradient_difference: float | None
    memory: PeakMemory | None


@dataclass(frozen=True)
class SetTimes:
    """A set of documents and what each library needed for it.

    Attributes:
        name: The set, or the file the texts came from.
        documents: How many.
        tokens: Tokens in all, special tokens included, after truncation.
        shortest: Tokens of the shortest document.
        longest: Tokens of the longest document.
        batch_documents: Documents of a batch, the same for every library; None where each formed its own batches (texts).
        libraries: Quiver first, then variants and peers in the order given.
    """

    name: str
    documents: int
    tokens: int
    shortest: int
    longest: int
    batch_documents: int | None
    libraries: tuple[LibraryTimes, ...]


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch of documents of one length that a library gets through.

    Attributes:
        library: Which.
        length: Tokens of each document.
        documents: The largest batch that was seen to fit; 0 where a single document does not.
        failed: The smallest that was seen not to fit; None where the search ended before one was found.
        reason: Why that one does not fit: ``out of memory``, ``over the budget`` or ``killed by signal 9``.
    """

    library: str
    length: int
    documents: int
    failed: int | None
    reason: str | None


@dataclass(frozen=True)
class NotRun:
    """What was left out, since a table with a gap has to say why.

    Attributes:
        what: A library or a set.
        reason: Not installed, not supported, or how it failed.
    """

    what: str
    reason: str


@dataclass(frozen=True)
class EncoderBenchmark:
    """A run of ``quiver bench encoder``.

    Attributes:
        model: Preset, folder or hub id.
        family: Its architecture's family.
        parameters: Weights of the encoder.
        settings: How it was run.
        sets: What was measured.
        largest_batches: Where they were asked for.
        not_run: Libraries and sets that were left out.
        processor: The CPU's or GPU's name.
        load_average: Running processes over the last 1, 5 and 15 minutes when the benchmark began; empty where the system
            does not tell.
        provenance: Command, versions, machine.
    """

    model: str
    family: str
    parameters: int
    settings: Settings
    sets: tuple[SetTimes, ...]
    largest_batches: tuple[LargestBatch, ...]
    not_run: tuple[NotRun, ...]
    processor: str
    load_average: tuple[float, ...]
    provenance: Provenance


def library_times(
    seconds: Mapping[str, tuple[float, ...]], tokens: int, *, differences: Mapping[str, float], gradients: Mapping[str, float] | None
) -> tuple[LibraryTimes, ...]:
    """Put together what was timed of each library.

    Args:
        seconds: Library -> seconds of each round; `OWN` is among them.
        tokens: Tokens of a round.
        differences: Library -> largest difference of its output.
        gradients: Library -> largest difference of its gradient; None in inference.

    Returns:
        One a library, in the order of ``seconds``, without memory.
    """
    own = seconds[OWN]
    ratios = {name: tuple(each / quiver for each, quiver in zip(rounds, own, strict=True)) for name, rounds in seconds.items()}
    return tuple(
        LibraryTimes(
            name=name,
            seconds=rounds,
            tokens_per_second=Spread.of([tokens / each for each in rounds]),
            ratios=ratios[name],
            ratio=Spread.of(ratios[name]),
            max_difference=differences[name],
            gradient_difference=None if gradients is None else gradients[name],
            memory=None,
        )
        for name, rounds in seconds.items()
    )


def with_memory(times: SetTimes, memory: Mapping[str, PeakMemory]) -> SetTimes:
    """The same set with the memory of the libraries that were measured."""
    return replace(times, libraries=tuple(replace(each, memory=memory.get(each.name)) for each in times.libraries))


def to_json(benchmark: EncoderBenchmark) -> dict[str, object]:
    """A benchmark as parsed JSON."""
    return encode(benchmark, SCHEMA)


def write_benchmark(benchmark: EncoderBenchmark, path: Path) -> None:
    """Write a benchmark as JSON, whole or not at all."""
    write_json(path, to_json(benchmark))


def read_benchmark(path: Path) -> EncoderBenchmark:
    """Read what `write_benchmark` wrote.

    Raises:
        InputError: The file is missing, damaged, or of another program or version.
    """
    return read_record(EncoderBenchmark, path, schema=SCHEMA, command="quiver bench encoder")
