"""PgBouncer in front of a test's PostgreSQL."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
import pytest
from pydantic import SecretStr
from sqlalchemy import make_url

from opencue_sched.embedded.servers.processes import (
    GuardedProcess,
    free_port,
    private_directory,
    remove_directory,
    unprivileged_user,
)
from opencue_sched.settings import Settings
from tests.kit.polling import eventually

_CONFIGURATION = """
[databases]
{database} = host={host} port={port} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = {pool_mode}
{more}
"""


class PgBouncer:
    """``settings`` are those given, with PgBouncer's address; it runs as ``process``."""

    def __init__(self, settings: Settings, process: GuardedProcess, configuration: Path) -> None:
        self.settings = settings
        self.process = process
        self._configuration = configuration

    def switch(self, pool_mode: str) -> None:
        """Have another mode from now on, also for connections that are there."""
        text = self._configuration.read_text()
        self._configuration.write_text(re.sub("pool_mode = .*", f"pool_mode = {pool_mode}", text))
        self.process.send_signal(signal.SIGHUP)
        url = make_url(self.settings.sqlalchemy_url).set(drivername="postgresql", database="pgbouncer")
        eventually(lambda: _mode(url.render_as_string(hide_password=False)) == pool_mode, what="the mode is another")


def pgbouncer_program() -> str:
    """The program. Skips the test where it is missing; in CI it fails."""
    program = shutil.which("pgbouncer", path=os.pathsep.join((os.environ["PATH"], "/usr/sbin")))
    if program is None and not os.environ.get("CI"):
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    assert program is not None, "CI needs pgbouncer: apt-get install pgbouncer"
    return program


@contextmanager
def pgbouncer(settings: Settings, *, pool_mode: str, more: str = "") -> Iterator[PgBouncer]:
    """PgBouncer in front of the database of ``settings``; ``more`` are lines of its configuration."""
    program, url, port = pgbouncer_program(), make_url(settings.sqlalchemy_url), free_port()
    directory, user = private_directory("pgbouncer"), unprivileged_user()
    try:
        configuration = directory / "pgbouncer.ini"
        configuration.touch(mode=0o600)
        configuration.write_text(
            _CONFIGURATION.format(
                database=url.database,
                host=url.host,
                port=url.port,
                user=url.username,
                password=url.password,
                listen_port=port,
                pool_mode=pool_mode,
                more=more,
            )
        )
        if user is not None:
            os.chown(configuration, pwd.getpwnam(user).pw_uid, -1)
        log = directory / "pgbouncer.log"
        with GuardedProcess([program, str(configuration)], log=log, user=user, remove=directory) as process:
            through = url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
            eventually(lambda: _answers(through), what="PgBouncer answers", told=lambda: _text(log))
            yield PgBouncer(settings.model_copy(update={"database_url": SecretStr(through)}), process, configuration)
    finally:
        remove_directory(directory)


def _answers(url: str) -> bool:
    try:
        psycopg2.connect(url.replace("+psycopg2", ""), connect_timeout=5).close()
    except psycopg2.OperationalError:
        return False
    return True


def _mode(console: str) -> str:
    """The mode that PgBouncer has, by its console."""
    connection = psycopg2.connect(console, connect_timeout=5)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("SHOW CONFIG")
            return str(next(row[1] for row in cursor.fetchall() if row[0] == "pool_mode"))
    finally:
        connection.close()


def _text(log: Path) -> str:
    return log.read_text() if log.exists() else "(no log)"
