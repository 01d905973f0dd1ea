"""Processes of ours that start without loading anything: for tests and benchmarks of what they do once they run.

A test may start dozens of workers, beats and command lines, each of which takes a second of processor time and more to
import what all of them import. Here they are forked from a process that has done so (see warm_server.py): real
processes, with a process id, an environment, a session and standard files of their own, that run the same command line
to the same end and are killed, frozen and waited for like any other.

That a process starts as a user types it is shown elsewhere: tests/e2e/test_celery_commands.py, test_wheel.py and
test_demo.py start all kinds of processes plainly.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Self

from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.embedded.servers.processes import GuardedProcess, ServiceFailed

ROOT = Path(__file__).resolve().parents[1]
# Read by the interpreter or as a library is imported: a process that is to have another must be started plainly.
READ_AT_THE_START = ("PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONDEVMODE", "PROMETHEUS_MULTIPROC_DIR", "TZ")


class _Server:
    """The process that forks others: one of our own, started when the first is asked for, or one that others share.
    It ends what it forked for us with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.shared: str | None = None

    @cached_property
    def _asking(self) -> socket.socket:
        server = None
        if self.shared is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                server = _start_server("asked", theirs, stdin=subprocess.DEVNULL)
        else:
            ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.connect(self.shared)

        def end() -> None:
            with ours:
                ours.shutdown(socket.SHUT_WR)
                ours.recv(1)  # nothing, once it has ended
            if server is not None:
                server.wait()

        atexit.register(end)
        return ours

    def ask(self, program: Mapping[str, object], files: Sequence[int]) -> None:
        with self._lock:
            socket.send_fds(self._asking, [json.dumps(program).encode()], files)


def _start_server(how: str, sock: socket.socket, *, stdin: int) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OPENCUE_SCHED_")}
    environment.pop("PYTHONPATH", None)
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "benchmarks.warm_server", how, str(sock.fileno())],
        cwd=ROOT,
        env=environment,
        pass_fds=[sock.fileno()],
        stdin=stdin,
        start_new_session=True,
    )


_SERVER = _Server()


@contextlib.contextmanager
def shared_server() -> Iterator[str]:
    """A process that forks for several, which loads everything once for all of them; its name for ``share``."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = f"{directory}/warm"
        listener.bind(name)
        listener.listen()
        server = _start_server("shared", listener, stdin=subprocess.PIPE)
        try:
            yield name
        finally:
            server.communicate()


def share(name: str) -> None:
    """Ask the process of this name from now on, instead of one of our own."""
    _SERVER.shared = name


class Started:
    """A forked process; what subprocess.Popen says of one.

    ``command`` is ``[sys.executable, "-m" or "-c", ...]``.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None = None,
        stdin: IO[bytes] | int | None = None,
        stdout: IO[bytes] | int,
        stderr: IO[bytes] | int,
    ) -> None:
        python, kind, what, *arguments = command
        assert python == sys.executable and kind in ("-m", "-c"), command
        assert all(env.get(name) == os.environ.get(name) for name in READ_AT_THE_START), "too late for that"
        self.args = list(command)
        self.returncode: int | None = None
        program = {
            "kind": kind,
            "what": what,
            "arguments": arguments,
            "environment": dict(env),
            "path": [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part],
            "directory": os.fspath(cwd or Path.cwd()),
        }
        readable, writable = os.pipe()
        self._told = os.fdopen(readable, "rb", buffering=0)
        try:
            with Path(os.devnull).open("rb") as nothing:
                given = nothing if stdin is None else stdin
                _SERVER.ask(program, [_number(given), _number(stdout), _number(stderr), writable])
        finally:
            os.close(writable)
        line = self._line()
        if not line:
            self._told.close()
            raise ServiceFailed("the process that forks others has ended")
        self.pid = int(line)

    def _line(self) -> bytes:
        """One of the two lines there are: process id and exit status. They come far apart, and each at once."""
        return self._told.readline()

    def poll(self) -> int | None:
        return self._await(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._await(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _await(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
            self.returncode = int(self._line() or -signal.SIGKILL)  # without a word: killed with the server
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _number(file: IO[bytes] | int) -> int:
    return file if isinstance(file, int) else file.fileno()


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, with what it says captured as text."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = Started(command, env=env, cwd=cwd, stdout=out, stderr=errors)
        try:
            process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        said = [_text(file) for file in (out, errors)]
        return subprocess.CompletedProcess(process.args, process.wait(), *said)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


class WarmProcess(GuardedProcess):
    """A process of a fleet. Its guard is the process it was forked by."""

    def start(self) -> Self:
        if self.running:
            return self
        self._close_guard()
        with self.log.open("ab") as log:
            started = Started(self.command, env=self._env or os.environ, cwd=self._cwd, stdout=log, stderr=log)
        # Asked what a guard of GuardedProcess is asked, and nothing else of a Popen.
        self._guard = _Guard(started, self._stop_signal, self._kill_after)  # type: ignore[assignment]
        self._pid = started.pid
        return self


class WarmFleet(Fleet):
    """A fleet whose processes need not load anything."""

    process_type = WarmProcess


class _Guard:
    """What GuardedProcess asks its guard."""

    stdin = None

    def __init__(self, started: Started, stop_signal: int, kill_after: float) -> None:
        self._started, self._stop_signal, self._kill_after = started, stop_signal, kill_after

    def poll(self) -> int | None:
        return _as_guards_say(self._started.poll())

    def wait(self, timeout: float | None = None) -> int | None:
        return _as_guards_say(self._started.wait(timeout))

    def terminate(self) -> None:
        """Stop it, and kill it when that takes too long."""
        for number in (self._stop_signal, signal.SIGCONT):
            self._started.send_signal(number)
        try:
            self._started.wait(self._kill_after)
        except subprocess.TimeoutExpired:
            self._started.kill()


def _as_guards_say(code: int | None) -> int | None:
    return code if code is None or code >= 0 else 128 - code
