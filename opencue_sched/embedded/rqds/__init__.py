"""Simulated RQDs, thousands in one process, and real ones from the package opencue-rqd, on this machine."""
