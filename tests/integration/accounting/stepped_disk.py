"""A disk that may be slow: COMMITs of bookings that PostgreSQL has taken and does not finish until the test says so.

The server finishes such a COMMIT whatever becomes of the process that sent it, and however long that takes. It hangs
for real; how long it does is told by the test's clock.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg2
from sqlalchemy import Connection, Engine, create_engine, event, text

from tests.integration.accounting.stepped_booker import Attempt
from tests.integration.accounting.stepping import Actor, Clock, Killed, boundary
from tests.kit.polling import eventually

HANGS = "COMMIT hangs"
"""Where an actor waits that sent one."""

_ENDED_SECONDS = 10.0
_INSTALL = """
    CREATE FUNCTION wait_for_the_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF current_setting('test.slow', true) = 'on' THEN PERFORM pg_advisory_xact_lock(1); END IF;
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER wait_for_the_disk AFTER INSERT ON proc DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION wait_for_the_disk();
"""
_WAITS = text("SELECT 1 FROM pg_locks WHERE pid = :pid AND locktype = 'advisory' AND NOT granted")
_THERE = text("SELECT 1 FROM pg_stat_activity WHERE pid = :pid")
_AT_WORK = text("SELECT 1 FROM pg_stat_activity WHERE pid = :pid AND state = 'active'")
_NEVER_SECONDS = 1e9
"""Longer than any COMMIT hangs by the clock of PostgreSQL."""


@dataclass(eq=False)
class Hanging:
    """A COMMIT that is not finished: PostgreSQL's process, what it commits, and since when by the test's clock."""

    backend: int
    attempts: Sequence[Attempt]
    since: float


class SteppedDisk:
    """Of one database; one COMMIT hangs at a time.

    Whether a COMMIT has hung for some seconds is asked of PostgreSQL, whose clock does not follow the test's. So the
    question is changed on its way: to whether one hangs at all, where one does for that long by the test's clock.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._clock = clock
        self._at_once = create_engine(engine.url, isolation_level="AUTOCOMMIT", pool_size=1)
        self._lock = self._at_once.connect()
        self._lock.execute(text(_INSTALL))
        self._hanging: Hanging | None = None
        event.listen(engine, "before_cursor_execute", self._ask_by_the_clock, retval=True)

    def close(self) -> None:
        self._lock.close()
        self._at_once.dispose()

    def change(self, booker: Actor | None, attempts: Iterable[Attempt]) -> None:
        """If a COMMIT hangs it is finished; else the next one of this booker will hang."""
        if self.slow:
            self.answer()
        elif booker is not None:
            its = [attempt for attempt in attempts if attempt.actor is booker]
            booker.committing = partial(self.commit_slowly, attempts=its)

    def commit_slowly(self, connection: Connection, attempts: Sequence[Attempt]) -> None:
        """Send the COMMIT of an actor, which waits for it: until somebody calls ``answer``, or the actor goes on."""
        session: Any = connection.connection.driver_connection
        hanging = Hanging(session.info.backend_pid, attempts, self._clock.now)
        if self._hanging is not None or not self._sees(_THERE, hanging):
            return
        with session.cursor() as cursor:
            cursor.execute("SET LOCAL test.slow = 'on'")
        self._lock.execute(text("SELECT pg_advisory_lock(1)"))
        committing = threading.Thread(target=_commit, args=(session,), daemon=True)
        committing.start()
        eventually(lambda: self._sees(_WAITS, hanging) or not committing.is_alive())
        if not committing.is_alive():  # there was nothing to write
            self._lock.execute(text("SELECT pg_advisory_unlock_all()"))
            return
        self._hanging = hanging
        for attempt in attempts:
            attempt.backend, attempt.hanging = 0, True
        try:
            boundary(HANGS)
            if self._hanging is hanging:
                self.answer()
        except Killed:
            with socket.socket(fileno=socket.dup(session.fileno())) as wire:
                wire.shutdown(socket.SHUT_RDWR)
            raise
        finally:
            committing.join(_ENDED_SECONDS)

    def answer(self) -> None:
        """What hangs is committed."""
        hanging, self._hanging = self._hanging, None
        if hanging is None:
            return
        self._lock.execute(text("SELECT pg_advisory_unlock_all()"))
        eventually(lambda: not self._sees(_AT_WORK, hanging))
        for attempt in hanging.attempts:
            attempt.hanging, attempt.decided = False, True

    @property
    def slow(self) -> bool:
        return self._hanging is not None

    def _ask_by_the_clock(
        self, connection: Connection, cursor: object, statement: str, parameters: Any, *rest: object
    ) -> tuple[str, Any]:
        if "pg_stat_activity" in statement and isinstance(parameters, Mapping) and "seconds" in parameters:
            hanging = self._hanging
            hangs = hanging is not None and self._clock.now - hanging.since >= parameters["seconds"]
            parameters = {**parameters, "seconds": 0.0 if hangs else _NEVER_SECONDS}
        return statement, parameters

    def _sees(self, query: Any, hanging: Hanging) -> bool:
        return self._lock.execute(query, {"pid": hanging.backend}).scalar() is not None


def _commit(session: Any) -> None:
    with suppress(psycopg2.Error):
        session.commit()
