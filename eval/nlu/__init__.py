"""Language understanding: fine-tuning on GLUE and on span question answering, scored as the official scripts do."""
