"""Sends the events of jobs to the farm's own receiver, at least once, and in nobody's way.

Whoever ends a frame only writes a row (store/job_events.py). What is sent here has its next try set and committed
before: a process that dies in between leaves it to the next one, which sends it again under the same id. Events that
were never tried and those that failed before are sent by threads of their own, so that what fails again and again takes
no place of what is new.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC
from time import monotonic
from typing import Any

import structlog
from sqlalchemy import Engine, Row

from opencue_sched.reports.event_receivers import Receiver
from opencue_sched.store import job_events

_log = structlog.get_logger(__name__)

SEND_SECONDS = 10.0
"""How long a receiver may take for an event."""
RUN_SECONDS = 5.0
"""A call of `send_events` begins nothing after so long, and so ends SEND_SECONDS later at the latest."""
FIRST_REPEAT_SECONDS = 30.0
"""An event is tried again after so long, twice as long after each try: more than a try takes, whose end nobody else
waits for."""
LONGEST_REPEAT_SECONDS = 3600.0
MOST_TRIES = 30
LONGEST_AGE_SECONDS = 86_400.0
MOST_DROPPED = 1_000
"""Events given up by one call."""
THREADS = 4
"""How many events are sent at a time for the first time, and how many again."""


def send_events(
    engine: Engine,
    receiver: Receiver | None,
    *,
    facility: str | None,
    count: Callable[[str, int], object],
    stopping: Callable[[], bool] = lambda: False,
    patience_seconds: float = SEND_SECONDS,
    run_seconds: float = RUN_SECONDS,
) -> dict[str, int]:
    """Send what is due of a facility (None: of all), give up what is too old; how many were ``sent``, ``failed`` and
    are tried again, and were ``dropped``. ``count`` is called with each of these words and a number.

    Without a receiver, which other workers may have, only what is too old goes. Raises SQLAlchemy's errors; what was
    not sent then is due again.
    """
    figures: Counter[str] = Counter(sent=0, failed=0, dropped=0)
    until = monotonic() + run_seconds

    def counted(outcome: str, amount: int = 1) -> None:
        figures[outcome] += amount
        count(outcome, amount)

    with engine.begin() as connection:
        if receiver is not None:
            job_events.note_receiver(connection, facility)
        dropped = job_events.drop_old(
            connection, facility=facility, age=LONGEST_AGE_SECONDS, most_tries=MOST_TRIES, limit=MOST_DROPPED
        )
    if dropped:
        counted("dropped", len(dropped))
        shown = [row.id for row in dropped[:20]]
        _log.warning("job_events_dropped", ids=shown, total=len(dropped), last_error=dropped[-1].last_error)
    if receiver is None:
        return dict(figures)

    def send_in_turn(again: bool) -> list[str]:
        """Send one after the other while some are due; what became of each."""
        outcomes = []
        while monotonic() < until and not stopping() and (event := _take(engine, again, facility)) is not None:
            outcomes.append(_send(engine, receiver, event, patience_seconds))
        return outcomes

    with ThreadPoolExecutor(2 * THREADS, thread_name_prefix="job-events") as threads:
        sending = threads.map(send_in_turn, [again for again in (False, True) for _ in range(THREADS)])
        for outcomes in sending:
            for outcome in outcomes:
                counted(outcome)
    return dict(figures)


def _take(engine: Engine, again: bool, facility: str | None) -> Row[Any] | None:
    with engine.begin() as connection:
        return job_events.take(
            connection,
            again=again,
            facility=facility,
            most_tries=MOST_TRIES,
            first=FIRST_REPEAT_SECONDS,
            longest=LONGEST_REPEAT_SECONDS,
        )


def _send(engine: Engine, receiver: Receiver, event: Row[Any], seconds: float) -> str:
    """Send an event that was taken, and write down what became of it: ``sent`` or ``failed``."""
    at = event.made_at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    message = json.dumps({"id": event.id, "event": event.event, "at": at, **event.body}).encode()
    try:
        failure = receiver.deliver(message, seconds)
    except Exception as error:
        # Whatever is wrong with one event, the others are sent. The text of such an error may have the URL in it.
        failure = type(error).__name__
        _log.error("job_event_delivery_broke", id=event.id, error=failure)
    with engine.begin() as connection:
        if failure:
            job_events.note_refusal(connection, event.id, failure)
        else:
            job_events.delete_sent(connection, event.id)
    if failure:
        fields = {"id": event.id, "what": event.event, "tries": event.tries}
        _log.warning("job_event_not_sent", receiver=receiver.shown, error=failure, **fields)
    return "failed" if failure else "sent"
