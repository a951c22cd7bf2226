from .blocks import hidden_dtype as hidden_dtype
from .blocks import run_blocks as run_blocks
