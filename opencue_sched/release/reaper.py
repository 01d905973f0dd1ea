"""Ends the runs nobody will report the end of: on hosts that are down, of finished jobs, silent or ownerless ones.

Always in this order: kill, have RQD confirm that the process does not run, and only then give its frame away. A host
that cannot be asked keeps its frames until it is DOWN, has rebooted, or has been out of reach so long that a person
must decide (the frame ends DEAD): a frame is never given to a second host while the first may still render it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog
from sqlalchemy import Engine

from opencue_sched.domain.states import ExitStatus, FrameState, HardwareState
from opencue_sched.release.losing import Releasing
from opencue_sched.release.model import (
    EventCounts,
    FrameKiller,
    HostPublisher,
    KillFate,
    LedgerRelease,
    LostRun,
    ReleasePolicy,
    RunVerdict,
)
from opencue_sched.settings import Release
from opencue_sched.store import lost
from opencue_sched.store.lost import LostProc, OrphanFrame, Why

_log = structlog.get_logger(__name__)

BATCH = 200
"""Most procs, and most frames, of one pass."""

ORPHAN_SECONDS = 300.0
"""A proc no report has named, or a frame without a proc, for this long is lost."""

FRAMELESS_SECONDS = 60.0
"""A proc whose frame was taken off it (eaten, killed) is released after this long, if no completion does it."""

GIVE_UP_SECONDS = 1200.0
"""A silent proc whose host can be reached but does not confirm, or cannot be reached and is not DOWN: its frame is
DEAD after this long."""

GIVE_UP_ORPHAN_SECONDS = 3600.0
"""The same for a frame without a proc."""

DEAF_FACTOR = 3.0
"""When most hosts went silent at once it is probably us who did not hear them: wait this many times as long."""

_KILL_THREADS = 8


@dataclass(frozen=True, slots=True)
class ReaperReport:
    """What one pass did. ``deferred`` runs could not be confirmed dead and are tried again."""

    hosts_down: tuple[str, ...] = ()
    procs_released: int = 0
    frames_waiting: int = 0
    frames_dead: int = 0
    deferred: int = 0


class Reaper:
    """One pass at a time; any number of processes may run passes, each run is ended once."""

    def __init__(
        self,
        engine: Engine,
        settings: Release,
        *,
        killer: FrameKiller,
        ledger: LedgerRelease | None = None,
        changes: HostPublisher | None = None,
        counts: EventCounts | None = None,
        clock: Callable[[], float] = time.time,
        batch: int = BATCH,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._killer = killer
        policy = ReleasePolicy(settings.satisfy_only_on_frame_success)
        self._releasing = Releasing(engine, policy, ledger, changes, counts, clock)
        self._changes = changes
        self._batch = batch

    def run_once(self) -> ReaperReport:
        """Mark silent hosts DOWN, then end what is lost, within the bounds of one pass."""
        down = self._mark_hosts_down()
        with self._engine.connect() as connection:
            procs = lost.lost_procs(
                connection,
                silent_after=ORPHAN_SECONDS,
                frameless_after=FRAMELESS_SECONDS,
                limit=self._batch,
            )
            frames = lost.orphan_frames(connection, silent_after=ORPHAN_SECONDS, limit=self._batch)
        fates = self._kill(procs, frames)
        requests = [request for proc in procs if (request := _end_proc(proc, fates)) is not None]
        requests += [request for frame in frames if (request := _end_frame(frame, fates)) is not None]
        outcomes = self._releasing.end_lost(requests)
        ended = [outcome for outcome in outcomes if outcome.verdict in _ENDED]
        return ReaperReport(
            tuple(down),
            sum(outcome.verdict is not RunVerdict.ORPHAN_APPLIED for outcome in ended),
            sum(outcome.state is FrameState.WAITING for outcome in ended),
            sum(outcome.state is FrameState.DEAD for outcome in ended),
            len(procs) + len(frames) - len(ended),
        )

    def _mark_hosts_down(self) -> list[str]:
        """Hosts that stopped reporting. Not right after PostgreSQL was away, and late if nearly all went silent."""
        after = self._settings.host_down_after
        with self._engine.begin() as connection:
            heard = lost.hearing(connection, silent_after=after)
            if not heard.silent or heard.database_age < after:
                return []
            if heard.silent > max(1, heard.up // 2):
                _log.warning("most_hosts_silent", silent=heard.silent, up=heard.up)
                after *= DEAF_FACTOR
            down = lost.mark_hosts_down(connection, silent_after=after)
        if down:
            _log.warning("hosts_down", hosts=down)
            self._publish(down)
        return down

    def _publish(self, host_ids: Sequence[str]) -> None:
        if self._changes is None:
            return
        try:
            self._changes.publish(host_ids)
        except Exception as error:
            _log.warning("announce_failed", step="host_changes", error=str(error))

    def _kill(self, procs: Sequence[LostProc], frames: Sequence[OrphanFrame]) -> dict[str, KillFate]:
        """The fate of each frame's process, host by host, hosts side by side. A host out of reach is asked once."""
        of_host: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
        for proc in procs:
            if proc.frame_id is not None:
                of_host[proc.host_name].append((proc.frame_id, proc.proc_id, f"{proc.why.value}: it is lost"))
        for frame in frames:
            if frame.host_name:
                of_host[frame.host_name].append((frame.frame_id, "", "no proc owns it"))
        fates: dict[str, KillFate] = {}
        with ThreadPoolExecutor(_KILL_THREADS, thread_name_prefix="reaper") as threads:
            for part in threads.map(lambda item: self._kill_on(*item), of_host.items()):
                fates |= part
        return fates

    def _kill_on(self, host_name: str, runs: Sequence[tuple[str, str, str]]) -> dict[str, KillFate]:
        fates: dict[str, KillFate] = {}
        reachable = True
        for frame_id, proc_id, reason in runs:
            fate = KillFate.UNREACHABLE
            if reachable:
                fate = self._killer.stop(host_name, frame_id, proc_id, reason)
                reachable = fate is not KillFate.UNREACHABLE
            fates[frame_id] = fate
        return fates


_ENDED = (RunVerdict.APPLIED, RunVerdict.RELEASED, RunVerdict.ORPHAN_APPLIED)
_STATUSES = {
    Why.HOST_DOWN: ExitStatus.DOWN_HOST,
    Why.JOB_FINISHED: ExitStatus.FRAME_CLEARED,
    Why.NO_FRAME: ExitStatus.FRAME_CLEARED,
    Why.SILENT: ExitStatus.FRAME_ORPHAN,
}


def _end_proc(proc: LostProc, fates: dict[str, KillFate]) -> LostRun | None:
    """The request that ends a lost proc, or None to try again in the next pass."""
    fate = KillFate.NOT_RUNNING if proc.frame_id is None else fates[proc.frame_id]
    down = proc.host_state == HardwareState.DOWN
    state = FrameState.WAITING
    if fate is not KillFate.NOT_RUNNING and not proc.rebooted and not (down and fate is KillFate.UNREACHABLE):
        if proc.silent_for < GIVE_UP_SECONDS:
            return None
        state = FrameState.DEAD
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
    """The request that ends an orphan frame, or None to try again in the next pass."""
    fate = fates.get(frame.frame_id, KillFate.NOT_RUNNING)
    gone = frame.host_state is None or frame.host_state == HardwareState.DOWN
    state = FrameState.WAITING
    if fate is not KillFate.NOT_RUNNING and not (gone and fate is KillFate.UNREACHABLE):
        if frame.silent_for < GIVE_UP_ORPHAN_SECONDS:
            return None
        state = FrameState.DEAD
    return LostRun("", frame.frame_id, state, ExitStatus.FRAME_ORPHAN, reason="no proc owns it")
