"""Per-document data of an index: ids, texts, metadata fields, and filters on them."""
