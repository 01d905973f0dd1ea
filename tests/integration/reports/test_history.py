"""Frame history on databases that queue it, where no Cuebot writes it down."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from opencue_sched.reports.frame_history import HISTORY_EVENTS, drain_history

# Stands for OpenCue's function, with its parameters and results: an event whose status does not fit is refused.
_QUEUE = """
CREATE TABLE frame_history_queue (id bigserial PRIMARY KEY, pk_frame varchar(36), int_exit_status bigint);
CREATE TABLE written (pk_frame varchar(36), int_exit_status smallint);
CREATE FUNCTION frame_history_drain(p_limit int, p_wait boolean DEFAULT false, p_safe boolean DEFAULT false,
                                    OUT drained int, OUT skipped int, OUT merged int) LANGUAGE plpgsql AS $$
DECLARE
    event frame_history_queue;
BEGIN
    drained := 0; skipped := 0; merged := 0;
    IF NOT pg_try_advisory_xact_lock(77) THEN RETURN; END IF;
    FOR event IN SELECT * FROM frame_history_queue ORDER BY id LIMIT p_limit LOOP
        BEGIN
            INSERT INTO written VALUES (event.pk_frame, event.int_exit_status);
        EXCEPTION WHEN OTHERS THEN
            IF NOT p_safe THEN RAISE; END IF;
            RAISE WARNING 'event % of frame % was dropped: %', event.id, event.pk_frame, SQLERRM;
            skipped := skipped + 1;
        END;
        DELETE FROM frame_history_queue WHERE id = event.id;
        drained := drained + 1;
    END LOOP;
END $$
"""


@pytest.fixture
def queue(engine: Engine) -> Engine:
    with engine.begin() as connection:
        connection.execute(text(_QUEUE))
    return engine


def enqueue(engine: Engine, *statuses: int) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO frame_history_queue (pk_frame, int_exit_status) "
                "SELECT 'f' || place, status FROM unnest(CAST(:statuses AS bigint[])) WITH ORDINALITY x (status, place)"
            ),
            {"statuses": list(statuses)},
        )


def count(engine: Engine, table: str) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())  # noqa: S608


def test_the_queue_is_drained_so_many_events_at_a_time(queue: Engine) -> None:
    enqueue(queue, *[0] * (HISTORY_EVENTS + 5))
    assert [drain_history(queue) for _ in range(3)] == [(HISTORY_EVENTS, 0), (5, 0), (0, 0)]
    assert (count(queue, "frame_history_queue"), count(queue, "written")) == (0, HISTORY_EVENTS + 5)


def test_an_event_that_fails_is_logged_and_keeps_no_other_in_the_queue(queue: Engine) -> None:
    # given an event that cannot be written, the 14th of 25
    enqueue(queue, *[0] * 13, 100_000, *[0] * 11)

    # when the queue is drained
    with capture_logs() as logs:
        report = drain_history(queue)

    # then all the others are written, and the log says why this one was not
    assert report == (25, 1)
    assert (count(queue, "frame_history_queue"), count(queue, "written")) == (0, 24)
    said = {entry["event"]: entry for entry in logs}
    assert "smallint out of range" in said["frame_history_not_drained"]["error"]
    assert said["frame_history_events_skipped"]["events"] == 1


def test_while_somebody_else_drains_it_does_nothing(queue: Engine) -> None:
    enqueue(queue, 0)
    with queue.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(77)"))
        assert drain_history(queue) == (0, 0)
    assert drain_history(queue) == (1, 0)


def test_a_drain_that_fails_in_both_ways_is_logged(queue: Engine) -> None:
    # given a queue with rows that cannot even be deleted
    enqueue(queue, *[0] * 15)
    with queue.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN RAISE EXCEPTION 'row % stays', OLD.id; END $$;"
                "CREATE TRIGGER refuse BEFORE DELETE ON frame_history_queue FOR EACH ROW WHEN (OLD.id > 10)"
                " EXECUTE FUNCTION refuse()"
            )
        )
    with capture_logs() as logs:
        report = drain_history(queue)
    assert report == (0, 0)
    failed = [(entry["one_by_one"], "row 11 stays" in entry["error"]) for entry in logs]
    assert failed == [(False, True), (True, True)]
