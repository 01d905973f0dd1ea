"""``opencue-sched job wait`` and what ``submit --wait`` shows: how far jobs are."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import click
from sqlalchemy import Engine

from opencue_sched.cli.inputs import patiently
from opencue_sched.cli.output import Done, asked_for_json, live
from opencue_sched.domain.names import plural
from opencue_sched.domain.states import JobState
from opencue_sched.domain.units import duration_text
from opencue_sched.store import jobs
from opencue_sched.store.jobs import LayerView
from opencue_sched.store.named_rows import NamedRow

if TYPE_CHECKING:
    from rich.console import Group

_LOOK_SECONDS = 1.0
"""The time between two looks at the jobs."""
_LINES_SECONDS = 10.0
"""The time between two lines about a layer where there is no terminal."""


def wait_for(engine: Engine, chosen: Sequence[NamedRow]) -> Done:
    """Show how far jobs are until all have ended, with one statement a look, and through failures of PostgreSQL.

    Returns how each job ended: ``outcome`` is succeeded, dead, eaten, killed or removed. The exit status is 1 unless
    all succeeded.
    """
    ended: dict[str, dict[str, Any]] = {}
    looks = _looks(engine, chosen, ended)
    if asked_for_json():
        deque(looks, maxlen=0)
    elif sys.stdout.isatty():
        live(lambda console: (_picture(layers, *console.size) for layers in looks))
    else:
        _show_lines(looks)
    result = [ended[job.id] for job in chosen]
    failed = any(job["outcome"] != "succeeded" for job in result)
    return Done([_end_words(job) for job in result], result, status=int(failed))


def _end_words(job: dict[str, Any]) -> str:
    """The line for people that says how a job ended."""
    more = {
        "dead": f", {job['dead']} dead; `opencue-sched explain {job['job']}` says of what",
        "eaten": f", {job['eaten']} eaten",
        "killed": "; it was killed",
        "removed": "; it was removed",
    }
    done = f"{job['succeeded']} of {plural(job['frames'], 'frame')} succeeded"
    return f"{job['job']}: {done}{more.get(job['outcome'], '')}"


def _looks(
    engine: Engine, chosen: Sequence[NamedRow], ended: dict[str, dict[str, Any]]
) -> Iterator[Sequence[LayerView]]:
    """The layers at each look, until all jobs have ended. Adds how each job ended to ``ended``, by the job's id."""
    stuck: set[str] = set()
    ids = [job.id for job in chosen]
    while True:
        layers = patiently(engine, lambda connection: jobs.layers_of(connection, *ids))
        yield layers
        for job in chosen:
            of_job = [layer for layer in layers if layer.job_id == job.id]
            outcome = _outcome(of_job)
            # Dead at two looks in a row: frames that wait for one which just succeeded may be freed a moment later.
            if outcome == "dead" and job.id not in stuck:
                stuck.add(job.id)
            elif outcome is None:
                stuck.discard(job.id)
            elif job.id not in ended:
                sums = {key: sum(getattr(layer, key) for layer in of_job) for key in ("succeeded", "dead", "eaten")}
                frames = sum(layer.total for layer in of_job)
                ended[job.id] = {"job": job.name, "id": job.id, "outcome": outcome, "frames": frames, **sums}
        if len(ended) == len(chosen):
            return
        time.sleep(_LOOK_SECONDS)


def _outcome(layers: Sequence[LayerView]) -> str | None:
    """How the job of these layers ended; None if it goes on."""
    if not layers:
        return "removed"
    if layers[0].job_state == JobState.STARTUP:
        return None
    if all(layer.succeeded == layer.total for layer in layers):
        return "succeeded"
    if all(layer.done == layer.total for layer in layers):
        return "eaten"
    if layers[0].job_state == JobState.FINISHED:
        return "killed"
    goes_on = any(layer.waiting or layer.running or layer.checkpoint for layer in layers)
    return "dead" if not goes_on and any(layer.dead for layer in layers) else None


# Shown while the jobs go on.


def _show_lines(looks: Iterable[Sequence[LayerView]]) -> None:
    """Print a line for each layer that went on since its last line, now and then."""
    told: dict[str, str] = {}
    due = 0.0
    for layers in looks:
        if time.monotonic() >= due:
            due = time.monotonic() + _LINES_SECONDS
            now = {
                layer.id: f"{layer.job} {layer.name}: {', '.join(word for word in _words(layer) if word)}"
                for layer in layers
            }
            for layer_id, text in now.items():
                if told.get(layer_id) != text:
                    click.echo(text)
            told = now


def _picture(layers: Sequence[LayerView], width: int, height: int) -> Group:
    """Each job's name, and a bar for each layer; of more layers than the terminal has lines, of those not done."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    parts: list[Text | Table] = []
    shown = [layer for layer in layers if len(layers) < height or layer.done < layer.total]
    for _, of_job in groupby(shown, key=attrgetter("job_id")):
        job = list(of_job)
        parts.append(Text(f"{job[0].job}{' (paused)' if job[0].paused else ''}", style="bold"))
        if any(layer.waiting for layer in job) and not any(layer.running for layer in job):
            parts.append(Text("nothing of it runs; `opencue-sched explain JOB` says why", style="yellow"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.width = width - 2  # room for the terminal's ^C, which would scroll what is drawn
        table.add_column(max_width=width // 3, overflow="fold")
        table.add_column(ratio=1, min_width=6)
        for least in (12, 11, 7, 9):
            table.add_column(justify="right", min_width=least, no_wrap=True)
        for layer in job:
            done, running, dead, left = _words(layer)
            bar = ProgressBar(total=max(1, layer.total), completed=layer.done, complete_style="cyan")
            table.add_row(Text(layer.name), bar, done, running, Text(dead, "red"), left)
        parts.append(table)
    return Group(*parts)


def _words(layer: LayerView) -> tuple[str, str, str, str]:
    """``12/48 done``, ``3 running``, ``1 dead`` and ``4m left``; empty where there is nothing to say."""
    left = ""
    if layer.running and layer.mean_seconds is not None:
        # Frames that run are half through, on average.
        frames = layer.total - layer.succeeded - layer.eaten - layer.dead - layer.running / 2
        left = f"{duration_text(layer.mean_seconds * frames / layer.running)} left"
    return (
        f"{layer.done}/{layer.total} done",
        f"{layer.running} running" if layer.running else "",
        f"{layer.dead} dead" if layer.dead else "",
        left,
    )
