"""``opencue-sched job``: looking at jobs and setting what they may use. Frames and dependencies are in job_*.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from opencue_sched.domain.spec_fields import INT_MAX
from opencue_sched.domain.states import JobState
from opencue_sched.operate.cli import job_depends, job_frames, output
from opencue_sched.operate.cli.connect import farm
from opencue_sched.operate.cli.output import cap_text, cores, counted, json_option, show_fields, show_json, show_rows
from opencue_sched.operate.cli.values import NEGATIVE_NUMBERS, choose, choose_all, core_cap, gpu_cap
from opencue_sched.operate.cli.values import cores as cores_value
from opencue_sched.operate.cli.verdict_lines import last_verdicts
from opencue_sched.store import job_control, jobs
from opencue_sched.store.naming import Kind, NamedRow

_STATES = {"pending": JobState.PENDING.value, "finished": JobState.FINISHED.value, "all": None}
_COLUMNS = {
    "job": "Job",
    "folder": "Folder",
    "user": "User",
    "state": "State",
    "running": "Booked",
    "cores": "Cores",
    "waiting": "Wait",
    "depend": "Depend",
    "dead": "Dead",
    "done": "Done",
    "frames": "Frames",
    "priority": "Pri",
    "min_cores": "Min Cores",
    "max_cores": "Max Cores",
    "age": "Age",
}
_LAYER_COLUMNS = {
    "layer": "Layer",
    "frames": "Frames",
    "waiting": "Wait",
    "running": "Run",
    "depend": "Depend",
    "dead": "Dead",
    "done": "Done",
    "min_cores": "Cores",
    "memory_kb": "Memory",
    "gpus": "GPUs",
    "tags": "Tags",
    "limits": "Limits",
    "eligible": "Eligible Time",
    "verdict": "Last Verdict",
}


@click.group("job")
def command() -> None:
    """List, show and steer jobs. A job is named by its name or its id.

    Example: opencue-sched job list --show demo
    """


command.add_command(job_frames.frames)
command.add_command(job_frames.kill)
command.add_command(job_frames.retry)
command.add_command(job_frames.eat)
command.add_command(job_depends.depends)


@command.command("list")
@click.option("--show", metavar="NAME", help="Only of this show.")
@click.option("--user", metavar="NAME", help="Only of this user.")
@click.option("--name", "part", metavar="PART", help="Only with this in their name.")
@click.option("--state", type=click.Choice(list(_STATES)), default="pending", show_default=True)
@click.option("--most", type=click.IntRange(1), default=500, show_default=True, help="List no more than this many.")
@json_option
def list_(show: str | None, user: str | None, part: str | None, state: str, most: int, as_json: bool) -> None:
    """List jobs, by priority and age. Booked is the number of running frames, Cores what they hold.

    Example: opencue-sched job list --show demo --user alice
    """
    with farm() as (engine, _), engine.connect() as connection:
        show_id = None if show is None else choose(connection, Kind.SHOW, show).id
        found = jobs.list_jobs(connection, show_id=show_id, user=user, state=_STATES[state], part=part, most=most + 1)
    rows = [_row(job) for job in found[:most]]
    formats = {"max_cores": cap_text}
    if not as_json:
        for row, job in zip(rows, found, strict=False):
            row["age"] = output.age_text(job.started)
    show_rows(rows, _COLUMNS, as_json=as_json, formats=formats)
    if len(found) > most:
        click.echo(f"note: there are more than {most}; --most lists more", err=True)


@command.command()
@click.argument("name")
@json_option
def info(name: str, as_json: bool) -> None:
    """Show one job with its layers: counts, needs, since when frames could run, and the last verdict on them.

    Eligible Time is when the oldest waiting frame of the layer could have run first. `opencue-sched explain` says more
    about what waits.

    Example: opencue-sched job info demo-sh010-alice_comp_v001
    """
    with farm() as (engine, facts), engine.connect() as connection:
        row = choose(connection, Kind.JOB, name)
        (job,) = jobs.list_jobs(connection, job_id=row.id)
        layers = jobs.layers_of(connection, row.id, has_start_after=facts.has_start_after)
    verdicts = last_verdicts(row.id)
    layer_rows = [_layer_row(layer, verdicts.get(layer.id)) for layer in layers]
    if as_json:
        show_json({**_row(job), "layers": layer_rows})
        return
    show_fields(_fields(job))
    click.echo()
    for layer_row in layer_rows:
        layer_row["limits"] = ", ".join(layer_row["limits"])
        layer_row["eligible"] = output.time_text(layer_row["eligible"])
    show_rows(layer_rows, _LAYER_COLUMNS, as_json=False, formats={"memory_kb": output.memory_text})


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="JOB...")
def pause(names: tuple[str, ...]) -> None:
    """Pause jobs: nothing more of them is booked; what runs goes on.

    Example: opencue-sched job pause demo-sh010-alice_comp_v001
    """
    _set_paused(names, paused=True)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="JOB...")
def unpause(names: tuple[str, ...]) -> None:
    """Let paused jobs go on.

    Example: opencue-sched job unpause demo-sh010-alice_comp_v001
    """
    _set_paused(names, paused=False)


@command.command(context_settings=NEGATIVE_NUMBERS)
@click.argument("names", nargs=-1, required=True, metavar="JOB...")
@click.argument("value", type=click.IntRange(-INT_MAX, INT_MAX), metavar="PRIORITY")
def priority(names: tuple[str, ...], value: int) -> None:
    """Set the priority of jobs; higher goes first.

    Example: opencue-sched job priority demo-sh010-alice_comp_v001 80
    """
    _set_resource(names, "int_priority", value, f"have priority {value}")


@command.command("max-cores", context_settings=NEGATIVE_NUMBERS)
@click.argument("names", nargs=-1, required=True, metavar="JOB...")
@click.argument("value", type=core_cap, metavar="CORES")
def max_cores(names: tuple[str, ...], value: int) -> None:
    """Set the most cores jobs may use; 0 or -1 is no cap. What runs above it goes on.

    Example: opencue-sched job max-cores demo-sh010-alice_comp_v001 200
    """
    _set_resource(names, "int_max_cores", value, f"may use {_cap(cores(value), 'cores')}")


@command.command("min-cores")
@click.argument("names", nargs=-1, required=True, metavar="JOB...")
@click.argument("value", type=cores_value, metavar="CORES")
def min_cores(names: tuple[str, ...], value: int) -> None:
    """Set the cores jobs should get at least.

    Example: opencue-sched job min-cores demo-sh010-alice_comp_v001 10
    """
    _set_resource(names, "int_min_cores", value, f"should get {cores(value)} cores at least")


@command.command("max-gpus", context_settings=NEGATIVE_NUMBERS)
@click.argument("names", nargs=-1, required=True, metavar="JOB...")
@click.argument("value", type=gpu_cap, metavar="GPUS")
def max_gpus(names: tuple[str, ...], value: int) -> None:
    """Set the most GPUs jobs may use; 0 or -1 is no cap.

    Example: opencue-sched job max-gpus demo-sh010-alice_comp_v001 4
    """
    _set_resource(names, "int_max_gpus", value, f"may use {_cap(value, 'GPUs')}")


def _cap(value: float | None, noun: str) -> str:
    return f"any number of {noun}" if value is None or value <= 0 else f"{value:g} {noun}"


def _set_paused(names: Sequence[str], *, paused: bool) -> None:
    with farm() as (engine, _), engine.begin() as connection:
        chosen = choose_all(connection, Kind.JOB, names)
        changed = set(job_control.set_paused(connection, [job.id for job in chosen], paused=paused))
    for job in chosen:
        word = "paused" if paused else "not paused"
        click.echo(f"{job.name} is {word} now" if job.id in changed else f"{job.name} was {word} or is finished")


def _set_resource(names: Sequence[str], column: str, value: int, words: str) -> None:
    with farm() as (engine, _), engine.begin() as connection:
        chosen: list[NamedRow] = choose_all(connection, Kind.JOB, names)
        jobs.set_resource(connection, [job.id for job in chosen], column, value)
    output.done(f"{counted(len(chosen), 'job')} {words}" if len(chosen) != 1 else _singular(chosen[0].name, words))


def _singular(name: str, words: str) -> str:
    return f"{name} {'has' + words.removeprefix('have') if words.startswith('have') else words}"


def _row(job: jobs.Job) -> dict[str, Any]:
    return {
        "job": job.name,
        "id": job.id,
        "show": job.show,
        "shot": job.shot,
        "folder": job.folder,
        "facility": job.facility,
        "user": job.user,
        "state": "PAUSED" if job.paused and job.state == JobState.PENDING.value else job.state,
        "paused": job.paused,
        "running": job.running,
        "cores": cores(job.centicores),
        "gpus": job.gpus,
        "waiting": job.waiting,
        "depend": job.depend,
        "dead": job.dead,
        "done": job.succeeded + job.eaten,
        "succeeded": job.succeeded,
        "eaten": job.eaten,
        "frames": job.frames,
        "priority": job.priority,
        "min_cores": cores(job.min_centicores),
        "max_cores": cores(job.max_centicores),
        "max_gpus": job.max_gpus,
        "started": job.started,
        "stopped": job.stopped,
        "log_dir": job.log_dir,
    }


def _layer_row(layer: jobs.Layer, verdict: str | None) -> dict[str, Any]:
    row = asdict(layer)
    for gone in ("cores_min", "cores_max", "total", "name"):
        del row[gone]
    return {
        "layer": layer.name,
        "frames": layer.total,
        **row,
        "tags": layer.tags,
        "limits": list(layer.limits),
        "done": layer.succeeded + layer.eaten,
        "min_cores": layer.cores_min / 100,
        "max_cores": cores(layer.cores_max),
        "verdict": verdict,
    }


def _fields(job: jobs.Job) -> dict[str, str]:
    return {
        "Job": job.name,
        "Id": job.id,
        "Show": job.show,
        "Shot": job.shot,
        "Folder": job.folder,
        "Facility": job.facility,
        "User": job.user if job.uid is None else f"{job.user} ({job.uid})",
        "State": "PAUSED" if job.paused and job.state == JobState.PENDING.value else job.state,
        "Started": output.time_text(job.started),
        "Finished": output.time_text(job.stopped),
        "Priority": str(job.priority),
        "Min/Max cores": f"{cores(job.min_centicores)} / {cap_text(cores(job.max_centicores))}",
        "Max GPUs": cap_text(job.max_gpus),
        "In use": f"{cores(job.centicores)} cores, {counted(job.gpus, 'GPU')}",
        "Frames": f"{job.frames}: {job.succeeded} succeeded, {job.eaten} eaten, {job.running} running, "
        f"{job.waiting} waiting, {job.depend} depend, {job.dead} dead",
        "Retries": str(job.max_retries),
        "Auto-eat": "yes" if job.autoeat else "",
        "OS": job.os or "",
        "Logs": job.log_dir,
    }
