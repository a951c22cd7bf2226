"""LlamaIndex retriever; made by ``llama_index_retriever``."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode


class LlamaIndexRetriever(BaseRetriever):  # type: ignore[misc]  # typed where LlamaIndex is installed
    """Returns nodes with scores and the fields of the documents as metadata; the id of a node is that of the document."""

    def __init__(self, ask: Any) -> None:  # `quiver.retrieval.integrations.retrievers.Ask`
        self._ask = ask
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[Any]:
        nodes = []
        for hit in self._ask(query_bundle.query_str, None, None):
            # Only the text is embedded and shown to a language model, not the fields.
            hidden = list(hit.fields)
            node = TextNode(
                id_=hit.id,
                text=hit.text or "",
                metadata=dict(hit.fields),
                excluded_embed_metadata_keys=hidden,
                excluded_llm_metadata_keys=hidden,
            )
            nodes.append(NodeWithScore(node=node, score=hit.score))
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[Any]:
        return await asyncio.to_thread(self._retrieve, query_bundle)
