"""Run the demo from beginning to end."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import redis
from pydantic import SecretStr
from rich.console import Console

from opencue_sched.embedded import renderer
from opencue_sched.embedded.demo.stage import SHOW, Stage, stage
from opencue_sched.embedded.demo.watch import Outcome, watch_job
from opencue_sched.embedded.processes import ServiceFailed
from opencue_sched.insight.audit import AuditReport, run_audit
from opencue_sched.settings import Accounting, Settings

CONTACT_SHEET = "contact-sheet.png"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """``output`` is where the pictures go. Seconds are for the job, not for installing anything."""

    frames: int = 48
    hosts: int = 3
    cores_per_host: int = 2
    workers: int = 2
    width: int = 192
    height: int = 108
    keep: bool = False
    output: Path = Path("demo-output")
    deadline_seconds: float = 600.0


def run_demo(options: DemoOptions, console: Console) -> int:
    """Everything; returns the exit status: 0 when the job finished and the audit passed."""
    _clean_up_on_signals()
    with stage(
        hosts=options.hosts,
        cores=options.cores_per_host,
        workers=options.workers,
        say=lambda text: console.print(f"[cyan]·[/cyan] {text}"),
    ) as farm:
        try:
            outcome = _render(farm, options, console)
        except ServiceFailed:
            _show_logs(farm, console)
            raise
        picture = _collect(farm, options)
        report = _audit(farm)
        _summarise(farm, options, outcome, report, picture, console)
        if options.keep:
            _keep(farm, console)
        return 1 if report.failed else 0


def _render(farm: Stage, options: DemoOptions, console: Console) -> Outcome:
    job_file = farm.directory / "job.json"
    job_file.write_text(json.dumps(_job(farm, options)), encoding="utf-8")
    submitted = json.loads(farm.command("submit", str(job_file), "--json"))
    console.print(f"[cyan]·[/cyan] submitted {submitted['name']}: {options.frames} frames and a contact sheet")

    def check() -> None:
        if ended := farm.fleet.ended():
            raise ServiceFailed(f"{', '.join(ended)} ended by itself")

    return watch_job(farm.engine, submitted["job"], console, deadline_seconds=options.deadline_seconds, check=check)


def _job(farm: Stage, options: DemoOptions) -> dict[str, object]:
    """The job file: an animation, and a second layer that depends on it."""
    program = f"{sys.executable} {Path(renderer.__file__)}"
    frames = farm.frames_directory
    return {
        "show": SHOW,
        "shot": "sh010",
        "user": "demo",
        "name": "turntable",
        "layers": [
            {
                "name": "render",
                "command": f"{program} frame --number #IFRAME# --count {options.frames} --width {options.width} "
                f"--height {options.height} --output {frames}/frame.%04d.png",
                "range": f"1-{options.frames}",
                "cores": 1,
                "threadable": False,
                "memory": "512MiB",
                "tags": ["general"],
            },
            {
                "name": "contact_sheet",
                "command": f"{program} sheet --input {frames} --count {options.frames} "
                f"--output {frames}/{CONTACT_SHEET}",
                "range": "1",
                "cores": 1,
                "threadable": False,
                "memory": "512MiB",
                "tags": ["general"],
                "depends": ["render"],
            },
        ],
    }


def _collect(farm: Stage, options: DemoOptions) -> Path:
    options.output.mkdir(parents=True, exist_ok=True)
    picture = options.output / CONTACT_SHEET
    shutil.copyfile(farm.frames_directory / CONTACT_SHEET, picture)
    frames = options.output / "frames"
    shutil.rmtree(frames, ignore_errors=True)
    frames.mkdir()
    for frame in sorted(farm.frames_directory.glob("frame.*.png")):
        shutil.copyfile(frame, frames / frame.name)
    return picture


def _audit(farm: Stage) -> AuditReport:
    environment = farm.fleet.environment
    settings = Settings(
        database_url=SecretStr(environment["OPENCUE_SCHED_DATABASE_URL"]),
        redis_url=SecretStr(environment["OPENCUE_SCHED_REDIS_URL"]),
        accounting=Accounting(
            commit_deadline=float(environment["OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE"]),
            in_flight_age=float(environment["OPENCUE_SCHED_ACCOUNTING__IN_FLIGHT_AGE"]),
        ),
    )
    client = redis.Redis.from_url(settings.redis_dsn, decode_responses=True, socket_timeout=10)
    try:
        return run_audit(farm.engine, client, settings)
    finally:
        client.close()


def _summarise(
    farm: Stage, options: DemoOptions, outcome: Outcome, report: AuditReport, picture: Path, console: Console
) -> None:
    progress = outcome.progress
    console.print(
        f"\n[bold]{progress.done} of {progress.total} frames[/bold] in {outcome.seconds:.1f} s on {options.hosts} RQDs "
        f"({progress.done / outcome.seconds:.2f} frames/s, up to {outcome.most_cores} cores booked)"
    )
    console.print("\n[bold]audit[/bold]")
    for line in report.lines():
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"\n[bold]contact sheet[/bold]  {picture}")
    console.print(f"[bold]Flower[/bold]         {farm.flower_url}" + ("" if options.keep else "  (was)"))
    for url in farm.metrics_urls:
        console.print(f"[bold]metrics[/bold]        {url}" + ("" if options.keep else "  (was)"))


def _keep(farm: Stage, console: Console) -> None:
    names = ("DATABASE_URL", "REDIS_URL", "RQD__ADDRESSES", "SUBMISSION__LOG_ROOT")
    console.print("\nThe farm stays up. To talk to it:")
    for name in names:
        value = farm.fleet.environment[f"OPENCUE_SCHED_{name}"]
        console.print(f"  export OPENCUE_SCHED_{name}='{value}'", soft_wrap=True, markup=False)
    console.print(f"Logs are in {farm.directory}. Press Ctrl-C to stop everything.")
    with suppress(KeyboardInterrupt):  # what ends the farm, not what ends the demo: it has done all it should
        signal.pause()


def _show_logs(farm: Stage, console: Console) -> None:
    for log in sorted(farm.directory.glob("*.log")):
        console.print(f"\n[bold]{log.name}[/bold]")
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _clean_up_on_signals() -> None:
    """End as on Ctrl-C when told to stop, and when the terminal is closed (unless ``nohup`` says to go on)."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    # A closed terminal is told by the system and by the shell: the second time must not end the cleaning up.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise KeyboardInterrupt
