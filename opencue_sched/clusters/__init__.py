"""Which clusters exist, and which have work."""
