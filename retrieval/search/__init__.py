"""Search by text: dense and token indexes, BM25, hybrid fusion, re-ranking and explanations."""
