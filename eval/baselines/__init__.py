"""Other tools: their models scored by our harness, and our models scored by theirs.

``load_peer`` opens a model of sentence-transformers or PyLate as one that `eval.evaluation` takes. ``quiver.eval.baselines.mteb`` and
``quiver.eval.baselines.beir`` hand a model to those harnesses. Nothing here imports a library before it is asked for.
"""

from quiver.eval.baselines.loading import load_peer

__all__ = ["load_peer"]
