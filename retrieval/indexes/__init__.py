"""Indexes: documents that can be searched by vectors, in memory or as a folder whose every change is whole or not there."""

from retrieval.indexes.build import add_documents, build_index
from retrieval.indexes.calibration import calibrate
from retrieval.indexes.changes import calibrate_index, compact_index, delete_documents
from retrieval.indexes.documents.filters import Condition, Filter
from retrieval.indexes.errors import DamagedIndexError
from retrieval.indexes.exact.colbert import ExactColBERTIndex
from retrieval.indexes.exact.dense import ExactDenseIndex
from retrieval.indexes.faiss_dense import FaissDenseIndex
from retrieval.indexes.in_memory import BuiltIndex, build_in_memory, check_kind, index_vectors
from retrieval.indexes.index import Index, open_index
from retrieval.indexes.options import BuildOptions
from retrieval.indexes.recall_table import Calibration
from retrieval.indexes.repair import repair_index
from retrieval.indexes.store.checking import check_index
from retrieval.indexes.store.manifest import Manifest

__all__ = [
    "BuildOptions",
    "BuiltIndex",
    "Calibration",
    "Condition",
    "DamagedIndexError",
    "ExactColBERTIndex",
    "ExactDenseIndex",
    "FaissDenseIndex",
    "Filter",
    "Index",
    "Manifest",
    "add_documents",
    "build_in_memory",
    "build_index",
    "calibrate",
    "calibrate_index",
    "check_index",
    "check_kind",
    "compact_index",
    "delete_documents",
    "index_vectors",
    "open_index",
    "repair_index",
]
