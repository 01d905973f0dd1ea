"""What people do to jobs and frames: pause, kill, retry, eat.

A running frame is killed, and its end confirmed by RQD, before it is put into another state: RQD knows frames by frame
id only, and a frame that waits again may be booked anywhere at once. What cannot be confirmed is left as it is and
answered as ``deferred``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection, Engine

from opencue_sched.dispatch.rqd import Fate, RqdKiller
from opencue_sched.domain.farm import ExitStatus, FrameState
from opencue_sched.farm.completion import Releaser, WiderLocks, follow, with_counters
from opencue_sched.farm.model import LostRun, RunVerdict
from opencue_sched.store import depends, jobs, procs, release
from opencue_sched.store.jobs import RunningFrame
from opencue_sched.store.release import Counters

_log = structlog.get_logger(__name__)

_KILL_THREADS = 16
_ROUNDS = 3
_RETRIABLE = (FrameState.DEAD, FrameState.EATEN, FrameState.SUCCEEDED, FrameState.CHECKPOINT)
_EDIBLE = (FrameState.WAITING, FrameState.DEAD, FrameState.DEPEND, FrameState.CHECKPOINT)


@dataclass(frozen=True, slots=True)
class FramesChanged:
    """``changed`` frames are in the state asked for because of this call; ``deferred`` ones could not be stopped."""

    changed: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobKilled:
    """``finished``: this call ended the job. ``stopped`` frames ran, and are confirmed dead: most often their
    completions, which the kill brings about, are applied before this call gets to it. ``deferred`` frames could not be
    confirmed dead: the reaper goes on.
    """

    finished: bool
    stopped: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Stopped:
    """Frames that were killed: ``ended`` here, ``over`` by their own completion, ``deferred`` not confirmed dead."""

    ended: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()


class JobControl:
    """Operations on jobs and frames for the command line."""

    def __init__(self, releaser: Releaser, killer: RqdKiller) -> None:
        self._releaser = releaser
        self._killer = killer

    def pause(self, job_ids: Collection[str], *, paused: bool = True) -> list[str]:
        """Pause (or unpause) jobs; returns those that changed. Running frames go on."""
        with self._releaser.engine.begin() as connection:
            return jobs.set_paused(connection, job_ids, paused=paused)

    def kill_job(self, job_id: str, *, reason: str) -> JobKilled:
        """Finish a job that is not over and end what runs of it. Its frames are left WAITING, as Cuebot does.

        Job-level dependencies on it are met, layer- and frame-level ones are not.
        """
        finished = with_counters(
            self._releaser.engine, lambda connection, wider: self._finish(connection, job_id, wider)
        )
        _log.info("job_killed", job=job_id, reason=reason, finished=finished)
        stopped: list[str] = []
        deferred: list[str] = []
        for _ in range(_ROUNDS):
            with self._releaser.engine.connect() as connection:
                running = jobs.running_frames(connection, job_ids=[job_id])
            running = [frame for frame in running if frame.frame_id not in deferred]
            if not running:
                break
            killed = self._stop(running, FrameState.WAITING, reason)
            stopped += [*killed.ended, *killed.over]
            deferred += killed.deferred
        return JobKilled(finished, tuple(dict.fromkeys(stopped)), tuple(deferred))

    def retry_frames(self, frame_ids: Sequence[str], *, reason: str) -> FramesChanged:
        """Make frames wait again, whatever became of them. A finished job is PENDING again.

        What a frame that had rendered made bookable waits for it again (FRAME_ON_FRAME and LAYER_ON_LAYER).
        """
        with self._releaser.engine.connect() as connection:
            running = jobs.running_frames(connection, frame_ids=frame_ids)
        stopped = self._stop(running, FrameState.WAITING, reason)
        changed = with_counters(
            self._releaser.engine, lambda connection, wider: _wait_again(connection, frame_ids, wider)
        )
        return FramesChanged(tuple(dict.fromkeys([*stopped.ended, *stopped.over, *changed])), stopped.deferred)

    def eat_frames(self, frame_ids: Sequence[str], *, reason: str) -> FramesChanged:
        """Give frames up: EATEN counts as over, so layers and jobs can finish. A SUCCEEDED frame stays so."""
        changed: list[str] = []
        deferred: list[str] = []
        for _ in range(_ROUNDS):
            left = [frame for frame in frame_ids if frame not in changed and frame not in deferred]
            with self._releaser.engine.connect() as connection:
                running = jobs.running_frames(connection, frame_ids=left)
            stopped = self._stop(running, FrameState.EATEN, reason)
            changed += stopped.ended
            deferred += stopped.deferred
            changed += [frame for frame in self._eat_stopped(left) if frame not in changed]
            if not running:
                break
        return FramesChanged(tuple(changed), tuple(deferred))

    def _eat_stopped(self, frame_ids: Sequence[str]) -> list[str]:
        def step(connection: Connection, wider: Counters) -> list[str]:
            return self._eat(connection, frame_ids, wider)

        return with_counters(self._releaser.engine, step)

    def _stop(self, running: Sequence[RunningFrame], state: FrameState, reason: str) -> _Stopped:
        """Kill frames and end their runs in ``state``, unless a completion has ended them by then."""
        if not running:
            return _Stopped()
        with ThreadPoolExecutor(min(_KILL_THREADS, len(running)), thread_name_prefix="kill") as threads:
            fates = list(
                threads.map(
                    lambda frame: self._killer.stop(frame.host_name, frame.frame_id, frame.proc_id, reason), running
                )
            )
        dead = [frame for frame, fate in zip(running, fates, strict=True) if fate is Fate.NOT_RUNNING]
        outcomes = self._releaser.end_lost(
            [LostRun(frame.proc_id, frame.frame_id, state, ExitStatus.FRAME_CLEARED, reason=reason) for frame in dead]
        )
        named = [(outcome, outcome.frame_id) for outcome in outcomes if outcome.frame_id]
        return _Stopped(
            tuple(frame_id for outcome, frame_id in named if outcome.state is not None),
            tuple(frame_id for outcome, frame_id in named if outcome.verdict is RunVerdict.STALE),
            tuple(frame.frame_id for frame, fate in zip(running, fates, strict=True) if fate is not Fate.NOT_RUNNING),
        )

    def _finish(self, connection: Connection, job_id: str, wider: Counters) -> bool:
        """PENDING to FINISHED, and what depends on the whole job is met."""
        found = depends.find_depends(connection, jobs=[job_id])
        affected = depends.counters_of_dependents(connection, found)
        release.lock_counters(connection, Counters(jobs=frozenset([job_id])) | affected | wider)
        finished = depends.finish_jobs(connection, [job_id])
        if finished:
            depends.satisfy_depends(connection, found)
        return bool(finished)

    def _eat(self, connection: Connection, frame_ids: Sequence[str], wider: Counters) -> list[str]:
        procs.lock_runs(connection, (), frame_ids)
        held = release.counters_of_frames(release.read_frames(connection, frame_ids)) | wider
        release.lock_counters(connection, held)
        changed = release.set_frame_states(connection, frame_ids, FrameState.EATEN, _EDIBLE)
        follow(connection, changed, held, self._releaser.only_on_success)
        return [frame.id for frame in changed]


def _wait_again(connection: Connection, frame_ids: Sequence[str], wider: Counters) -> list[str]:
    procs.lock_runs(connection, (), frame_ids)
    before = release.read_frames(connection, frame_ids)
    over = [frame for frame in before if frame.state in (FrameState.SUCCEEDED, FrameState.EATEN)]
    frames, layers = {frame.id for frame in over}, {frame.layer_id for frame in over}
    affected = depends.counters_of_reactivation(connection, frames, layers) if over else Counters()
    held = release.counters_of_frames(before) | wider
    if not held.covers(affected):
        raise WiderLocks(affected)
    release.lock_counters(connection, held)
    changed = release.set_frame_states(connection, frame_ids, FrameState.WAITING, _RETRIABLE)
    if over:
        depends.reactivate_depends(connection, frames, layers)
    jobs.reopen_jobs(connection, {frame.job_id for frame in before})
    return [frame.id for frame in changed]


# Letting a job go on without what it waits for.


def drop_depends(engine: Engine, job_id: str, depend_ids: Collection[str] | None = None) -> depends.Satisfied:
    """Satisfy what a job still waits for: everything, or these dependencies and the pairs of frames they group."""

    def step(connection: Connection, wider: release.Counters) -> depends.Satisfied:
        found = jobs.open_depends(connection, job_id, depend_ids)
        affected = depends.counters_of_dependents(connection, found)
        release.lock_counters(connection, affected | wider)
        still = jobs.open_depends(connection, job_id, depend_ids)
        if not (affected | wider).covers(depends.counters_of_dependents(connection, still)):
            raise WiderLocks(depends.counters_of_dependents(connection, still))
        return depends.satisfy_depends(connection, still)

    satisfied = with_counters(engine, step)
    _log.info("depends_dropped", job=job_id, depends=satisfied.depends, freed=len(satisfied.freed_frames))
    return satisfied
