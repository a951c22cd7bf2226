"""BM25: the words of texts beside their vectors, for baselines, for hard negatives and for hybrid search."""

from quiver.retrieval.search.bm25.of_index import WordIndex, WordScore
from quiver.retrieval.search.bm25.scoring import NAME, PARAMETERS
from quiver.retrieval.search.bm25.streamed import rank_streamed

__all__ = ["NAME", "PARAMETERS", "WordIndex", "WordScore", "rank_streamed"]
