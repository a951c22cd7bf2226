"""``quiver doctor``: what this machine has and what Quiver would do with it."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from typing import Annotated, Any, cast

import faiss
import torch

from quiver.cli.output import JsonOption, print_json, print_table, quiver_version, say
from quiver.encoder import EncoderConfig, pack_ids
from quiver.encoder.attention import AttentionCall, choose_backend
from quiver.encoder.attention.dispatch import VARIABLE, unsupported_reason
from quiver.encoder.attention.flash import installed
from quiver.encoder.cpu import fused
from quiver.encoder.cpu.availability import available
from quiver.encoder.cpu.processor import has_amx
from quiver.encoder.layers import Block
from quiver.encoder.model import Encoder, init_weights
from quiver.retrieval.models.model_folder import INFERENCE_DTYPE, default_device
from quiver.retrieval.versions import installed_version

PACKAGES = {
    "core": ("torch", "numpy", "safetensors", "tokenizers", "huggingface-hub", "faiss-cpu", "numba", "pyyaml", "typer", "rich"),
    "train": (
        "sentence-transformers",
        "pylate",
        "transformers",
        "datasets",
        "accelerate",
        "schedulefree",
        "tensorboard",
        "torch-optimi",
        "bm25s",
    ),
    "eval": ("beir", "ir-measures", "pytrec-eval-terrier", "matplotlib", "jinja2"),
    "flash": ("flash-attn",),
}


def doctor(as_json: Annotated[bool, JsonOption] = False) -> None:
    """Show versions, devices, threads and the attention backend, and run the encoder once.

    Example: quiver doctor --json
    """
    facts = gather()
    if as_json:
        print_json(facts)
        return
    for section, values in facts.items():
        print_table(section, ("", "value"), [(name, str(value)) for name, value in values.items()])
    say("the encoder runs" if facts["check"]["finite"] else "the encoder gives values that are not finite")


def gather() -> dict[str, dict[str, Any]]:
    """What is printed, by section."""
    facts: dict[str, dict[str, Any]] = {
        "quiver": {"version": quiver_version(), "python": platform.python_version(), "platform": platform.platform()},
        "threads": {
            "cores": os.cpu_count(),
            "torch": torch.get_num_threads(),
            "faiss": faiss.omp_get_max_threads(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        },
        "devices": _devices(),
        "evaluate, index build, serve": _commands(),
    }
    for extra, names in PACKAGES.items():
        facts[extra] = {name: installed_version(name) or "not installed" for name in names}
    facts["check"] = _check()
    return facts


def _devices() -> dict[str, Any]:
    devices: dict[str, Any] = {"cpu": torch.backends.cpu.get_cpu_capability() + ", AMX" * has_amx()}
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        devices[f"cuda:{number}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    # For batches of some hundred tokens; a lone query takes torch's kernels.
    devices["attention (cpu, fp32)"] = choose_backend(_call("cpu", torch.float32), os.environ.get(VARIABLE))
    if torch.cuda.is_available():
        call = _call("cuda", torch.bfloat16, gradients=True)
        devices["attention (cuda, training with precision bf16)"] = choose_backend(call, os.environ.get(VARIABLE))
    return devices


def _commands() -> dict[str, Any]:
    """What evaluate, index build and serve use on this machine unless they are told otherwise."""
    device = default_device()
    call = _call(device, INFERENCE_DTYPE)
    dtype = str(INFERENCE_DTYPE).removeprefix("torch.")
    used = {"device": device, "dtype": dtype, "attention": choose_backend(call, os.environ.get(VARIABLE))}
    if device == "cuda" and (reason := unsupported_reason("aten_flash", call)) is not None:
        used["flash attention"] = f"not used: {reason}; load_model(..., dtype=torch.bfloat16) in Python uses it"
    return used


def _call(device: str, dtype: torch.dtype, *, gradients: bool = False) -> AttentionCall:
    """Attention of a ModernBERT's local layer, as a kind of call."""
    if device == "cpu":
        return AttentionCall("cpu", dtype, gradients=gradients, installed=frozenset({"compiled"} if available() else ()))
    capability = torch.cuda.get_device_capability()
    return AttentionCall("cuda", dtype, capability=capability, gradients=gradients, local=True, installed=installed())


def _check() -> dict[str, Any]:
    """One forward pass of a small random encoder on every device."""
    config = EncoderConfig.modernbert(
        vocab_size=64, hidden_size=64, num_heads=2, intermediate_size=48, layer_types=["global", "local"], max_positions=512
    )
    encoder = init_weights(Encoder(config), seed=0).eval()
    batch = replace(pack_ids([[1, 2, 3], list(range(64)) * 5]), batch_invariant=True)  # as documents are encoded
    states = []
    with torch.inference_mode():
        fuses = fused.is_supported(cast("list[Block]", list(encoder.layers)), batch, encoder.embeddings(batch, torch.float32), None)
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            states.append(encoder.to(device)(batch).cpu())
    finite = all(bool(state.isfinite().all()) for state in states)
    return {"finite": finite, "devices run": len(states), "blocks (cpu, fp32)": "compiled" if fuses else "torch"}
