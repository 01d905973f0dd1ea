"""Simulated and real RQDs."""
