"""Indexes: documents that are searched by vectors, in memory or in a folder whose changes are atomic."""

from quiver.retrieval.index.build import add_documents, build_index, calibrate_index, compact_index, delete_documents
from quiver.retrieval.index.calibration import calibrate
from quiver.retrieval.index.documents.metadata import Condition, Filter
from quiver.retrieval.index.engine_table import EngineSpec, check_engine, parse_engine
from quiver.retrieval.index.errors import DamagedIndexError
from quiver.retrieval.index.index import Index, open_index
from quiver.retrieval.index.memory import index_vectors
from quiver.retrieval.index.pieces import BuildOptions
from quiver.retrieval.index.recall_table import Calibration
from quiver.retrieval.index.repair import repair_index
from quiver.retrieval.index.store.checking import check_index
from quiver.retrieval.index.store.manifest import Manifest

__all__ = [
    "BuildOptions",
    "Calibration",
    "Condition",
    "DamagedIndexError",
    "EngineSpec",
    "Filter",
    "Index",
    "Manifest",
    "add_documents",
    "build_index",
    "calibrate",
    "calibrate_index",
    "check_engine",
    "check_index",
    "compact_index",
    "delete_documents",
    "index_vectors",
    "open_index",
    "parse_engine",
    "repair_index",
]
