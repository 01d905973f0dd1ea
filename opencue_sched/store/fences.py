"""The record of leaders and their ticks in PostgreSQL, where a Redis that was emptied or failed over cannot forget it.

Table ``opencue_sched_fence`` maps a name to a number. For the role ``<name>`` (see LeaderKeys.name) there are:

    <name>          the highest fence given out: that of the present leader
    <name>/<task>   the last tick fired of a task (coordination/leader.py says what a tick is)
    <name>|store    the number of the Redis that the leader uses (LeaderGate)

and, in microseconds since the epoch by the clock of PostgreSQL:

    <name>|seen     when the leader last renewed its lease
    <name>|fired    when a tick was fired last

A leader may only lead once ``claim`` has recorded its fence, and may only send the message of a tick once
``claim_tick`` has recorded the tick; each gives a number out once. The receiver of a message compares with the same
rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Engine, TextClause, text

# Raise the fence of a name; no row when it is as high already.
_CLAIM = text(
    """
    INSERT INTO opencue_sched_fence AS highest (name, fence) VALUES (:name, :fence)
    ON CONFLICT (name) DO UPDATE SET fence = excluded.fence WHERE highest.fence < excluded.fence
    RETURNING highest.fence
    """
)
# The fence of a role. For the leader that has this fence, also write when it renewed its lease, and which Redis has it.
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
# Claim a tick of a task for the leader that has this fence: no tick is claimed twice, nor after a later one.
_CLAIM_TICK = text(
    """
    WITH leader AS (SELECT fence FROM opencue_sched_fence WHERE name = :name),
    claimed AS (
        INSERT INTO opencue_sched_fence AS last (name, fence)
        SELECT :task, CAST(:tick AS bigint) FROM leader WHERE leader.fence = :fence
        ON CONFLICT (name) DO UPDATE SET fence = excluded.fence WHERE last.fence < excluded.fence
        RETURNING last.fence
    ),
    noted AS (
        INSERT INTO opencue_sched_fence (name, fence)
        SELECT :name || '|fired', CAST(1000000 * extract(epoch FROM clock_timestamp()) AS bigint) FROM claimed
        ON CONFLICT (name) DO UPDATE SET fence = excluded.fence
    )
    SELECT (SELECT fence FROM leader) AS highest, EXISTS (SELECT FROM claimed) AS claimed
    """
)
# Every number of the rows whose names begin with this one, and its age in seconds, which says something of times alone.
_READ = text(
    """
    SELECT name, fence AS number, extract(epoch FROM clock_timestamp()) - fence / 1000000.0 AS age
      FROM opencue_sched_fence WHERE starts_with(name, :name)
    """
)


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """What the record says about the leader elected last."""

    fence: int = 0
    """The leader's fence; 0 when no leader was ever elected."""
    store: int | None = None
    """The number of the leader's Redis (LeaderGate); None when that is not known."""
    age_seconds: float = math.inf
    """The time since the leader renewed its lease."""
    fired: int | None = None
    """The moment at which any leader last fired a tick, in microseconds since the epoch; None when none did."""
    fired_age_seconds: float = math.inf
    """The time since that moment."""
    ticks: Mapping[str, int] = field(default_factory=dict)
    """The last tick fired of every task, by task, as `claim_tick` was given it."""

    def why_stale(self, fence: int, task: str, tick: int) -> str:
        """Why a message that the leader of ``fence`` sent for this tick is not valid any more: ``former_leader``, or
        ``overtaken`` by a later tick of the task. Empty while it is valid.

        The age of the message decides nothing: the sender's clock and the receiver's may differ by more than the time
        between two ticks.
        """
        if self.fence > fence:
            return "former_leader"
        return "overtaken" if self.ticks.get(task, tick) > tick else ""


class PersistentFences:
    """Reads and writes the record. Every call raises SQLAlchemyError where PostgreSQL fails.

    Each statement is a transaction that the server ends. A leader that is frozen before it could end a transaction
    itself would keep its row locked, and others from leading, for as long as it is frozen.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")

    def leader(self, name: str) -> LeaderRecord:
        """The leader elected last."""
        # The names of some roles begin with another's: those of a facility's beats begin with that of the beats without
        # a facility. Rows of such roles are read as well, and match nothing below.
        rows = {row.name.removeprefix(name): row for row in self._rows(_READ, name=name)}
        number = {what: int(row.number) for what, row in rows.items()}
        age = {what: float(row.age) for what, row in rows.items()}
        return LeaderRecord(
            number.get("", 0),
            number.get("|store"),
            age.get("|seen", math.inf),
            number.get("|fired"),
            age.get("|fired", math.inf),
            {what[1:]: tick for what, tick in number.items() if what.startswith("/")},
        )

    def claim(self, name: str, fence: int) -> bool:
        """Record ``fence``. Returns False if this fence, or a higher one, was given out before."""
        return bool(self._rows(_CLAIM, name=name, fence=fence))

    def renew(self, name: str, fence: int, *, store: int) -> int:
        """Return the highest fence given out, 0 for none. While that is ``fence``, record that its leader renewed its
        lease now, and ``store``, the number of the Redis that has the lease."""
        return max((row.fence for row in self._rows(_RENEW, name=name, fence=fence, store=store)), default=0)

    def claim_tick(self, name: str, fence: int, task: str, tick: int) -> tuple[bool, int]:
        """Record that the leader of ``fence`` fires this tick. Returns whether it may, and the highest fence given out.

        It may not if another leader was elected since, or if this tick or a later one of the task was recorded before.
        """
        (row,) = self._rows(_CLAIM_TICK, name=name, fence=fence, task=f"{name}/{task}", tick=tick)
        return bool(row.claimed), int(row.highest or 0)

    def _rows(self, statement: TextClause, **values: object) -> list[Any]:
        """The rows of one statement, which is a transaction by itself."""
        with self._engine.connect() as connection:
            return list(connection.execute(statement, values))
