"""Sets of random token ids through the encoder alone: Quiver beside transformers with the same weights, in the same batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quiver.encoder import Encoder
from quiver.encoder.errors import InputError
from quiver.eval.bench.encoder.benchmark import add_memory, check_settings, choose, free_memory, load_average, origin, processor
from quiver.eval.bench.encoder.children import ChildError, ChildModel, largest_batch
from quiver.eval.bench.encoder.libraries import LIBRARIES, PEERS, Loaded, open_encoder
from quiver.eval.bench.encoder.passes import Prepared, gradient_differences, state_differences, timed
from quiver.eval.bench.encoder.results import EncoderBenchmark, LargestBatch, NotRun, SetTimes, Settings, library_times
from quiver.eval.bench.encoder.rounds import time_in_turns, torch_threads
from quiver.eval.bench.encoder.workloads import PAPER_DOCUMENTS, Workload, batch_documents, batches, paper_workload, random_documents
from quiver.retrieval.progress import Advance, progress_bar

BATCH_TOKENS: Mapping[str, int] = {"cpu": 8_192, "cuda": 131_072}
"""Device -> tokens of an average batch where none are asked for."""

# The search for the largest batch: how far it goes, and how exactly.
CEILING = 1 << 20
TOLERANCE = 1 / 64


def bench_sets(
    model: str,
    workloads: Sequence[Workload],
    settings: Settings,
    *,
    peers: Sequence[str] | None = None,
    command: str | None = None,
    progress: bool = False,
) -> EncoderBenchmark:
    """Time the encoder on sets of token ids, and measure its memory where the settings ask for it.

    Args:
        model: A preset (random weights) or a folder or hub id.
        workloads: The sets; one with a document longer than the model's positions is left out.
        settings: How to run.
        peers: Names in `LIBRARIES`; None for every peer that can run.
        command: The command line to record.
        progress: Show bars on standard error.

    Returns:
        What was found. Quiver is the first library of every set.

    Raises:
        InputError: The settings contradict each other, the model cannot be read, a peer is unknown or cannot run, no set fits the model's
            positions, or a library ran out of memory.
    """
    check_settings(settings)
    load = load_average()
    with torch_threads(settings.threads):
        encoder = open_encoder(model, settings)
        config, parameters = encoder.config, encoder.num_parameters
        names, not_run = choose(peers, LIBRARIES, PEERS, lambda name: LIBRARIES[name].unsupported_reason(config, settings))
        chosen = [each for each in workloads if max(each.lengths) <= config.max_positions]
        not_run += [NotRun(each.name, f"the model has {config.max_positions:,} positions") for each in workloads if each not in chosen]
        if not chosen:
            raise InputError(f"{model} has {config.max_positions:,} positions, and every set has a longer document; give --lengths")
        sets = _time_sets(encoder, names, chosen, settings, progress=progress)
        provenance = origin(command)
        del encoder
        if settings.memory:
            requests = [{"batches": batches(each.lengths, _documents(each, settings))} for each in chosen]
            sets, failed = add_memory(sets, requests, lambda name: ChildModel("ids", name, model, settings), progress=progress)
            not_run += failed
        largest: list[LargestBatch] = []
        if settings.largest_batch:
            largest, failed = _largest_batches(model, names, chosen, settings, progress=progress)
            not_run += failed
    return EncoderBenchmark(
        model=model,
        family=config.family,
        parameters=parameters,
        settings=settings,
        sets=tuple(sets),
        largest_batches=tuple(largest),
        not_run=tuple(not_run),
        processor=processor(settings.device),
        load_average=load,
        provenance=provenance,
    )


def default_documents(name: str, settings: Settings) -> int:
    """Documents of one of the paper's sets that make one batch of the default size.

    Raises:
        InputError: There is no such set.
    """
    whole = paper_workload(name, documents=PAPER_DOCUMENTS)
    tokens = settings.batch_tokens or BATCH_TOKENS.get(settings.device, BATCH_TOKENS["cpu"])
    return batch_documents(whole, batch_size=settings.batch_size, batch_tokens=tokens)


def _documents(workload: Workload, settings: Settings) -> int:
    tokens = settings.batch_tokens or BATCH_TOKENS[settings.device]
    return batch_documents(workload, batch_size=settings.batch_size, batch_tokens=tokens)


def _time_sets(
    encoder: Encoder, names: Sequence[str], workloads: Sequence[Workload], settings: Settings, *, progress: bool
) -> list[SetTimes]:
    loaded = {name: LIBRARIES[name].load(encoder) for name in names}
    # A round to compare the numbers, which warms up, and in training another one that does.
    passes = len(names) * (settings.rounds + 1 + settings.train)
    with progress_bar("timing", passes * len(workloads), enabled=progress) as advance:
        return [_time_set(loaded, encoder, workload, settings, advance) for workload in workloads]


def _time_set(loaded: Mapping[str, Loaded], encoder: Encoder, workload: Workload, settings: Settings, advance: Advance) -> SetTimes:
    documents = list(random_documents(workload.lengths, encoder.config, seed=settings.seed))
    size = _documents(workload, settings)
    libraries = {name: Prepared(each, [each.prepare(batch) for batch in batches(documents, size)]) for name, each in loaded.items()}
    where = f"{workload.name} in batches of {size}"
    differences = state_differences(libraries, where)
    gradients = gradient_differences(libraries, where) if settings.train else None
    passes = {name: timed(name, prepared, where, train=settings.train) for name, prepared in libraries.items()}
    advance(len(passes))
    if settings.train:
        for warm_up in passes.values():
            warm_up()
            advance(1)
    seconds = time_in_turns(passes, rounds=settings.rounds, advance=advance)
    return SetTimes(
        name=workload.name,
        documents=len(documents),
        tokens=workload.tokens,
        shortest=min(workload.lengths),
        longest=max(workload.lengths),
        batch_documents=size,
        libraries=library_times(seconds, workload.tokens, differences=differences, gradients=gradients),
    )


def _largest_batches(
    model: str, names: Sequence[str], workloads: Sequence[Workload], settings: Settings, *, progress: bool
) -> tuple[list[LargestBatch], list[NotRun]]:
    """For every library and every length that some set consists of alone, as in the paper's fixed sets."""
    free_memory()
    lengths = sorted({each.lengths[0] for each in workloads if len(set(each.lengths)) == 1})
    found, failed = [], []
    with progress_bar("largest batch", len(names) * len(lengths), enabled=progress) as advance:
        for length in lengths:
            for name in names:
                try:
                    child = ChildModel("ids", name, model, settings)
                    found.append(largest_batch(child, length, ceiling=CEILING, tolerance=TOLERANCE))
                except ChildError as error:
                    failed.append(NotRun(f"largest batch of {name} at {length} tokens", str(error)))
                advance(1)
    return found, failed
