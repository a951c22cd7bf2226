"""Who encodes texts with a bi-encoder's folder: Quiver, and sentence-transformers on torch, ONNX Runtime and OpenVINO.

The int8 files of the last two are made when they are asked for, by sentence-transformers' own exporters with their defaults, in a
folder that is removed again.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.config import Precision
from quiver.encoder.errors import InputError
from quiver.eval.bench.encoder.libraries import DTYPES
from quiver.eval.bench.encoder.results import Settings
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.loading import load_model

Encode = Callable[[list[str]], NDArray[np.float32]]
"""Documents to (B, d) vectors, at the library's own default batch size."""


@dataclass(frozen=True)
class TextLibrary:
    """A way to run a bi-encoder.

    Attributes:
        load: Folder or hub id, settings and texts to calibrate on, to its way to encode.
        obstacle: Why it cannot run under these settings, None if it can.
    """

    load: Callable[[str, Settings, Sequence[str]], Encode]
    unsupported_reason: Callable[[Settings], str | None]


def open_biencoder(model: str, settings: Settings, *, precision: Precision = "float") -> BiEncoder:
    """Load Quiver's side.

    Raises:
        InputError: It is no model, or not a bi-encoder.
    """
    own = load_model(model, dtype=DTYPES[settings.dtype], device=settings.device, precision=precision)
    if not isinstance(own, BiEncoder):
        raise InputError(f"{model}: not a bi-encoder; only one vector a text can be compared")
    return own


def own_encode(own: BiEncoder) -> Encode:
    """Quiver's way to encode documents."""
    return lambda texts: own.encode(texts, "document").vectors


def _quiver(model: str, settings: Settings, texts: Sequence[str]) -> Encode:
    del texts
    return own_encode(open_biencoder(model, settings))


def _quiver_int8(model: str, settings: Settings, texts: Sequence[str]) -> Encode:
    del texts
    return own_encode(open_biencoder(model, settings, precision="int8"))


# Who talks while models are loaded and exported.
TALKERS = ("transformers", "sentence_transformers", "pylate", "optimum", "nncf")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the libraries' notes on loading and exporting out of a terminal that shows a bar and a table; errors come through."""
    logging_of = importlib.import_module("transformers.utils.logging")
    bars = logging_of.is_progress_bar_enabled()
    levels = {name: logging.getLogger(name).level for name in TALKERS}
    logging_of.disable_progress_bar()
    for name in TALKERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if bars:
            logging_of.enable_progress_bar()


def _sentence_transformers(model: str, settings: Settings, **arguments: Any) -> Any:
    library = importlib.import_module("sentence_transformers")
    with quiet_libraries():
        return library.SentenceTransformer(model, device=settings.device, **arguments)


def _encode(encoder: Any) -> Encode:
    def encode(texts: list[str]) -> NDArray[np.float32]:
        return np.asarray(encoder.encode_document(texts, show_progress_bar=False), dtype=np.float32)

    return encode


def _torch(model: str, settings: Settings, texts: Sequence[str]) -> Encode:
    del texts
    arguments = {} if settings.dtype == "float32" else {"model_kwargs": {"torch_dtype": DTYPES[settings.dtype]}}
    return _encode(_sentence_transformers(model, settings, **arguments))


def _onnx_arguments(settings: Settings) -> dict[str, Any]:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = settings.threads or torch.get_num_threads()
    provider = "CUDAExecutionProvider" if settings.device == "cuda" else "CPUExecutionProvider"
    return {"provider": provider, "session_options": options}


def _onnx(model: str, settings: Settings, texts: Sequence[str]) -> Encode:
    del texts
    return _encode(_sentence_transformers(model, settings, backend="onnx", model_kwargs={**_onnx_arguments(settings), "export": True}))


def _onnx_int8(model: str, settings: Settings, texts: Sequence[str]) -> Encode:
    del texts
    library = importlib.import_module("sentence_transformers")
    instructions = _onnx_instructions()
    with TemporaryDirectory() as folder:
        exported = _sentence_transformers(model, settings, backend="onnx", model_kwargs={**_onnx_arguments(settings), "export": True})
        exported.save_pretrained(folder)
        # The exporter's own name for the file depends on what the weights become on this processor.
        with quiet_libraries():
            library.export_dynamic_quantized_onnx_model(exported, instructions, folder, file_suffix="int8")
        arguments = {**_onnx_arguments(settings), "file_name": "model_int8.onnx"}
        return _encode(_sentence_transformers(folder, settings, backend="onnx", model_kwargs=arguments))


def _onnx_instructions() -> str:
    """The exporter's configuration for this processor."""
    if platform.machine() in ("arm64", "aarch64"):
        return "arm64"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    return next((name for flag, name in (("avx512_vnni", "avx512_vnni"), ("avx512f", "avx512")) if flag in flags), "avx2")


def _openvino_config(settings: Settings) -> dict[str, Any]:
    return {"INFERENCE_NUM_THREADS": settings.threads or torch.get_num_threads()}


def _openvino(model: str, settings: Settings, texts: Sequence[str]) -> Encode:
    del texts
    # Without the hint OpenVINO computes in bfloat16 where the processor can, which float32 is not to be compared with.
    precision = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[settings.dtype]
    arguments = {"ov_config": {**_openvino_config(settings), "INFERENCE_PRECISION_HINT": precision}, "export": True}
    return _encode(_sentence_transformers(model, settings, backend="openvino", model_kwargs=arguments))


def _openvino_int8(model: str, settings: Settings, texts: Sequence[str]) -> Encode:
    library = importlib.import_module("sentence_transformers")
    with TemporaryDirectory() as data, TemporaryDirectory() as folder:
        # The exporter calibrates on a data set of the hub unless it is given another; ours are the texts themselves.
        Path(data, "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        arguments: dict[str, Any] = {"ov_config": _openvino_config(settings), "export": True}
        exported = _sentence_transformers(model, settings, backend="openvino", model_kwargs=arguments)
        exported.save_pretrained(folder)
        with quiet_libraries():
            library.export_static_quantized_openvino_model(exported, None, folder, data, "default", "train", "text")
        (file,) = Path(folder, "openvino").glob("*int8*.xml")
        # No hint: what is not int8 may take the fastest way.
        arguments = {"ov_config": _openvino_config(settings), "file_name": file.name}
        return _encode(_sentence_transformers(folder, settings, backend="openvino", model_kwargs=arguments))


def _needs(*modules: str, package: str, dtypes: Sequence[str]) -> Callable[[Settings], str | None]:
    """An obstacle where one of the modules cannot be imported, or the weights cannot be of the dtype asked for."""

    def unsupported_reason(settings: Settings) -> str | None:
        if not all(_importable(module) for module in modules):
            return f"not installed (pip install '{package}')"
        return None if settings.dtype in dtypes else f"runs {' or '.join(dtypes)}, not {settings.dtype}"

    return unsupported_reason


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent of the module is missing
        return False


_TORCH = ("sentence_transformers",)
_ONNX = ("sentence_transformers", "optimum.onnxruntime", "onnxruntime")
_ONNX_PACKAGE = "sentence-transformers[onnx]"
_OPENVINO = ("sentence_transformers", "optimum.intel", "openvino")
_OPENVINO_PACKAGE = "sentence-transformers[openvino]"

TEXT_VARIANTS: Mapping[str, TextLibrary] = {
    "quiver": TextLibrary(_quiver, lambda settings: None),
    "quiver-int8": TextLibrary(_quiver_int8, lambda settings: None if settings.device == "cpu" else "needs a CPU"),
}
"""Our own encoder and ways to run it; the first is what all others are compared with."""

TEXT_PEERS: Mapping[str, TextLibrary] = {
    "sentence-transformers": TextLibrary(_torch, _needs(*_TORCH, package="quiver-retrieval[train]", dtypes=tuple(DTYPES))),
    "sentence-transformers-onnx": TextLibrary(_onnx, _needs(*_ONNX, package=_ONNX_PACKAGE, dtypes=("float32",))),
    # int8 weights take the place of whatever the others' weights are.
    "sentence-transformers-onnx-int8": TextLibrary(_onnx_int8, _needs(*_ONNX, package=_ONNX_PACKAGE, dtypes=tuple(DTYPES))),
    "sentence-transformers-openvino": TextLibrary(_openvino, _needs(*_OPENVINO, package=_OPENVINO_PACKAGE, dtypes=tuple(DTYPES))),
    "sentence-transformers-openvino-int8": TextLibrary(_openvino_int8, _needs(*_OPENVINO, package=_OPENVINO_PACKAGE, dtypes=tuple(DTYPES))),
}
"""sentence-transformers on its backends."""

TEXT_LIBRARIES: Mapping[str, TextLibrary] = {**TEXT_VARIANTS, **TEXT_PEERS}
"""All of them."""
