"""Where a result comes from: the command, the versions and the machine, so that somebody else can have it again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from quiver.retrieval.records import Document, Query
from quiver.retrieval.versions import installed_version

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

_MODULUS = 1 << 256


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


class DataChecksum:
    """Checksum over a collection's content, for whoever goes through the documents anyway.

    The order of documents, queries and judgements does not matter: the same collection has its rows in one order in an archive and in
    another on the hub. Every row is hashed, the hashes of each kind are added modulo 2^256, and the three sums are hashed with their
    counts; nothing is held of a row. That tells apart data that differ by mistake; it is no seal against somebody who forges rows to
    make a sum come out (such sums want a much longer modulus).

    Source: Bellare and Micciancio 1997, doi 10.1007/3-540-69053-0_13 (AdHASH).

    Example:
        >>> one, other = DataChecksum(), DataChecksum()
        >>> for a, b in ((Document("x", "wings"), Document("y", "fins")), (Document("y", "fins"), Document("x", "wings"))):
        ...     one.add_document(a)
        ...     other.add_document(b)
        >>> one.hexdigest([], {}) == other.hexdigest([], {}) != DataChecksum().hexdigest([], {})
        True
    """

    def __init__(self) -> None:
        """The checksum of a collection without documents."""
        self._sum = 0
        self._count = 0

    def add_document(self, document: Document) -> None:
        """Take a document in; each is added once."""
        self._sum += _row_hash((document.id, document.text, document.title))
        self._count += 1

    def hexdigest(self, queries: Iterable[Query], qrels: Mapping[str, Mapping[str, int]]) -> str:
        """The sha256 over the documents added so far, the queries and the judgements, in hexadecimal.

        Args:
            queries: The queries of the split.
            qrels: Query id -> document id -> grade.
        """
        asked = [_row_hash(query) for query in queries]
        judged = [_row_hash((query, document, grade)) for query, grades in qrels.items() for document, grade in grades.items()]
        kinds = ((self._count, self._sum), (len(asked), sum(asked)), (len(judged), sum(judged)))
        return hashlib.sha256(json.dumps([[count, f"{total % _MODULUS:064x}"] for count, total in kinds]).encode()).hexdigest()


def _row_hash(row: Sequence[str | int]) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(row).encode()).digest(), "big")


def _versions() -> dict[str, str]:
    found = {name: next(filter(None, map(installed_version, distributions)), None) for name, distributions in PACKAGES.items()}
    return {name: version for name, version in found.items() if version is not None}
