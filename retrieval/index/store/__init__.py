"""The folder of an index: write-once files, one manifest per generation, atomic commits.

The store has no access to vectors, documents or models: it handles segments and codecs as folders of files with checksums.
"""
