"""Sends the events of jobs to the farm's own receiver: each at least once, and none waits for another that hangs.

The transaction that ends a frame only writes a row (store/job_events.py). The time of an event's next try is committed
before the event is sent: a process that dies while it sends leaves the event to the next process, which sends it again
under the same id. Events that were never tried and those that failed before have places of their own, so that what
fails again and again takes no place of what is new. An attempt that hangs gives its place to the next event and goes on
beside that.
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

A try ends sooner (SendTimes), so that no process sends an event while another's try of it is under way."""
LONGEST_REPEAT_SECONDS = 3600.0
"""The longest time from one try of an event to the next."""
MOST_TRIES = 30
"""An event that was tried so often is given up once its next try would be due."""
LONGEST_AGE_SECONDS = 86_400.0
"""An event that is older is given up."""
MOST_DROPPED = 1_000
"""How many events one call gives up at most."""


@dataclass(frozen=True, slots=True)
class SendTimes:
    """The bounds of sending, in seconds."""

    patience: float = 10.0
    """How long a receiver may take for an event."""
    hanging: float = 2.0
    """The time after which an attempt counts as one that hangs, which takes no place of others any more.

    While PLACES attempts have ``patience``, a further one has this time only."""
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
    """Send the due events of a facility (None: of all), and give up what is too old.

    Returns how many events were ``sent``, how many ``failed`` and will be tried again, and how many were ``dropped``;
    ``count`` is called with each of these words and a number, from the calling thread. ``begins_no_more`` is called
    once no further attempt will begin: from then on another process may send, while this one waits for attempts that
    hang. Without a receiver, which other workers may have, events are only given up. Raises SQLAlchemy's errors; events
    that were taken and not sent then are due again.
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
    # Threads for two lanes, each of PLACES attempts and as many that hang. The exit stack calls begins_no_more after an
    # error, too.
    with ThreadPoolExecutor(4 * PLACES, thread_name_prefix="job-events") as threads, ExitStack() as beginning:
        beginning.callback(begins_no_more)
        begins = True
        while True:
            ended = [attempt for lane in lanes for attempt in lane.take_out_ended()]
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
    """Write down what became of ``ended``, and take due events for the free places of ``lanes``, in one transaction.

    Returns each event with its lane."""
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
    """One try to send an event."""

    event: Row[Any]
    failure: Future[str]
    """Why the try failed; empty if it did not."""
    patience_seconds: float
    """How long the receiver may take."""
    began: float = field(default_factory=monotonic)
    """When the try began, on the monotonic clock."""


@dataclass(slots=True)
class _Lane:
    """The attempts under way for events that were never tried, or for all others: each kind has a lane of its own.

    Used by the thread of send_events alone; the threads of attempts know only their event."""

    again: bool
    """Whether the lane has the events that were tried before."""
    times: SendTimes
    attempts: list[_Attempt] = field(default_factory=list)
    """The attempts that were under way at the last look, those that hang among them."""

    def take_out_ended(self) -> list[_Attempt]:
        """Remove the attempts that have ended, and return them."""
        ended = [attempt for attempt in self.attempts if attempt.failure.done()]
        self.attempts = [attempt for attempt in self.attempts if attempt not in ended]
        return ended

    def free_places(self) -> int:
        """How many attempts may begin: up to PLACES that do not hang, and up to twice as many in all."""
        now = monotonic()
        brisk = sum(now - attempt.began < self.times.hanging for attempt in self.attempts)
        return min(PLACES - brisk, 2 * PLACES - len(self.attempts))

    def patience(self) -> float:
        """How many seconds the next attempt may take: ``patience`` while fewer than PLACES have it, else ``hanging``,
        so that the places beside those make room for one another."""
        patient = sum(attempt.patience_seconds == self.times.patience for attempt in self.attempts)
        return self.times.patience if patient < PLACES else self.times.hanging


def _send(receiver: Receiver, event: Row[Any], seconds: float) -> str:
    """Send an event, in at most ``seconds``, and return why that failed; the empty text if it did not. An
    error of the receiver is such a reason and is not raised."""
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
