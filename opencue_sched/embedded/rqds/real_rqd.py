"""Real RQD processes (opencue-rqd) on this machine, for the demo and the tests.

opencue-rqd pins packages that clash with ours, so it lives in a virtual environment of its own: ``.venv-rqd`` in a
checkout, or the user's cache directory when we run from an installed wheel.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import grpc
from opencue_proto import rqd_pb2, rqd_pb2_grpc

from opencue_sched.embedded.servers.processes import GuardedProcess, ServiceFailed, Startable, free_port

RQD_REQUIREMENT = "opencue-rqd==1.37.0"
"""What pip installs; another version here has every environment made anew."""
_NOT_NEEDED = frozenset({"pynput"})
"""Packages that opencue-rqd requires and these RQDs do without. pynput is for nimby, which is off, and needs a compiler
to be installed."""
_STAMP = "installed.txt"
"""The file of an environment that says what is installed there. It is written last: an environment without it is made
anew."""
_LINES_OF_OUTPUT = 15
"""How many lines of a failed command's output an error quotes: the last ones say why."""
_START_SECONDS = 60.0
"""How long an RQD may take to answer after its start, on a machine on which much else starts."""
_LAUNCHER = Path(__file__).with_name("rqd_launcher.py")
"""The program that starts an RQD, and kills the RQD's frames when the RQD has ended, in whatever way."""
_LIST_REQUIREMENTS = """
import importlib.metadata
for line in importlib.metadata.requires("opencue-rqd") or ():
    requirement, _, marker = line.partition(";")
    if "extra" not in marker:
        print(requirement.strip())
"""
"""A program for the environment's Python: it prints what opencue-rqd requires without its extras, such as
``psutil==5.9.8``, one in each line."""


def rqd_environment_directory() -> Path:
    """Where the environment of opencue-rqd lies by default."""
    package = find_spec("opencue_sched")
    checkout = Path(package.origin).parents[1] if package is not None and package.origin else Path.cwd()
    if (checkout / "pyproject.toml").is_file():
        return checkout / ".venv-rqd"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "opencue-sched" / "venv-rqd"


def ensure_rqd_environment(directory: Path | None = None) -> Path:
    """Install opencue-rqd once and return the Python of its environment. Safe to call from several processes at once.

    ``directory``: where the environment lies; by default, where rqd_environment_directory() says. Raises ServiceFailed
    with the end of pip's output.
    """
    target = (directory or rqd_environment_directory()).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    python = target / "bin" / "python"
    stamp = target / _STAMP
    wanted = f"{RQD_REQUIREMENT} python{sys.version_info.major}.{sys.version_info.minor}\n"
    with _locked(target.parent):
        if not (stamp.is_file() and stamp.read_text() == wanted and python.exists()):
            shutil.rmtree(target, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(target)])
            _pip(python, "--no-deps", RQD_REQUIREMENT)
            required = _run([str(python), "-I", "-c", _LIST_REQUIREMENTS]).splitlines()
            _pip(python, *(line for line in required if line.partition("==")[0] not in _NOT_NEEDED))
            stamp.write_text(wanted)
    return python


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, which one process has at a time. The directory itself is locked, so that no lock
    file stays behind."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _pip(python: Path, *arguments: str) -> None:
    """Have pip install into the environment of ``python``.

    With -I, so that pip does not see packages on PYTHONPATH or in the user's home: it would take them for installed,
    but RQD, which starts without both, would lack them.
    """
    # RQD imports a part of what is installed; Python compiles that then.
    quick = ("--quiet", "--disable-pip-version-check", "--no-compile")
    _run([str(python), "-I", "-m", "pip", "install", *quick, *arguments])


def _run(command: list[str]) -> str:
    """Run a step of the installation; returns its standard output. Raises ServiceFailed when the step fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-_LINES_OF_OUTPUT:])
        raise ServiceFailed(f"installing {RQD_REQUIREMENT} failed with code {done.returncode}:\n{tail}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class RqdConfig:
    """What one RQD reports, where to, and at which port it listens.

    ``cores`` are whole cores. RQD divides the number that it is given by the threads of a core, so ``text`` multiplies
    by them.
    """

    name: str
    port: int
    report_host: str
    report_port: int
    cores: int = 2
    tags: Sequence[str] = ()
    facility: str = "cloud"

    def text(self) -> str:
        """The contents of rqd.conf."""
        lines = {
            "OVERRIDE_CUEBOT": self.report_host,
            "CUEBOT_GRPC_PORT": self.report_port,
            "RQD_GRPC_PORT": self.port,
            "OVERRIDE_HOSTNAME": self.name,
            "RQD_NETWORK_INTERFACE": "lo",
            "RQD_USE_IP_AS_HOSTNAME": False,
            "OVERRIDE_NIMBY": False,
            "OVERRIDE_IS_DESKTOP": False,
            "OVERRIDE_CORES": self.cores * threads_per_core(),
            "OVERRIDE_PROCS": 1,
            "DEFAULT_FACILITY": self.facility,
            "RQD_TAGS": " ".join(self.tags),
            "RQD_BECOME_JOB_USER": False,
            "CONSOLE_LOG_LEVEL": "INFO",
        }
        return "[Override]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items())


def threads_per_core(cpuinfo: Path = Path("/proc/cpuinfo")) -> int:
    """The number by which RQD divides OVERRIDE_CORES: siblings / cpu cores of the first processor, 1 if unknown."""
    values: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("siblings", "cpu cores") and value.strip().isdigit():
                values.setdefault(key.strip(), int(value))
    return max(1, values.get("siblings", 1) // max(1, values.get("cpu cores", 1)))


class RealRqd(Startable):
    """One RQD process; ``stop`` ends the process and all frames that it runs.

    ``directory`` must exist; RQD's configuration, log and temporary files go there. Not thread-safe.
    """

    def __init__(self, config: RqdConfig, *, directory: Path, python: Path) -> None:
        self.config = config
        self.directory = directory
        self._python = python
        self._pid_file = directory / f"{config.name}.pid"
        self._process: GuardedProcess | None = None

    @property
    def name(self) -> str:
        """The name under which RQD reports."""
        return self.config.name

    @property
    def address(self) -> str:
        """The address at which RQD is dialled."""
        return f"127.0.0.1:{self.config.port}"

    @property
    def log(self) -> Path:
        """The file with what RQD writes to its standard output and error."""
        return self.directory / f"{self.name}.out"

    @property
    def pid(self) -> int:
        """Process id of RQD itself, not of its launcher. Raises FileNotFoundError until the launcher has started
        RQD."""
        return int(self._pid_file.read_text(encoding="ascii"))

    @property
    def running(self) -> bool:
        """Whether RQD's process is there, frozen or not."""
        return self._process is not None and self._process.running

    def start(self) -> Self:
        """Start RQD, and do not wait until it answers: see wait_until_serving(). Does nothing where RQD runs."""
        if self.running:
            return self
        scratch = self.directory / f"{self.name}-tmp"
        scratch.mkdir(exist_ok=True)
        conf = self.directory / f"{self.name}.conf"
        conf.write_text(self.config.text(), encoding="utf-8")
        self._pid_file.unlink(missing_ok=True)
        # Settings of Python are for this program: a PYTHONPATH would lead RQD to packages that clash with its own.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        environment["TMPDIR"] = str(scratch)
        self._process = GuardedProcess(
            [self._python, _LAUNCHER, "--pid-file", self._pid_file, "--", "-c", conf, "--nimbyoff"],
            log=self.log,
            env=environment,
            cwd=self.directory,
        ).start()
        return self

    def wait_until_serving(self, timeout: float = _START_SECONDS) -> None:
        """Wait until RQD answers ReportStatus, for ``timeout`` seconds at most. Raises ServiceFailed, with the end of
        the log, when the time is over or RQD ends."""
        deadline = time.monotonic() + timeout
        # RQD is on this machine: no proxy of the environment leads to it.
        with grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = rqd_pb2_grpc.RqdInterfaceStub(channel)
            while self._process is not None and self._process.running and time.monotonic() < deadline:
                try:
                    stub.ReportStatus(rqd_pb2.RqdStaticReportStatusRequest(), timeout=2.0)
                except grpc.RpcError:
                    time.sleep(0.1)
                else:
                    return
        tail = self._process.log_tail() if self._process is not None else "(never started)"
        raise ServiceFailed(f"RQD {self.name} does not answer at {self.address}:\n{tail}")

    def pause(self) -> None:
        """Freeze RQD: it accepts connections and answers nothing. Its frames go on."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen RQD go on."""
        os.kill(self.pid, signal.SIGCONT)

    def crash(self) -> None:
        """Kill RQD at once, and wait until the launcher has killed its frames."""
        os.kill(self.pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """Stop RQD and every frame it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()


class RealRqdFarm(Startable):
    """Several RQDs on one machine, each on its own port and with its own name (prefix1, prefix2, ...).

    ``report_address`` is the RqdReportInterface (Cuebot or our report service) as address:port. An RQD that finds
    nobody there tries again 15 seconds later, so start the report service first.
    """

    def __init__(
        self,
        count: int,
        *,
        report_address: str,
        directory: Path,
        cores: int = 2,
        tags: Sequence[str] = (),
        facility: str = "cloud",
        prefix: str = "render",
    ) -> None:
        host, _, port = report_address.rpartition(":")
        python = ensure_rqd_environment()
        self.rqds = [
            RealRqd(
                RqdConfig(
                    name=f"{prefix}{number}",
                    port=free_port(),
                    report_host=host,
                    report_port=int(port),
                    cores=cores,
                    tags=tuple(tags),
                    facility=facility,
                ),
                directory=directory,
                python=python,
            )
            for number in range(1, count + 1)
        ]

    @property
    def addresses(self) -> dict[str, str]:
        """host name -> address:port, as settings.rqd.addresses wants it."""
        return {rqd.name: rqd.address for rqd in self.rqds}

    def start(self) -> Self:
        """Start all and wait until each answers. Stops what was started when one fails."""
        try:
            for rqd in self.rqds:
                rqd.start()
            for rqd in self.rqds:
                rqd.wait_until_serving()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        for rqd in self.rqds:
            rqd.stop()
