"""Dense and ColBERT recipes as tasks of the trainer: batches, optimizers, sharding, checkpoints."""
