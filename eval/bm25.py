"""The BM25 baseline: the floor under every table.

One rule for all collections, so that the floors can be compared (`retrieval.search.bm25.PARAMETERS`); title and text are scored as one
field.
"""

from __future__ import annotations

from quiver.eval.benchmark import Policy, cut, depth
from quiver.retrieval.data.corpus import Collection
from quiver.retrieval.index.ranking import check_k
from quiver.retrieval.search.bm25 import BlockLimits, rank_streamed


def bm25_run(
    collection: Collection, *, k: int = 1000, use_title: bool = True, exclude_self: bool = False, limits: BlockLimits | None = None
) -> dict[str, dict[str, float]]:
    """Rank the collection's documents for its queries; of a large collection a block is in memory, and k documents a query.

    Args:
        collection: Documents and queries.
        k: Documents a query, at most; a k beyond the collection is no error.
        use_title: Titles are part of the text.
        exclude_self: A document with the query's own id is dropped before the cut.
        limits: Size of the blocks that the corpus is read in.

    Returns:
        A run with every query in it; only documents that share a word with the query are found.

    Raises:
        InputError: bm25s is not installed.
        ValueError: k < 1.
    """
    k = check_k(k)
    policy = Policy(exclude_self=exclude_self, use_title=use_title)
    hits = rank_streamed(
        lambda: ((document.id, document.content(use_title=use_title)) for document in collection.documents),
        [query.text for query in collection.queries],
        depth(k, policy),
        limits=limits,
    )
    return cut(hits.to_run([query.id for query in collection.queries]), k, policy)
