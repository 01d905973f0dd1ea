"""``opencue-sched job frames|kill|retry|eat``."""

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
from opencue_sched.dispatch.channels import RqdChannels
from opencue_sched.domain.frame_range import FrameRange
from opencue_sched.domain.spec_fields import near
from opencue_sched.domain.states import FrameState
from opencue_sched.operate.cli import output
from opencue_sched.operate.cli.connect import farm, redis_store
from opencue_sched.operate.cli.output import counted, json_option, show_json, show_rows
from opencue_sched.operate.cli.values import Refused, UnknownName, choose, choose_all, frame_range
from opencue_sched.placement.changes import HostChanges
from opencue_sched.release.jobs import JobControl
from opencue_sched.release.killing import RqdKiller, Unconfirmed
from opencue_sched.release.losing import Releasing
from opencue_sched.release.model import ReleasePolicy
from opencue_sched.settings import get_settings
from opencue_sched.store import jobs
from opencue_sched.store.naming import Kind, NamedRow

_ANY = "ANY"
_NAMED = 10
_STATES = [*(state.value for state in FrameState if state is not FrameState.SETUP), _ANY]
_COLUMNS = {
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
            type=click.Choice(_STATES, case_sensitive=False),
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
        show_rows([_frame_row(frame) for frame in found[:most]], _COLUMNS, as_json=False)
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
