"""``opencue-sched job depends``."""

from __future__ import annotations

from dataclasses import asdict

import click

from opencue_sched.domain.spec_fields import near
from opencue_sched.operate.cli import output
from opencue_sched.operate.cli.connect import farm
from opencue_sched.operate.cli.output import counted, json_option, show_rows
from opencue_sched.operate.cli.values import UnknownName, choose
from opencue_sched.operate.drop_depends import drop_depends
from opencue_sched.operate.waiting_words import describe_depend
from opencue_sched.store import jobs
from opencue_sched.store.naming import Kind

_COLUMNS = {"id": "Id", "waits": "What Waits", "on": "For", "type": "Type", "state": "State"}


@click.group("depends")
def depends() -> None:
    """List or drop what a job waits for.

    Example: opencue-sched job depends list demo-sh010-alice_comp_v001
    """


@depends.command("list")
@click.argument("name", metavar="JOB")
@click.option("--all", "met", is_flag=True, help="Also what is met already.")
@json_option
def list_(name: str, met: bool, as_json: bool) -> None:
    """List what a job, its layers and its frames wait for.

    Example: opencue-sched job depends list demo-sh010-alice_comp_v001
    """
    with farm() as (engine, _), engine.connect() as connection:
        job = choose(connection, Kind.JOB, name)
        found = jobs.depends_of(connection, job.id, met=met)
    rows = []
    for depend in found:
        waits = depend.er_frame or (f"layer {depend.er_layer}" if depend.er_layer else "the job")
        state = "met" if not depend.active else "open"
        if depend.active and depend.open_pairs is not None:
            state = f"{depend.open_pairs} of {depend.pairs} open"
        rows.append({**asdict(depend), "waits": waits, "on": describe_depend(depend, job.name), "state": state})
    show_rows(rows, _COLUMNS, as_json=as_json)


@depends.command()
@click.argument("name", metavar="JOB")
@click.argument("depend_ids", nargs=-1, metavar="[DEPEND...]")
@click.option("--all", "everything", is_flag=True, help="All that the job waits for.")
@json_option
def drop(name: str, depend_ids: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Let a job go on without some of what it waits for, by the ids that `depends list` shows, or --all of it.

    Example: opencue-sched job depends drop demo-sh010-alice_comp_v001 --all
    """
    if everything == bool(depend_ids):
        raise click.UsageError("name dependencies, or say --all")
    with farm() as (engine, _):
        with engine.connect() as connection:
            job = choose(connection, Kind.JOB, name)
            known = [depend.id for depend in jobs.depends_of(connection, job.id)]
        unknown = [depend_id for depend_id in depend_ids if depend_id not in known]
        if unknown:
            raise UnknownName(f"{job.name} does not wait for {unknown[0]!r}{near(unknown[0], known)}")
        dropped = drop_depends(engine, job.id, None if everything else depend_ids)
    freed = counted(len(dropped.freed_frames), "frame")
    output.done(
        f"{job.name}: dropped {counted(dropped.depends, 'dependency', 'dependencies')}, {freed} can run",
        as_json=as_json,
        job=job.name,
        dropped=dropped.depends,
        freed_frames=len(dropped.freed_frames),
    )
