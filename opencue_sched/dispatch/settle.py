"""What follows a launch: confirm what runs, undo what does not, leave alone what is unknown.

Order of an undoing, and why: RQD first (the frame does not run there, confirmed while its proc is still ours), then
PostgreSQL (proc gone, host idle restored, frame WAITING again), then the Redis ledger, then the word that the host
changed. A kill after the second step could hit the frame's next run on the same host; a ledger release before it could
let another booking over the cap.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import redis
import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting.entries import Booking
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.dispatch.commit import CommittedProc
from opencue_sched.dispatch.cooldown import Cooldowns
from opencue_sched.dispatch.launch import LaunchOutcome, LaunchState
from opencue_sched.dispatch.rqd import Confirmation, Fate, RqdChannels, RunningFrameRef, kill_and_confirm
from opencue_sched.domain.farm import PlannedProc
from opencue_sched.domain.units import centicores
from opencue_sched.errors import NotReady, RqdFailure
from opencue_sched.placement.host_groups import HostChanges
from opencue_sched.store.procs import frames_of

log = structlog.get_logger(__name__)

_KILL_REASON = "opencue-sched: the launch was not confirmed"


@dataclass(frozen=True, slots=True)
class Undone:
    """A proc that did not become a running frame."""

    planned: PlannedProc
    error: RqdFailure


@dataclass(frozen=True, slots=True)
class SettleReport:
    """``launched``: proc ids that run. ``compensated``: given back, the frame waits again (or was taken over).

    ``left_unknown``: still booked, because it could not be confirmed that nothing runs, or because PostgreSQL did not
    take the compensation; the reaper resolves them. ``adopted`` counts the launched ones whose answer was lost.
    ``ledger_error`` is set when Redis refused or did not answer: the next recompute repairs the ledger.
    """

    launched: tuple[str, ...]
    compensated: tuple[Undone, ...]
    left_unknown: tuple[Undone, ...]
    adopted: int = 0
    ledger_error: str = ""


@dataclass(frozen=True, slots=True)
class Settlement:
    """Everything a settlement talks to. ``compensate`` undoes committed procs in the caller's transaction and returns
    the ids it removed; the others had already been released."""

    engine: Engine
    ledger: Ledger
    changes: HostChanges
    channels: RqdChannels
    compensate: Callable[[Connection, Sequence[CommittedProc]], Collection[str]]

    def settle(
        self,
        committed: Sequence[CommittedProc],
        outcomes: Sequence[LaunchOutcome],
        *,
        progress: Callable[[], None] = lambda: None,
    ) -> SettleReport:
        """Settle committed procs, given the outcome of each one's launch (one per proc, in any order). ``progress`` is
        called as RQDs are asked."""
        by_id = {it.planned.proc_id: it for it in committed}
        launched = [it.proc_id for it in outcomes if it.state is LaunchState.LAUNCHED]
        to_undo = {it.proc_id: _error(it) for it in outcomes if it.state is LaunchState.FAILED}
        unsure = [it for it in outcomes if it.state is LaunchState.UNKNOWN]
        unsure, left = self._still_ours(unsure, to_undo)

        adopted = 0
        confirmations = self.channels.each(self._confirm(by_id), unsure, progress=progress)
        for outcome, confirmation in zip(unsure, confirmations, strict=True):
            error = _error(outcome)
            if confirmation.fate is Fate.RUNNING:
                launched.append(outcome.proc_id)
                adopted += 1
            elif confirmation.fate is Fate.NOT_RUNNING:
                to_undo[outcome.proc_id] = error
            else:
                left[outcome.proc_id] = _because(error, f"not confirmed to be gone ({confirmation.detail})")

        for proc_id, problem in self._undo_in_postgresql([by_id[proc_id] for proc_id in to_undo]).items():
            left[proc_id] = _because(to_undo.pop(proc_id), problem)
        ledger_error = self._tell_redis(
            booked=[booking_of(by_id[proc_id].planned) for proc_id in (*launched, *left)],
            released=list(to_undo),
            hosts=list(dict.fromkeys(by_id[proc_id].planned.host.id for proc_id in to_undo)),
        )
        report = SettleReport(
            launched=tuple(launched),
            compensated=tuple(Undone(by_id[proc_id].planned, error) for proc_id, error in to_undo.items()),
            left_unknown=tuple(Undone(by_id[proc_id].planned, error) for proc_id, error in left.items()),
            adopted=adopted,
            ledger_error=ledger_error,
        )
        for proc_id, error in to_undo.items():
            log.warning("launch_compensated", proc_id=proc_id, host=error.host, error=str(error))
        for proc_id, error in left.items():
            log.error("launch_left_unknown", proc_id=proc_id, host=error.host, error=str(error))
        return report

    def _still_ours(
        self, unsure: Sequence[LaunchOutcome], to_undo: dict[str, RqdFailure]
    ) -> tuple[list[LaunchOutcome], dict[str, RqdFailure]]:
        """Those whose frames still belong to their procs, so that RQD may be told to kill them; and those to be left.

        A process that was stopped for long may find its frame given to another proc, on the same host even; RQD knows
        frames by frame id only. A proc that is gone has nothing to be undone but in the ledger: it joins ``to_undo``.
        """
        if not unsure:
            return [], {}
        try:
            with self.engine.connect() as connection:
                frames = frames_of(connection, [it.proc_id for it in unsure])
        except SQLAlchemyError as error:
            reason = f"PostgreSQL did not say whose its frame is: {type(error).__name__}"
            return [], {it.proc_id: _because(_error(it), reason) for it in unsure}
        ours, left = [], {}
        for it in unsure:
            if it.proc_id not in frames:
                to_undo[it.proc_id] = _error(it)
            elif frames[it.proc_id] != it.frame_id:
                left[it.proc_id] = _because(_error(it), "its frame was taken off its proc")
            else:
                ours.append(it)
        return ours, left

    def _confirm(self, by_id: dict[str, CommittedProc]) -> Callable[[LaunchOutcome], Confirmation]:
        def confirm(outcome: LaunchOutcome) -> Confirmation:
            cores = centicores(by_id[outcome.proc_id].planned.reservation.cores)
            ref = RunningFrameRef(outcome.host_name, outcome.frame_id, outcome.proc_id, cores)
            return kill_and_confirm(self.channels, ref, reason=_KILL_REASON, adopt=True)

        return confirm

    def _undo_in_postgresql(self, committed: Sequence[CommittedProc]) -> dict[str, str]:
        """One transaction, or one per proc when that fails, so that one bad row holds back nothing else.

        Returns the proc ids that could not be undone, or not surely, and why.
        """
        if not committed:
            return {}
        try:
            with self.engine.begin() as connection:
                removed = self.compensate(connection, committed)
        except SQLAlchemyError as error:
            log.warning("compensation_failed", proc_ids=[it.planned.proc_id for it in committed], error=str(error))
            if len(committed) == 1:
                reason = f"PostgreSQL did not take the compensation: {type(error).__name__}"
                return {committed[0].planned.proc_id: reason}
            problems: dict[str, str] = {}
            for one in committed:
                problems |= self._undo_in_postgresql([one])
            return problems
        others = [it.planned.proc_id for it in committed if it.planned.proc_id not in removed]
        if others:
            log.info("compensated_by_others", proc_ids=others)
        return {}

    def _tell_redis(self, *, booked: list[Booking], released: list[str], hosts: list[str]) -> str:
        """A proc that is committed in PostgreSQL is confirmed in the ledger even when its frame is not sure to run."""
        try:
            if booked:
                self.ledger.settle(booked)
            if released:
                self.ledger.release(released)
            if hosts:
                self.changes.publish(hosts)
        except (redis.RedisError, NotReady) as error:
            log.warning("settlement_not_told_to_redis", booked=len(booked), released=released, error=str(error))
            return f"{type(error).__name__}: {error}"
        return ""


def booking_of(planned: PlannedProc) -> Booking:
    """What a planned proc takes from the counters."""
    return Booking(planned.proc_id, planned.vertices, planned.reservation.cores, planned.reservation.gpus)


def _error(outcome: LaunchOutcome) -> RqdFailure:
    if outcome.error is None:
        raise ValueError(f"the launch of proc {outcome.proc_id} ended {outcome.state.value} without an error")
    return outcome.error


def _because(error: RqdFailure, reason: str) -> RqdFailure:
    return RqdFailure(f"{error}; {reason}", outcome_unknown=True, proc_id=error.proc_id, host=error.host)


# Whose fault it is when RQD does not take a frame: the host's, the job's, or that of the two together.
#
# Either can look like the other: a host without a disk refuses every job, and a job with a user that may not be is
# refused by every host. A host that says that it takes nothing, or says nothing, is at fault itself and gets a
# cooldown. Any other refusal is first between the layer and the host: they are kept apart, for longer each time, and
# both go on with others. It also counts against the job, until one of its frames is launched, and against the host,
# until it takes a frame: a job that several hosts refused within a minute is at fault, and so is a host that refused
# several jobs.

HOSTS_TO_BLAME = 3
JOBS_TO_BLAME = 3
APART_SECONDS = 5.0
LONGEST_APART_SECONDS = 60.0
"""How long a layer and a host are kept apart at first, and at most: what the host lacked may be free again."""
REMEMBERED_SECONDS = 60.0
_REMEMBERED = 10_000
# Of both RQDs: down, about to stop, taken back by its user, or with less free than PostgreSQL says.
_HOST_WORDS = ("HardwareState", "shutdown", "imby", "insufficient idle")


@dataclass(frozen=True, slots=True)
class Blame:
    """``jobs``: what RQD said, by id. ``hosts``: names of those that take nothing now."""

    jobs: Mapping[str, str]
    hosts: frozenset[str]


class _Against:
    """Who refused, or was refused, lately: name -> who said so -> when."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, dict[str, float]] = OrderedDict()

    def note(self, name: str, by: str, now: float) -> None:
        self._said.setdefault(name, {})[by] = now
        self._said.move_to_end(name)
        while len(self._said) > _REMEMBERED:
            self._said.popitem(last=False)

    def clear(self, name: str) -> None:
        self._said.pop(name, None)

    def lately(self, name: str, now: float) -> int:
        return sum(now - at < REMEMBERED_SECONDS for at in self._said.get(name, {}).values())


class Refusals:
    """The refusals of the last minute, of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs, self._hosts = _Against(), _Against()
        self._apart = Cooldowns[tuple[str, str]](APART_SECONDS, LONGEST_APART_SECONDS, clock)

    def apart(self) -> Mapping[tuple[str, str], str]:
        """The layers and hosts (id, name) that are kept apart now, and what RQD said."""
        return self._apart.active()

    def blame(self, outcomes: Iterable[LaunchOutcome], job_of: Mapping[str, str], layer_of: Mapping[str, str]) -> Blame:
        """Note how launches ended; ``job_of``, ``layer_of``: ids by proc id. What is blamed starts anew afterwards."""
        with self._lock:
            now = self._clock()
            sent = [it for it in outcomes if it.sends]
            refused = [it for it in sent if _refuses_the_job(it)]
            hosts = {it.host_name for it in sent if it.state is not LaunchState.LAUNCHED and not _refuses_the_job(it)}
            said: dict[str, str] = {}
            kept_apart = self._apart.active()
            for it in refused:
                job, pair = job_of[it.proc_id], (layer_of[it.proc_id], it.host_name)
                said[job] = str(it.error)
                self._jobs.note(job, it.host_name, now)
                self._hosts.note(it.host_name, job, now)
                # A frame that was sent before the two were kept apart says nothing new.
                if pair not in kept_apart:
                    kept_apart[pair] = said[job]
                    self._apart.failed(pair, said[job])
            for it in sent:
                if it.state is LaunchState.LAUNCHED:
                    self._jobs.clear(job_of[it.proc_id])
                    self._hosts.clear(it.host_name)
                    self._apart.worked((layer_of[it.proc_id], it.host_name))
            jobs = {job: text for job, text in said.items() if self._jobs.lately(job, now) >= HOSTS_TO_BLAME}
            refusing = {it.host_name for it in refused if job_of[it.proc_id] not in jobs}
            hosts |= {host for host in refusing if self._hosts.lately(host, now) >= JOBS_TO_BLAME}
            for job in jobs:
                self._jobs.clear(job)
            for host in hosts:
                self._hosts.clear(host)
            return Blame(jobs, frozenset(hosts))


def _refuses_the_job(outcome: LaunchOutcome) -> bool:
    return (
        outcome.state is LaunchState.FAILED
        and outcome.answered
        and not any(word in str(outcome.error) for word in _HOST_WORDS)
    )
