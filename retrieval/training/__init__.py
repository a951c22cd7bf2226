"""Training retrievers: recipes, the data they name, and the trainers that follow them."""
