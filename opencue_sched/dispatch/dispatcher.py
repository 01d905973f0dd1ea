"""From a message to a pass: claim the posting, run, and end the claim in the way the pass ended."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.coordination.board import End
from opencue_sched.coordination.leader import boot_clock
from opencue_sched.coordination.postings import Claim, ClaimRefused, ClaimRenewer, ClusterPostings, Enqueued
from opencue_sched.dispatch.cluster_pass import PassRunner
from opencue_sched.dispatch.cooldown import EMPTY_SLEEP_SECONDS, FIRST_LOCKED_SECONDS, cooldown_seconds
from opencue_sched.dispatch.failures import describe, is_missing, is_trouble
from opencue_sched.dispatch.report import LONGEST_ERROR, PassEnd, PassReport
from opencue_sched.domain.cluster import Verdict
from opencue_sched.errors import HostLocked
from opencue_sched.settings import Settings
from opencue_sched.store.fences import PersistentFences

log = structlog.get_logger(__name__)

CONTENDED_SLEEP_SECONDS = 0.5
SHORTEST_SLEEP_SECONDS = 0.05
NOT_READY_SLEEP_SECONDS = 1.0


def next_state(report: PassReport, saturated_seconds: float, *, missing: bool = False) -> tuple[End, float]:
    """The state of a cluster after a pass that did not fail, and its length in seconds. Nothing else decides it.

    ``again``: posted at once. ``sleep``: posted when its time is over. ``idle``: posted when a sweep or an event finds
    work. ``put_off``: a store was in trouble, which says nothing of the cluster. ``missing``: PostgreSQL answers, and
    lacks what ``migrate`` or a GRANT brings back.
    """
    if report.frames_booked or report.go_on:
        return "again", 0.0
    if report.ended is PassEnd.NOT_READY:
        return "put_off", NOT_READY_SLEEP_SECONDS
    if report.ended is PassEnd.QUERY_ERROR:
        return "put_off", saturated_seconds if missing else EMPTY_SLEEP_SECONDS
    # No event tells when a layer may start.
    soon = [] if report.next_start is None else [max(SHORTEST_SLEEP_SECONDS, report.next_start)]
    if report.ended is PassEnd.NO_JOBS:
        return "sleep" if soon else "idle", min([EMPTY_SLEEP_SECONDS, *soon])
    state: End = "put_off" if report.ended is PassEnd.CLAIM_LOST else "sleep"
    permit_held = any(verdict.verdict is Verdict.PERMIT_HELD for verdict in report.verdicts)
    if permit_held or report.losses.keys() - {HostLocked.reason}:
        return state, min(CONTENDED_SLEEP_SECONDS, saturated_seconds)
    # Nor does one tell when the cooldown of a layer or of a host ends.
    if report.look_again is not None:
        soon.append(report.look_again)
    if report.hosts_back_in is not None:
        soon.append(max(FIRST_LOCKED_SECONDS, report.hosts_back_in))
    return state, min([saturated_seconds, *soon])


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Passes of one process. ``send`` puts a message for a posting on a dispatch queue; ``look_in`` has the board
    looked at for postings that are due, after so many seconds."""

    settings: Settings
    postings: ClusterPostings
    renewer: ClaimRenewer
    runner: PassRunner
    owner: str
    send: Callable[[Enqueued], None]
    look_in: Callable[[float], None]

    def dispatch(self, posting: str, ticket: int | None = None) -> PassReport | ClaimRefused:
        """One pass over the posted cluster; ClaimRefused when it is gone, somebody else's, asleep or trashed, or when
        the message's ``ticket`` was answered before.

        A cluster whose pass fails is cooled down, for longer each time it fails again; the error goes to the caller
        unless it is a store's. A store in trouble says nothing of the cluster.
        """
        if self.renewer.hangs and not self._database_answers():
            return ClaimRefused("no_database")
        ttl = self.settings.coordination.claim_ttl
        before = boot_clock()
        claim = self.postings.claim(posting, self.owner, ttl_seconds=ttl, ticket=ticket)
        if isinstance(claim, ClaimRefused):
            return claim
        self.renewer.keep(claim, claimed_at=before)
        try:
            report = self.runner.run(
                claim.cluster,
                alive=lambda: self.renewer.alive(claim),
                progress=lambda: self.renewer.progress(claim),
                wakes=claim.wake,
            )
        except (SQLAlchemyError, RedisError) as error:
            report = PassReport(claim.cluster, ended=PassEnd.QUERY_ERROR, error=str(error))
            if is_trouble(error):
                log.error("pass_failed_in_a_store", cluster=claim.cluster.key, error=str(error))
                self._end(claim, report, missing=is_missing(error))
            else:
                self._fail(claim, error)
        except Exception as error:
            self._fail(claim, error)
            raise
        else:
            self._end(claim, report)
        finally:
            self.renewer.drop(claim)
        return report

    def _database_answers(self) -> bool:
        """Whether PostgreSQL answers. Asked before a claim: a process that hangs here holds no cluster up, because the
        message is sent again to others."""
        try:
            PersistentFences(self.runner.engine).ping()
        except SQLAlchemyError as error:
            log.warning("database_away", error=str(error))
            return False
        return True

    def _end(self, claim: Claim, report: PassReport, *, missing: bool = False) -> None:
        state, seconds = next_state(report, self.settings.queue.cluster_saturated_sleep, missing=missing)
        try:
            ticket = self.postings.end(claim, state, delay_seconds=seconds)
            if ticket:
                self.send(Enqueued(claim.cluster, claim.uuid, ticket))
            elif state != "put_off":  # what a store in trouble put off would be back all at once
                self.look_in(seconds)
        except RedisError as error:
            log.warning("claim_left_to_expire", cluster=claim.cluster.key, error=str(error))

    def _fail(self, claim: Claim, error: Exception) -> None:
        log.error("pass_crashed", cluster=claim.cluster.key, error=traceback.format_exc())
        if self.runner.verdicts is not None:
            self.runner.verdicts.record((), claim.cluster.key)  # what its last good pass said holds no more
        try:
            seconds = cooldown_seconds(self.postings.failures(claim) + 1)
            self.postings.end(
                claim, "fail", delay_seconds=seconds, reason=failure_reason(error), error=traceback.format_exc()
            )
            log.warning("cluster_cooled_down", cluster=claim.cluster.key, seconds=seconds, reason=failure_reason(error))
        except RedisError as problem:
            log.warning("claim_left_to_expire", cluster=claim.cluster.key, error=str(problem))


def failure_reason(error: Exception) -> str:
    """Why a pass failed, in one line after its kind: ``postgresql: integer out of range (SQLSTATE 22003)``."""
    kind = "redis" if isinstance(error, RedisError) else "program"
    if isinstance(error, SQLAlchemyError):
        kind = "postgresql"
    return f"{kind}: {type(error).__name__}: {describe(error)}"[:LONGEST_ERROR]
