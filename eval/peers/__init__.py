"""Other tools: their models scored by our harness, and our models scored by theirs.

``load_peer`` opens a model of sentence-transformers or PyLate as one that `eval.evaluate` takes. ``eval.peers.mteb`` and
``eval.peers.beir`` hand a model to those harnesses. Nothing here imports a library before it is asked for.
"""

from eval.peers.loading import load_peer

__all__ = ["load_peer"]
