"""The stages of the GPU benchmark: what each measures, and the sizes of the work on a GPU and in the small form on a CPU.

A stage runs in a child process (`open_stage` is its target), so that a kernel that fails or hangs ends one stage and not the benchmark.
It has a share of the time. What does not fit is shortened or left out, and a note says which.

Shapes: N tokens of a batch, Q queries, P documents, d vector width.
"""

from __future__ import annotations

import os
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

import quiver
from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, pack, save_encoder
from quiver.encoder.config import global_every
from quiver.encoder.errors import InputError, first_line
from quiver.encoder.files import write_json
from quiver.encoder.model import GRAPHS_VARIABLE
from quiver.encoder.pretraining.task import training_flops
from quiver.encoder.training.autocast import training_dtype
from quiver.eval.bench import training
from quiver.eval.bench.child import Answer, is_out_of_memory
from quiver.eval.bench.encoder import (
    LARGEST_BATCH,
    PAPER_SETS,
    bench_texts,
    bench_token_ids,
    default_documents,
    open_token_ids,
    paper_workload,
    random_documents,
    search_largest,
)
from quiver.eval.bench.encoder_backends import (
    BACKENDS,
    BASELINES,
    DTYPES,
    TEXT_BACKENDS,
    LoadedTextEncoder,
    TextBackend,
    open_encoder,
)
from quiver.eval.bench.encoder_backends import Settings as EncoderSettings
from quiver.eval.bench.harness import Pass, free_memory, quiet_libraries, time_rounds
from quiver.eval.bench.results import OWN, Case, NotRun, Row, Scalar, Series, with_ratios
from quiver.eval.bench.training_backends import (
    ENGLISH,
    LIBRARIES,
    PRESET_VOCABULARY,
    Workload,
    load_backend,
    open_model,
    write_initial_model,
)
from quiver.eval.bench.training_backends import Settings as TrainingSettings
from quiver.retrieval.index import index_vectors
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.loading import default_dtype, load_model
from quiver.retrieval.records import ModelCard
from quiver.retrieval.training.model import missing_library

ONLY_MODEL = "quiver-model"
"""Backend of the texts stage: Quiver's model alone, on batches that are tokenized, packed and on the device."""

NO_GRAPHS = "quiver-no-graphs"
"""Backend of the queries stage: Quiver's model without CUDA graphs."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the work.

    Attributes:
        models: Size of the paper -> preset; empty for tiny models.
        documents: Documents of each of the paper's sets; a set that is missing makes one batch of the default size.
        rounds: Timed rounds; fewer if the time is over.
        texts: The paper's set whose lengths the texts have -> number of texts.
        training: Kind of model -> its workload.
        queries: Timed queries, one at a time.
        search_queries: Queries of the searches, Q.
        token_documents: Documents with token vectors, P.
        document_tokens: Token vectors of a document.
        token_width: Width d of a token vector.
        dense_documents: Documents with one vector.
        matmul: Rows and columns of the matrices whose product shows the rate of the device.
        profiled: Documents of 512 tokens in the profiled forward pass.
    """

    models: Mapping[str, str]
    documents: Mapping[str, int]
    rounds: int
    texts: Mapping[str, int]
    training: Mapping[str, Workload]
    queries: int
    search_queries: int
    token_documents: int
    document_tokens: int
    token_width: int
    dense_documents: int
    matmul: int
    profiled: int


FULL = Scale(
    models={"base": "modernbert-base", "large": "modernbert-large"},
    documents={},
    rounds=10,
    texts={"variable-256": 4_096, "variable-4096": 128},
    training={
        "dense": Workload("MNRL", queries=(8, 20), documents=(20, 180), max_length=180, per_row=2, rows=128),
        "colbert": Workload("distillation", queries=(8, 20), documents=(20, 180), max_length=180, per_row=8, rows=32),
        "mlm": Workload("MLM", queries=(8, 20), documents=(256, 1_024), max_length=1_024, per_row=1, rows=32),
    },
    queries=200,
    search_queries=1_000,
    token_documents=100_000,
    document_tokens=110,
    token_width=128,
    dense_documents=1_000_000,
    matmul=8_192,
    profiled=256,
)
"""The work on a GPU."""

SMALL = Scale(
    models={},
    documents={"fixed-512": 2, "variable-256": 3, "fixed-8192": 1, "variable-4096": 1},
    rounds=1,
    texts={"variable-256": 4},
    training={
        "dense": Workload("MNRL", queries=(8, 12), documents=(12, 30), max_length=32, per_row=2, rows=4),
        "colbert": Workload("distillation", queries=(8, 12), documents=(12, 30), max_length=32, per_row=3, rows=4),
        "mlm": Workload("MLM", queries=(8, 12), documents=(16, 60), max_length=64, per_row=1, rows=4),
    },
    queries=8,
    search_queries=4,
    token_documents=50,
    document_tokens=10,
    token_width=16,
    dense_documents=200,
    matmul=256,
    profiled=1,
)
"""The same work in a size that a CPU does within a minute. Its figures say nothing about GPUs."""

LOSSES: Mapping[str, str] = {"dense": "mnrl", "colbert": "distillation", "mlm": "masked_lm"}
"""Kind of model -> loss of the training stage."""

SIZES = ("base", "large")


@dataclass(frozen=True)
class Context:
    """What a stage needs to know.

    Attributes:
        device: ``cuda``, or ``cpu`` for the small form.
        until: When the stage should end, in seconds since the epoch.
        folder: Folder for models.
        seed: Random seed of weights, ids and vectors.
    """

    device: str
    until: float
    folder: Path
    seed: int

    @property
    def scale(self) -> Scale:
        """Sizes of the work on the device."""
        return FULL if self.device == "cuda" else SMALL

    @property
    def dtype(self) -> str:
        """Default dtype of models on the device."""
        return default_dtype(self.device)

    def left(self) -> float:
        """Time left, in seconds, at least 1: what must run at least once gets that."""
        return max(1.0, self.until - time.time())

    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.time() >= self.until

    def model(self, size: str) -> str:
        """A preset, or the folder of a tiny model."""
        if size in self.scale.models:
            return self.scale.models[size]
        return str(tiny_model(self.folder / f"tiny-{size}", layers=2 if size == "base" else 3))


@dataclass
class Measured:
    """What a stage has measured.

    Attributes:
        cases: Measurements.
        not_run: What was not measured, and why.
        notes: Sentences about what was shortened.
        path: File that is written whenever a case is added, so that it is not lost if the process crashes later; None for no file.
    """

    cases: list[Case] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    path: Path | None = None

    def add(self, *cases: Case, rounds: int | None = None) -> None:
        """Add cases or replace those of the same names.

        Args:
            cases: The cases.
            rounds: Planned rounds; a case that has fewer gets a note.
        """
        for case in cases:
            self.cases = [*(each for each in self.cases if each.name != case.name), case]
            done = [len(row.series["seconds"].values) for row in case.rows if "seconds" in row.series]
            if rounds is not None and done and min(done) < rounds:
                self.notes.append(f"{case.name}: {min(done)} of {rounds} rounds, because the time of the stage was over")
        if self.path is not None:
            write_json(self.path, self.record())

    def record(self) -> dict[str, Any]:
        """Parsed JSON of cases, ``not_run`` and notes."""
        return {
            "cases": [asdict(case) for case in self.cases],
            "not_run": [asdict(each) for each in self.not_run],
            "notes": self.notes,
        }


Stage: TypeAlias = Callable[[Context, Measured], None]
"""Measures and adds to the second argument."""


def tiny_model(folder: Path, *, layers: int) -> Path:
    """Write a ModernBERT of a few thousand weights, with a tokenizer, into a folder unless it is there."""
    if not (folder / "config.json").is_file():
        tokenizer = Tokenizer.train([ENGLISH] * 2, vocab_size=PRESET_VOCABULARY, max_length=8_192)
        ids: dict[str, Any] = {f"{name}_token_id": tokenizer.special_id(name) for name in ("pad", "cls", "sep")}
        config = EncoderConfig.modernbert(
            vocab_size=PRESET_VOCABULARY,
            hidden_size=64,
            num_heads=2,
            intermediate_size=96,
            layer_types=global_every(layers, 3),
            max_positions=8_192,
            **ids,
        )
        save_encoder(init_weights(Encoder(config), seed=1), folder)
        tokenizer.save(folder)
    return folder


# Tests.


class _Recorder:
    """A pytest plugin that records outcomes and ends the session when the time is over.

    It records after each test, so that a later one that hangs or crashes does not cost the outcomes before it.
    """

    def __init__(self, context: Context, measured: Measured) -> None:
        self._context, self._measured = context, measured
        self._session: Any = None
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.collected = 0
        self.not_collected: list[tuple[str, str]] = []

    def pytest_sessionstart(self, session: Any) -> None:
        self._session = session

    def pytest_collection_finish(self, session: Any) -> None:
        self.collected = len(session.items)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.not_collected.append((str(report.nodeid), _last_line(report.longreprtext)))

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = report.outcome
        if report.when == "call" or outcome != "passed":
            self.outcomes[report.nodeid] = outcome, _last_line(report.longreprtext) if outcome == "failed" else ""
        if report.when == "teardown":
            self.record()
        if self._context.is_over():
            self._session.shouldstop = "the time of the stage is over"

    def record(self) -> None:
        """Add the outcomes so far to what was measured."""
        found = self.outcomes.values()
        counts: dict[str, Scalar] = {kind: sum(outcome == kind for outcome, _ in found) for kind in ("passed", "failed", "skipped")}
        rows = [
            Row(OWN, {}, {"outcome": outcome, "message": message}, variant=name)
            for name, (outcome, message) in self.outcomes.items()
            if outcome == "failed"
        ]
        title = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        self._measured.add(Case("tests", f"pytest -m gpu: {title}", counts, tuple(rows)))


def _last_line(text: str) -> str:
    """The last line that says something: of a traceback, the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    return (errors or lines or ["no message"])[0 if errors else -1]


def gpu_tests(context: Context, measured: Measured, root: Path | None = None) -> None:
    """Run the tests with the marker ``gpu``, if this is a checkout; outside a GPU all of them are skipped.

    Args:
        context: Device and time of the stage.
        measured: Receives the outcomes, after each test.
        root: Checkout with the folder ``tests``; None for the one that runs.

    Raises:
        RuntimeError: pytest could not run.
    """
    import pytest

    root = root or Path(quiver.__file__).resolve().parents[1]
    files = [path for path in sorted((root / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    if not files:
        measured.not_run.append(NotRun("tests", "an installed package has no tests; run from a checkout"))
        return
    recorder = _Recorder(context, measured)
    with TemporaryDirectory(prefix="quiver-bench-") as temporary:
        options = ["-m", "gpu", "-q", "--continue-on-collection-errors", "--import-mode=importlib", "-p", "no:cacheprovider"]
        # addopts of pyproject.toml needs pytest-xdist.
        status = pytest.main(
            [*map(str, files), *options, "-o", "addopts=", f"--rootdir={root}", f"--basetemp={temporary}/tests"], plugins=[recorder]
        )
    if status in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):  # such as a conftest.py that cannot be imported
        raise RuntimeError(f"pytest could not run the tests (status {int(status)})")
    if (missed := recorder.collected - len(recorder.outcomes)) > 0:
        measured.notes.append(f"tests: {missed} of {recorder.collected} did not run, because the time of the stage was over")
    measured.not_run += [NotRun(name, f"not collected: {message}") for name, message in recorder.not_collected]
    recorder.record()


# Encoders.


def encoders(context: Context, measured: Measured, *, size: str) -> None:
    """Time a size of ModernBERT on the paper's sets, beside the other libraries; then search for the largest batch."""
    model, scale = context.model(size), context.scale
    cuda = context.device == "cuda"
    settings = EncoderSettings(
        device=context.device,
        dtype=context.dtype,
        rounds=scale.rounds,
        seconds=context.left() * 0.4 / len(PAPER_SETS),
        seed=context.seed,
        memory=cuda,
    )
    workloads = [paper_workload(name, documents=scale.documents.get(name) or default_documents(name, settings)) for name in PAPER_SETS]
    available = {OWN: BACKENDS[OWN], **BASELINES}
    try:
        found = bench_token_ids(model, workloads, settings, available=available)
    except (InputError, RuntimeError) as error:
        # Another library may run out of memory or refuse the model; a failure of Quiver's own ends the stage.
        measured.not_run.append(NotRun(f"other libraries, {size}", f"{type(error).__name__}: {first_line(error)}"))
        free_memory()
        found = bench_token_ids(model, workloads, settings, backends=[], available=available)
    measured.not_run += [replace(each, what=f"{each.what}, {size}") for each in found.not_run]
    names = [row.backend for row in found.cases[0].rows]
    facts: Mapping[str, Scalar] = {"model": scale.models.get(size, "tiny"), "dtype": context.dtype, **found.metadata}
    for case in found.cases:
        measured.add(_labelled(case, size, facts), rounds=scale.rounds)
    del found
    if cuda:
        for case in _largest_batches(context, measured, model, names, settings):
            measured.add(_labelled(case, size, facts))
    else:
        measured.not_run.append(NotRun(f"largest batch, {size}", "searched on a GPU only"))


def _labelled(case: Case, label: str, facts: Mapping[str, Scalar]) -> Case:
    return replace(case, name=f"{label} {case.name}", title=f"{label}, {case.title}", metadata={**case.metadata, **facts})


def _largest_batches(context: Context, measured: Measured, model: str, names: Sequence[str], settings: EncoderSettings) -> Iterator[Case]:
    """Largest batches of 512 and 8,192 tokens that fit into the GPU, with a row more each time; one backend at a time is in memory.

    Quiver comes last: a kernel of ours that fails on such sizes must not cost the figures of the others.
    """
    rows: list[Row] = []
    for name in reversed(names):
        free_memory()
        measure, _ = open_token_ids(name, model, asdict(settings))
        for length in (512, 8_192):
            if context.is_over():
                measured.notes.append(f"largest batch of {name} at {length} tokens: not searched, because the time of the stage was over")
                continue
            try:
                fits, fails, reason = largest_on_gpu(measure, length, stop=context.is_over)
            except RuntimeError as error:  # of a library at a size that nobody runs; Quiver's own ends the stage
                if name == OWN:
                    raise
                measured.not_run.append(
                    NotRun(f"largest batch of {name} at {length} tokens", f"{type(error).__name__}: {first_line(error)}")
                )
                continue
            if reason == NO_TIME:
                measured.notes.append(f"largest batch of {name} at {length} tokens: the search ended early; at least {fits:,} fit")
            rows.append(Row(name, {}, {"length": length, "documents": fits, "failed": fails, "reason": reason}, variant=f"{length:,}"))
            yield Case(LARGEST_BATCH, LARGEST_BATCH, {}, tuple(rows))
        del measure


NO_TIME = "no time left"
"""Why a search for the largest batch ended early."""


def largest_on_gpu(
    measure: Callable[[dict[str, Any]], Answer], length: int, *, stop: Callable[[], bool], tolerance: float = 1 / 16
) -> tuple[int, int | None, str | None]:
    """Search for the largest batch that fits into the GPU, in this process.

    The search starts near the size that the memory of a smaller batch predicts.

    Args:
        measure: See `quiver.eval.bench.encoder.open_token_ids`; raises torch's error if memory runs out.
        length: Tokens of each document.
        stop: Whether to end the search now.
        tolerance: See `quiver.eval.bench.encoder.search_largest`.

    Returns:
        As `search_largest`.
    """
    probe = max(1, 65_536 // length)

    def added(documents: int) -> int | None:
        """Bytes that a pass adds; None if they do not fit."""
        try:
            return int(measure({"batches": [[length] * documents]})["above"])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        free_memory()  # outside of the block above: the error holds the tensors of the pass
        return None

    def refusal(documents: int) -> str | None:
        if stop():
            return NO_TIME
        return "out of memory" if added(documents) is None else None

    above = added(probe)
    free_memory()
    free, _ = torch.cuda.mem_get_info()
    guess = 1 if above is None else max(1, int(0.9 * probe * free / max(above, 1)))
    return search_largest(refusal, ceiling=1 << 20, tolerance=tolerance, first=guess, growth=1.25)


# Texts.


def texts(context: Context, measured: Measured) -> None:
    """Time text to vectors on the host, beside the model alone and sentence-transformers."""
    scale = context.scale
    with TemporaryDirectory(prefix="quiver-bench-") as temporary:
        folder, tokenizer = _bi_encoder(context, Path(temporary))
        write = training.text_writer(tokenizer, random.Random(context.seed))
        for name, documents in scale.texts.items():
            if context.is_over():
                measured.not_run.append(NotRun(f"texts {name}", "no time left in the stage"))
                continue
            written = [write(length) for length in paper_workload(name, documents=documents).lengths]
            settings = EncoderSettings(
                device=context.device,
                dtype=context.dtype,
                rounds=scale.rounds,
                seconds=context.left() * 0.5 / len(scale.texts),
                seed=context.seed,
            )
            available: dict[str, TextBackend] = {
                **{each: TEXT_BACKENDS[each] for each in (OWN, "sentence-transformers")},
                ONLY_MODEL: TextBackend(_model_alone, lambda settings: None),
            }
            reason = TEXT_BACKENDS["sentence-transformers"].unsupported_reason(settings)
            if reason is not None:
                measured.not_run.append(NotRun("texts with sentence-transformers", reason))
            names = [ONLY_MODEL, *(["sentence-transformers"] if reason is None else [])]
            found = bench_texts(str(folder), written, settings, name=f"texts {name}", backends=names, available=available)
            measured.add(*found.cases, rounds=scale.rounds)


def _bi_encoder(context: Context, folder: Path) -> tuple[Path, Tokenizer]:
    """Write the base model as a folder that all libraries open as a bi-encoder with mean pooling."""
    encoder, tokenizer = open_model(context.model("base"), seed=context.seed)
    initial = write_initial_model(folder, encoder, tokenizer, TrainingSettings({"dense": "mnrl"}), compared=False)
    return initial.encoder, tokenizer


def _model_alone(model: str, settings: EncoderSettings, texts: Sequence[str]) -> LoadedTextEncoder:
    """Quiver's model on batches that are prepared at the first call: what remains is the rate of the model."""
    own = load_model(model, dtype=DTYPES[settings.dtype], device=settings.device)
    if not isinstance(own, BiEncoder):
        raise InputError(f"{model}: not a bi-encoder")
    ids = own.tokenize(list(texts), "document").ids
    size = own.batch_size.limit(max(map(len, ids)))
    batches = [replace(batch, batch_invariant=True).to(settings.device) for batch in pack(ids, max_tokens=size)]
    found: list[NDArray[np.float32]] = []

    def encode(wanted: list[str]) -> NDArray[np.float32]:
        with torch.inference_mode():
            pooled = [own.pool(own.encoder(replace(batch, memo={})), batch) for batch in batches]
        if not found:
            vectors = np.empty((len(wanted), own.dim), np.float32)
            for batch, each in zip(batches, pooled, strict=True):
                vectors[list(batch.rows)] = each.float().cpu().numpy()
            found.append(vectors)
        if settings.device == "cuda":
            torch.cuda.synchronize()
        return found[0]

    return LoadedTextEncoder(encode)


# Training.


def training_steps(context: Context, measured: Measured) -> None:
    """Time training steps of each kind of model beside the plain libraries."""
    scale = context.scale
    kinds = list(scale.training)
    for number, kind in enumerate(kinds):
        workload = scale.training[kind]
        if reason := missing_library(kind):
            measured.not_run.append(NotRun(f"training, {workload.name}", f"training needs {reason}"))
            continue
        if context.is_over():
            measured.not_run.append(NotRun(f"training, {workload.name}", "no time left in the stage"))
            continue
        settings = TrainingSettings(
            {kind: LOSSES[kind]},
            rounds=scale.rounds,
            seconds=context.left() * 0.5 / (len(kinds) - number),
            dtype=training_dtype("auto", context.device),
            memory=context.device == "cuda",
            seed=context.seed,
        )
        found = None
        for baselines in (True, False):
            try:
                found = training.bench_training(context.model("base"), [workload], replace(settings, baselines=baselines))
                break
            except (InputError, RuntimeError, TypeError, AttributeError, LookupError, ImportError) as error:
                # A library of another version may name its classes otherwise, or run out of memory where Quiver does not.
                traceback.print_exc()
                measured.not_run.append(
                    NotRun(f"{LIBRARIES[kind] if baselines else OWN}, {workload.name}", f"{type(error).__name__}: {first_line(error)}")
                )
            free_memory()
        if found is None:
            continue
        measured.not_run += [replace(each, what=f"{each.what}, {workload.name}") for each in found.not_run]
        measured.add(*(replace(case, name=f"training {workload.name}") for case in found.cases), rounds=scale.rounds)
    if not measured.cases:
        raise RuntimeError(f"no kind of model could be trained: {measured.not_run[-1].reason}")


# Queries.


def queries(context: Context, measured: Measured) -> None:
    """Time queries one at a time, from text to vector on the host."""
    scale = context.scale
    with TemporaryDirectory(prefix="quiver-bench-") as temporary:
        folder, tokenizer = _bi_encoder(context, Path(temporary))
        generator = random.Random(context.seed)
        write = training.text_writer(tokenizer, generator)
        written = [write(generator.randint(8, 20)) for _ in range(scale.queries)]
        settings = EncoderSettings(device=context.device, dtype=context.dtype, seed=context.seed)
        encoders = dict(_query_encoders(str(folder), settings, measured))
        passes = {name: _one_by_one(encode, written) for name, encode in encoders.items()}
        for encode in encoders.values():
            for text in written[:10]:
                encode(text)
        timings = time_rounds(passes, rounds=len(written), seconds=context.left() * 0.8)
    rows = []
    for name, timing in timings.items():
        p50, p95 = percentiles(timing.seconds)
        rows.append(Row(name, {"seconds": Series.of(timing.seconds)}, {"p50": 1000 * p50, "p95": 1000 * p95}))
    case = Case("queries", f"queries of 8 to 20 tokens, one at a time: {scale.queries}", {"queries": scale.queries}, tuple(rows))
    measured.add(replace(case, rows=with_ratios(case.rows, {"seconds": "time_ratio"})), rounds=len(written))


def _query_encoders(model: str, settings: EncoderSettings, measured: Measured) -> Iterator[tuple[str, Callable[[str], object]]]:
    own = load_model(model, dtype=DTYPES[settings.dtype], device=settings.device)
    yield OWN, lambda text: own.encode_query([text])
    if settings.device == "cuda":
        yield NO_GRAPHS, lambda text: _without_graphs(lambda: own.encode_query([text]))
    else:
        measured.not_run.append(NotRun("queries without CUDA graphs", "a CPU has none"))
    other = TEXT_BACKENDS["sentence-transformers"]
    if reason := other.unsupported_reason(settings):
        measured.not_run.append(NotRun("queries with sentence-transformers", reason))
        return
    loaded = other.load(model, settings, [])
    yield "sentence-transformers", lambda text: loaded.encode([text])


def _without_graphs(run: Callable[[], object]) -> object:
    """Run without CUDA graphs, which an environment variable turns off."""
    os.environ[GRAPHS_VARIABLE] = "0"
    try:
        return run()
    finally:
        os.environ[GRAPHS_VARIABLE] = "1"


def _one_by_one(encode: Callable[[str], object], texts: Sequence[str]) -> Pass:
    """A pass that encodes the next text."""
    remaining = iter(texts)

    def run() -> None:
        encode(next(remaining))

    return run


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Median and 95th percentile.

    Example:
        >>> percentiles([1.0, 2.0, 3.0])
        (2.0, 2.9)
    """
    if len(values) == 1:
        return values[0], values[0]
    cuts = quantiles(values, n=20, method="inclusive")
    return cuts[9], round(cuts[18], 12)


# Search.


def searches(context: Context, measured: Measured) -> None:
    """Time exact search of token vectors and of dense vectors."""
    scale = context.scale
    generator = np.random.default_rng(context.seed)
    length, width = scale.document_tokens, scale.token_width
    tokens = _unit_vectors(generator, scale.token_documents * length, width)
    token_queries = [_unit_vectors(generator, 32, width) for _ in range(scale.search_queries)]
    lengths = np.full(scale.token_documents, length)
    _search(context, measured, tokens, token_queries, lengths=lengths, kind="colbert")
    del tokens
    if context.is_over():
        measured.not_run.append(NotRun("dense search", "no time left in the stage"))
        return
    width = 768 if context.device == "cuda" else scale.token_width
    vectors, dense_queries = _unit_vectors(generator, scale.dense_documents, width), _unit_vectors(generator, scale.search_queries, width)
    _search(context, measured, vectors, dense_queries, lengths=None, kind="dense")


def _unit_vectors(generator: np.random.Generator, rows: int, width: int) -> NDArray[np.float32]:
    """Random unit vectors: a block of at most 65,536 distinct ones, repeated with other signs, since drawing all would take minutes."""
    distinct = generator.standard_normal((min(rows, 65_536), width), np.float32)
    distinct /= np.linalg.norm(distinct, axis=1, keepdims=True)
    if rows == len(distinct):
        return distinct
    vectors = np.empty((rows, width), np.float32)
    for start in range(0, rows, len(distinct)):
        part = vectors[start : start + len(distinct)]
        np.multiply(distinct[: len(part)], generator.choice([-1.0, 1.0], width).astype(np.float32), out=part)
    return vectors


def _search(context: Context, measured: Measured, vectors: Any, queries: Any, *, lengths: NDArray[np.int64] | None, kind: Any) -> None:
    """Index random vectors in memory and time the exact search."""
    width, documents = vectors.shape[1], len(vectors) if lengths is None else len(lengths)
    similarity: Any = "maxsim" if kind == "colbert" else "dot"
    card = ModelCard("random vectors", kind, "0" * 64, width, similarity, 32, context.scale.document_tokens, dtype=context.dtype)  # type: ignore[arg-type]  # a name of a dtype
    index = index_vectors([f"{row:08d}" for row in range(documents)], vectors, card, lengths=lengths, device=torch.device(context.device))
    name = "MaxSim search" if lengths is not None else "dense search"

    def search(count: int) -> float:
        return time_rounds({OWN: lambda: index.search(queries[:count], 10)}, rounds=1)[OWN].seconds[0]

    search(min(_FIRST_QUERIES, len(queries)))  # copies vectors and loads kernels
    count = affordable(search, len(queries), seconds=context.left() * 0.2)
    if count < len(queries):
        measured.notes.append(f"{name}: {count:,} of {len(queries):,} queries, because the time of the stage does not suffice for all")
    timing = time_rounds({OWN: lambda: index.search(queries[:count], 10)}, rounds=_SEARCHES, seconds=context.left() * 0.5)[OWN]
    tokens = f" of {context.scale.document_tokens} tokens" if lengths is not None else ""
    case = Case(
        name,
        f"{name}: {count:,} queries over {documents:,} documents{tokens}, width {width}, exact",
        {"queries": count, "documents": documents, "width": width, "vectors": len(vectors)},
        (Row(OWN, {"seconds": Series.of(timing.seconds)}, {"queries_per_second": count / Series.of(timing.seconds).median}),),
    )
    measured.add(case, rounds=_SEARCHES)


_SEARCHES = 3
_FIRST_QUERIES, _GROWTH = 8, 8


def affordable(run: Callable[[int], float], most: int, *, seconds: float) -> int:
    """Number of queries that can be searched in the given time: a few, eight times as many, and so on while the time suffices.

    Args:
        run: Searches with a number of queries and returns its time in seconds.
        most: Number of queries that are wanted.
        seconds: Time for one search of all.

    Example:
        >>> affordable(lambda count: 0.01 * count, 1000, seconds=60), affordable(lambda count: 0.01 * count, 1000, seconds=6)
        (1000, 600)
    """
    count = min(_FIRST_QUERIES, most)
    while count < most:
        taken = run(count)
        enlarged = min(_GROWTH * count, most)
        if taken * enlarged / count > seconds:
            return max(count, min(most, round(count * seconds / taken)))
        count = enlarged
    return count


# Profiles.


def profiles(context: Context, measured: Measured) -> None:
    """Measure the device's rate of matrix products, and profile a forward pass and a training step."""
    scale = context.scale
    rate = matmul_rate(context.device, DTYPES[context.dtype], scale.matmul)
    size = scale.matmul
    metadata: dict[str, Scalar] = {"flops_per_second": rate, "size": size, "dtype": context.dtype}
    measured.add(Case("matrix product", f"matrix product: {size:,} x {size:,} x {size:,}, {context.dtype}", metadata, ()))
    measured.add(_profile_forward(context))
    free_memory()
    if context.is_over():
        measured.not_run.append(NotRun("profile of a training step", "no time left in the stage"))
        return
    measured.add(_profile_step(context))


def _profile_forward(context: Context) -> Case:
    settings = EncoderSettings(device=context.device, dtype=context.dtype, seed=context.seed)
    encoder = open_encoder(context.model("base"), settings)
    lengths = [512] * context.scale.profiled
    batch = BACKENDS[OWN].load(encoder).prepare(list(random_documents(lengths, encoder.config, seed=context.seed)))

    def forward() -> None:
        with torch.inference_mode():
            batch.forward()

    flops = training_flops(encoder.config, lengths, masked=0) // 3  # the backward pass has twice the products
    title = f"forward pass: base, {len(lengths)} x 512 tokens, {context.dtype}"
    return _profile(context, "forward pass", title, forward, flops)


def _profile_step(context: Context) -> Case:
    workload = context.scale.training["mlm"]
    # Warm-up, timed and profiled steps: see `_profile`.
    settings = TrainingSettings(
        {"mlm": LOSSES["mlm"]}, rounds=_PROFILED_PASSES, dtype=training_dtype("auto", context.device), seed=context.seed
    )
    with TemporaryDirectory(prefix="quiver-bench-") as temporary, quiet_libraries():
        encoder, tokenizer = open_model(context.model("base"), seed=context.seed)
        initial = write_initial_model(Path(temporary), encoder, tokenizer, settings, compared=False)
        backend = load_backend(OWN, "mlm", workload, settings, initial)
    rows = training.make_batches(
        workload, training.synthetic_source, tokenizer, count=1, size=workload.rows, scored=False, seed=context.seed
    )[0]
    lengths = backend.lengths(rows)
    masked = backend.masked_tokens(rows)
    flops = training_flops(encoder.config, lengths, masked=masked)
    title = f"training step: base, masked language model, {len(lengths)} documents, {sum(lengths):,} tokens, {settings.dtype}"
    return _profile(context, "training step", title, lambda: backend.step(rows), flops)


_WARM_UP, _TIMED = 3, 5
_PROFILED_PASSES = _WARM_UP + _TIMED + 1

SHOWN_KERNELS = 15
"""Kernels with a row of their own; the others share one."""


def _profile(context: Context, name: str, title: str, run: Pass, flops: int) -> Case:
    """Time passes without the profiler, then profile one."""

    def waited() -> None:
        run()
        if context.device == "cuda":
            torch.cuda.synchronize()

    for _ in range(_WARM_UP):
        waited()
    seconds = Series.of(time_rounds({OWN: waited}, rounds=_TIMED, seconds=context.left() * 0.3)[OWN].seconds)
    kernels = kernel_times(waited, context.device)
    total = sum(each for each, _ in kernels.values())
    ordered = sorted(kernels.items(), key=lambda item: -item[1][0])
    rows = [Row(OWN, {}, {"seconds": spent, "share": spent / total, "calls": calls}, variant=kernel) for kernel, (spent, calls) in ordered]
    if len(rows) > SHOWN_KERNELS:
        rest = [row.values for row in rows[SHOWN_KERNELS:]]
        sums: dict[str, Scalar] = {key: sum(float(each[key] or 0) for each in rest) for key in ("seconds", "share")}
        sums["calls"] = sum(int(each["calls"] or 0) for each in rest)
        rows = [*rows[:SHOWN_KERNELS], Row(OWN, {}, sums, variant=f"{len(rest)} others")]
    metadata: dict[str, Scalar] = {
        "seconds": seconds.median,
        "flops": flops,
        "flops_per_second": flops / seconds.median,
        "kernel_seconds": total,
        "kernels": sum(calls for _, calls in kernels.values()),
        "busy": total / seconds.median if context.device == "cuda" else None,
    }
    return Case(name, title, metadata, tuple(rows))


def kernel_times(run: Pass, device: str) -> dict[str, tuple[float, int]]:
    """Profile a pass: kernel (on a CPU: operator) -> its time in seconds and its number of calls.

    Raises:
        RuntimeError: The profiler saw no kernel.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    found: dict[str, tuple[float, int]] = {}
    for event in profiler.key_averages():
        on_device = str(event.device_type).endswith("CUDA")
        if on_device and event.is_user_annotation:  # spans of kernels that are counted themselves
            continue
        microseconds = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if on_device == (device == "cuda") and microseconds > 0:
            name = kernel_name(event.key)
            spent, calls = found.get(name, (0.0, 0))
            found[name] = spent + microseconds / 1e6, calls + int(event.count)
    if not found:
        raise RuntimeError("the profiler saw no kernels; does the driver permit profiling?")
    return found


# Identifiers of template arguments that say what a kernel computes.
_TELLING = re.compile(r"\b(\w*(?:Functor|KernelImpl|CUDAKernel|Ops|gemm)\w*)")


def kernel_name(name: str, *, width: int = 80) -> str:
    """Shorten the name of a kernel, which may have thousands of characters: of the template arguments only what it computes.

    Example:
        >>> kernel_name("void at::native::reduce_kernel<512, 1, at::native::MeanOps<float> >(at::native::ReduceOp<float>)")
        'at::native::reduce_kernel, MeanOps'
        >>> kernel_name("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN")
        'nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN'
    """
    plain = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0].strip() or name
    told = _TELLING.search(name[name.find("<") :]) if "<" in name else None
    short = plain if told is None else f"{plain}, {told[1]}"
    return short if len(short) <= width else short[: width - 1] + "…"


def matmul_rate(device: str, dtype: torch.dtype, size: int, *, repeats: int = 10) -> float:
    """Measure the FLOP/s of products of square random matrices.

    Args:
        device: ``cpu`` or ``cuda``.
        dtype: Dtype of the matrices.
        size: Rows and columns.
        repeats: Products per measurement; the best of three counts.
    """
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))

    def run() -> None:
        for _ in range(repeats):
            torch.mm(left, right)
        if device == "cuda":
            torch.cuda.synchronize()

    run()
    best = min(time_rounds({OWN: run}, rounds=3)[OWN].seconds)
    return 2 * size**3 * repeats / best


STAGES: Mapping[str, tuple[str, int, Stage]] = {
    "tests": ("Tests", 80, gpu_tests),
    "encoder-base": ("Encoder, base", 110, lambda context, measured: encoders(context, measured, size="base")),
    "encoder-large": ("Encoder, large", 90, lambda context, measured: encoders(context, measured, size="large")),
    "texts": ("Text to vectors", 50, texts),
    "training": ("Training", 80, training_steps),
    "queries": ("Queries", 25, queries),
    "search": ("Search", 40, searches),
    "profile": ("Profile", 35, profiles),
}
"""Name -> title, weight in the division of the time (about the seconds on an H100), and measurement, in the order in which they run."""


def partial_file(folder: Path, stage: str) -> Path:
    """File with the cases of a stage that is not done."""
    return folder / f"{stage}.json"


def open_stage(stage: str, device: str, until: float, folder: str, seed: int) -> tuple[Callable[[dict[str, Any]], Answer], Answer]:
    """Target of child processes: runs a stage.

    Args:
        stage: A key of `STAGES`.
        device: ``cuda`` or ``cpu``.
        until: See `Context`.
        folder: See `Context`.
        seed: See `Context`.

    Returns:
        A function that gives every request the empty answer, and as first answer the record of `Measured`.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    measured = Measured(path=partial_file(Path(folder), stage))
    STAGES[stage][2](Context(device, until, Path(folder), seed), measured)
    return lambda request: {}, measured.record()
