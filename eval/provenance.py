"""Where a result comes from: the command, the versions and the machine, so that somebody else can have it again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from retrieval.corpus import Collection
from retrieval.versions import installed_version

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "quiver": ("quiver-retrieval",),
    "torch": ("torch",),
    "numpy": ("numpy",),
    "faiss": ("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12"),
    "tokenizers": ("tokenizers",),
    "safetensors": ("safetensors",),
    "bm25s": ("bm25s",),
}
"""Name in the report -> distributions that provide it; the first one installed is recorded."""


@dataclass(frozen=True)
class Provenance:
    """Where and how a result was made.

    Attributes:
        command: The command line that makes it again; None when a program called the library.
        date: When the evaluation ended: UTC, ISO 8601, to the second.
        versions: Package -> version, Python's among them; packages that are not installed are left out.
        platform: Operating system, processor and, where torch sees one, accelerator.
        threads: Threads torch computes with on the CPU.
    """

    command: str | None
    date: str
    versions: Mapping[str, str]
    platform: str
    threads: int


def provenance(command: str | None) -> Provenance:
    """The provenance of what this process has computed.

    Args:
        command: The command line to record, if there is one.
    """
    accelerators = {torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())}
    return Provenance(
        command=command,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **_versions()},
        platform=", ".join([platform.platform(), f"{os.cpu_count()} CPUs", *sorted(accelerators)]),
        threads=torch.get_num_threads(),
    )


def data_sha256(collection: Collection) -> str:
    """Checksum over a collection's documents, queries and judgements, in their order.

    It is over what was read, not over the files: a compressed copy of a collection has the same checksum.
    """
    digest = hashlib.sha256()
    for rows in (collection.documents, collection.queries, collection.qrels.items()):
        for row in rows:
            digest.update(json.dumps(row).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    found = {name: next(filter(None, map(installed_version, distributions)), None) for name, distributions in PACKAGES.items()}
    return {name: version for name, version in found.items() if version is not None}
