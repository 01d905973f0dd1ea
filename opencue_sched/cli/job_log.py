"""``opencue-sched job log``: what frames write."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

import click
from sqlalchemy import Connection, Engine

from opencue_sched.cli.inputs import JOB, WholeNumber, choose, farm, layer_ids, patiently
from opencue_sched.domain.frame_command import log_path
from opencue_sched.domain.states import FrameState, JobState, exit_meaning
from opencue_sched.errors import InvalidInput
from opencue_sched.insight.frame_logs import BLOCK_BYTES, harmless, open_log, seek_tail
from opencue_sched.store import jobs
from opencue_sched.store.jobs import FrameView
from opencue_sched.store.named_rows import Kind, NamedRow

_LOOK_SECONDS = 1.0
"""The time between two looks for more of a log that is followed."""
NOT_VISIBLE = 3
"""The exit status where the log's directory is not visible on this machine, or the log is not there yet."""
_OVER = frozenset({FrameState.SUCCEEDED, FrameState.DEAD, FrameState.EATEN})


@click.command("log")
@click.argument("name", type=JOB)
@click.argument("frame", metavar="FRAME")
@click.option("--layer", metavar="NAME", help="The layer, where FRAME is a number that several layers have.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written, until the frame is over.")
@click.option("--tail", type=WholeNumber(0), metavar="LINES", help="Only the last lines of output. Default: all.")
def log_command(name: str, frame: str, layer: str | None, follow: bool, tail: int | None) -> None:
    """Show the log of a frame: FRAME is its name (0007-render), or its number.

    A terminal gets it without colours and control characters. With -f, a frame that waits is waited for. A log that
    RQD wrote where this machine does not see it: the path and the host are told; `job frames --json` has the paths.

    Exit status: 0 shown, with -f if the frame succeeded; 1 with -f if it did not; 3 the log is not visible here, or not
    there yet.

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
    """The frame of a job with this name, id or number. Raises InvalidInput where no frame has it, or several have."""
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
    """How far a log has been copied to standard output."""

    path: str
    tail: int | None
    inode: int = 0
    """The inode of the file that was copied; 0 before any was."""
    position: int = 0
    """How many bytes of the log were copied."""

    def copy(self) -> bool:
        """Copy what the log has and was not copied yet. False if no log is visible."""
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
    """Copy until the frame is over. Its state is read before its log, so that all that its runs wrote is copied."""
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
    """A sentence that says where the log of a frame is that this machine does not see, or that there is none yet."""
    if not row.host:
        return f"{row.name} has not run yet; -f waits for its log: {row.loki_url or path}"
    return f"the log of {row.name} on {row.host} is not visible on this machine: {row.loki_url or path}"
