"""The model being trained as sentence-transformers and PyLate see it: modules, losses, batches."""
