"""Better training rows from rows that are there: hard negatives, and a teacher's scores."""
