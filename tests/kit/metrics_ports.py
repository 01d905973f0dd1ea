"""Where processes serve their metrics."""

from __future__ import annotations

from opencue_sched.settings import Settings

METRICS_PORT = "OPENCUE_SCHED_QUEUE__METRICS_PORT"


def metrics_port(command: list[str], environment: dict[str, str]) -> int:
    """Where a process started with ``command`` serves /metrics: as the environment says, or by default."""
    first = int(environment.get(METRICS_PORT, Settings().queue.metrics_port))
    return first + 100 if "beat" in command else first
