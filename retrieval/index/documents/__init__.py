"""What an index knows of its documents beside their vectors: ids, texts, metadata, and filters over them."""
