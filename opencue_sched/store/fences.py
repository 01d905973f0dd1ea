"""The record of leaders and their ticks in PostgreSQL, where a Redis that was emptied or failed over cannot forget it.

Table ``opencue_sched_fence`` maps a name to a number. For the role ``<name>`` (see LeaderKeys.name) there are:

    <name>          the highest fence given out: that of the present leader
    <name>/<task>   the last tick fired of a task
    <name>|store    which Redis the leader uses, and <name>|seen when it last said so, in microseconds since the epoch
    <name>|other    the second in which a beat of another Redis last stood by

A leader may only lead once ``claim`` has recorded its fence, and may only send the message of a tick once
``claim_tick`` has recorded the tick; each gives a number out once. The receiver of a message compares with the same
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Engine, text

_CLAIM = text(
    """
    INSERT INTO opencue_sched_fence AS highest (name, fence) VALUES (:name, :fence)
    ON CONFLICT (name) DO UPDATE SET fence = excluded.fence WHERE highest.fence < excluded.fence
    RETURNING highest.fence
    """
)
_RENEW = text(
    """
    WITH leader AS (SELECT fence FROM opencue_sched_fence WHERE name = :name),
    noted AS (
        INSERT INTO opencue_sched_fence (name, fence)
        SELECT :name || noted.what, noted.number
          FROM leader,
               (VALUES ('|seen', CAST(1000000 * extract(epoch FROM clock_timestamp()) AS bigint)),
                       ('|store', CAST(:store AS bigint))) AS noted (what, number)
         WHERE leader.fence = :fence
        ON CONFLICT (name) DO UPDATE SET fence = excluded.fence
    )
    SELECT fence FROM leader
    """
)
_CLAIM_TICK = text(
    """
    WITH leader AS (SELECT fence FROM opencue_sched_fence WHERE name = :name),
    claimed AS (
        INSERT INTO opencue_sched_fence AS last (name, fence)
        SELECT :task, CAST(:tick AS bigint) FROM leader WHERE leader.fence = :fence
        ON CONFLICT (name) DO UPDATE SET fence = excluded.fence WHERE last.fence < excluded.fence
        RETURNING last.fence
    )
    SELECT (SELECT fence FROM leader) AS highest, EXISTS (SELECT FROM claimed) AS claimed
    """
)
_LEADER = text(
    """
    SELECT leader.fence, store.fence AS store, seen.fence AS seen,
           extract(epoch FROM clock_timestamp()) - seen.fence / 1000000.0 AS age
      FROM opencue_sched_fence AS leader
      LEFT JOIN opencue_sched_fence AS store ON store.name = :name || '|store'
      LEFT JOIN opencue_sched_fence AS seen ON seen.name = :name || '|seen'
     WHERE leader.name = :name
    """
)
_LATEST = text(
    """
    SELECT max(fence) FILTER (WHERE name = :name) AS highest, max(fence) FILTER (WHERE name = :task) AS tick
      FROM opencue_sched_fence WHERE name IN (:name, :task)
    """
)
_LAST_TICKS = text("SELECT name, fence FROM opencue_sched_fence WHERE starts_with(name, :prefix)")
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
"""Longer than a beat that stands by waits between two looks."""


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """The leader elected last. ``fence`` is 0 when none was; ``store`` numbers its Redis, None when it is not known.

    ``seen`` changes each time the leader renews its lease; ``age_seconds`` is the time since then.
    """

    fence: int = 0
    store: int | None = None
    seen: int = 0
    age_seconds: float = 0.0


class PersistentFences:
    """Each statement is a transaction that the server ends: a leader that is frozen before it could end one itself
    would keep its row locked, and all others from leading, for as long as it is frozen. All raise SQLAlchemyError.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")

    def leader(self, name: str) -> LeaderRecord:
        """The leader elected last."""
        with self._engine.connect() as connection:
            row = connection.execute(_LEADER, {"name": name}).one_or_none()
        if row is None or row.store is None or row.seen is None:
            return LeaderRecord(0 if row is None else row.fence)
        return LeaderRecord(row.fence, row.store, row.seen, float(row.age))

    def claim(self, name: str, fence: int) -> bool:
        """Record ``fence``. False if it, or a higher one, was given out before."""
        with self._engine.connect() as connection:
            return connection.execute(_CLAIM, {"name": name, "fence": fence}).scalar() is not None

    def renew(self, name: str, fence: int, *, store: int) -> int:
        """The highest fence given out. While that is ``fence``, record that its leader leads by Redis ``store``."""
        with self._engine.connect() as connection:
            return int(connection.execute(_RENEW, {"name": name, "fence": fence, "store": store}).scalar() or 0)

    def claim_tick(self, name: str, fence: int, task: str, tick: int) -> tuple[bool, int]:
        """Record that the leader of ``fence`` fires this tick; whether it may, and the highest fence given out.

        It may not if it was succeeded, or if this tick or a later one of the task was recorded before.
        """
        row = {"name": name, "fence": fence, "task": f"{name}/{task}", "tick": tick}
        with self._engine.connect() as connection:
            highest, claimed = connection.execute(_CLAIM_TICK, row).one()
        return bool(claimed), int(highest or 0)

    def latest(self, name: str, task: str) -> tuple[int, int | None]:
        """The highest fence given out, and the last tick fired of a task; None when none was."""
        with self._engine.connect() as connection:
            highest, tick = connection.execute(_LATEST, {"name": name, "task": f"{name}/{task}"}).one()
        return int(highest or 0), tick

    def last_ticks(self, name: str) -> dict[str, int]:
        """The last tick fired of every task."""
        prefix = f"{name}/"
        with self._engine.connect() as connection:
            rows = connection.execute(_LAST_TICKS, {"prefix": prefix}).all()
        return {str(row.name).removeprefix(prefix): int(row.fence) for row in rows}

    def note_other_redis(self, name: str) -> None:
        """Record that a beat stands by, because one of another Redis leads at the same time."""
        with self._engine.connect() as connection:
            connection.execute(_NOTE_OTHER, {"name": name})

    def two_redis(self, name: str) -> bool:
        """Whether beats of two Redis wanted to lead in the last half minute."""
        with self._engine.connect() as connection:
            age = connection.execute(_OTHER_AGE, {"name": name}).scalar()
        return age is not None and -1 <= float(age) < _LATELY_SECONDS

    def ping(self) -> None:
        """Return when PostgreSQL has answered."""
        with self._engine.connect() as connection:
            connection.execute(text("SELECT 1"))
