"""What every session of ours has set, and whether a session is ours for as long as its connection lasts.

Nothing is set at connecting: a pool in between (PgBouncer) refuses the parameter ``options``, or drops it without a
word. It is set by statement. Where the pool gives every transaction another session of the server, as PgBouncer does in
its transaction mode, a session is not ours: what is set there stays behind for whichever program gets it next, and
notifications go astray. So a connection proves first that it hears, and where it is deaf each transaction sets for
itself alone.
"""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Engine, event

SHARED = (
    "a connection pool in between gives every transaction another session of PostgreSQL, and no notification is heard"
)
"""What is wrong where no session is ours."""
OWN_SESSIONS = "let the pool keep a session for each connection (PgBouncer: pool_mode = session), or connect directly"
"""What to do about it."""

_AUTOCOMMIT, _IN_TRANSACTION = "false", "true"
"""What set_config() is told: set for the session, or for the transaction alone."""


class Sessions:
    """Sets up the connections of an engine. ``settings`` are the server's parameters by name.

    ``connect`` makes a connection of the driver's as the engine does; a proof waits for ``proof_seconds``.

    Thread-safe: at worst two connections prove the same thing.
    """

    def __init__(self, settings: Mapping[str, str], connect: Callable[[], Any], *, proof_seconds: float) -> None:
        self.settings = settings
        self.proof_seconds = proof_seconds
        self._connect = connect
        self._own: bool | None = None
        """Whether sessions are ours; None before the first connection. Written by the thread that has a proof."""

    @property
    def own(self) -> bool:
        """Whether a session is ours for as long as its connection lasts. True until the contrary is known."""
        return self._own is not False

    def set_up(self, connection: Any) -> None:
        """Set what is to be set for the session of a new connection of the driver's, if the session is ours."""
        connection.autocommit = True
        with connection.cursor() as cursor:
            # A pool in between tells a process id of its own making. Where it is the server's, nothing is in between.
            cursor.execute(f"{self._setting(_AUTOCOMMIT)} WHERE pg_backend_pid() = %s", (connection.info.backend_pid,))
            if cursor.fetchone() is not None:
                self._own = True
            else:
                if self._own is None:
                    self.prove(connection)
                if self._own:
                    cursor.execute(self._setting(_AUTOCOMMIT))
        connection.autocommit = False

    def prove(self, connection: Any, channel: str = "") -> bool:
        """Find out whether a connection in autocommit hears a notification that this process sends by another one.

        ``channel`` is one that the connection goes on listening to, if its session is ours. The notification goes by
        another connection, because what a connection sends itself it may hear where sessions are shared, too.
        """
        heard = channel or new_channel()
        with connection.cursor() as cursor:
            cursor.execute(f"LISTEN {heard}")
            self.notify(heard)
            self._own = _hears(connection, heard, self.proof_seconds)
            if not (channel and self._own):
                cursor.execute(f"UNLISTEN {heard}")
        return self._own

    def notify(self, channel: str) -> None:
        """Notify the listeners to ``channel``, by a connection made for that."""
        other = self._connect()
        try:
            other.autocommit = True
            with other.cursor() as cursor:
                cursor.execute(f"NOTIFY {channel}")
        finally:
            other.close()

    def for_transaction(self, conn: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
        """SQLAlchemy's hook before a statement: where sessions are not ours, the first of a transaction brings what is
        set, in the same message; and so does each where every statement is a transaction."""
        if self.own:
            return statement, parameters
        driver = conn.connection.dbapi_connection
        if driver.autocommit or driver.info.transaction_status == _IDLE:
            return f"{self._setting(_IN_TRANSACTION)}; {statement}", parameters
        return statement, parameters

    def _setting(self, local: str) -> str:
        """The statement that sets everything. Names and values are constants of ours."""
        return "SELECT " + ", ".join(
            f"set_config('{name}', '{value}', {local})" for name, value in self.settings.items()
        )


_IDLE = 0
"""libpq's PQTRANS_IDLE: the next statement begins a transaction."""


def set_up_sessions(engine: Engine, sessions: Sessions) -> None:
    """Have the engine's connections set up by ``sessions``, which `sessions_of` answers from now on."""
    engine.update_execution_options(sessions=sessions)
    event.listen(engine, "connect", lambda connection, _record: sessions.set_up(connection))
    event.listen(engine, "before_cursor_execute", sessions.for_transaction, retval=True)


def sessions_of(engine: Engine) -> Sessions:
    """The Sessions that set up the connections of an engine that make_engine() made."""
    found: Sessions = engine.get_execution_options()["sessions"]
    return found


def new_channel() -> str:
    """The name of a channel that nobody else listens to."""
    return f"opencue_sched_heard_{secrets.token_hex(8)}"


def _hears(connection: Any, channel: str, seconds: float) -> bool:
    """Whether a connection of the driver's gets a notification of ``channel`` within ``seconds``."""
    news = select.poll()
    news.register(connection, select.POLLIN)
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if news.poll(1000 * left):
            connection.poll()
        while connection.notifies:
            if connection.notifies.pop(0).channel == channel:
                return True
    return False
