"""Takes a message to a pass over its cluster, and decides what happens to the cluster next.

`Dispatcher` claims the posting and with it all that is ready of the same shard; `_Pass` goes through the steps of one
pass over all these clusters (follow, plan, book, commit, launch, settle, next); `next_state` says in which state each
claim ends. docs/architecture.md says where the process may die, and what holds then.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.clients.postgres import ask
from opencue_sched.clients.store_errors import describe, failure_reason, is_trouble
from opencue_sched.clock import boot_clock
from opencue_sched.coordination.board import End
from opencue_sched.coordination.postings import Claim, ClaimEnd, ClaimRefused, ClaimRenewer, ClusterPostings, Enqueued
from opencue_sched.dispatch.cluster_pass import CONTENDED_SLEEP_SECONDS, PassRunner
from opencue_sched.dispatch.cooldown import EMPTY_SLEEP_SECONDS, cooldown_seconds
from opencue_sched.dispatch.report import LONGEST_ERROR, PassEnd, PassReport
from opencue_sched.errors import HostLocked
from opencue_sched.settings import Settings

log = structlog.get_logger(__name__)

STORE_TROUBLE_SLEEP_SECONDS = 1.0
"""How long all clusters of a shard sleep after a store was in trouble; then each worker asks with one pass."""


def _nothing_held() -> None:
    """Do nothing: no sweep was kept back that could be made now."""


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Dispatches the messages of one process. Frozen and shared by its threads; the state is in what it holds."""

    settings: Settings
    postings: ClusterPostings
    renewer: ClaimRenewer
    runner: PassRunner
    owner: str
    send: Callable[[Enqueued], None]
    """Puts a message for a posting on a dispatch queue."""
    look_in: Callable[[float], None]
    """Called with seconds: has this process look for postings that are due once they have passed."""
    hold_sweeps: Callable[[], Callable[[], None]] = lambda: _nothing_held
    """Keeps this process from sweeping for news of its own shard, until the function that it returns is called: while a
    pass over that shard has the claims."""

    def dispatch(self, posting: str, ticket: int | None = None) -> list[PassReport] | ClaimRefused:
        """Make one pass over the posted cluster and all clusters of its shard that are ready. Returns a report of each,
        that of the posted cluster first.

        ClaimRefused when the posting is gone, another worker's, asleep or trashed, or when the message's ``ticket`` was
        answered before. A cluster whose pass fails gets a cooldown, longer each time it fails again. A store in trouble
        says nothing of the clusters.
        """
        if self.renewer.hangs and not self._database_answers():
            return ClaimRefused("no_database")
        before = boot_clock()
        ttl_seconds = self.renewer.ttl_seconds
        claim = self.postings.claim(posting, self.owner, ttl_seconds=ttl_seconds, ticket=ticket)
        if isinstance(claim, ClaimRefused):
            return claim
        release = self.hold_sweeps() if claim.cluster.shard in ("", self.owner) else _nothing_held
        try:
            claims = [claim, *self.postings.claim_with(claim, self.owner, ttl_seconds=ttl_seconds)]
            self.renewer.keep(*claims, claimed_at=before)
            try:
                return self._pass(claims, release)
            finally:
                self.renewer.drop(*claims)
        finally:
            release()

    def _pass(self, claims: Sequence[Claim], release: Callable[[], None]) -> list[PassReport]:
        """Make one pass over the claimed clusters, and end the claims. When the pass fails because of the rows of some
        cluster, each cluster is tried by itself, so that the others have their pass."""
        ended = False

        def end(reports: Sequence[PassReport]) -> None:
            nonlocal ended
            ended = True
            self._end(claims, reports)
            self.renewer.drop(*claims)
            release()

        try:
            return self.runner.run(
                [claim.cluster for claim in claims],
                alive=lambda: self.renewer.alive(*claims),
                progress=lambda: self.renewer.progress(*claims),
                end=end,
            )
        except Exception as error:
            trouble = is_trouble(error)
            if ended and not trouble:  # what happens to the clusters is decided, and others may have them by now
                raise
            if not trouble and len(claims) > 1:
                log.warning("pass_tried_by_cluster", clusters=len(claims), error=describe(error))
                return [report for claim in claims for report in self._pass([claim], release)]
            reason = failure_reason(error)
            reports = [PassReport(claim.cluster, ended=PassEnd.QUERY_ERROR, error=reason) for claim in claims]
            if not trouble:
                self._fail(claims[0], reason)
                return reports
            log.error("pass_failed_in_a_store", cluster=claims[0].cluster.key, error=reason)
            if not ended:
                self._end(claims, reports)
            return reports

    def _database_answers(self) -> bool:
        """Whether PostgreSQL answers. Asked before a claim: a process that hangs here holds no cluster up, because the
        message is sent again to others."""
        try:
            return ask(self.runner.engine, lambda session: bool(session.exec_driver_sql("SELECT true").scalar_one()))
        except SQLAlchemyError as error:
            log.warning("database_away", error=str(error))
            return False

    def _end(self, claims: Sequence[Claim], reports: Sequence[PassReport]) -> None:
        """End the claims as ``next_state`` says of their reports. Clusters that are posted again get one message for
        all: the pass that it leads to claims all that is ready of the shard."""
        saturated = self.settings.queue.cluster_saturated_sleep
        states = [next_state(report, saturated) for report in reports]
        endings = [ClaimEnd(claim, *state) for claim, state in zip(claims, states, strict=True)]
        try:
            tickets = self.postings.end_many(endings)
        except RedisError as error:
            log.warning("claim_left_to_expire", clusters=len(claims), cluster=claims[0].cluster.key, error=str(error))
            return
        for ending, ticket in zip(endings, tickets, strict=True):
            if ticket:
                self.send(Enqueued(ending.claim.cluster, ending.claim.uuid, ticket))
                break
        sleeps = [ending.delay_seconds for ending, ticket in zip(endings, tickets, strict=True) if not ticket]
        # Not after a store was in trouble: all clusters that it put off would be back at the same moment.
        if sleeps and not any(ending.how == "put_off" for ending in endings):
            self.look_in(min(sleeps))

    def _fail(self, claim: Claim, reason: str) -> None:
        """End the claim of a cluster whose pass crashed, with a cooldown."""
        key, seen = claim.cluster.key, traceback.format_exc()
        log.error("pass_crashed", cluster=key, error=seen)
        try:
            seconds = cooldown_seconds(self.postings.failures(claim) + 1)
            reason = reason[:LONGEST_ERROR]
            self.postings.end(claim, "fail", delay_seconds=seconds, reason=reason, error=seen)
            log.warning("cluster_cooled_down", cluster=key, seconds=seconds, reason=reason)
        except RedisError as problem:
            log.warning("claim_left_to_expire", cluster=key, error=str(problem))


def next_state(report: PassReport, saturated_seconds: float) -> tuple[End, float]:
    """The state of a cluster after a pass that did not fail, and its length in seconds. Nothing else decides it.

    ``again``: posted at once. ``sleep``: posted when its time is over. ``idle``: posted when a sweep or an event finds
    work. ``put_off``: a store was in trouble, which says nothing of the cluster.
    """
    if report.go_on:
        return "again", 0.0
    if report.ended in (PassEnd.NOT_READY, PassEnd.QUERY_ERROR):
        return "put_off", STORE_TROUBLE_SLEEP_SECONDS
    soon = [] if report.look_again is None else [report.look_again]
    if report.ended is PassEnd.NO_JOBS:
        return ("sleep", soon[0]) if soon and soon[0] < EMPTY_SLEEP_SECONDS else ("idle", EMPTY_SLEEP_SECONDS)
    state: End = "put_off" if report.ended is PassEnd.CLAIM_LOST else "sleep"
    if report.losses.keys() - {HostLocked.reason}:
        soon.append(CONTENDED_SLEEP_SECONDS)
    return state, min([saturated_seconds, *soon])
