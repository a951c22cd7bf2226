"""Development score of a model during training: nDCG@10 on development collections, computed as ``evaluate`` does.

The collections are read and checked once, when the scorer is made, so that a malformed line is reported before the first update. Each
score uses the path of ``quiver.eval.evaluation``: exact search over every document, each distinct text encoded once. Vectors are kept for
one score only, because the next score comes with other weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home
from quiver.eval.datasets.benchmarks import Benchmark, find, missing, refuse_missing, resolve, shortest
from quiver.eval.datasets.cache import Cache
from quiver.eval.datasets.sources import is_offline
from quiver.eval.metrics import Part, grouped, score
from quiver.eval.rankers import ModelSearcher, rank
from quiver.eval.results import HEADLINE
from quiver.retrieval.data.corpus import Collection
from quiver.retrieval.data.embedding_store import open_embedding_store
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.training.recipe import DevelopmentSection

DEPTH = 10
"""Documents retrieved per query: nDCG@10 uses the first ten only, and exact search returns the same ten at any larger depth."""


@dataclass(frozen=True)
class DevelopmentScorer:
    """Scores models on collections that have already been read."""

    collections: tuple[tuple[Benchmark, Collection], ...]

    def __call__(self, model: BiEncoder | ColBERT) -> dict[str, float]:
        """nDCG@10 of each data set as a fraction; a group such as CQADupStack is one data set, the mean of its members.

        The model is unchanged afterwards: dropout is switched off during scoring only, and no random number is drawn.
        """
        with _evaluating((model.encoder, model.projections)):
            parts = [self._score_part(model, benchmark, collection) for benchmark, collection in self.collections]
        scored = {name: [part.value for part in members if part.value is not None] for name, members in grouped(parts).items()}
        return {name: math.fsum(values) / len(values) for name, values in scored.items()}

    def _score_part(self, model: BiEncoder | ColBERT, benchmark: Benchmark, collection: Collection) -> Part:
        # Open a new store for every score: a store finds vectors by the model's fingerprint, which a model computes only once.
        with open_embedding_store(None) as store:
            ranking = rank(
                lambda benchmark, collection: ModelSearcher(model, store, benchmark.policy, collection), benchmark, collection, DEPTH
            )
        value = score(collection.qrels, ranking.run, [HEADLINE]).means[HEADLINE]
        return Part(benchmark.name, benchmark.split, benchmark.metadata.group, benchmark.metadata.group_size, value)


def development_scorer(section: DevelopmentSection, *, progress: bool = False) -> DevelopmentScorer:
    """Read and check the development collections of a recipe."""
    named = [entry for data in section.data if not expand_home(data).exists() for entry in find(data)]
    try:
        if is_offline():  # all that are missing, not only those of the first name
            refuse_missing(named, Cache.usual())
        benchmarks = [benchmark for data in section.data for benchmark in resolve(data, section.split, progress=progress)]
    except InputError as error:
        absent = [] if is_offline() else missing(named, Cache.usual())
        fetch = f"quiver collections fetch {' '.join(shortest(absent))} downloads what is missing, " if absent else ""
        other = f"{fetch}development.data=DIR names another collection, development=null trains without one"
        raise InputError(f"development.data: {error}; {other}") from error
    keys = [benchmark.key for benchmark in benchmarks]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise InputError(
            f"development.data: two collections are called {twice[0]}, and only one would count; rename a folder or leave one out"
        )
    collections = tuple((benchmark, benchmark.load()) for benchmark in benchmarks)
    for benchmark, collection in collections:
        if not any(grade > 0 for grades in collection.qrels.values() for grade in grades.values()):
            what = f"development.data: {benchmark.name}, split {benchmark.split}"
            raise InputError(f"{what}: no document is judged relevant (grade 1 or more), so every model would score 0")
    return DevelopmentScorer(collections)


@contextmanager
def _evaluating(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Switch dropout off, and restore each module's own mode afterwards: frozen parts of a model are in another mode than the rest."""
    modes = [(module, module.training) for part in parts for module in part.modules()]
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
