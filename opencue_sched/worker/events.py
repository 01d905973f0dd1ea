"""How a worker hears what PostgreSQL notifies it of (docs/accounting.md); what it does then is in handlers.py.

Every worker listens: releasing twice, loading caps twice and waking twice are harmless, and no worker depends on
another. What nobody heard, because the connection was lost, is read again once there is one (NotificationListener).
What a store in trouble kept a worker from doing is made up for by the next recompute, reseed of caps and sweep.
"""

from __future__ import annotations

import math
import select
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import psycopg2
import structlog
from psycopg2.extensions import ISOLATION_LEVEL_AUTOCOMMIT, quote_ident
from pydantic import ConfigDict, TypeAdapter
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.background import PeriodicThread
from opencue_sched.clients.postgres_sessions import OWN_SESSIONS, SHARED, new_channel, sessions_of
from opencue_sched.clients.store_errors import is_trouble
from opencue_sched.clock import boot_clock
from opencue_sched.errors import NotReady, SchedulerError
from opencue_sched.worker import metrics

log = structlog.get_logger(__name__)

RELEASE_CHANNEL, CAPS_CHANNEL, WORK_CHANNEL = "opencue_sched_release", "opencue_sched_caps", "opencue_sched_work"
HANDED_BACK_CHANNEL, BACKLOG_CHANNEL = "opencue_sched_handed_back", "opencue_sched_backlog"
"""Sent with the commit of what they tell. The payload is an object of lists of ids, in the order of the channels:
``hosts`` and perhaps ``procs``; ``vertices``; ``shows``; ``shows``; one of ``shows``, ``jobs`` and ``layers``."""
_PAYLOAD = TypeAdapter(dict[str, list[str]], config=ConfigDict(strict=True))

_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.2, 1.0
"""Pauses between attempts to connect: what happens between PostgreSQL's return and the next one is not heard."""
_POLL_SECONDS = 0.5
"""How long a listener waits for notifications before it looks whether it is to stop."""
SAVED = 2
"""How many calls of handlers, and how many sweeps for freed hosts, a quiet time saves: where something happens now and
then, what follows soon after it need not wait."""
HEARD_TOGETHER_SECONDS = 0.04
"""The time from one call of handlers to the next in the long run. On a full farm, where frames end all the time, what
is heard in a 25th of a second shares a call, and with it a round trip to Redis."""
PROOF_SECONDS = 60.0
"""The time from one proof that notifications are heard to the next, and for which a listener that is deaf waits."""


def _next_due(due: float, now: float, period: float) -> float:
    """When something may be done again that is done ``now`` and was due at ``due``: once a ``period`` in the long run,
    and after a quiet time at once for as often as SAVED says. The result may lie in the past.

    What is done before it is due is due again a period from now, no later. All are seconds of one clock.
    """
    return min(now, max(due, now - SAVED * period)) + period


class _Deaf(SchedulerError):
    """A notification that this process sent was not heard."""


class NotificationListener(PeriodicThread):
    """A thread with a connection of its own, made again when it is lost, with growing pauses while that fails.

    The handler of a channel is called in this thread, with the lists of ids as keyword arguments: keep it short. What
    is heard after a quiet time is passed on at once, and of what follows all that is heard in HEARD_TOGETHER_SECONDS
    shares a call.
    ``on_reconnect()`` is called once it hears again after it could not: notifications may have been missed.

    A connection proves that it hears before anything is set for its session, and once a minute from then on. Where it
    is deaf, that is said once a minute, in the log and by ``on_deaf(True)``; ``on_deaf(False)`` says that it hears.
    """

    def __init__(
        self,
        engine: Engine,
        handlers: Mapping[str, Callable[..., object]],
        *,
        on_reconnect: Callable[[], object] = bool,
        on_deaf: Callable[[bool], object] = bool,
    ) -> None:
        super().__init__(
            "notifications",
            self._listen,
            failed="listener_cannot_connect",
            retry_seconds=_FIRST_RETRY_SECONDS,
            longest_retry_seconds=_LONGEST_RETRY_SECONDS,
        )
        self._engine = engine
        self._handlers = handlers
        self._on_reconnect = on_reconnect
        self._on_deaf = on_deaf
        # Touched by this thread alone.
        self._missed = False

    def _listen(self) -> float:
        """Listen until the connection is lost, or the thread is to end; returns how long to wait before the next."""
        # Until it listens: the first attempt of a process that has just filled its caches may fail as well.
        missed, self._missed = self._missed, True
        proof = new_channel()
        try:
            connection = self._connect(proof)
        except _Deaf:
            metrics.record_event("listener_deaf")
            log.error("listener_is_deaf", reason=SHARED, cure=OWN_SESSIONS)
            self._on_deaf(True)
            return PROOF_SECONDS
        try:
            self._on_deaf(False)
            if missed:
                self._call("reconnect", self._on_reconnect)
            self._hear(connection, proof)
        except (psycopg2.Error, OSError, _Deaf) as error:
            metrics.record_event("listener_lost")
            log.warning("listener_lost_connection", error=str(error).strip())
        finally:
            connection.close()
        return _FIRST_RETRY_SECONDS

    def _connect(self, proof: str) -> Any:
        """A connection of the driver's own that listens, also to the channel ``proof``, made as the engine makes them.
        Raises _Deaf."""
        try:
            pooled = self._engine.raw_connection()
            connection: Any = pooled.driver_connection
            pooled.detach()  # the pool has room for another, and never closes this one
            connection.set_isolation_level(ISOLATION_LEVEL_AUTOCOMMIT)
            if not sessions_of(self._engine).prove(connection, proof):
                connection.close()
                raise _Deaf(SHARED)
            with connection.cursor() as cursor:
                cursor.execute("SET application_name = 'opencue-sched-listener'; SET statement_timeout = '5s'")
                cursor.execute("; ".join(f"LISTEN {quote_ident(channel, cursor)}" for channel in self._handlers))
        except (psycopg2.Error, SQLAlchemyError) as error:
            metrics.record_event("listener_connect_failed")
            raise SchedulerError(str(error).strip()) from error
        return connection

    def _hear(self, connection: Any, proof: str) -> None:
        """Call handlers until the thread is to end. Raises _Deaf when a proof was not heard in time."""
        # Keep-alives end a connection whose other end vanished (clients/postgres.py).
        # select() knows no file above 1023, and a process with a connection to each of many hosts has more.
        news = select.poll()
        news.register(connection, select.POLLIN)
        sessions = sessions_of(self._engine)
        next_proof, heard_by = boot_clock() + PROOF_SECONDS, math.inf
        next_call = -math.inf
        while not self.pause(max(0.0, next_call - boot_clock())):
            if news.poll(1000 * _POLL_SECONDS):
                connection.poll()
            elif boot_clock() > heard_by:
                raise _Deaf("a notification that this process sent itself was not heard")
            payloads = defaultdict[str, list[str]](list)
            while connection.notifies:
                told = connection.notifies.pop(0)
                if told.channel == proof:
                    heard_by = math.inf
                elif told.channel in self._handlers:  # a session of a pool may listen for a program before us
                    payloads[told.channel].append(told.payload)
            for channel, of_channel in payloads.items():
                self._call(channel, self._handlers[channel], of_channel)
            if payloads:
                next_call = _next_due(next_call, boot_clock(), HEARD_TOGETHER_SECONDS)
            if boot_clock() > next_proof:
                sessions.notify(proof)
                next_proof, heard_by = boot_clock() + PROOF_SECONDS, boot_clock() + sessions.proof_seconds

    def _call(self, name: str, handler: Callable[..., object], payloads: Sequence[str] = ("{}",)) -> None:
        """Call the handler once with all that the payloads name. A payload that makes no sense, or with which the
        handler fails, costs its own notification only: then there is a call for each."""
        try:
            named = defaultdict[str, dict[str, None]](dict)
            for payload in payloads:
                for ids_of, ids in _PAYLOAD.validate_json(payload).items():
                    named[ids_of] |= dict.fromkeys(ids)
            handler(**{ids_of: list(ids) for ids_of, ids in named.items()})
        except Exception as error:
            # A store that is away fails all that come meanwhile: no payload, and no place in our code, is at fault.
            store_is_away = is_trouble(error) or isinstance(error, NotReady)
            if len(payloads) > 1 and not store_is_away:
                for payload in payloads:
                    self._call(name, handler, [payload])
                return
            metrics.record_event("notification_failed", len(payloads))
            log_it = log.warning if store_is_away else log.exception
            log_it("notification_failed", channel=name, error=str(error))
        else:
            metrics.record_event(f"notification_{name}", len(payloads))


DEBOUNCE_SECONDS = 0.01
"""The time from one sweep for new work to the next: a burst of notifications costs a sweep each hundredth of a
second."""
COLLECT_SECONDS = 0.14
"""The time from one sweep for freed hosts to the next that has no other reason, in the long run. On a full farm, where
hosts come free all the time, those of a seventh of a second share a sweep, and with it a pass."""


class Waker(PeriodicThread):
    """Turns notifications - new work, freed hosts, changed caps - into sweeps: the first at once, those that follow
    soon share one. While a pass is under way what is noted is kept (`hold`).

    ``sweep(show ids, host ids)`` returns after how many seconds at most it wants the same hosts again, 0: never. What
    is noted during a sweep goes into the next. What a failed sweep was told is left to the periodic ones: a cluster
    that news may wake sleeps no longer than EMPTY_SLEEP_SECONDS (30 s) or ``cluster_saturated_sleep``.
    """

    def __init__(self, sweep: Callable[[frozenset[str], frozenset[str]], float]) -> None:
        super().__init__(
            "waker",
            self.sweep_if_due,
            failed="wake_up_left_to_the_sweep",
            retry_seconds=0.25,
            longest_retry_seconds=2.0,
        )
        self._sweep = sweep
        # When the next sweep for shows, and for hosts alone, may be made (monotonic); the latter lies in the past by
        # what is saved. Used by the waker's thread alone.
        self._debounce_until = self._collect_until = -math.inf
        # What was noted since the last sweep, and passes under way: any thread notes, so all is under the lock.
        self._lock = threading.Lock()
        self._shows: set[str] = set()
        self._hosts: set[str] = set()
        self._passes_under_way = 0

    def hold(self) -> Callable[[], None]:
        """Make no sweep until what this returns is called, once or again: a pass is under way, and has its clusters
        claimed. What is noted meanwhile is swept for at once then, unless it was taken in."""
        with self._lock:
            self._passes_under_way += 1
        let_go = iter([True])

        def release() -> None:
            with self._lock:
                self._passes_under_way -= next(let_go, False)
            self.wake()

        return release

    def took_in_hosts(self) -> None:
        """Forget the hosts noted by now: a pass over all that could use them is about to look at them."""
        with self._lock:
            self._hosts.clear()

    def note(self, hosts: Collection[str] = (), *, shows: Collection[str] = ()) -> None:
        """Note hosts on which something was given back, and shows that have new work or more headroom."""
        with self._lock:
            self._hosts.update(hosts)
            self._shows.update(shows)
        self.wake()

    def sweep_if_due(self) -> float | None:
        """Sweep for what was noted, unless a pass is under way or the last sweep was a moment ago. Returns after how
        many seconds to look again; None where only news, or the end of a pass, changes anything."""
        now = time.monotonic()
        with self._lock:
            if self._passes_under_way or not (self._shows or self._hosts):
                return None
            until = self._debounce_until if self._shows else self._collect_until
            if now < until:
                return until - now
            shows, hosts = frozenset(self._shows), frozenset(self._hosts)
            self._shows.clear()
            self._hosts.clear()
        self._debounce_until = now + DEBOUNCE_SECONDS
        if hosts:
            # A sweep for shows takes hosts along, perhaps before theirs is due.
            self._collect_until = _next_due(self._collect_until, now, COLLECT_SECONDS)
        again = self._sweep(shows, hosts)
        if again <= 0:
            return None
        self._collect_until = now + min(COLLECT_SECONDS, again)
        with self._lock:
            self._hosts.update(hosts)
        return again
