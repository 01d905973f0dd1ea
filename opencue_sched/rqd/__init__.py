"""What RQD is asked, and what its answers are worth. No store: what follows from an answer is decided elsewhere."""
