"""Values and rules of a render farm, with no input or output.

Everything here is frozen, fully typed and testable without a service. Units are in the names:
``*_centicores`` (PostgreSQL), ``*_cores`` (whole cores, Redis and placement), ``*_kb`` (kibibytes,
as OpenCue stores memory) and ``*_seconds``.
"""
