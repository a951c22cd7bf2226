"""The folder of an index: files that are written once, one manifest a generation, commits that are whole or not there.

The store knows nothing of vectors, documents or models: a segment and a codec are folders with files and their checksums.
"""
