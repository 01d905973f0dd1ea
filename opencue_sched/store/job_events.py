"""Events of jobs for the farm's own receiver, where there is no Cuebot: a job has ended, or its first frame has died.

An event is a row of ``opencue_sched_job_event``, written by the transaction that ends the job or the frame, so there is
an event exactly if that transaction was committed, and every worker is notified with the commit. Events are written
only while there are receivers: a worker that has one says so as it starts, when it hears notifications again, and each
time it looks for events (note_receiver). A sender first sets the time at which the event is tried again: a sender that
dies leaves the event to the next.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

EVENTS_CHANNEL = "opencue_sched_events"
"""Notified, with an empty object, by the commit of an event."""

KNOWN_DAYS = 7
"""How long a receiver is believed to be there when no worker has said so again."""

# The condition that a job's facility has a receiver of events.
_RECEIVED = f"""EXISTS (
        SELECT FROM opencue_sched_receiver receiver
         WHERE receiver.facility IN ('', facility.str_name)
           AND receiver.seen_at > current_timestamp - interval '{KNOWN_DAYS} days')"""
# What every event says of its job.
_JOB = """json_build_object('id', job.pk_job, 'name', job.str_name, 'show', show.str_name, 'shot', job.str_shot,
                               'user', job.str_user, 'facility', facility.str_name)"""
_OF_JOB = "JOIN show ON show.pk_show = job.pk_show JOIN facility ON facility.pk_facility = job.pk_facility"
# Ends a statement that has ``made`` events.
_NOTIFY = f"SELECT pg_notify('{EVENTS_CHANNEL}', '{{}}') FROM made LIMIT 1"  # noqa: S608 - only our own constant
# Writes the events of jobs that end. A job that was killed has frames that are not over.
_NOTE_ENDS = text(
    f"""
    WITH forgotten AS (DELETE FROM opencue_sched_dead_job WHERE pk_job = ANY(CAST(:jobs AS varchar[]))),
    made AS (
    INSERT INTO opencue_sched_job_event (event, facility, body)
    SELECT 'job_ended', facility.str_name, json_build_object('job', {_JOB}, 'frames', json_build_object(
               'succeeded', int_succeeded_count, 'eaten', int_eaten_count, 'dead', int_dead_count,
               'unfinished', int_waiting_count + int_running_count + int_depend_count + int_checkpoint_count))
      FROM job JOIN job_stat ON job_stat.pk_job = job.pk_job {_OF_JOB}
     WHERE job.pk_job = ANY(CAST(:jobs AS varchar[])) AND {_RECEIVED}
    RETURNING id)
    {_NOTIFY}
    """  # noqa: S608 - only our own constants
)
# Writes the events of frames that die, one for each job. The counters of the jobs are locked, so no other transaction
# writes their rows of opencue_sched_dead_job. A frame that is killed with its job ends after the job did: such a death
# gets no event.
_NOTE_DEATHS = text(
    f"""
    WITH died AS (
        SELECT DISTINCT ON (frame.pk_job) frame.* FROM frame JOIN layer ON layer.pk_layer = frame.pk_layer
         WHERE frame.pk_frame = ANY(CAST(:frames AS varchar[]))
         ORDER BY frame.pk_job, layer.int_dispatch_order, frame.int_dispatch_order),
    first AS (
        INSERT INTO opencue_sched_dead_job (pk_job)
        SELECT job.pk_job FROM died JOIN job ON job.pk_job = died.pk_job
          JOIN facility ON facility.pk_facility = job.pk_facility
         WHERE job.str_state <> 'FINISHED' AND {_RECEIVED}
         ORDER BY job.pk_job
        ON CONFLICT DO NOTHING RETURNING pk_job),
    made AS (
    INSERT INTO opencue_sched_job_event (event, facility, body)
    SELECT 'frame_died', facility.str_name, json_build_object('job', {_JOB}, 'frame', json_build_object(
               'id', died.pk_frame, 'name', died.str_name, 'layer', layer.str_name, 'host', died.str_host,
               'exit_status', died.int_exit_status, 'retries', died.int_retries))
      FROM first JOIN died ON died.pk_job = first.pk_job JOIN layer ON layer.pk_layer = died.pk_layer
      JOIN job ON job.pk_job = first.pk_job {_OF_JOB}
    RETURNING id)
    {_NOTIFY}
    """  # noqa: S608 - only our own constants
)
# Forget that an event of a dead frame of these jobs was written: the next frame that dies gets one again.
_FORGET_DEATHS = text("DELETE FROM opencue_sched_dead_job WHERE pk_job = ANY(CAST(:jobs AS varchar[]))")
# Note that a facility has a receiver. Once an hour is enough, and a row that does not change costs nothing.
_NOTE_RECEIVER = text(
    """
    INSERT INTO opencue_sched_receiver AS known (facility, seen_at) VALUES (:facility, clock_timestamp())
    ON CONFLICT (facility) DO UPDATE SET seen_at = excluded.seen_at
     WHERE known.seen_at < clock_timestamp() - interval '1 hour'
    """
)
_IN_FACILITY = "(CAST(:facility AS varchar) IS NULL OR facility = :facility)"
# Takes events that are due, and sets when each is tried next: later each time, up to the longest wait.
_TAKE = text(
    f"""
    UPDATE opencue_sched_job_event
       SET tries = tries + 1,
           due_at = clock_timestamp() + least(CAST(:longest AS float8), :first * power(2, tries)) * interval '1 second'
     WHERE id = ANY(ARRAY(
        SELECT id FROM opencue_sched_job_event
         WHERE (tries > 0) = :again AND due_at <= clock_timestamp() AND tries < :most AND {_IN_FACILITY}
         ORDER BY due_at LIMIT :limit FOR UPDATE SKIP LOCKED))
    RETURNING id, event, made_at, tries, body
    """  # noqa: S608 - only our own constant
)
# Delete events that were sent.
_SENT = text("DELETE FROM opencue_sched_job_event WHERE id = ANY(CAST(:ids AS varchar[]))")
# Note the error of each event that could not be sent.
_REFUSED = text(
    """
    UPDATE opencue_sched_job_event tried SET last_error = left(refused.value, 500)
      FROM json_each_text(CAST(:errors AS json)) refused WHERE tried.id = refused.key
    """
)
# Drop events that are too old, or were tried too often; returns them.
_DROP = text(
    f"""
    DELETE FROM opencue_sched_job_event WHERE id = ANY(ARRAY(
        SELECT id FROM opencue_sched_job_event
         WHERE (made_at < clock_timestamp() - CAST(:age AS float8) * interval '1 second'
                OR (tries >= :most AND due_at <= clock_timestamp())) AND {_IN_FACILITY}
         LIMIT :limit FOR UPDATE SKIP LOCKED))
    RETURNING id, event, last_error
    """  # noqa: S608 - only our own constant
)
# How many events are not delivered, and since when, and whether there ever was a receiver. An event that was not tried
# for a minute is one that no process sends.
_UNDELIVERED = text(
    """
    SELECT count(*) FILTER (WHERE tries = 0) AS untried, count(*) FILTER (WHERE last_error IS NOT NULL) AS refused,
           CAST(extract(epoch FROM clock_timestamp() - min(made_at)) AS float8) AS oldest_seconds,
           (SELECT last_error FROM opencue_sched_job_event WHERE last_error IS NOT NULL
             ORDER BY due_at DESC LIMIT 1) AS last_error,
           EXISTS (SELECT FROM opencue_sched_receiver) AS received
      FROM opencue_sched_job_event
     WHERE last_error IS NOT NULL OR made_at < clock_timestamp() - CAST(:after AS float8) * interval '1 second'
    """
)


def note_ends(connection: Connection, job_ids: Collection[str]) -> None:
    """Write the events of jobs that this transaction ends."""
    connection.execute(_NOTE_ENDS, {"jobs": list(job_ids)})


def note_deaths(connection: Connection, frame_ids: Collection[str]) -> None:
    """Write the events of frames that this transaction makes DEAD: one for each job, and none for a job that is over,
    or that had one since a dead frame of it was last retried. The caller has locked the counters of the jobs."""
    connection.execute(_NOTE_DEATHS, {"frames": list(frame_ids)})


def forget_deaths(connection: Connection, job_ids: Collection[str]) -> None:
    """Have an event written for the next frame of each job that dies. Called when dead frames of the jobs are
    retried."""
    connection.execute(_FORGET_DEATHS, {"jobs": list(job_ids)})


def note_receiver(connection: Connection, facility: str | None) -> None:
    """Note that a worker of this facility (None: of all) has a receiver, so that events are written from now on."""
    connection.execute(_NOTE_RECEIVER, {"facility": facility or ""})


def take(
    connection: Connection,
    *,
    again: bool,
    facility: str | None,
    limit: int,
    most_tries: int,
    first: float,
    longest: float,
) -> list[Row[Any]]:
    """Take events that are due, the longest due first, at most ``limit``: events that were never tried, or with
    ``again`` the others. A row has ``id``, ``event``, ``made_at``, ``tries`` (this one included) and ``body``.

    An event is due again after ``first`` seconds, and after twice as many with each further try, up to ``longest``.
    """
    times = {"most": most_tries, "first": first, "longest": longest}
    taken = connection.execute(_TAKE, {"again": again, "facility": facility, "limit": limit, **times})
    return sorted(taken, key=lambda event: event.made_at)


def note_outcomes(connection: Connection, sent: Collection[str], refused: Mapping[str, str]) -> None:
    """Delete events that were ``sent`` (ids), and write down why others were not (``refused``, by id)."""
    if sent:
        connection.execute(_SENT, {"ids": list(sent)})
    if refused:
        connection.execute(_REFUSED, {"errors": json.dumps(dict(refused))})


def drop_old(
    connection: Connection, *, facility: str | None, age: float, most_tries: int, limit: int
) -> Sequence[Row[Any]]:
    """Give up events that are older than ``age`` seconds, or were tried ``most_tries`` times, at most ``limit``.
    Returns ``id``, ``event`` and ``last_error`` of each."""
    parameters = {"facility": facility, "age": age, "most": most_tries, "limit": limit}
    return connection.execute(_DROP, parameters).all()


def undelivered(connection: Connection, after: float = 60.0) -> Row[Any]:
    """How many events were ``refused``, and how many are ``untried`` for ``after`` seconds or more; the age of the
    oldest of all these (``oldest_seconds``), and the ``last_error``. ``received``: whether there ever was a receiver;
    before that, no event is written."""
    return connection.execute(_UNDELIVERED, {"after": after}).one()
