"""Model folders as other libraries write and read them: sentence-transformers 5 and 6, PyLate, Stanford ColBERT, transformers.

One module a layout, its reading beside its writing. ``retrieval.models.model_folder`` reads whichever it is;
`retrieval.models.export.export`
writes the one that is asked for.
"""

from quiver.retrieval.models.export.dense import write_dense
from quiver.retrieval.models.export.pylate import write_colbert

__all__ = ["write_colbert", "write_dense"]
