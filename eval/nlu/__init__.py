"""Language understanding: GLUE and answers as spans of a text, fine-tuned by recipe and scored as their official scripts score them."""
