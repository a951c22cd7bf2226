"""Retrieval models: BiEncoder and ColBERT, their pooling and scoring, and the folders that they are read from and exported to."""
