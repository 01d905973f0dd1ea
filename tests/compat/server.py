"""A PostgreSQL server that has the uuid-ossp extension, which the embedded one has not.

OPENCUE_SCHED_COMPAT_DATABASE_URL names one (with a user who may create databases and extensions). Otherwise the newest
PostgreSQL that Debian's packages installed here is started on a free port with a data directory of its own.
"""

from __future__ import annotations

import os
import pwd
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2

from opencue_sched.embedded.servers.processes import (
    GuardedProcess,
    ServiceFailed,
    free_port,
    private_directory,
    remove_directory,
    unprivileged_user,
)

_START_SECONDS = 60.0
_INSTALLATIONS = Path("/usr/lib/postgresql")


def _programs() -> Path:
    versions = [path for path in _INSTALLATIONS.glob("*/bin") if (path / "initdb").is_file()]
    if not versions:
        raise ServiceFailed(
            "no PostgreSQL with uuid-ossp: set OPENCUE_SCHED_COMPAT_DATABASE_URL, or install Debian's postgresql"
        )
    return max(versions, key=lambda path: int(path.parent.name))


def _initialise(programs: Path, directory: Path, password: str) -> Path:
    user = unprivileged_user()
    data, password_file = directory / "data", directory / "password"
    data.mkdir(mode=0o700)
    password_file.touch(mode=0o600)
    password_file.write_text(password, encoding="ascii")
    if user is not None:
        account = pwd.getpwnam(user)
        for path in (data, password_file):
            os.chown(path, account.pw_uid, account.pw_gid)
    subprocess.run(
        [
            *(programs / "initdb", "--pgdata", data, "--username", "cuebot", "--pwfile", password_file),
            *("--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", "--no-sync"),
        ],
        user=user,
        group=None if user is None else pwd.getpwnam(user).pw_gid,
        extra_groups=None if user is None else [],
        cwd=directory,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return data


def _wait_for(url: str, process: GuardedProcess) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            psycopg2.connect(url).close()
            return
        except psycopg2.OperationalError as error:
            if not process.running or time.monotonic() > deadline:
                raise ServiceFailed(f"PostgreSQL did not start:\n{process.log.read_text()}") from error
            time.sleep(0.1)


@contextmanager
def compat_server() -> Iterator[str]:
    """URL of a maintenance database on a server with uuid-ossp, as long as the context lasts."""
    given = os.environ.get("OPENCUE_SCHED_COMPAT_DATABASE_URL")
    if given:
        yield given
        return
    programs, directory, password, port = _programs(), private_directory("compat"), secrets.token_hex(16), free_port()
    try:
        data = _initialise(programs, directory, password)
        url = f"postgresql://cuebot:{password}@127.0.0.1:{port}/postgres"
        command: list[str | Path] = [
            programs / "postgres",
            "-D",
            data,
            "-p",
            str(port),
            "-c",
            "listen_addresses=127.0.0.1",
        ]
        command += ["-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "max_connections=200"]
        with GuardedProcess(
            command, log=directory / "postgres.log", user=unprivileged_user(), remove=directory
        ) as process:
            _wait_for(url, process)
            yield url
    finally:
        remove_directory(directory)
