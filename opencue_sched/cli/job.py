"""``opencue-sched job`` and ``layer``: jobs, their layers, frames and dependencies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

import click
from sqlalchemy import Connection, Engine

from opencue_sched.cli.chosen_jobs import choosing_jobs, comment_on_jobs, commenting
from opencue_sched.cli.comments import add_comment_command, comments_column
from opencue_sched.cli.deferred import control, force_option, reason_option, settle, who_and_why
from opencue_sched.cli.depend_tree import depend_trees
from opencue_sched.cli.history import FINISHED_COLUMNS, Day, first_second, notes_on_history
from opencue_sched.cli.inputs import (
    JOB,
    LIMIT,
    NEGATIVE_NUMBERS,
    SHOW,
    Commands,
    WholeNumber,
    core_cap,
    core_count,
    frame_range,
    gpu_cap,
    layer_ids,
    most_option,
)
from opencue_sched.cli.job_log import log_command
from opencue_sched.cli.job_wait import wait_for
from opencue_sched.cli.output import (
    HIGH,
    LOW,
    NAME,
    Column,
    Columns,
    Done,
    age_text,
    cap_text,
    cores,
    in_cores,
    working,
)
from opencue_sched.clients.postgres import ask
from opencue_sched.domain.clusters import join_tags
from opencue_sched.domain.frame_command import log_path
from opencue_sched.domain.frame_range import FrameRange
from opencue_sched.domain.moments import moment_of
from opencue_sched.domain.names import plural
from opencue_sched.domain.states import ExitStatus, FrameState, JobState
from opencue_sched.domain.units import CENTICORES_PER_CORE, INT_MAX, memory_text
from opencue_sched.errors import InvalidInput
from opencue_sched.settings import get_settings
from opencue_sched.store import jobs
from opencue_sched.store.history import finished_jobs
from opencue_sched.store.named_rows import NamedRow, id_of
from opencue_sched.store.shows import set_rows
from opencue_sched.store.submit import set_start_after

if TYPE_CHECKING:
    from opencue_sched.reports.completion import Note

_JOB = click.argument("job", type=JOB)
_JOBS = click.argument("chosen", type=JOB, nargs=-1, required=True)
_STATES = {"pending": JobState.PENDING.value, "finished": JobState.FINISHED.value, "all": None}
_COLUMNS = Columns(
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
    Column("done", "Done", importance=HIGH),
    *map(Column, ("succeeded", "eaten")),
    Column("frames", "Frames", importance=HIGH),
    Column("priority", "Pri"),
    Column("min_cores", "Min Cores", in_cores("min_centicores"), importance=LOW),
    Column("max_cores", "Max Cores", in_cores("max_centicores"), cap_text, LOW),
    Column("max_gpus", "Max GPUs", show=cap_text, importance=LOW),
    Column("started", "Age", show=age_text),
    *map(Column, ("stopped", "log_dir", "uid", "os", "max_retries", "autoeat")),
)


_ANY = "ANY"
# Frames are in SETUP for no longer than a submission takes.
_FRAME_STATES = [*(state.value for state in FrameState if state is not FrameState.SETUP), _ANY]
_FRAME_COLUMNS = Columns(
    Column("frame", "Frame", "name", importance=NAME),
    *map(Column, ("id", "layer", "number")),
    Column("state", "Status", importance=HIGH),
    Column("host", "Host", importance=HIGH),
    Column("cores", read=in_cores("centicores")),
    Column("", "Cores", lambda frame: cores(frame.centicores) if frame.host else None),
    Column("retries", "Retries"),
    Column("exit_status", "Exit", show=lambda status: _exit_text(status), importance=HIGH),
    Column("started", "Start", importance=LOW),
    Column("", "Runtime", lambda frame: _runtime(frame)),
    Column("", "LLU", lambda frame: frame.llu if frame.state == FrameState.RUNNING else None, age_text),
    Column("", "Memory", lambda frame: _memory(frame)),
    Column(
        "", "Eligible Time", lambda frame: frame.eligible if frame.state == FrameState.WAITING else None, importance=LOW
    ),
    *map(Column, ("stopped", "llu", "eligible", "depend_count")),
    *map(Column, ("memory_reserved_kb", "memory_used_kb", "memory_max_kb")),
    Column("log", read=lambda frame: log_path(frame.log_dir, frame.job, frame.name)),
)


_LAYER_COLUMNS = Columns(
    Column("layer", "Layer", "name", importance=NAME),
    *map(Column, ("id", "type", "command", "range", "chunk_size", "threadable", "optimize", "services")),
    Column("frames", "Frames", "total", importance=HIGH),
    Column("waiting", "Wait", importance=HIGH),
    Column("running", "Run", importance=HIGH),
    Column("depend", "Depend"),
    Column("dead", "Dead", importance=HIGH),
    Column("done", "Done"),
    *map(Column, ("succeeded", "eaten", "checkpoint")),
    Column("min_cores", "Cores", lambda layer: layer.cores_min / CENTICORES_PER_CORE),
    Column("max_cores", "Max Cores", in_cores("cores_max"), cap_text, LOW),
    Column("memory_kb", "Memory", show=memory_text),
    Column("gpus", "GPUs", importance=LOW),
    Column("gpu_memory_kb", "GPU Mem", show=memory_text, importance=LOW),
    Column("tags", "Tags"),
    Column("limits", "Limits", show=", ".join),
    Column("eligible", "Eligible Time", importance=LOW),
    Column("timeout_minutes", "Timeout", show=cap_text, importance=LOW),
    Column("timeout_llu_minutes", "LLU Timeout", show=cap_text, importance=LOW),
    Column("start_after", "Start After", importance=LOW),
    Column("start_after_reason"),
)


job_command = Commands("job")


@job_command.on_farm("wait demo-sh010-alice_comp_v001 && echo done")
@_JOBS
def wait(engine: Engine, chosen: list[NamedRow]) -> Done:
    """Wait until jobs have ended, and show how far each layer is.

    On a terminal the layers stay in sight; without a terminal a line for each comes now and then; with --json only how
    the jobs ended is printed. The time left follows from the mean run time of the layer's frames so far. A job with
    dead frames has ended when nothing else of it can run; a paused job is waited for. Exit status: 0 all frames of all
    jobs succeeded; 1 if some are dead or were eaten, or a job was killed or removed.
    """
    return wait_for(engine, chosen)


@job_command.on_farm("list --show demo --user alice")
@click.option("--show", type=SHOW, help="Only of this show.")
@click.option("--user", metavar="NAME", help="Only of this user.")
@click.option("--name", "part", metavar="PART", help="Only with this in their name.")
@click.option("--state", type=click.Choice(list(_STATES)), default="pending", show_default=True)
@click.option(
    "--since", type=Day(), help="With --state finished: since this day (2026-12-24, today, 7d), from OpenCue's history."
)
@click.option("--watch", "watched", is_flag=True, help="List them again every 2 s, until Ctrl-C.")
@most_option(500)
def list_jobs(
    engine: Engine,
    show: NamedRow | None,
    state: str,
    since: date | None,
    most: int,
    watched: bool,
    **user_and_part: str | None,
) -> Done:
    """List jobs, by priority and age. Booked is the number of running frames, Cores what they hold.

    With --state finished --since DAY the jobs that ended since then, the last first, and what they took. These may be
    in OpenCue's history alone.
    """
    if since is not None:
        if state != "finished" or watched:
            raise click.UsageError("--since goes with --state finished")
        with engine.connect() as connection:
            return _finished(connection, first_second(since), id_of(show), most, **user_and_part)

    def find(most: int) -> Sequence[jobs.JobView]:
        return ask(engine, jobs.list_jobs, show_id=id_of(show), state=_STATES[state], **user_and_part, most=most)

    if watched:
        _COLUMNS.watch(lambda rows_that_fit: find(min(most, rows_that_fit)))  # until Ctrl-C ends the command
    return _COLUMNS.listed(find(most + 1), most=most)


def _finished(connection: Connection, since: int, show_id: str | None, most: int, **user_and_part: str | None) -> Done:
    """The jobs that ended since a moment, in seconds since 1970: ``most`` of them, with notes on the history."""
    found = finished_jobs(connection, since, show_id=show_id, **user_and_part, most=most + 1)
    listed = FINISHED_COLUMNS.listed(found, most=most)
    return replace(listed, notes=[*listed.notes, *notes_on_history(connection)])


@job_command.in_transaction("info demo-sh010-alice_comp_v001")
@_JOB
def info(connection: Connection, job: NamedRow) -> Done:
    """Show one job with its layers: counts, needs, and since when frames could run.

    Eligible Time is the time since which the next waiting frame of the layer could run. `opencue-sched explain` says
    why it waits.
    """
    layers = jobs.layers_of(connection, job.id)
    columns = _COLUMNS.and_also(comments_column(connection, "job", job.id))
    return columns.shown(jobs.job_of(connection, job.id), "layers", layers, _LAYER_COLUMNS)


def _set_columns(
    engine: Engine, chosen: Sequence[NamedRow], table: str, columns: Mapping[str, Any], did: str, reason: str | None
) -> Done:
    """Set columns of jobs in a table, with a comment on each job that says what was done (``did``), and list the
    jobs."""
    ids = [job.id for job in chosen]
    with engine.begin() as connection:
        set_rows(connection, table, "pk_job", ids, columns)
        comment_on_jobs(connection, ids, did, reason)
        return _COLUMNS.listed(jobs.list_jobs(connection, job_ids=ids))


@job_command.on_farm("pause demo-sh010-alice_comp_v001")
@choosing_jobs("Pause", _COLUMNS)
@reason_option
def pause(engine: Engine, chosen: list[NamedRow], reason: str | None) -> Done:
    """Pause jobs: nothing more of them is booked; what runs goes on."""
    return _set_columns(engine, chosen, "job", {"b_paused": True}, "paused", reason)


@job_command.on_farm("unpause demo-sh010-alice_comp_v001")
@choosing_jobs("Unpause", _COLUMNS)
@reason_option
def unpause(engine: Engine, chosen: list[NamedRow], reason: str | None) -> Done:
    """Let paused jobs go on."""
    return _set_columns(engine, chosen, "job", {"b_paused": False}, "unpaused", reason)


def _add_value_command(example: str, column: str, does: str, kind: Any, *, question: str = "") -> None:
    """Add a command that sets a column of job_resource to the value that is typed, which ``kind`` reads.

    ``example`` is the name of the command and a value. With a ``question``, which is asked before many jobs are
    changed, the command takes filters as well as names of jobs.
    """
    name, example_value = example.split()
    value_argument = click.Argument(
        ["value"], type=kind, metavar=name.removeprefix("max-").removeprefix("min-").upper()
    )
    in_centicores = kind in (core_cap, core_count)

    @job_command.on_farm(
        f"{name} demo-sh010-alice_comp_v001 {example_value}",
        does=does,
        params=[value_argument],
        context_settings=NEGATIVE_NUMBERS,
    )
    @(choosing_jobs(question, _COLUMNS) if question else _JOBS)
    @reason_option
    def set_value(engine: Engine, chosen: list[NamedRow], reason: str | None, value: int) -> Done:
        did = f"{name} {cores(value) if in_centicores else value}"
        return _set_columns(engine, chosen, "job_resource", {column: value}, did, reason)


_add_value_command(
    "priority 80",
    "int_priority",
    "Set the priority of jobs; higher goes first.",
    WholeNumber(-INT_MAX, INT_MAX),
    question="Set the priority of",
)
_add_value_command(
    "max-cores 200",
    "int_max_cores",
    "Set the most cores jobs may use; 0 or -1 is no cap. What runs above it goes on.",
    core_cap,
)
_add_value_command("min-cores 10", "int_min_cores", "Set the cores jobs should get at least.", core_count)
_add_value_command(
    "max-gpus 4",
    "int_max_gpus",
    "Set the most GPUs jobs may use; 0 or -1 is no cap. What runs above it goes on.",
    gpu_cap,
)


@job_command.on_farm("set demo-sh010-alice_comp_v001 --max-retries 3 --autoeat")
@_JOBS
@click.option("--max-retries", type=WholeNumber(0, INT_MAX), metavar="RETRIES", help="Of each frame, until DEAD.")
@click.option("--autoeat/--no-autoeat", default=None, help="Whether frames that would be DEAD are EATEN.")
@reason_option
def set_jobs(
    engine: Engine, chosen: list[NamedRow], max_retries: int | None, autoeat: bool | None, reason: str | None
) -> Done:
    """Set how often frames of jobs are retried, and whether they are given up then. Frames that are dead stay so."""
    given = {"int_max_retries": max_retries, "b_autoeat": autoeat}
    columns = {column: value for column, value in given.items() if value is not None}
    if not columns:
        raise click.UsageError("say what to change; see --help")
    did = []
    if max_retries is not None:
        did.append(f"max retries {max_retries}")
    if autoeat is not None:
        did.append(f"auto-eat {'on' if autoeat else 'off'}")
    return _set_columns(engine, chosen, "job", columns, f"set {', '.join(did)}", reason)


add_comment_command(job_command, JOB, "job", 'comment demo-sh010-alice_comp_v001 "the camera is wrong, wait for v002"')
job_command.add_command(log_command)
depends = Commands("job depends", "List, add or drop what a job waits for, or show all of it as a tree.")
job_command.add_command(depends)


@depends.in_transaction("list demo-sh010-alice_comp_v001")
@_JOB
@click.option("--all", "met", is_flag=True, help="Also what is met already.")
def list_depends(connection: Connection, job: NamedRow, met: bool) -> Done:
    """List what a job, its layers and its frames wait for."""
    from opencue_sched.insight.explain import describe_depend

    columns = Columns(
        Column("id", "Id", importance=NAME),
        Column("waits", "What Waits", _what_waits, importance=HIGH),
        Column("type", "Type"),
        Column("state", "State", _depend_state, importance=HIGH),
        Column("on", "For", lambda depend: describe_depend(depend, job.name), wraps=True),
        *map(Column, ("target", "active", "any_frame", "er_layer", "er_frame", "on_job", "on_layer", "on_frame")),
        *map(Column, ("open_pairs", "pairs")),
    )
    return columns.listed(jobs.depends_of(connection, job.id, met=met), "depend")


def _what_waits(depend: jobs.Depend) -> str:
    """The frame or layer of the job that waits, or that the whole job does."""
    return depend.er_frame or (f"layer {depend.er_layer}" if depend.er_layer else "the job")


def _depend_state(depend: jobs.Depend) -> str:
    """Whether a dependency is met; where it groups pairs of frames, how many of these are open."""
    if not depend.active:
        return "met"
    return "open" if depend.open_pairs is None else f"{depend.open_pairs} of {depend.pairs} open"


@depends.on_farm("drop demo-sh010-alice_comp_v001 --all")
@_JOB
@click.argument("depend_ids", nargs=-1, metavar="[DEPEND...]")
@click.option("--all", "everything", is_flag=True, help="All that the job waits for.")
@reason_option
def drop(engine: Engine, job: NamedRow, depend_ids: tuple[str, ...], everything: bool, reason: str | None) -> Done:
    """Let a job go on without some of what it waits for, by the ids that `depends list` shows, or --all of it."""
    from opencue_sched.jobs.control import drop_depends

    if everything == bool(depend_ids):
        raise click.UsageError("name dependencies, or say --all")
    unknown = set(depend_ids) - {depend.id for depend in ask(engine, jobs.depends_of, job.id)}
    if unknown:
        ids = f"`opencue-sched job depends list {job.name}` has the ids"
        raise InvalidInput(f"{job.name} does not wait for {', '.join(map(repr, sorted(unknown)))}; {ids}")

    def note(connection: Connection, number: int) -> None:
        comment_on_jobs(connection, [job.id], f"{plural(number, 'dependency', 'dependencies')} dropped", reason)

    number, freed = drop_depends(engine, job.id, None if everything else depend_ids, note=note)
    text = f"dropped {plural(number, 'dependency', 'dependencies')}, {plural(freed, 'frame')} can run"
    return Done(f"{job.name}: {text}", {"job": job.name, "dropped": number, "freed_frames": freed})


@depends.on_farm("add demo-sh010-alice_comp_v001 --layer comp --on demo-sh010-alice_sim_v003 --on-layer cache")
@_JOB
@click.option("--layer", "layer_name", metavar="NAME", help="What waits; the whole job unless given.")
@click.option("--on", "on_job", type=JOB, help="The job to wait for; unless given, a layer of the same job is meant.")
@click.option("--on-layer", metavar="NAME", help="Not for the whole job, but for this layer of it.")
@click.option("--on-frame", type=int, metavar="NUMBER", help="Not for the whole layer, but for this frame of it.")
@click.option(
    "--type",
    "kind",
    type=click.Choice(["layer", "any_frame", "frame_by_frame", "previous_frame"]),
    help="How a layer waits for a layer, as in a job file; layer unless given.",
)
@reason_option
def add_depend(
    engine: Engine,
    job: NamedRow,
    layer_name: str | None,
    on_job: NamedRow | None,
    on_layer: str | None,
    on_frame: int | None,
    kind: str | None,
    reason: str | None,
) -> Done:
    """Have a job, or a layer of it, wait for something more. What runs of it goes on, what has rendered stays so.

    Refused where what it would wait for waits for it already.
    """
    from opencue_sched.jobs import control as job_control
    from opencue_sched.jobs.job_file import depend_of

    if on_job is None and on_layer is None:
        raise click.UsageError("say what to wait for: --on a job, --on-layer a layer")
    named = {"job": id_of(on_job), "layer": on_layer, "frame": on_frame, "type": kind}
    depend = depend_of({key: value for key, value in named.items() if value is not None}, of_layer=bool(layer_name))
    words = []
    if on_frame is not None:
        words.append(f"frame {on_frame}")
    if on_layer:
        words.append(f"layer {on_layer}")
    if on_job is not None:
        words.append(on_job.name)
    on = " of ".join(words)

    def note(connection: Connection) -> None:
        comment_on_jobs(connection, [job.id], f"{layer_name or 'the job'} waits for {on}", reason)

    added = job_control.add_depend(engine, job, layer_name, depend, get_settings().release, note=note)
    waiting = plural(added.frames, "frame waits", "frames wait")
    text = "what it would wait for is over already" if added.met else f"{waiting} for {on}"
    document = {"job": job.name, "depends": added.rows, "frames": added.frames, "met": added.met}
    return Done(f"{job.name}: {text}", document)


@depends.on_farm("tree demo-sh010-alice_comp_v001")
@_JOB
def tree(engine: Engine, job: NamedRow) -> Done:
    """Show what a job waits for, over all jobs, and what waits for it: open dependencies only."""
    waits_for, waited_for_by = ask(engine, _both_ways, job.id)
    return depend_trees(job, waits_for, waited_for_by)


def _both_ways(connection: Connection, job_id: str) -> tuple[Sequence[jobs.Depend], Sequence[jobs.Depend]]:
    """The dependencies of what a job waits for, and of what waits for the job."""
    return jobs.depends_around(connection, job_id), jobs.depends_around(connection, job_id, upwards=True)


# ``opencue-sched job frames|kill|retry|eat``.


def _selecting(default_state: str) -> list[click.Parameter]:
    """The options that select frames: ``layers``, ``numbers`` and ``states``, which `_arguments` takes."""
    several = "May be given several times."
    state = click.Choice(_FRAME_STATES, case_sensitive=False)
    which_state = f"Only in this state, or ANY; {default_state} unless given. {several}"
    return [
        click.Option(["--layer", "layers"], multiple=True, metavar="NAME", help=f"Only of this layer. {several}"),
        click.Option(["--frames", "numbers"], type=frame_range, metavar="RANGE", help="Only of these numbers."),
        click.Option(["--state", "states"], multiple=True, type=state, default=[default_state], help=which_state),
    ]


def _arguments(
    connection: Connection, job: NamedRow, layers: Sequence[str], numbers: FrameRange | None, states: Sequence[str]
) -> dict[str, Any]:
    """The arguments with which store.jobs.frames_of finds the selected frames of a job. Raises InvalidInput for a layer
    that the job does not have."""
    ids = layer_ids(connection, job, layers)
    in_states = None if _ANY in states else [FrameState(state) for state in states]
    return {"layer_ids": ids, "numbers": None if numbers is None else numbers.numbers, "states": in_states}


@job_command.in_transaction("frames demo-sh010-alice_comp_v001 --layer render --state DEAD", params=_selecting(_ANY))
@_JOB
@most_option(1000)
def frames(connection: Connection, job: NamedRow, most: int, **selection: Any) -> Done:
    """List frames of a job. LLU is how long ago a running frame's log last grew; memory is used / reserved."""
    found = jobs.frames_of(connection, job.id, **_arguments(connection, job, **selection), most=most + 1)
    return _FRAME_COLUMNS.listed(found, most=most)


@job_command.on_farm("kill demo-sh010-alice_comp_v001 --yes")
@choosing_jobs("Kill", _COLUMNS, asks=True)
@reason_option
@force_option
def kill(engine: Engine, chosen: list[NamedRow], reason: str | None, force: bool) -> Done:
    """End jobs for good: their running frames are killed, nothing more of them is booked.

    Exit status 1 if a frame could not be confirmed dead, or the database refused a change. The scheduler goes on trying
    to end such a frame; where its host is silent, this says when the scheduler gives the host up.
    """
    lines, documents, incomplete = [], [], False
    with control(engine) as (jobs_control, unconfirmed):
        with working("killing what runs, and confirming that it is dead"):
            why = who_and_why("killed", reason)
            killed = [
                (
                    job,
                    jobs_control.kill_job(
                        job.id, reason=why, note=commenting(job.id, "killed", reason, of_frames=False)
                    ),
                )
                for job in chosen
            ]
        for job, first_result in killed:
            result, silent = settle(engine, job, first_result, unconfirmed, force=force)
            incomplete |= bool(result.deferred or result.refusal)
            if result.finished:  # by this command
                outcome = "killed"
            else:
                outcome = "was finished already:" if result.refusal is None else "not killed:"
            lines.append(f"{outcome} {job.name}, {plural(len(result.changed), 'running frame')} stopped")
            documents.append(
                {
                    "job": job.name,
                    "id": job.id,
                    "finished": result.finished,
                    "stopped": result.changed,
                    "deferred": result.deferred,
                    "silent_hosts": silent,
                }
            )
    return Done(lines, documents, status=int(incomplete))


def _add_change_command(verb: str, example: str, does: str) -> None:
    """Add a command that changes frames of jobs, after it has killed those that run. ``verb`` says what becomes of the
    frames: retried or eaten."""
    question = f"{example.split()[0].capitalize()} frames of"

    @job_command.on_farm(example, does=does, params=_selecting(FrameState.DEAD.value))
    @choosing_jobs(question, _COLUMNS)
    @reason_option
    @force_option
    def change_frames(
        engine: Engine, chosen: list[NamedRow], reason: str | None, force: bool, **selection: Any
    ) -> Done:
        names_by_job = _frames_to_change(engine, chosen, **selection)
        results, refusals = [], []
        with control(engine) as (jobs_control, unconfirmed):
            change = jobs_control.eat_frames if verb == "eaten" else jobs_control.retry_frames
            for job, names in names_by_job.items():
                note = commenting(job.id, verb, reason)
                try:
                    with working(f"changing frames of {job.name}, and confirming that what ran is dead"):
                        first_result = change(list(names), reason=who_and_why(verb, reason), note=note)
                except InvalidInput as error:  # this job cannot be pending again; the others are changed all the same
                    if len(names_by_job) == 1:
                        raise
                    refusals.append(f"error: {error}")
                    continue
                result, silent = settle(engine, job, first_result, unconfirmed, force=force)
                reaped = set(first_result.deferred) - set(result.deferred)
                if verb == "eaten" and reaped:
                    # A frame that is reaped waits again. That is all a retry wants, but here it is still to be eaten.
                    also = _noting_also(note, first_result.changed)
                    of_reaped = change(sorted(reaped), reason=who_and_why(verb, reason), note=also)
                    of_reaped, _ = settle(engine, job, of_reaped, unconfirmed, force=False)
                    result = replace(result, refusal=of_reaped.refusal or result.refusal)
                results.append((job, names, result, silent))
        documents = [
            {
                "job": job.name,
                "frames": [name for frame, name in names.items() if frame in result.changed],
                "changed": result.changed,
                "deferred": result.deferred,
                "silent_hosts": silent,
            }
            for job, names, result, silent in results
        ]
        lines = [f"{job.name}: {plural(len(result.changed), 'frame')} {verb}" for job, _, result, _ in results]
        incomplete = bool(refusals) or any(result.deferred or result.refusal for _, _, result, _ in results)
        # Scripts that name one job have always got one document.
        one_was_named = len(click.get_current_context().params["chosen"]) == 1
        return Done(lines, documents[0] if one_was_named else documents, refusals, status=int(incomplete))


def _noting_also(note: Note, before: Sequence[str]) -> Note:
    """A Note that calls ``note`` with the frames changed now and those that an earlier call changed (``before``)."""

    def note_all(connection: Connection, frame_ids: Collection[str]) -> None:
        note(connection, (*before, *frame_ids))

    return note_all


def _frames_to_change(engine: Engine, chosen: Sequence[NamedRow], **selection: Any) -> dict[NamedRow, dict[str, str]]:
    """The names of the selected frames by their ids, for each job that has such frames.

    Of several jobs each need have only some of the layers that are selected. Raises InvalidInput where no job has a
    selected frame, and where a single job lacks a layer.
    """
    found: dict[NamedRow, dict[str, str]] = {}
    with engine.connect() as connection:
        for job in chosen:
            layers = selection["layers"]
            if layers and len(chosen) > 1:
                known = {layer.name for layer in jobs.layers_of(connection, job.id)}
                layers = [name for name in layers if name in known]
                if not layers:
                    continue
            arguments = _arguments(connection, job, **selection | {"layers": layers})
            if frames := jobs.frames_of(connection, job.id, **arguments):
                found[job] = {frame.id: frame.name for frame in frames}
    if not found:
        asked = " or ".join(selection["states"])
        of_which = chosen[0].name if len(chosen) == 1 else f"these {len(chosen)} jobs"
        raise InvalidInput(f"no frame of {of_which} that was named is {asked}; --state says which")
    return found


_add_change_command(
    "retried",
    "retry demo-sh010-alice_comp_v001 --layer render --frames 10-20 --state ANY",
    "Let frames run again: the dead ones, unless --state says which. Running ones are killed first.\n\n"
    "A job that was finished is pending again, which is refused while another of its name is. Exit status 1 if a "
    "running frame could not be confirmed dead.",
)
_add_change_command(
    "eaten",
    "eat demo-sh010-alice_comp_v001 --frames 7",
    "Give frames up, so that layers and the job can finish: the dead ones, unless --state says which.\n\n"
    "Running ones are killed first; those that succeeded stay so. Exit status 1 if one could not be confirmed dead.",
)


def _state(job: jobs.JobView) -> str:
    """A job's state, or that it is paused."""
    return "PAUSED" if job.paused and job.state == "PENDING" else str(job.state)


def _exit_text(status: int) -> str:
    """The exit status of a frame's last run; empty where no run has ended."""
    return "" if status == ExitStatus.NONE else str(status)


def _runtime(frame: jobs.FrameView) -> str:
    """How long a frame has run, or how long its last run took."""
    return age_text(frame.started, None if frame.state == FrameState.RUNNING else frame.stopped)


def _memory(frame: jobs.FrameView) -> str:
    """The memory of a frame that was started, used / reserved: while it runs what it uses now, then the most it
    used."""
    used = frame.memory_used_kb if frame.state == FrameState.RUNNING else frame.memory_max_kb
    return f"{memory_text(used)} / {memory_text(frame.memory_reserved_kb)}" if frame.started else ""


layer_command = Commands("layer")


@layer_command.in_transaction("list demo-sh010-alice_comp_v001")
@_JOB
def list_layers(connection: Connection, job: NamedRow) -> Done:
    """List the layers of a job: counts, needs and limits."""
    return _LAYER_COLUMNS.listed(jobs.layers_of(connection, job.id))


@layer_command.in_transaction("set demo-sh010-alice_comp_v001 render --cores 8 --memory 16GiB --add-limit arnold")
@_JOB
@click.argument("layers", nargs=-1, required=True, metavar="LAYER...")
@click.option("--cores", type=float, metavar="CORES", help="The least; 0 is the whole host, -2 all but two.")
@click.option("--max-cores", type=float, metavar="CORES", help="The most of a frame; 0 is no bound.")
@click.option("--threadable/--no-threadable", default=None, help="Whether its frames thread.")
@click.option("--memory", metavar="SIZE", help="Such as 512MiB or 16GiB.")
@click.option("--optimize/--no-optimize", default=None, help="Whether its memory may be lowered to what frames used.")
@click.option("--gpus", type=int, metavar="GPUS")
@click.option("--gpu-memory", metavar="SIZE", help="Such as 8GiB.")
@click.option("--tags", metavar="TAG,TAG", help="In place of those it has.")
@click.option("--timeout", type=int, metavar="MINUTES", help="The longest a frame runs; 0 is for ever.")
@click.option("--timeout-llu", type=int, metavar="MINUTES", help="The longest without a log line; 0 is for ever.")
@click.option("--add-limit", "add", type=LIMIT, multiple=True, help="Also under this limit. May be given again.")
@click.option("--drop-limit", "drop", type=LIMIT, multiple=True, help="No longer under this limit.")
@reason_option
def set_layers(
    connection: Connection,
    job: NamedRow,
    layers: tuple[str, ...],
    add: list[NamedRow],
    drop: list[NamedRow],
    reason: str | None,
    **given: Any,
) -> Done:
    """Change layers of a job, also while it runs: for frames that start from now on. What runs keeps what it has.

    Values are typed as in a job file, and stored as Cuebot stores them. What the farm cannot serve is noted.
    """
    from opencue_sched.insight.explain import unserved
    from opencue_sched.jobs.job_file import layer_fields

    given = {key: value for key, value in given.items() if value is not None}
    if not given and not add and not drop:
        raise click.UsageError("say what to change; see --help")
    words = [f"{key.replace('_', '-')} {value}" for key, value in given.items()]
    words += [f"add-limit {row.name}" for row in add] + [f"drop-limit {row.name}" for row in drop]
    fields = layer_fields(given)
    if "tags" in fields:
        fields["tags"] = join_tags(fields["tags"])
    ids = layer_ids(connection, job, layers) or []
    limits = {"add_limits": {row.name for row in add}, "drop_limits": {row.id for row in drop}}
    # The comment locks the job. It comes first, because a completion locks the job that it ends before layers.
    comment_on_jobs(connection, [job.id], f"{', '.join(layers)} set: {', '.join(words)}", reason)
    jobs.set_layers(connection, ids, fields, **limits)
    found = [row for row in jobs.layers_of(connection, job.id) if row.id in ids]
    _check(found, jobs.job_of(connection, job.id))
    notes = unserved(connection, job.id, get_settings(), ids)
    done = _LAYER_COLUMNS.listed(found)
    document = {"job": job.name, "layers": done.document, "notes": notes}
    return Done(done.lines, document, [f"note: {note}" for note in notes])


@layer_command.in_transaction(
    'start-after demo-sh010-alice_comp_v001 render "2026-12-24 18:00" --reason "farm is booked"'
)
@_JOB
@click.argument("layers", nargs=-1, required=True, metavar="LAYER...")
@click.argument("moment", metavar="TIME|clear")
@reason_option
def start_after(
    connection: Connection, job: NamedRow, layers: tuple[str, ...], moment: str, reason: str | None
) -> Done:
    """Let no frame of layers start before a moment: 18:00 (the next), 2026-12-24 18:00 or 2026-12-24; clear ends that.

    What runs goes on. A moment far ahead holds a layer back. Local time, unless an offset follows.
    """
    now = datetime.now().astimezone()
    start = None if moment == "clear" else moment_of(moment, now).isoformat()
    ids = layer_ids(connection, job, layers) or []
    # The comment locks the job. It comes first, because a completion locks the job that it ends before layers.
    comment_on_jobs(connection, [job.id], f"{', '.join(layers)} start-after {moment}", reason)
    set_start_after(connection, dict.fromkeys(ids, start), who_and_why("set", reason))
    return _LAYER_COLUMNS.listed([row for row in jobs.layers_of(connection, job.id) if row.id in ids])


def _check(layers: list[jobs.LayerView], job: jobs.JobView) -> None:
    """Refuse layers whose values do not go together. Raises InvalidInput, with which the caller's transaction is rolled
    back."""
    for layer in layers:
        if 0 < layer.cores_max < layer.cores_min:
            raise InvalidInput(f"layer {layer.name}: its max cores would be less than its cores")
        if layer.threadable and 0 < layer.cores_min < CENTICORES_PER_CORE:
            raise InvalidInput(f"layer {layer.name}: less than one core cannot thread; say --no-threadable")
        if 0 < job.max_centicores < layer.cores_min or 0 < job.max_gpus < layer.gpus:
            hint = "`opencue-sched job max-cores` and `max-gpus` raise that"
            raise InvalidInput(f"layer {layer.name}: a frame would take more than its job may have; {hint}")
