"""The training loop: batches in order, updates, checkpoints, the log, signals, several processes."""
