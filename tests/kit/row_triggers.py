"""Databases whose frames are counted and recorded row by row, as a Cuebot's are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from sqlalchemy import Connection, Engine, text

from opencue_sched.store.schema import SchemaFacts, check_schema
from opencue_sched.store.set_based_frames import COUNTS, HISTORY, KNOWN_TEXTS, switch_off, switch_on

KnownTexts = Mapping[str, frozenset[str]]

_STATES = ("WAITING", "RUNNING", "DEAD", "DEPEND", "EATEN", "SUCCEEDED", "CHECKPOINT")
_COUNTED = ", ".join(
    f"int_{state}_count = int_{state}_count"
    f" + CASE NEW.str_state WHEN '{state}' THEN 1 ELSE 0 END - CASE OLD.str_state WHEN '{state}' THEN 1 ELSE 0 END"
    for state in _STATES
)
_COUNTS_BODY = f"""
BEGIN
    UPDATE layer_stat
    SET {_COUNTED},
        ts_started = CASE NEW.str_state WHEN 'RUNNING' THEN coalesce(ts_started, NEW.ts_started) ELSE ts_started END,
        ts_stopped = CASE OLD.str_state WHEN 'RUNNING' THEN coalesce(NEW.ts_stopped, now()) ELSE ts_stopped END
    WHERE pk_layer = NEW.pk_layer;
    UPDATE job_stat SET {_COUNTED} WHERE pk_job = NEW.pk_job;
    RETURN NULL;
END
"""  # noqa: S608 - only our own constants
_HISTORY_BODY = """
DECLARE
    is_off boolean := EXISTS (SELECT FROM config WHERE str_key = 'DISABLE_HISTORY');
BEGIN
    IF NOT is_off AND OLD.str_state = 'RUNNING' THEN
        UPDATE frame_history SET int_ts_stopped = epoch(now()), int_exit_status = NEW.int_exit_status
        WHERE pk_frame = NEW.pk_frame AND int_ts_stopped = 0;
    ELSIF NOT is_off AND NEW.str_state = 'RUNNING' THEN
        INSERT INTO frame_history (pk_frame, pk_layer, pk_job, str_name, str_state, int_cores, int_mem_reserved,
                                   int_gpus, int_gpu_mem_reserved, str_host, int_ts_started, pk_alloc)
        SELECT NEW.pk_frame, NEW.pk_layer, NEW.pk_job, NEW.str_name, NEW.str_state, NEW.int_cores,
               NEW.int_mem_reserved, NEW.int_gpus, NEW.int_gpu_mem_reserved, NEW.str_host, epoch(now()),
               (SELECT pk_alloc FROM host WHERE str_name = NEW.str_host);
    END IF;
    RETURN NULL;
END
"""
_BODIES = {COUNTS: _COUNTS_BODY, HISTORY: _HISTORY_BODY}
_CONDITIONS = {
    COUNTS: "OLD.str_state <> 'SETUP' AND OLD.str_state <> NEW.str_state",
    HISTORY: "NEW.str_state <> OLD.str_state",
}


def count_row_by_row(connection: Connection) -> KnownTexts:
    """Have frames counted and recorded row by row, where the schema is not a Cuebot's; the texts of the functions,
    which leave nothing out any more."""
    switch_off(connection)
    if not _are_row_by_row(connection):
        for trigger, body in _BODIES.items():
            connection.exec_driver_sql(
                f"DROP TRIGGER {trigger} ON frame; CREATE OR REPLACE FUNCTION trigger__{trigger}() RETURNS trigger"
                f" LANGUAGE plpgsql AS $body${body}$body$; CREATE TRIGGER {trigger} AFTER UPDATE ON frame FOR EACH ROW"
                f" WHEN ({_CONDITIONS[trigger]}) EXECUTE FUNCTION trigger__{trigger}()"
            )
    # Those of a Cuebot, and ours.
    texts = {trigger: frozenset({hashlib.sha256(body.encode()).hexdigest()}) for trigger, body in _BODIES.items()}
    return {trigger: KNOWN_TEXTS[trigger] | texts[trigger] for trigger in texts}


def leave_to_bookings(engine: Engine) -> SchemaFacts:
    """Switch to set-based frames on a schema of Cuebot's shape; the facts with which a worker books there then."""
    with engine.begin() as connection:
        switch_on(connection, count_row_by_row(connection))
        return replace(check_schema(connection), set_based_frames=True)


def _are_row_by_row(connection: Connection) -> bool:
    by_row = "SELECT tgtype & 1 = 1 FROM pg_trigger WHERE tgrelid = to_regclass('frame') AND tgname = :name"
    return bool(connection.scalar(text(by_row), {"name": COUNTS}))


def definition(connection: Connection, trigger: str) -> str:
    """What makes the function of a trigger of frame as it is now."""
    statement = (
        "SELECT pg_get_functiondef(tgfoid) FROM pg_trigger WHERE tgrelid = to_regclass('frame') AND tgname = :name"
    )
    return str(connection.scalar(text(statement), {"name": trigger}))
