"""Encoder: tokens per second, memory and equality of hidden states, beside other libraries that run the same weights.

With token ids (``--lengths``) all backends get the same documents in the same batches; padding or packing them on the host is
not timed. With texts (``--data``) tokenizing is timed, and every library forms its own batches of its default size.

The lengths of the ModernBERT paper's variable sets are exact: drawn from torch's CPU generator with seed 42 and clamped, they give the
totals of its Table 10 (arXiv:2412.13663, appendix F). A smaller set consists of the first documents of the whole set.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, EncoderConfig, init_weights, load_encoder, pack_ids
from quiver.encoder.checkpoints import config_to_hf
from quiver.encoder.checkpoints.checkpoint import local_folder, to_hf_state
from quiver.encoder.errors import InputError
from quiver.encoder.presets import preset
from quiver.retrieval.data.corpus import read_documents
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.pretrained import check_device, default_device, default_dtype, read_model_folder

import harness
from harness import BACKEND, MEMORY, OWN, RATIO, Column, Results, Row, Worker, WorkerError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PAPER_DOCUMENTS = 8_192
PAPER_SETS = {  # mean, deviation, shortest, longest
    "fixed-512": (512, 0, 512, 512),
    "variable-256": (256, 64, 32, 512),
    "fixed-8192": (8_192, 0, 8_192, 8_192),
    "variable-4096": (4_096, 1_024, 16, 8_192),
}
CASES = ("512x8", "variable-256x16", "512x2+32x14", "2048x2", "4096+2500", "8192")
BATCH_TOKENS = {"cpu": 8_192, "cuda": 131_072}
COLUMNS = (
    BACKEND,
    Column("tokens/s", "tokens_per_second"),
    Column("documents/s", "documents_per_second", ",.1f"),
    RATIO,
    Column("max difference", "difference", ".1e"),
    MEMORY,
)


# Documents.


def paper_lengths(name: str, documents: int) -> tuple[int, ...]:
    mean, deviation, shortest, longest = PAPER_SETS[name]
    generator = torch.Generator().manual_seed(42)
    # Always draw the whole set: torch's generator gives other numbers for another count.
    drawn = torch.normal(float(mean), float(deviation), (PAPER_DOCUMENTS,), generator=generator)
    return tuple(drawn.clamp(shortest, longest).long()[:documents].tolist())


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths of ``512x8``, ``512x2+32x14``, ``4096+2500`` or ``variable-256x16``."""
    lengths: list[int] = []
    for term in text.split("+"):
        found = re.fullmatch(r"(?P<what>.+?)(?:x(?P<count>\d+))?", term.strip())
        what, count = (found["what"], int(found["count"] or 1)) if found else ("", 0)
        if what in PAPER_SETS and 1 <= count <= PAPER_DOCUMENTS:
            lengths += paper_lengths(what, count)
        elif re.fullmatch("[0-9]+", what) and int(what) and count:
            lengths += [int(what)] * count
        else:
            raise InputError(f"lengths {text!r}: {term!r} is not TOKENS, TOKENSxDOCUMENTS or SETxDOCUMENTS, such as variable-256x16")
    return tuple(lengths)


def random_documents(lengths: Sequence[int], config: EncoderConfig, seed: int) -> list[list[int]]:
    """Random token ids of the paper's range, without the padding token, from which some models derive positions."""
    ids = np.arange(min(100, config.vocab_size // 2), min(16_000, config.vocab_size))
    ids = ids[ids != config.pad_token_id]
    generator = np.random.default_rng(seed)
    return [generator.choice(ids, length).tolist() for length in lengths]


def split_batches(documents: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Batches of consecutive documents, without sorting, as in the paper."""
    return [documents[start : start + size] for start in range(0, len(documents), size)]


def batch_size(lengths: Sequence[int], documents: int | None, tokens: int) -> int:
    """Documents per batch: as given, or as many as hold about ``tokens`` tokens."""
    return min(documents, len(lengths)) if documents else -(-len(lengths) // max(1, round(sum(lengths) / tokens)))


# Backends for token ids. Each has the module and `prepare`: documents -> (forward, real), of which `forward` is timed and
# `real` selects the real tokens of its output, (N, D) in the documents' order.


class Loaded(NamedTuple):
    module: nn.Module
    prepare: Callable[[Any], tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]]

    def run(self, batches: Sequence[Any], *, train: bool = False) -> None:
        """Run prepared batches forward, or forward and backward; return when the device has finished."""
        if train:
            self.module.train()
            for batch in batches:
                backpropagate(batch)
                self.module.zero_grad(set_to_none=True)
            self.module.eval()
        else:
            with torch.inference_mode():
                for forward, _ in batches:
                    forward()
        if next(self.module.parameters()).is_cuda:
            torch.cuda.synchronize()


def backpropagate(batch: Any) -> None:
    """Backpropagate the mean square of each state's component along a fixed direction.

    The mean square of whole states is unsuitable: a final LayerNorm makes it constant, and all gradients would be rounding errors.
    """
    forward, real = batch
    states = real(forward()).float()
    (states @ torch.linspace(-1, 1, states.shape[-1], device=states.device)).square().mean().backward()


def open_encoder(model: str, *, dtype: str, device: str, seed: int) -> Encoder:
    if "/" in model or Path(model).is_dir():
        return load_encoder(read_model_folder(local_folder(model)).encoder_folder, dtype=DTYPES[dtype], device=device)
    return init_weights(Encoder(preset(model)), seed=seed).to(device=device, dtype=DTYPES[dtype]).eval()


def load_own(encoder: Encoder) -> Loaded:
    def prepare(documents: Any) -> Any:
        packed = pack_ids(documents)
        # A fresh memo in each pass, so that deriving masks and groups from the layout is part of the timed work.
        return (lambda: encoder(replace(packed, memo={}))), (lambda states: states)

    return Loaded(encoder, prepare)


def load_transformers(encoder: Encoder, attention: str) -> Loaded:
    library = importlib.import_module("transformers")
    settings = config_to_hf(encoder.config)
    config = library.AutoConfig.for_model(settings.pop("model_type"), **settings)
    weights = encoder.embeddings.tokens.weight
    model = library.AutoModel.from_config(config, attn_implementation=attention, dtype=weights.dtype)
    missing, unexpected = model.load_state_dict(to_hf_state(encoder), strict=False)
    if unexpected or [name for name in missing if not name.startswith("pooler.")]:
        raise RuntimeError(f"transformers' {type(model).__name__} has other weights: missing {missing}, unexpected {unexpected}")
    model = model.to(weights.device).eval()
    padding = encoder.config.pad_token_id

    def prepare(documents: Any) -> Any:
        rows = [torch.tensor(document) for document in documents]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)  # (B, S)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        real = mask.flatten().nonzero()[:, 0].to(model.device)

        def forward() -> Tensor:
            return model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).last_hidden_state  # (B, S, D)

        return forward, lambda states: states.flatten(0, 1)[real]

    return Loaded(model, prepare)


BACKENDS: Mapping[str, Callable[[Encoder], Loaded]] = {
    OWN: load_own,
    "transformers-sdpa": partial(load_transformers, attention="sdpa"),
    "transformers-flash": partial(load_transformers, attention="flash_attention_2"),
}


def refusal(backend: str, config: EncoderConfig, *, device: str, dtype: str) -> str | None:
    if not backend.startswith("transformers"):
        return None
    if importlib.util.find_spec("transformers") is None:
        return "not installed (pip install 'quiver-retrieval[train]')"
    if backend == "transformers-flash" and (device != "cuda" or dtype == "float32" or importlib.util.find_spec("flash_attn") is None):
        return "needs flash-attn, CUDA, and bfloat16 or float16"
    if config.positions == "alibi":
        return "transformers has no ALiBi"
    try:
        kind = config_to_hf(config)["model_type"]
    except InputError as error:
        return str(error)
    return None if kind in importlib.import_module("transformers").CONFIG_MAPPING else f"transformers has no {kind}"


def bench_token_ids(
    results: Results, model: str, workloads: Mapping[str, Sequence[int]], backends: Sequence[str] | None, options: Mapping[str, Any]
) -> None:
    """Time encoders on token ids, one case per workload."""
    device, train = options["device"], options["train"]
    where = {"dtype": options["dtype"], "device": device, "seed": options["seed"]}
    encoder = open_encoder(model, **where)
    config = encoder.config
    names = choose(results, backends, BACKENDS, lambda name: refusal(name, config, device=device, dtype=options["dtype"]))
    loaded = {name: BACKENDS[name](encoder) for name in names}
    del encoder
    for case, lengths in workloads.items():
        if case in results.cases:
            continue
        if max(lengths) > config.max_positions:
            results.notes.append(f"{case}: the model has {config.max_positions:,} positions")
            continue
        size = batch_size(lengths, options["batch_size"], options["batch_tokens"])
        documents = random_documents(lengths, config, options["seed"])
        prepared = {name: [each.prepare(batch) for batch in split_batches(documents, size)] for name, each in loaded.items()}
        measured: dict[str, Row] = {name: {"difference": value} for name, value in state_differences(prepared).items()}
        passes = {name: partial(each.run, prepared[name], train=train) for name, each in loaded.items()}
        if train:
            for run in passes.values():  # a warm-up; for inference the comparison was one
                run()
        seconds = harness.time_rounds(passes, rounds=options["rounds"], seconds=options.get("seconds"), label=case)
        if options["memory"] and device == "cuda":
            for name, run in passes.items():
                measured[name]["memory"] = harness.peak_memory(run, on_cuda=True)["above"]
        rows = speed_rows(seconds, lengths, measured)
        if options["memory"] and device == "cpu":
            batches = [list(batch) for batch in split_batches(lengths, size)]
            measure_on_cpu(rows, batches, {"model": model, **where, "train": train, "threads": torch.get_num_threads()}, results)
        results.add(case, f"{describe_documents(case, lengths)}, batches of {size:,}", COLUMNS, rows)


def measure_on_cpu(rows: Sequence[Row], batches: Sequence[Sequence[int]], arguments: Mapping[str, Any], results: Results) -> None:
    """Add ``memory``, the peak beyond the loaded model in bytes, each backend in a worker of its own."""
    for row in rows:
        try:
            with Worker(open_token_ids, {"backend": row["backend"], **arguments}, environment=harness.MEMORY_ENVIRONMENT) as worker:
                row["memory"] = worker.ask(batches)["above"]
        except WorkerError as error:
            results.notes.append(f"memory of {row['backend']}: {error}")


def choose(
    results: Results, requested: Sequence[str] | None, available: Mapping[str, Any], reason: Callable[[str], str | None]
) -> list[str]:
    """Quiver and the requested backends, or all other libraries that can run; the others become notes."""
    if requested is None:
        reasons = {name: reason(name) for name in available if not name.startswith(OWN)}
        results.notes += [f"{name}: {why}" for name, why in reasons.items() if why is not None and f"{name}: {why}" not in results.notes]
        return [OWN, *(name for name, why in reasons.items() if why is None)]
    for name in requested:
        if name not in available:
            raise InputError(f"unknown backend {name!r}; choose from {', '.join(available)}")
        if name != OWN and (why := reason(name)):
            raise InputError(f"{name}: {why}")
    return list(dict.fromkeys([OWN, *requested]))


def describe_documents(name: str, lengths: Sequence[int]) -> str:
    spread = f"{min(lengths):,}" if min(lengths) == max(lengths) else f"{min(lengths):,} to {max(lengths):,}"
    return f"{name}: {len(lengths):,} document{'s' * (len(lengths) != 1)} of {spread} tokens, {sum(lengths):,} in total"


def speed_rows(seconds: Mapping[str, list[float]], lengths: Sequence[int], measured: Mapping[str, Row]) -> list[Row]:
    rows = []
    for name, taken in seconds.items():
        totals = {"tokens_per_second": sum(lengths), "documents_per_second": len(lengths)}
        speeds = {quantity: [total / each for each in taken] for quantity, total in totals.items()}
        rows.append({"backend": name, "seconds": taken, **speeds, **measured[name]})
    return harness.with_ratios(rows)


@torch.no_grad()
def state_differences(prepared: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Largest absolute difference of each backend's hidden states from Quiver's, over all real tokens."""
    differences = dict.fromkeys(prepared, 0.0)
    for position, (own, select) in enumerate(prepared[OWN]):
        reference = select(own()).float()
        for name, batches in prepared.items():
            forward, real = batches[position]
            states = real(forward()).float()
            if not states.isfinite().all():  # a maximum of differences does not reveal a NaN
                raise RuntimeError(f"{name}: non-finite hidden states")
            differences[name] = max(differences[name], (states - reference).abs().max().item())
    return differences


def open_token_ids(
    backend: str, model: str, *, dtype: str, device: str, seed: int, train: bool = False, threads: int | None = None
) -> Callable[[list[list[int]]], dict[str, int]]:
    """Load a backend; a request holds the lengths of batches and is answered with the memory of a run over them."""
    if threads:
        torch.set_num_threads(threads)
    encoder = open_encoder(model, dtype=dtype, device=device, seed=seed)
    config, loaded = encoder.config, BACKENDS[backend](encoder)
    del encoder  # other backends have their own copy of the weights

    def prepare(batches: Sequence[Sequence[int]]) -> Callable[[], None]:
        prepared = [loaded.prepare(random_documents(lengths, config, seed)) for lengths in batches]
        return lambda: loaded.run(prepared, train=train)

    # One document and a batch that keeps every thread busy use different kernels, whose code must not count as activations.
    prepare([[8], [8] * 64 * torch.get_num_threads()])()
    return lambda batches: harness.peak_memory(prepare(batches), on_cuda=device == "cuda")


# Backends for texts: a function from documents to vectors.

Encode = Callable[[list[str]], np.ndarray]


def load_own_texts(model: str, options: Mapping[str, Any], texts: Sequence[str], *, int8: bool = False) -> Encode:
    own = load_bi_encoder(model, options, int8=int8)
    return lambda wanted: own.encode_texts(wanted, "document").vectors


def load_bi_encoder(model: str, options: Mapping[str, Any], *, int8: bool = False) -> BiEncoder:
    own = load_model(model, dtype="int8" if int8 else DTYPES[options["dtype"]], device=options["device"])
    if not isinstance(own, BiEncoder):
        raise InputError(f"{model}: not a bi-encoder; texts can be timed only with models that have one vector per text")
    return own


def load_sentence_transformers(model: str, options: Mapping[str, Any], texts: Sequence[str], *, runtime: str = "torch") -> Encode:
    """sentence-transformers on torch, or its int8 export for ONNX Runtime or OpenVINO with the exporters' defaults."""
    library = importlib.import_module("sentence_transformers")
    open_model, folder = partial(library.SentenceTransformer, device=options["device"], backend=runtime), TemporaryDirectory()
    if runtime == "torch":
        arguments = {} if options["dtype"] == "float32" else {"torch_dtype": DTYPES[options["dtype"]]}
        encoder = open_model(model, model_kwargs=arguments)
    elif runtime == "onnx":
        session = importlib.import_module("onnxruntime").SessionOptions()
        session.intra_op_num_threads = torch.get_num_threads()
        arguments = {"provider": "CPUExecutionProvider", "session_options": session}
        encoder = open_model(model, model_kwargs={**arguments, "export": True})
        encoder.save_pretrained(folder.name)
        # The exporter's default file name depends on the processor's instruction set.
        library.export_dynamic_quantized_onnx_model(encoder, onnx_instructions(), folder.name, file_suffix="int8")
        encoder = open_model(folder.name, model_kwargs={**arguments, "file_name": "model_int8.onnx"})
    else:
        arguments = {"ov_config": {"INFERENCE_NUM_THREADS": torch.get_num_threads()}}
        encoder = open_model(model, model_kwargs={**arguments, "export": True})
        encoder.save_pretrained(folder.name)
        # The exporter calibrates on a data set of the Hub by default; calibrate on the texts of the benchmark.
        (Path(folder.name) / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        library.export_static_quantized_openvino_model(encoder, None, folder.name, folder.name, "default", "train", "text")
        file = next(Path(folder.name, "openvino").glob("*int8*.xml")).name
        encoder = open_model(folder.name, model_kwargs={**arguments, "file_name": file})
    return lambda wanted, keep=folder: np.asarray(encoder.encode_document(wanted, show_progress_bar=False), dtype=np.float32)


def onnx_instructions() -> str:
    if platform.machine() in ("arm64", "aarch64"):
        return "arm64"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    return next((name for flag, name in (("avx512_vnni", "avx512_vnni"), ("avx512f", "avx512")) if flag in flags), "avx2")


TEXT_BACKENDS: Mapping[str, Callable[..., Encode]] = {
    OWN: load_own_texts,
    "quiver-int8": partial(load_own_texts, int8=True),
    "sentence-transformers": load_sentence_transformers,
    "sentence-transformers-onnx-int8": partial(load_sentence_transformers, runtime="onnx"),
    "sentence-transformers-openvino-int8": partial(load_sentence_transformers, runtime="openvino"),
}


def text_refusal(backend: str, options: Mapping[str, Any]) -> str | None:
    if backend.endswith("int8") and options["device"] != "cpu":
        return "runs on CPUs only"
    runtime = next((name for name in ("onnx", "openvino") if name in backend), None)
    needed = [] if backend.startswith(OWN) else ["sentence_transformers"]
    needed += {"onnx": ["optimum", "onnxruntime"], "openvino": ["optimum", "openvino"]}.get(runtime or "", [])
    if all(importlib.util.find_spec(module) for module in needed):
        return None
    return f"not installed (pip install 'sentence-transformers{f'[{runtime}]' if runtime else ''}')"


def bench_texts(
    results: Results,
    model: str,
    texts: Sequence[str],
    backends: Sequence[str] | None,
    options: Mapping[str, Any],
    *,
    case: str,
    available: Mapping[str, Callable[..., Encode]] = TEXT_BACKENDS,
) -> None:
    """Time bi-encoders on documents, from text to vectors on the host."""
    if case in results.cases:
        return
    documents = list(texts)
    names = choose(results, backends, available, lambda name: text_refusal(name, options) if name in TEXT_BACKENDS else None)
    loaded = {name: available[name](model, options, documents) for name in names}
    vectors = {name: encode(documents) for name, encode in loaded.items()}  # the warm-up
    measured = {name: {"difference": float(np.abs(each - vectors[OWN]).max())} for name, each in vectors.items()}
    passes = {name: partial(encode, documents) for name, encode in loaded.items()}
    seconds = harness.time_rounds(passes, rounds=options["rounds"], seconds=options.get("seconds"), label=case)
    own = load_bi_encoder(model, {**options, "device": "cpu", "dtype": "float32"})
    lengths = [len(ids) for ids in own.tokenize(documents, "document").ids]
    results.add(case, describe_documents(case, lengths), COLUMNS, speed_rows(seconds, lengths, measured))


def main() -> None:
    parser = harness.parser(__doc__, "python benchmarks/encoder.py -m modernbert-base --threads 2 --out bench", rounds=10)
    parser.add_argument("--model", "-m", required=True, help="Folder or hub id, or a preset with random weights, such as modernbert-base.")
    parser.add_argument("--data", "-d", type=Path, help="Texts to encode with a bi-encoder: BEIR folder or .jsonl[.gz] file.")
    parser.add_argument("--docs", type=int, default=500, help="Documents of --data (default: %(default)s).")
    parser.add_argument("--lengths", action="append", help=f"Document lengths in tokens (default: {', '.join(CASES)}). Repeatable.")
    parser.add_argument("--backend", action="append", help=f"{', '.join(BACKENDS)}; with --data {', '.join(TEXT_BACKENDS)}.")
    parser.add_argument("--train", action="store_true", help="Time forward and backward passes.")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="Default: bfloat16 on a GPU, float32 on a CPU.")
    parser.add_argument("--device", help="cpu or cuda. Default: cuda if there is a GPU.")
    parser.add_argument("--batch-size", type=int, help="Documents per batch, the same for every backend.")
    parser.add_argument("--batch-tokens", type=int, help="Average tokens per batch (default: 8,192; on a GPU 131,072).")
    parser.add_argument("--peak-memory", action="store_true", help="Measure peak memory, on a CPU in a fresh process per backend and case.")
    given = parser.parse_args()
    device = check_device(given.device or default_device())
    options = {
        "dtype": given.dtype or default_dtype(device), "device": device, "seed": given.seed, "rounds": given.rounds, "train": given.train,
        "batch_size": given.batch_size, "batch_tokens": given.batch_tokens or BATCH_TOKENS[device], "memory": given.peak_memory,
    }  # fmt: skip
    torch.set_num_threads(given.threads or torch.get_num_threads())
    backends = given.backend
    settings = {**options, "model": given.model, "backends": backends, "threads": torch.get_num_threads(), "docs": given.docs}
    results = Results(f"Encoder: {given.model}", settings, given.out, overwrite=given.overwrite)
    if given.data is not None:
        contents = [document.content() for document in read_documents(given.data)]
        if not contents:
            raise InputError(f"{given.data}: no documents")
        count = min(given.docs, len(contents))
        texts = [contents[position * len(contents) // count] for position in range(count)]
        bench_texts(results, given.model, texts, backends, options, case=given.data.name)
        return
    workloads = {name: parse_lengths(name) for name in given.lengths or CASES}
    bench_token_ids(results, given.model, workloads, backends, options)


if __name__ == "__main__":
    harness.run_script(main)
