"""Language understanding: answers to questions as spans of a text, trained and scored as the official scripts score them."""
