"""GPU: one command that measures everything a GPU runs, in stages, beside other libraries, and compares it with the targets.

Every stage runs in a process of its own and gets the time that is left in proportion to its weight; what does not fit has fewer rounds, or
a note says that it was left out. Results are written after every stage: the same command goes on with those that are not done. A stage that
crashes or hangs becomes a note, the next one runs, and a repeated command tries it again.

It runs without a network, and from a checkout that is not installed. Without a GPU the same stages run in a small form on the CPU, which
tests this script; those figures say nothing about GPUs.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

try:
    import quiver.encoder  # noqa: F401
except ImportError:  # a checkout that is not installed: its links show the folders as packages
    ROOT = Path(__file__).resolve().parent.parent
    subprocess.run(["bash", str(ROOT / ".ci" / "link-types")], check=True)
    sys.path.insert(1, str(ROOT / ".typing"))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / ".typing"), os.environ.get("PYTHONPATH", "")])

import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, pack, save_encoder
from quiver.encoder.config import global_every
from quiver.encoder.errors import InputError
from quiver.encoder.model import GRAPHS_VARIABLE
from quiver.encoder.pretraining.task import peak_flops, training_flops
from quiver.encoder.training.optimization import training_dtype
from quiver.retrieval.index import index_vectors
from quiver.retrieval.models.pretrained import check_device, default_device, default_dtype
from quiver.retrieval.records import ModelCard
from quiver.retrieval.training.model import missing_library

import encoder as encoder_script
import harness
import training as training_script
from harness import BACKEND, OWN, RATIO, VARIANT, Column, Results, Row, Worker, WorkerError

ONLY_MODEL, NO_GRAPHS = "quiver-model", "quiver-no-graphs"
SETS = ("fixed-512", "variable-256", "fixed-8192", "variable-4096")


# Sizes of the work. models: size of the paper -> preset, empty for tiny models; documents: of each of the paper's sets, missing for one
# batch; texts: the paper's set whose lengths the texts have -> number of texts; queries: one at a time; matmul: rows and columns of the
# matrices whose product shows the rate of the device; profiled: documents of 512 tokens in the profiled pass.
FULL = SimpleNamespace(
    models={"base": "modernbert-base", "large": "modernbert-large"},
    documents={},
    rounds=10,
    texts={"variable-256": 4_096, "variable-4096": 128},
    training={
        "dense": training_script.Workload("MNRL", (8, 20), (20, 180), 180, 2, 128),
        "colbert": training_script.Workload("distillation", (8, 20), (20, 180), 180, 8, 32),
        "mlm": training_script.Workload("MLM", (8, 20), (256, 1_024), 1_024, 1, 32),
    },
    queries=200,
    search_queries=1_000,
    token_documents=100_000,
    document_tokens=110,
    token_width=128,
    dense_documents=1_000_000,
    dense_width=768,
    matmul=8_192,
    profiled=256,
)
SMALL = SimpleNamespace(
    models={},
    documents={"fixed-512": 2, "variable-256": 3, "fixed-8192": 1, "variable-4096": 1},
    rounds=1,
    texts={"variable-256": 4},
    training={
        "dense": training_script.Workload("MNRL", (8, 12), (12, 30), 32, 2, 4),
        "colbert": training_script.Workload("distillation", (8, 12), (12, 30), 32, 3, 4),
        "mlm": training_script.Workload("MLM", (8, 12), (16, 60), 64, 1, 4),
    },
    queries=8,
    search_queries=4,
    token_documents=50,
    document_tokens=10,
    token_width=16,
    dense_documents=200,
    dense_width=16,
    matmul=256,
    profiled=1,
)
LOSSES = {"dense": "mnrl", "colbert": "distillation", "mlm": "masked_lm"}


class Context:
    """What a stage knows: device, end of its time in seconds since the epoch, folder for models, seed, and where its results go."""

    def __init__(self, device: str, until: float, folder: Path, seed: int, results: Results) -> None:
        self.device, self.until, self.folder, self.seed, self.results = device, until, folder, seed, results
        self.scale = FULL if device == "cuda" else SMALL
        self.dtype = default_dtype(device)

    def left(self) -> float:
        """Seconds left, at least 1: what must run at least once gets that."""
        return max(1.0, self.until - time.time())

    def skips(self, what: str) -> bool:
        over = time.time() >= self.until
        if over:
            self.results.notes.append(f"{what}: no time left in the stage")
        return over

    def options(self, share: float, **others: Any) -> dict[str, Any]:
        """Options of the other scripts, with a share of the time that is left for the rounds of a case."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "seed": self.seed,
            "rounds": self.scale.rounds,
            "train": False,
            "batch_size": None,
            "batch_tokens": encoder_script.BATCH_TOKENS[self.device],
            "memory": False,
            "seconds": self.left() * share,
            **others,
        }

    def model(self, size: str) -> str:
        if size in self.scale.models:
            return self.scale.models[size]
        folder = self.folder / f"tiny-{size}"
        if not (folder / "config.json").is_file():
            tokenizer = Tokenizer.train([training_script.ENGLISH] * 2, vocab_size=1_024, max_length=8_192)
            ids: dict[str, Any] = {f"{name}_token_id": tokenizer.special_id(name) for name in ("pad", "cls", "sep")}
            layers = global_every(2 if size == "base" else 3, 3)
            shape = {"hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "layer_types": layers, "max_positions": 8_192}
            save_encoder(init_weights(Encoder(EncoderConfig.modernbert(vocab_size=1_024, **shape, **ids)), seed=1), folder)
            tokenizer.save(folder)
        return str(folder)


# Stages.


def run_tests(context: Context) -> None:
    """Run the tests that are marked ``gpu`` until the time is over."""
    root, log = Path(__file__).resolve().parent.parent, context.folder / "tests.txt"
    files = [str(path) for path in sorted((root / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    # addopts of pyproject.toml needs pytest-xdist.
    options = ["-m", "gpu", "-v", "--tb=line", "--import-mode=importlib", "-p", "no:cacheprovider", "-o", "addopts="]
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "pytest", *files, *options, f"--rootdir={root}"]
        try:
            status = subprocess.run(command, cwd=root, stdout=file, stderr=subprocess.STDOUT, timeout=context.left()).returncode
        except subprocess.TimeoutExpired:
            status = 0
            context.results.notes.append("tests: some did not run, because the time of the stage was over")
    text = log.read_text(encoding="utf-8")
    outcomes = re.findall(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)", text, re.MULTILINE)
    if status > 1:  # neither passed nor failed
        context.results.notes.append(f"tests: pytest ended with status {status}: {(text.strip().splitlines() or ['no output'])[-1]}")
    counts = {kind: sum(outcome == kind for _, outcome in outcomes) for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    failed = [{"backend": OWN, "variant": name} for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
    title = f"Tests, pytest -m gpu: {', '.join(f'{count} {kind.lower()}' for kind, count in counts.items())}"
    context.results.add("tests", title, (Column("failed", "variant"),), failed, "See tests.txt." if failed else "", counts=counts)


def time_encoders(context: Context, size: str) -> None:
    """A size of ModernBERT on the paper's sets beside transformers; then the largest batches."""
    options, model, workloads = context.options(0.4 / len(SETS), memory=context.device == "cuda"), context.model(size), {}
    for name in SETS:
        whole = encoder_script.paper_lengths(name, encoder_script.PAPER_DOCUMENTS)
        documents = context.scale.documents.get(name) or encoder_script.batch_size(whole, None, options["batch_tokens"])
        workloads[f"{size} {name}"] = whole[:documents]
    try:
        encoder_script.bench_token_ids(context.results, model, workloads, None, options)
    except (InputError, RuntimeError) as error:  # a library may run out of memory or refuse the model
        context.results.notes.append(f"other libraries, {size}: {harness.describe(error)}")
        torch.cuda.empty_cache()
        encoder_script.bench_token_ids(context.results, model, workloads, [], options)
    if context.device != "cuda":
        context.results.notes.append(f"largest batch, {size}: searched on a GPU only")
        return
    rows = []
    # Quiver comes last: a kernel of ours that fails on such sizes must not cost the figures of the others.
    for name in ("transformers-sdpa", OWN):
        if context.skips(f"largest batch of {name}, {size}"):
            continue
        torch.cuda.empty_cache()
        where = {"dtype": context.dtype, "device": context.device, "seed": context.seed}
        measure = encoder_script.open_token_ids(name, model, **where)
        for length in (512, 8_192):
            found = largest_batch(measure, length)
            rows.append({"backend": name, "variant": f"{length:,}", "documents": found})
        del measure
        columns = (BACKEND, Column("tokens", "variant"), Column("documents", "documents"))
        context.results.add(f"{size} largest batch", f"{size}, largest batch that fits", columns, rows)


def largest_batch(measure: Callable[[Any], Mapping[str, int]], length: int) -> int:
    """Largest batch by the memory that two sizes add, confirmed by a pass; a size that does not fit is reduced by 3 % at a time."""
    small = max(1, 65_536 // length)
    one, two = (measure([[length] * documents])["above"] for documents in (small, 2 * small))
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    per_document = max(1.0, (two - one) / small)
    documents = max(1, int((free - (one - per_document * small)) / per_document))
    for _ in range(20):
        try:
            measure([[length] * documents])
        except RuntimeError as error:
            if not harness.is_out_of_memory(error):
                raise
        else:
            return documents
        torch.cuda.empty_cache()  # outside of the block above: the error holds the tensors of the pass
        documents = max(1, int(0.97 * documents))
    raise RuntimeError(f"{documents} documents of {length} tokens do not fit")


def time_texts(context: Context) -> None:
    """From text to vectors on the host, beside the model alone and sentence-transformers."""
    with TemporaryDirectory(prefix="quiver-bench-") as temporary:
        folder, tokenizer = write_bi_encoder(context, Path(temporary))
        write = training_script.text_writer(tokenizer, random.Random(context.seed))
        available = {name: encoder_script.TEXT_BACKENDS[name] for name in (OWN, "sentence-transformers")} | {ONLY_MODEL: load_model_alone}
        options = context.options(0.5 / len(context.scale.texts))
        reason = encoder_script.text_refusal("sentence-transformers", options)
        names = [ONLY_MODEL, *(["sentence-transformers"] if reason is None else [])]
        for name, documents in context.scale.texts.items():
            if not context.skips(f"texts {name}"):
                written = [write(length) for length in encoder_script.paper_lengths(name, documents)]
                case = f"texts {name}"
                encoder_script.bench_texts(context.results, str(folder), written, names, options, case=case, available=available)


def write_bi_encoder(context: Context, folder: Path) -> tuple[Path, Tokenizer]:
    """The base model as a folder that all libraries open as a bi-encoder with mean pooling."""
    model, tokenizer = training_script.open_model(context.model("base"), context.seed)
    training_script.write_models(folder, model, tokenizer, seed=context.seed)
    return folder / "encoder", tokenizer


def load_model_alone(model: str, options: Mapping[str, Any], texts: Sequence[str]) -> encoder_script.Encode:
    """Quiver's model on batches that are tokenized, packed and on the device: the rate of the model."""
    own = encoder_script.load_bi_encoder(model, options)
    ids = own.tokenize(list(texts), "document").ids
    size = own.batch_size.limit(max(map(len, ids)))
    batches = [replace(batch, batch_invariant=True).to(options["device"]) for batch in pack(ids, max_tokens=size)]
    found: list[NDArray[np.float32]] = []

    def encode(wanted: list[str]) -> NDArray[np.float32]:
        with torch.inference_mode():
            pooled = [own.pool(own.encoder(replace(batch, memo={})), batch) for batch in batches]
        if not found:
            found.append(np.empty((len(wanted), own.dim), np.float32))
            for batch, each in zip(batches, pooled, strict=True):
                found[0][list(batch.rows)] = each.float().cpu().numpy()
        if options["device"] == "cuda":
            torch.cuda.synchronize()
        return found[0]

    return encode


def time_training(context: Context) -> None:
    kinds = context.scale.training
    for kind, workload in kinds.items():
        if reason := missing_library(kind):
            context.results.notes.append(f"training {workload.name}: needs {reason}")
            continue
        if context.skips(f"training {workload.name}"):
            continue
        dtype, share = training_dtype("auto", context.device), 0.5 / len(kinds)
        options = context.options(share, dtype=dtype, dropout=False, memory=context.device == "cuda", baselines=True)
        for baselines in (True, False):
            try:
                model, losses = context.model("base"), {kind: LOSSES[kind]}
                training_script.bench_training(context.results, model, [workload], losses, {**options, "baselines": baselines})
                break
            except (InputError, RuntimeError, TypeError, AttributeError, LookupError, ImportError) as error:
                # A library of another version may name its classes otherwise, or run out of memory where Quiver does not.
                context.results.notes.append(f"training {workload.name}{'' if baselines else ' alone'}: {harness.describe(error)}")
                torch.cuda.empty_cache()


def time_queries(context: Context) -> None:
    generator = random.Random(context.seed)
    with TemporaryDirectory(prefix="quiver-bench-") as temporary:
        folder, tokenizer = write_bi_encoder(context, Path(temporary))
        write = training_script.text_writer(tokenizer, generator)
        written = [write(generator.randint(8, 20)) for _ in range(context.scale.queries)]
        options = context.options(0.8)
        own = encoder_script.load_bi_encoder(str(folder), options)
        encoders: dict[str, Callable[[str], object]] = {OWN: lambda text: own.encode_query([text])}
        if context.device == "cuda":
            encoders[NO_GRAPHS] = patch.dict(os.environ, {GRAPHS_VARIABLE: "0"})(lambda text: own.encode_query([text]))
        if (reason := encoder_script.text_refusal("sentence-transformers", options)) is None:
            other = encoder_script.load_sentence_transformers(str(folder), options, [])
            encoders["sentence-transformers"] = lambda text: other([text])
        else:
            context.results.notes.append(f"queries with sentence-transformers: {reason}")
        for encode in encoders.values():
            for text in written[:10]:
                encode(text)
        remaining = {name: iter(written) for name in encoders}
        passes = {name: (lambda name=name, encode=encode: encode(next(remaining[name]))) for name, encode in encoders.items()}
        seconds = harness.time_rounds(passes, rounds=len(written), seconds=options["seconds"])
    rows = [
        {"backend": name, "seconds": taken, "p50": 1000 * median(taken), "p95": 1000 * float(np.percentile(taken, 95))}
        for name, taken in seconds.items()
    ]
    columns = (BACKEND, Column("p50, ms", "p50", ",.3f"), Column("p95, ms", "p95", ",.3f"), RATIO)
    context.results.add("queries", f"Queries of 8 to 20 tokens, one at a time: {len(written)}", columns, harness.with_ratios(rows))


def time_search(context: Context) -> None:
    scale = context.scale
    drawn = unit_vectors(context, 32 * scale.search_queries, scale.token_width)
    tokens = unit_vectors(context, scale.token_documents * scale.document_tokens, scale.token_width)
    lengths = np.full(scale.token_documents, scale.document_tokens)
    time_index(context, "MaxSim search", tokens, np.split(drawn, scale.search_queries), lengths)
    del tokens
    if not context.skips("dense search"):
        vectors = unit_vectors(context, scale.dense_documents, scale.dense_width)
        time_index(context, "dense search", vectors, unit_vectors(context, scale.search_queries, scale.dense_width), None)


def unit_vectors(context: Context, rows: int, width: int) -> NDArray[np.float32]:
    generator = torch.Generator(context.device).manual_seed(context.seed + rows)
    drawn = torch.randn(rows, width, generator=generator, device=context.device)
    return torch.nn.functional.normalize(drawn).cpu().numpy()


def time_index(context: Context, name: str, vectors: Any, queries: Any, lengths: NDArray[np.int64] | None) -> None:
    """Index random vectors in memory and time the exact search of as many queries as the time allows."""
    width, documents = vectors.shape[1], len(vectors) if lengths is None else len(lengths)
    kind, similarity = ("dense", "dot") if lengths is None else ("colbert", "maxsim")
    card = ModelCard("random vectors", kind, "0" * 64, width, similarity, 32, context.scale.document_tokens, dtype=context.dtype)
    ids = [f"{row:08d}" for row in range(documents)]
    index = index_vectors(ids, vectors, card, lengths=lengths, device=torch.device(context.device))

    def seconds_of(count: int) -> float:
        return harness.time_rounds({OWN: lambda: index.search(queries[:count], 10)}, rounds=1)[OWN][0]

    few, most = min(8, len(queries)), len(queries)
    seconds_of(few)  # copies vectors and loads kernels
    count = max(few, min(most, int(few * context.left() * 0.2 / seconds_of(few))))
    if count < most:
        context.results.notes.append(f"{name}: {count:,} of {most:,} queries, because the time of the stage does not suffice for all")
    seconds = harness.time_rounds({OWN: lambda: index.search(queries[:count], 10)}, rounds=3, seconds=context.left() * 0.5)[OWN]
    title = f"{name}: {count:,} queries over {documents:,} documents, {len(vectors):,} vectors of {width}, exact"
    rows = [{"backend": OWN, "seconds": seconds, "queries_per_second": [count / each for each in seconds]}]
    columns = (BACKEND, Column("seconds", "seconds", ",.3f", spread=True), Column("queries/s", "queries_per_second", ",.1f"))
    context.results.add(name, title, columns, rows, queries=count, vectors=len(vectors))


def profile_kernels(context: Context) -> None:
    """The rate of matrix products; the kernels of a forward pass and of a training step."""
    scale, results = context.scale, context.results
    rate = matmul_rate(context.device, encoder_script.DTYPES[context.dtype], scale.matmul)
    title = f"Matrix product of {scale.matmul:,} squared, {context.dtype}"
    results.add("matrix product", title, (), [], describe_rate(results, rate), rate=rate)
    where = {"dtype": context.dtype, "device": context.device, "seed": context.seed}
    model, lengths = encoder_script.open_encoder(context.model("base"), **where), [512] * scale.profiled
    forward, _ = encoder_script.load_own(model).prepare(encoder_script.random_documents(lengths, model.config, context.seed))
    flops = training_flops(model.config, lengths, masked=0) // 3  # the backward pass has twice the products
    title = f"Forward pass: base, {len(lengths)} x 512 tokens, {context.dtype}"
    with torch.inference_mode():
        profile(context, "forward pass", title, forward, flops)
    del model, forward
    torch.cuda.empty_cache()
    if context.skips("profile of a training step"):
        return
    workload = scale.training["mlm"]
    options = context.options(0.3, dtype=training_dtype("auto", context.device))
    with TemporaryDirectory(prefix="quiver-bench-") as temporary:
        folder = Path(temporary)
        model, tokenizer = training_script.open_model(context.model("base"), context.seed)
        training_script.write_models(folder, model, tokenizer, seed=context.seed, mlm=True)
        backend = training_script.load_backend(OWN, "mlm", "masked_lm", workload, folder, options, steps=9)
        source = training_script.synthetic_texts
        [rows] = training_script.make_batches(workload, source, tokenizer, count=1, scored=False, seed=context.seed)
        lengths, masked = backend.lengths(rows), backend.masked_tokens(rows)
        title = f"Training step: base, masked language model, {len(lengths)} documents, {sum(lengths):,} tokens, {options['dtype']}"
        flops = training_flops(model.config, lengths, masked=masked)
        profile(context, "training step", title, lambda: backend.step(rows), flops)


def profile(context: Context, name: str, title: str, run: Callable[[], object], flops: int) -> None:
    """Time passes without the profiler (three to warm up, five timed), then profile one."""

    def wait() -> None:
        run()
        if context.device == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        wait()
    seconds = median(harness.time_rounds({OWN: wait}, rounds=5, seconds=context.left() * 0.3)[OWN])
    kernels = sorted(kernel_times(wait, context.device).items(), key=lambda item: -item[1][0])
    total, calls = sum(spent for _, (spent, _) in kernels), sum(count for _, (_, count) in kernels)
    kernels, rest = kernels[:15], kernels[15:]
    if rest:
        kernels.append((f"{len(rest)} others", (sum(each[0] for _, each in rest), sum(each[1] for _, each in rest))))
    rows = [{"backend": OWN, "variant": kernel, "seconds": each, "share": each / total, "calls": n} for kernel, (each, n) in kernels]
    busy = f" Kernels ran for {total / seconds:.1%} of that time." if context.device == "cuda" else ""
    rate = describe_rate(context.results, flops / seconds)
    note = f"{1000 * seconds:,.2f} ms without the profiler, {calls:,} kernel calls.{busy} By the FLOPs of products and windows: {rate}"
    columns = (VARIANT, Column("share", "share", ".1%"), Column("ms", "seconds", ",.3f", scale=1000), Column("calls", "calls"))
    context.results.add(name, title, columns, rows, note, rate=flops / seconds)


def kernel_times(run: Callable[[], object], device: str) -> dict[str, tuple[float, int]]:
    """Kernel (on a CPU: operator) -> its seconds and calls in one pass."""
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else [])]
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


def kernel_name(name: str) -> str:
    """A kernel's name, which may have thousands of characters: of the template arguments only what it computes."""
    plain = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0].strip() or name
    computed = re.search(r"\b(\w*(?:Functor|KernelImpl|CUDAKernel|Ops|gemm)\w*)", name[name.find("<") :]) if "<" in name else None
    return (plain if computed is None else f"{plain}, {computed[1]}")[:80]


def matmul_rate(device: str, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of products of square random matrices; the best of three measurements of ten products."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))

    def run() -> None:
        for _ in range(10):
            torch.mm(left, right)
        if device == "cuda":
            torch.cuda.synchronize()

    run()
    return 2 * size**3 * 10 / min(harness.time_rounds({OWN: run}, rounds=3)[OWN])


def describe_rate(results: Results, rate: float) -> str:
    """A rate, and its shares of the measured product and of the data sheet."""
    parts = [f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"]
    if "matrix product" in results.cases:
        parts.append(f"{rate / results.cases['matrix product']['rate']:.1%} of the matrix product measured here")
    if torch.cuda.is_available() and (peak := peak_flops()) is not None:
        parts.append(f"{rate / peak:.1%} of the data sheet's bfloat16")
    return ", ".join(parts) + "."


STAGES: Mapping[str, tuple[int, Callable[[Context], None]]] = {  # weight in the division of the time (about the seconds on an H100)
    "tests": (80, run_tests),
    "encoder-base": (110, partial(time_encoders, size="base")),
    "encoder-large": (90, partial(time_encoders, size="large")),
    "texts": (50, time_texts),
    "training": (80, time_training),
    "queries": (25, time_queries),
    "search": (40, time_search),
    "profile": (35, profile_kernels),
}


def open_stage(stage: str, device: str, until: float, out: Path, seed: int) -> Callable[[Any], Any]:
    """In a worker: run a stage, whose cases are written to a file of its own."""
    results = Results(stage, {}, out / "stages" / stage, overwrite=True)
    STAGES[stage][1](Context(device, until, out / "stages", seed, results))
    results.write()
    return lambda request: None


# Targets on one H200 in bfloat16: what, the figure in words, its least or most, and the measured value.

TOKENS_OF_A_MILLION = 110_000_000


def target_rows(results: Results) -> list[Row]:
    """Rows of the table of targets; an H100 has the same bf16 rate and 0.7 of the memory rate."""

    def speed(case: str, backend: str = OWN) -> float | None:
        row = results.row(case, backend)
        return None if row is None else median(row["tokens_per_second"])

    def quotient(one: float | None, other: float | None) -> float | None:
        return None if one is None or not other else one / other

    def ratio(case: str) -> float | None:
        rows = results.cases.get(case, {}).get("rows", [])
        return min((median(row["ratio"]) for row in rows if "ratio" in row and not row["backend"].startswith(OWN)), default=None)

    def batch(length: str) -> float | None:
        own, other = (results.row("base largest batch", name, length) for name in (OWN, "transformers-sdpa"))
        return None if own is None or other is None else own["documents"] / other["documents"]

    query, found = results.row("queries"), results.cases.get("MaxSim search")
    maxsim = found and median(found["rows"][0]["seconds"]) * 1_000 * TOKENS_OF_A_MILLION / (found["queries"] * found["vectors"])
    at_least: list[tuple[str, float, float | None]] = [
        ("base, fixed 512, tokens/s", 1.8e6, speed("base fixed-512")),
        ("base, variable 256 / fixed 512", 0.97, quotient(speed("base variable-256"), speed("base fixed-512"))),
        ("base, fixed 8,192: time of transformers' best backend", 2, ratio("base fixed-8192")),
        ("base, variable 4,096: time of transformers' best backend", 4, ratio("base variable-4096")),
        ("base, largest batch of 512 tokens / transformers'", 2, batch("512")),
        ("base, largest batch of 8,192 tokens / transformers'", 2, batch("8,192")),
        *(
            (f"text to vectors / the model alone, {name}", 0.85, quotient(speed(f"texts {name}"), speed(f"texts {name}", ONLY_MODEL)))
            for name in FULL.texts
        ),
        ("MLM step: time of transformers", 2, ratio("MLM, mlm")),
        ("MNRL step: time of sentence-transformers", 2, ratio("MNRL, dense")),
        ("ColBERT distillation step: time of PyLate", 2, ratio("distillation, colbert")),
    ]  # fmt: skip
    at_most = [
        ("query at batch 1, median ms", 2, query and query["p50"]),
        ("exact MaxSim, 1,000 queries over 1 million documents of 110 tokens, extrapolated, seconds", 60, maxsim),
    ]
    rows = []
    for sign, targets in ((1, at_least), (-1, at_most)):
        for what, wanted, value in targets:
            text = "" if value is None else f"{value:,.0f}" if value > 1000 else f"{value:,.2f}"
            verdict = "not measured" if value is None else "yes" if sign * value >= sign * wanted else "no"
            target = f"{'at least' if sign > 0 else 'at most'} {wanted:,.10g}"
            rows.append({"backend": OWN, "variant": what, "target": target, "measured": text, "met": verdict})
    return rows


def run_stages(results: Results, given: Any, device: str) -> None:
    """Run the stages that are not done, each in a worker, and merge their cases."""
    done = set(results.cases.get("stages", {}).get("done", []))
    remaining = [name for name in STAGES if name in (given.stage or STAGES) and name not in done]
    if done:
        sys.stderr.write(f"{given.out} holds {', '.join(sorted(done))}; going on with {', '.join(remaining) or 'nothing'}\n")
    until = time.monotonic() + 60 * given.minutes
    # All models are local: nothing may wait for a network. A machine with a GPU may be asked for the small form.
    environment = {"HF_HUB_OFFLINE": "1"} | ({} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})
    for number, name in enumerate(remaining):
        left, weights = until - time.monotonic(), [STAGES[each][0] for each in remaining[number:]]
        if left < 1:
            sys.stderr.write(f"{name}: no time left; repeat the command to go on\n")
            return
        allowed, started = left * weights[0] / sum(weights), time.time()
        sys.stderr.write(f"{name}: at most {allowed:.0f} s\n")
        arguments = {"stage": name, "device": device, "until": started + allowed, "out": given.out, "seed": given.seed}
        folder = given.out / "stages" / name
        (folder / harness.RESULTS).unlink(missing_ok=True)
        results.notes = [note for note in results.notes if not note.startswith(f"{name}: ")]
        try:
            limit = min(left, 1.25 * allowed + 15)
            Worker(open_stage, arguments, environment=environment, log=given.out / "stages.log", timeout=limit).close()
            done.add(name)
        except WorkerError as error:
            results.notes.append(f"{name}: {error} (see stages.log)")
        if (folder / harness.RESULTS).is_file():
            part = harness.read_json(folder / harness.RESULTS)
            results.cases |= part["cases"]
            results.notes += [f"{name}: {note}" for note in part["notes"]]
        columns = (Column("target", "variant"), Column("wanted", "target"), Column("measured", "measured"), Column("met", "met"))
        results.cases.pop("stages", None)
        rows = target_rows(results) if device == "cuda" else []
        results.add("stages", "Targets for one H200 in bfloat16", columns, rows, done=sorted(done))
        sys.stderr.write(f"{name}: {'done' if name in done else 'failed'}, {time.time() - started:.0f} s\n")


def main() -> None:
    parser = harness.parser(__doc__, "python benchmarks/gpu.py --out bench-gpu --minutes 12", rounds=FULL.rounds)
    parser.add_argument("--minutes", type=float, default=8.5, help="Time for all stages (default: %(default)s).")
    parser.add_argument("--stage", action="append", choices=tuple(STAGES), help="Stage to run. Repeatable. Default: all.")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu: a small form to test this script. Default: cuda if there is a GPU.")
    given = parser.parse_args()
    if given.out is None:
        raise InputError("--out is missing: the folder for results, report and log")
    device = check_device(given.device or ("cuda" if default_device() == "cuda" else "cpu"))
    if device == "cpu":
        sys.stderr.write("no GPU is used: tiny models and data; the figures say nothing about GPUs\n")
    title = "GPU benchmark" if device == "cuda" else "GPU benchmark in its small form on a CPU: its figures say nothing about GPUs"
    results = Results(title, {"device": device, "seed": given.seed}, given.out, overwrite=given.overwrite)
    given.out.mkdir(parents=True, exist_ok=True)
    run_stages(results, given, device)


if __name__ == "__main__":
    harness.run_script(main)
