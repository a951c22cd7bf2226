"""Hard negatives for training: documents that a system ranks high for a query and that are not its positives.

Queries are searched in parts, each kept on the disk when it is done: a run that is killed goes on where it was, and ends with the
same files. In memory are the numbers of queries and documents, one part's candidates, and what the index takes; what the files hold
stands in `quiver.retrieval.training.mining.mined`.

Shapes: Q queries, P documents.
Source: NV-Retriever, arXiv:2407.15831 (positive-aware margins).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.files import read_json
from quiver.retrieval.data.embedding_store import open_embedding_store
from quiver.retrieval.index import Index, index_vectors
from quiver.retrieval.progress import progress_bar
from quiver.retrieval.protocols import IN_PROCESS, DenseModel, Executor, TokenModel
from quiver.retrieval.search import bm25
from quiver.retrieval.training.data.table import blocks
from quiver.retrieval.training.mining.margins import Rules, choose_negatives, rankable
from quiver.retrieval.training.mining.mined import DOCUMENTS, QUERIES, MinedQuery, write_mined
from quiver.retrieval.training.mining.positives import BeirSource, MiningData, PairSource, read_mining_data
from quiver.retrieval.training.mining.searchers import BM25Searcher, Found, Searcher, VectorSearcher
from quiver.retrieval.training.mining.work_folder import open_work
from quiver.retrieval.versions import installed_version

SCHEMA = "quiver-mining/1"
RECORD = "mining.json"
"""The file that says how it was done; it is written last."""

# Queries of a part: each part goes through the whole corpus, so that the more documents there are, the more queries share a walk.
_QUERIES = (256, 4096)
_DOCUMENTS_A_QUERY = 64
# Candidates that a part holds, 12 bytes each and an id.
_CANDIDATES = 2_000_000
# Copies of positives that are searched past at once; and by how much deeper the search goes for queries that have more copies, of these
# or of anything else.
_COPIES = 1000
_DEEPER = 4


@dataclass(frozen=True)
class System:
    """What ranks the documents.

    Attributes:
        model: It encodes what has no vectors yet; None is BM25.
        index: An index built by the model; its documents are the corpus.
        cache: Folder that keeps vectors for the next time; None keeps none.
        executor: Who encodes documents.
    """

    model: DenseModel | TokenModel | None
    index: Index | None = None
    cache: Path | None = None
    executor: Executor = IN_PROCESS

    @property
    def description(self) -> dict[str, Any]:
        """What the record says of it."""
        if self.model is None:
            return {"name": bm25.NAME, **bm25.PARAMETERS}
        return asdict(self.model.card)

    @property
    def fingerprint(self) -> str:
        """Equal ones rank equally, wherever the model lies."""
        return bm25.NAME if self.model is None else self.model.card.fingerprint


@dataclass(frozen=True)
class Output:
    """What is written of what was found.

    Attributes:
        ids: Rows hold ids, and the texts are files of their own: each text is written once, however many rows it is in.
        suspects: Candidates that a margin left out and that are listed, at most, for each query.
        limit: Queries that are mined for, the first ones; None for all. The corpus is whole in any case.
    """

    ids: bool = False
    suspects: int = 5
    limit: int | None = None


def mine_negatives(
    source: PairSource | BeirSource,
    system: System,
    out: Path,
    *,
    rules: Rules,
    output: Output,
    overwrite: bool = False,
    progress: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Mine hard negatives into a folder.

    Args:
        source: Queries, positives and documents.
        system: What ranks the documents.
        out: The folder to write.
        rules: Which candidates become negatives.
        output: What is written of them.
        overwrite: Begin anew, whatever is in ``out``.
        progress: Show bars.
        command: The command line to record.

    Returns:
        What ``mining.json`` holds.

    Raises:
        InputError: The data, the model or the index cannot be used, or ``out`` is taken.
    """
    started = time.perf_counter()
    if system.index is not None and system.model is not None:
        system.index.check_model(system.model.card)
    settings = {
        "system": system.fingerprint,
        "index": None if system.index is None else system.index.manifest.kind,
        "rules": asdict(rules),
        "output": asdict(output),
    }
    with open_work(out, RECORD, SCHEMA, settings=settings, overwrite=overwrite) as work:
        data = read_mining_data(source, work.fresh("texts"), index=system.index)
        work.agree(data=data.sha256)
        depths = _depths(data, rules, len(data.queries) if output.limit is None else min(output.limit, len(data.queries)))
        parts = _parts(depths, data.searchable)
        missing = [number for number in range(len(parts)) if not work.has(number)]
        if missing:
            with _searcher(data, system, len(depths), progress=progress) as searcher:
                miner = _Miner(data, searcher, rules, output.suspects)
                with progress_bar("mining", len(depths), enabled=progress) as advance:
                    advance(len(depths) - sum(parts[number].stop - parts[number].start for number in missing))
                    for number in missing:
                        work.write(number, miner.mine(parts[number], int(depths[parts[number]].max())))
                        advance(parts[number].stop - parts[number].start)
        found = (MinedQuery.parse(line) for number in range(len(parts)) for line in work.read(number).splitlines())
        result = write_mined(found, data, out, rules=rules, count=len(depths), ids=output.ids, progress=progress)
        if not output.ids:
            _remove_texts(out)
        record = {
            "schema": SCHEMA,
            "command": command,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {name: installed_version(name) for name in ("quiver-retrieval", "torch", "numpy", "faiss-cpu", "bm25s")},
            **settings,
            "system": system.description,
            "data": {
                **{name: str(value) if isinstance(value, Path) else value for name, value in asdict(source).items()},
                "index": None if system.index is None else str(system.index.path),
                "sha256": data.sha256,
                "documents": data.searchable,
                "without_positive": data.without_positive,
            },
            "result": result,
            "seconds": round(time.perf_counter() - started, 1),
        }
        work.finish(RECORD, record)
    return record


def _remove_texts(out: Path) -> None:
    """Remove the texts of the run that is replaced, which would not fit these rows, if it has written any."""
    if (out / RECORD).is_file() and read_json(out / RECORD).get("output", {}).get("ids"):
        for name in (QUERIES, DOCUMENTS):
            (out / name).unlink(missing_ok=True)


class _Miner:
    """Parts of the queries to lines of JSON."""

    def __init__(self, data: MiningData, searcher: Searcher, rules: Rules, suspects: int) -> None:
        self._data, self._searcher, self._rules, self._suspects = data, searcher, rules, suspects

    def mine(self, part: slice, depth: int) -> bytes:
        """A line for each query of a part.

        Copies take places and no ranks. Where so many are found that the last rank is not reached, and there is more to be found, the
        search goes deeper for these queries.
        """
        lines: dict[int, str] = {}
        waiting = list(range(part.start, part.stop))
        while waiting:
            short = []
            for queries in blocks(waiting, max(1, _CANDIDATES // depth)):
                also = [self._data.positives_of(query) for query in queries]
                for query, found in zip(queries, self._searcher.search(np.array(queries), depth, also=also), strict=True):
                    ranked = rankable(self._data.documents.same[found.ranked.rows], self._data.excluded(query))
                    if len(ranked) < self._rules.ranks.last and len(found.ranked.rows) == depth < self._data.searchable:
                        short.append(query)
                    else:
                        lines[query] = self._one(query, found, ranked[: self._rules.ranks.last])
            waiting, depth = short, min(depth * _DEEPER, self._data.searchable)
        return "".join(lines[query] + "\n" for query in range(part.start, part.stop)).encode("ascii")

    def _one(self, query: int, found: Found, ranked: NDArray[np.intp]) -> str:
        """The line of a query; ``ranked`` as `rankable` gives it, to the last rank."""
        whole = len(ranked) == self._rules.ranks.last
        best = found.ranked.at(np.arange(ranked[-1] + 1)) if whole else found.ranked
        picked = choose_negatives(best, ranked, float(found.scores.min()), self._rules, query=query)
        positives = self._data.positives_of(query)
        suspects = picked.suspects.at(np.arange(min(self._suspects, len(picked.suspects.rows))))
        mined = MinedQuery(
            query=query,
            positives=positives.tolist(),
            positive_scores=_plain(found.scores),
            negatives=picked.chosen.rows.tolist(),
            negative_scores=_plain(picked.chosen.scores),
            suspects=suspects.rows.tolist(),
            suspect_scores=_plain(suspects.scores),
            suspect_ranks=picked.ranks[: self._suspects].tolist(),
            positives_found=int(np.isin(positives, best.rows[: self._rules.ranks.last]).sum()),
            candidates=picked.candidates,
            copies=picked.left_out - int(np.isin(best.rows, positives).sum()),
            dropped=picked.dropped,
        )
        return json.dumps(asdict(mined))


def _plain(scores: NDArray[np.float32]) -> list[float]:
    """Scores with nine digits, which give every float32 back."""
    return [float(f"{score:.9g}") for score in scores.tolist()]


def _depths(data: MiningData, rules: Rules, count: int) -> NDArray[np.int64]:
    """How many documents to ask for so that the last rank is likely to be reached once positives and their copies are out, by query."""
    copies = np.bincount(data.documents.same[: data.searchable], minlength=len(data.documents))
    extra = np.fromiter((copies[data.excluded(query)].sum() for query in range(count)), np.int64, count)
    depths: NDArray[np.int64] = np.minimum(rules.ranks.last + np.minimum(extra, _COPIES), data.searchable)
    return depths


def _parts(depths: NDArray[np.int64], documents: int) -> list[slice]:
    """Queries in runs that are searched together."""
    most = min(max(documents // _DOCUMENTS_A_QUERY, _QUERIES[0]), _QUERIES[1])
    parts: list[slice] = []
    first = 0
    while first < len(depths):
        widths = np.maximum.accumulate(depths[first : first + most])
        size = max(1, int(np.searchsorted(widths * np.arange(1, len(widths) + 1), _CANDIDATES, side="right")))
        parts.append(slice(first, min(first + size, len(depths))))
        first = parts[-1].stop
    return parts


@contextmanager
def _searcher(data: MiningData, system: System, count: int, *, progress: bool) -> Iterator[Searcher]:
    if system.model is None:
        yield BM25Searcher(islice(data.queries, count), data.documents, data.documents.ids, searchable=data.searchable)
        return
    model, index = system.model, system.index
    with open_embedding_store(system.cache, system.executor) as store:
        queries = store.encode(model, islice(data.queries, count), "query", total=count, progress=progress)
        if index is None:
            scored = np.arange(len(data.documents))
            documents = store.encode(model, data.documents, "document", total=len(scored), progress=progress)
            yield VectorSearcher(
                index_vectors(list(data.documents.ids), documents.rows, model.card, lengths=documents.lengths), queries, scored, documents
            )
            return
        # Vectors inside an index cannot be asked for: those of the positives are made once more.
        scored = np.unique(data.positives[: data.starts[count]])
        texts = (data.documents[number] for number in scored.tolist())
        documents = store.encode(model, texts, "document", total=len(scored), progress=progress, description="positives")
        yield VectorSearcher(index, queries, scored, documents)
