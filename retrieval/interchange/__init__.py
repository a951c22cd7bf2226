"""Model folders as other libraries write and read them: sentence-transformers 5 and 6, PyLate, Stanford ColBERT, transformers.

One module a layout, its reading beside its writing. ``retrieval.model_folder`` reads whichever it is; `retrieval.interchange.export`
writes the one that is asked for.
"""

from retrieval.interchange.dense import write_dense
from retrieval.interchange.pylate import write_colbert

__all__ = ["write_colbert", "write_dense"]
