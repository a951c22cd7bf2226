from .fast_blocks import hidden_dtype as hidden_dtype
from .fast_blocks import run_blocks as run_blocks
