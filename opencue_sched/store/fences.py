"""The highest fence of every elected role and the last tick of its tasks, where Redis cannot forget them.

Both are rows of ``opencue_sched_fence``: a number under a name that only grows. A task's is ``<name>/<task>``.
"""

from __future__ import annotations

from sqlalchemy import Engine, text

_HIGHEST = text("SELECT fence FROM opencue_sched_fence WHERE name = :name")
_CLAIM = text(
    "INSERT INTO opencue_sched_fence (name, fence) VALUES (:name, :fence) "
    "ON CONFLICT (name) DO UPDATE SET fence = excluded.fence WHERE opencue_sched_fence.fence < excluded.fence "
    "RETURNING fence"
)
_CLAIM_TICK = text(
    """
    WITH leads AS (SELECT fence FROM opencue_sched_fence WHERE name = :name),
    claimed AS (
        INSERT INTO opencue_sched_fence AS last (name, fence)
        SELECT :task, CAST(:tick AS bigint) FROM leads WHERE leads.fence = :fence
        ON CONFLICT (name) DO UPDATE SET fence = excluded.fence WHERE last.fence < excluded.fence
        RETURNING last.fence
    )
    SELECT (SELECT fence FROM leads) AS highest, EXISTS (SELECT FROM claimed) AS claimed
    """
)
_TIME = text("SELECT extract(epoch FROM clock_timestamp())")
_LAST_TICKS = text("SELECT name, fence FROM opencue_sched_fence WHERE starts_with(name, :prefix)")


class PersistentFences:
    """coordination.leader.FenceStore on PostgreSQL.

    Each statement is a transaction of its own, ended by the server: a leader that is frozen before it could end one
    itself would keep its row locked, and all others from leading, for as long as it is frozen.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")

    def highest(self, name: str) -> int:
        """The highest fence ever given out for ``name``; 0 when none was."""
        with self._engine.connect() as connection:
            return int(connection.execute(_HIGHEST, {"name": name}).scalar() or 0)

    def claim(self, name: str, fence: int) -> bool:
        """Record ``fence``. False if it, or a higher one, is somebody's already."""
        with self._engine.connect() as connection:
            return connection.execute(_CLAIM, {"name": name, "fence": fence}).scalar() is not None

    def claim_tick(self, name: str, fence: int, task: str, tick: int) -> tuple[bool, int]:
        """Record that the leader of ``fence`` fires this tick, and the highest fence given out.

        False if the leader was succeeded, or if this tick, or a later one of the task, was recorded before.
        """
        row = {"name": name, "fence": fence, "task": f"{name}/{task}", "tick": tick}
        with self._engine.connect() as connection:
            highest, claimed = connection.execute(_CLAIM_TICK, row).one()
        return bool(claimed), int(highest or 0)

    def time(self) -> float:
        """Seconds since the epoch by the clock of this server."""
        with self._engine.connect() as connection:
            return float(connection.execute(_TIME).scalar_one())

    def last_ticks(self, name: str) -> dict[str, int]:
        """The last tick recorded of every task."""
        prefix = f"{name}/"
        with self._engine.connect() as connection:
            rows = connection.execute(_LAST_TICKS, {"prefix": prefix}).all()
        return {str(row.name).removeprefix(prefix): int(row.fence) for row in rows}
