"""What people change of waiting work, where nobody hears of it, and a witness of what starts with too little memory.

A layer gets a licence or asks for more memory, or its job goes to another folder, on a database whose triggers keep
quiet. None of the job's frames runs, and none is being booked, because all that wait are locked: so whatever is booked
afterwards counts under the new caps, which the sampler looks at, and has the new amount, which the witness sees. The
frames stay locked until every statement has ended that may have read what was before the change.
"""

from __future__ import annotations

import random
import time
import uuid
from typing import Any

from sqlalchemy import Connection, Engine, Row, text

MOST_MEMORY_KB = 4 * 1024 * 1024
MOST_SECONDS = 5.0
"""How long frames stay locked at most for the sake of statements that do not end: some wait for these locks."""
_POLL_SECONDS = 0.005

# A job with its next folder and licence, none of whose frames runs.
_JOBS = text(
    """
    SELECT j.pk_job, l.pk_layer, l.int_mem_min, j.str_name || '/' || l.str_name AS name,
           (SELECT min(pk_folder) FROM folder f
            WHERE f.pk_show = j.pk_show AND f.pk_folder <> j.pk_folder) AS folder_id,
           (SELECT pk_limit_record FROM limit_record
            ORDER BY md5(l.pk_layer || pk_limit_record) LIMIT 1) AS limit_id,
           EXISTS (SELECT FROM layer_limit ll WHERE ll.pk_layer = l.pk_layer) AS limited
    FROM layer_stat s JOIN layer l USING (pk_layer) JOIN job j ON j.pk_job = l.pk_job
    WHERE s.int_waiting_count > 0 AND j.str_state = 'PENDING'
      AND NOT EXISTS (SELECT FROM proc p WHERE p.pk_job = j.pk_job)
    ORDER BY l.pk_layer
    """
)
_LOCK_FRAMES = text("SELECT pk_frame FROM frame WHERE pk_job = :job ORDER BY pk_frame FOR UPDATE")
_LOCK_BRIEFLY = text("SET LOCAL lock_timeout = '1s'")
_RUNS = text("SELECT EXISTS (SELECT FROM proc WHERE pk_job = :job)")
_QUIET = text("SET LOCAL session_replication_role = 'replica'")
_MOVE = text("UPDATE job SET pk_folder = :folder WHERE pk_job = :job")
_RAISE = text("UPDATE layer SET int_mem_min = :memory WHERE pk_layer = :layer")
_NOW = text("SELECT clock_timestamp()")
_OLDER = text(
    "SELECT EXISTS (SELECT FROM pg_stat_activity"
    " WHERE datname = current_database() AND state = 'active' AND query_start <= :changed)"
)
_LIMIT = text("INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record) VALUES (:id, :layer, :limit)")

# The transaction of a booking has its frames locked, and so has one that raises the amount: what is seen at the end of
# the booking is what its layer asked for while it was made.
_WITNESS = """
CREATE TABLE chaos_too_small (pk_proc varchar(36), why text);
CREATE FUNCTION chaos_witness_memory() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_too_small
    SELECT NEW.pk_proc, 'proc ' || NEW.pk_proc || ' with ' || NEW.int_mem_reserved || ' KB of layer ' || NEW.pk_layer
           || ', which asks for ' || layer.int_mem_min
    FROM layer WHERE layer.pk_layer = NEW.pk_layer AND layer.int_mem_min > NEW.int_mem_reserved;
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER chaos_witness_memory AFTER INSERT ON proc DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION chaos_witness_memory();
"""
_TOO_SMALL = text("SELECT why FROM chaos_too_small ORDER BY pk_proc")


def plant_witness(connection: Connection) -> None:
    """Watch the bookings of this database from now on."""
    connection.execute(text(_WITNESS))


def too_small(connection: Connection) -> list[str]:
    """What was booked with less memory than its layer asked for."""
    return list(connection.execute(_TOO_SMALL).scalars())


def change_silently(engine: Engine, chance: random.Random) -> str:
    """Change a layer that waits, or its job, and let nobody hear of it; what was changed, empty for nothing.

    Raises SQLAlchemyError where somebody has its frames locked.
    """
    with engine.begin() as locking:
        found = locking.execute(_JOBS).all()
        if not found:
            return ""
        row = chance.choice(found)
        locking.execute(_LOCK_BRIEFLY)
        locking.execute(_LOCK_FRAMES, {"job": row.pk_job})
        if locking.execute(_RUNS, {"job": row.pk_job}).scalar_one():
            return ""
        with engine.begin() as connection:
            connection.execute(_QUIET)
            changed = chance.choice((_get_licence, _move_job, _raise_memory))(connection, row)
        # A booking's statement that reads the layer as it was, and comes to its frames when they are free again, would
        # be right to book them.
        _await_older_statements(engine)
    return changed


def _await_older_statements(engine: Engine) -> None:
    """Wait until the statements have ended that run now, MOST_SECONDS at most."""
    deadline = time.monotonic() + MOST_SECONDS
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        now = connection.execute(_NOW).scalar_one()
        while time.monotonic() < deadline and connection.execute(_OLDER, {"changed": now}).scalar_one():
            time.sleep(_POLL_SECONDS)


def _get_licence(connection: Connection, row: Row[Any]) -> str:
    if row.limited or row.limit_id is None:
        return ""
    connection.execute(_LIMIT, {"id": uuid.uuid4().hex, "layer": row.pk_layer, "limit": row.limit_id})
    return f"a licence for {row.name}"


def _move_job(connection: Connection, row: Row[Any]) -> str:
    if row.folder_id is None:
        return ""
    connection.execute(_MOVE, {"job": row.pk_job, "folder": row.folder_id})
    return f"another folder for the job of {row.name}"


def _raise_memory(connection: Connection, row: Row[Any]) -> str:
    if row.int_mem_min * 2 > MOST_MEMORY_KB:
        return ""
    connection.execute(_RAISE, {"layer": row.pk_layer, "memory": row.int_mem_min * 2})
    return f"twice the memory for {row.name}"
