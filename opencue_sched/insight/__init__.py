"""Answers: why a frame waits, what a farm lacks, whether the books are right, what the fleet does."""
