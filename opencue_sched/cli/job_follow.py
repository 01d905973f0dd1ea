"""``opencue-sched job wait``, ``job log`` and what ``submit --wait`` shows: how far jobs are, and what frames write."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import click
from sqlalchemy import Connection, Engine

from opencue_sched.cli.inputs import JOB, choose, farm, layer_ids, patiently
from opencue_sched.cli.output import Done, asked_for_json, live
from opencue_sched.domain.frame_command import log_path
from opencue_sched.domain.names import counted
from opencue_sched.domain.states import FrameState, JobState, exit_meaning
from opencue_sched.domain.units import duration_text
from opencue_sched.errors import InvalidInput
from opencue_sched.insight.frame_logs import BLOCK_BYTES, harmless, open_log, seek_tail
from opencue_sched.store import jobs
from opencue_sched.store.jobs import FrameView, LayerView
from opencue_sched.store.named_rows import Kind, NamedRow

if TYPE_CHECKING:
    from rich.console import Group

_LOOK_SECONDS = 1.0

# ``opencue-sched job wait``.

_LINES_SECONDS = 10.0
"""Without a terminal, what changed is told that often at most."""


def wait_for(engine: Engine, chosen: Sequence[NamedRow]) -> Done:
    """Show how far jobs are until all have ended; with one statement a look, and through failures of PostgreSQL. How
    they ended: ``outcome`` is succeeded, dead, eaten, killed or removed; exit status 1 unless all succeeded."""
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
    more = {
        "dead": f", {job['dead']} dead; `opencue-sched explain {job['job']}` says of what",
        "eaten": f", {job['eaten']} eaten",
        "killed": "; it was killed",
        "removed": "; it was removed",
    }
    done = f"{job['succeeded']} of {counted(job['frames'], 'frame')} succeeded"
    return f"{job['job']}: {done}{more.get(job['outcome'], '')}"


def _looks(
    engine: Engine, chosen: Sequence[NamedRow], ended: dict[str, dict[str, Any]]
) -> Iterator[Sequence[LayerView]]:
    """The layers at each look, until all jobs are among those that ``ended``."""
    stuck: set[str] = set()
    ids = [job.id for job in chosen]
    while True:
        layers = patiently(engine, lambda connection: jobs.layers_of(connection, *ids))
        yield layers
        for job in chosen:
            of_job = [layer for layer in layers if layer.job_id == job.id]
            outcome = _outcome(of_job)
            # What waits for a frame that just succeeded may be freed a moment later.
            if outcome == "dead" and job.id not in stuck:
                stuck.add(job.id)
            elif outcome is None:
                stuck.discard(job.id)
            elif job.id not in ended:
                sums = {key: sum(getattr(it, key) for it in of_job) for key in ("succeeded", "dead", "eaten")}
                frames = sum(it.total for it in of_job)
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


# What is shown meanwhile.


def _show_lines(looks: Iterable[Sequence[LayerView]]) -> None:
    """Now and then a line for each layer that went on."""
    told: dict[str, str] = {}
    due = 0.0
    for layers in looks:
        if time.monotonic() >= due:
            due = time.monotonic() + _LINES_SECONDS
            now = {it.id: f"{it.job} {it.name}: {', '.join(word for word in _words(it) if word)}" for it in layers}
            for layer, text in now.items():
                if told.get(layer) != text:
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


# ``opencue-sched job log``.

NOT_VISIBLE = 3
_OVER = frozenset({FrameState.SUCCEEDED, FrameState.DEAD, FrameState.EATEN})


@click.command("log")
@click.argument("name", type=JOB)
@click.argument("frame", metavar="FRAME")
@click.option("--layer", metavar="NAME", help="The layer, where FRAME is a number that several layers have.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written, until the frame is over.")
@click.option("--tail", type=click.IntRange(0), metavar="LINES", help="Only the last lines of output. Default: all.")
def log_command(name: str, frame: str, layer: str | None, follow: bool, tail: int | None) -> None:
    """Show the log of a frame: FRAME is its name (0007-render), or its number.

    A terminal gets it without colours and control characters. With -f, a frame that waits is waited for. A log that
    RQD wrote where this machine does not see it: the path and the host are told; `job frames --json` has the paths.

    Exit status: 0 shown, with -f if the frame succeeded; 1 with -f if it did not; 3 the log is not visible here.

    Example: opencue-sched job log demo-sh010-alice_comp_v001 7 --layer render --tail 20
    """
    with farm() as engine:
        with engine.connect() as connection:
            (job,) = choose(connection, Kind.JOB, [name])
            row = _one_frame(connection, job, frame, () if layer is None else (layer,))
        log = _Log(log_path(row.log_dir, row.job, row.name), tail)
        if follow:
            _follow(engine, job, row, log)
        elif not log.copy():
            click.echo(_where(row, log.path), err=True)
            raise click.exceptions.Exit(NOT_VISIBLE)


def _one_frame(connection: Connection, job: NamedRow, word: str, layers: tuple[str, ...]) -> FrameView:
    """The frame of a name, an id or a number. Raises InvalidInput unless it is one."""
    ids = layer_ids(connection, job, layers)
    numbers = [int(word)] if word.isdecimal() else None
    named = word if numbers is None else None
    found = jobs.frames_of(connection, job.id, layer_ids=ids, numbers=numbers, named=named, most=4)
    if not found:
        raise InvalidInput(f"{job.name} has no such frame {word!r}; `opencue-sched job frames {job.name}` lists them")
    if len(found) > 1:
        names = ", ".join(row.name for row in found[:3])
        raise InvalidInput(f"{word} are {names}{' and more' if len(found) > 3 else ''}; --layer says which")
    return found[0]


@dataclass(slots=True)
class _Log:
    """How far a log has been copied to standard output; ``inode`` is of the file that was copied."""

    path: str
    tail: int | None
    inode: int = 0
    position: int = 0

    def copy(self) -> bool:
        """Copy what is there and was not yet. False if no log is visible."""
        out = sys.stdout.buffer
        for_people = sys.stdout.isatty()
        try:
            with open_log(self.path) as log:
                facts, left = os.fstat(log.fileno()), sys.maxsize
                if not self.inode and self.tail is not None:
                    left = seek_tail(log, self.tail)
                elif self.inode == facts.st_ino and self.position <= facts.st_size:
                    log.seek(self.position)
                self.inode = facts.st_ino
                while block := log.readline(min(BLOCK_BYTES, left)):
                    left -= len(block)
                    out.write(harmless(block.decode(errors="replace")).encode() if for_people else block)
                self.position = log.tell()
        except OSError:
            return False
        out.flush()
        return True


def _follow(engine: Engine, job: NamedRow, row: FrameView, log: _Log) -> None:
    """Copy until the frame is over. The state is read first, so that all that its runs wrote is copied."""
    told, frame_id = False, row.id
    while True:
        visible = log.copy()
        if row.state in _OVER or row.job_state == JobState.FINISHED:
            break
        if row.state == FrameState.RUNNING and not visible and not told:
            click.echo(_where(row, log.path), err=True)
            told = True
        time.sleep(_LOOK_SECONDS)
        found = patiently(engine, lambda connection: jobs.frames_of(connection, job.id, named=frame_id))
        if not found:
            raise InvalidInput(f"{row.name} of {job.name} was removed")
        row = found[0]
    click.echo(f"{row.name} is {row.state}: exit status {row.exit_status}, {exit_meaning(row.exit_status)}", err=True)
    if not visible:
        raise click.exceptions.Exit(NOT_VISIBLE)
    if row.state != FrameState.SUCCEEDED:
        raise click.exceptions.Exit(1)


def _where(row: FrameView, path: str) -> str:
    where = f"on {row.host}" if row.host else "that has not run yet"
    return f"the log of {row.name} {where} is not visible on this machine: {row.loki_url or path}"
