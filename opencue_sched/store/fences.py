"""The highest fence of every elected role, kept where an emptied Redis cannot forget it."""

from __future__ import annotations

from sqlalchemy import Engine, text

_HIGHEST = text("SELECT fence FROM opencue_sched_fence WHERE name = :role")
_RAISE = text(
    "INSERT INTO opencue_sched_fence (name, fence) VALUES (:role, :fence) "
    "ON CONFLICT (name) DO UPDATE SET fence = greatest(opencue_sched_fence.fence, excluded.fence)"
)


class PersistentFences:
    """coordination.leader.FenceStore on PostgreSQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def highest(self, role: str) -> int:
        """The highest fence ever given out for ``role``; 0 when none was."""
        with self._engine.connect() as connection:
            return int(connection.execute(_HIGHEST, {"role": role}).scalar() or 0)

    def raise_to(self, role: str, fence: int) -> None:
        """Remember ``fence`` unless a higher one is known."""
        with self._engine.begin() as connection:
            connection.execute(_RAISE, {"role": role, "fence": fence})
