"""Exact search: every document is compared with every query, and the ranking is that of exact scores to the last rank."""
