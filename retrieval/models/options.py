"""Settings of a model: those of its folder, and those that the caller chooses instead."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_utf8, expand_home, read_json

if TYPE_CHECKING:
    from quiver.retrieval.models.batches import Projection

Kind = Literal["dense", "colbert"]

ONNX_SETTINGS = "onnx_config.json"  # settings of a folder that ``quiver export --layout onnx`` wrote
STANFORD_ARCHITECTURE = "HF_ColBERT"  # ``architectures`` of a config.json that Stanford's ColBERT has written


def is_onnx_export(source: str | Path) -> bool:
    """Test whether a folder is an ONNX export of Quiver."""
    return (expand_home(source) / ONNX_SETTINGS).is_file()


def is_stanford(folder: Path) -> bool:
    """Test whether config.json names the class of Stanford's ColBERT."""
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("architectures") == [STANFORD_ARCHITECTURE]


@dataclass(frozen=True)
class ColBERTSettings:
    """How a ColBERT model tokenizes queries and documents. The defaults are PyLate's."""

    query_prefix: str = "[Q] "  # token inserted after [CLS] of a query; empty for none
    document_prefix: str = "[D] "  # the same for documents
    query_length: int = 32  # maximum tokens, prefix and special tokens included; with expansion, the length of every query
    document_length: int = 180  # maximum tokens, prefix and special tokens included
    query_expansion: bool = True  # pad queries with [MASK] tokens that have vectors and are scored
    attend_to_expansion: bool = False  # let the other tokens attend to the expansion tokens
    expanded_length: int | None = None  # length to which queries are expanded if it is less than ``query_length``
    skiplist: tuple[str, ...] = tuple(string.punctuation)  # tokens whose document vectors are dropped

    def check_lengths(self, path: Path) -> None:
        """Check that both lengths of the settings file ``path`` leave room for [CLS], a prefix, a token and [SEP]."""
        if min(self.query_length, self.document_length) < 4:
            raise InputError(f"{path}: query_length and document_length must be >= 4, got {self.query_length} and {self.document_length}")


@dataclass(frozen=True)
class ModelFolder:
    """Settings of a model folder: everything but the weights and the tokenizer."""

    kind: Kind
    encoder_folder: Path  # folder of config.json, the encoder's weights and the tokenizer
    max_length: int | None = None  # maximum tokens of a text; None if the folder sets no limit
    lower_case: bool = False  # lower-case texts before tokenizing
    pooling: str = "mean"  # a key of `quiver.retrieval.models.batches.POOLINGS`
    include_prompt: bool = True  # pool the prompt's tokens too
    projections: tuple[Projection, ...] = ()  # Dense modules in order
    normalize: bool = False  # scale vectors to length 1 at the end
    query_prompt: str = ""  # text put before every query; for ColBERT after the prefix token
    document_prompt: str = ""  # the same for documents
    similarity: Literal["cosine", "dot", "maxsim"] = "cosine"
    colbert: ColBERTSettings = field(default_factory=ColBERTSettings)  # ignored for dense models
    prompts: Mapping[str, str] = field(default_factory=dict)  # prompts with other names than ``query`` and ``document`` (dense)
    default_prompt_name: str | None = None  # name of the prompt of texts that are neither queries nor documents (dense)


@dataclass(frozen=True)
class ModelOptions:
    """Settings that replace those of a model folder; None keeps the folder's. The card and the fingerprint of the model have them.

    Attributes:
        query_length: Maximum tokens of a query, special tokens included (ColBERT).
        document_length: Maximum tokens of a document, special tokens included; for a bi-encoder of every text.
        query_prompt: Text put before every query; for ColBERT after the prefix token.
        document_prompt: Text put before every document.
        truncate_dim: Width to which the vectors of a bi-encoder are cut (Matryoshka).

    Raises:
        InputError: A prompt contains half of a surrogate pair.

    Example:
        >>> from quiver.retrieval import load_model
        >>> from quiver.retrieval.models.options import ModelOptions
        >>> options = ModelOptions(document_length=128, query_prompt="query: ", truncate_dim=64)
        >>> load_model("sentence-transformers/all-MiniLM-L6-v2", options=options).card.dim
        64
    """

    query_length: int | None = None
    document_length: int | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    truncate_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("query_prompt", "document_prompt"):
            check_utf8(getattr(self, name) or "", f"{name} (--{name.replace('_', '-')})")

    def applied(self, settings: ModelFolder) -> ModelFolder:
        """Return the settings of a folder with these in their place; an InputError if its kind of model has no such setting."""
        prompts = {name: text for name in ("query_prompt", "document_prompt") if (text := getattr(self, name)) is not None}
        if settings.kind == "dense":
            if self.query_length is not None:
                raise InputError("a bi-encoder has one maximum length for queries and documents; pass document_length (--document-length)")
            if self.document_length is not None and self.document_length < 3:
                raise InputError(f"document_length (--document-length) must be >= 3, [CLS], a token and [SEP], got {self.document_length}")
            return replace(settings, max_length=self.document_length or settings.max_length, **prompts)
        if self.truncate_dim is not None:
            raise InputError("truncate_dim (--truncate-dim) applies to bi-encoders; this is a ColBERT model")
        lengths = {name: length for name in ("query_length", "document_length") if (length := getattr(self, name)) is not None}
        changed = replace(settings.colbert, **lengths)
        changed.check_lengths(settings.encoder_folder)
        return replace(settings, colbert=changed, **prompts)


FOLDERS_SETTINGS = ModelOptions()  # keeps all settings of a folder
