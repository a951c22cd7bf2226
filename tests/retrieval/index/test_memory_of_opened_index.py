"""Memory of a process that has opened an index."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.retrieval.index import BuildOptions, build_index
from quiver.retrieval.records import DenseEncoding, Document, ModelCard, Role, TextTokens, TokenEncoding

WIDTH = 64
TOKENS = 100
"""Token vectors of a document."""

# The first search of an index makes its lists in memory. Another index has been searched before, so that what is
# measured is neither compiled code nor the library's own buffers. A freed page counts until it is given back to the system.
MEASURE = """
import ctypes, gc, sys
import numpy as np
from quiver.retrieval.index import open_index

def anonymous():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

small, large, kind, width = sys.argv[1:]
query = np.random.default_rng(1).standard_normal((8, int(width))).astype(np.float32)
queries = query if kind == "dense" else [query]
opened = [open_index(small), open_index(large)]
opened[0].search(queries, 10, effort="fast")
before = anonymous()
opened[1].search(queries, 10, effort="fast")
print(anonymous() - before)
"""


class Noise:
    """A model whose vectors are noise, the same for the same text."""

    def __init__(self, kind: Any) -> None:
        self.card = ModelCard("noise", kind, 64 * "a", WIDTH, "dot" if kind == "dense" else "maxsim", 999, 999)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> Any:
        counts = TextTokens(np.ones(len(texts), np.int32), np.zeros(len(texts), bool), np.zeros(len(texts), bool))
        if self.card.kind == "dense":
            rows = [np.random.default_rng(int(text)).standard_normal(WIDTH, dtype=np.float32) for text in texts]
            return DenseEncoding(np.array(rows).reshape(-1, WIDTH), counts)
        return TokenEncoding(
            [np.random.default_rng(int(text)).standard_normal((TOKENS, WIDTH), dtype=np.float32) for text in texts], counts
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "documents", "bytes_a_document"),
    [
        ("colbert", BuildOptions("ivf-tokens", {"centroids": 256}, calibrate=False), 2_000, TOKENS * (WIDTH // 8 + 8)),
        ("dense", BuildOptions("ivf-dense", {"nlist": 64}, calibrate=False), 80_000, WIDTH // 4 + 8),
    ],
)
def test_lists_take_the_memory_of_their_codes_and_labels_once(
    tmp_path: Path, kind: str, options: BuildOptions, documents: int, bytes_a_document: int
) -> None:
    for name, count in (("small", 1000), ("large", documents)):
        build_index([Document(str(row), str(row)) for row in range(count)], Noise(kind), tmp_path / name, options=options)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), kind, str(WIDTH)]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert taken < 1.4 * documents * bytes_a_document
