"""ColBERT models of PyLate behind our protocol: PyLate encodes, our harness indexes, searches and scores.

Prefixes, lengths, expansion, skiplist and the order of batches are PyLate's own.

Shapes: B texts, n_i token vectors of text i, d vector width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from quiver.encoder.files import expand_home
from quiver.eval.baselines.checkpoint import LOAD_ERRORS, cannot_load, check_projected
from quiver.eval.baselines.fingerprint import peer_fingerprint
from quiver.eval.baselines.token_counts import count_tokens
from quiver.retrieval.records import ModelCard, Role, TokenEncoding

LIBRARY: Final = "pylate"


class PyLateModel:
    """A `quiver.retrieval.protocols.TokenModel` that PyLate runs.

    Args:
        source: Folder or hub id, of a model saved by PyLate or by Stanford's ColBERT.
        device: Where it runs; by default where the library puts it.

    Raises:
        InputError: PyLate cannot load it, or would draw a projection at random.
    """

    def __init__(self, source: str | Path, *, device: str | None = None) -> None:
        from pylate import models

        name = str(expand_home(source))
        check_projected(name)
        try:
            self._model = models.ColBERT(name, device=device)
        except LOAD_ERRORS as error:
            raise cannot_load(name, LIBRARY, error) from error
        model = self._model
        # PyLate puts this prompt before queries and documents alike, unless a call names another.
        self._prompt: str = model.prompts.get(model.default_prompt_name) or ""
        self._lengths: dict[Role, int] = {"query": model.query_length, "document": model.document_length}
        self._prefixes: dict[Role, str] = {"query": model.query_prefix, "document": model.document_prefix}
        expansion = [model.do_query_expansion, model.attend_to_expansion_tokens]
        settings = [self._prompt, self._lengths, self._prefixes, expansion, model.skiplist_words]
        # The fingerprint first: PyLate writes the length of the last batch into the settings of its first module.
        fingerprint = peer_fingerprint(model, LIBRARY, settings)
        self._card = ModelCard(
            source=str(source),
            kind="colbert",
            fingerprint=fingerprint,
            dim=model.encode(["width"], is_query=True, show_progress_bar=False)[0].shape[1],
            similarity="maxsim",
            query_length=self._lengths["query"],
            document_length=self._lengths["document"],
            query_prompt=self._prefixes["query"] + self._prompt,
            document_prompt=self._prefixes["document"] + self._prompt,
            library=LIBRARY,
        )

    @property
    def card(self) -> ModelCard:
        """What an index or a report has to know of this model."""
        return self._card

    def encode(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        """Texts to B arrays of (n_i, d) float32 in input order, as PyLate's ``encode`` gives them.

        Args:
            texts: B texts.
            role: Which prefix, length, expansion and skiplist apply.
            progress: Show the library's bar.
        """
        lower_case = bool(getattr(self._model[0], "do_lower_case", False))
        tokens = count_tokens(
            self._model.tokenizer,
            texts,
            self._lengths[role],
            prompt=self._prompt,
            lower_case=lower_case,
            inserted=bool(self._prefixes[role]),
        )
        # PyLate fails on an empty list.
        vectors = self._model.encode(list(texts), is_query=role == "query", show_progress_bar=progress) if texts else []
        return TokenEncoding([np.asarray(matrix, np.float32) for matrix in vectors], tokens)
