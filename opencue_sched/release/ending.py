"""One transaction that ends any number of runs: frames stopped, procs released, dependencies met, jobs finished.

Everything a completion leads to is in the same transaction, so a process that dies leaves either all of it or none.
The locks are taken in one order: completed frames, procs, hosts, layer_stat, job_stat, and only then the frames that
depend on what was completed (a DEPEND frame is locked by nobody who waits for a counter). Dependencies reach into
other layers and jobs, whose counters must be locked before our own are changed. Which ones is foreseen from unlocked
counters; when that proves wrong (a layer turned out to be complete) the transaction starts over with the wider set,
which costs a rollback once a layer at most.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from opencue_sched.domain.errors import SchedulerError
from opencue_sched.domain.exit_decision import satisfies_depends
from opencue_sched.domain.states import FrameState
from opencue_sched.release.deciding import Ending, end_completed, end_lost
from opencue_sched.release.model import (
    CompletedFrame,
    EventCounts,
    HostPublisher,
    LedgerRelease,
    LostRun,
    ReleasePolicy,
    RunOutcome,
    RunsEnded,
    RunVerdict,
)
from opencue_sched.store import depends, procs, release
from opencue_sched.store.procs import DeletedProc
from opencue_sched.store.release import ChangedFrame, StoppedFrame

_log = structlog.get_logger(__name__)

_RETRIABLE_SQLSTATES = frozenset({"40P01", "40001", "55P03"})
_ATTEMPTS = 8
_LONGEST_RETRY_SECONDS = 0.2

Request = CompletedFrame | LostRun
_Result = TypeVar("_Result")


class WiderLocks(Exception):
    """The transaction must start over with these counters locked as well."""

    def __init__(self, counters: release.Counters) -> None:
        super().__init__("counters of dependents were not locked")
        self.counters = counters


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What the end of frames led to: jobs finished, frames made bookable."""

    finished_jobs: tuple[str, ...] = ()
    freed_frames: int = 0


def end_runs(
    engine: Engine, requests: Sequence[Request], policy: ReleasePolicy, *, clock: Callable[[], float] = time.time
) -> RunsEnded:
    """End runs in one transaction; the outcomes are in the order of ``requests``.

    Deadlocks (with a Cuebot or a person in psql; not with our own) and serialization failures are retried. Any other
    database error leaves everything unchanged and is raised.
    """
    ended, attempts = with_counters(
        engine, lambda connection, wider: _end(connection, requests, policy, clock(), wider)
    )
    return replace(ended, attempts=attempts)


def with_counters(engine: Engine, step: Callable[[Connection, release.Counters], _Result]) -> tuple[_Result, int]:
    """Run ``step`` in a transaction, again with more counters locked when it finds it needs them (WiderLocks).

    Deadlocks and serialization failures are retried too. Returns its result and the number of attempts.
    """
    wider = release.Counters()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with engine.begin() as connection:
                result = step(connection, wider)
            return result, attempt
        except WiderLocks as found:
            wider |= found.counters
        except DBAPIError as error:
            if attempt == _ATTEMPTS or sqlstate(error) not in _RETRIABLE_SQLSTATES:
                raise
            _log.info("release_retried", sqlstate=sqlstate(error), attempt=attempt)
            time.sleep(random.uniform(0, _LONGEST_RETRY_SECONDS))
    raise RuntimeError("the counters to lock for ended runs kept growing")


def announce(
    ended: RunsEnded, ledger: LedgerRelease | None, changes: HostPublisher | None, counts: EventCounts | None = None
) -> None:
    """After the commit: give back the bookings and tell the host caches.

    Redis being away never undoes an end: the notification of the proc table and the next recompute bring the same.
    """
    if ledger is not None and ended.ledger_procs:
        _tell("ledger_release", lambda: ledger.release(ended.ledger_procs), counts, procs=ended.ledger_procs)
    publish_hosts(ended.hosts, changes, counts)


def publish_hosts(host_ids: Sequence[str], changes: HostPublisher | None, counts: EventCounts | None = None) -> None:
    """Tell the host caches of hosts that were changed, after the commit."""
    if changes is not None and host_ids:
        _tell("host_changes", lambda: changes.publish(host_ids), counts, hosts=host_ids)


def _tell(step: str, tell: Callable[[], object], counts: EventCounts | None, **ids: Sequence[str]) -> None:
    try:
        tell()
    except Exception as error:
        # Whatever it is: what is committed stands, and whoever asked for it must not hear that it failed.
        expected = isinstance(error, SchedulerError | RedisError)
        (_log.warning if expected else _log.exception)("announce_failed", step=step, error=str(error), **ids)
        if counts is not None:
            counts.add(f"{step}_failed")


def database_away(error: BaseException) -> bool:
    """Whether the database could not be reached or did not finish in time: the same may work later."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(error, (OperationalError, InterfaceError, PoolTimeout))


def sqlstate(error: DBAPIError) -> str:
    """The five-character code of a database error; empty when the connection was lost."""
    return str(getattr(error.orig, "pgcode", None) or "")


def _end(
    connection: Connection, requests: Sequence[Request], policy: ReleasePolicy, now: float, wider: release.Counters
) -> RunsEnded:
    runs = [(request.proc_id, request.frame_id or "") for request in requests]
    procs.lock_runs(connection, {proc for proc, _ in runs if proc}, {frame for _, frame in runs if frame})
    endings = _endings(requests, procs.read_runs(connection, runs), now)
    stops = [ending.stop for ending in endings if ending.stop is not None]
    releases = {ending.release.id: ending.release for ending in endings if ending.release is not None}
    if not stops and not releases:
        return RunsEnded(tuple(_outcome(request, ending) for request, ending in zip(requests, endings, strict=True)))

    managed = procs.managed_shows(connection, {proc.show_id for proc in releases.values() if proc.show_id})
    held = _foreseen(connection, endings, policy) | wider
    procs.lock_hosts(connection, {proc.host_id for proc in releases.values()})
    release.lock_counters(connection, held)

    stopped = {frame.id: frame for frame in release.stop_frames(connection, stops)} if stops else {}
    deleted = _release_procs(connection, list(releases), managed)
    release.count_usage(connection, stopped.values())
    aftermath = follow(connection, list(stopped.values()), held, policy)
    _adapt_memory(connection, endings, stopped)
    release.count_shows(connection, _shows(endings, stopped))
    outcomes = tuple(
        _outcome(request, ending, stopped.get(ending.frame.id) if ending.stop and ending.frame else None)
        for request, ending in zip(requests, endings, strict=True)
    )
    return RunsEnded(
        outcomes,
        tuple(proc.id for proc in deleted),
        tuple(proc.id for proc in deleted if proc.show_id in managed and not proc.local),
        tuple({proc.host_id: None for proc in deleted}),
        aftermath.finished_jobs,
        aftermath.freed_frames,
    )


def _endings(requests: Sequence[Request], rows: Sequence[procs.RunRow], now: float) -> list[Ending]:
    """Each request's ending; of several that name one frame or proc only the first does anything."""
    endings: list[Ending] = []
    frames: set[str] = set()
    released: set[str] = set()
    for request, row in zip(requests, rows, strict=True):
        ending = _ending(request, row, now)
        repeated = (ending.stop is not None and ending.stop.frame_id in frames) or (
            ending.release is not None and ending.release.id in released
        )
        if repeated:
            ending = Ending(RunVerdict.STALE)
        if ending.stop is not None:
            frames.add(ending.stop.frame_id)
        if ending.release is not None:
            released.add(ending.release.id)
        endings.append(ending)
    return endings


def _ending(request: Request, row: procs.RunRow, now: float) -> Ending:
    if isinstance(request, CompletedFrame):
        return end_completed(request, row, now=now)
    return end_lost(request, row)


def _foreseen(connection: Connection, endings: Sequence[Ending], policy: ReleasePolicy) -> release.Counters:
    """The counters this transaction is going to change, as far as can be told without their locks."""
    stopping = [(ending.stop, ending.frame) for ending in endings if ending.stop is not None and ending.frame]
    own = release.Counters(
        frozenset(frame.layer_id for _, frame in stopping), frozenset(frame.job_id for _, frame in stopping)
    )
    over = [frame for stop, frame in stopping if stop.state in (FrameState.SUCCEEDED, FrameState.EATEN)]
    satisfying = [
        frame
        for stop, frame in stopping
        if satisfies_depends(stop.state, only_on_success=policy.satisfy_only_on_frame_success)
    ]
    ending_layers, ending_jobs = [frame.layer_id for frame in over], [frame.job_id for frame in over]
    found = depends.find_depends(
        connection,
        frames={frame.id for frame in satisfying},
        frame_layers={frame.layer_id for frame in satisfying},
        layers={frame.layer_id for frame in satisfying if frame.layer_open <= ending_layers.count(frame.layer_id)},
        jobs={frame.job_id for frame in over if frame.job_open <= ending_jobs.count(frame.job_id)},
    )
    return own | depends.counters_of_dependents(connection, found)


def _release_procs(connection: Connection, proc_ids: Sequence[str], managed: frozenset[str]) -> list[DeletedProc]:
    if not proc_ids:
        return []
    deleted = procs.delete_procs(connection, proc_ids)
    procs.restore_hosts(connection, deleted)
    procs.decrement_local_accounts(connection, [proc for proc in deleted if proc.local])
    unmanaged = [proc for proc in deleted if not proc.local and proc.show_id not in managed]
    procs.decrement_accounts(connection, unmanaged)
    return deleted


def follow(
    connection: Connection, changed: Sequence[ChangedFrame], held: release.Counters, policy: ReleasePolicy
) -> Aftermath:
    """Meet the dependencies on what is over now and finish jobs. Counters that are not locked start it all over."""
    over = [frame for frame in changed if frame.state in (FrameState.SUCCEEDED, FrameState.EATEN)]
    if not over:
        return Aftermath()
    only_on_success = policy.satisfy_only_on_frame_success
    satisfying = [frame for frame in over if satisfies_depends(frame.state, only_on_success=only_on_success)]
    layers = depends.complete_layers(connection, {frame.layer_id for frame in satisfying})
    jobs = depends.complete_jobs(connection, {frame.job_id for frame in over})
    found = depends.find_depends(
        connection,
        frames={frame.id for frame in satisfying},
        frame_layers={frame.layer_id for frame in satisfying},
        layers=layers,
        jobs=jobs,
    )
    needed = depends.counters_of_dependents(connection, found)
    if not held.covers(needed):
        raise WiderLocks(needed)
    finished = depends.finish_jobs(connection, jobs)
    satisfied = depends.satisfy_depends(connection, found)
    return Aftermath(tuple(finished), len(satisfied.freed_frames))


def _adapt_memory(connection: Connection, endings: Sequence[Ending], stopped: dict[str, StoppedFrame]) -> None:
    """The layer's memory requirement follows what its frames need (b_optimize), and grows after a memory failure."""
    peaks: dict[str, int] = {}
    for frame in stopped.values():
        if frame.state is FrameState.SUCCEEDED and frame.max_rss_kb > 0:
            peaks[frame.layer_id] = max(peaks.get(frame.layer_id, 0), frame.max_rss_kb)
    failed: dict[str, int] = {}
    for ending in endings:
        if ending.memory_failure and ending.frame and ending.release and ending.frame.id in stopped:
            layer_id = ending.frame.layer_id
            failed[layer_id] = max(failed.get(layer_id, 0), ending.release.memory_reserved_kb)
    release.lower_layer_memory(connection, {layer: rss for layer, rss in peaks.items() if layer not in failed})
    for layer_id, memory_kb in release.raise_layer_memory(connection, failed).items():
        _log.info("layer_memory_raised", layer=layer_id, memory_kb=memory_kb)


def _shows(endings: Sequence[Ending], stopped: dict[str, StoppedFrame]) -> list[tuple[str, bool]]:
    return [
        (ending.frame.show_id, stopped[ending.frame.id].success)
        for ending in endings
        if ending.stop is not None and ending.frame is not None and ending.frame.id in stopped
    ]


def _outcome(request: Request, ending: Ending, stopped: StoppedFrame | None = None) -> RunOutcome:
    if stopped is None:
        return RunOutcome(request.proc_id, request.frame_id, ending.verdict)
    return RunOutcome(request.proc_id, request.frame_id, ending.verdict, stopped.state, stopped.exit_status)
