"""The README.md of an exported model: code for each library that opens it, settings, training and scores.

Facts that the run or the results do not record are omitted, never guessed. The code snippets give the same vectors as Quiver.

Source: huggingface_hub's ``ModelCardData``; the cards of sentence-transformers 6.2 and PyLate 1.6 (library names, tags); ISO 639-1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from quiver.encoder import InputError, Tokenizer
from quiver.encoder.environment import installed_version
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.onnx import COLBERT_USAGE, DENSE_USAGE
from quiver.retrieval.models.export.sentence_transformers import ignores_outer_space, reads_as_token, with_prefixes
from quiver.retrieval.models.options import ModelFolder

LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")  # form of a language code of the Hub: one of ISO 639, or one of two words


def check_languages(codes: Iterable[str]) -> None:
    """Check the form of language codes; the Hub refuses a card with others.

    Example:
        >>> check_languages(["en", "yue", "code"])
    """
    for code in codes:
        if not LANGUAGE.fullmatch(code):
            raise InputError(f"unknown language {code!r}; use an ISO 639 code, such as en, ko or yue, or one of code, multilingual")


QUERIES = '["which animal has wings"]'
DOCUMENTS = '["A bird has wings, feathers and a beak."]'


def _encode_snippet(library: str, model: str, version: str = "") -> str:
    """Code for the libraries whose models have the names of sentence-transformers."""
    return f"""\
from {library} import {model}{version and f"  # {version}"}

model = {model}({{name}})
queries = model.encode_query({{queries}})
documents = model.encode_document({{documents}})
print(model.similarity(queries, documents))
"""


SENTENCE_TRANSFORMER = _encode_snippet("sentence_transformers", "SentenceTransformer", "{versions}")
MULTI_VECTOR = _encode_snippet("sentence_transformers", "MultiVectorEncoder", "6")
QUIVER = _encode_snippet("quiver.retrieval", "{kind}")

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

POOLING = {
    "mean": "(hidden * mask).sum(1) / mask.sum(1)",
    "max": 'hidden.masked_fill(mask == 0, float("-inf")).amax(1)',
    "cls": "hidden[:, 0]",
    "lasttoken": "hidden[torch.arange(len(hidden)), mask.sum((1, 2)) - 1]",
}
"""Code of `quiver.retrieval.models.batches.POOLINGS` over padded hidden states."""

SNIPPETS = {
    ("sentence-transformers", "dense"): (SENTENCE_TRANSFORMER,),
    ("sentence-transformers", "colbert"): (MULTI_VECTOR,),
    ("pylate", "colbert"): (PYLATE, MULTI_VECTOR),
    ("stanford", "colbert"): (STANFORD, PYLATE, MULTI_VECTOR),
    ("hf", "dense"): (TRANSFORMERS,),
    ("hf", "colbert"): (TRANSFORMERS,),
    ("onnx", "dense"): (DENSE_USAGE,),
    ("onnx", "colbert"): (COLBERT_USAGE,),
}
"""Layout and kind of model -> code templates, the preferred library first."""


def usage(model: BiEncoder | ColBERT, layout: str, name: str, *, written: Tokenizer) -> str:
    """Render a block of code for each library that opens the layout, in Markdown; ``written`` is the tokenizer as exported."""
    settings, tokenizer, prefixes = model.settings, written, ("", "")
    if layout == "stanford":  # sentence-transformers 6 makes the markers tokens when it loads the folder, and puts a space after them
        prefixes = (settings.colbert.query_prefix, settings.colbert.document_prefix)
        tokenizer = with_prefixes(written, prefixes)
    # sentence-transformers 6 strips no white space itself.
    in_6 = ignores_outer_space(tokenizer) and all(reads_as_token(tokenizer, f"{prefix} ", prefix) for prefix in prefixes if prefix)
    missing = left_out(settings) if layout == "hf" else []
    pooled = POOLING.get(settings.pooling, "hidden")
    steps = (
        "return hidden, mask"
        if missing
        else f"return torch.nn.functional.normalize({pooled}, dim=-1)"
        if settings.normalize
        else f"return {pooled}"
    )
    values = {
        "versions": "5 or 6" if in_6 else "5",
        "name": json.dumps(name, ensure_ascii=False),
        "queries": QUERIES,
        "documents": DOCUMENTS,
        "kind": type(model).__name__,
        "max_length": model.card.document_length,
        "steps": steps,
        "query_prompt": json.dumps(settings.query_prompt, ensure_ascii=False),
        "document_prompt": json.dumps(settings.document_prompt, ensure_ascii=False),
    }
    templates = SNIPPETS[layout, settings.kind]
    if not in_6:
        templates = tuple(template for template in templates if template != MULTI_VECTOR)
    if missing:
        templates = (TRANSFORMERS.partition("\n\nqueries =")[0],)
    if layout not in ("hf", "onnx"):  # hf has neither pooling nor prompts, onnx no weights that Quiver reads
        templates = (*templates, QUIVER)
    blocks = [f"```python\n{template.format(**values).rstrip()}\n```\n" for template in templates]
    if missing:
        blocks.insert(0, f"This folder holds only the encoder. The model's vectors also need: {', '.join(missing)}.\n")
    return "\n".join(blocks)


def left_out(settings: ModelFolder) -> list[str]:
    """List what a bare encoder, with pooling and prompts applied by hand, lacks for the model's vectors."""
    if settings.kind == "colbert":
        return ["the projection", "the prefixes", "query expansion", "the skiplist"]
    prompted = settings.query_prompt or settings.document_prompt
    without_prompt = ["pooling without the prompt"] if prompted and not settings.include_prompt else []
    lower_case = ["lower-casing of texts"] if settings.lower_case else []
    return ["the Dense modules"] * bool(settings.projections) + without_prompt + lower_case


PIPELINES = {"dense": "sentence-similarity", "colbert": "feature-extraction"}  # kind of model -> ``pipeline_tag`` of the Hub

LIBRARIES = {"sentence-transformers": "sentence-transformers", "pylate": "PyLate", "hf": "transformers", "onnx": "onnx"}
"""Layout -> ``library_name`` of the Hub; there is none for Stanford's ColBERT."""

HUB_DATA = re.compile(r"hub://([\w-][\w.-]*/[\w-][\w.-]*)")


@dataclass(frozen=True)
class CardMetadata:
    """Facts that the folder of a model does not hold: name, content of ``run.json``, entries of the Hub's ``model-index``, languages."""

    name: str
    run: Mapping[str, Any] | None = None
    scores: Sequence[Mapping[str, Any]] = ()
    languages: Sequence[str] = ()


def render_card(model: BiEncoder | ColBERT, layout: str, *, metadata: CardMetadata, written: Tokenizer) -> str:
    """Render the text of README.md; ``written`` is the tokenizer as exported."""
    header = yaml.safe_dump(_hub_metadata(model, layout, metadata), sort_keys=False, allow_unicode=True)
    code = usage(model, layout, metadata.name, written=written)
    card, version = model.card, installed_version("quiver-retrieval") or "(not installed)"
    what = f"A bi-encoder: one vector of width {card.dim} per text, compared by {card.similarity}."
    if card.kind == "colbert":
        what = f"A ColBERT model: one vector of width {card.dim} per token, compared by MaxSim."
    title = f"---\n{header}---\n\n# {metadata.name}\n"
    parts = [title, f"{what} Written by Quiver {version}.\n", "## Use\n", code, _settings_table(model)]
    if metadata.run is not None:
        parts.append(_training_table(metadata.run))
    if metadata.scores:
        parts.append(_scores_table(metadata.scores))
    return "\n".join(parts)


def _hub_metadata(model: BiEncoder | ColBERT, layout: str, metadata: CardMetadata) -> dict[str, Any]:
    kind = model.settings.kind
    tags = ["dense"] if kind == "dense" else ["ColBERT", "multi-vector", "late-interaction"]
    found: dict[str, Any] = {
        "language": list(metadata.languages),
        "library_name": LIBRARIES.get(layout),
        "pipeline_tag": PIPELINES[kind],
        "tags": [*dict.fromkeys([LIBRARIES.get(layout, "ColBERT"), PIPELINES[kind], "retrieval", *tags, "quiver"])],
    }
    recipe = (metadata.run or {}).get("recipe") or {}
    found["base_model"] = ((metadata.run or {}).get("model") or {}).get("base_model")
    data = recipe.get("data", {})
    sources = [*data.get("train", ()), data.get("queries"), data.get("documents")]
    found["datasets"] = [*dict.fromkeys(match[1] for source in sources if source and (match := HUB_DATA.match(source)))]
    if metadata.scores:
        found["model-index"] = [{"name": metadata.name, "results": [dict(entry) for entry in metadata.scores]}]
    return {key: value for key, value in found.items() if value}


def _settings_table(model: BiEncoder | ColBERT) -> str:
    card, settings = model.card, model.settings
    rows = [
        ("Encoder", f"{model.encoder.config.family}, {model.encoder.num_parameters:,} parameters"),
        ("Vector width", f"{card.dim}"),
        ("Similarity", card.similarity),
        ("Query length", f"{card.query_length} tokens"),
        ("Document length", f"{card.document_length} tokens"),
    ]
    if card.kind == "dense":
        rows.append(("Pooling", settings.pooling))
    else:
        colbert = settings.colbert
        attended = ", attended to" if colbert.attend_to_expansion else ", not attended to"
        length = f"{colbert.expanded_length or colbert.query_length} tokens"
        rows.append(("Query expansion", f"[MASK] up to {length}{attended}" if colbert.query_expansion else "none"))
        rows.append(("Skiplist", " ".join(colbert.skiplist) or "none"))
    noun = "prompt" if card.kind == "dense" else "prefix"
    rows += [(f"{role} {noun}", text) for role, text in (("Query", card.query_prompt), ("Document", card.document_prompt)) if text]
    rows.append(("Fingerprint", card.fingerprint))
    return f"## Settings\n\n{_render_table(('Setting', 'Value'), [(name, _inline_code(value)) for name, value in rows])}"


def _training_table(run: Mapping[str, Any]) -> str:
    recipe, data, batch, result = (run.get(name) or {} for name in ("recipe", "data", "batch", "result"))
    scores = result.get("development") or [{}]
    versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items() if version)
    rows = [  # beside those of the recipe, which follows
        ("Rows", data.get("rows")),
        ("sha256 of the rows", data.get("sha256")),
        ("Rows per update", batch.get("effective")),
        ("Negatives per query", batch.get("negatives_per_query")),
        ("Updates", result.get("steps")),
        ("Truncated texts", result.get("texts_truncated")),
        ("Final development nDCG@10", scores[-1].get("ndcg@10")),
        ("Date", run.get("date")),
        ("Command", run.get("command")),
        ("Versions", versions),
    ]
    table = _render_table(("Setting", "Value"), [(name, _inline_code(str(value))) for name, value in rows if value not in (None, "")])
    text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
    fence = _delimiter(text, at_least=3)
    head = f"{recipe['description']}\n\n" if recipe.get("description") else ""
    return f"## Training\n\n{head}{table}\n<details><summary>Full recipe</summary>\n\n{fence}yaml\n{text}{fence}\n\n</details>\n"


def _scores_table(scores: Sequence[Mapping[str, Any]]) -> str:
    measures = [*dict.fromkeys(metric["name"] for entry in scores for metric in entry["metrics"])]
    rows = []
    for entry in scores:
        found = {metric["name"]: f"{metric['value']:.4f}" for metric in entry["metrics"]}
        data = entry["dataset"]
        rows.append((data["name"], data.get("split", ""), *(found.get(measure, "") for measure in measures)))
    return f"## Scores\n\n{_render_table(('Collection', 'Split', *measures), rows)}"


def _render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _inline_code(text: str) -> str:
    """Text as inline code, so that Markdown and HTML in it are not interpreted."""
    ticks = _delimiter(text)
    inner = f" {text} " if text.startswith("`") or text.endswith("`") else text
    return f"{ticks}{' '.join(inner.splitlines())}{ticks}"


def _delimiter(text: str, *, at_least: int = 1) -> str:
    """A run of backticks longer than any in the text, to delimit it."""
    return "`" * max(at_least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
