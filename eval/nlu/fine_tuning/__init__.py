"""Fine-tuning of an encoder with a head on labelled examples: tasks for the trainer, run folders, early stopping."""
