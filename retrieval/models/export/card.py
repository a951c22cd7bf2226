"""The README.md of an exported model: what it is, how each library opens it, how it was trained, what it scored.

The metadata at its top are those the Hugging Face Hub reads. Nothing is guessed: what a run or a result does not say is left out.

Source: huggingface_hub's ``ModelCardData``; the cards of sentence-transformers 6.2 and PyLate 1.6 (library names, tags).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from quiver.encoder import Tokenizer
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.usage import usage
from quiver.retrieval.versions import installed_version

PIPELINES = {"dense": "sentence-similarity", "colbert": "feature-extraction"}
"""The Hub's name of what a model does."""

LIBRARIES = {"sentence-transformers": "sentence-transformers", "pylate": "PyLate", "hf": "transformers", "onnx": "onnx"}
"""The Hub's name of the library that opens a layout; it has none for Stanford's ColBERT."""

HUB_DATA = re.compile(r"hub://([\w-][\w.-]*/[\w-][\w.-]*)")


@dataclass(frozen=True)
class Origin:
    """What is known of a model beyond its folder.

    Attributes:
        name: What it is called.
        run: The ``run.json`` of its training.
        scores: Entries of the Hub's ``model-index``: ``task``, ``dataset`` and ``metrics`` each.
        languages: Codes such as ``en`` or ``ko``.
    """

    name: str
    run: Mapping[str, Any] | None = None
    scores: Sequence[Mapping[str, Any]] = ()
    languages: Sequence[str] = field(default=())


def render_card(model: BiEncoder | ColBERT, layout: str, *, origin: Origin, written: Tokenizer) -> str:
    """The text of README.md.

    Args:
        model: What is exported.
        layout: A key of `quiver.retrieval.models.export.export.LAYOUTS`.
        origin: What is known beyond it.
        written: The tokenizer as the folder has it.
    """
    metadata = yaml.safe_dump(_metadata(model, layout, origin), sort_keys=False, allow_unicode=True)
    code = usage(model, layout, origin.name, written=written)
    parts = [f"---\n{metadata}---\n\n# {origin.name}\n", _summary(model), "## Use\n", code, _settings(model)]
    if origin.run is not None:
        parts.append(_training(origin.run))
    if origin.scores:
        parts.append(_scores(origin.scores))
    return "\n".join(parts)


def _metadata(model: BiEncoder | ColBERT, layout: str, origin: Origin) -> dict[str, Any]:
    kind = model.settings.kind
    tags = ["dense"] if kind == "dense" else ["ColBERT", "multi-vector", "late-interaction"]
    found: dict[str, Any] = {
        "language": list(origin.languages),
        "library_name": LIBRARIES.get(layout),
        "pipeline_tag": PIPELINES[kind],
        "tags": [*dict.fromkeys([LIBRARIES.get(layout, "ColBERT"), PIPELINES[kind], "retrieval", *tags, "quiver"])],
    }
    recipe = (origin.run or {}).get("recipe") or {}
    found["base_model"] = ((origin.run or {}).get("model") or {}).get("base_model")
    data = recipe.get("data", {})
    sources = [*data.get("train", ()), data.get("queries"), data.get("documents")]
    found["datasets"] = [*dict.fromkeys(match[1] for source in sources if source and (match := HUB_DATA.match(source)))]
    if origin.scores:
        found["model-index"] = [{"name": origin.name, "results": [dict(entry) for entry in origin.scores]}]
    return {key: value for key, value in found.items() if value}


def _summary(model: BiEncoder | ColBERT) -> str:
    card = model.card
    if card.kind == "dense":
        what = f"A bi-encoder: one vector of {card.dim} numbers a text, compared by {card.similarity}."
    else:
        what = f"A ColBERT model: one vector of {card.dim} numbers a token, compared by MaxSim."
    return f"{what} Written by Quiver {installed_version('quiver-retrieval') or '(not installed)'}.\n"


def _settings(model: BiEncoder | ColBERT) -> str:
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
    return f"## Settings\n\n{_table(('Setting', 'Value'), [(name, _code(value)) for name, value in rows])}"


def _training(run: Mapping[str, Any]) -> str:
    recipe, data, batch, result = (run.get(name) or {} for name in ("recipe", "data", "batch", "result"))
    scores = result.get("development") or [{}]
    versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items() if version)
    rows = [
        ("Recipe", recipe.get("name")),
        ("Source", recipe.get("source")),
        ("Started from", recipe.get("model", {}).get("init")),
        ("Loss", recipe.get("loss", {}).get("name")),
        ("Data", ", ".join(recipe.get("data", {}).get("train", ()))),
        ("Rows", data.get("rows")),
        ("sha256 of the rows", data.get("sha256")),
        ("Rows of an update", batch.get("effective")),
        ("Negatives of a query", batch.get("negatives_per_query")),
        ("Updates", result.get("steps")),
        ("Texts cut", result.get("texts_truncated")),
        ("Development nDCG@10 at the end", scores[-1].get("ndcg@10")),
        ("Seed", recipe.get("training", {}).get("seed")),
        ("Date", run.get("date")),
        ("Command", run.get("command")),
        ("Versions", versions),
    ]
    table = _table(("What", "Which"), [(name, _code(str(value))) for name, value in rows if value not in (None, "")])
    text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
    fence = _ticks(text, at_least=3)
    head = f"{recipe['description']}\n\n" if recipe.get("description") else ""
    return f"## Training\n\n{head}{table}\n<details><summary>The whole recipe</summary>\n\n{fence}yaml\n{text}{fence}\n\n</details>\n"


def _scores(scores: Sequence[Mapping[str, Any]]) -> str:
    measures = [*dict.fromkeys(metric["name"] for entry in scores for metric in entry["metrics"])]
    rows = []
    for entry in scores:
        found = {metric["name"]: f"{metric['value']:.4f}" for metric in entry["metrics"]}
        data = entry["dataset"]
        rows.append((data["name"], data.get("split", ""), *(found.get(measure, "") for measure in measures)))
    return f"## Scores\n\n{_table(('Collection', 'Split', *measures), rows)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _code(text: str) -> str:
    """Text as it stands: neither Markdown nor HTML, spaces kept."""
    ticks = _ticks(text)
    inner = f" {text} " if text.startswith("`") or text.endswith("`") else text
    return f"{ticks}{' '.join(inner.splitlines())}{ticks}"


def _ticks(text: str, *, at_least: int = 1) -> str:
    """More backticks than stand together in a text: what it can be set between."""
    return "`" * max(at_least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
