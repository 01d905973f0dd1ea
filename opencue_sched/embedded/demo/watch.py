"""What the demo shows while the farm works."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sqlalchemy import Engine

from opencue_sched.embedded.processes import ServiceFailed
from opencue_sched.store.jobs import JobProgress, read_progress

POLL_SECONDS = 0.25
PLAIN_LINE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job went. Seconds from submission to FINISHED; the most cores that were booked at once."""

    progress: JobProgress
    seconds: float
    most_cores: int


def watch_job(
    engine: Engine, job_id: str, console: Console, *, deadline_seconds: float, check: Callable[[], None]
) -> Outcome:
    """Show the job until it is FINISHED. ``check`` raises when something the farm needs has ended.

    Raises ServiceFailed when the deadline passes, or when frames are dead and nothing moves any more.
    """
    began = time.monotonic()
    most_cores = 0
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    task = bar.add_task("frames done")
    printed = 0.0
    with Live(console=console, refresh_per_second=8, transient=False) as live:
        while True:
            with engine.connect() as connection:
                progress = read_progress(connection, job_id)
            elapsed = time.monotonic() - began
            most_cores = max(most_cores, progress.cores)
            bar.update(task, total=progress.total, completed=progress.done)
            live.update(Group(bar, _table(progress, elapsed)))
            if not console.is_terminal and elapsed - printed >= PLAIN_LINE_SECONDS:
                printed = elapsed
                console.print(_line(progress, elapsed))
            if progress.finished:
                return Outcome(progress, elapsed, most_cores)
            if progress.dead and not progress.running and not progress.waiting:
                raise ServiceFailed(f"{progress.dead} frames of the job are dead; see their logs")
            if elapsed > deadline_seconds:
                raise ServiceFailed(f"the job did not finish in {deadline_seconds:.0f} s: {_line(progress, elapsed)}")
            check()
            time.sleep(POLL_SECONDS)


def _line(progress: JobProgress, elapsed: float) -> str:
    rate = progress.done / max(elapsed, 0.1)
    return (
        f"{progress.done}/{progress.total} done, {progress.running} running, {progress.waiting} waiting, "
        f"{progress.depending} depending, {progress.cores} cores booked, {rate:.2f} frames/s"
    )


def _table(progress: JobProgress, elapsed: float) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("waiting", "depending", "running", "done", "dead", "cores booked", "frames/s"):
        table.add_column(heading, justify="right")
    rate = progress.done / max(elapsed, 0.1)
    table.add_row(
        str(progress.waiting),
        str(progress.depending),
        str(progress.running),
        str(progress.done),
        str(progress.dead),
        str(progress.cores),
        f"{rate:.2f}",
    )
    return table
