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

from opencue_sched.domain.states import ExitStatus, FrameState
from opencue_sched.reports.completion import Releaser, follow, with_counters
from opencue_sched.reports.run_ends import LostRun, RunVerdict, satisfying_states
from opencue_sched.rqd.kill import Fate, RqdKiller
from opencue_sched.store import depends, hosts, jobs, procs, release
from opencue_sched.store.release import Counters

_log = structlog.get_logger(__name__)

_KILL_THREADS = 16
_MOST_LOOKS = 3
_RETRIABLE = (FrameState.DEAD, FrameState.EATEN, FrameState.SUCCEEDED, FrameState.CHECKPOINT)
_EDIBLE = (FrameState.WAITING, FrameState.DEAD, FrameState.DEPEND, FrameState.CHECKPOINT)

_Then = Callable[[Sequence[str], Connection, Counters], list[str]]
"""Changes frames that do not run, with counters locked; the ids of those it changed."""


@dataclass(frozen=True, slots=True)
class FramesChanged:
    """``changed`` frames are in the state asked for because of this call, or ran and are confirmed dead; ``deferred``
    ones could not be confirmed dead. ``finished``: this call ended the job."""

    changed: tuple[str, ...]
    deferred: tuple[str, ...]
    finished: bool = False


class JobControl:
    """Operations on jobs and frames for the command line."""

    def __init__(self, releaser: Releaser, killer: RqdKiller) -> None:
        self._releaser = releaser
        self._killer = killer

    def kill_job(self, job_id: str, *, reason: str) -> FramesChanged:
        """Finish a job that is not over and end what runs of it. Its frames are left WAITING, as Cuebot does.

        Job-level dependencies on it are met, layer- and frame-level ones are not. What is deferred, the reaper ends.
        """
        finished = with_counters(self._releaser.engine, partial(_finish, job_id))
        _log.info("job_killed", job=job_id, reason=reason, finished=finished)
        # A booking that was under way commits after the job was finished: look again until nothing more runs.
        return replace(self._change(reason, job_id=job_id, looks=_MOST_LOOKS), finished=finished)

    def kill_frames(self, frame_ids: Sequence[str], *, reason: str) -> FramesChanged:
        """End what runs of frames; they wait again. What does not run is left alone."""
        return self._change(reason, frame_ids)

    def retry_frames(self, frame_ids: Sequence[str], *, reason: str) -> FramesChanged:
        """Make frames wait again, whatever became of them. A finished job is PENDING again; raises InvalidInput while
        another of its name is.

        What a frame that had rendered made bookable waits for it again (FRAME_ON_FRAME and LAYER_ON_LAYER).
        """
        return self._change(reason, frame_ids, then=_wait_again)

    def eat_frames(self, frame_ids: Sequence[str], *, reason: str) -> FramesChanged:
        """Give frames up: EATEN counts as over, so layers and jobs can finish. A SUCCEEDED frame stays so."""
        # What waits may be booked before it is eaten: look again until nothing of it runs.
        return self._change(reason, frame_ids, state=FrameState.EATEN, then=self._eat, looks=_MOST_LOOKS)

    def _change(
        self,
        reason: str,
        frame_ids: Sequence[str] | None = None,
        *,
        job_id: str | None = None,
        state: FrameState = FrameState.WAITING,
        then: _Then | None = None,
        looks: int = 1,
    ) -> FramesChanged:
        """End what runs of frames, or of a job, in ``state``, ``then`` change the frames that do not; at most so many
        ``looks``, until nothing runs."""
        changed: dict[str, None] = {}
        deferred: dict[str, None] = {}
        # Most often completions, which the kill brings about, are applied before this call gets to it: such a frame
        # waits again, as it was to do.
        over = (RunVerdict.STALE,) if state is FrameState.WAITING else ()
        for _ in range(looks):
            left = None if frame_ids is None else [it for it in frame_ids if it not in changed and it not in deferred]
            with self._releaser.engine.connect() as connection:
                found = hosts.list_procs(connection, frame_ids=left, job_id=job_id)
            # Locally dispatched procs are Cuebot's; one without a frame is the reaper's.
            running = [proc for proc in found if proc.frame_id and not proc.local and proc.frame_id not in deferred]
            with ThreadPoolExecutor(_KILL_THREADS, thread_name_prefix="kill") as threads:
                fates = threads.map(lambda it: self._killer.stop(it.host, it.frame_id, it.id, reason), running)
                killed = list(zip(running, fates, strict=True))
            deferred |= {proc.frame_id: None for proc, fate in killed if fate is not Fate.NOT_RUNNING}
            outcomes = self._releaser.end(
                [
                    LostRun(proc.id, proc.frame_id, state, ExitStatus.FRAME_CLEARED, reason=reason)
                    for proc, fate in killed
                    if fate is Fate.NOT_RUNNING
                ]
            )
            changed |= {it.frame_id: None for it in outcomes if it.state is not None or it.verdict in over}
            if then is not None and left is not None:
                changed |= dict.fromkeys(with_counters(self._releaser.engine, partial(then, left)))
            if not running:
                break
        return FramesChanged(tuple(changed), tuple(deferred))

    def _eat(self, frame_ids: Sequence[str], connection: Connection, wider: Counters) -> list[str]:
        procs.lock_runs(connection, (), frame_ids)
        held = release.counters_of(jobs.frames_of(connection, frame_ids=frame_ids)) | wider
        release.lock_counters(connection, held)
        changed = release.set_frame_states(connection, frame_ids, FrameState.EATEN, _EDIBLE)
        follow(connection, changed, held, satisfying_states(self._releaser.settings))
        return [frame.id for frame in changed]


def _finish(job_id: str, connection: Connection, wider: Counters) -> bool:
    """PENDING to FINISHED, and what depends on the whole job is met."""
    found = depends.find_depends(connection, jobs=[job_id])
    affected = depends.counters_of_dependents(connection, found)
    release.lock_counters(connection, Counters([("job", job_id)]) | affected | wider)
    finished = depends.finish_jobs(connection, [job_id])
    if finished:
        depends.satisfy_depends(connection, found)
    return bool(finished)


def _wait_again(frame_ids: Sequence[str], connection: Connection, wider: Counters) -> list[str]:
    procs.lock_runs(connection, (), frame_ids)
    before = jobs.frames_of(connection, frame_ids=frame_ids)
    over = [frame for frame in before if frame.state in (FrameState.SUCCEEDED, FrameState.EATEN)]
    frames, layers = {frame.id for frame in over}, {frame.layer_id for frame in over}
    affected = depends.counters_of_reactivation(connection, frames, layers) if over else Counters()
    release.lock_counters(connection, release.counters_of(before) | affected | wider)
    changed = release.set_frame_states(connection, frame_ids, FrameState.WAITING, _RETRIABLE)
    if over:
        depends.reactivate_depends(connection, frames, layers)
    for job_id in sorted({frame.job_id for frame in before}):
        jobs.reopen_job(connection, job_id)
    return [frame.id for frame in changed]


def drop_depends(engine: Engine, job_id: str, depend_ids: Collection[str] | None = None) -> depends.Satisfied:
    """Satisfy what a job still waits for: everything, or these dependencies and the pairs of frames they group."""

    def drop(connection: Connection, _wider: Counters) -> depends.Satisfied:
        found = jobs.open_depends(connection, job_id, depend_ids)
        release.lock_counters(connection, depends.counters_of_dependents(connection, found))
        return depends.satisfy_depends(connection, found)

    satisfied = with_counters(engine, drop)
    _log.info("depends_dropped", job=job_id, depends=satisfied.depends, freed=satisfied.freed_frames)
    return satisfied
