"""What a search over two actors takes beyond the slower shard's own search, with real vectors: under 5 ms in the median."""

from __future__ import annotations

import gc
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder import Tokenizer, load_encoder
from quiver.retrieval.cluster.index import open_sharded
from quiver.retrieval.cluster.ray_backend import RayLauncher
from quiver.retrieval.cluster.shard import Sharding
from quiver.retrieval.data.corpus import read_documents, read_queries
from quiver.retrieval.index import BuildOptions, add_documents, build_index, open_index
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.models.pooling import Projection

# What the shards search takes no part in the figure.
DOCUMENTS = 400
SEARCHES = 1000


def colbert(minilm: Path) -> ColBERT:
    """MiniLM's token vectors through a projection that was not trained: as many and as wide as a ColBERT's."""
    torch.manual_seed(0)
    settings = ColBERTSettings(query_prefix="", document_prefix="")
    folder = ModelFolder("colbert", minilm, projections=(Projection(384, 128),), similarity="maxsim", colbert=settings)
    return ColBERT.from_parts(load_encoder(minilm), Tokenizer.from_pretrained(minilm), folder)


@pytest.mark.exhaustive
@pytest.mark.data
@pytest.mark.parametrize("engine", ["exact-dense", "ivf-tokens"])
def test_overhead(
    engine: str, cluster: None, tmp_path: Path, minilm: Path, quiver_data: Path, assert_same: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [*itertools.islice(read_documents(quiver_data / "cranfield" / "corpus.jsonl"), DOCUMENTS)]
    model: Any = colbert(minilm) if engine == "ivf-tokens" else BiEncoder(str(minilm))
    options = BuildOptions(engine=engine, calibrate=False)
    build_index(documents[: DOCUMENTS // 2], model, tmp_path / "i", options=options)
    index = add_documents(tmp_path / "i", documents[DOCUMENTS // 2 :], model)
    texts = [query.text for query in read_queries(quiver_data / "cranfield" / "queries.jsonl")]
    queries = model.encode_texts(texts, "query").vectors
    with open_sharded(tmp_path / "i", Sharding(shards=2), RayLauncher()) as sharded:
        assert_same(sharded.search(queries, 100), open_index(tmp_path / "i").search(queries, 100))
        assert len(sharded.plan.shards) == len(index.segments) == 2
        gathered = []
        gc.collect()
        for number in range(SEARCHES):
            query = queries[number % len(queries)][None]
            gathered.append(sharded.gather(query if engine != "ivf-tokens" else [*query], 10))
    gathered = gathered[SEARCHES // 10 :]
    overhead = np.array([1000 * each.overhead for each in gathered])
    slowest = np.array([1000 * max(seconds for seconds in each.shards if seconds is not None) for each in gathered])
    p50, p95 = np.percentile(overhead, [50, 95])
    with capsys.disabled():
        sys.stdout.write(f"\n  {engine}: overhead p50 {p50:.2f} ms, p95 {p95:.2f} ms; slower shard p50 {np.median(slowest):.2f} ms\n")
    assert p50 < 5
