"""How a program runs the graph of an exported model, as code for its card: onnxruntime, tokenizers and NumPy, and nothing of ours."""

from __future__ import annotations

_OPEN = """\
import json
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

folder = Path({name})
settings = json.loads((folder / "onnx_config.json").read_text(encoding="utf-8"))
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
session = onnxruntime.InferenceSession(str(folder / "model.onnx"))


def clean(texts, role):
    texts = [(settings[role]["prompt"] + text).strip() for text in texts]
    return [text.lower() for text in texts] if settings["lower_case"] else texts

"""

DENSE = (
    _OPEN
    + """
def encode(texts, role):
    tokenizer.enable_truncation(settings[role]["max_length"], direction=settings["truncation_side"])
    tokenizer.enable_padding(pad_id=settings["pad_token_id"])
    batch = tokenizer.encode_batch(clean(texts, role))
    ids, mask = np.array([text.ids for text in batch]), np.array([text.attention_mask for text in batch])
    given = {{"input_ids": ids, "attention_mask": mask}}
    if "pooling_mask" in settings["inputs"]:
        given["pooling_mask"] = mask * (np.arange(ids.shape[1]) >= settings[role]["prompt_tokens"])
    return session.run(None, given)[0]


queries = encode({queries}, "query")
documents = encode({documents}, "document")
print(queries @ documents.T)
"""
)
"""One vector a text."""

COLBERT = (
    _OPEN
    + """
def encode(texts, role):
    chosen = settings[role]
    prefix = [] if chosen["prefix_id"] is None else [chosen["prefix_id"]]
    tokenizer.enable_truncation(chosen["max_length"] - len(prefix), direction=settings["truncation_side"])
    rows = [text.ids[:1] + prefix + text.ids[1:] for text in tokenizer.encode_batch(clean(texts, role))]
    filled = chosen.get("expanded_length")  # of queries: up to it there are [MASK] tokens, whose vectors count
    width = filled or max(map(len, rows))
    filler = chosen["expansion_id"] if filled else settings["pad_token_id"]
    ids = np.array([row + [filler] * (width - len(row)) for row in rows])
    real = np.arange(width) < np.array([[len(row)] for row in rows])
    attended = np.ones_like(real) if filled and chosen["attend_to_expansion"] else real
    (vectors,) = session.run(None, {{"input_ids": ids, "attention_mask": attended.astype(np.int64)}})
    counts = np.ones_like(real) if filled else real & ~np.isin(ids, chosen.get("skipped_ids", []))
    return [row[keep] for row, keep in zip(vectors, counts)]


queries = encode({queries}, "query")
documents = encode({documents}, "document")
print([[float((query @ document.T).max(1).sum()) for document in documents] for query in queries])
"""
)
"""One vector a token."""
