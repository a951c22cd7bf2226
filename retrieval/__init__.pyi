from .index import build_index as build_index
from .index import open_index as open_index
from .models.biencoder import BiEncoder as BiEncoder
from .models.colbert import ColBERT as ColBERT
from .models.loading import load_model as load_model
