"""Repeatable measurements on the production path: ``python -m benchmarks --help``."""
