"""Sends the events of jobs to the farm's own receiver, at least once, and in nobody's way.

Whoever ends a frame only writes a row (store/job_events.py). What is sent here has its next try set and committed
before: a process that dies in between leaves it to the next one, which sends it again under the same id. Events that
were never tried and those that failed before have places of their own, so that what fails again and again takes no
place of what is new. An attempt that hangs gives its place to the next event and goes on beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC
from time import monotonic
from typing import Any

import structlog
from sqlalchemy import Engine, Row

from opencue_sched.reports.event_receivers import Receiver
from opencue_sched.store import job_events

_log = structlog.get_logger(__name__)

PLACES = 16
"""How many attempts may be under way that do not hang: so many first tries, and as many repeated ones. As many again of
each may hang beside them."""
LOOK_SECONDS = 0.1
"""The time between two looks for other events that are due, while an event is being sent."""
FIRST_REPEAT_SECONDS = 30.0
"""The time from a first try to the second; it doubles with each try.

It is longer than a try takes, for whose end no other process waits."""
LONGEST_REPEAT_SECONDS = 3600.0
MOST_TRIES = 30
"""The longest time from one try of an event to the next."""
LONGEST_AGE_SECONDS = 86_400.0
"""An event that was tried so often is given up once its next try would be due."""
MOST_DROPPED = 1_000
"""An event that is older is given up."""
"""How many events one call gives up at most."""


@dataclass(frozen=True, slots=True)
class SendTimes:
    """How long sending may take, in seconds."""

    patience: float = 10.0
    """How long a receiver may take for an event."""
    hanging: float = 2.0
    """The time after which an attempt hangs: it takes no place of others any more.

    While PLACES other attempts have more time, a receiver may take no longer than this for an event."""
    run: float = 5.0
    """The time after which a call of `send_events` begins nothing more: the call ends ``patience`` later at the
    latest."""


SEND_TIMES = SendTimes()
"""The times of every process; tests have shorter ones."""


def send_events(
    engine: Engine,
    receiver: Receiver | None,
    *,
    facility: str | None,
    count: Callable[[str, int], object],
    stopping: Callable[[], bool] = lambda: False,
    begins_no_more: Callable[[], object] = lambda: None,
    times: SendTimes = SEND_TIMES,
) -> dict[str, int]:
    """Send what is due of a facility (None: of all), give up what is too old; how many were ``sent``, ``failed`` and
    are tried again, and were ``dropped``. ``count`` is called with each of these words and a number.

    ``begins_no_more`` is called once nothing is begun any more: from then on another process may send, while this one
    waits for attempts that hang. Without a receiver, which other workers may have, only what is too old goes. Raises
    SQLAlchemy's errors; what was not sent then is due again.
    """
    figures: Counter[str] = Counter(sent=0, failed=0, dropped=0)
    until = monotonic() + times.run

    def add(outcome: str, amount: int) -> None:
        if amount:
            figures[outcome] += amount
            count(outcome, amount)

    with engine.begin() as connection:
        if receiver is not None:
            job_events.note_receiver(connection, facility)
        dropped = job_events.drop_old(
            connection, facility=facility, age=LONGEST_AGE_SECONDS, most_tries=MOST_TRIES, limit=MOST_DROPPED
        )
    add("dropped", len(dropped))
    if dropped:
        shown = [row.id for row in dropped[:20]]
        _log.warning("job_events_dropped", ids=shown, total=len(dropped), last_error=dropped[-1].last_error)
    if receiver is None:
        return dict(figures)

    lanes = [_Lane(again, times) for again in (False, True)]
    with ThreadPoolExecutor(4 * PLACES, thread_name_prefix="job-events") as threads, ExitStack() as beginning:
        beginning.callback(begins_no_more)
        begins = True
        while True:
            ended = [attempt for lane in lanes for attempt in lane.take_out_ended()]
    # Threads for two lanes, each of PLACES attempts and as many that hang. The exit stack calls begins_no_more after an
    # error, too.
            begins = begins and monotonic() < until and not stopping()
            for lane, event in _note_and_take(engine, ended, lanes if begins else (), facility):
                seconds = lane.patience()
                lane.attempts.append(_Attempt(event, threads.submit(_send, receiver, event, seconds), seconds))
            failed = sum(bool(attempt.failure.result()) for attempt in ended)
            add("sent", len(ended) - failed)
            add("failed", failed)
            under_way = [attempt.failure for lane in lanes for attempt in lane.attempts]
            if not begins or not under_way:
                beginning.close()
            if not under_way:
                return dict(figures)
            wait(under_way, LOOK_SECONDS)


def _note_and_take(
    engine: Engine, ended: Sequence[_Attempt], lanes: Sequence[_Lane], facility: str | None
) -> list[tuple[_Lane, Row[Any]]]:
    """Write down what became of attempts, and take what is due for the free places of ``lanes``: one transaction."""
    free = {lane.again: lane.free_places() for lane in lanes}
    if not ended and not any(free.values()):
        return []
    failures = {attempt.event.id: attempt.failure.result() for attempt in ended}
    with engine.begin() as connection:
        job_events.note_outcomes(
            connection,
            sent=[event_id for event_id, failure in failures.items() if not failure],
            refused={event_id: failure for event_id, failure in failures.items() if failure},
        )
        return [
            (lane, event)
            for lane in lanes
            if free[lane.again]
            for event in job_events.take(
                connection,
                again=lane.again,
                facility=facility,
                limit=free[lane.again],
                most_tries=MOST_TRIES,
                first=FIRST_REPEAT_SECONDS,
                longest=LONGEST_REPEAT_SECONDS,
            )
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """An event that is being sent."""

    event: Row[Any]
    failure: Future[str]
    """Why sending it failed; empty if it did not."""
    patience_seconds: float
    began: float = field(default_factory=monotonic)


@dataclass(slots=True)
class _Lane:
    """The attempts under way for events that were never tried, or for all others: each kind has a lane of its own.

    Used by the thread of send_events alone; the threads of attempts know only their event."""

    again: bool
    """True for the others."""
    times: SendTimes
    attempts: list[_Attempt] = field(default_factory=list)

    def take_out_ended(self) -> list[_Attempt]:
        ended = [attempt for attempt in self.attempts if attempt.failure.done()]
        self.attempts = [attempt for attempt in self.attempts if attempt not in ended]
        return ended

    def free_places(self) -> int:
        """How many attempts may begin beside those that do not hang; with those that do there are two for a place."""
        now = monotonic()
        brisk = sum(now - attempt.began < self.times.hanging for attempt in self.attempts)
        return min(PLACES - brisk, 2 * PLACES - len(self.attempts))

    def patience(self) -> float:
        """How long the next attempt may take: all the time for the first PLACES, so that the others take turns."""
        patient = sum(attempt.patience_seconds == self.times.patience for attempt in self.attempts)
        return self.times.patience if patient < PLACES else self.times.hanging


def _send(receiver: Receiver, event: Row[Any], seconds: float) -> str:
    """Send an event that was taken; why that failed, empty if it did not."""
    at = event.made_at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    message = json.dumps({"id": event.id, "event": event.event, "at": at, **event.body}).encode()
    try:
        failure = receiver.deliver(message, seconds)
    except Exception as error:
        # Whatever is wrong with one event, the others are sent. The text of such an error may contain the receiver's
        # URL, which may have a password: only the type is told.
        failure = type(error).__name__
        _log.error("job_event_delivery_broke", id=event.id, error=failure)
    if failure:
        fields = {"id": event.id, "what": event.event, "tries": event.tries}
        _log.warning("job_event_not_sent", receiver=receiver.shown, error=failure, **fields)
    return failure
