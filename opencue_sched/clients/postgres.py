"""The database engine of a process. Create it after a fork, never before."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from select import POLLIN, POLLOUT, poll
from time import monotonic
from typing import Any, Concatenate, ParamSpec, TypeVar

import psycopg2
from psycopg2 import _psycopg
from psycopg2.extensions import POLL_OK, POLL_WRITE
from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event
from sqlalchemy.exc import DBAPIError

from opencue_sched.clients.postgres_sessions import Sessions, sessions_of, set_up_sessions
from opencue_sched.clients.prepared import is_outdated, prepare_on
from opencue_sched.settings import Settings

_T = TypeVar("_T")
_P = ParamSpec("_P")
_TAKES_NO_WRITES = "25006"
"""SQLSTATE read_only_sql_transaction: what a server answers to a write after it became a standby."""

OURS = "opencue-sched"
"""How the name of every session of ours begins: the guard on procs knows by it who may book frames of managed shows."""

CONNECT_SECONDS = 5
"""Time to make a connection, or to get one of the pool: shorter than a leader's lease lives after a missed renewal."""
STATEMENT_SECONDS = 30
"""How long a statement may take before the server cancels it. The longest of ours take a second: one that is cancelled
says that the farm's data are out of hand."""

SESSION_SETTINGS = {"TimeZone": "UTC", "jit": "off"}
"""What every session of ours has set, besides a statement time-out. No just-in-time compiler: our statements are short,
and it compiles for seconds what a planner mistook."""

DEAD_CONNECTION = {
    "keepalives": 1,
    "keepalives_idle": 3,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 6000,
}
"""Parameters of libpq that find out that a server vanished: a connection ends 6 s after what it sent was last
acknowledged, or what it waits for last came. A server, or a proxy, that acknowledges and answers nothing is not found
out by TCP."""


def make_engine(
    settings: Settings,
    *,
    application_name: str = OURS,
    pool_size: int | None = None,
    connect_seconds: int = CONNECT_SECONDS,
    statement_seconds: int = STATEMENT_SECONDS,
) -> Engine:
    """An engine as engine_at() makes it, with a pool and a statement time-out.

    A connection whose server takes no writes is not used again, nor are those made before it: behind a proxy, or an
    address that moves, only a new connection leads to the server that takes writes, and a standby answers every ping.
    """
    engine = engine_at(
        settings.sqlalchemy_url,
        application_name=application_name,
        connect_seconds=connect_seconds,
        session_settings={**SESSION_SETTINGS, "statement_timeout": f"{statement_seconds}s"},
        pool_size=pool_size or settings.database.pool_size,
        max_overflow=0,
        pool_pre_ping=True,
        pool_recycle=3600,
        pool_timeout=CONNECT_SECONDS,
    )
    # The server is pinged only when something waits on the connection: a message, its end, or the kernel's word that
    # the server vanished (DEAD_CONNECTION). A ping before each use is a third of an idle farm's statements.
    ping = engine.dialect.do_ping
    engine.dialect.do_ping = lambda connection: not _readable(connection) or ping(connection)  # type: ignore
    event.listen(engine, "handle_error", _leave_a_standby)
    event.listen(engine, "checkin", _forget_isolation)
    prepare_on(engine, sessions_of(engine))
    return engine


def engine_at(
    url: str,
    *,
    application_name: str,
    connect_seconds: int = CONNECT_SECONDS,
    session_settings: Mapping[str, str] = SESSION_SETTINGS,
    **pool: Any,
) -> Engine:
    """An engine whose connections have a connect time-out and keep-alives, and whose sessions have
    ``session_settings`` (clients/postgres_sessions.py). ``pool`` are SQLAlchemy's options of pools.

    ``application_name`` begins with OURS; whatever the URL or PGAPPNAME says, sessions bear it.
    """
    named = {"connect_timeout": connect_seconds, "application_name": application_name, **DEAD_CONNECTION}
    engine = create_engine(url, connect_args=named, **pool)
    event.listen(engine, "do_connect", lambda _dialect, _record, given, named: connect(*given, **named))

    def another() -> Any:
        given, of_url = engine.dialect.create_connect_args(engine.url)
        return connect(*given, **{**of_url, **named})

    set_up_sessions(engine, Sessions(session_settings, another, proof_seconds=connect_seconds))
    return engine


PASSING_REFUSALS = ("57P03", "53300")
"""SQLSTATEs of connections that PostgreSQL refuses now: it is about to start or to stop, or has too many."""


class RefusedConnection(psycopg2.OperationalError):
    """The server, not the way to it, refused a connection. ``pgcode`` is its SQLSTATE, as of any other error."""

    pgcode = ""

    def __init__(self, text: str, state: str) -> None:
        super().__init__(text)
        self.pgcode = state


def connect(*given: Any, **named: Any) -> Any:
    """psycopg2.connect, whose failure is always an error of the driver that says why.

    A server that refuses a connection - it is about to start or to stop, has too many, or knows no such user - says so
    in its own language and encoding. The driver reads UTF-8, and raises UnicodeDecodeError for anything else, or, on
    early releases of Python 3.11, its own error without a word. What it means in any language is its SQLSTATE.
    """
    cause: Exception
    try:
        return psycopg2.connect(*given, **named)
    except UnicodeDecodeError as error:
        cause, text = error, error.object.decode(errors="backslashreplace")
    except psycopg2.OperationalError as error:
        cause, text = error, str(error)
        if error.args and _BEFORE_WHAT_A_SERVER_SAYS not in text:
            raise
    state = _sqlstate_of_refusal(*given, **named)
    raise RefusedConnection(text or f"{_UNREADABLE} (SQLSTATE {state or 'unknown'})", state) from cause


_UNREADABLE = "the server refused in an encoding other than UTF-8: see its log"
_BEFORE_WHAT_A_SERVER_SAYS = ":  "
"""The text that libpq writes between the severity and the text of a server's message, and nowhere in messages of its
own."""
_SQLSTATE_ALONE = 3
"""libpq's PQERRORS_SQLSTATE: an error is told as the severity and the SQLSTATE, without its text."""


def _sqlstate_of_refusal(*given: Any, **named: Any) -> str:
    """Connect once more, and return the SQLSTATE with which the server refuses; empty where it does not do so in time.

    Where several hosts are tried, or TLS and none, a SQLSTATE that passes with time counts.

    The driver knows none, because libpq has only the text of a connection's failure: it is made to write the SQLSTATE
    into that. It can be told so only between the beginning and the end of connecting, which needs a connection that is
    made in steps.
    """
    libpq = ctypes.PyDLL(_psycopg.__file__)
    libpq.PQsetErrorVerbosity.argtypes = [ctypes.c_void_p, ctypes.c_int]
    libpq.PQerrorMessage.argtypes, libpq.PQerrorMessage.restype = [ctypes.c_void_p], ctypes.c_char_p
    deadline = monotonic() + CONNECT_SECONDS
    try:
        connection = psycopg2.connect(*given, **named, async_=True)
    except psycopg2.OperationalError:
        return ""  # the server, or the way to it, went away since
    try:
        libpq.PQsetErrorVerbosity(connection.pgconn_ptr, _SQLSTATE_ALONE)
        while (wanted := connection.poll()) != POLL_OK and (left := deadline - monotonic()) > 0:
            progress = poll()
            progress.register(connection.fileno(), POLLOUT if wanted == POLL_WRITE else POLLIN)
            progress.poll(1000 * left)
    except (psycopg2.OperationalError, UnicodeDecodeError):
        # Read from libpq itself: the severity, too, is in the server's language and encoding.
        told = libpq.PQerrorMessage(connection.pgconn_ptr).decode(errors="replace")
        states = re.findall(r":  ([0-9A-Z]{5})$", told, re.MULTILINE)
        return next((state for state in states if state in PASSING_REFUSALS), states[-1] if states else "")
    finally:
        connection.close()
    return ""


def _readable(connection: Any) -> bool:
    """Whether the server has said something that nobody has read, or has ended the connection."""
    unread = poll()
    unread.register(connection.fileno(), POLLIN)
    return bool(unread.poll(0))


def _leave_a_standby(context: ExceptionContext) -> None:
    """SQLAlchemy's hook behind an error: a connection to a server that takes no writes counts as disconnected."""
    if getattr(context.original_exception, "pgcode", None) == _TAKES_NO_WRITES:
        context.is_disconnect = True


def _forget_isolation(connection: Any, _record: object) -> None:
    """Leave the isolation level to the server, as a new connection does.

    SQLAlchemy sets one when a connection that had another is given back, and from then on psycopg2 resets the session
    whenever it leaves autocommit: after every use with AUTOCOMMIT. That is a round trip for nothing, and what fails in
    it reaches whoever had the connection as an error of the driver itself, and costs the pool a place.
    """
    if connection is not None and not connection.closed:
        connection.isolation_level = None


def reading(engine: Engine) -> Connection:
    """A connection for statements that only read: each is a transaction of its own, without BEGIN and ROLLBACK."""
    return engine.connect().execution_options(isolation_level="AUTOCOMMIT")


def ask(engine: Engine, read: Callable[Concatenate[Connection, _P], _T], *given: _P.args, **named: _P.kwargs) -> _T:
    """The answer of ``read``, a function that only reads, and has read all when it returns. ``read`` is called once
    more where a table was altered since a statement of it was planned."""

    def on_a_connection() -> _T:
        with reading(engine) as connection:
            return read(connection, *given, **named)

    return planned_anew(on_a_connection)


def planned_anew(work: Callable[_P, _T], *given: _P.args, **named: _P.kwargs) -> _T:
    """What ``work`` returns, which sends one transaction, or reads. ``work`` is called once more where a table was
    altered since a statement of it was planned."""
    try:
        return work(*given, **named)
    except DBAPIError as error:
        if not is_outdated(error):
            raise
    return work(*given, **named)


@contextmanager
def repeatable_read(engine: Engine) -> Iterator[Connection]:
    """A transaction whose statements all see the same moment."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection, connection.begin():
        yield connection
