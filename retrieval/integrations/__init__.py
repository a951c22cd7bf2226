"""Other people's stores and frameworks: an index written into Qdrant or LanceDB, and asked through LangChain or LlamaIndex.

Their libraries are imported by the modules named after them, which nothing imports before they are asked for.
"""

from quiver.retrieval.integrations.frameworks import langchain_retriever, llama_index_retriever
from quiver.retrieval.integrations.targets import Stored, export_to

__all__ = ["Stored", "export_to", "langchain_retriever", "llama_index_retriever"]
