"""Fine-tuning an encoder with a head on labelled examples: a task of the trainer, run folders, early stopping."""
