"""Run by an interpreter that has sentence-transformers 6: opens model folders, writes them again, encodes texts.

Its one argument is a JSON file: ``queries``, ``documents`` and ``models``, each with ``kind``, ``folder``, ``vectors`` (the .npz to
write) and perhaps ``save`` (where the model is saved again and opened from) and ``first``, ``skiplist``, ``prompts``: what of the first
module, the mask and the model is set before that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(job: Path) -> None:
    asked = json.loads(job.read_text(encoding="utf-8"))
    for one in asked["models"]:
        run(one, asked["queries"], asked["documents"])


def run(one: dict[str, Any], queries: list[str], documents: list[str]) -> None:
    import numpy as np

    model = opened(one)
    if "save" in one:
        model.save_pretrained(one["save"])
        model = type(model)(one["save"], device="cpu")
    encoded = {"query": model.encode_query(queries), "document": model.encode_document(documents)}
    arrays = {f"{role} {place}": np.asarray(vectors) for role, texts in encoded.items() for place, vectors in enumerate(texts)}
    np.savez(one["vectors"], **arrays)


def opened(one: dict[str, Any]) -> Any:
    import torch
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer

    torch.manual_seed(3)  # a model without a projection gets a random one
    model = (SentenceTransformer if one["kind"] == "dense" else MultiVectorEncoder)(one["folder"], device="cpu")
    for name, value in one.get("first", {}).items():
        setattr(model[0], name, value)
    if "skiplist" in one:
        model[-2].skiplist_words = one["skiplist"]
    model.prompts |= one.get("prompts", {})
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]))
