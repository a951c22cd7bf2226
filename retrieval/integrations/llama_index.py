"""LlamaIndex retriever; made by ``llama_index_retriever``."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from quiver.retrieval.integrations.retrievers import TextSearcher, metadata_of


class LlamaIndexRetriever(BaseRetriever):  # type: ignore[misc]  # typed where LlamaIndex is installed
    """Returns nodes with scores and the metadata of `metadata_of`; the id of a node is that of the document.

    Args:
        searcher: The index and how it is searched.
    """

    def __init__(self, searcher: TextSearcher) -> None:
        self.searcher = searcher
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[Any]:
        found = []
        for document, score in self.searcher.ask(query_bundle.query_str):
            text, metadata = self.searcher.text_of(document), metadata_of(document)
            # Only the text is embedded and shown to a language model, not the fields.
            keys = list(metadata)
            node = TextNode(
                id_=document.id, text=text, metadata=metadata, excluded_embed_metadata_keys=keys, excluded_llm_metadata_keys=keys
            )
            found.append(NodeWithScore(node=node, score=score))
        return found

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[Any]:
        return await asyncio.to_thread(self._retrieve, query_bundle)
