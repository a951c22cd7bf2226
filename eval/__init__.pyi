from .evaluation import evaluate as evaluate
