"""Integrations: export to Qdrant and LanceDB, retrievers for LangChain and LlamaIndex. Their libraries are imported on first use."""

from quiver.retrieval.integrations.retrievers import langchain_retriever, llama_index_retriever
from quiver.retrieval.integrations.stores import ExportedStore, export_to

__all__ = ["ExportedStore", "export_to", "langchain_retriever", "llama_index_retriever"]
