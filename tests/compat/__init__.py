"""Our schema beside Cuebot's: `python -m tests.compat DIRECTORY` (see `make compat`)."""
