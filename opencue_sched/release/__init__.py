"""The way back: completion, host reports, dependencies, reaper, report service."""
