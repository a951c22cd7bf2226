"""What is evaluated: a collection, its split, and the policy that its published numbers follow.

A policy is data. It is applied in one place, ``cut``, which returns a new run and changes none: harnesses that pop ids
from the caller's run score it differently the second time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from encoder.errors import InputError
from retrieval.corpus import Collection, load_collection
from retrieval.records import Run
from retrieval.run import ranked


@dataclass(frozen=True)
class Policy:
    """How a collection is scored.

    Attributes:
        exclude_self: A document with the id of the query is no answer to it, and is dropped before the cut.
        use_title: Titles are part of the documents' text.
    """

    exclude_self: bool = False
    use_title: bool = True


POLICIES: Mapping[str, Policy] = {
    # A query of ArguAna is an argument of the corpus and the answer is its counter-argument; a query of Quora is a question
    # of the corpus and the answers are its duplicates. Each would find itself first. Nowhere else in BEIR is the query a
    # document: where the ids merely coincide, dropping would lose an unrelated document.
    "arguana": Policy(exclude_self=True),
    "quora": Policy(exclude_self=True),
}
"""Policies by the collection's name in BEIR; every other collection has the default policy."""


@dataclass(frozen=True)
class Benchmark:
    """One split of a collection and how it is scored.

    Attributes:
        name: What tables and files call it.
        folder: BEIR folder: ``corpus.jsonl[.gz]``, ``queries.jsonl[.gz]`` and ``qrels/<split>.tsv``.
        split: Which judgements.
        policy: How its runs are made and scored.
    """

    name: str
    folder: Path
    split: str
    policy: Policy = Policy()

    def load(self) -> Collection:
        """Read and check the collection.

        Raises:
            InputError: A file is missing or malformed; names file and line.
        """
        return load_collection(self.folder, self.split)


def resolve(data: str | Path, split: str) -> Benchmark:
    """The benchmark of a local BEIR folder, with the policy known for a folder of that name.

    Args:
        data: The folder; its name as given (a link keeps its own), in lower case, decides the policy.
        split: Which judgements, as in ``qrels/<split>.tsv``.

    Raises:
        InputError: There is no such folder.
    """
    folder = Path(data).expanduser()
    if not folder.is_dir():
        raise InputError(
            f"unknown collection {str(data)!r}: no such folder; give a BEIR folder with corpus.jsonl, queries.jsonl and qrels/{split}.tsv"
        )
    # Of the path as it was given: a link called arguana may lead to a folder of any name, and the policy goes with the collection.
    name = Path(os.path.abspath(folder)).name  # noqa: PTH100 - Path.resolve would follow the link
    return Benchmark(name, folder, split, POLICIES.get(name.lower(), Policy()))


def depth(k: int, policy: Policy) -> int:
    """How many documents to retrieve so that k are left after ``cut``."""
    return k + policy.exclude_self


def cut(run: Run, k: int, policy: Policy) -> dict[str, dict[str, float]]:
    """The first k documents of every query, best first, after the policy has had its say; the given run stays as it is.

    Example:
        >>> run = {"a": {"a": 3.0, "b": 2.0, "c": 1.0}}
        >>> cut(run, 1, Policy(exclude_self=True)), cut(run, 1, Policy())
        ({'a': {'b': 2.0}}, {'a': {'a': 3.0}})
    """
    kept = {}
    for query, scores in run.items():
        order = [document for document in ranked(scores) if not (policy.exclude_self and document == query)]
        kept[query] = {document: scores[document] for document in order[:k]}
    return kept
