"""LangChain retriever; made by ``langchain_retriever``."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict

from quiver.retrieval.index.filters import FilterLike

SCORE = "quiver_score"  # name of a document's score in the metadata


class LangChainRetriever(BaseRetriever):  # type: ignore[misc]  # typed where LangChain is installed
    """Returns documents with their fields and titles as metadata, and their scores in ``metadata["quiver_score"]``.

    ``invoke(text, k=..., filter=...)`` overrides the defaults.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    ask: Any  # `quiver.retrieval.integrations.retrievers.Ask`

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any, k: int | None = None, filter: FilterLike = None, **unknown: object
    ) -> list[Any]:
        del run_manager
        if unknown:
            raise TypeError(f"unknown argument {next(iter(unknown))!r}; pass k=, the number of documents, and filter=")
        return [
            Document(page_content=hit.text or "", metadata={SCORE: hit.score, **hit.fields}, id=hit.id)
            for hit in self.ask(query, k, filter)
        ]

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any, **options: Any) -> list[Any]:
        # A search would block the event loop.
        return await asyncio.to_thread(self._get_relevant_documents, query, run_manager=run_manager, **options)
