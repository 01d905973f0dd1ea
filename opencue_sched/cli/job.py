"""``opencue-sched job``: looking at jobs and setting what they may use. Frames and dependencies are in job_*.py."""

from __future__ import annotations

import getpass
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import click
from sqlalchemy import Connection, Engine

from opencue_sched.accounting.caps import make_ledger
from opencue_sched.cli import output
from opencue_sched.cli.checks import last_verdicts
from opencue_sched.cli.connect import farm, redis_store
from opencue_sched.cli.output import cap_text, cores, counted, json_option, show_fields, show_json, show_rows
from opencue_sched.cli.values import (
    NEGATIVE_NUMBERS,
    Refused,
    UnknownName,
    choose,
    choose_all,
    core_cap,
    frame_range,
    gpu_cap,
)
from opencue_sched.cli.values import cores as cores_value
from opencue_sched.dispatch.rqd import RqdChannels
from opencue_sched.domain.farm import FrameState, JobState
from opencue_sched.domain.frame_range import FrameRange
from opencue_sched.domain.job_spec import INT_MAX, near
from opencue_sched.farm.completion import Releasing
from opencue_sched.farm.jobs import JobControl, drop_depends
from opencue_sched.farm.model import ReleasePolicy
from opencue_sched.farm.service import RqdKiller, Unconfirmed
from opencue_sched.insight.explain import describe_depend
from opencue_sched.placement.host_groups import HostChanges
from opencue_sched.settings import get_settings
from opencue_sched.store import jobs
from opencue_sched.store.shows import Kind, NamedRow

# ``opencue-sched job depends``.

_DEPEND_COLUMNS = {"id": "Id", "waits": "What Waits", "on": "For", "type": "Type", "state": "State"}


@click.group("depends")
def depends() -> None:
    """List or drop what a job waits for.

    Example: opencue-sched job depends list demo-sh010-alice_comp_v001
    """


@depends.command("list")
@click.argument("name", metavar="JOB")
@click.option("--all", "met", is_flag=True, help="Also what is met already.")
@json_option
def list_depends(name: str, met: bool, as_json: bool) -> None:
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
    show_rows(rows, _DEPEND_COLUMNS, as_json=as_json)


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


# ``opencue-sched job frames|kill|retry|eat``.

_ANY = "ANY"
_NAMED = 10
_FRAME_STATES = [*(state.value for state in FrameState if state is not FrameState.SETUP), _ANY]
_FRAME_COLUMNS = {
    "frame": "Frame",
    "state": "Status",
    "host": "Host",
    "cores": "Cores",
    "retries": "Retries",
    "exit_status": "Exit",
    "started": "Start",
    "runtime": "Runtime",
    "llu": "LLU",
    "memory": "Memory",
    "eligible": "Eligible Time",
}
_UNDECORATED = Callable[..., None]


@dataclass(frozen=True, slots=True)
class _Selection:
    """Which frames of a job are meant."""

    layers: tuple[str, ...]
    frames: FrameRange | None
    states: tuple[str, ...]

    def of(self, connection: Connection, job: NamedRow) -> dict[str, Any]:
        """What store.jobs asks for. Raises UnknownName for a layer the job has not."""
        ids: list[str] | None = None
        if self.layers:
            by_name = {row.name: row.id for row in jobs.layers_of(connection, job.id, has_start_after=False)}
            unknown = [layer for layer in self.layers if layer not in by_name]
            if unknown:
                raise UnknownName(f"job {job.name} has no layer {unknown[0]!r}{near(unknown[0], by_name)}")
            ids = [by_name[layer] for layer in self.layers]
        states = None if _ANY in self.states or not self.states else [FrameState(state) for state in self.states]
        return {"layer_ids": ids, "numbers": None if self.frames is None else self.frames.numbers, "states": states}


def _selecting(default: tuple[str, ...]) -> Callable[[_UNDECORATED], _UNDECORATED]:
    """Options --layer, --frames and --state."""

    def decorate(function: _UNDECORATED) -> _UNDECORATED:
        shown = ", ".join(default) or "any"
        function = click.option(
            "--state",
            "states",
            multiple=True,
            default=default,
            type=click.Choice(_FRAME_STATES, case_sensitive=False),
            help=f"Only frames in this state, or ANY. May be given several times. Default: {shown}.",
        )(function)
        function = click.option(
            "--frames", "numbers", type=frame_range, metavar="RANGE", help="Only frames of these numbers."
        )(function)
        return click.option(
            "--layer", "layers", multiple=True, metavar="NAME", help="Only of this layer. May be given several times."
        )(function)

    return decorate


@click.command("frames")
@click.argument("name", metavar="JOB")
@_selecting(())
@click.option("--most", type=click.IntRange(1), default=1000, show_default=True, help="List no more than this many.")
@json_option
def frames(
    name: str, layers: tuple[str, ...], numbers: FrameRange | None, states: tuple[str, ...], most: int, as_json: bool
) -> None:
    """List frames of a job. LLU is how long ago a running frame's log last grew; memory is used / reserved.

    Example: opencue-sched job frames demo-sh010-alice_comp_v001 --layer render --state DEAD
    """
    with farm() as (engine, _), engine.connect() as connection:
        job = choose(connection, Kind.JOB, name)
        wanted = _Selection(layers, numbers, states).of(connection, job)
        found = jobs.frames_of(connection, job.id, **wanted, most=most + 1)
    if as_json:
        show_json([_frame_json(frame) for frame in found[:most]])
    else:
        show_rows([_frame_row(frame) for frame in found[:most]], _FRAME_COLUMNS, as_json=False)
    if len(found) > most:
        click.echo(f"note: there are more than {most}; --most lists more", err=True)


@click.command("kill")
@click.argument("names", nargs=-1, required=True, metavar="JOB...")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--reason", metavar="TEXT", help="Why, for the logs.")
@json_option
def kill(names: tuple[str, ...], yes: bool, reason: str | None, as_json: bool) -> None:
    """End jobs for good: their running frames are killed, nothing more of them is booked.

    Exit status 1 if a frame could not be confirmed dead; the scheduler goes on trying.

    Example: opencue-sched job kill demo-sh010-alice_comp_v001 --yes
    """
    with farm() as (engine, _):
        with engine.connect() as connection:
            chosen = choose_all(connection, Kind.JOB, names)
        if not yes:
            click.confirm(f"Kill {', '.join(job.name for job in chosen)}?", abort=True)
        with _control(engine) as (control, alive), output.working("killing what runs, and confirming that it is dead"):
            killed = [(job, control.kill_job(job.id, reason=_reason("killed", reason))) for job in chosen]
        unconfirmed = {job.id: _where(engine, job, result.deferred, alive) for job, result in killed}
    if as_json:
        show_json([{"job": job.name, "id": job.id, **asdict(result)} for job, result in killed])
    for job, result in killed:
        if not as_json:
            verb = "killed" if result.finished else "was finished already:"
            click.echo(f"{verb} {job.name}, {counted(len(result.stopped), 'running frame')} stopped")
        _say_deferred(job.name, unconfirmed[job.id])
    if any(result.deferred for _, result in killed):
        raise click.exceptions.Exit(1)


@click.command("retry")
@click.argument("name", metavar="JOB")
@_selecting((FrameState.DEAD.value,))
@click.option("--reason", metavar="TEXT", help="Why, for the logs.")
@json_option
def retry(
    name: str,
    layers: tuple[str, ...],
    numbers: FrameRange | None,
    states: tuple[str, ...],
    reason: str | None,
    as_json: bool,
) -> None:
    """Let frames run again: the dead ones, unless --state says which. Running ones are killed first.

    A job that was finished is pending again. Exit status 1 if a running frame could not be confirmed dead.

    Example: opencue-sched job retry demo-sh010-alice_comp_v001 --layer render --frames 10-20 --state ANY
    """
    selection = _Selection(layers, numbers, states)
    _change(name, selection, "retried", JobControl.retry_frames, reason=reason, as_json=as_json)


@click.command("eat")
@click.argument("name", metavar="JOB")
@_selecting((FrameState.DEAD.value,))
@click.option("--reason", metavar="TEXT", help="Why, for the logs.")
@json_option
def eat(
    name: str,
    layers: tuple[str, ...],
    numbers: FrameRange | None,
    states: tuple[str, ...],
    reason: str | None,
    as_json: bool,
) -> None:
    """Give frames up, so that layers and the job can finish: the dead ones, unless --state says which.

    Running ones are killed first; those that succeeded stay so. Exit status 1 if one could not be confirmed dead.

    Example: opencue-sched job eat demo-sh010-alice_comp_v001 --frames 7
    """
    _change(name, _Selection(layers, numbers, states), "eaten", JobControl.eat_frames, reason=reason, as_json=as_json)


def _change(
    name: str, selection: _Selection, verb: str, operation: Callable[..., Any], *, reason: str | None, as_json: bool
) -> None:
    with farm() as (engine, _):
        with engine.connect() as connection:
            job = choose(connection, Kind.JOB, name)
            wanted = selection.of(connection, job)
            chosen = list(jobs.choose_frames(connection, job.id, **wanted))
            if not chosen:
                _refuse_nothing(connection, job, wanted)
        with (
            _control(engine) as (control, alive),
            output.working("changing frames, and confirming that what ran is dead"),
        ):
            result = operation(control, chosen, reason=_reason(verb, reason))
        unconfirmed = _where(engine, job, result.deferred, alive)
    output.done(
        f"{job.name}: {counted(len(result.changed), 'frame')} {verb}",
        as_json=as_json,
        job=job.name,
        changed=list(result.changed),
        deferred=list(result.deferred),
    )
    _say_deferred(job.name, unconfirmed)
    if result.deferred:
        raise click.exceptions.Exit(1)


def _refuse_nothing(connection: Connection, job: NamedRow, wanted: dict[str, Any]) -> None:
    """No frame is meant: say in which states those are that would be, but for --state."""
    states = Counter(jobs.choose_frames(connection, job.id, **{**wanted, "states": None}).values())
    there = ", ".join(f"{number} {state.value}" for state, number in sorted(states.items()))
    asked = " or ".join(state.value for state in wanted["states"] or ())
    if not there:
        raise Refused(f"{job.name} has no such frame")
    raise Refused(f"no frame of {job.name} that was named is {asked} ({there}); --state says which")


@contextmanager
def _control(engine: Engine) -> Iterator[tuple[JobControl, dict[str, Unconfirmed]]]:
    """What ends frames, with the ledger and the host caches told; and, by frame, what could not be confirmed dead."""
    settings = get_settings()
    policy = ReleasePolicy(satisfy_only_on_frame_success=settings.release.satisfy_only_on_frame_success)
    alive: dict[str, Unconfirmed] = {}
    with redis_store() as client:
        ledger = make_ledger(engine, client, owner=f"{settings.instance}-cli")
        changes = HostChanges(client, settings.coordination.namespace)
        channels = RqdChannels(settings.rqd)
        killer = RqdKiller(channels, tell=lambda it: alive.update({it.frame_id: it}))
        try:
            yield JobControl(Releasing(engine, policy, ledger, changes, asked_for=True), killer), alive
        finally:
            channels.close()


def _reason(verb: str, reason: str | None) -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"
    return f"{verb} by {user} on {socket.gethostname()}" + (f": {reason}" if reason else "")


def _where(
    engine: Engine, job: NamedRow, deferred: Collection[str], alive: Mapping[str, Unconfirmed]
) -> dict[tuple[str, str], list[str]]:
    """The names of the frames that may still run, by their host with its address, and by the reason."""
    names: dict[str, str] = {}
    if deferred:
        with engine.connect() as connection:
            names = {frame.id: frame.name for frame in jobs.frames_of(connection, job.id, states=[FrameState.RUNNING])}
    places: dict[tuple[str, str], list[str]] = {}
    for frame in sorted(deferred, key=lambda it: names.get(it, it)):
        place = (f"{alive[frame].host_name} ({alive[frame].address})", alive[frame].reason)
        places.setdefault(place, []).append(names.get(frame, frame))
    return places


def _say_deferred(job: str, places: Mapping[tuple[str, str], Sequence[str]]) -> None:
    if not places:
        return
    number = sum(map(len, places.values()))
    click.echo(f"{job}: {counted(number, 'frame')} could not be confirmed dead and may still run:", err=True)
    for (host, reason), named in list(places.items())[:_NAMED]:
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        click.echo(f"  on {host}: {', '.join(named[:_NAMED])}{more}: {reason}", err=True)
    if len(places) > _NAMED:
        click.echo(f"  and {len(places) - _NAMED} more of these", err=True)


def _frame_json(frame: jobs.Frame) -> dict[str, Any]:
    row = asdict(frame)
    del row["centicores"], row["name"]
    return {"frame": frame.name, **row, "cores": output.cores(frame.centicores)}


def _frame_row(frame: jobs.Frame) -> dict[str, Any]:
    running = frame.state == FrameState.RUNNING.value
    runtime = ""
    if frame.started is not None:
        ended = None if running else frame.stopped
        runtime = output.age_text(frame.started, ended)
    reserved = frame.memory_reserved_kb
    used = frame.memory_used_kb if running else frame.memory_max_kb
    return {
        "frame": frame.name,
        "state": frame.state,
        "host": frame.host,
        "cores": output.cores(frame.centicores) if frame.host else None,
        "retries": frame.retries,
        "exit_status": frame.exit_status if frame.exit_status != -1 else None,
        "started": output.time_text(frame.started),
        "runtime": runtime,
        "llu": output.age_text(frame.llu) if running else "",
        "memory": f"{output.memory_text(used)} / {output.memory_text(reserved)}" if frame.started else "",
        "eligible": output.time_text(frame.eligible) if frame.state == FrameState.WAITING.value else "",
    }


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


command.add_command(frames)
command.add_command(kill)
command.add_command(retry)
command.add_command(eat)
command.add_command(depends)


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
        changed = set(jobs.set_paused(connection, [job.id for job in chosen], paused=paused))
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
