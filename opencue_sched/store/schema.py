"""Finds out which program made a database and what the schema has, and migrates what this scheduler needs.

A database made by Cuebot is recognised by its columns, never by version numbers (they collide between OpenCue's
branches), and gets objects of our own only. An empty database gets a Cuebot-compatible schema.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import psycopg2
from psycopg2 import errorcodes
from sqlalchemy import Connection, Row, TextClause, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from opencue_sched.clients.postgres import engine_at
from opencue_sched.errors import SchedulerError, StoreUnusable, TakesNoWrites, WrongSchema
from opencue_sched.store.lookups import prepared
from opencue_sched.store.set_based_frames import read_frames_way, switch_off, switch_on

if TYPE_CHECKING:
    from alembic.config import Config


Origin = Literal["opencue-sched", "cuebot"]

VERSION_TABLE = "opencue_sched_version"
"""Alembic's version table. Flyway's is never touched."""

REVISION = "0025"
"""The revision that this program's migrations lead to. Migrations only add, so it works with any later one as well."""

TABLE_LOCK_SECONDS = 20.0
"""How long a migration waits for one of Cuebot's tables, keeping everybody behind it waiting too."""

_MIGRATION_LOCK_KEY = 0x6F63732D6D696772
"""Session advisory lock held while migrating: the bytes of ``ocs-migr``."""
_MIGRATION_LOCK_SECONDS = 60.0
"""How long a migration waits for another one to end."""

# Which of the tables and columns there are that not all versions of OpenCue's schema have.
_FACTS = text(
    """
    WITH col AS (
        SELECT attrelid::regclass::text || '.' || attname AS name
        FROM pg_attribute
        WHERE attnum > 0 AND NOT attisdropped AND attrelid IN (
            to_regclass('show'), to_regclass('layer'), to_regclass('frame_history_queue')
        )
    )
    SELECT to_regclass('show') IS NOT NULL AND to_regclass('frame') IS NOT NULL
               AND to_regclass('proc') IS NOT NULL AS has_cuebot_tables,
           EXISTS (SELECT FROM col WHERE name = 'show.b_scheduler_managed') AS has_scheduler_managed,
           EXISTS (SELECT FROM col WHERE name = 'layer.ts_start_after') AS has_start_after,
           EXISTS (SELECT FROM col WHERE name = 'frame_history_queue.pk_frame') AS has_frame_history_queue,
           to_regclass('limit_host') IS NOT NULL AS has_limit_holders
    """
)
# The program that made OpenCue's tables; our first migration makes this table.
_ORIGIN = text("SELECT origin FROM opencue_sched_origin")
# Whether the server is a standby, and whether it lets this session write.
_WRITES = text("SELECT pg_is_in_recovery() AS standby, current_setting('transaction_read_only') = 'on' AS read_only")
# Our triggers on proc that are not switched off.
_TRIGGERS = text(
    """
    SELECT tgname FROM pg_trigger
     WHERE tgrelid = to_regclass('proc') AND tgenabled <> 'D' AND starts_with(tgname, 'opencue_sched_')
    """
)

GUARDS = {"opencue_sched_guard_insert", "opencue_sched_guard_update"}
"""The triggers that let nobody else assign frames of managed shows."""

ANNOUNCES_RELEASES = "opencue_sched_proc_released"
"""The trigger that tells of deleted procs."""

_BACKLOG_TRIGGERS = [
    ("job", "opencue_sched_backlog"),
    ("layer", "opencue_sched_backlog"),
    ("layer_limit", "opencue_sched_backlog"),
    ("layer_stat", "opencue_sched_work_arrived"),
    ("opencue_sched_quarantine", "opencue_sched_backlog"),
    ("show", "opencue_sched_backlog"),
]
"""The triggers that name what changes in the backlog, each after its table."""
_START_TIMES_TRIGGER = ("layer", "opencue_sched_work_arrived")
"""One more of these triggers, where layers have start times."""

# Which of the named triggers are missing or switched off.
_ABSENT = text(
    """
    SELECT wanted.trigger || ' on ' || wanted.of
    FROM unnest(CAST(:tables AS text[]), CAST(:triggers AS text[])) AS wanted(of, trigger)
    WHERE NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = to_regclass(wanted.of) AND tgname = wanted.trigger
                         AND tgenabled IN ('O', 'A'))
    ORDER BY wanted.of, wanted.trigger
    """
)


@lru_cache(maxsize=100)
def with_start_after(template: str, has_start_after: bool, *, once: bool = False) -> TextClause:
    """The statement of ``template``, on layers ``l``. In the template ``{started}`` leaves out layers that may not
    start yet, ``{start_after}`` adds the column where the database has one, and ``{starts}`` is the time before which a
    layer may not start, or NULL. With ``once`` the statement is one that the server prepares.
    """
    made = prepared if once else text
    if not has_start_after:
        return made(template.format(started="", start_after="", starts="CAST(NULL AS timestamptz)"))
    started = "AND (l.ts_start_after IS NULL OR l.ts_start_after <= now())"
    return made(template.format(started=started, start_after=", l.ts_start_after", starts="l.ts_start_after"))


@dataclass(frozen=True)
class SchemaFacts:
    """What differs between the databases that this program works with."""

    origin: Origin
    """The program that made OpenCue's tables."""
    revision: str
    """The revision of our own objects: REVISION, or a later one."""
    has_start_after: bool
    """Whether layer.ts_start_after exists (V47)."""
    has_frame_history_queue: bool
    """Whether frame history is queued, so that some process must call frame_history_drain() (after V49)."""
    has_limit_holders: bool
    """Whether what licence servers report of a limit's holders is kept (V49)."""
    backlog_is_named: bool
    """Whether our triggers name every show, job and layer whose waiting work changes: all are there, and enabled."""
    set_based_frames: bool
    """Whether Cuebot's triggers leave counters and history of started frames to the booking
    (store/set_based_frames.py)."""


# What our migrations leave out on a Cuebot that has no column for it, and add once a newer Cuebot has made the column.

_START_TIMES_REVISION = "0009"
# Whether layers have start times whose changes no trigger notifies.
_START_TIMES_UNANNOUNCED = text(
    """
    SELECT EXISTS (SELECT FROM pg_attribute
                    WHERE attrelid = to_regclass('layer') AND attname = 'ts_start_after' AND NOT attisdropped)
       AND NOT EXISTS (SELECT FROM pg_trigger
                        WHERE tgrelid = to_regclass('layer') AND tgname = 'opencue_sched_work_arrived')
    """
)
# Have changes of start times notified.
_ANNOUNCE_START_TIMES = text(
    """
    CREATE TRIGGER opencue_sched_work_arrived AFTER UPDATE OF ts_start_after ON layer FOR EACH ROW
    WHEN (OLD.ts_start_after IS DISTINCT FROM NEW.ts_start_after) EXECUTE FUNCTION opencue_sched_work_arrived()
    """
)


def newly_possible(connection: Connection) -> list[str]:
    """What the next migration would add to a database of our present revision, because its Cuebot was upgraded."""
    if (revision_of(connection) or "") < _START_TIMES_REVISION:
        return []
    return ["announcements of start times that change"] if connection.scalar(_START_TIMES_UNANNOUNCED) else []


def announce_start_times(connection: Connection) -> None:
    """Have a layer whose start time changes announced as new work, where layers have start times (Cuebot V47)."""
    if connection.scalar(_START_TIMES_UNANNOUNCED):
        # The trigger needs the table to itself: rather give up than hold up everybody behind us.
        connection.execute(text(f"SET LOCAL lock_timeout = {TABLE_LOCK_SECONDS * 1000:.0f}"))
        connection.execute(_ANNOUNCE_START_TIMES)


def triggers_of_proc(connection: Connection) -> frozenset[str]:
    """Our triggers on proc that are there and enabled."""
    return frozenset(connection.execute(_TRIGGERS).scalars())


def absent_backlog_triggers(connection: Connection) -> list[str]:
    """Triggers that name what changes in the backlog, missing or disabled: ``opencue_sched_backlog on layer``."""
    return _absent_triggers(connection, has_start_after=knows_start_after(connection))


def _absent_triggers(connection: Connection, *, has_start_after: bool) -> list[str]:
    """The triggers that name what changes in the backlog and that are missing or disabled."""
    wanted = [*_BACKLOG_TRIGGERS, *([_START_TIMES_TRIGGER] if has_start_after else [])]
    tables, triggers = zip(*wanted, strict=True)
    return list(connection.execute(_ABSENT, {"tables": list(tables), "triggers": list(triggers)}).scalars())


def read_origin(connection: Connection) -> Origin:
    """The program that made the tables, as our first migration recorded it; Cuebot where that never ran."""
    if not connection.scalar(text("SELECT to_regclass('opencue_sched_origin') IS NOT NULL")):
        return "cuebot"
    return cast(Origin, connection.scalar(_ORIGIN))


def refuse_too_old(connection: Connection) -> Row[Any]:
    """The row of what tables and columns the database has (has_...). Raises WrongSchema for a database made by a Cuebot
    without show.b_scheduler_managed."""
    facts = connection.execute(_FACTS).one()
    if facts.has_cuebot_tables and not facts.has_scheduler_managed:
        raise WrongSchema(
            "this database was made by a Cuebot older than migration V45 (column show.b_scheduler_managed is missing): "
            "upgrade Cuebot first. Nothing was changed."
        )
    return facts


# Names that several limits have, in a database where a name may still be given twice, with the ids of these limits.
_LIMITS_OF_ONE_NAME = text(
    """
    SELECT str_name AS name, string_agg(pk_limit_record, ' and ' ORDER BY pk_limit_record) AS ids
      FROM limit_record GROUP BY str_name HAVING count(*) > 1 ORDER BY str_name
    """
)


_ONE_NAME_EACH = (
    "Nothing was changed. Keep one limit of each name: let the rows of layer_limit say that one's id "
    "(UPDATE layer_limit SET pk_limit_record = ...) and delete the others, or give them another name "
    "(UPDATE limit_record SET str_name = ... WHERE pk_limit_record = ...), then run `opencue-sched migrate` again"
)


def refuse_limits_of_one_name(connection: Connection) -> None:
    """Refuse, by WrongSchema, a table of limits that we made and that has two limits of one name.

    A migration adds a constraint against that. In Cuebot's own tables, Cuebot decides (its migration V49).
    """
    if not connection.scalar(text("SELECT to_regclass('limit_record') IS NOT NULL")):
        return
    if read_origin(connection) == "cuebot":
        return
    same = connection.execute(_LIMITS_OF_ONE_NAME).all()
    if same:
        listed = "; ".join(f"{row.name!r} ({row.ids})" for row in same)
        raise WrongSchema(f"several limits have one name: {listed}. {_ONE_NAME_EACH}")


def check_writable(connection: Connection) -> None:
    """Refuse a standby, and a database whose sessions begin read only, by TakesNoWrites, which says what to do."""
    found = connection.execute(_WRITES).one()
    if found.standby:
        raise TakesNoWrites(
            "this PostgreSQL is a standby and takes no writes: name the primary in OPENCUE_SCHED_DATABASE_URL, or all "
            "servers and ?target_session_attrs=read-write, or promote this one"
        )
    if found.read_only:
        raise TakesNoWrites(
            "this database takes no writes, since default_transaction_read_only is on: turn it off in postgresql.conf, "
            "or wherever ALTER SYSTEM, DATABASE or ROLE set it (or name another in OPENCUE_SCHED_DATABASE_URL)"
        )


def knows_start_after(connection: Connection) -> bool:
    """Whether the layers of this database can have a moment before which none of their frames may start."""
    return bool(connection.execute(_FACTS).one().has_start_after)


def check_schema(connection: Connection) -> SchemaFacts:
    """What the database has.

    Raises WrongSchema, saying what to do, when there is no OpenCue schema, it is older than V45, or our own objects in
    it are missing or older than this program. Newer ones pass: in a rolling upgrade the database goes first.
    """
    facts = refuse_too_old(connection)
    if not facts.has_cuebot_tables:
        raise WrongSchema(
            "this database has no OpenCue schema: check that OPENCUE_SCHED_DATABASE_URL names the right database, then "
            "run `opencue-sched migrate`"
        )
    revision = revision_of(connection)
    if revision is None or revision < REVISION:
        there = "not there" if revision is None else f"of revision {revision}"
        raise WrongSchema(
            f"the tables and triggers of opencue-sched in this database are {there}, and this program needs revision "
            f"{REVISION}: run `opencue-sched migrate` (it adds objects of its own and changes none of Cuebot's)"
        )
    return SchemaFacts(
        origin=cast(Origin, connection.scalar(_ORIGIN)),
        revision=revision,
        has_start_after=facts.has_start_after,
        has_frame_history_queue=facts.has_frame_history_queue,
        has_limit_holders=facts.has_limit_holders,
        backlog_is_named=not _absent_triggers(connection, has_start_after=facts.has_start_after),
        set_based_frames=read_frames_way(connection).on,
    )


@contextmanager
def migration_lock(connection: Connection) -> Iterator[None]:
    """Hold the migration lock of this database; other migrations wait, for a minute at most.

    The lock is polled rather than waited for: a session that waits inside a statement would keep an index from being
    built.
    """
    deadline = time.monotonic() + _MIGRATION_LOCK_SECONDS
    while not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _MIGRATION_LOCK_KEY}):
        connection.rollback()
        if time.monotonic() > deadline:
            raise SchedulerError("another migration of this database is under way and did not end within a minute")
        time.sleep(0.2)
    connection.commit()
    try:
        yield
    finally:
        connection.rollback()
        connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _MIGRATION_LOCK_KEY})
        connection.commit()


def _alembic(url: str) -> Config:
    """Alembic's configuration for our migrations, which the wheel ships inside the package."""
    from alembic.config import Config  # slow to load, and most processes never migrate

    package = Path(__file__).resolve().parent.parent
    shipped = package / "_alembic"
    config = Config()
    config.set_main_option("script_location", str(shipped if shipped.is_dir() else package.parent / "alembic"))
    config.set_main_option("path_separator", "os")
    config.attributes["url"] = url
    return config


@contextmanager
def explained() -> Iterator[None]:
    """Turn the refusals of PostgreSQL that an operator can do something about into what to do."""
    try:
        yield
    except (psycopg2.Error, DBAPIError) as error:
        refusal = error.orig if isinstance(error, DBAPIError) else error
        reason = str(refusal).strip().partition("\n")[0]
        code = getattr(refusal, "pgcode", None)
        if code == errorcodes.INSUFFICIENT_PRIVILEGE:
            raise StoreUnusable(
                f"the database user may not do this ({reason}): run the migration as the owner of OpenCue's tables; "
                "docs/tasks/database-user.md has what the scheduler's user must be granted"
            ) from error
        # A farm at work may lock in the other order, and PostgreSQL then ends either the migration or a booking.
        if code in (errorcodes.LOCK_NOT_AVAILABLE, errorcodes.DEADLOCK_DETECTED):
            raise SchedulerError(
                f"a transaction holds a table that the migration needs for a moment ({reason}): nothing was "
                "changed, run it again"
            ) from error
        raise


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the database at ``url`` to ``revision``.

    Raises WrongSchema, with nothing changed, for a Cuebot older than V45 and for limits of one name, StoreUnusable when
    the user lacks a privilege, and SchedulerError when a table stays locked. Both say what to do.
    """
    from alembic import command

    config = _alembic(url)
    config.attributes["upgrades"] = True
    command.upgrade(config, revision)


def downgrade(url: str) -> None:
    """Remove what we made: on a database made by Cuebot, our objects and what we added to two of its functions; on one
    made by us, everything, with all rows."""
    from alembic import command

    command.downgrade(_alembic(url), "base")


def set_frames_way(url: str, *, set_based: bool) -> None:
    """Have bookings write counters and history for all of their frames at once, or Cuebot's triggers row by row.

    Raises SchedulerError, with nothing changed, where the text of Cuebot's functions is not known.
    """
    engine = engine_at(url, application_name="opencue-sched-migrate", poolclass=NullPool)
    with explained(), engine.connect() as connection, migration_lock(connection):
        if set_based:
            switch_on(connection)
        else:
            switch_off(connection)
        connection.commit()


def revision_of(connection: Connection) -> str | None:
    """The revision of our migrations that the database is at; None when none was ever made there."""
    if connection.execute(text("SELECT to_regclass('opencue_sched_version')")).scalar() is None:
        return None
    return connection.execute(text("SELECT version_num FROM opencue_sched_version")).scalar()
