"""Fine-tuning an encoder with a head on labelled examples, whatever the head: one loop, runs that are resumed, early stopping."""
