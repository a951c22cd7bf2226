"""LangChain retriever; made by ``langchain_retriever``."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict

from quiver.retrieval.index.filters import FilterLike

SCORE = "quiver_score"
"""Name of a document's score in the metadata."""


class LangChainRetriever(BaseRetriever):  # type: ignore[misc]  # typed where LangChain is installed
    """Returns documents with their fields and titles as metadata, and their scores in ``metadata["quiver_score"]``.

    ``invoke(text, k=..., filter=...)`` overrides the defaults.

    Attributes:
        searcher: The index and how it is searched.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    searcher: Any  # `quiver.retrieval.integrations.retrievers.TextSearcher`

    def _get_relevant_documents(self, query: str, *, run_manager: Any, k: int | None = None, filter: FilterLike = None) -> list[Any]:
        del run_manager
        return [
            Document(page_content=found.text, metadata={SCORE: found.score, **found.metadata}, id=found.id)
            for found in self.searcher.ask(query, k=k, filter=filter)
        ]

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any, k: int | None = None, filter: FilterLike = None) -> list[Any]:
        # A search would block the event loop.
        return await asyncio.to_thread(self._get_relevant_documents, query, run_manager=run_manager, k=k, filter=filter)
