"""Corpora, queries and judgements, runs in TREC format, and the embedding store."""
