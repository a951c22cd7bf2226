from .encoder.errors import InputError as InputError
from .eval.evaluation import evaluate as evaluate
from .eval.training import train as train
from .retrieval.data.source import open_corpus as open_corpus
from .retrieval.models.biencoder import BiEncoder as BiEncoder
from .retrieval.models.colbert import ColBERT as ColBERT
from .retrieval.records import Document as Document
from .retrieval.records import SourceOptions as SourceOptions
from .retrieval.search.index import build_index as build_index
from .retrieval.search.index import open_index as open_index

__version__: str
