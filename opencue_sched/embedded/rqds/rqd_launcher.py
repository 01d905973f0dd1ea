"""Runs one real RQD and takes its frames along when it ends.

Started as a script by the Python of RQD's own environment, so it imports nothing but the standard library and rqd.
RQD gives every frame a session of its own and, when it is stopped, leaves them running. So this process makes itself
the reaper of its descendants (a Linux subreaper): when RQD has ended, in whatever way, it kills what is left.

RQD times frames with /usr/bin/time, which slim machines lack: a frame is then started by the shell alone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
"""The number of Linux' prctl that sets the signal a process gets when its parent dies."""
_PR_SET_CHILD_SUBREAPER = 36
"""The number of Linux' prctl by which a process becomes the parent of its descendants whose parents have died."""
_TIME_PROGRAM = "/usr/bin/time"
_STOP_SECONDS = 5.0
"""How long this process goes on killing what RQD has left. A process that the kernel cannot end is left, too."""


def _prctl(option: int, value: int) -> None:
    """Make a call of prctl for this process; on other systems than Linux do nothing."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _children() -> list[int]:
    """Process ids of the children of this process, adopted ones included."""
    me = str(os.getpid())
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                if after_name[1] == me:
                    found.append(int(entry.name))
    return found


def _kill_children() -> None:
    """Kill and reap until no child is left: killing one may hand its own children to us."""
    deadline = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < deadline:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def supervise(arguments: list[str], pid_file: Path) -> int:
    """Start RQD as a child, pass on SIGTERM, and clean up after it. Returns its exit code."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    rqd = subprocess.Popen(
        [sys.executable, __file__, "--run", *arguments],
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM)),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _received, _frame: _stop(rqd))
    pid_file.write_text(str(rqd.pid), encoding="ascii")
    code = rqd.wait()
    _kill_children()
    return code if code >= 0 else 128 - code


def _stop(rqd: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(rqd.pid, signal.SIGTERM)
        os.kill(rqd.pid, signal.SIGCONT)


class WithoutTime(subprocess.Popen):  # type: ignore[type-arg]
    """Popen for RQD's ``/usr/bin/time -p -o FILE [taskset -c LIST] COMMANDFILE`` on a machine without that program."""

    def __init__(self, command: Any, *args: Any, **options: Any) -> None:
        if isinstance(command, list) and command[:1] == [_TIME_PROGRAM]:
            command = command[4:]
            if command[:1] != ["taskset"]:
                command = ["/bin/sh", *command]
        super().__init__(command, *args, **options)


def run(arguments: list[str]) -> None:
    """Become RQD."""
    sys.argv = ["rqd", *arguments]
    if not Path(_TIME_PROGRAM).exists():
        subprocess.Popen = WithoutTime  # type: ignore[misc, assignment]
    from rqd.__main__ import main  # type: ignore[import-not-found]

    main()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--pid-file", type=Path, required=True)
        parser.add_argument("rqd", nargs=argparse.REMAINDER)
        given = parser.parse_args()
        sys.exit(supervise(given.rqd[1:] if given.rqd[:1] == ["--"] else given.rqd, given.pid_file))
