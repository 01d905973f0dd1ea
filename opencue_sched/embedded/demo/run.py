"""The demo: a whole farm on this machine renders an animation, through the real path."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import redis
from pydantic import SecretStr
from rich.console import Console
from sqlalchemy import Engine, create_engine

from opencue_sched.embedded.demo import renderer
from opencue_sched.embedded.rqds.real_rqd import RealRqdFarm
from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.embedded.servers.processes import ServiceFailed, free_port, private_directory, remove_directory
from opencue_sched.embedded.servers.services import EmbeddedPostgres, EmbeddedRedis
from opencue_sched.insight.audit import Report, run_audit
from opencue_sched.settings import Accounting, Settings
from opencue_sched.worker.metrics import PORTS_TRIED

_SHOW = "demo"
_CONTACT_SHEET = "contact-sheet.png"
_CORES_PER_HOST = 2
_WIDTH, _HEIGHT = 192, 108
"""The size of a rendered picture, in pixels."""
_DEADLINE_SECONDS = 600.0
"""How long the job may take. Installing and starting the farm is not part of it."""
_COMMAND_SECONDS = 60
"""How long one command of the demonstration may take."""
_COMMIT_DEADLINE_SECONDS = 2
"""The demonstration's accounting.commit_deadline."""
_POLL_SECONDS = 0.25
"""The time between two looks at the job."""
_CLI = (sys.executable, "-c", "from opencue_sched.cli import main; main()")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the user of the demonstration chose."""

    frames: int = 48
    hosts: int = 3
    workers: int = 2
    keep: bool = False
    output: Path = Path("demo-output")
    """The directory for the pictures."""


def run_demo(options: DemoOptions, console: Console) -> int:
    """Everything; returns the exit status: 0 when the job finished and the audit passed."""
    clean_up_on_signals()
    with _stage(options, say=lambda text: console.print(f"[cyan]·[/cyan] {text}")) as farm:
        try:
            seconds = _render(farm, options, console)
        except ServiceFailed:
            _show_logs(farm, console)
            raise
        picture = _collect(farm, options)
        report = _audit(farm)
        _summarise(farm, options, seconds, report, picture, console)
        if options.keep:
            _keep(farm, console)
        return 1 if report.failed else 0


def _render(farm: _Stage, options: DemoOptions, console: Console) -> float:
    """Submit the job as a user would, and show how far it is; the seconds it took. Raises ServiceFailed unless all its
    frames succeeded."""
    job_file = farm.directory / "job.json"
    job_file.write_text(json.dumps(_job(farm, options)), encoding="utf-8")
    console.print(f"[cyan]·[/cyan] watch it in a browser: {farm.flower_url}/farm")
    began = time.monotonic()
    with subprocess.Popen(
        [*_CLI, "submit", str(job_file), "--wait"], env=farm.fleet.environment, cwd=farm.directory
    ) as waiting:
        try:
            while waiting.poll() is None:
                if ended := farm.fleet.ended():
                    raise ServiceFailed(f"{', '.join(ended)} ended by itself")
                if time.monotonic() - began > _DEADLINE_SECONDS:
                    raise ServiceFailed(f"the job did not finish in {_DEADLINE_SECONDS:.0f} s")
                time.sleep(_POLL_SECONDS)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):  # Ctrl-C reached it too: it tidies the terminal up
                waiting.wait(1)
            waiting.terminate()
    if waiting.returncode != 0:
        raise ServiceFailed("not all frames of the job succeeded; see their logs")
    return time.monotonic() - began


def _job(farm: _Stage, options: DemoOptions) -> dict[str, object]:
    """The job file: an animation, and a second layer that depends on it."""
    program = f"{sys.executable} {Path(renderer.__file__)}"
    frames = farm.frames_directory
    needs: dict[str, object] = {"cores": 1, "threadable": False, "memory": "512MiB", "tags": ["general"]}
    return {
        "show": _SHOW,
        "shot": "sh010",
        "user": "demo",
        "name": "turntable",
        "layers": [
            needs
            | {
                "name": "render",
                "command": f"{program} frame --number #IFRAME# --count {options.frames} --width {_WIDTH} "
                f"--height {_HEIGHT} --output {frames}/frame.%04d.png",
                "range": f"1-{options.frames}",
            },
            needs
            | {
                "name": "contact_sheet",
                "command": f"{program} sheet --input {frames} --count {options.frames} "
                f"--output {frames}/{_CONTACT_SHEET}",
                "range": "1",
                "depends": ["render"],
            },
        ],
    }


def _collect(farm: _Stage, options: DemoOptions) -> Path:
    """Copy the pictures to the directory of the output, in place of older ones; returns the path of the contact
    sheet."""
    options.output.mkdir(parents=True, exist_ok=True)
    picture = options.output / _CONTACT_SHEET
    shutil.copyfile(farm.frames_directory / _CONTACT_SHEET, picture)
    frames = options.output / "frames"
    shutil.rmtree(frames, ignore_errors=True)
    shutil.copytree(farm.frames_directory, frames, ignore=shutil.ignore_patterns(_CONTACT_SHEET))
    return picture


def _audit(farm: _Stage) -> Report:
    """Audit the farm's books, with the settings of its workers."""
    environment = farm.fleet.environment
    settings = Settings(
        database_url=SecretStr(environment["OPENCUE_SCHED_DATABASE_URL"]),
        redis_url=SecretStr(environment["OPENCUE_SCHED_REDIS_URL"]),
        accounting=Accounting(commit_deadline=_COMMIT_DEADLINE_SECONDS),
    )
    with redis.Redis.from_url(settings.redis_dsn, decode_responses=True, socket_timeout=10) as client:
        return run_audit(farm.engine, client, settings)


def _summarise(
    farm: _Stage, options: DemoOptions, seconds: float, report: Report, picture: Path, console: Console
) -> None:
    """Print how fast the frames were, what the audit found, and where pictures, page and metrics are. ``seconds``: how
    long the job took."""
    frames = options.frames + 1  # and the contact sheet
    console.print(
        f"\n[bold]{frames} of {frames} frames[/bold] in {seconds:.1f} s on {options.hosts} RQDs "
        f"({frames / seconds:.2f} frames/s)"
    )
    console.print("\n[bold]audit[/bold]")
    for line in report.lines():
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"\n[bold]contact sheet[/bold]  {picture}")
    if not options.keep:
        console.print("\nThe farm is gone again; `opencue-sched demo --keep` leaves it up, with its page and metrics.")
        return
    for name, url in (("farm page", f"{farm.flower_url}/farm"), ("Flower", farm.flower_url)):
        console.print(f"[bold]{name:<13}[/bold]  {url}")
    *of_workers, of_beat = farm.metrics_urls
    for url, whose in (*((url, "a worker's") for url in of_workers), (of_beat, "the beat's: the farm")):
        console.print(f"[bold]metrics[/bold]        {url}  ({whose})")


def _keep(farm: _Stage, console: Console) -> None:
    """Say how to talk to the farm, and wait for Ctrl-C."""
    console.print("\nThe farm stays up. To talk to it:")
    for name in ("DATABASE_URL", "REDIS_URL", "RQD__ADDRESSES", "LOG_ROOT"):
        value = farm.fleet.environment[f"OPENCUE_SCHED_{name}"]
        console.print(f"  export OPENCUE_SCHED_{name}='{value}'", soft_wrap=True, markup=False)
    console.print(f"Logs are in {farm.directory}. Press Ctrl-C to stop everything.")
    with contextlib.suppress(KeyboardInterrupt):  # it ends the farm; the demo has done all it should
        signal.pause()


def _show_logs(farm: _Stage, console: Console) -> None:
    """Print the last 15 lines of each log of the farm."""
    for log in sorted(farm.directory.glob("*.log")):
        console.print(f"\n[bold]{log.name}[/bold]")
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def clean_up_on_signals() -> None:
    """End as on Ctrl-C when told to stop, and when the terminal is closed (unless ``nohup`` says to go on)."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    # A closed terminal is told by the system and by the shell: the second time must not end the cleaning up.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class _Stage:
    """A farm that is up."""

    fleet: Fleet
    engine: Engine
    directory: Path
    """The private directory of the demonstration."""
    frames_directory: Path
    """Where frames are written, in the private directory."""
    flower_url: str
    metrics_urls: tuple[str, ...]
    """The URLs of the workers' metrics, then that of the beat, which has the figures of the farm."""

    def command(self, *arguments: str) -> str:
        """Run ``opencue-sched ARGUMENTS`` as a user would; its output. Raises ServiceFailed with what it said."""
        ended = subprocess.run(
            [*_CLI, *arguments],
            env=self.fleet.environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_SECONDS,
        )
        if ended.returncode != 0:
            said = (ended.stdout + ended.stderr).strip()
            raise ServiceFailed(f"opencue-sched {' '.join(arguments)} failed with status {ended.returncode}: {said}")
        return ended.stdout


@contextlib.contextmanager
def _stage(options: DemoOptions, *, say: Callable[[str], None]) -> Iterator[_Stage]:
    """Stores, report service, RQDs, workers, beat and Flower, all on free ports of loopback."""
    with contextlib.ExitStack() as stack:
        directory = private_directory("demo")
        stack.callback(remove_directory, directory)
        say("PostgreSQL and Redis from wheels")
        postgres = stack.enter_context(EmbeddedPostgres())
        cache = stack.enter_context(EmbeddedRedis())
        report_port, flower_port = free_port(), free_port()
        say("real RQDs (their environment is made at the first run)")
        rqds = RealRqdFarm(
            options.hosts,
            report_address=f"127.0.0.1:{report_port}",
            directory=directory,
            cores=_CORES_PER_HOST,
            tags=("general",),
            facility="local",
        )
        fleet = stack.enter_context(
            Fleet(
                {
                    "OPENCUE_SCHED_DATABASE_URL": postgres.url,
                    "OPENCUE_SCHED_REDIS_URL": cache.url,
                    "OPENCUE_SCHED_RELEASE__PORT": str(report_port),
                    "OPENCUE_SCHED_RQD__ADDRESSES": json.dumps(rqds.addresses),
                    "OPENCUE_SCHED_LOG_ROOT": str(directory / "render-logs"),
                    "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": str(_COMMIT_DEADLINE_SECONDS),
                    "OPENCUE_SCHED_ACCOUNTING__RECOMPUTE_INTERVAL_SECONDS": "10",
                    "OPENCUE_SCHED_QUEUE__CLUSTER_RELOAD_INTERVAL": "2",
                },
                directory,
            )
        )
        engine = create_engine(postgres.url, pool_size=2)
        stack.callback(engine.dispose)
        frames_directory = directory / "frames"
        frames_directory.mkdir()
        of_workers, of_beat = [free_port() for _ in range(options.workers)], free_port()
        ready = _Stage(
            fleet=fleet,
            engine=engine,
            directory=directory,
            frames_directory=frames_directory,
            flower_url=f"http://127.0.0.1:{flower_port}",
            metrics_urls=tuple(f"http://127.0.0.1:{port}/metrics" for port in (*of_workers, of_beat)),
        )
        say("schema, show and subscription")
        ready.command("migrate")
        ready.command("show", "create", _SHOW, "--managed")
        ready.command("subscription", "create", _SHOW, "local.general", str(options.hosts * _CORES_PER_HOST))
        say("report service, then the RQDs")
        fleet.report_service()
        stack.enter_context(rqds)
        say("workers, beat and Flower")
        for number, port in enumerate(of_workers, 1):
            fleet.worker(f"worker{number}", OPENCUE_SCHED_QUEUE__METRICS_PORT=str(port))
        fleet.beat(OPENCUE_SCHED_QUEUE__METRICS_PORT=str(of_beat - PORTS_TRIED))
        fleet.flower(flower_port)
        yield ready
