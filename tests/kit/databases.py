"""Databases for tests: copies of a template, and those used again for which no test can tell.

Copying a database, meeting its catalog for the first time and dropping it costs more than most tests do. So the
database of a test that is over is emptied for another test of the same process, unless more than rows could be left of
the first one in it: then it is dropped and the other test has a new copy. Sessions, too, are used again: a new one has
to read the catalog and to parse the views before its first statement.
"""

# ruff: noqa: S608 - statements are put together from names that the catalog gives

from __future__ import annotations

import secrets
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2
from psycopg2 import extensions
from pydantic import SecretStr
from sqlalchemy import URL, Engine, create_engine, event, make_url, text

from opencue_sched.clients.postgres import connect, make_engine
from opencue_sched.embedded.servers.services import EmbeddedPostgres
from opencue_sched.settings import Settings

TEST_SESSIONS = "opencue-sched-test"
"""The name of the sessions of a test's own engine."""

_USED_AGAIN = (TEST_SESSIONS, "opencue-sched cli")
"""The names of sessions that are used again: those of tests, and of commands that run in the process of a test."""

_AT_REST = 2
"""So many databases wait before one of them is used again: by then the sessions of its last test have ended."""

_GROWTH_BYTES = 1 << 20
"""A database whose tables have grown by more is dropped: rows that were deleted keep their room, and plans know it."""

_FIRST_OID = 16384
"""Objects with a lower one came with PostgreSQL."""

_CATALOGS = """
    SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE c.relnamespace = 'pg_catalog'::regnamespace AND c.relkind = 'r' AND NOT c.relisshared
      AND (a.attname = 'oid' OR (c.relname, a.attname) IN (('pg_attribute', 'attrelid'), ('pg_index', 'indexrelid'),
                                                           ('pg_sequence', 'seqrelid'), ('pg_statistic', 'starelid')))
"""
"""Every catalog of a database, and the column with the oid that its rows are about."""

# Of the catalogs, count and xmin are compared: a row that is written anew has another one. Only what a vacuum or an
# analysis counts is written over the old row.
_OTHER_TRACES = f"""
    (SELECT (count(*), sum(reltuples::float8))::text FROM pg_class WHERE oid >= {_FIRST_OID}),
    (SELECT (datallowconn, datconnlimit, datdba, datacl)::text FROM pg_database WHERE datname = current_database()),
    (SELECT count(*) FROM pg_db_role_setting s JOIN pg_database d ON d.oid = s.setdatabase
     WHERE d.datname = current_database()),
    (SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database())
"""

_SESSIONS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type <> 'autovacuum worker'
      AND pid <> ALL (%s)
"""
_SIZE = f"SELECT coalesce(sum(pg_relation_size(oid)), 0) FROM pg_class WHERE relkind = 'r' AND oid >= {_FIRST_OID}"

_TABLES = f"SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND oid >= {_FIRST_OID} ORDER BY oid"
_SEQUENCES = """
    SELECT format('PERFORM setval(%L, %s, %L)', format('%I.%I', schemaname, sequencename),
                  coalesce(last_value, start_value), last_value IS NOT NULL)
    FROM pg_sequences
"""


class PostgresServer:
    """A server on which databases can be made. ``embedded`` is None when the server was given by URL."""

    def __init__(self, url: str, embedded: EmbeddedPostgres | None) -> None:
        self.url: URL = make_url(url).set(drivername="postgresql+psycopg2")
        self.embedded = embedded
        self._finished: list[str] = []
        self._admin = create_engine(self.url, isolation_level="AUTOCOMMIT", pool_size=1, max_overflow=2)

    def ours_is_a_superuser(self) -> bool:
        with self._admin.connect() as connection:
            return bool(connection.scalar(text("SELECT current_setting('is_superuser')")) == "on")

    def database_url(self, name: str) -> str:
        return self.url.set(database=name).render_as_string(hide_password=False)

    def create(self, name: str, template: str | None = None) -> str:
        """Create the database ``name``, empty or as a copy of ``template``; returns its URL."""
        self._drop_finished()
        with self._admin.connect() as connection:
            strategy = " STRATEGY FILE_COPY" if connection.dialect.server_version_info >= (15,) else ""
            connection.execute(text(f'CREATE DATABASE "{name}" TEMPLATE "{template or "template0"}"{strategy}'))
        return self.database_url(name)

    def drop(self, name: str) -> None:
        """Have the database ``name`` dropped, by the next create() or close().

        Not at once: the sessions that a test closed a moment ago are still ending, and DROP would wait for them.
        """
        self._finished.append(name)

    def close(self) -> None:
        """Drop what is left to drop and disconnect."""
        self._drop_finished()
        self._admin.dispose()

    def _drop_finished(self) -> None:
        with self._admin.connect() as connection:
            while self._finished:
                connection.execute(text(f'DROP DATABASE IF EXISTS "{self._finished.pop()}" WITH (FORCE)'))


class Databases:
    """Copies of ``template``, each for one test at a time. Nobody connects to the template or changes it meanwhile."""

    def __init__(self, server: PostgresServer, template: str) -> None:
        self._server = server
        self._template = template
        self._at_rest: deque[_Database] = deque()
        self._in_use: dict[str, _Database] = {}
        self._emptying: str | None = None
        self._used_again = server.ours_is_a_superuser()
        event.listen(Engine, "do_connect", self._session)

    def take(self) -> str:
        """The URL of a database in which everything is as in the template."""
        database = self._emptied() or self._copy()
        self._in_use[database.url] = database
        return database.url

    def _session(self, _dialect: object, _record: object, args: list[Any], named: dict[str, Any]) -> Any:
        """The session that SQLAlchemy takes: one that was closed and had been made in the same way, or a new one that
        is kept when it is closed. None, and SQLAlchemy makes its own, where none is used again."""
        # Not by another way to the server, such as a proxy: what it does to a session is somebody's subject.
        if named.get("application_name") not in _USED_AGAIN or named.get("port") != self._server.url.port:
            return None
        database = next((each for each in self._in_use.values() if each.name == named.get("dbname")), None)
        if database is None:
            return None
        idle = database.idle[repr(sorted(named.items()))]
        while idle:
            session = idle.pop()
            if _lives(session):
                return session
            session.end()
        session = connect(*args, **named, connection_factory=_Session)
        session.idle = idle
        return session

    def give_back(self, url: str) -> None:
        """The test that had the database is over."""
        database = self._in_use.pop(url)
        if self._used_again:
            self._at_rest.append(database)
        else:
            self._server.drop(database.name)

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """An engine, as a worker makes its own, on a database for several tests that change nothing in it."""
        url = self.take()
        settings = Settings(database_url=SecretStr(url), redis_url=SecretStr("redis://127.0.0.1"))
        engine = make_engine(settings, application_name=TEST_SESSIONS)
        try:
            yield engine
        finally:
            engine.dispose()
            self.give_back(url)

    def close(self) -> None:
        event.remove(Engine, "do_connect", self._session)
        for database in (*self._at_rest, *self._in_use.values()):
            self._drop(database)

    def _emptied(self) -> _Database | None:
        while len(self._at_rest) >= _AT_REST:
            database = self._at_rest.popleft()
            if database.emptied():
                return database
            self._drop(database)
        return None

    def _copy(self) -> _Database:
        name = f"opencue_sched_test_{secrets.token_hex(6)}"
        database = _Database(name, self._server.create(name, self._template))
        if self._used_again:
            self._emptying = database.observe(self._emptying)
        return database

    def _drop(self, database: _Database) -> None:
        database.close()
        self._server.drop(database.name)


class _Session(extensions.connection):
    """A session that is kept when it is closed: among ``idle``, as new. One that was never lent has no such list."""

    idle: list[_Session] | None = None

    def close(self) -> None:
        if self.idle is None:
            return self.end()
        try:
            self.idle.append(_as_new(self))
        except psycopg2.Error:
            self.end()
        return None

    def end(self) -> None:
        super().close()


class _Database:
    """A copy of the template, and our own session in it. ``idle``: sessions that were closed, by how they were made."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self._session: extensions.connection | None = None
        self._traces: object = None
        self._size = 0
        self.idle: dict[str, list[_Session]] = defaultdict(list)

    def observe(self, emptying: str | None) -> str:
        """See how the database is before its first test; returns what makes it so again, the same for every copy."""
        self._session = session = psycopg2.connect(
            make_url(self.url).set(drivername="postgresql").render_as_string(hide_password=False),
            application_name="opencue-sched-test-databases",
            # As a replica's, our statements set off no trigger and no foreign key.
            options="-c session_replication_role=replica -c search_path=pg_catalog -c statement_timeout=30s",
        )
        session.autocommit = True
        with session.cursor() as cursor:
            emptying = emptying or _emptying(cursor)
            cursor.execute(emptying)
            cursor.execute(_CATALOGS)
            catalogs = [
                f"(SELECT (count(*), sum(xmin::text::bigint))::text FROM {name} WHERE {column} >= {_FIRST_OID})"
                for name, column in cursor.fetchall()
            ]
            cursor.execute(f"PREPARE traces AS SELECT {_OTHER_TRACES}, {', '.join(catalogs)}")
            self._traces = _row(cursor, "EXECUTE traces")
            self._size = _row(cursor, _SIZE)[0]
        return emptying

    def emptied(self) -> bool:
        """Whether everything is as it was before the first test, once the rows of tests are gone."""
        assert self._session is not None
        try:
            with self._session.cursor() as cursor:
                if (
                    _row(cursor, _SESSIONS, ([session.info.backend_pid for session in self._idle()],)) != (0,)
                    or _row(cursor, "EXECUTE traces") != self._traces
                    or _row(cursor, _SIZE)[0] - self._size > _GROWTH_BYTES
                ):
                    return False
                cursor.execute("SELECT pg_temp.empty()")
        except psycopg2.Error:
            # The test ended our session, or shut the database: the next one has another.
            return False
        return True

    def close(self) -> None:
        for session in self._idle():
            session.end()
        if self._session is not None:
            self._session.close()

    def _idle(self) -> list[_Session]:
        return [session for made in self.idle.values() for session in made]


def _lives(session: extensions.connection) -> bool:
    """Whether the server has the session still: a test may have ended every one of its database."""
    try:
        with session, session.cursor() as cursor:
            cursor.execute("SELECT 1")
    except psycopg2.Error:
        return False
    return True


def _as_new(session: _Session) -> _Session:
    """The session without what a test may have left in it, but with what it has read of the catalog."""
    session.reset()
    session.autocommit = True
    with session.cursor() as cursor:
        cursor.execute("DISCARD ALL")
    session.autocommit = False
    session.notices.clear()
    session.notifies.clear()  # what came until UNLISTEN
    return session


def _row(cursor: extensions.cursor, query: str, parameters: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
    cursor.execute(query, parameters)
    row: tuple[Any, ...] = cursor.fetchone()
    return row


def _emptying(cursor: extensions.cursor) -> str:
    """What makes a function that leaves in the tables what they have now, and takes the sequences back."""
    cursor.execute(_TABLES)
    tables = [name for (name,) in cursor.fetchall()]
    statements = [f"DELETE FROM {table}" for table in tables]
    for table in tables:
        cursor.execute(f"SELECT t::text FROM {table} t")
        rows = [row for (row,) in cursor.fetchall()]
        if rows:
            put_back = f"INSERT INTO {table} SELECT (r).* FROM unnest(%s::{table}[]) r"
            statements.append(cursor.mogrify(put_back, (rows,)).decode())
    cursor.execute(_SEQUENCES)
    statements += [statement for (statement,) in cursor.fetchall()]
    statements.append("PERFORM pg_stat_reset()")
    body = "; ".join(statements)
    return f"CREATE FUNCTION pg_temp.empty() RETURNS void LANGUAGE plpgsql AS $emptying$ BEGIN {body}; END $emptying$"
