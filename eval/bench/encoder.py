"""Encoder benchmark: speed and memory of an encoder, compared with other libraries that run the same weights.

A case is a set of token ids: one of the four synthetic sets of the ModernBERT paper, one of six small ones for CPUs, or documents with
lengths given by the user. With texts, tokenizing is included and every library forms its own batches. Differences between the outputs are
part of the result.

The lengths of the paper's variable sets are reproduced exactly: drawn from torch's CPU generator with seed 42, truncated and clamped, they
give the totals and extremes of Table 10. A smaller set consists of the first documents of the whole set.

Shapes: B documents, N real tokens of a batch, D model width, V vocabulary.
Source: ModernBERT, arXiv:2412.13663, section 4 and appendix F.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from quiver.encoder.config import EncoderConfig
from quiver.encoder.cpu.support import MIN_TOKENS_PER_THREAD
from quiver.encoder.errors import InputError
from quiver.encoder.progress import Advance, progress_bar
from quiver.eval.bench.child import Answer, Child, ChildError, KilledError, measure_memory
from quiver.eval.bench.encoder_backends import (
    BACKENDS,
    DTYPES,
    TEXT_BACKENDS,
    Backend,
    Batch,
    Encode,
    LoadedEncoder,
    LoadedTextEncoder,
    Settings,
    TextBackend,
    open_encoder,
)
from quiver.eval.bench.harness import (
    MemoryRun,
    Pass,
    Recording,
    Timing,
    absolute,
    choose,
    free_memory,
    naming_out_of_memory,
    time_rounds,
    torch_threads,
    with_memory,
)
from quiver.eval.bench.report import (
    PEAK,
    Column,
    backend,
    bar_style,
    draw_speed,
    grouped_bars,
    legend,
    make_report,
    over_rounds,
    rows_table,
    short_name,
    single,
    text_table,
    value_range,
    variant,
)
from quiver.eval.bench.results import OWN, Benchmark, Case, NotRun, Row, Scalar, Series, with_ratios
from quiver.eval.published import EFFICIENCY_SETS, EFFICIENCY_SOURCE, ENCODER_EFFICIENCY, TABLE_10
from quiver.eval.report.formats import Paragraph, Report, Section
from quiver.retrieval.models.encoding import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

Document = TypeVar("Document")

PAPER_DOCUMENTS = 8_192
"""Documents in each set of the paper."""

BATCH_TOKENS: Mapping[str, int] = {"cpu": 8_192, "cuda": 131_072}
"""Device -> default average number of tokens per batch."""

CPU_TABLE = ("512x8", "variable-256x16", "512x2+32x14", "2048x2", "4096+2500", "8192")
"""Cases that take less than a minute on a CPU, in the syntax of `parse_lengths`."""

LARGEST_BATCH = "largest batch"
"""Name of the case with the largest batches."""

# Search for the largest batch: maximum number of documents, and precision as a share of the result.
_CEILING = 1 << 20
_TOLERANCE = 1 / 64

_OVER_BUDGET = "over the budget"
_LENGTH_SEED = 42
# Range of the paper's random token ids; a smaller vocabulary restricts it.
_FIRST_ID, _LAST_ID = 100, 16_000
# Rows of the paper's Table 2 in the chart: the base models that support 8,192 tokens, and BERT.
_CHARTED = ("ModernBERT", "GTE-en-MLM xformers", "NomicBERT", "BERT")


@dataclass(frozen=True)
class LengthDistribution:
    """Distribution of document lengths in tokens.

    Attributes:
        mean: Mean of a normal distribution.
        deviation: Standard deviation; 0 for a fixed length.
        shortest: Shorter draws are raised to this.
        longest: Longer draws are cut to this.
    """

    mean: int
    deviation: int
    shortest: int
    longest: int

    def draw(self, documents: int) -> tuple[int, ...]:
        """Draw the lengths of the first ``documents`` documents of a set."""
        generator = torch.Generator().manual_seed(_LENGTH_SEED)
        # Always draw the whole set: torch's generator gives different numbers for a different count.
        drawn = torch.normal(float(self.mean), float(self.deviation), (PAPER_DOCUMENTS,), generator=generator)
        return tuple(drawn.clamp(self.shortest, self.longest).long()[:documents].tolist())


PAPER_SETS: Mapping[str, LengthDistribution] = {
    "fixed-512": LengthDistribution(mean=512, deviation=0, shortest=512, longest=512),
    "variable-256": LengthDistribution(mean=256, deviation=64, shortest=32, longest=512),
    "fixed-8192": LengthDistribution(mean=8_192, deviation=0, shortest=8_192, longest=8_192),
    "variable-4096": LengthDistribution(mean=4_096, deviation=1_024, shortest=16, longest=8_192),
}
"""Name -> lengths of a set of the paper."""


@dataclass(frozen=True)
class Workload:
    """Documents to encode.

    Attributes:
        name: Name in tables and on the command line.
        lengths: Tokens of each document, in order.
    """

    name: str
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Total tokens, without padding."""
        return sum(self.lengths)


def paper_workload(name: str, *, documents: int) -> Workload:
    """Return the first documents of one of the paper's sets.

    Args:
        name: A key of `PAPER_SETS`.
        documents: Number of documents, 1..8,192.

    Raises:
        InputError: There is no such set, or it has fewer documents.

    Example:
        >>> paper_workload("variable-256", documents=3).lengths
        (379, 351, 313)
    """
    if name not in PAPER_SETS:
        raise InputError(f"unknown set {name!r}; choose from {', '.join(PAPER_SETS)}, or give --lengths such as 512x8 or 4096+2500")
    if not 1 <= documents <= PAPER_DOCUMENTS:
        raise InputError(f"{name} has {PAPER_DOCUMENTS:,} documents, got {documents:,}")
    return Workload(name, PAPER_SETS[name].draw(documents))


_TERM = re.compile(r"(?P<what>.+?)(?:x(?P<count>\d+))?")


def parse_lengths(text: str) -> Workload:
    """Parse lengths: terms joined by ``+``, each a number of tokens or the name of a set, with an optional count.

    Args:
        text: Text such as ``512x8``, ``512x2+32x14``, ``4096+2500`` or ``variable-256x16``.

    Raises:
        InputError: A term is malformed, or a length or count is 0; names the term.

    Example:
        >>> parse_lengths("512x2+32x3").lengths
        (512, 512, 32, 32, 32)
    """
    lengths: list[int] = []
    for term in text.split("+"):
        found = _TERM.fullmatch(term.strip())
        if found is None:
            raise InputError(f"lengths {text!r}: a term is empty; write lengths such as 512x8, 512x2+32x14 or 4096+2500")
        what, count = found["what"], int(found["count"] or 1)
        if what in PAPER_SETS:
            lengths += paper_workload(what, documents=count).lengths
        elif re.fullmatch("[0-9]+", what) and int(what) and count:
            lengths += [int(what)] * count
        else:
            raise InputError(
                f"lengths {text!r}: {term!r} is not TOKENS, TOKENSxDOCUMENTS or SETxDOCUMENTS, such as 512x8 or variable-256x16"
            )
    return Workload(text, tuple(lengths))


def batch_documents(workload: Workload, *, batch_size: int | None, batch_tokens: int) -> int:
    """Return the documents per batch, at least one: ``batch_size``, or as many as hold about ``batch_tokens`` tokens.

    Example:
        >>> batch_documents(Workload("set", (300,) * 30), batch_size=None, batch_tokens=4000)  # 9,000 tokens: two batches
        15
    """
    documents = len(workload.lengths)
    if batch_size is not None:
        return min(batch_size, documents)
    return -(-documents // max(1, round(workload.tokens / batch_tokens)))


def default_documents(name: str, settings: Settings) -> int:
    """Return how many documents of one of the paper's sets make one batch of the default size.

    Raises:
        InputError: There is no such set.
    """
    return _batch_size(paper_workload(name, documents=PAPER_DOCUMENTS), settings)


def batches(documents: Sequence[Document], size: int) -> list[Sequence[Document]]:
    """Split documents into batches of consecutive ones, without sorting, as in the paper; the last batch may be smaller.

    Example:
        >>> batches([512, 32, 64], 2)
        [[512, 32], [64]]
    """
    return [documents[start : start + size] for start in range(0, len(documents), size)]


def random_documents(lengths: Sequence[int], config: EncoderConfig, *, seed: int) -> Iterator[list[int]]:
    """Yield one list of random token ids per document, without the padding token, from which some models derive positions.

    Args:
        lengths: Tokens of each document.
        config: Configuration with the vocabulary.
        seed: Equal seeds give equal ids.
    """
    size = config.vocab_size
    ids = np.arange(min(_FIRST_ID, size // 2), min(_LAST_ID, size))
    ids = ids[ids != config.pad_token_id]
    generator = np.random.default_rng(seed)
    for length in lengths:
        yield generator.choice(ids, length).tolist()


def bench_token_ids(
    model: str,
    workloads: Sequence[Workload],
    settings: Settings,
    *,
    backends: Sequence[str] | None = None,
    command: str | None = None,
    progress: bool = False,
    available: Mapping[str, Backend] = BACKENDS,
) -> Benchmark:
    """Time encoders on token ids; measure their memory and largest batch if the settings ask for it.

    Args:
        model: Preset (random weights), folder or Hugging Face Hub id.
        workloads: The cases; those with documents longer than the model's positions are left out.
        settings: Settings of the benchmark.
        backends: Names besides Quiver; None for all other libraries that can run.
        command: Command line to record.
        progress: Show progress bars.
        available: Name -> backend; must contain ``quiver``.

    Returns:
        One case per workload, with Quiver as the first row.

    Raises:
        InputError: The settings contradict each other, the model cannot be read, a backend is unknown or cannot run, no workload fits the
            model's positions, or a backend ran out of memory.
        ValueError: rounds < 1.
    """
    _check_settings(settings)
    recording = Recording("encoder", model, settings, command)
    with torch_threads(settings.threads):
        encoder = open_encoder(model, settings)
        config, parameters = encoder.config, encoder.num_parameters
        names, not_run = choose(backends, available, lambda name: available[name].unsupported_reason(config, settings))
        chosen = [each for each in workloads if max(each.lengths) <= config.max_positions]
        not_run += [NotRun(each.name, f"the model has {config.max_positions:,} positions") for each in workloads if each not in chosen]
        if not chosen:
            raise InputError(f"{model} has {config.max_positions:,} positions, and every set has a longer document; give --lengths")
        loaded = {name: available[name].load(encoder) for name in names}
        # One round compares the outputs and serves as warm-up; training needs another warm-up round.
        passes = len(names) * (settings.rounds + 1 + settings.train) * len(chosen)
        with progress_bar("timing", passes, enabled=progress) as advance:
            cases = [_time_case(loaded, config, workload, settings, advance) for workload in chosen]
        del encoder, loaded
        if settings.memory and settings.device == "cpu":
            runs = [
                MemoryRun(
                    "quiver.eval.bench.encoder:open_token_ids",
                    lambda name: _child_arguments(name, model, settings),
                    {"batches": batches(each.lengths, _batch_size(each, settings))},
                )
                for each in chosen
            ]
            cases, failed = with_memory(cases, runs, progress=progress)
            not_run += failed
        if settings.largest_batch:
            case, failed = _largest_batches(model, names, chosen, settings, progress=progress)
            cases.append(case)
            not_run += failed
        metadata: Mapping[str, Scalar] = {"family": config.family, "parameters": parameters}
        return recording.benchmark(metadata=metadata, cases=cases, not_run=not_run, device=settings.device)


def _check_settings(settings: Settings) -> None:
    if settings.rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {settings.rounds}")
    if settings.dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {settings.dtype!r}")
    if settings.device not in ("cpu", "cuda"):
        raise InputError(f"device must be cpu or cuda, got {settings.device!r}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda: torch finds no GPU; use --device cpu")
    if settings.batch_size is not None and settings.batch_tokens is not None:
        raise InputError("--batch-size and --batch-tokens exclude each other")
    if settings.largest_batch and settings.device == "cpu" and settings.memory_gib is None:
        raise InputError("--largest-batch on a CPU needs --memory-gib, the memory to stay within; the search may use up to twice as much")


def _batch_size(workload: Workload, settings: Settings) -> int:
    tokens = settings.batch_tokens or BATCH_TOKENS.get(settings.device, BATCH_TOKENS["cpu"])
    return batch_documents(workload, batch_size=settings.batch_size, batch_tokens=tokens)


@dataclass(frozen=True)
class _Prepared:
    """A backend with the prepared batches of a case."""

    loaded: LoadedEncoder
    batches: Sequence[Batch]

    def encode(self, *, train: bool) -> None:
        """Run all batches forward, or forward and backward; return when the device has finished."""
        if train:
            self.loaded.module.train()
            for batch in self.batches:
                _backward(batch)
                self.loaded.module.zero_grad(set_to_none=True)
            self.loaded.module.eval()
        else:
            with torch.inference_mode():
                for batch in self.batches:
                    batch.forward()
        if self.loaded.embedding.is_cuda:
            torch.cuda.synchronize()

    def gradient(self) -> Tensor:
        """Return the embedding's gradient on the first batch without dropout, (V, D) float32."""
        self.loaded.module.eval()
        _backward(self.batches[0])
        gradient = self.loaded.embedding.grad
        if gradient is None:
            raise RuntimeError("the embedding has no gradient: this model cannot be trained")
        self.loaded.module.zero_grad(set_to_none=True)
        return gradient.float()


def _backward(batch: Batch) -> None:
    """Backpropagate the mean square of each state's component along a fixed direction.

    The mean square of whole states is unsuitable: a final LayerNorm makes it constant, and all gradients would be rounding errors.
    """
    states = batch.real(batch.forward()).float()
    direction = torch.linspace(-1, 1, states.shape[-1], device=states.device)
    loss = (states @ direction).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]


def _time_case(
    loaded: Mapping[str, LoadedEncoder], config: EncoderConfig, workload: Workload, settings: Settings, advance: Advance
) -> Case:
    documents = list(random_documents(workload.lengths, config, seed=settings.seed))
    size = _batch_size(workload, settings)
    prepared = {name: _Prepared(each, [each.prepare(batch) for batch in batches(documents, size)]) for name, each in loaded.items()}
    where = f"{workload.name} in batches of {size}"
    differences = {"max_difference": _state_differences(prepared, where)}
    if settings.train:
        differences["gradient_difference"] = _gradient_differences(prepared, where)
    passes = {name: _pass(name, each, where, train=settings.train) for name, each in prepared.items()}
    advance(len(passes))
    if settings.train:
        for warm_up in passes.values():
            warm_up()
            advance(1)
    timings = time_rounds(passes, rounds=settings.rounds, seconds=settings.seconds, advance=advance)
    if settings.memory and settings.device == "cuda":
        # The allocator counts exactly what a pass adds, whatever else is in memory.
        differences["memory_above"] = {name: float(measure_memory(each, on_cuda=True)["above"] or 0) for name, each in passes.items()}
    return _case(workload.name, workload.lengths, size, timings, differences)


def _pass(name: str, prepared: _Prepared, where: str, *, train: bool) -> Pass:
    def encode() -> None:
        with naming_out_of_memory(name, where):
            prepared.encode(train=train)

    return encode


def _case(
    name: str,
    lengths: Sequence[int],
    batch_size: int | None,
    timings: Mapping[str, Timing],
    measured: Mapping[str, Mapping[str, float]],
) -> Case:
    tokens, documents, shortest, longest = sum(lengths), len(lengths), min(lengths), max(lengths)
    rows = [
        Row(
            backend=backend,
            series={
                "seconds": Series.of(timing.seconds),
                "tokens_per_second": Series.of([tokens / each for each in timing.seconds]),
                "documents_per_second": Series.of([documents / each for each in timing.seconds]),
            },
            values={quantity: each[backend] for quantity, each in measured.items()},
        )
        for backend, timing in timings.items()
    ]
    spread = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    in_batches = f", batches of {batch_size:,}" if batch_size else ""
    return Case(
        name=name,
        title=f"{name}: {documents:,} document{'s' * (documents != 1)} of {spread} tokens, {tokens:,} in total{in_batches}",
        metadata={"documents": documents, "tokens": tokens, "shortest": shortest, "longest": longest, "batch_documents": batch_size},
        rows=with_ratios(rows, {"seconds": "time_ratio"}),
    )


@torch.no_grad()
def _state_differences(prepared: Mapping[str, _Prepared], where: str) -> dict[str, float]:
    """Largest absolute difference of each backend's hidden states from Quiver's, over all real tokens of all batches."""
    differences = dict.fromkeys(prepared, 0.0)
    for position in range(len(prepared[OWN].batches)):
        reference = _states(OWN, prepared[OWN], position, where)
        for name, each in prepared.items():
            if name != OWN:
                difference = (_states(name, each, position, where) - reference).abs().max().item()
                differences[name] = max(differences[name], difference)
    return differences


def _states(name: str, prepared: _Prepared, position: int, where: str) -> Tensor:
    batch = prepared.batches[position]
    with naming_out_of_memory(name, where):
        states = batch.real(batch.forward()).float()
    if not states.isfinite().all():  # a maximum of differences does not reveal a NaN
        raise RuntimeError(f"{name}: non-finite hidden states on {where}")
    return states


def _gradient_differences(prepared: Mapping[str, _Prepared], where: str) -> dict[str, float]:
    """Largest difference of each backend's embedding gradient from Quiver's on the first batch, relative to Quiver's largest value."""
    gradients = {}
    for name, each in prepared.items():
        with naming_out_of_memory(name, where):
            gradients[name] = each.gradient()
    reference = gradients[OWN]
    return {name: ((each - reference).abs().max() / reference.abs().max()).item() for name, each in gradients.items()}


def bench_texts(
    model: str,
    texts: Sequence[str],
    settings: Settings,
    *,
    name: str = "texts",
    backends: Sequence[str] | None = None,
    command: str | None = None,
    progress: bool = False,
    available: Mapping[str, TextBackend] = TEXT_BACKENDS,
) -> Benchmark:
    """Time bi-encoders on documents, tokenizing included, each at its own default batch size.

    Args:
        model: Folder or Hugging Face Hub id of a bi-encoder.
        texts: Documents.
        settings: Settings of the benchmark.
        name: Name of the texts.
        backends: Names besides Quiver; None for all other libraries that can run.
        command: Command line to record.
        progress: Show progress bars.
        available: Name -> backend; must contain ``quiver``, which loads Quiver's model.

    Returns:
        One case, with Quiver as the first row.

    Raises:
        InputError: There are no texts, a setting applies to token ids only, a backend is unknown or cannot run, or the model is not a
            bi-encoder.
        ValueError: rounds < 1.
    """
    _check_settings(settings)
    _check_text_settings(texts, settings)
    recording, documents = Recording("encoder", model, settings, command), list(texts)
    with torch_threads(settings.threads):
        names, not_run = choose(backends, available, lambda each: available[each].unsupported_reason(settings))
        loaded = {each: available[each].load(model, settings, documents) for each in names}
        own = loaded[OWN].model
        if own is None:
            raise ValueError("the backend quiver must load Quiver's model")
        config, parameters = own.encoder.config, own.encoder.num_parameters
        cleaned = clean(documents, prompt=own.settings.document_prompt, lower_case=own.settings.lower_case)
        lengths = [len(ids) for ids in own.tokenizer.encode(cleaned, max_length=own.max_length).ids]
        cases = [_time_texts(name, lengths, loaded, documents, settings, progress=progress)]
        del own, loaded
        if settings.memory:
            run = MemoryRun(
                "quiver.eval.bench.encoder:open_texts",
                lambda each: {**_child_arguments(each, model, settings), "texts": documents},
                {"texts": documents},
            )
            cases, failed = with_memory(cases, [run], progress=progress)
            not_run += failed
        metadata: Mapping[str, Scalar] = {"family": config.family, "parameters": parameters}
        return recording.benchmark(metadata=metadata, cases=cases, not_run=not_run, device=settings.device)


def _check_text_settings(texts: Sequence[str], settings: Settings) -> None:
    if not texts:
        raise InputError("nothing to encode: the list of texts is empty")
    options = {
        "--train": settings.train,
        "--largest-batch": settings.largest_batch,
        "--batch-size": settings.batch_size,
        "--batch-tokens": settings.batch_tokens,
    }
    for option, given in options.items():
        if given:
            raise InputError(f"{option} is for token ids; with --data every library forms its own batches. Omit --data or {option}")


def _time_texts(
    name: str,
    lengths: Sequence[int],
    loaded: Mapping[str, LoadedTextEncoder],
    documents: list[str],
    settings: Settings,
    *,
    progress: bool,
) -> Case:
    with progress_bar("timing", len(loaded) * (settings.rounds + 1), enabled=progress) as advance:
        # Every backend's first round is the warm-up and gives the vectors to compare.
        vectors = {}
        for each, backend in loaded.items():
            with naming_out_of_memory(each, name):
                vectors[each] = backend.encode(documents)
            advance(1)
        passes = {each: _text_pass(backend.encode, documents) for each, backend in loaded.items()}
        timings = time_rounds(passes, rounds=settings.rounds, seconds=settings.seconds, advance=advance)
    differences = {each: float(np.abs(found - vectors[OWN]).max()) for each, found in vectors.items()}
    return _case(name, lengths, None, timings, {"max_difference": differences})


def _text_pass(encode: Encode, documents: list[str]) -> Pass:
    def run() -> None:
        encode(documents)

    return run


def _child_arguments(name: str, model: str, settings: Settings) -> dict[str, Any]:
    return {"backend": name, "model": absolute(model), "settings": asdict(settings)}


def open_token_ids(backend: str, model: str, settings: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], Answer], Answer]:
    """Target of child processes: measures the memory of runs over batches of random token ids.

    Args:
        backend: A key of `BACKENDS`.
        model: Preset, folder or Hugging Face Hub id.
        settings: The fields of `Settings`.

    Returns:
        The function for requests ``{"batches": [[tokens of a document, ...], ...]}``, and the first answer: the bytes of the weights.
    """
    chosen = _child_settings(settings)
    encoder = open_encoder(model, chosen)
    config, loaded = encoder.config, BACKENDS[backend].load(encoder)
    # The other backends have their own copy of the weights; without this, Quiver's copy would count as their memory.
    del encoder

    def make(lengths_of_batches: Sequence[Sequence[int]]) -> Pass:
        documents = [list(random_documents(lengths, config, seed=chosen.seed)) for lengths in lengths_of_batches]
        prepared = _Prepared(loaded, [loaded.prepare(batch) for batch in documents])
        return lambda: prepared.encode(train=chosen.train)

    # Warm up with a single document and with a batch that keeps every thread busy. They use different kernels, whose libraries are loaded
    # at the first batch and must not count as activations.
    short = min(8, config.max_positions)
    busy = -(-MIN_TOKENS_PER_THREAD * torch.get_num_threads() // short)
    make([[short], [short] * busy])()
    weights = sum(weight.nbytes for weight in loaded.module.state_dict().values())
    return lambda request: measure_memory(make(request["batches"]), on_cuda=chosen.device == "cuda"), {"weights": weights}


def open_texts(backend: str, model: str, settings: dict[str, Any], texts: list[str]) -> tuple[Callable[[dict[str, Any]], Answer], Answer]:
    """Target of child processes: measures the memory of encoding texts; requests are ``{"texts": [...]}``.

    Args:
        backend: A key of `TEXT_BACKENDS`.
        model: Folder or Hugging Face Hub id.
        settings: The fields of `Settings`.
        texts: Texts for the calibration of int8.
    """
    chosen = _child_settings(settings)
    encode = TEXT_BACKENDS[backend].load(model, chosen, texts).encode
    encode(["a short text"])
    return lambda request: measure_memory(_text_pass(encode, request["texts"]), on_cuda=chosen.device == "cuda"), {}


def _child_settings(settings: dict[str, Any]) -> Settings:
    """Settings of a child process; also limits its threads and GPU memory accordingly."""
    chosen = Settings(**settings)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    if chosen.device == "cuda" and chosen.memory_gib is not None:
        total = torch.cuda.get_device_properties(chosen.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, chosen.memory_gib * 2**30 / total))
    return chosen


def search_largest(
    refusal: Callable[[int], str | None], *, ceiling: int, tolerance: float = 0.0, first: int = 1, growth: float = 2.0
) -> tuple[int, int | None, str | None]:
    """Find the largest batch that fits: enlarge the size until one does not fit, then bisect.

    Args:
        refusal: Maps a number of documents to the reason why they do not fit; None if they do. If a number does not fit, no larger one may.
        ceiling: Largest number to try.
        tolerance: Stop when the bounds differ by this share of the lower one; 0 for the exact limit.
        first: Number to try first, such as a guess.
        growth: Factor by which the number grows until it does not fit, > 1.

    Returns:
        The largest number that fits (0 for none), the smallest that does not (None if the ceiling fits), and the reason.

    Example:
        >>> search_largest(lambda documents: "too many" if documents > 37 else None, ceiling=1000)
        (37, 38, 'too many')
    """
    fits, fails, reason = 0, None, None
    probe = min(first, ceiling)
    while fails is None and fits < ceiling:
        found = refusal(probe)
        if found is None:
            fits, probe = probe, min(max(probe + 1, int(growth * probe)), ceiling)
        else:
            fails, reason = probe, found
    while fails is not None and fails - fits > max(1, int(tolerance * fits)):
        probe = (fits + fails) // 2
        found = refusal(probe)
        if found is None:
            fits = probe
        else:
            fails, reason = probe, found
    return fits, fails, reason


def largest_batch(
    open_child: Callable[[], Child], length: int, *, memory_gib: float | None, ceiling: int = _CEILING, tolerance: float = _TOLERANCE
) -> dict[str, int | str | None]:
    """Search for the largest batch of documents of one length that fits into memory.

    On CUDA a batch fits unless torch runs out of memory. On a CPU it fits if the weights plus the memory that the run adds to the loaded
    process stay within ``memory_gib`` at the peak; the libraries' code is not counted, as on a GPU. A limit on the process (RLIMIT_AS,
    RLIMIT_DATA) would also count reserved memory, and some kernels crash at it or choose slower algorithms. If a child is killed, the batch
    does not fit. After that, or after torch ran out of memory, the next run uses a new child.

    Args:
        open_child: Starts a child with the target `open_token_ids`.
        length: Tokens of each document.
        memory_gib: Memory budget in GiB; None for no budget.
        ceiling: See `search_largest`.
        tolerance: See `search_largest`.

    Returns:
        ``length``, ``documents`` (the largest number that fits), ``failed`` (the smallest that does not), and ``reason``.

    Raises:
        ChildError: A run failed for another reason than memory.
    """
    budget = None if memory_gib is None else memory_gib * 2**30
    children: list[Child] = []

    def refusal(documents: int) -> str | None:
        if not children:
            children.append(open_child())
        reason = _refusal(children[0], {"batches": [[length] * documents]}, budget)
        if reason not in (None, _OVER_BUDGET):
            children.pop().close()
        return reason

    try:
        fits, fails, reason = search_largest(refusal, ceiling=ceiling, tolerance=tolerance)
    finally:
        for child in children:
            child.close()
    return {"length": length, "documents": fits, "failed": fails, "reason": reason}


def _refusal(child: Child, request: dict[str, Any], budget: float | None) -> str | None:
    try:
        answer = child.ask(request)
    except KilledError as killed:
        return str(killed)
    if answer.get("out_of_memory"):
        return "out of memory"
    if answer["reserved"] is None and budget is not None and child.info["weights"] + answer["above"] > budget:
        return _OVER_BUDGET
    return None


def _largest_batches(
    model: str, names: Sequence[str], workloads: Sequence[Workload], settings: Settings, *, progress: bool
) -> tuple[Case, list[NotRun]]:
    """Largest batch of every backend at every fixed length of the workloads."""
    free_memory()
    lengths = sorted({each.lengths[0] for each in workloads if len(set(each.lengths)) == 1})
    rows, failed = [], []
    with progress_bar(LARGEST_BATCH, len(names) * len(lengths), enabled=progress) as advance:
        for length in lengths:
            for name in names:
                arguments = _child_arguments(name, model, settings)

                def open_child(name: str = name, arguments: dict[str, Any] = arguments) -> Child:
                    return Child("quiver.eval.bench.encoder:open_token_ids", arguments, label=f"{name} with {model}")

                try:
                    found = largest_batch(open_child, length, memory_gib=settings.memory_gib)
                    rows.append(Row(name, {}, found, variant=f"{length:,}"))
                except ChildError as error:
                    failed.append(NotRun(f"{LARGEST_BATCH} of {name} at {length} tokens", str(error)))
                advance(1)
    return Case(LARGEST_BATCH, "Largest batch", {}, tuple(rows)), failed


SPEED_COLUMNS = (
    Column("backend", backend, numeric=False),
    Column("tokens/s", over_rounds("tokens_per_second")),
    Column(
        "mean ± sd",
        lambda row: " ± ".join(str(over_rounds("tokens_per_second", statistic=name)(row)) for name in ("mean", "deviation")),
        numeric=False,
    ),
    Column("documents/s", over_rounds("documents_per_second", ",.1f")),
    Column("time / quiver's", over_rounds("time_ratio", ".2f")),
    Column("range", value_range("time_ratio"), numeric=False),
    Column("max difference", single("max_difference", ".1e")),
    Column("gradient difference", single("gradient_difference", ".1e")),
    PEAK,
)

LARGEST_COLUMNS = (
    Column("backend", backend, numeric=False),
    Column("tokens", variant),
    Column("largest batch", single("documents", ",.0f")),
    Column("failed at", single("failed", ",.0f")),
    Column("reason", single("reason"), numeric=False),
)


def report(benchmark: Benchmark) -> Report:
    """Make the report of an encoder benchmark, with the paper's figures if some of its sets were measured."""
    sections = [Section(case.title, (rows_table("", SPEED_COLUMNS, case.rows),)) for case in _speed_cases(benchmark)]
    budget = benchmark.settings["memory_gib"]
    memory = "the GPU" if budget is None else f"{budget:g} GiB"
    note = f"Documents per batch that fit into {memory}, weights included, found by bisection in fresh processes."
    sections += [
        Section(case.title, (rows_table("", LARGEST_COLUMNS, case.rows), Paragraph(note)))
        for case in benchmark.cases
        if case.name == LARGEST_BATCH
    ]
    if _has_paper_sets(benchmark):
        sections.append(_beside_the_paper(benchmark))
    return make_report(
        benchmark,
        conditions=_conditions(benchmark),
        sections=sections,
        draw=lambda: draw(benchmark),
        alt="Tokens per second of each backend, and its time relative to Quiver's",
    )


def draw(benchmark: Benchmark) -> Drawing:
    """Draw the chart of an encoder benchmark."""
    settings, threads = benchmark.settings, benchmark.provenance.threads
    work = "training step" if settings["train"] else "inference"
    where = f", {threads} thread{'s' * (threads != 1)}" if settings["device"] == "cpu" else ""
    title = f"{short_name(benchmark.name)}: {work}, {settings['dtype']}\n{benchmark.processor}{where}"
    groups = {case.name: case.rows for case in _speed_cases(benchmark)}
    return draw_speed(title, groups, _draw_published if _has_paper_sets(benchmark) else None)


def _draw_published(axes: Any) -> None:
    """Draw the paper's Table 2, in other colours than the measured backends: these are other models on another machine."""
    rows = {each.model: each for each in ENCODER_EFFICIENCY if each.size == "base" and each.model in _CHARTED}

    def draw_bar(group: str, name: str, x: float, width: float) -> None:
        if group in rows[name].kilotokens:
            axes.bar(x, rows[name].kilotokens[group], width, **bar_style(4 + _CHARTED.index(name), name))

    grouped_bars(axes, EFFICIENCY_SETS, _CHARTED, draw_bar)
    axes.set_ylabel("thousand tokens/s\n(paper's Table 2, RTX 4090)")
    legend(axes)


def _conditions(benchmark: Benchmark) -> str:
    settings, metadata = benchmark.settings, benchmark.metadata
    work = "forward and backward through a loss over all states" if settings["train"] else "inference"
    return (
        f"{metadata['family']}, {float(metadata['parameters'] or 0) / 1e6:,.1f} million parameters, {settings['dtype']}, {work}, on"
        f" {settings['device']}. {settings['rounds']} rounds in one process; every backend runs once per round, in reverse order in every"
        " other round; a warm-up round is not counted. Padding is not counted as tokens. Time / quiver's is the median over the rounds of a"
        " backend's time divided by Quiver's time in the same round. Peak memory is the memory of a run beyond the loaded model, in a fresh"
        " process."
    )


def _speed_cases(benchmark: Benchmark) -> list[Case]:
    return [case for case in benchmark.cases if case.name != LARGEST_BATCH]


def _has_paper_sets(benchmark: Benchmark) -> bool:
    """Whether a set of the paper was measured for inference; the paper has no figures for training."""
    return not benchmark.settings["train"] and any(case.name in EFFICIENCY_SETS for case in benchmark.cases)


def _beside_the_paper(benchmark: Benchmark) -> Section:
    source = f"The paper's figures are from {EFFICIENCY_SOURCE}. The others are from the processor named below: compare rows of one source."
    largest = ["BS 512", "fixed 512", "variable 256", "BS 8,192", "fixed 8,192", "variable 4,096"]
    return Section(
        "Comparison with the paper",
        (
            Paragraph(source),
            text_table("Table 2: largest batch (BS) and thousand tokens per second (means)", ["", *largest], _table_2(benchmark)),
            text_table("Table 11: seconds for 8,192 documents, scaled up by tokens", ["", *EFFICIENCY_SETS], _table_11(benchmark)),
        ),
    )


def _own_rows(benchmark: Benchmark) -> dict[str, dict[str, Row]]:
    """Backend -> case -> row."""
    names = dict.fromkeys(row.backend for case in _speed_cases(benchmark) for row in case.rows)
    return {name: {case.name: row for case in _speed_cases(benchmark) for row in case.rows if row.backend == name} for name in names}


def _table_2(benchmark: Benchmark) -> Iterator[list[str]]:
    largest = [row for case in benchmark.cases if case.name == LARGEST_BATCH for row in case.rows]
    for name, rows in _own_rows(benchmark).items():
        fitting = {row.values["length"]: row.values["documents"] for row in largest if row.backend == name}
        speeds = {case: row.series["tokens_per_second"].mean / 1000 for case, row in rows.items()}
        yield _table_2_row(f"{name}, this run", fitting, speeds)
    for each in ENCODER_EFFICIENCY:
        yield _table_2_row(f"{each.model} {each.size}, paper", each.largest_batch, each.kilotokens)


def _table_2_row(label: str, fitting: Mapping[Any, Any], kilotokens: Mapping[str, float]) -> list[str]:
    short, long = (f"{fitting[length]:,}" if length in fitting else "-" for length in (512, 8_192))
    speeds = [f"{kilotokens[name]:,.1f}" if name in kilotokens else "-" for name in EFFICIENCY_SETS]
    return [label, short, *speeds[:2], long, *speeds[2:]]


def _table_11(benchmark: Benchmark) -> Iterator[list[str]]:
    tokens = {case.name: float(case.metadata["tokens"] or 0) for case in _speed_cases(benchmark)}
    for name, rows in _own_rows(benchmark).items():
        cells = dict.fromkeys(EFFICIENCY_SETS, "-")
        for case, row in rows.items():
            if case in cells:
                scaled = Series.of([TABLE_10[case].tokens / tokens[case] * each for each in row.series["seconds"].values])
                cells[case] = f"{scaled.mean:,.1f} ± {scaled.deviation:,.2f}"
        yield [f"{name}, this run", *cells.values()]
    for each in ENCODER_EFFICIENCY:
        runtimes = [each.runtimes.get(name) for name in EFFICIENCY_SETS]
        cells_of_paper = ["-" if cell is None else f"{cell.seconds:,.1f} ± {cell.deviation:.2f}" for cell in runtimes]
        yield [f"{each.model} {each.size}, paper", *cells_of_paper]
