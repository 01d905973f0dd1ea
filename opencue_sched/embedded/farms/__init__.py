"""Synthetic farms, written straight into PostgreSQL."""
