"""Integrations: retrievers for LangChain and LlamaIndex. Their libraries are imported on first use."""

from quiver.retrieval.integrations.retrievers import langchain_retriever, llama_index_retriever

__all__ = ["langchain_retriever", "llama_index_retriever"]
