"""Runs one server and makes sure that it never outlives the process that asked for it.

Started as a script (``python -I -S guard.py``), so it imports nothing but the standard library. It sits between an
owner and a server: the server's process id goes to standard output, and the server is stopped when the owner asks
for it, closes the guard's standard input, or disappears in whatever way, SIGKILL included. A guard that is itself
killed takes the server with it where the kernel offers a parent-death signal (Linux).

The guard lives in a session of its own, so that a Ctrl-C at the terminal reaches only the owner, who then stops its
servers in order.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
"""The number of Linux' prctl that sets the signal a process gets when its parent dies."""
_OWNER_CHECK_SECONDS = 0.5
"""The time between two looks whether the owner is still there."""


def _die_with_guard(death_signal: int) -> Callable[[], None] | None:
    """Return a function for the server's process to run before exec, which has the kernel send ``death_signal`` to the
    process when the guard dies. None where the kernel cannot.

    A change of user resets the death signal: the function has to run after that, as ``preexec_fn`` does.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    guard = os.getpid()

    def arrange() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        # The guard died before the call: the kernel sends nothing for that.
        if os.getppid() != guard:
            os.kill(os.getpid(), signal.SIGKILL)

    return arrange


def _wait_for_reason(server: subprocess.Popen[bytes], owner: int, wakeup: int, stopping: list[int]) -> bool:
    """Wait until the server has to be stopped or has ended. Returns True when the owner is gone or closed the guard's
    standard input, False when a signal asked to stop or the server ended by itself.

    Signal handlers append to ``stopping``, and each signal is a byte in the pipe ``wakeup``.
    """
    while server.poll() is None and not stopping:
        ready, _, _ = select.select([0, wakeup], [], [], _OWNER_CHECK_SECONDS)
        if wakeup in ready:
            os.read(wakeup, 512)
        if 0 in ready and not os.read(0, 512):
            return True
        if os.getppid() != owner:
            return True
    return False


def _stop(server: subprocess.Popen[bytes], stop_signal: int, kill_after: float) -> None:
    """Stop the server with ``stop_signal``, and with SIGKILL ``kill_after`` seconds later. Then kill what is left of
    the server's process group."""
    deadline = time.monotonic() + kill_after
    with contextlib.suppress(ProcessLookupError):
        server.send_signal(stop_signal)
        server.send_signal(signal.SIGCONT)  # a frozen server handles no signal before it goes on
    try:
        server.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, signal.SIGKILL)


def main() -> int:
    """Run the server until there is a reason to stop it. The exit code is the server's, 128 plus the number of the
    signal that ended the server, or 127 where the server could not be started."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--user", default="")
    parser.add_argument("--stop-signal", type=int, default=int(signal.SIGTERM))
    parser.add_argument("--kill-after", type=float, default=10.0, help="seconds from the stop signal to SIGKILL")
    parser.add_argument("--remove", default="", help="directory removed if the owner goes without a signal")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command

    owner = os.getppid()
    stopping: list[int] = []
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: stopping.append(received))
    signal.signal(signal.SIGCHLD, lambda _received, _frame: None)  # so that the server's end wakes select()

    user = arguments.user or None
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            process_group=0,
            preexec_fn=_die_with_guard(arguments.stop_signal),
            user=user,
            group=_group_of(user) if user else None,
            extra_groups=[] if user else None,
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)  # noqa: T201 - this is the server's log
        return 127
    os.write(1, f"{server.pid}\n".encode())
    os.close(1)

    owner_gone = _wait_for_reason(server, owner, wakeup_read, stopping)
    _stop(server, arguments.stop_signal, arguments.kill_after)
    if owner_gone and arguments.remove:
        shutil.rmtree(arguments.remove, ignore_errors=True)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def _group_of(user: str) -> int:
    import pwd

    return pwd.getpwnam(user).pw_gid


if __name__ == "__main__":
    sys.exit(main())
