"""The highest fence of every elected role and the last tick of its tasks, where Redis cannot forget them.

Both are rows of ``opencue_sched_fence``: a number under a name that only grows. A task's is ``<name>/<task>``. There,
too, is what a leader notes of itself (``<name>|store``, ``<name>|process``, ``<name>|seen`` in microseconds), and the
second in which a beat of another Redis was last turned away (``<name>|other``).
"""

from __future__ import annotations

from sqlalchemy import Engine, text

from opencue_sched.domain.cluster import LeaderNote

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
_NOTE_LEADER = text(
    """
    INSERT INTO opencue_sched_fence (name, fence)
    SELECT leads.name || noted.what, noted.number
      FROM opencue_sched_fence AS leads,
           (VALUES ('|process', CAST(:process AS bigint)),
                   ('|seen', CAST(1000000 * extract(epoch FROM clock_timestamp()) AS bigint)),
                   ('|store', :store)) AS noted (what, number)
     WHERE leads.name = :name AND leads.fence = :fence
    ON CONFLICT (name) DO UPDATE SET fence = excluded.fence
    """
)
_LEADER = text(
    """
    SELECT store.fence AS store, process.fence AS process, seen.fence AS seen,
           extract(epoch FROM clock_timestamp()) - seen.fence / 1000000.0 AS age
      FROM opencue_sched_fence AS store, opencue_sched_fence AS process, opencue_sched_fence AS seen
     WHERE store.name = :name || '|store' AND process.name = :name || '|process' AND seen.name = :name || '|seen'
    """
)
_NOTE_OTHER = text(
    """
    INSERT INTO opencue_sched_fence (name, fence)
    VALUES (:name || '|other', CAST(extract(epoch FROM clock_timestamp()) AS bigint))
    ON CONFLICT (name) DO UPDATE SET fence = excluded.fence
    """
)
_OTHER_AGE = text(
    "SELECT extract(epoch FROM clock_timestamp()) - fence FROM opencue_sched_fence WHERE name = :name || '|other'"
)
_LATELY_SECONDS = 30.0
"""Longer than a beat that is turned away waits between two looks."""
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

    def note_leader(self, name: str, fence: int, *, store: int, process: int) -> None:
        """Note that the leader of ``fence``, of this Redis and process, leads now; nothing once it was succeeded."""
        with self._engine.connect() as connection:
            row = {"name": name, "fence": fence, "store": store, "process": process}
            connection.execute(_NOTE_LEADER, row)

    def leader(self, name: str) -> LeaderNote | None:
        """What the last leader noted of itself."""
        with self._engine.connect() as connection:
            row = connection.execute(_LEADER, {"name": name}).one_or_none()
        return None if row is None else LeaderNote(row.store, row.process, row.seen, float(row.age))

    def note_other_redis(self, name: str) -> None:
        """Note that a beat was turned away, because one of another Redis leads at the same time."""
        with self._engine.connect() as connection:
            connection.execute(_NOTE_OTHER, {"name": name})

    def two_redis(self, name: str) -> bool:
        """Whether beats of two Redis wanted to lead lately."""
        with self._engine.connect() as connection:
            age = connection.execute(_OTHER_AGE, {"name": name}).scalar()
        return age is not None and -1 <= float(age) < _LATELY_SECONDS
