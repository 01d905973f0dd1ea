"""Forks processes that have everything loaded already. Run by warm_start.py, for one process or for several.

    python -u -m benchmarks.warm_server asked SOCKET     in the checkout, without PYTHONPATH
    python -u -m benchmarks.warm_server shared SOCKET

Whoever holds the other end of SOCKET (the number of an open file) asks for a process with one message: a Program as
JSON, and with it four open files: standard input, output and error, and one to which the process id is written, and in
the end the exit status. What is loaded here has read nothing of the environment; a forked process gets one of its own,
and from then on does all that a Python started with the same command line does, up to the end of its interpreter.

A SOCKET that is shared listens: whoever connects to it has a process like this one for himself, which is forked and so
need not load anything either. The shared one loads when the first connects and ends with its standard input.

There are no threads and no connections here, so there is nothing that a fork could break. No process outlives the one
that forked it, and that one ends when its owner does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
import types
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_MOST_BYTES = 1 << 20

THEIRS = (
    "billiard.pool",
    "celery.apps.beat",
    "celery.apps.worker",
    "celery.bin.celery",
    "celery.concurrency.solo",
    "celery.concurrency.thread",
    "celery.fixups.django",
    "celery.app.amqp",
    "celery.app.control",
    "celery.app.events",
    "celery.app.log",
    "celery.backends.base",
    "celery.events.state",
    "celery.loaders.app",
    "celery.worker.autoscale",
    "celery.worker.components",
    "celery.worker.consumer.delayed_delivery",
    "celery.worker.control",
    "celery.worker.strategy",
    "encodings.ascii",
    "grpc._server",
    "kombu.transport.redis",
    "psycopg2.extras",
    "sqlalchemy.dialects.postgresql.psycopg2",
)
OURS = "opencue_sched"
# These read the environment or the command line as they are imported, or start processes of their own.
NOT_LOADED = ("celery", "embedded")


@dataclass(frozen=True)
class Program:
    """``python -m MODULE ARGUMENTS`` or ``python -c SOURCE ARGUMENTS``. ``path``: places before those of Python."""

    kind: str
    what: str
    arguments: list[str]
    environment: dict[str, str]
    path: list[str]
    directory: str

    def run(self) -> None:
        """As the interpreter does it after its own start."""
        if self.kind == "-m":
            sys.argv = [self.what, *self.arguments]
            runpy.run_module(self.what, run_name="__main__", alter_sys=True)
        else:
            sys.argv = ["-c", *self.arguments]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(self.what, "<string>", "exec"), main.__dict__)  # noqa: S102 - what a test asked to be run


def load() -> None:
    """Everything that takes time to import and does not depend on what is to be run."""
    for name in THEIRS:
        importlib.import_module(name)
    package = importlib.import_module(OURS)
    for found in pkgutil.iter_modules(package.__path__, f"{OURS}."):
        if found.name.removeprefix(f"{OURS}.") not in NOT_LOADED:
            _load_all(found.name)
    from opencue_sched.settings import get_settings

    assert not {"celeryconfig", "tasks", f"{OURS}.celery"} & sys.modules.keys()
    assert not get_settings.cache_info().currsize
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread would not survive a fork"
    gc.collect()
    gc.freeze()


def _load_all(name: str) -> None:
    module = importlib.import_module(name)
    for found in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
        if not found.name.endswith("__main__"):
            _load_all(found.name)


def next_who_asks(shared: socket.socket) -> socket.socket | None:
    """Fork a process for each who connects. Returns in a new process the connection, and None at the end of standard
    input."""
    forked: list[int] = []
    while True:
        ready, _, _ = select.select([shared, sys.stdin], [], [])
        if sys.stdin in ready:
            for pid in forked:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return None
        if not forked:
            load()
        connection, _ = shared.accept()
        owner = os.getpid()
        pid = os.fork()
        if pid == 0:
            _die_with(owner)
            return connection
        forked.append(pid)
        connection.close()


def serve(asked: socket.socket) -> Program | None:
    """Fork what is asked for. Returns in a new process what that is to run, and None when nobody asks any more."""
    own_path = sys.path[1:]
    running: dict[int, tuple[int, int]] = {}
    while True:
        ready, _, _ = select.select([asked.fileno(), *running], [], [])
        for pidfd in ready:
            if pidfd in running:
                _tell_the_end(*running.pop(pidfd))
                os.close(pidfd)
        if asked.fileno() not in ready:
            continue
        message, files = _receive(asked)
        if not message:
            for pid, _ in running.values():
                _kill_group(pid)
            return None
        *standard, status = files
        program = Program(**json.loads(message))
        owner = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(program, standard, owner, own_path)
            return program
        running[os.pidfd_open(pid)] = (pid, status)
        for number in standard:
            os.close(number)
        _tell(status, pid)


def _receive(asked: socket.socket) -> tuple[bytes, list[int]]:
    message, files, _, _ = socket.recv_fds(asked, _MOST_BYTES, 4)
    return message, files


def _tell_the_end(pid: int, status: int) -> None:
    """Nothing that a process has started stays behind it."""
    _kill_group(pid)
    _, ended = os.waitpid(pid, 0)
    _tell(status, os.waitstatus_to_exitcode(ended))
    os.close(status)


def _tell(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
        os.write(status, f"{number}\n".encode())


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _become(program: Program, standard: list[int], owner: int, own_path: list[str]) -> None:
    """What exec would have done."""
    os.setsid()
    _die_with(owner)
    for number, given in enumerate(standard):
        os.dup2(given, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(program.directory)
    os.environ.clear()
    os.environ.update(program.environment)
    sys.path[:] = [program.directory if program.kind == "-m" else "", *program.path, *own_path]


def _die_with(owner: int) -> None:
    """Have this process killed when the one that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner:
        os._exit(1)


def main() -> Program | None:
    how, number = sys.argv[1:]
    asked: socket.socket | None
    with socket.socket(fileno=int(number)) as given:
        if how == "shared":
            asked = next_who_asks(given)
        else:
            load()
            asked = given.dup()
    if asked is None:
        return None
    program = serve(asked)
    asked.detach()
    return program


if __name__ == "__main__":
    wanted = main()
    if wanted is not None:
        wanted.run()
