"""Model folders as other libraries write and read them: sentence-transformers 5 and 6, PyLate, Stanford ColBERT, transformers.

One module a layout, its reading beside its writing. ``retrieval.models.loading`` reads whichever it is;
`retrieval.models.export.export`
writes the one that is asked for.
"""

from quiver.retrieval.models.export.pylate import write_colbert
from quiver.retrieval.models.export.sentence_transformers import write_dense

__all__ = ["write_colbert", "write_dense"]
