"""Statements that PostgreSQL keeps planned: each connection has them prepared when it sends them first.

What a pass sends is short and joins many tables: without this PostgreSQL takes longer to read and to plan it than to do
it. psycopg2 sends text alone, so preparing is done by text: a statement that is marked by `prepare` goes out as
``EXECUTE``, the first time on a connection behind its ``PREPARE``, in the same message. Nobody else sees a difference:
hooks and errors have the statement as it was written.

Where sessions are not ours (a pool that gives every transaction another one) statements go out as they are. A plan that
the server refuses, because a table was altered so that the answer has other types, does not know, because it was
discarded, or has already, because another process was given the session, is an error once (`is_outdated`): from then on
every connection prepares its statements anew, so that a caller that may send again need only do so.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sqlalchemy import Engine, ExceptionContext, TextClause, event

from opencue_sched.clients.postgres_sessions import Sessions

_OPTION = "opencue_sched_prepared"
"""The execution option of statements to prepare, and the key in a connection's ``info`` of what it has prepared."""
_OUTDATED = ("0A000", "26000", "42P05")
"""SQLSTATEs of a prepared statement that cannot be used any more: the answer has other types by now, the session does
not have the statement, or another process has prepared a statement of the same name in the session."""
_CAN_BE_PREPARED = re.compile(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE)\b")
"""How the statements begin that PostgreSQL prepares."""
_PARAMETER = re.compile(r"%\((\w+)\)s")
"""A parameter as psycopg2 writes it; its name is the first group."""
_STATEMENTS_KEPT = 500
"""How many messages this process remembers with their parts; there are some dozens."""

REPLANNED_SECONDS = 60.0
"""How long plans are kept. One that was made when tables were next to empty might read too much of them when they have
grown, until PostgreSQL analyses them: as long as that mostly takes, and for a thousandth of its time."""


def prepare(statement: TextClause) -> TextClause:
    """The statement, or statements with semicolons between, to be prepared by each connection that sends it. No text in
    it has a semicolon, and PostgreSQL can tell the type of each parameter from where it stands first."""
    return statement.execution_options(**{_OPTION: True})


def is_outdated(error: BaseException | None) -> bool:
    """Whether a statement failed because its plan is no longer what the connection has: sent again, it is planned
    anew."""
    return getattr(getattr(error, "orig", None), "pgcode", None) in _OUTDATED


@dataclass(frozen=True, slots=True)
class _Part:
    """One statement of a message."""

    name: str
    """The name of the prepared statement; empty for a statement that cannot be prepared."""
    execute: str
    """What is sent once the statement is prepared, or the statement itself where it cannot be."""
    prepare: str = ""
    """What prepares the statement."""


@dataclass(frozen=True, slots=True)
class _Message:
    """What SQLAlchemy sends at once: one statement, or several with semicolons between."""

    parts: tuple[_Part, ...]
    names: frozenset[str]
    """The names of the prepared statements."""
    known: str
    """The text to send where all statements are prepared."""


@lru_cache(maxsize=_STATEMENTS_KEPT)
def _cut(message: str) -> _Message:
    """The parts of a message. Cached: passes send the same few messages over and over."""
    parts = tuple(_part(statement.strip()) for statement in message.split(";") if statement.strip())
    names = frozenset(part.name for part in parts if part.name)
    return _Message(parts, names, "; ".join(part.execute for part in parts))


@lru_cache(maxsize=_STATEMENTS_KEPT)
def _part(statement: str) -> _Part:
    """A statement with a name, and the texts that prepare and execute it. Cached as messages are.

    The name is made of the statement, so that it stands for the same one in every process: a session may turn out to be
    another client's, behind a pool that somebody has switched to its transaction mode.
    """
    if not _CAN_BE_PREPARED.match(statement):
        return _Part("", statement)
    found = list(dict.fromkeys(_PARAMETER.findall(statement)))
    places = {name: f"${place}" for place, name in enumerate(found, 1)}
    planned = _PARAMETER.sub(lambda match: places[match[1]], statement)
    name = f"opencue_sched_{hashlib.sha256(planned.encode()).hexdigest()[:16]}"
    given = f"({', '.join(f'%({parameter})s' for parameter in found)})" if found else ""
    return _Part(name, f"EXECUTE {name}{given}", f"PREPARE {name} AS {planned}")


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a connection has prepared."""

    generation: int
    """The generation of PreparedStatements in which the plans were made."""
    until: float
    """The moment at which the connection's plans are made anew, by the clock of PreparedStatements."""
    names: frozenset[str]


_OVER = -math.inf
"""The ``until`` of plans of which nobody knows whether they were made: they are made anew the next time."""


class PreparedStatements:
    """The prepared statements of an engine's connections. Thread-safe."""

    def __init__(self, sessions: Sessions, clock: Callable[[], float]) -> None:
        self._sessions = sessions
        self._clock = clock
        self._generation = 1
        """Grows when the plans of all connections are given up. Without a lock: two threads that do so at once may
        count once or twice, and either way plans of an earlier generation are not used again."""

    def send(self, cursor: Any, statement: str, parameters: Any, context: Any) -> bool:
        """SQLAlchemy's hook in place of the sending of a statement; returns whether it has sent the statement."""
        if not self._sessions.own or not context.execution_options.get(_OPTION):
            return False
        message, info, now = _cut(statement), context.root_connection.info, self._clock()
        kept: _Kept | None = info.get(_OPTION)
        is_good = kept is not None and kept.generation == self._generation and now < kept.until
        if kept is not None and is_good and message.names <= kept.names:
            cursor.execute(message.known, parameters)
            return True
        if kept is None or not is_good:
            kept = _Kept(self._generation, now + REPLANNED_SECONDS, frozenset())
        # A new connection gives up all plans as well: behind a pool that resets nothing it has a session with plans of
        # another process, some by the same names. DEALLOCATE comes after the ROLLBACK that the message may begin with,
        # because before that a failed transaction refuses it.
        give_up = [] if kept.names else ["DEALLOCATE ALL"]
        sent: list[str] = []
        for part in message.parts:
            if part.name and part.name not in kept.names:
                sent += [*give_up, part.prepare]
                give_up = []
            sent.append(part.execute)
        # Written before the message is sent: nobody knows how far a message came that fails, so the next one begins
        # anew. `note` compares the generation, so that an error over plans of an earlier one gives up nothing.
        info[_OPTION] = _Kept(kept.generation, _OVER, frozenset())
        cursor.execute("; ".join(sent), parameters)
        info[_OPTION] = replace(kept, names=kept.names | message.names)
        return True

    def note(self, context: ExceptionContext) -> None:
        """SQLAlchemy's hook behind an error: plans that are outdated are given up, those of all connections."""
        if getattr(context.original_exception, "pgcode", None) in _OUTDATED and context.connection is not None:
            kept: _Kept | None = context.connection.info.get(_OPTION)
            if kept is not None and kept.generation == self._generation:
                self._generation += 1


def prepare_on(engine: Engine, sessions: Sessions, clock: Callable[[], float] = time.monotonic) -> None:
    """Have the engine's connections prepare the statements that are marked so."""
    statements = PreparedStatements(sessions, clock)
    event.listen(engine, "do_execute", statements.send)
    event.listen(engine, "handle_error", statements.note)
