"""``opencue-sched job log``: what a frame writes, where its log is visible on this machine."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

import click
from sqlalchemy import Connection, Engine

from opencue_sched.cli.inputs import JOB, CommandRefused, choose, farm, layer_ids, patiently
from opencue_sched.cli.output import json_option, show_json
from opencue_sched.domain.farm import FrameState, JobState, exit_meaning
from opencue_sched.domain.frames import log_path
from opencue_sched.insight.frame_logs import BLOCK_BYTES, harmless, open_log, read_tail, seek_tail
from opencue_sched.store import jobs
from opencue_sched.store.jobs import FrameView
from opencue_sched.store.shows import Kind, NamedRow

NOT_VISIBLE = 3
_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 15.0
"""A running frame's log may be seen that much later, over a file server that caches its directories."""
_MOST_DIGITS = 9
_JSON_LINES = 100
_JSON_BYTES = 1 << 22
"""The most of a log that JSON has, however many lines are asked for."""
_RUNS = frozenset({FrameState.RUNNING, FrameState.SETUP})
_TO_RUN = frozenset({FrameState.WAITING, FrameState.DEPEND, FrameState.CHECKPOINT})


@click.command("log")
@click.argument("name", type=JOB)
@click.argument("frame", metavar="FRAME")
@click.option("--layer", metavar="NAME", help="The layer, where FRAME is a number that several layers have.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written, until the frame's run ends.")
@click.option("--tail", type=click.IntRange(0), metavar="LINES", help="Only the last lines of output. Default: all.")
@json_option
def command(name: str, frame: str, layer: str | None, follow: bool, tail: int | None, as_json: bool) -> None:
    """Show the log of a frame: FRAME is its name (0007-render), or its number.

    A terminal gets it without colours and control characters. With -f, a frame that waits is waited for. A log that
    RQD wrote where this machine does not see it: the path and the host are told. JSON has the last
    100 lines, or as many as --tail says of the last 4 MiB.

    Exit status: 0 shown, with -f if the frame succeeded; 1 with -f if it did not; 3 the log is not visible here.

    Example: opencue-sched job log demo-sh010-alice_comp_v001 7 --layer render --tail 20
    """
    if follow and as_json:
        raise click.UsageError("-f goes on, which JSON cannot")
    with farm() as (engine, _):
        with engine.connect() as connection:
            job = choose(connection, Kind.JOB, name)
            row = _one_frame(connection, job, frame, () if layer is None else (layer,))
        log = _Log(log_path(row.log_dir, row.job, row.name), _JSON_LINES if as_json and tail is None else tail)
        if as_json:
            _show_json(row, log)
        elif follow:
            _follow(engine, job, row, log)
        elif not log.copy():
            _say_where(row, log.path)


def _one_frame(connection: Connection, job: NamedRow, word: str, layers: tuple[str, ...]) -> FrameView:
    """The frame of a name, an id or a number. Raises CommandRefused unless it is one."""
    ids = layer_ids(connection, job, layers)
    numbers = [int(word)] if word.isdecimal() and len(word) <= _MOST_DIGITS else None
    named = word if numbers is None else None
    found = jobs.frames_of(connection, job.id, layer_ids=ids, numbers=numbers, named=named, most=4)
    if not found:
        raise CommandRefused(f"{job.name} has no such frame {word!r}; `opencue-sched job frames {job.name}` lists them")
    if len(found) > 1:
        names = ", ".join(row.name for row in found[:3])
        raise CommandRefused(f"{word} are {names}{' and more' if len(found) > 3 else ''}; --layer says which")
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
    """Copy until the frame's run ends. The state is read first, so that all that a run wrote is copied."""
    ran, frame_id, patience = False, row.id, time.monotonic() + _PATIENCE_SECONDS
    while True:
        runs = row.state in _RUNS
        ended = (ran and not runs) or row.state not in _TO_RUN | _RUNS
        visible = log.copy()
        if ended or row.job_state == JobState.FINISHED:
            break
        if runs and not visible and time.monotonic() > patience:
            _say_where(row, log.path)
        if not runs:
            patience = time.monotonic() + _PATIENCE_SECONDS
        ran = runs
        time.sleep(_LOOK_SECONDS)
        found = patiently(engine, lambda connection: jobs.frames_of(connection, job.id, named=frame_id))
        if not found:
            raise CommandRefused(f"{row.name} of {job.name} was removed")
        row = found[0]
    click.echo(f"{row.name} is {row.state}: exit status {row.exit_status}, {exit_meaning(row.exit_status)}", err=True)
    if not visible:
        _say_where(row, log.path)
    if row.state != FrameState.SUCCEEDED:
        raise click.exceptions.Exit(1)


def _say_where(row: FrameView, path: str) -> None:
    """Where the log would be. Ends with NOT_VISIBLE."""
    where = f"on {row.host}" if row.host else "that has not run yet"
    what = f"the log of {row.name} {where} is not visible on this machine"
    click.echo(f"{what}: {row.loki_url or path}", err=True)
    raise click.exceptions.Exit(NOT_VISIBLE)


def _show_json(row: FrameView, log: _Log) -> None:
    tail = read_tail(log.path, log.tail or 0, most_bytes=_JSON_BYTES)
    lines = None if tail is None else tail[0].splitlines()
    keys = ("job", "name", "id", "layer", "state", "host", "exit_status", "loki_url")
    facts = {key: getattr(row, key) for key in keys}
    more = {"meaning": exit_meaning(row.exit_status), "log": log.path, "visible": lines is not None, "lines": lines}
    show_json(facts | more)
    if lines is None:
        raise click.exceptions.Exit(NOT_VISIBLE)
