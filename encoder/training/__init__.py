"""The training runtime: trainer, checkpoints, log, processes, signals, recipe files. Tasks bring their model, batches and loss."""
