"""Settles launches: a proc that runs is confirmed, one that does not is undone, one of unknown outcome is left alone.

Order of an undoing, and why: RQD first (the frame does not run there, confirmed while its proc is still ours), then
PostgreSQL (proc gone, host idle restored, frame WAITING again), then the Redis ledger, then the word that the host
changed. A kill after the second step could hit the frame's next run on the same host; a ledger release before it could
let another booking over the cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting.keys import Booking, machine_of
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.clients.store_errors import failure_reason
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.errors import NotReady, RqdFailure
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.rqd.kill import Fate, kill_and_confirm
from opencue_sched.rqd.launch import LaunchOutcome
from opencue_sched.store.procs import read_runs
from opencue_sched.store.release import undo_bookings

log = structlog.get_logger(__name__)

_KILL_REASON = "opencue-sched: the launch was not confirmed"


NotLaunched = tuple[PlannedProc, RqdFailure]
"""A proc that is not known to run, and why."""


@dataclass(frozen=True, slots=True)
class SettleReport:
    """What became of the procs of a launch."""

    launched: tuple[PlannedProc, ...]
    """Procs that run."""
    compensated: tuple[NotLaunched, ...]
    """Procs that were undone: the frame waits again, or was taken over."""
    left_unknown: tuple[NotLaunched, ...]
    """Procs that are still booked, because RQD did not confirm that nothing runs, or PostgreSQL did not take the
    compensation. The reaper resolves them."""


def settle(
    engine: Engine,
    ledger: Ledger,
    channels: RqdChannels,
    committed: Sequence[PlannedProc],
    outcomes: Sequence[LaunchOutcome],
) -> SettleReport:
    """Settle committed procs by the outcomes of their launches, one per proc, in any order.

    The caller publishes the hosts: what was undone is idle there again."""
    by_id = {proc.proc_id: proc for proc in committed}
    launched = [by_id[outcome.proc_id] for outcome in outcomes if outcome.error is None]
    failed = [(by_id[outcome.proc_id], outcome.error) for outcome in outcomes if outcome.error is not None]
    to_undo = [(proc, error) for proc, error in failed if not error.outcome_unknown]
    unsure = [(proc, error) for proc, error in failed if error.outcome_unknown]
    ref_of = {outcome.proc_id: outcome.request.ref for outcome in outcomes}

    # 1. RQD. ``adopt``: a frame that turns out to run for its proc is kept, not killed.
    unsure, gone, left = _still_ours(engine, unsure)
    to_undo += gone
    confirmations = channels.each(
        lambda ref: kill_and_confirm(channels, ref, reason=_KILL_REASON, adopt=True),
        [ref_of[proc.proc_id] for proc, _ in unsure],
    )
    for (proc, error), (fate, detail) in zip(unsure, confirmations, strict=True):
        if fate is Fate.RUNNING:
            launched.append(proc)
        elif fate is Fate.NOT_RUNNING:
            to_undo.append((proc, error))
        else:
            left.append((proc, _because(error, f"not confirmed to be gone ({detail})")))

    # 2. PostgreSQL.
    problems = _undo_in_postgresql(engine, [proc for proc, _ in to_undo])
    left += [(proc, _because(why, problems[proc.proc_id])) for proc, why in to_undo if proc.proc_id in problems]
    compensated = [(proc, error) for proc, error in to_undo if proc.proc_id not in problems]

    # 3. Redis. A proc that PostgreSQL has is confirmed in the ledger even when it is not known to run.
    try:
        if launched or left:
            ledger.settle([booking_of(proc) for proc in (*launched, *(proc for proc, _ in left))])
        if compensated:
            ledger.release([proc.proc_id for proc, _ in compensated])
    except (RedisError, NotReady) as error:  # the next recompute repairs the ledger
        log.warning("settlement_not_told_to_redis", procs=len(committed), error=f"{type(error).__name__}: {error}")

    for proc, failure in compensated:
        log.warning("launch_compensated", proc_id=proc.proc_id, host=proc.host.name, error=str(failure))
    for proc, failure in left:
        log.error("launch_left_unknown", proc_id=proc.proc_id, host=proc.host.name, error=str(failure))
    return SettleReport(tuple(launched), tuple(compensated), tuple(left))


def _still_ours(
    engine: Engine, unsure: list[NotLaunched]
) -> tuple[list[NotLaunched], list[NotLaunched], list[NotLaunched]]:
    """Split launches of unknown outcome into those whose frames still belong to their procs, so that RQD may be
    asked to kill them; those whose procs are gone, which only the ledger still has; and those to be left.

    While this process was paused, the frame may have been given to another proc, even on the same host, and RQD
    knows frames by frame id only.
    """
    if not unsure:
        return [], [], []
    try:
        with engine.connect() as connection:
            runs = read_runs(connection, [(proc.proc_id, "") for proc, _ in unsure])
    except SQLAlchemyError as problem:
        reason = f"PostgreSQL did not say whose its frame is: {type(problem).__name__}"
        return [], [], [(proc, _because(error, reason)) for proc, error in unsure]
    ours, gone, left = [], [], []
    for (proc, error), run in zip(unsure, runs, strict=True):
        if not run.proc_id:
            gone.append((proc, error))
        elif run.proc_frame_id != proc.frame.id:
            left.append((proc, _because(error, "its frame was taken off its proc")))
        else:
            ours.append((proc, error))
    return ours, gone, left


def _undo_in_postgresql(engine: Engine, procs: Sequence[PlannedProc]) -> dict[str, str]:
    """Undo procs in one transaction, or in one per proc when that fails, so that one bad row holds back no other proc.

    Returns the ids of the procs that were not undone, or not surely, and why.
    """
    if not procs:
        return {}
    try:
        with engine.begin() as connection:
            undo_bookings(connection, procs)
    except SQLAlchemyError as error:
        if len(procs) == 1:
            return {procs[0].proc_id: f"PostgreSQL did not take the compensation: {failure_reason(error)}"}
        return {proc_id: why for proc in procs for proc_id, why in _undo_in_postgresql(engine, [proc]).items()}
    return {}


def booking_of(planned: PlannedProc) -> Booking:
    """What a planned proc takes from the counters."""
    taken, machine = planned.resources, machine_of(planned.host.id)
    return Booking(planned.proc_id, planned.vertices, taken.cores, taken.gpus, machine)


def _because(error: RqdFailure, reason: str) -> RqdFailure:
    """The failure of a launch whose outcome stays unknown, with the reason why."""
    return RqdFailure(f"{error}; {reason}", outcome_unknown=True)
