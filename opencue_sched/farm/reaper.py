"""Ends the runs nobody will report the end of: on hosts that are down, of finished jobs, silent or ownerless ones, and
beside a Cuebot those whose completion it did not live to handle.

Always in this order: kill, have RQD confirm that the process does not run, and only then give its frame away. A host
that cannot be asked keeps its frames until it is DOWN, has rebooted, or has been out of reach so long that a person
must decide (the frame ends DEAD): a frame is never given to a second host while the first may still render it.

Time is short: Redis hands the message out again when the task takes longer than the broker's visibility time-out. So a
host that is DOWN is first looked for, briefly and once, whatever the number of its frames; a host out of reach is asked
once a reap; and nothing is begun when the time of a reap is over or its process is to end. What is left then is for the
next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from opencue_sched.domain.farm import ExitStatus, FrameState, HardwareState
from opencue_sched.farm.completion import Releaser, database_away
from opencue_sched.farm.kill import KillFate, RqdKiller
from opencue_sched.farm.model import LostRun, RunOutcome, RunVerdict
from opencue_sched.settings import Release
from opencue_sched.store import depends, release
from opencue_sched.store import procs as lost
from opencue_sched.store.procs import EVERYTHING, LostProc, OrphanFrame, UpkeepScope, Why
from opencue_sched.store.schema import Drained, drain_frame_history

_log = structlog.get_logger(__name__)

BATCH = 200
"""Most procs, and most frames, that are read and ended at once."""

REAP_SECONDS = 30.0
"""No kill is begun and no batch is read after this long. The last kill takes ``rqd.kill_timeout`` more."""

LOOK_SECONDS = 2.0
"""How long a host that is DOWN already is looked for: two attempts of a lossy network to connect."""

ORPHAN_SECONDS = 300.0
"""A proc no report has named, or a frame without a proc, for this long is lost."""

FRAMELESS_SECONDS = 60.0
"""A proc whose frame was taken off it (eaten, killed) is released after this long, if no completion does it."""

UNNAMED_SECONDS = 30.0
"""RQD reports every 30 s or oftener, so a proc last named so long before its host's last report is missing from two.
Beside a Cuebot its RQD is asked then; where there is none, the report service asks."""

GIVE_UP_SECONDS = 1200.0
"""A silent proc whose host can be reached but does not confirm, or cannot be reached and is not DOWN: its frame is
DEAD after this long."""

GIVE_UP_ORPHAN_SECONDS = 3600.0
"""The same for a frame without a proc."""

DEAF_FACTOR = 3.0
"""When most hosts went silent at once it is probably us who did not hear them: wait this many times as long."""

_KILL_THREADS = 32
"""Hosts asked at once. They wait for the network only."""


@dataclass(frozen=True, slots=True)
class ReaperReport:
    """What one reap did. ``deferred`` runs could not be confirmed dead, or not in time, and are tried again."""

    hosts_down: tuple[str, ...] = ()
    procs_released: int = 0
    frames_waiting: int = 0
    frames_dead: int = 0
    deferred: int = 0

    def with_batch(self, outcomes: Sequence[RunOutcome], runs: int) -> ReaperReport:
        """This and a batch of so many runs, of which these were asked to end."""
        ended = [outcome for outcome in outcomes if outcome.verdict in _ENDED]
        return ReaperReport(
            self.hosts_down,
            self.procs_released + sum(outcome.verdict is not RunVerdict.ORPHAN_APPLIED for outcome in ended),
            self.frames_waiting + sum(outcome.state is FrameState.WAITING for outcome in ended),
            self.frames_dead + sum(outcome.state is FrameState.DEAD for outcome in ended),
            self.deferred + runs - len(ended),
        )


@dataclass(slots=True)
class _Host:
    """What is to be killed on a host: (frame, proc or empty, reason); without a reason it is only asked about.
    ``gone``: the host is DOWN, or not in the database."""

    name: str
    gone: bool = False
    runs: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Reap:
    """One reap: when it begins nothing more, what it has tried, and who was out of reach."""

    until: float
    procs: set[str] = field(default_factory=set)
    frames: set[str] = field(default_factory=set)
    out_of_reach: set[str] = field(default_factory=set)


class Reaper:
    """One reap at a time in a process; any number of processes may reap, each run is ended once.

    Nothing outside ``scope`` is judged. ``stopping`` says whether the process is to end, which ends the reap as its
    time does.
    """

    def __init__(
        self,
        releaser: Releaser,
        settings: Release,
        *,
        killer: RqdKiller,
        scope: UpkeepScope = EVERYTHING,
        batch: int = BATCH,
        seconds: float = REAP_SECONDS,
        timer: Callable[[], float] = time.monotonic,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._releaser = releaser
        self._engine = releaser.engine
        self._settings = settings
        self._killer = killer
        self._scope = scope
        self._batch = batch
        self._seconds = seconds
        self._timer = timer
        self._stopping = stopping

    def run_once(self) -> ReaperReport:
        """Mark silent hosts DOWN, then end what is lost, batch by batch, within the time of a reap."""
        reap = _Reap(self._timer() + self._seconds)
        report = ReaperReport(tuple(self._mark_hosts_down()))
        more = True
        while more:
            procs, frames = self._next_batch(reap)
            fates = self._kill(procs, frames, reap)
            requests = [request for proc in procs if (request := _end_proc(proc, fates)) is not None]
            requests += [request for frame in frames if (request := _end_frame(frame, fates)) is not None]
            alive = sum(fate is KillFate.RUNNING for fate in fates.values())
            report = report.with_batch(self._releaser.end_lost(requests), len(procs) + len(frames) - alive)
            more = max(len(procs), len(frames)) == self._batch and self._goes_on(reap)
        return report

    def _goes_on(self, reap: _Reap) -> bool:
        return self._timer() < reap.until and not self._stopping()

    def _next_batch(self, reap: _Reap) -> tuple[list[LostProc], list[OrphanFrame]]:
        with self._engine.connect() as connection:
            procs = lost.lost_procs(
                connection,
                silent_after=ORPHAN_SECONDS,
                frameless_after=FRAMELESS_SECONDS,
                unnamed_after=UNNAMED_SECONDS,
                grace=self._settings.lost_completion_grace,
                limit=self._batch,
                but=reap.procs,
                scope=self._scope,
            )
            frames = lost.orphan_frames(
                connection, silent_after=ORPHAN_SECONDS, limit=self._batch, but=reap.frames, scope=self._scope
            )
        reap.procs.update(proc.proc_id for proc in procs)
        reap.frames.update(frame.frame_id for frame in frames)
        return procs, frames

    def _mark_hosts_down(self) -> list[str]:
        """Hosts that stopped reporting. Not right after PostgreSQL was away, and late if nearly all went silent."""
        after = self._settings.host_down_after
        with self._engine.begin() as connection:
            heard = lost.hearing(connection, silent_after=after, scope=self._scope)
            if not heard.silent or heard.database_age < after:
                return []
            if heard.silent > max(1, heard.up // 2):
                _log.warning("most_hosts_silent", silent=heard.silent, up=heard.up)
                after *= DEAF_FACTOR
            down = lost.mark_hosts_down(connection, silent_after=after, scope=self._scope)
        if down:
            _log.warning("hosts_down", hosts=down)
            self._releaser.publish_hosts(down)
        return down

    def _kill(self, procs: Sequence[LostProc], frames: Sequence[OrphanFrame], reap: _Reap) -> dict[str, KillFate]:
        """The fate of each frame's process, host by host, hosts side by side; none of one there was no time for."""
        fates: dict[str, KillFate] = {}
        hosts = _by_host(procs, frames)
        if not hosts:
            return fates
        with ThreadPoolExecutor(min(_KILL_THREADS, len(hosts)), thread_name_prefix="reaper") as threads:
            for host, part in zip(hosts, threads.map(lambda host: self._kill_on(host, reap), hosts), strict=True):
                fates |= part
                if KillFate.UNREACHABLE in part.values():
                    reap.out_of_reach.add(host.name)
        return fates

    def _kill_on(self, host: _Host, reap: _Reap) -> dict[str, KillFate]:
        fates: dict[str, KillFate] = {}
        reachable = host.name not in reap.out_of_reach
        if reachable and host.gone and self._goes_on(reap):
            reachable = self._killer.answers(host.name, LOOK_SECONDS)
        for frame_id, proc_id, reason in host.runs:
            if not reachable:
                fates[frame_id] = KillFate.UNREACHABLE
            elif self._goes_on(reap):
                if reason:
                    fates[frame_id] = self._killer.stop(host.name, frame_id, proc_id, reason)
                else:
                    fates[frame_id] = self._killer.confirm_gone(host.name, frame_id, proc_id)
                reachable = fates[frame_id] is not KillFate.UNREACHABLE
        return fates


def _by_host(procs: Sequence[LostProc], frames: Sequence[OrphanFrame]) -> list[_Host]:
    hosts: dict[str, _Host] = {}
    for proc in procs:
        if proc.frame_id is not None:
            host = hosts.setdefault(proc.host_name, _Host(proc.host_name, proc.host_state == HardwareState.DOWN))
            reason = "" if proc.why is Why.UNNAMED else f"{proc.why.value}: it is lost"
            host.runs.append((proc.frame_id, proc.proc_id, reason))
    for frame in frames:
        if frame.host_name:
            host = hosts.setdefault(frame.host_name, _Host(frame.host_name, _host_gone(frame)))
            host.runs.append((frame.frame_id, "", "no proc owns it"))
    return list(hosts.values())


def _host_gone(frame: OrphanFrame) -> bool:
    return frame.host_state is None or frame.host_state == HardwareState.DOWN


_ENDED = (RunVerdict.APPLIED, RunVerdict.RELEASED, RunVerdict.ORPHAN_APPLIED)
_STATUSES = {
    Why.HOST_DOWN: ExitStatus.DOWN_HOST,
    Why.JOB_FINISHED: ExitStatus.FRAME_CLEARED,
    Why.NO_FRAME: ExitStatus.FRAME_CLEARED,
    Why.SILENT: ExitStatus.FRAME_ORPHAN,
    Why.UNNAMED: ExitStatus.FRAME_ORPHAN,
}


def _new_state(fate: KillFate, host_gone: bool, silent_for: float, give_up_after: float) -> FrameState | None:
    """WAITING for a frame that is known not to run; else DEAD once it was silent so many seconds, and None before."""
    if fate is KillFate.NOT_RUNNING or (host_gone and fate is KillFate.UNREACHABLE):
        return FrameState.WAITING
    return FrameState.DEAD if silent_for >= give_up_after else None


def _end_proc(proc: LostProc, fates: dict[str, KillFate]) -> LostRun | None:
    """The request that ends a lost proc, or None to try again in the next reap."""
    fate = KillFate.NOT_RUNNING if proc.frame_id is None else fates.get(proc.frame_id)
    if fate is None or fate is KillFate.RUNNING:
        return None
    gone = proc.host_state == HardwareState.DOWN
    state = FrameState.WAITING if proc.rebooted else _new_state(fate, gone, proc.silent_for, GIVE_UP_SECONDS)
    if state is None:
        return None
    return LostRun(
        proc.proc_id,
        proc.frame_id,
        state,
        _STATUSES[proc.why],
        pinged_at=None if proc.why is Why.JOB_FINISHED else proc.pinged_at,
        host_state=proc.host_state if proc.why is Why.HOST_DOWN and fate is KillFate.UNREACHABLE else None,
        reason=proc.why.value,
    )


def _end_frame(frame: OrphanFrame, fates: dict[str, KillFate]) -> LostRun | None:
    """The request that ends an orphan frame, or None to try again in the next reap."""
    fate = fates.get(frame.frame_id) if frame.host_name else KillFate.NOT_RUNNING
    if fate is None:
        return None
    state = _new_state(fate, _host_gone(frame), frame.silent_for, GIVE_UP_ORPHAN_SECONDS)
    if state is None:
        return None
    return LostRun("", frame.frame_id, state, ExitStatus.FRAME_ORPHAN, reason="no proc owns it")


# Heals what a crash can leave between the end of a frame and what follows from it.
#
# Our own completions do all of it in one transaction and leave nothing. A Cuebot does it in several, a person in psql
# in none: dependencies whose target is over stay active, frames wait for dependencies that are gone, jobs whose frames
# are all over stay PENDING, and frames stay in CHECKPOINT when nobody copies their checkpoint.

RECOVERED_PER_CALL = 500
"""Most rows of each kind healed by one pass."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What one pass healed."""

    depends: int = 0
    freed_frames: int = 0
    finished_jobs: int = 0
    checkpoints: int = 0

    @property
    def found_anything(self) -> bool:
        return bool(self.depends or self.freed_frames or self.finished_jobs or self.checkpoints)


def recover_depends(
    engine: Engine, only_on_success: bool, *, scope: UpkeepScope = EVERYTHING, batch: int = RECOVERED_PER_CALL
) -> Recovery:
    """One bounded pass over jobs, dependencies, frames and checkpoints, a transaction each. Safe at any time, anywhere.

    Of a dependency it is the job that waits which has to be in ``scope``.

    What is found is looked at again once its counters are locked, so a frame retried meanwhile is left alone.
    """
    with engine.begin() as connection:
        finished = _finish_jobs(connection, scope, batch)
    with engine.begin() as connection:
        met = _meet_stale_depends(connection, only_on_success, scope, batch)
    with engine.begin() as connection:
        freed = _free_stuck_frames(connection, scope, batch)
    with engine.begin() as connection:
        checkpoints = _drop_stale_checkpoints(connection, scope, batch)
    recovery = Recovery(met.depends, len(met.freed_frames) + freed, finished, checkpoints)
    if recovery.found_anything:
        _log.warning(
            "stuck_work_recovered",
            depends=recovery.depends,
            frames=recovery.freed_frames,
            jobs=recovery.finished_jobs,
            checkpoints=recovery.checkpoints,
        )
    return recovery


def _finish_jobs(connection: Connection, scope: UpkeepScope, batch: int) -> int:
    """Job-level dependencies are met by the next step, which sees the jobs as finished."""
    jobs = depends.find_unfinished_jobs(connection, limit=batch, scope=scope)
    if not jobs:
        return 0
    release.lock_counters(connection, release.Counters(jobs=frozenset(jobs)))
    still = depends.find_unfinished_jobs(connection, limit=batch, scope=scope, among=jobs)
    return len(depends.finish_jobs(connection, still))


def _meet_stale_depends(
    connection: Connection, only_on_success: bool, scope: UpkeepScope, batch: int
) -> depends.Satisfied:
    done = [FrameState.SUCCEEDED]
    if not only_on_success:
        done.append(FrameState.EATEN)
    found = depends.find_stale_depends(connection, done=done, limit=batch, scope=scope)
    if not found:
        return depends.Satisfied(0, {})
    affected = depends.counters_of_dependents(connection, found)
    release.lock_counters(connection, affected)
    still = depends.find_stale_depends(connection, done=done, limit=batch, scope=scope, among=found)
    return depends.satisfy_depends(connection, still)


def _free_stuck_frames(connection: Connection, scope: UpkeepScope, batch: int) -> int:
    frames, affected = depends.find_stuck_frames(connection, limit=batch, scope=scope)
    if not frames:
        return 0
    release.lock_counters(connection, affected)
    still, _ = depends.find_stuck_frames(connection, limit=batch, scope=scope, among=frames)
    return depends.free_stuck_frames(connection, still)


def _drop_stale_checkpoints(connection: Connection, scope: UpkeepScope, batch: int) -> int:
    frames, affected = release.find_stale_checkpoints(connection, limit=batch, scope=scope)
    if not frames:
        return 0
    release.lock_counters(connection, affected)
    return release.drop_checkpoints(connection, frames)


# Writing down the frame history that newer OpenCue databases queue, where no Cuebot does it.
#
# The queue grows with every frame that starts or ends; an event that cannot be written must not keep those behind it.

HISTORY_ROWS_PER_CALL = 1000
"""Events of one transaction."""

HISTORY_SECONDS = 15.0
"""No batch is begun after this long."""


def drain_history(
    engine: Engine,
    *,
    batch: int = HISTORY_ROWS_PER_CALL,
    seconds: float = HISTORY_SECONDS,
    timer: Callable[[], float] = time.monotonic,
) -> Drained:
    """Drain the queue, batch by batch, to its end or for so long. A failure is logged, and ends it."""
    until = timer() + seconds
    report = Drained()
    while True:
        try:
            drained = _drain(engine, batch)
        except SQLAlchemyError as error:
            _log.error("frame_history_not_drained", error=str(error).strip(), drained=report.events)
            return report
        report = Drained(report.events + drained.events, report.skipped + drained.skipped)
        if drained.events < batch or timer() >= until:
            return report


def _drain(engine: Engine, batch: int) -> Drained:
    """One batch at once or, if the database refuses it, event by event."""
    try:
        with engine.begin() as connection:
            return drain_frame_history(connection, events=batch)
    except DBAPIError as error:
        if database_away(error):
            raise
        _log.warning("frame_history_batch_refused", error=str(error.orig).strip())
    with engine.begin() as connection:
        drained = drain_frame_history(connection, events=batch, one_by_one=True)
    for detail in drained.refused:
        _log.error("frame_history_event_skipped", detail=detail)
    return drained
