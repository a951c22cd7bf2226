"""What any run needs that takes long: recipes read strictly, state kept, checkpoints sealed, signals heard; it knows no model."""
