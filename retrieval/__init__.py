"""Hidden states to vectors, to an index, to a ranking: models, corpora, indexes, search and training."""

from retrieval.biencoder import BiEncoder
from retrieval.colbert import ColBERT
from retrieval.indexes import build_index, open_index
from retrieval.models import load_model

__all__ = ["BiEncoder", "ColBERT", "build_index", "load_model", "open_index"]
