"""``quiver doctor``: versions, devices and a test of the encoder. ``quiver cache``: the cache of vectors and words."""

from __future__ import annotations

import os
import platform
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

import typer

from quiver.cli import options
from quiver.cli.options import command, help_alone, option, print_json, print_result, print_table, quiver_version, say
from quiver.encoder.environment import installed_version
from quiver.retrieval.options import parse_size

if TYPE_CHECKING:
    import torch

    from quiver.encoder.attention import AttentionCall
    from quiver.encoder.layers import Block

cache_app = typer.Typer(invoke_without_command=True, callback=help_alone, help="Show and prune the cache of vectors and words.")

DISTRIBUTION = "quiver-retrieval"
_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[([\w,-]+)\])?(?:.*\bextra == ["']([\w-]+))?""")
_MISSING = "not installed"


@command
def doctor(json: bool = options.JSON) -> None:
    """Show versions, devices, threads and the attention backend, and run a small encoder on every device.

    Example: quiver doctor --json
    """
    if not json:
        typer.echo("running a small encoder; the first time, CPU kernels are compiled, which takes up to a minute", err=True)
    report = gather()
    if json:
        print_json(report)
        return
    for extra, packages in report["extras"].items():
        missing = [name for name, value in packages.items() if value == _MISSING]
        some = f"missing: {', '.join(missing)}" if missing else "complete"
        report["extras"][extra] = some if len(missing) < len(packages) else _MISSING
    rows = []
    for section, values in report.items():
        first = next(iter(values), None)
        rows += [(section if name == first else "", name, str(value)) for name, value in values.items()]
    print_table("quiver doctor", ("used for", "", "value"), rows)
    say(f"an extra is installed with: pip install '{DISTRIBUTION}[NAME]'")
    say("the encoder works" if report["check"]["finite"] else "the encoder returns values that are not finite")


def gather(*, with_check: bool = True) -> dict[str, dict[str, Any]]:
    """Collect what the command prints, by section; ``with_check`` also runs a small encoder on every device."""
    import faiss
    import torch

    report: dict[str, dict[str, Any]] = {
        "quiver": {"version": quiver_version(), "python": platform.python_version(), "platform": platform.platform()},
        "threads": {
            "cores": os.cpu_count(),
            "torch": torch.get_num_threads(),
            "faiss": faiss.omp_get_max_threads(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        },
        **_describe_choices(),
    }
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        requirements = []
    report["packages"], report["extras"] = packages_and_extras(requirements)
    if with_check:
        report["check"] = _check()
    return report


def packages_and_extras(requirements: Iterable[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Versions of the packages that Quiver needs, and those of each extra; an extra made of others alone is left out.

    Args:
        requirements: Requirements as the metadata of a distribution has them.

    Example:
        >>> packages_and_extras(["no-such>=1", 'no-other>=2; extra == "serve"', 'quiver-retrieval[serve]; extra == "all"'])
        ({'no-such': 'not installed'}, {'serve': {'no-other': 'not installed'}})
    """
    packages: defaultdict[str | None, list[str]] = defaultdict(list)
    included: defaultdict[str | None, list[str]] = defaultdict(list)
    for name, extras, extra in (found.groups() for found in map(_REQUIREMENT.match, requirements) if found):
        packages[extra] += [name] if name != DISTRIBUTION else []
        included[extra] += extras.split(",") if name == DISTRIBUTION else []

    def versions(extra: str | None) -> dict[str, str]:
        own = {name: installed_version(name) or _MISSING for name in packages[extra]}
        return own | {name: value for each in included[extra] for name, value in versions(each).items()}

    return versions(None), {extra: versions(extra) for extra, names in list(packages.items()) if extra and names}


def _describe_choices() -> dict[str, dict[str, Any]]:
    """The devices of this machine, and what commands choose on it: device, dtype and attention backend."""
    import torch

    from quiver.encoder.attention import choose_backend
    from quiver.encoder.attention.dispatch import VARIABLE, unsupported_reason
    from quiver.encoder.cpu.support import has_amx
    from quiver.encoder.training.optimization import training_dtype
    from quiver.retrieval.models.pretrained import default_device, default_dtype

    forced, device = os.environ.get(VARIABLE), default_device()
    dtype, trained = default_dtype(device), training_dtype("auto", device)
    call = _attention_call(device, getattr(torch, dtype))
    used: dict[str, Any] = {"device": device, "dtype": dtype, "attention": choose_backend(call, forced)}
    if device == "cuda" and (reason := unsupported_reason("aten_flash", call)) is not None:
        used["flash attention"] = f"not used: {reason}"
    products = "float32 weights, bfloat16 autocast" if trained == "bfloat16" else "float32, without TF32" if device == "cuda" else "float32"
    call = _attention_call(device, getattr(torch, trained), gradients=True)
    training = {"device": device, "dtype": trained, "products": products, "attention": choose_backend(call, forced)}
    devices: dict[str, Any] = {"cpu": torch.backends.cpu.get_cpu_capability() + ", AMX" * has_amx()}
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        devices[f"cuda:{number}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    # For batches of some hundred tokens; a single query uses torch's kernels.
    devices["attention (cpu, float32)"] = choose_backend(_attention_call("cpu", torch.float32), forced)
    return {"devices": devices, "evaluate, index build, serve": used, "train, pretrain, glue, qa train": training}


def _attention_call(device: str, dtype: torch.dtype, *, gradients: bool = False) -> AttentionCall:
    """Describe a call of attention in a local layer of ModernBERT."""
    import torch

    from quiver.encoder.attention import AttentionCall
    from quiver.encoder.attention.flash import installed, missing
    from quiver.encoder.cpu.support import kernels_available

    if device == "cpu":
        return AttentionCall("cpu", dtype, gradients=gradients, installed=frozenset({"compiled"} if kernels_available() else ()))
    capability = torch.cuda.get_device_capability()
    return AttentionCall("cuda", dtype, capability=capability, gradients=gradients, local=True, installed=installed(), missing=missing())


def _check() -> dict[str, Any]:
    """Run a small random encoder on every device."""
    import torch

    from quiver.encoder import EncoderConfig, pack_ids
    from quiver.encoder.cpu.blocks import inference_is_supported
    from quiver.encoder.model import Encoder, init_weights

    config = EncoderConfig.modernbert(
        vocab_size=64, hidden_size=64, num_heads=2, intermediate_size=48, layer_types=["global", "local"], max_positions=512
    )
    encoder = init_weights(Encoder(config), seed=0).eval()
    batch = replace(pack_ids([[1, 2, 3], list(range(64)) * 5]), batch_invariant=True)  # as documents are encoded
    states = []
    with torch.inference_mode():
        fuses = inference_is_supported(cast("list[Block]", list(encoder.layers)), batch, encoder.embeddings(batch, torch.float32), None)
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            states.append(encoder.to(device)(batch).cpu())
    finite = all(bool(state.isfinite().all()) for state in states)
    return {"finite": finite, "devices run": len(states), "blocks (cpu, float32)": "compiled" if fuses else "torch"}


@cache_app.command("info")
@command
def cache_info(json: bool = options.JSON) -> None:
    """Show the folder, the size and the size limit (QUIVER_CACHE_LIMIT) of the cache.

    Example: quiver cache info
    """
    from quiver.encoder.files import cache_folder
    from quiver.retrieval.cache import COLLECTIONS, LIMIT, VECTORS, WORDS, cache_entries, cache_limit

    limit, folder = cache_limit(), str(cache_folder(VECTORS).parent)
    rows, sizes = [], {}
    for name in (VECTORS, WORDS, COLLECTIONS):
        entries = cache_entries(name)
        sizes[name] = {"entries": len(entries), "bytes": sum(entry.bytes for entry in entries)}
        used = time.strftime("%Y-%m-%d", time.localtime(max(entry.used for entry in entries))) if entries else "never"
        rows.append((name, f"{len(entries):,}", _size(sizes[name]["bytes"]), used))
    if json:
        print_json({"folder": folder, "limit": limit, **sizes})
        return
    print_table(folder, ("", "entries", "size", "last used"), rows)
    allowed = "unlimited" if limit is None else _size(limit)
    say(f"size limit of vectors and words: {allowed} ({LIMIT}); collections are kept until you delete them")


@cache_app.command("prune")
@command
def cache_prune(
    size: str | None = option(None, "Size to prune to, such as 5GB. Default: QUIVER_CACHE_LIMIT, or 20GB."), json: bool = options.JSON
) -> None:
    """Remove the least recently used vectors and words. Entries used within the last day are kept.

    Example: quiver cache prune --size 5GB
    """
    from quiver.retrieval.cache import VECTORS, WORDS, cache_entries, cache_limit, prune_cache

    limit = cache_limit() if size is None else parse_size(size, "--size")
    removed = [] if limit is None else prune_cache(limit)
    freed = sum(entry.bytes for entry in removed)
    left = sum(entry.bytes for name in (VECTORS, WORDS) for entry in cache_entries(name))
    record = {"removed": [str(entry.path) for entry in removed], "bytes": freed, "left": left}
    print_result(record, f"{len(removed):,} entries removed, {_size(freed)}; {_size(left)} left", json=json)


def _size(size: int) -> str:
    return f"{size / (1 << 30):,.2f} GB" if size >= 1 << 30 else f"{size / (1 << 20):,.1f} MB"
