"""``opencue-sched job``: jobs, their frames and their dependencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click
from sqlalchemy import Connection

from opencue_sched.cli import job_log, job_wait, output
from opencue_sched.cli.deferred import control, force_option, settle, who_and_why
from opencue_sched.cli.inputs import (
    NEGATIVE_NUMBERS,
    CommandRefused,
    UnknownName,
    choose,
    choose_all,
    complete_job,
    complete_show,
    core_cap,
    core_count,
    farm,
    frame_range,
    layer_ids,
)
from opencue_sched.cli.output import (
    HIGH,
    LOW,
    NAME,
    Column,
    cap_text,
    cores,
    counted,
    first,
    in_cores,
    json_option,
    json_row,
    memory_text,
    show_json,
    show_report,
    show_rows,
    show_thing,
)
from opencue_sched.domain.farm import CENTICORES_PER_CORE, INT_MAX, UNLIMITED, FrameState, JobState, near
from opencue_sched.domain.frames import FrameRange, log_path
from opencue_sched.store import jobs
from opencue_sched.store.shows import Kind, NamedRow


@click.group("job")
def command() -> None:
    """List, show and manage jobs. A job is named by its name or its id.

    Example: opencue-sched job list --show demo
    """


command.add_command(job_log.command)
command.add_command(job_wait.command)


# ``opencue-sched job depends``.


@command.group("depends")
def depends() -> None:
    """List or drop what a job waits for.

    Example: opencue-sched job depends list demo-sh010-alice_comp_v001
    """


@depends.command("list")
@click.argument("name", metavar="JOB", shell_complete=complete_job)
@click.option("--all", "met", is_flag=True, help="Also what is met already.")
@json_option
def list_depends(name: str, met: bool, as_json: bool) -> None:
    """List what a job, its layers and its frames wait for.

    Example: opencue-sched job depends list demo-sh010-alice_comp_v001
    """
    with farm() as (engine, _), engine.connect() as connection:
        job = choose(connection, Kind.JOB, name)
        found = jobs.depends_of(connection, job.id, met=met)
    from opencue_sched.insight.explain import describe_depend

    columns = (
        Column("id", "Id", importance=NAME),
        Column("waits", "What Waits", _what_waits, importance=HIGH),
        Column("on", "For", lambda depend: describe_depend(depend, job.name), wraps=True),
        Column("type", "Type"),
        Column("state", "State", _depend_state, importance=HIGH),
        *map(Column, ("target", "active", "any_frame", "er_layer", "er_frame", "on_job", "on_layer", "on_frame")),
        *map(Column, ("open_pairs", "pairs")),
    )
    show_rows(found, columns, as_json=as_json, noun="depend")


def _what_waits(depend: jobs.Depend) -> str:
    return depend.er_frame or (f"layer {depend.er_layer}" if depend.er_layer else "the job")


def _depend_state(depend: jobs.Depend) -> str:
    if not depend.active:
        return "met"
    return "open" if depend.open_pairs is None else f"{depend.open_pairs} of {depend.pairs} open"


@depends.command()
@click.argument("name", metavar="JOB", shell_complete=complete_job)
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
        from opencue_sched.farm.jobs import drop_depends

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
_FRAME_COLUMNS = (
    Column("frame", "Frame", "name", importance=NAME),
    *map(Column, ("id", "layer", "number")),
    Column("state", "Status", importance=HIGH),
    Column("host", "Host", importance=HIGH),
    Column("cores", read=in_cores("centicores")),
    Column("", "Cores", lambda frame: cores(frame.centicores) if frame.host else None),
    Column("retries", "Retries"),
    Column("exit_status", "Exit", show=lambda status: "" if status == -1 else str(status), importance=HIGH),
    Column("started", "Start", importance=LOW),
    Column("", "Runtime", lambda frame: _runtime(frame)),
    Column("", "LLU", lambda frame: frame.llu if frame.state == FrameState.RUNNING else None, output.age_text),
    Column("", "Memory", lambda frame: _memory(frame)),
    Column("", "Eligible Time", lambda frame: _since(frame), importance=LOW),
    *map(Column, ("stopped", "llu", "eligible", "depend_count")),
    *map(Column, ("memory_reserved_kb", "memory_used_kb", "memory_max_kb")),
    Column("log", read=lambda frame: log_path(frame.log_dir, frame.job, frame.name)),
)
_UNDECORATED = Callable[..., None]


def _selecting(default: tuple[str, ...]) -> Callable[[_UNDECORATED], _UNDECORATED]:
    """Options --layer, --frames and --state."""

    def decorate(function: _UNDECORATED) -> _UNDECORATED:
        shown = ", ".join(default) or "any"
        for option in (
            click.option(
                "--state",
                "states",
                multiple=True,
                default=default,
                type=click.Choice(_FRAME_STATES, case_sensitive=False),
                help=f"Only frames in this state, or ANY. May be given several times. Default: {shown}.",
            ),
            click.option(
                "--frames", "numbers", type=frame_range, metavar="RANGE", help="Only frames of these numbers."
            ),
            click.option(
                "--layer",
                "layers",
                multiple=True,
                metavar="NAME",
                help="Only of this layer. May be given several times.",
            ),
        ):
            function = option(function)
        return function

    return decorate


def _wanted(
    connection: Connection,
    job: NamedRow,
    layers: Sequence[str],
    numbers: FrameRange | None,
    states: Sequence[str],
) -> dict[str, Any]:
    """Which frames of a job store.jobs is asked for. Raises UnknownName for a layer the job has not."""
    ids = layer_ids(connection, job, layers)
    in_states = None if _ANY in states or not states else [FrameState(state) for state in states]
    return {"layer_ids": ids, "numbers": None if numbers is None else numbers.numbers, "states": in_states}


@command.command()
@click.argument("name", metavar="JOB", shell_complete=complete_job)
@_selecting(())
@click.option("--most", type=click.IntRange(1), default=1000, show_default=True, help="List no more than this many.")
@json_option
def frames(name: str, most: int, as_json: bool, **selection: Any) -> None:
    """List frames of a job. LLU is how long ago a running frame's log last grew; memory is used / reserved.

    Example: opencue-sched job frames demo-sh010-alice_comp_v001 --layer render --state DEAD
    """
    with farm() as (engine, _), engine.connect() as connection:
        job = choose(connection, Kind.JOB, name)
        found = jobs.frames_of(connection, job.id, **_wanted(connection, job, **selection), most=most + 1)
    show_rows(first(found, most), _FRAME_COLUMNS, as_json=as_json)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--reason", metavar="TEXT", help="Why, for the logs.")
@force_option
@json_option
def kill(names: tuple[str, ...], yes: bool, reason: str | None, force: bool, as_json: bool) -> None:
    """End jobs for good: their running frames are killed, nothing more of them is booked.

    Exit status 1 if a frame could not be confirmed dead; the scheduler goes on trying, and of silent hosts it is said
    when it gives them up.

    Example: opencue-sched job kill demo-sh010-alice_comp_v001 --yes
    """
    with farm() as (engine, facts):
        with engine.connect() as connection:
            chosen = choose_all(connection, Kind.JOB, names)
        if not yes:
            click.confirm(f"Kill {', '.join(job.name for job in chosen)}?", abort=True)
        with control(engine) as (jobs_control, alive):
            with output.working("killing what runs, and confirming that it is dead"):
                ended = [(job, jobs_control.kill_job(job.id, reason=who_and_why("killed", reason))) for job in chosen]
            killed = [(job, *settle(engine, facts, job, it, alive, force=force, yes=yes)) for job, it in ended]
    if as_json:
        keys = ("job", "id", "finished", "stopped", "deferred", "silent_hosts")
        found = [(job.name, job.id, it.finished, it.changed, it.deferred, hosts) for job, it, hosts in killed]
        show_json([dict(zip(keys, row, strict=True)) for row in found])
    for job, result, _ in killed:
        if not as_json:
            verb = "killed" if result.finished else "was finished already:"
            click.echo(f"{verb} {job.name}, {counted(len(result.changed), 'running frame')} stopped")
    if any(result.deferred for _, result, _ in killed):
        raise click.exceptions.Exit(1)


@command.command()
@click.argument("name", metavar="JOB", shell_complete=complete_job)
@_selecting((FrameState.DEAD.value,))
@click.option("--reason", metavar="TEXT", help="Why, for the logs.")
@force_option
@click.option("--yes", is_flag=True, help="Do not ask before --force.")
@json_option
def retry(name: str, **options: Any) -> None:
    """Let frames run again: the dead ones, unless --state says which. Running ones are killed first.

    A job that was finished is pending again. Exit status 1 if a running frame could not be confirmed dead.

    Example: opencue-sched job retry demo-sh010-alice_comp_v001 --layer render --frames 10-20 --state ANY
    """
    _change(name, "retried", **options)


@command.command()
@click.argument("name", metavar="JOB", shell_complete=complete_job)
@_selecting((FrameState.DEAD.value,))
@click.option("--reason", metavar="TEXT", help="Why, for the logs.")
@force_option
@click.option("--yes", is_flag=True, help="Do not ask before --force.")
@json_option
def eat(name: str, **options: Any) -> None:
    """Give frames up, so that layers and the job can finish: the dead ones, unless --state says which.

    Running ones are killed first; those that succeeded stay so. Exit status 1 if one could not be confirmed dead.

    Example: opencue-sched job eat demo-sh010-alice_comp_v001 --frames 7
    """
    _change(name, "eaten", **options)


def _change(
    name: str, verb: str, *, reason: str | None, force: bool, yes: bool, as_json: bool, **selection: Any
) -> None:
    with farm() as (engine, facts):
        with engine.connect() as connection:
            job = choose(connection, Kind.JOB, name)
            wanted = _wanted(connection, job, **selection)
            chosen = {frame.id: frame.name for frame in jobs.frames_of(connection, job.id, **wanted)}
            if not chosen:
                _refuse_nothing(connection, job, wanted)
        with control(engine) as (jobs_control, alive):
            change = jobs_control.eat_frames if verb == "eaten" else jobs_control.retry_frames
            with output.working("changing frames, and confirming that what ran is dead"):
                result = change(list(chosen), reason=who_and_why(verb, reason))
            deferred = result.deferred
            result, silent = settle(engine, facts, job, result, alive, force=force, yes=yes)
            if verb == "eaten" and (reaped := set(deferred) - set(result.deferred)):
                change(sorted(reaped), reason=who_and_why(verb, reason))  # they wait again
    changed = set(result.changed)
    output.done(
        f"{job.name}: {counted(len(result.changed), 'frame')} {verb}",
        as_json=as_json,
        job=job.name,
        frames=[frame for it, frame in chosen.items() if it in changed],
        changed=result.changed,
        deferred=result.deferred,
        silent_hosts=silent,
    )
    if result.deferred:
        raise click.exceptions.Exit(1)


def _refuse_nothing(connection: Connection, job: NamedRow, wanted: dict[str, Any]) -> None:
    """No frame is meant: say in which states those are that would be, but for --state."""
    states = Counter(frame.state for frame in jobs.frames_of(connection, job.id, **{**wanted, "states": None}))
    there = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    asked = " or ".join(state.value for state in wanted["states"] or ())
    if not there:
        raise CommandRefused(f"{job.name} has no such frame")
    raise CommandRefused(f"no frame of {job.name} that was named is {asked} ({there}); --state says which")


def _since(frame: jobs.FrameView) -> datetime | None:
    return frame.eligible if frame.state == FrameState.WAITING else None


def _runtime(frame: jobs.FrameView) -> str:
    return output.age_text(frame.started, None if frame.state == FrameState.RUNNING else frame.stopped)


def _memory(frame: jobs.FrameView) -> str:
    """Used (at most, of one that has ended) and reserved, of a frame that was started."""
    used = frame.memory_used_kb if frame.state == FrameState.RUNNING else frame.memory_max_kb
    return f"{memory_text(used)} / {memory_text(frame.memory_reserved_kb)}" if frame.started else ""


_STATES = {"pending": JobState.PENDING.value, "finished": JobState.FINISHED.value, "all": None}
_COLUMNS = (
    Column("job", "Job", "name", importance=NAME),
    *map(Column, ("id", "show", "shot")),
    Column("folder", "Folder", importance=LOW),
    Column("facility"),
    Column("user", "User"),
    Column("state", "State", lambda job: _state(job), importance=HIGH),
    Column("paused"),
    Column("running", "Booked", importance=HIGH),
    Column("cores", "Cores", in_cores("centicores")),
    Column("gpus"),
    Column("waiting", "Wait", importance=HIGH),
    Column("depend", "Depend"),
    Column("dead", "Dead", importance=HIGH),
    Column("done", "Done", lambda job: job.succeeded + job.eaten, importance=HIGH),
    *map(Column, ("succeeded", "eaten")),
    Column("frames", "Frames", importance=HIGH),
    Column("priority", "Pri"),
    Column("min_cores", "Min Cores", in_cores("min_centicores"), importance=LOW),
    Column("max_cores", "Max Cores", in_cores("max_centicores"), cap_text, LOW),
    Column("max_gpus", show=cap_text),
    Column("started", "Age", show=output.age_text),
    *map(Column, ("stopped", "log_dir", "uid", "os", "max_retries", "autoeat")),
)


def layer_columns_of(verdicts: Mapping[str, str]) -> tuple[Column, ...]:
    """How layers are shown. ``verdicts``: the most telling one of each layer that has one, by the layer's id."""
    return (
        Column("layer", "Layer", "name", importance=NAME),
        *map(Column, ("id", "type", "command", "range", "chunk_size", "threadable", "optimize", "services")),
        Column("frames", "Frames", "total", importance=HIGH),
        Column("waiting", "Wait", importance=HIGH),
        Column("running", "Run", importance=HIGH),
        Column("depend", "Depend"),
        Column("dead", "Dead", importance=HIGH),
        Column("done", "Done", lambda layer: layer.succeeded + layer.eaten),
        *map(Column, ("succeeded", "eaten", "checkpoint")),
        Column("min_cores", "Cores", lambda layer: layer.cores_min / CENTICORES_PER_CORE),
        Column("max_cores", read=in_cores("cores_max")),
        Column("memory_kb", "Memory", show=memory_text),
        Column("gpus", "GPUs", importance=LOW),
        Column("gpu_memory_kb"),
        Column("tags", "Tags"),
        Column("limits", "Limits", show=", ".join),
        Column("eligible", "Eligible Time", importance=LOW),
        *map(Column, ("start_after", "timeout_minutes", "timeout_llu_minutes")),
        Column("verdict", "Last Verdict", lambda layer: verdicts.get(layer.id), importance=HIGH, wraps=True),
    )


@command.command("list")
@click.option("--show", metavar="NAME", shell_complete=complete_show, help="Only of this show.")
@click.option("--user", metavar="NAME", help="Only of this user.")
@click.option("--name", "part", metavar="PART", help="Only with this in their name.")
@click.option("--state", type=click.Choice(list(_STATES)), default="pending", show_default=True)
@click.option("--most", type=click.IntRange(1), default=500, show_default=True, help="List no more than this many.")
@click.option("--watch", is_flag=True, help="List them again every 2 s, until Ctrl-C.")
@json_option
def list_(
    show: str | None, user: str | None, part: str | None, state: str, most: int, watch: bool, as_json: bool
) -> None:
    """List jobs, by priority and age. Booked is the number of running frames, Cores what they hold.

    Example: opencue-sched job list --show demo --user alice
    """
    if watch and as_json:
        raise click.UsageError("--watch goes on, which JSON cannot")
    with farm() as (engine, _):
        with engine.connect() as connection:
            show_id = None if show is None else choose(connection, Kind.SHOW, show).id

        def find(most: int) -> Sequence[jobs.JobView]:
            with engine.connect() as connection:
                wanted = {"show_id": show_id, "user": user, "state": _STATES[state], "part": part}
                return jobs.list_jobs(connection, **wanted, most=most)

        if watch:
            output.watch_rows(lambda rows: find(min(most, rows)), _COLUMNS)
        show_rows(first(find(most + 1), most), _COLUMNS, as_json=as_json)


@command.command()
@click.argument("name", shell_complete=complete_job)
@json_option
def info(name: str, as_json: bool) -> None:
    """Show one job with its layers: counts, needs, since when frames could run, and the last verdict on them.

    Eligible Time is when the oldest waiting frame of the layer could have run first. `opencue-sched explain` says more
    about what waits.

    Example: opencue-sched job info demo-sh010-alice_comp_v001
    """
    with farm() as (engine, _), engine.connect() as connection:
        row = choose(connection, Kind.JOB, name)
        (job,) = jobs.list_jobs(connection, job_id=row.id)
        layers = jobs.layers_of(connection, row.id)
    from opencue_sched.cli.checks import last_verdicts

    layer_columns = layer_columns_of(last_verdicts(row.id))
    if as_json:
        show_json({**json_row(job, _COLUMNS), "layers": [json_row(layer, layer_columns) for layer in layers]})
        return
    show_thing(job, _COLUMNS)
    click.echo()
    show_rows(layers, layer_columns)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
@json_option
def pause(names: tuple[str, ...], as_json: bool) -> None:
    """Pause jobs: nothing more of them is booked; what runs goes on.

    Example: opencue-sched job pause demo-sh010-alice_comp_v001
    """
    _set_paused(names, paused=True, as_json=as_json)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
@json_option
def unpause(names: tuple[str, ...], as_json: bool) -> None:
    """Let paused jobs go on.

    Example: opencue-sched job unpause demo-sh010-alice_comp_v001
    """
    _set_paused(names, paused=False, as_json=as_json)


@command.command(context_settings=NEGATIVE_NUMBERS)
@click.argument("names", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
@click.argument("value", type=click.IntRange(-INT_MAX, INT_MAX), metavar="PRIORITY")
@json_option
def priority(names: tuple[str, ...], value: int, as_json: bool) -> None:
    """Set the priority of jobs; higher goes first.

    Example: opencue-sched job priority demo-sh010-alice_comp_v001 80
    """
    _set_resource(names, "int_priority", value, f"has priority {value}", as_json=as_json)


@command.command("max-cores", context_settings=NEGATIVE_NUMBERS)
@click.argument("names", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
@click.argument("value", type=core_cap, metavar="CORES")
@json_option
def max_cores(names: tuple[str, ...], value: int, as_json: bool) -> None:
    """Set the most cores jobs may use; 0 or -1 is no cap. What runs above it goes on.

    Example: opencue-sched job max-cores demo-sh010-alice_comp_v001 200
    """
    _set_resource(names, "int_max_cores", value, f"may use {_cap(cores(value), 'core')}", as_json=as_json)


@command.command("min-cores")
@click.argument("names", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
@click.argument("value", type=core_count, metavar="CORES")
@json_option
def min_cores(names: tuple[str, ...], value: int, as_json: bool) -> None:
    """Set the cores jobs should get at least.

    Example: opencue-sched job min-cores demo-sh010-alice_comp_v001 10
    """
    _set_resource(names, "int_min_cores", value, f"should get {cores(value)} cores at least", as_json=as_json)


@command.command("max-gpus", context_settings=NEGATIVE_NUMBERS)
@click.argument("names", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
@click.argument("value", type=click.IntRange(UNLIMITED, INT_MAX), metavar="GPUS")
@json_option
def max_gpus(names: tuple[str, ...], value: int, as_json: bool) -> None:
    """Set the most GPUs jobs may use; 0 or -1 is no cap.

    Example: opencue-sched job max-gpus demo-sh010-alice_comp_v001 4
    """
    _set_resource(names, "int_max_gpus", value or UNLIMITED, f"may use {_cap(value, 'GPU')}", as_json=as_json)


def _cap(value: float | None, noun: str) -> str:
    return f"any number of {noun}s" if value is None or value <= 0 else counted(value, noun)


def _set_paused(names: Sequence[str], *, paused: bool, as_json: bool) -> None:
    with farm() as (engine, _), engine.begin() as connection:
        chosen = choose_all(connection, Kind.JOB, names)
        changed = set(jobs.set_paused(connection, [job.id for job in chosen], paused=paused))
    word = "paused" if paused else "not paused"
    show_report(
        [f"{it.name} is {word} now" if it.id in changed else f"{it.name} was {word} or is finished" for it in chosen],
        [{"job": it.name, "id": it.id, "paused": paused, "changed": it.id in changed} for it in chosen],
        as_json=as_json,
    )


def _set_resource(names: Sequence[str], column: str, value: int, words: str, *, as_json: bool) -> None:
    with farm() as (engine, _), engine.begin() as connection:
        chosen: list[NamedRow] = choose_all(connection, Kind.JOB, names)
        jobs.set_resource(connection, [job.id for job in chosen], column, value)
    key = column.removeprefix("int_")
    said = cores(value) if key.endswith("cores") else value
    rows = [{"job": job.name, "id": job.id, key: said} for job in chosen]
    show_report([f"{job.name} {words}" for job in chosen], rows, as_json=as_json)


def _state(job: jobs.JobView) -> str:
    return "PAUSED" if job.paused and job.state == JobState.PENDING.value else job.state
