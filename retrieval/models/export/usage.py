"""How a library opens an exported model, as code for its card; what each snippet gives are the vectors Quiver gives."""

from __future__ import annotations

import json

from quiver.encoder import Tokenizer
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export import onnx_usage
from quiver.retrieval.models.export.prefixes import reads_as_token, with_prefixes
from quiver.retrieval.models.export.white_space import ignores_outer_space
from quiver.retrieval.models.model_settings import ModelFolder

QUERIES = '["which animal has wings"]'
DOCUMENTS = '["A bird has wings, feathers and a beak."]'

SENTENCE_TRANSFORMER = """\
from sentence_transformers import SentenceTransformer  # {versions}

model = SentenceTransformer({name})
queries = model.encode_query({queries})
documents = model.encode_document({documents})
print(model.similarity(queries, documents))
"""

MULTI_VECTOR = """\
from sentence_transformers import MultiVectorEncoder  # 6

model = MultiVectorEncoder({name})
queries = model.encode_query({queries})
documents = model.encode_document({documents})
print(model.similarity(queries, documents))
"""

PYLATE = """\
from pylate import models, scores

model = models.ColBERT({name})
queries = model.encode({queries}, is_query=True)
documents = model.encode({documents}, is_query=False)
print(scores.colbert_scores(queries, documents))
"""

STANFORD = """\
from colbert.infra import ColBERTConfig
from colbert.modeling.checkpoint import Checkpoint

model = Checkpoint({name}, colbert_config=ColBERTConfig.load_from_checkpoint({name}))
queries = model.queryFromText({queries})
documents = model.docFromText({documents})
"""

TRANSFORMERS = """\
import torch
from transformers import AutoModel, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained({name}), AutoModel.from_pretrained({name})


def encode(texts, prompt=""):
    texts = [(prompt + text).strip() for text in texts]
    batch = tokenizer(texts, padding=True, truncation=True, max_length={max_length}, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    {steps}


queries = encode({queries}, {query_prompt})
documents = encode({documents}, {document_prompt})
print(queries @ documents.T)
"""

QUIVER = """\
from quiver.retrieval import {kind}

model = {kind}.from_pretrained({name})
queries = model.encode_queries({queries})
documents = model.encode_documents({documents})
"""

POOLING = {
    "mean": "(hidden * mask).sum(1) / mask.sum(1)",
    "max": 'hidden.masked_fill(mask == 0, float("-inf")).amax(1)',
    "cls": "hidden[:, 0]",
    "lasttoken": "hidden[torch.arange(len(hidden)), mask.sum((1, 2)) - 1]",
}
"""`quiver.retrieval.models.pooling.POOLINGS` over padded hidden states."""

SNIPPETS = {
    ("sentence-transformers", "dense"): (SENTENCE_TRANSFORMER,),
    ("sentence-transformers", "colbert"): (MULTI_VECTOR,),
    ("pylate", "colbert"): (PYLATE, MULTI_VECTOR),
    ("stanford", "colbert"): (STANFORD, PYLATE, MULTI_VECTOR),
    ("hf", "dense"): (TRANSFORMERS,),
    ("hf", "colbert"): (TRANSFORMERS,),
    ("onnx", "dense"): (onnx_usage.DENSE,),
    ("onnx", "colbert"): (onnx_usage.COLBERT,),
}
"""Layout and kind -> what opens it, the first first."""


def usage(model: BiEncoder | ColBERT, layout: str, name: str, *, written: Tokenizer) -> str:
    """Markdown with a block of code for each library that opens the layout.

    Args:
        model: What is exported.
        layout: A key of `quiver.retrieval.models.export.export.LAYOUTS`.
        name: Of the model, as a hub id or a folder.
        written: The tokenizer as the folder has it.
    """
    settings = model.settings
    in_6 = _same_in_6(settings, layout, written)
    missing = left_out(settings) if layout == "hf" else []
    values = {
        "versions": "5 or 6" if in_6 else "5",
        "name": json.dumps(name, ensure_ascii=False),
        "queries": QUERIES,
        "documents": DOCUMENTS,
        "kind": type(model).__name__,
        "max_length": model.card.document_length,
        "steps": "return hidden, mask" if missing else _steps(settings),
        "query_prompt": json.dumps(settings.query_prompt, ensure_ascii=False),
        "document_prompt": json.dumps(settings.document_prompt, ensure_ascii=False),
    }
    templates = SNIPPETS[layout, settings.kind]
    if not in_6:
        templates = tuple(template for template in templates if template != MULTI_VECTOR)
    if missing:
        templates = (TRANSFORMERS.partition("\n\nqueries =")[0],)
    if layout not in ("hf", "onnx"):  # the one keeps neither pooling nor prompts, the other no weights that Quiver reads
        templates = (*templates, QUIVER)
    blocks = [f"```python\n{template.format(**values).rstrip()}\n```\n" for template in templates]
    if missing:
        blocks.insert(0, f"This folder holds the encoder alone. Not in it, and needed for the model's vectors: {', '.join(missing)}.\n")
    return "\n".join(blocks)


def left_out(settings: ModelFolder) -> list[str]:
    """What the encoder alone, with pooling and prompts by hand, lacks for the model's vectors."""
    if settings.kind == "colbert":
        return ["the projection", "the prefixes", "query expansion", "the skiplist"]
    prompted = settings.query_prompt or settings.document_prompt
    without_prompt = ["that prompts are not pooled"] if prompted and not settings.include_prompt else []
    lower_case = ["that texts are lower-cased"] if settings.lower_case else []
    return ["the Dense modules"] * bool(settings.projections) + without_prompt + lower_case


def _same_in_6(settings: ModelFolder, layout: str, written: Tokenizer) -> bool:
    """Whether sentence-transformers 6, which does not strip white space around texts, gives the vectors too.

    It puts a space behind a marker of Stanford's layout.
    """
    if layout != "stanford":
        return ignores_outer_space(written)
    prefixes = (settings.colbert.query_prefix, settings.colbert.document_prefix)
    tokenizer = with_prefixes(written, prefixes)  # it does the same when it loads the folder
    return ignores_outer_space(tokenizer) and all(reads_as_token(tokenizer, f"{prefix} ", prefix) for prefix in prefixes)


def _steps(settings: ModelFolder) -> str:
    vectors = POOLING.get(settings.pooling, "hidden")
    return f"return torch.nn.functional.normalize({vectors}, dim=-1)" if settings.normalize else f"return {vectors}"
