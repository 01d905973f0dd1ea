"""What people do to jobs and frames: pause, kill, retry, eat.

A running frame is killed, and its end confirmed by RQD, before it is put into another state: RQD knows frames by frame
id only, and a frame that waits again may be booked anywhere at once. What cannot be confirmed is left as it is and
answered as ``deferred``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from opencue_sched.clients.store_errors import is_trouble
from opencue_sched.domain.depends import ChunkedRange, Side, waits_for
from opencue_sched.domain.frame_range import FrameRange
from opencue_sched.domain.names import near
from opencue_sched.domain.states import ExitStatus, FrameState, JobState
from opencue_sched.errors import InvalidInput
from opencue_sched.jobs.depends import DependRows, Target, find_targets
from opencue_sched.jobs.job_file import Depend
from opencue_sched.reports.completion import Note, Releaser, follow, no_note, with_counters
from opencue_sched.reports.run_ends import LostRun, RunVerdict, satisfying_states
from opencue_sched.rqd.kill import Fate, RqdKiller
from opencue_sched.settings import Release
from opencue_sched.store import depends, hosts, job_events, jobs, procs, release
from opencue_sched.store.named_rows import Kind, NamedRow, find_rows
from opencue_sched.store.release import Counters
from opencue_sched.store.submit import add_depends

_log = structlog.get_logger(__name__)

_KILL_THREADS = 16
"""How many RQDs are asked to kill at once. With fewer, a job that runs on many hosts takes longer to end, most of all
where RQDs do not answer: each such call takes up to ``rqd.timeout``. A call of JobControl makes its threads anew."""
_MOST_LOOKS = 3
"""How often a call that ends a job, or eats frames, looks for frames that run and ends them, before it leaves the rest.
Frames that were planned before the call may be booked after a look, and the next look finds them. Each reads the procs
anew, and with more looks the call takes longer where frames go on being booked."""
_RETRIABLE = (FrameState.DEAD, FrameState.EATEN, FrameState.SUCCEEDED, FrameState.CHECKPOINT)
"""The states of a frame that a retry makes wait again."""
_EDIBLE = (FrameState.WAITING, FrameState.DEAD, FrameState.DEPEND, FrameState.CHECKPOINT)
"""The states of a frame that can be made EATEN."""

_Then = Callable[[Sequence[str], Connection, Counters], list[str]]
"""A function that changes frames which do not run, with at least the given counters locked, and returns the ids of the
frames that it changed."""


@dataclass(frozen=True, slots=True)
class FramesChanged:
    """What a call of JobControl has done."""

    changed: tuple[str, ...] = ()
    """The ids of frames that are in the state asked for because of this call, or ran and are confirmed dead."""
    deferred: tuple[str, ...] = ()
    """The ids of frames that could not be confirmed dead; they are as they were."""
    finished: bool = False
    """Whether this call ended the job."""
    refusal: Exception | None = None
    """Why the database refused to change other frames, which are as they were; None when it refused nothing."""


class JobControl:
    """Operations on jobs and frames for the command line.

    Each takes a ``note``, which writes down who has it done, and calls it in every transaction that changes something,
    with the ids of the frames changed so far, or none for a job. An error that rows are to blame for, those of the note
    among them, is part of the result; an error of a database in trouble is raised.
    """

    def __init__(self, releaser: Releaser, killer: RqdKiller) -> None:
        self._releaser = releaser
        self._killer = killer

    def kill_job(self, job_id: str, *, reason: str, note: Note = no_note) -> FramesChanged:
        """Finish a job that is not over and end what runs of it. Its frames are left WAITING, as Cuebot does.

        Job-level dependencies on it are met, layer- and frame-level ones are not. What is deferred, the reaper ends.
        The ``note`` of who did it is in the transaction that finishes the job; where another did that before, in those
        that end frames.
        """
        try:
            finished = with_counters(self._releaser.engine, partial(_finish, job_id, note))
        except DBAPIError as error:
            return FramesChanged(refusal=_refusal(error))
        _log.info("job_killed", job=job_id, reason=reason, finished=finished)
        # A booking that was under way commits after the job was finished: look again until nothing more runs.
        of_frames = no_note if finished else note
        return replace(self._change(reason, job_id=job_id, looks=_MOST_LOOKS, note=of_frames), finished=finished)

    def kill_frames(self, frame_ids: Sequence[str], *, reason: str, note: Note = no_note) -> FramesChanged:
        """End the runs of these frames, which then wait again. Frames that do not run are left alone."""
        return self._change(reason, frame_ids, note=note)

    def retry_frames(self, frame_ids: Sequence[str], *, reason: str, note: Note = no_note) -> FramesChanged:
        """Make frames wait again, whatever became of them. A finished job is PENDING again; raises InvalidInput while
        another of its name is.

        What a frame that had rendered made bookable waits for it again (FRAME_ON_FRAME and LAYER_ON_LAYER).
        """
        return self._change(reason, frame_ids, then=_wait_again, note=note)

    def eat_frames(self, frame_ids: Sequence[str], *, reason: str, note: Note = no_note) -> FramesChanged:
        """Give frames up: EATEN counts as over, so layers and jobs can finish. A SUCCEEDED frame stays so."""
        # What waits may be booked before it is eaten: look again until nothing of it runs.
        return self._change(reason, frame_ids, state=FrameState.EATEN, then=self._eat, looks=_MOST_LOOKS, note=note)

    def _change(
        self,
        reason: str,
        frame_ids: Sequence[str] | None = None,
        *,
        job_id: str | None = None,
        state: FrameState = FrameState.WAITING,
        then: _Then | None = None,
        looks: int = 1,
        note: Note,
    ) -> FramesChanged:
        """End frames that run, among ``frame_ids`` or of a job, and put them into ``state``; call ``then`` to change
        those among ``frame_ids`` that do not run. Look again, at most ``looks`` times, until none runs.

        The refusal of the last look is part of the result; frames that were not refused are changed all the same.
        """
        refusal: Exception | None = None
        changed: dict[str, None] = {}

        def note_all(connection: Connection, frame_ids: Collection[str]) -> None:
            note(connection, (*changed, *frame_ids))

        deferred: dict[str, None] = {}
        # Most often completions, which the kill brings about, are applied before this call gets to it: such a frame
        # waits again, as it was to do.
        over = (RunVerdict.STALE,) if state is FrameState.WAITING else ()
        for _ in range(looks):
            left = (
                None
                if frame_ids is None
                else [frame_id for frame_id in frame_ids if frame_id not in changed and frame_id not in deferred]
            )
            with self._releaser.engine.connect() as connection:
                found = hosts.list_procs(connection, frame_ids=left, job_id=job_id)
            # Locally dispatched procs are Cuebot's; one without a frame is the reaper's.
            running = [proc for proc in found if proc.frame_id and not proc.local and proc.frame_id not in deferred]
            with ThreadPoolExecutor(_KILL_THREADS, thread_name_prefix="kill") as threads:
                fates = threads.map(lambda proc: self._killer.stop(proc.host, proc.frame_id, proc.id, reason), running)
                killed = list(zip(running, fates, strict=True))
            deferred |= {proc.frame_id: None for proc, fate in killed if fate is not Fate.NOT_RUNNING}
            outcomes = self._releaser.end(
                [
                    LostRun(proc.id, proc.frame_id, state, ExitStatus.FRAME_CLEARED, reason=reason)
                    for proc, fate in killed
                    if fate is Fate.NOT_RUNNING
                ],
                note_all,
            )
            changed |= {
                outcome.frame_id: None for outcome in outcomes if outcome.state is not None or outcome.verdict in over
            }
            refusal = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
            try:
                if then is not None and left is not None:
                    step = _with_note(then, left, note, tuple(changed))
                    changed |= dict.fromkeys(with_counters(self._releaser.engine, step))
                elif any(outcome.verdict in over for outcome in outcomes):
                    with self._releaser.engine.begin() as connection:
                        note(connection, tuple(changed))
            except DBAPIError as error:
                refusal = _refusal(error)
            if not running:
                break
        return FramesChanged(tuple(changed), tuple(deferred), refusal=refusal)

    def _eat(self, frame_ids: Sequence[str], connection: Connection, wider: Counters) -> list[str]:
        """Make frames EATEN, and do what follows from their being over: a `_Then`."""
        frames = jobs.frames_by_id(connection, frame_ids)
        _lock_frames(connection, frames)
        held = release.counters_of(frames) | wider
        release.lock_counters(connection, held)
        changed = release.set_frame_states(connection, frame_ids, FrameState.EATEN, _EDIBLE)
        follow(connection, changed, held, satisfying_states(self._releaser.settings))
        return [frame.id for frame in changed]


def _refusal(error: DBAPIError) -> DBAPIError:
    """The error, where rows are to blame for it. Raises the error where the database is in trouble."""
    if is_trouble(error):
        raise error
    return error


def _with_note(
    then: _Then, frame_ids: Sequence[str], note: Note, before: Sequence[str]
) -> Callable[[Connection, Counters], list[str]]:
    """A transaction that calls ``then`` for frames, and ``note`` with the ids of the frames changed now and of those
    changed ``before``. It returns the ids that ``then`` returned."""

    def transaction(connection: Connection, wider: Counters) -> list[str]:
        changed = then(frame_ids, connection, wider)
        if before or changed:
            note(connection, (*before, *changed))
        return changed

    return transaction


def _finish(job_id: str, note: Note, connection: Connection, wider: Counters) -> bool:
    """Make a PENDING job FINISHED, with a note, and meet the dependencies on the whole job. Returns whether this call
    did it."""
    found = depends.find_depends(connection, jobs=[job_id])
    affected = depends.counters_of_dependents(connection, found)
    release.lock_counters(connection, Counters([("job", job_id)]) | affected | wider)
    finished = depends.finish_jobs(connection, [job_id])
    if finished:
        note(connection, ())
        depends.satisfy_depends(connection, found)
    return bool(finished)


def _lock_frames(connection: Connection, frames: Sequence[jobs.FrameView]) -> None:
    """Lock the frames that may run or be booked, which goes before the lock of their counters. Frames in DEPEND are
    locked behind the counters, as in the transaction that ends what they wait for."""
    procs.lock_runs(connection, (), [frame.id for frame in frames if frame.state != FrameState.DEPEND])


def _wait_again(frame_ids: Sequence[str], connection: Connection, wider: Counters) -> list[str]:
    """Make frames wait again, with what depended on those that were over, and reopen their jobs: a `_Then`."""
    _lock_frames(connection, jobs.frames_by_id(connection, frame_ids))
    before = jobs.frames_by_id(connection, frame_ids)
    over = [frame for frame in before if frame.state in (FrameState.SUCCEEDED, FrameState.EATEN)]
    frames, layers = {frame.id for frame in over}, {frame.layer_id for frame in over}
    affected = depends.counters_of_reactivation(connection, frames, layers) if over else Counters()
    release.lock_counters(connection, release.counters_of(before) | affected | wider)
    changed = release.set_frame_states(connection, frame_ids, FrameState.WAITING, _RETRIABLE)
    if retried := {frame.job_id for frame in before if frame.state == FrameState.DEAD}:
        job_events.forget_deaths(connection, retried)
    if over:
        depends.reactivate_depends(connection, frames, layers)
    if changed:
        depends.wait_for_open(connection, [frame.id for frame in changed])
    for job_id in sorted({frame.job_id for frame in before}):
        jobs.reopen_job(connection, job_id)
    return [frame.id for frame in changed]


def drop_depends(
    engine: Engine,
    job_id: str,
    depend_ids: Collection[str] | None = None,
    *,
    note: Callable[[Connection, int], object] = lambda *_: None,
) -> depends.Satisfied:
    """Satisfy dependencies by which a job still waits: all, or ``depend_ids`` and the pairs of frames that these group.

    ``note`` writes down who has it done, with the number of dependencies, unless that is 0.
    """

    def drop(connection: Connection, _wider: Counters) -> depends.Satisfied:
        found = jobs.open_depends(connection, job_id, depend_ids)
        release.lock_counters(connection, depends.counters_of_dependents(connection, found))
        satisfied = depends.satisfy_depends(connection, found)
        if satisfied.depends:
            note(connection, satisfied.depends)
        return satisfied

    satisfied = with_counters(engine, drop)
    _log.info("depends_dropped", job=job_id, depends=satisfied.depends, freed=satisfied.freed_frames)
    return satisfied


@dataclass(frozen=True, slots=True)
class DependAdded:
    """What a job or a layer waits for now."""

    rows: int
    """How many rows of ``depend`` were added."""
    frames: int
    """How many frames are in DEPEND because of the dependency, or were so already."""
    met: bool
    """Whether what the dependency is on is over already, so that nothing waits for it."""


@dataclass(frozen=True, slots=True)
class _LayerIn:
    """A layer of a job that is in, as what waits."""

    name: str
    frames: ChunkedRange


def add_depend(
    engine: Engine,
    job: NamedRow,
    layer_name: str | None,
    depend: Depend,
    settings: Release,
    *,
    note: Callable[[Connection], object] = lambda _: None,
) -> DependAdded:
    """Have a layer, or (None) all of a job, wait for something more; for a layer of the same job where ``depend`` names
    no job. ``note`` writes down who has it done.

    Frames that run go on, and those that are over stay so, until they wait again. Raises InvalidInput for what is not
    there, would never be met, or waits for the job itself.
    """

    def add(connection: Connection, wider: Counters) -> DependAdded:
        added = _add_depend(job, layer_name, depend, settings, connection, wider)
        note(connection)
        return added

    added = with_counters(engine, add)
    _log.info("depend_added", job=job.id, layer=layer_name, depends=added.rows, frames=added.frames)
    return added


def _add_depend(
    job: NamedRow,
    layer_name: str | None,
    depend: Depend,
    settings: Release,
    connection: Connection,
    wider: Counters,
) -> DependAdded:
    """Add a dependency within a transaction: lock, find what is waited for, refuse what can never be met, write."""
    depends.add_in_turn(connection)
    layers = {row.name: row for row in jobs.layers_of(connection, job.id)}
    if layer_name is not None and layer_name not in layers:
        raise InvalidInput(f"job {job.name} has no layer {layer_name!r}{near(layer_name, layers)}")
    names = [*layers] if layer_name is None else [layer_name]
    frames = jobs.frames_of(connection, layer_ids=[layers[name].id for name in names])
    if jobs.job_of(connection, job.id).state == JobState.FINISHED:
        raise InvalidInput(f"job {job.name} is finished; nothing of it waits for anything")
    wanted = depend if depend.job else depend.model_copy(update={"job": job.id})
    others = find_rows(connection, Kind.JOB, [wanted.job or ""])
    # What is waited for does not end between our look at it and our commit: its end takes this lock, too.
    ours = release.counters_of(frames) | Counters(("job", row.id) for row in (job, *others.values()))
    _lock_frames(connection, frames)
    release.lock_counters(connection, ours | wider)
    waiting = None if layer_name is None else _LayerIn(layer_name, _chunks(layers[layer_name]))
    problems: list[str] = []
    targets = find_targets(connection, [("", waiting, wanted)], satisfying_states(settings), problems)
    if problems:
        raise InvalidInput(problems[0].removeprefix(": "))
    ((_, _, _, on),) = targets.edges
    of_layer: dict[str, dict[int, str]] = {name: {} for name in names}
    for frame in frames:
        of_layer[frame.layer][frame.number] = frame.id
    rows = DependRows({name: Target(job.id, layers[name].id, _chunks(layers[name]), of_layer[name]) for name in names})
    met = rows.add(waiting, wanted, on, targets.begun if wanted.type == "any_frame" else targets.over)
    if not met:
        if on.job in targets.over:
            raise InvalidInput(f"job {wanted.job!r} is finished, but not what is to be waited for: it never will be")
        _refuse_circle(connection, job, None if layer_name is None else layers[layer_name].id, wanted, on)
    changed = add_depends(connection, job.id, [row._asdict() for row in rows.rows], rows.waits_for)
    return DependAdded(len(rows.rows), changed, met)


def _refuse_circle(connection: Connection, job: NamedRow, layer_id: str | None, depend: Depend, on: Target) -> None:
    """Refuse, by InvalidInput, a dependency on what waits for the job or layer already."""
    waiting, needed = Side(job.id, layer_id), Side(on.job, on.layer or None)
    if depend.type == "previous_frame" and waiting == needed:
        return
    open_ones = [
        (Side(row.er_job_id, row.er_layer_id), Side(row.on_job_id, row.on_layer_id))
        for row in jobs.depends_around(connection, on.job)
    ]
    if waits_for(needed, waiting, open_ones):
        raise InvalidInput(
            f"what {job.name} would wait for waits for it already, so neither would ever run; see "
            f"`opencue-sched job depends tree {job.name}`"
        )


def _chunks(layer: jobs.LayerView) -> ChunkedRange:
    """The range of a layer, as its frames divide it."""
    return ChunkedRange(FrameRange.parse(layer.range), max(1, layer.chunk_size))
