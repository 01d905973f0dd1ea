"""The release path: ends runs, whether their RQDs report the end (completions) or nobody ever will (lost runs)."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from opencue_sched.accounting.ledger import Ledger
from opencue_sched.clients.store_errors import Failure, classify, describe, is_trouble
from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.domain.names import same_host
from opencue_sched.domain.states import FrameState, JobState
from opencue_sched.reports.announcements import AnnouncementSender, announce
from opencue_sched.reports.run_ends import (
    CompletedFrame,
    Ending,
    LostRun,
    RunOutcome,
    RunsEnded,
    RunVerdict,
    ending_of,
    out_of_retries,
    satisfying_states,
)
from opencue_sched.settings import Release
from opencue_sched.store import depends, failed_runs, frame_memory, job_events, limit_bindings, procs, release
from opencue_sched.store.limit_bindings import LicenceShortage
from opencue_sched.store.release import ChangedFrame

# One transaction that ends any number of runs: frames stopped, procs released, dependencies met, jobs finished.
#
# Everything a completion leads to is in the same transaction, so a process that dies leaves either all of it or none.
# The locks are taken in one order: completed frames, procs, hosts, layer_stat, job_stat, and only then the frames that
# depend on what was completed (no transaction that waits for a counter has locked a DEPEND frame). Dependencies reach
# into other layers and jobs, whose counters must be locked before our own are changed. `_foreseen` guesses which from
# unlocked counters; when it is wrong (a layer turned out to be complete) the transaction starts over with the wider
# set, which costs a rollback once a layer at most.

_log = structlog.get_logger(__name__)

_ATTEMPTS = 8
"""How often a transaction is tried, each time with more counters locked or after a collision. After the last try, runs
that were to end together are tried again in halves: with fewer tries a busy farm comes to that more often, with more a
batch waits longer for locks that do not come free."""
_LONGEST_RETRY_SECONDS = 0.2
"""The longest pause before a transaction is tried again. It is as long as two of the largest
transactions take (MOST_TOGETHER), and random, so that those of a deadlock do not start over together."""

Request = CompletedFrame | LostRun
Note = Callable[[Connection, Collection[str]], object]
"""A function that writes down who has frames changed, in the transaction that changes the last of them.

It is given the ids of all: the others were changed before, for the same person. What it locks of jobs is locked behind
their counters and before their layers, as in a transaction that ends jobs."""

_Result = TypeVar("_Result")


_ASTRAY_WARN_SECONDS = 60.0
"""How often the log warns that a host reports frames which were booked on another."""


def warn_of_astray(booked_on: str, reported_by: str) -> None:
    """Log, once a minute for each pair, that a host reports a process which was booked on another one: that one's name
    leads to it. The process counts all the same: it has the right proc."""
    if not same_host(booked_on, reported_by):
        _log_astray(booked_on, reported_by, time.monotonic() // _ASTRAY_WARN_SECONDS)


@lru_cache(maxsize=10_000)
def _log_astray(booked_on: str, reported_by: str, _minute: float) -> None:
    """Log the pair; the cache lets each pass once a minute, while it is among the last 10,000."""
    _log.warning("frames_run_on_another_host", booked_on=booked_on, reported_by=reported_by)


def no_note(_connection: Connection, _frame_ids: Collection[str]) -> None:
    """The Note of changes that nobody has asked for: write nothing."""


def end_runs(releaser: Releaser, requests: Sequence[Request], note: Note = no_note) -> RunsEnded:
    """End runs in one transaction, with a ``note`` of the frames it stops; the outcomes are in the order of
    ``requests``.

    Any database error that `with_counters` does not retry leaves everything unchanged and is raised.
    """
    return with_counters(releaser.engine, partial(_end, releaser, requests, note))


def with_counters(engine: Engine, step: Callable[[Connection, release.Counters], _Result]) -> _Result:
    """Run ``step`` in a transaction, and again with more counters locked when it raises WiderLocks.

    Deadlocks (with a Cuebot or a person in psql; ours lock in one order), serialization failures, locks that are not
    available and plans that are outdated are retried too.
    """
    wider = release.Counters()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with engine.begin() as connection:
                return step(connection, wider)
        except release.WiderLocks as found:
            wider |= found.counters
        except DBAPIError as error:
            if attempt == _ATTEMPTS or classify(error) not in (Failure.REPEAT, Failure.BUSY, Failure.OUTDATED):
                raise
            _log.info("release_retried", error=describe(error), attempt=attempt)
            # A random pause, so that the transactions of a deadlock do not start over together.
            time.sleep(random.uniform(0, _LONGEST_RETRY_SECONDS))
    raise RuntimeError("the counters to lock for ended runs kept growing")


def _end(
    releaser: Releaser, requests: Sequence[Request], note: Note, connection: Connection, wider: release.Counters
) -> RunsEnded:
    """End runs in the caller's transaction: lock them, judge each request, stop frames, delete procs, follow
    dependencies, and record what the runs used. Raises WiderLocks when counters turn out to be needed that are not
    locked."""
    satisfying = satisfying_states(releaser.settings)
    named = [(request.proc_id, request.frame_id) for request in requests]
    failed_with = {request.exit_status for request in requests if isinstance(request, CompletedFrame)}
    shortages = limit_bindings.shortages_of(connection, failed_with - {0, 1}) if failed_with - {0, 1} else {}
    endings = _endings(requests, procs.lock_and_read_runs(connection, named), releaser.clock(), shortages)
    failing_layers = {ending.run.layer_id for ending in endings if ending.memory_failure}
    if failing_layers:
        largest = frame_memory.largest_hosts(connection, failing_layers)
        endings = [out_of_retries(ending, largest.get(ending.run.layer_id)) for ending in endings]
    stops = [ending.stop for ending in endings if ending.stop is not None]
    releases = [ending.run for ending in endings if ending.releases]
    held = _foreseen(connection, endings, satisfying) | wider
    stopped = {
        frame.id: frame
        for frame in release.lock_and_stop_frames(
            connection,
            stops,
            shows={run.proc_show_id for run in releases},
            hosts={run.host_id for run in releases},
            counters=held,
        )
    }
    if dead := [frame.id for frame in stopped.values() if frame.state == FrameState.DEAD]:
        job_events.note_deaths(connection, dead)
    if again := [frame.id for frame in stopped.values() if frame.state == FrameState.WAITING]:
        depends.wait_for_open(connection, again)
    deleted = procs.delete_procs(connection, [run.proc_id for run in releases])
    procs.decrement_accounts(connection, [proc for proc in deleted if not proc.local and not proc.managed])
    finished_jobs = follow(connection, list(stopped.values()), held, satisfying)
    if stopped:
        note(connection, stopped)
    failed = [ending.run for ending in endings if ending.memory_failure and ending.releases]
    limit_bindings.follow_shortages(
        connection,
        [
            (ending.run.layer_id, ending.shortage)
            for ending in endings
            if ending.shortage is not None and ending.run.frame_id in stopped
        ],
    )
    starved = _raise_memory(connection, [run for run in failed if run.frame_id in stopped], releaser.settings)
    shows = {ending.run.frame_id: ending.run.show_id for ending in endings}
    ended = [(frame, shows[frame.id]) for frame in stopped.values()]
    release.record_runs(connection, deleted, ended, _peaks(stopped.values(), starved))
    # Frames that are killed with their job end after the job did, which may have been after their runs were read.
    over_before = {frame.job_id for frame in stopped.values() if frame.job_state == JobState.FINISHED}
    release.record_last_runs(connection, {*finished_jobs, *over_before})
    failed_runs.note_failures(
        connection,
        [
            (ending.run, ending.stop.exit_status)
            for ending in endings
            if ending.host_failure and ending.stop is not None and ending.stop.frame_id in stopped
        ],
    )
    outcomes = []
    for request, ending in zip(requests, endings, strict=True):
        frame = stopped.get(ending.stop.frame_id) if ending.stop else None
        state = FrameState(frame.state) if frame else None
        outcomes.append(RunOutcome(request.proc_id, request.frame_id, ending.verdict, state))
    return RunsEnded(
        tuple(outcomes),
        tuple(proc.id for proc in deleted if proc.managed and not proc.local),
        tuple({proc.host_id: None for proc in deleted}),
        tuple(finished_jobs),
    )


def _endings(
    requests: Sequence[Request], runs: Sequence[procs.Run], now: float, shortages: Mapping[int, LicenceShortage]
) -> list[Ending]:
    """The ending of each request. Where several requests name one frame or proc, only the first has an effect."""
    endings: list[Ending] = []
    taken: set[str] = set()
    for request, run in zip(requests, runs, strict=True):
        short = shortages.get(request.exit_status) if isinstance(request, CompletedFrame) else None
        ending = ending_of(request, run, now=now, shortage=short)
        if isinstance(request, CompletedFrame) and ending.releases:
            warn_of_astray(run.host_name, request.host_name)
        ids = {ending.stop.frame_id} if ending.stop else set()
        if ending.releases:
            ids.add(run.proc_id)
        endings.append(Ending(RunVerdict.STALE, run) if ids & taken else ending)
        taken |= ids
    return endings


def _foreseen(
    connection: Connection, endings: Sequence[Ending], satisfying: Collection[FrameState]
) -> release.Counters:
    """The counters that this transaction is going to change, as far as the rows show before they are locked."""
    stopping = [(ending.stop.state, ending.run) for ending in endings if ending.stop is not None]
    own = release.counters_of(run for _, run in stopping)
    over = [run for state, run in stopping if state in (FrameState.SUCCEEDED, FrameState.EATEN)]
    done = [run for state, run in stopping if state in satisfying]
    ending_layers, ending_jobs = Counter(run.layer_id for run in over), Counter(run.job_id for run in over)
    found = depends.find_depends(
        connection,
        frames={run.frame_id for run in done},
        frame_layers={run.layer_id for run in done},
        layers={run.layer_id for run in done if run.layer_open <= ending_layers[run.layer_id]},
        jobs={run.job_id for run in over if run.job_open <= ending_jobs[run.job_id]},
    )
    return own | depends.counters_of_dependents(connection, found)


def follow(
    connection: Connection,
    changed: Sequence[ChangedFrame],
    held: release.Counters,
    satisfying: Collection[FrameState],
) -> list[str]:
    """Satisfy the dependencies on frames that are in one of the ``satisfying`` states now; returns the jobs that
    finished. Raises WiderLocks when it would change counters that are not among ``held``, the locked ones."""
    over = [frame for frame in changed if frame.state in (FrameState.SUCCEEDED, FrameState.EATEN)]
    if not over:
        return []
    done = [frame for frame in over if frame.state in satisfying]
    own_layers, own_jobs = {frame.layer_id for frame in done}, {frame.job_id for frame in over}
    met = depends.complete(connection, frames={frame.id for frame in done}, layer_ids=own_layers, job_ids=own_jobs)
    dependents = depends.counters_of_dependents(connection, met.depends)
    if not held >= dependents:
        raise release.WiderLocks(dependents)
    finished = depends.finish_jobs(connection, met.jobs)
    depends.satisfy_depends(connection, met.depends)
    return finished


def _raise_memory(connection: Connection, failed: Sequence[procs.Run], settings: Release) -> frozenset[str]:
    """Raise the memory that frames ask for which failed for want of it, and that of a layer with enough such frames.
    Returns the layers (ids) whose frames failed."""
    if failed:
        frames_to_raise = settings.frames_to_raise_a_layer
        frames, layers = frame_memory.ask_for_more(connection, failed, frames_to_raise=frames_to_raise)
        for frame_id, memory_kb in frames.items():
            _log.info("frame_memory_raised", frame=frame_id, memory_kb=memory_kb)
        for layer_id, memory_kb in layers.items():
            _log.info("layer_memory_raised", layer=layer_id, memory_kb=memory_kb)
    return frozenset(run.layer_id for run in failed)


def _peaks(stopped: Collection[ChangedFrame], starved: Collection[str]) -> dict[str, int]:
    """The peak memory (KB) that the frames which rendered show of each layer, but of the ``starved`` ones."""
    peaks: dict[str, int] = {}
    for frame in stopped:
        if frame.state == FrameState.SUCCEEDED and frame.max_rss_kb > 0 and frame.layer_id not in starved:
            peaks[frame.layer_id] = max(peaks.get(frame.layer_id, 0), frame.max_rss_kb)
    return peaks


MOST_TOGETHER = 256
"""The most runs ended in one transaction, which takes a tenth of a second: booking and reports wait for its locks. So
many end together only where they come faster than a few at a time are committed; each costs less the more they are."""


@dataclass(frozen=True, slots=True)
class Releaser:
    """Ends runs; once that is committed, releases their bookings in the ledger and publishes the changed hosts.

    With a ``sender`` that is left to it: nothing here waits for Redis then.
    """

    engine: Engine
    settings: Release = field(default_factory=Release)
    ledger: Ledger | None = None
    changes: HostChanges | None = None
    count: Callable[[str], object] = lambda *_: None
    clock: Callable[[], float] = time.monotonic
    sender: AnnouncementSender | None = None

    def end(self, requests: Sequence[Request], note: Note = no_note) -> list[RunOutcome]:
        """End runs, MOST_TOGETHER in a transaction (each with a ``note`` of the frames stopped so far), and answer each
        in its place. Processes of lost runs must be known not to run.

        When the database is in trouble the error is raised (`is_trouble`): of that transaction nothing was applied.
        """
        outcomes: list[RunOutcome] = []
        stopped: list[str] = []
        for start in range(0, len(requests), MOST_TOGETHER):
            part = requests[start : start + MOST_TOGETHER]
            ended = self._end(part, note, stopped)
            log = _log.bind()  # once: each call of an unbound logger would bind one
            for request, outcome in zip(part, ended, strict=True):
                self._record(log, request, outcome)
                outcomes.append(outcome)
        return outcomes

    def publish_hosts(self, host_ids: Sequence[str]) -> None:
        """Publish changed hosts to the host caches, which read the rows again: so call it after the commit."""
        self._announce((), host_ids)

    def _end(self, requests: Sequence[Request], note: Note, stopped: list[str]) -> Sequence[RunOutcome]:
        """End runs in one transaction or, when that fails, each half in one, so that one bad run is found and does not
        keep the others from ending. Frames are ``stopped`` once their transaction is committed."""

        def note_all(connection: Connection, frame_ids: Collection[str]) -> None:
            note(connection, (*stopped, *frame_ids))

        try:
            ended = end_runs(self, requests, note_all)
        except Exception as error:
            if is_trouble(error):
                raise
            if len(requests) == 1:
                (bad,) = requests
                return [RunOutcome(bad.proc_id, bad.frame_id, RunVerdict.REFUSED, error=error)]
            middle = len(requests) // 2
            return [*self._end(requests[:middle], note, stopped), *self._end(requests[middle:], note, stopped)]
        stopped += [outcome.frame_id for outcome in ended.outcomes if outcome.state is not None]
        self._announce(ended.ledger_procs, ended.hosts)
        for job_id in ended.finished_jobs:
            _log.info("job_finished", job=job_id)
        return ended.outcomes

    def _announce(self, procs: Sequence[str], hosts: Sequence[str]) -> None:
        """Release the procs in the ledger and say that the hosts changed: at once, or by the thread of ``sender`` where
        there is one."""
        if self.sender is not None:
            self.sender.put(procs, hosts)
        else:
            announce(self.ledger, self.changes, self.count, procs, hosts)

    def _record(self, to: Any, request: Request, outcome: RunOutcome) -> None:
        """Log what became of a run, and count it if its end was reported."""
        fields: dict[str, object] = {"proc": request.proc_id, "frame": request.frame_id}
        if isinstance(request, LostRun):
            kind, event, log = "lost_run", "lost_run_ended", to.info
            fields["reason"] = request.reason
        else:
            self.count(f"completion_{outcome.verdict.value}")
            applied = outcome.state is not None
            kind, event = "completion", "frame_completed" if applied else "completion_ignored"
            log = to.debug if applied else to.info
            fields |= {"name": request.name, "host": request.host_name}
            fields |= {"exit_status": request.exit_status, "exit_signal": request.exit_signal}
        if outcome.error is None:
            log(event, state=outcome.state, verdict=outcome.verdict.value, **fields)
        else:
            trace = None if isinstance(outcome.error, DBAPIError) else outcome.error
            to.error(f"{kind}_refused", error=describe(outcome.error), exc_info=trace, **fields)
