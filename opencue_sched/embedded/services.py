"""PostgreSQL and Redis for a machine that has neither: from wheels, private, on free ports, gone afterwards."""

from __future__ import annotations

from opencue_sched.embedded.postgres import EmbeddedPostgres
from opencue_sched.embedded.processes import GuardedProcess, ServiceFailed, free_port, private_directory
from opencue_sched.embedded.redis_server import EmbeddedRedis

__all__ = ["EmbeddedPostgres", "EmbeddedRedis", "GuardedProcess", "ServiceFailed", "free_port", "private_directory"]
