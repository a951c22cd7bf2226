"""Model folders of other libraries, one module per layout: sentence-transformers 5 and 6, PyLate, Stanford ColBERT and ONNX."""
