"""Backends of the encoder benchmark: Quiver, variants of it, transformers, and sentence-transformers on torch, ONNX Runtime and OpenVINO.

Backends for token ids get the same documents in the same batches. Work that a caller does beforehand (padding or packing tensors on the
host) is not timed. Work that a library does in its forward pass to derive other inputs from these tensors is timed.

Backends for texts tokenize and form batches themselves. The int8 models of ONNX Runtime and OpenVINO are made by sentence-transformers' own
exporters with their defaults, in a temporary folder.

Shapes: B documents, N their tokens, S the longest of them, D model width, V vocabulary, d vector width.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quiver.encoder import Encoder, EncoderConfig, init_weights, load_encoder, optimize_for_inference, pack_ids
from quiver.encoder.checkpoints import config_to_hf
from quiver.encoder.checkpoints.checkpoint import to_hf_state
from quiver.encoder.checkpoints.families import FORMATS
from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.config import Precision
from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.encoder.model import compile_encoder
from quiver.encoder.presets import preset
from quiver.eval.bench.harness import quiet_libraries
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.loading import load_model, read_model_folder

Documents: TypeAlias = Sequence[Sequence[int]]

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Name -> dtype of the weights."""

# The first transformers version whose from_config accepts dtype. Unlike .to(bfloat16), from_config keeps RoPE's frequencies in float32.
_TRANSFORMERS = (4, 56)


@dataclass(frozen=True)
class Settings:
    """Settings of the encoder benchmark.

    Attributes:
        device: ``cpu`` or ``cuda``, for all backends.
        dtype: Dtype of the weights: ``float32``, ``bfloat16`` or ``float16``.
        threads: Threads on a CPU; None for torch's default.
        rounds: Timed passes of each backend over each case.
        seconds: Time for all rounds of a case, after which no further round begins; None for no limit.
        seed: Random seed of weights and token ids.
        train: Time forward and backward passes instead of inference.
        batch_size: Documents per batch; None for ``batch_tokens``.
        batch_tokens: Average tokens per batch; None for the device's default.
        memory: Measure peak memory too: on a CPU in a fresh process per backend and case, on a GPU by torch's allocator.
        largest_batch: Search for the largest batch of fixed length that fits.
        memory_gib: Memory that the largest batch must fit into, in GiB; None for the whole GPU.
    """

    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None
    rounds: int = 10
    seconds: float | None = None
    seed: int = 42
    train: bool = False
    batch_size: int | None = None
    batch_tokens: int | None = None
    memory: bool = False
    largest_batch: bool = False
    memory_gib: float | None = None


@dataclass(frozen=True)
class Batch:
    """A batch in the form that one backend expects.

    Attributes:
        forward: The timed work: takes host tensors to the library's own output.
        real: Selects the real tokens of that output: (N, D), in the documents' order.
    """

    forward: Callable[[], Tensor]
    real: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LoadedEncoder:
    """A backend with a model in memory.

    Attributes:
        module: The model, for train(), eval() and gradients.
        embedding: Weights of the token embedding, (V, D).
        prepare: Makes a batch from documents.
    """

    module: nn.Module
    embedding: Tensor
    prepare: Callable[[Documents], Batch]


@dataclass(frozen=True)
class Backend:
    """A way to run an encoder on token ids.

    Attributes:
        load: Makes the backend from Quiver's encoder, with the same weights, device and dtype.
        unsupported_reason: Why the backend cannot run an architecture with these settings; None if it can.
    """

    load: Callable[[Encoder], LoadedEncoder]
    unsupported_reason: Callable[[EncoderConfig, Settings], str | None]


def open_encoder(model: str, settings: Settings) -> Encoder:
    """Load a checkpoint, or create the encoder of a preset with random weights.

    Args:
        model: Name of a preset, folder or Hugging Face Hub id.
        settings: Settings with dtype, device and seed.

    Raises:
        InputError: ``model`` is none of these, or cannot be read.
    """
    dtype = DTYPES[settings.dtype]
    # Hub ids contain a slash, presets do not; a folder takes precedence over a preset of the same name.
    if "/" in model or Path(model).is_dir():
        folder = read_model_folder(local_folder(model)).encoder_folder
        return load_encoder(folder, dtype=dtype, device=settings.device)
    encoder = init_weights(Encoder(preset(model)), seed=settings.seed)
    return encoder.to(device=settings.device, dtype=dtype).eval()


def _load_quiver(encoder: Encoder) -> LoadedEncoder:
    def prepare(documents: Documents) -> Batch:
        packed = pack_ids(documents)
        # Use a fresh memo in each pass, so that deriving masks and groups from the layout is part of the timed work.
        return Batch(forward=lambda: encoder(replace(packed, memo={})), real=lambda states: states)

    return LoadedEncoder(encoder, encoder.embeddings.tokens.weight, prepare)


def _load_optimized(encoder: Encoder, precision: Precision) -> LoadedEncoder:
    # Copy, because the other backends take their weights from the encoder.
    return _load_quiver(optimize_for_inference(copy.deepcopy(encoder), precision=precision))


def _optimized_reason(config: EncoderConfig, settings: Settings) -> str | None:
    del config
    if settings.train:
        return "an encoder optimized for inference has no gradients"
    return None if settings.device == "cpu" else "runs on CPUs only"


def _load_compiled(encoder: Encoder) -> LoadedEncoder:
    return _load_quiver(compile_encoder(copy.deepcopy(encoder)))


def _load_transformers(encoder: Encoder, attention: str) -> LoadedEncoder:
    library = importlib.import_module("transformers")
    settings = config_to_hf(encoder.config)
    config = library.AutoConfig.for_model(settings.pop("model_type"), **settings)
    weights = encoder.embeddings.tokens.weight
    model = library.AutoModel.from_config(config, attn_implementation=attention, dtype=weights.dtype)
    missing, unexpected = model.load_state_dict(to_hf_state(encoder), strict=False)
    if unexpected or [name for name in missing if not name.startswith("pooler.")]:
        raise RuntimeError(f"transformers' {type(model).__name__} has other weights: missing {missing}, unexpected {unexpected}")
    model = model.to(weights.device).eval()
    # The closure must not refer to the encoder, which would stay in memory beside the model.
    padding = encoder.config.pad_token_id
    return LoadedEncoder(model, model.get_input_embeddings().weight, lambda documents: _padded(model, documents, padding))


def _padded(model: Any, documents: Documents, padding: int) -> Batch:
    rows = [torch.tensor(document) for document in documents]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)  # (B, S)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    device = model.device
    real = mask.flatten().nonzero()[:, 0].to(device)

    def forward() -> Tensor:
        states: Tensor = model(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state
        return states  # (B, S, D)

    return Batch(forward, real=lambda states: states.flatten(0, 1)[real])


def transformers_reason(config: EncoderConfig, settings: Settings) -> str | None:
    """Why transformers cannot run an architecture; None if it can."""
    del settings
    version = installed_version("transformers")
    if reason := version_reason(version):
        return reason
    if config.family not in FORMATS:
        return f"transformers has no checkpoint layout for the family {config.family}"
    if config.positions == "alibi":  # its config.json says bert, but the model needs custom code
        return f"transformers has no ALiBi, which a {config.family} encoder needs"
    try:
        kind = config_to_hf(config)["model_type"]
    except InputError as error:
        return str(error)
    if kind not in importlib.import_module("transformers").CONFIG_MAPPING:
        return f"transformers {version} has no {kind}"
    return None


def version_reason(version: str | None) -> str | None:
    """Why a version of transformers cannot be used; None if it can.

    Example:
        >>> version_reason("4.48.0"), version_reason("5.0.1")
        ('transformers 4.48.0 is too old; install 4.56 or later', None)
    """
    if version is None:
        return "not installed (pip install 'quiver-retrieval[train]')"
    if tuple(int(part) for part in version.split(".")[:2]) < _TRANSFORMERS:
        return f"transformers {version} is too old; install {'.'.join(map(str, _TRANSFORMERS))} or later"
    return None


def _flash_reason(config: EncoderConfig, settings: Settings) -> str | None:
    if settings.device != "cuda":
        return "needs CUDA"
    if settings.dtype == "float32":
        return "needs bfloat16 or float16"
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (pip install 'quiver-retrieval[flash]')"
    return transformers_reason(config, settings)


BASELINES: Mapping[str, Backend] = {
    "transformers-sdpa": Backend(lambda encoder: _load_transformers(encoder, "sdpa"), transformers_reason),
    "transformers-flash": Backend(lambda encoder: _load_transformers(encoder, "flash_attention_2"), _flash_reason),
}
"""Other libraries that run the same weights on padded batches of token ids."""

BACKENDS: Mapping[str, Backend] = {
    "quiver": Backend(_load_quiver, lambda config, settings: None),
    "quiver-optimized": Backend(lambda encoder: _load_optimized(encoder, "float"), _optimized_reason),
    "quiver-int8": Backend(lambda encoder: _load_optimized(encoder, "int8"), _optimized_reason),
    "quiver-compiled": Backend(_load_compiled, lambda config, settings: None),
    **BASELINES,
}
"""All backends for token ids. The others are compared with the first."""


Encode: TypeAlias = Callable[[list[str]], NDArray[np.float32]]
"""Encodes documents to vectors, (B, d), with the library's own default batch size."""


@dataclass(frozen=True)
class LoadedTextEncoder:
    """A backend with a bi-encoder in memory.

    Attributes:
        encode: Encodes documents.
        model: Quiver's bi-encoder, used to count the tokens of each document; None for other libraries.
    """

    encode: Encode
    model: BiEncoder | None = None


@dataclass(frozen=True)
class TextBackend:
    """A way to run a bi-encoder on texts.

    Attributes:
        load: Loads the model from a folder or Hub id, with settings and texts for the calibration of int8.
        unsupported_reason: Why the backend cannot run with these settings; None if it can.
    """

    load: Callable[[str, Settings, Sequence[str]], LoadedTextEncoder]
    unsupported_reason: Callable[[Settings], str | None]


def _load_biencoder(model: str, settings: Settings, *, int8: bool = False) -> LoadedTextEncoder:
    own = load_model(model, dtype="int8" if int8 else DTYPES[settings.dtype], device=settings.device)
    if not isinstance(own, BiEncoder):
        raise InputError(f"{model}: not a bi-encoder; texts can be timed only with models that have one vector per text")
    return LoadedTextEncoder(lambda texts: own.encode_texts(texts, "document").vectors, own)


def _sentence_transformers(model: str, settings: Settings, **arguments: Any) -> Any:
    library = importlib.import_module("sentence_transformers")
    with quiet_libraries():
        return library.SentenceTransformer(model, device=settings.device, **arguments)


def _encode_with(encoder: Any) -> LoadedTextEncoder:
    def encode(texts: list[str]) -> NDArray[np.float32]:
        return np.asarray(encoder.encode_document(texts, show_progress_bar=False), dtype=np.float32)

    return LoadedTextEncoder(encode)


def _torch(model: str, settings: Settings, texts: Sequence[str]) -> LoadedTextEncoder:
    del texts
    arguments = {} if settings.dtype == "float32" else {"model_kwargs": {"torch_dtype": DTYPES[settings.dtype]}}
    return _encode_with(_sentence_transformers(model, settings, **arguments))


def _onnx_arguments(settings: Settings) -> dict[str, Any]:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = settings.threads or torch.get_num_threads()
    provider = "CUDAExecutionProvider" if settings.device == "cuda" else "CPUExecutionProvider"
    return {"provider": provider, "session_options": options}


def _onnx(model: str, settings: Settings, texts: Sequence[str]) -> LoadedTextEncoder:
    del texts
    arguments = {**_onnx_arguments(settings), "export": True}
    return _encode_with(_sentence_transformers(model, settings, backend="onnx", model_kwargs=arguments))


def _onnx_int8(model: str, settings: Settings, texts: Sequence[str]) -> LoadedTextEncoder:
    del texts
    library = importlib.import_module("sentence_transformers")
    with TemporaryDirectory() as folder:
        exported = _sentence_transformers(model, settings, backend="onnx", model_kwargs={**_onnx_arguments(settings), "export": True})
        exported.save_pretrained(folder)
        # Set file_suffix, because the exporter's default file name depends on the processor's instruction set.
        with quiet_libraries():
            library.export_dynamic_quantized_onnx_model(exported, _onnx_instructions(), folder, file_suffix="int8")
        arguments = {**_onnx_arguments(settings), "file_name": "model_int8.onnx"}
        return _encode_with(_sentence_transformers(folder, settings, backend="onnx", model_kwargs=arguments))


def _onnx_instructions() -> str:
    """The exporter's configuration for this processor."""
    if platform.machine() in ("arm64", "aarch64"):
        return "arm64"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    return next((name for flag, name in (("avx512_vnni", "avx512_vnni"), ("avx512f", "avx512")) if flag in flags), "avx2")


def _openvino_config(settings: Settings) -> dict[str, Any]:
    return {"INFERENCE_NUM_THREADS": settings.threads or torch.get_num_threads()}


def _openvino(model: str, settings: Settings, texts: Sequence[str]) -> LoadedTextEncoder:
    del texts
    # Without the hint OpenVINO computes in bfloat16 on processors that support it, which is not comparable with float32.
    precision = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[settings.dtype]
    arguments = {"ov_config": {**_openvino_config(settings), "INFERENCE_PRECISION_HINT": precision}, "export": True}
    return _encode_with(_sentence_transformers(model, settings, backend="openvino", model_kwargs=arguments))


def _openvino_int8(model: str, settings: Settings, texts: Sequence[str]) -> LoadedTextEncoder:
    library = importlib.import_module("sentence_transformers")
    with TemporaryDirectory() as data, TemporaryDirectory() as folder:
        # The exporter calibrates on a data set of the Hub by default; calibrate on the texts of the benchmark.
        Path(data, "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        arguments: dict[str, Any] = {"ov_config": _openvino_config(settings), "export": True}
        exported = _sentence_transformers(model, settings, backend="openvino", model_kwargs=arguments)
        exported.save_pretrained(folder)
        with quiet_libraries():
            library.export_static_quantized_openvino_model(exported, None, folder, data, "default", "train", "text")
        (file,) = Path(folder, "openvino").glob("*int8*.xml")
        # No precision hint: the operations that are not int8 may use the fastest precision.
        arguments = {"ov_config": _openvino_config(settings), "file_name": file.name}
        return _encode_with(_sentence_transformers(folder, settings, backend="openvino", model_kwargs=arguments))


def _needs(*modules: str, package: str, dtypes: Sequence[str]) -> Callable[[Settings], str | None]:
    """A check that the modules can be imported and the dtype is supported."""

    def unsupported_reason(settings: Settings) -> str | None:
        if not all(_is_importable(module) for module in modules):
            return f"not installed (pip install '{package}')"
        return dtype_reason(settings, dtypes)

    return unsupported_reason


def dtype_reason(settings: Settings, dtypes: Sequence[str]) -> str | None:
    """Why a backend that supports only these dtypes cannot run; None if it can.

    Example:
        >>> dtype_reason(Settings(dtype="bfloat16"), ["float32"])
        'supports float32, not bfloat16'
    """
    return None if settings.dtype in dtypes else f"supports {' and '.join(dtypes)}, not {settings.dtype}"


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


_ANY = tuple(DTYPES)
_ONNX = ("sentence_transformers", "optimum.onnxruntime", "onnxruntime")
_OPENVINO = ("sentence_transformers", "optimum.intel", "openvino")

TEXT_BASELINES: Mapping[str, TextBackend] = {
    "sentence-transformers": TextBackend(_torch, _needs("sentence_transformers", package="quiver-retrieval[train]", dtypes=_ANY)),
    "sentence-transformers-onnx": TextBackend(_onnx, _needs(*_ONNX, package="sentence-transformers[onnx]", dtypes=["float32"])),
    # int8 weights replace weights of any dtype.
    "sentence-transformers-onnx-int8": TextBackend(_onnx_int8, _needs(*_ONNX, package="sentence-transformers[onnx]", dtypes=_ANY)),
    "sentence-transformers-openvino": TextBackend(_openvino, _needs(*_OPENVINO, package="sentence-transformers[openvino]", dtypes=_ANY)),
    "sentence-transformers-openvino-int8": TextBackend(
        _openvino_int8, _needs(*_OPENVINO, package="sentence-transformers[openvino]", dtypes=_ANY)
    ),
}
"""sentence-transformers on its backends."""

TEXT_BACKENDS: Mapping[str, TextBackend] = {
    "quiver": TextBackend(lambda model, settings, texts: _load_biencoder(model, settings), lambda settings: None),
    "quiver-int8": TextBackend(
        lambda model, settings, texts: LoadedTextEncoder(_load_biencoder(model, settings, int8=True).encode),
        lambda settings: None if settings.device == "cpu" else "runs on CPUs only",
    ),
    **TEXT_BASELINES,
}
"""All backends for texts. The others are compared with the first."""
