"""``opencue-sched proc``: what runs, and where."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import click
from sqlalchemy import Connection

from opencue_sched.cli import output
from opencue_sched.cli.deferred import control, force_option, settle, who_and_why
from opencue_sched.cli.host import PROC_COLUMNS
from opencue_sched.cli.inputs import CommandRefused, choose, completing, farm
from opencue_sched.cli.output import HIGH, LOW, Column, counted, first, json_option, show_rows
from opencue_sched.store import hosts
from opencue_sched.store.shows import Kind, NamedRow

_COLUMNS = (
    Column("host", "Host", importance=HIGH),
    *PROC_COLUMNS,
    Column("layer"),
    Column("show", "Show", importance=LOW),
    Column("pinged", "Ping", show=output.age_text, importance=LOW),
    Column("", "Proc", "id", importance=LOW),
)
_FILTERS = {"host": Kind.HOST, "job": Kind.JOB, "show": Kind.SHOW, "alloc": Kind.ALLOCATION}


def _filters(function: Any) -> Any:
    for name in reversed(_FILTERS):
        kind = _FILTERS[name]
        option = click.option(
            f"--{name}", metavar="NAME", help=f"Only of this {kind}.", shell_complete=completing(kind)
        )
        function = option(function)
    return function


def _chosen(connection: Connection, filters: dict[str, str | None]) -> dict[str, Any]:
    """The ids of what the filters name, as hosts.list_procs takes them."""
    return {f"{it}_id": choose(connection, _FILTERS[it], name).id for it, name in filters.items() if name is not None}


@click.group("proc")
def command() -> None:
    """List procs (a frame's share of a host while it runs there), and kill them.

    Example: opencue-sched proc list --host render01
    """


@command.command("list")
@_filters
@click.option("--most", type=click.IntRange(1), default=1000, show_default=True, help="List no more than this many.")
@json_option
def list_(most: int, as_json: bool, **filters: str | None) -> None:
    """List procs, the oldest first. Memory is used / reserved, Ping is how long ago a report last named it.

    Example: opencue-sched proc list --job demo-sh010-alice_comp_v001
    """
    with farm() as (engine, _), engine.connect() as connection:
        found = hosts.list_procs(connection, **_chosen(connection, filters), most=most + 1)
    show_rows(first(found, most), _COLUMNS, as_json=as_json, noun="proc")


@command.command()
@click.argument("procs", nargs=-1, metavar="[PROC...]")
@_filters
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--reason", metavar="TEXT", help="Why, for the logs.")
@force_option
@json_option
def kill(
    procs: tuple[str, ...], yes: bool, reason: str | None, force: bool, as_json: bool, **filters: str | None
) -> None:
    """Kill what runs, by the ids of procs, or all of a host, job, show or allocation. The frames wait again.

    Exit status 1 if a frame could not be confirmed dead; it stays as it is then.

    Example: opencue-sched proc kill --host render01 --reason "fan is broken"
    """
    if not procs and not any(filters.values()):
        raise click.UsageError("name procs, or a --host, --job, --show or --alloc")
    with farm() as (engine, facts):
        with engine.connect() as connection:
            chosen = hosts.list_procs(connection, proc_ids=procs or None, **_chosen(connection, filters))
        if unknown := set(procs) - {proc.id for proc in chosen}:
            raise CommandRefused(f"no such proc runs there: {', '.join(sorted(unknown))}; see: opencue-sched proc list")
        by_job: dict[NamedRow, list[str]] = defaultdict(list)
        for proc in chosen:
            if proc.frame is not None and not proc.local:  # the others are ended by the reaper, and by Cuebot
                by_job[NamedRow(proc.job_id, proc.job)].append(proc.frame_id)
        if not by_job:
            raise CommandRefused("nothing runs there")
        number = sum(map(len, by_job.values()))
        if not yes:
            click.confirm(f"Kill {counted(number, 'frame')} of {counted(len(by_job), 'job')}?", abort=True)
        killed: list[str] = []
        deferred: list[str] = []
        silent: list[dict[str, Any]] = []
        with control(engine) as (jobs_control, alive):
            for job, frames in by_job.items():
                with output.working(f"killing frames of {job.name}, and confirming that they are dead"):
                    result = jobs_control.kill_frames(frames, reason=who_and_why("killed", reason))
                result, of_job = settle(engine, facts, job, result, alive, force=force, yes=yes)
                killed += result.changed
                deferred += result.deferred
                silent += of_job
    text = f"{counted(len(killed), 'frame')} killed and waiting again"
    output.done(text, as_json=as_json, killed=killed, deferred=deferred, silent_hosts=silent)
    if deferred:
        raise click.exceptions.Exit(1)
