"""Which clusters exist, which have work, which rest."""
