"""Indexes: documents that can be searched by vectors, in memory or as a folder that is whole or not there."""

from retrieval.indexes.build import BuiltIndex, build_in_memory, build_index, check_kind, index_vectors
from retrieval.indexes.exact_colbert import ExactColBERTIndex
from retrieval.indexes.exact_dense import ExactDenseIndex
from retrieval.indexes.faiss_dense import FaissDenseIndex
from retrieval.indexes.folder import IndexFolder, open_index
from retrieval.indexes.store import Manifest

__all__ = [
    "BuiltIndex",
    "ExactColBERTIndex",
    "ExactDenseIndex",
    "FaissDenseIndex",
    "IndexFolder",
    "Manifest",
    "build_in_memory",
    "build_index",
    "check_kind",
    "index_vectors",
    "open_index",
]
