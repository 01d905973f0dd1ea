"""The highest fence of every elected role, kept where an emptied Redis cannot forget it."""

from __future__ import annotations

from sqlalchemy import Engine, text

_HIGHEST = text("SELECT fence FROM opencue_sched_fence WHERE name = :name")
_CLAIM = text(
    "INSERT INTO opencue_sched_fence (name, fence) VALUES (:name, :fence) "
    "ON CONFLICT (name) DO UPDATE SET fence = excluded.fence WHERE opencue_sched_fence.fence < excluded.fence "
    "RETURNING fence"
)


class PersistentFences:
    """coordination.leader.FenceStore on PostgreSQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def highest(self, name: str) -> int:
        """The highest fence ever given out for ``name``; 0 when none was."""
        with self._engine.connect() as connection:
            return int(connection.execute(_HIGHEST, {"name": name}).scalar() or 0)

    def claim(self, name: str, fence: int) -> bool:
        """Record ``fence``. False if it, or a higher one, is somebody's already."""
        with self._engine.begin() as connection:
            return connection.execute(_CLAIM, {"name": name, "fence": fence}).scalar() is not None
