"""From a message to a pass over its cluster, and to what happens to the cluster next.

In this order: `Dispatcher` claims the posting, `_Pass` goes through the steps of a pass (gather, permits, plan, book,
commit, launch, settle, next), and `next_state` says in which state the claim ends. Where the process may die, and what
holds then:

- after *book*, before *commit*: the bookings stay in flight in Redis without a proc; recompute removes them once they
  are too old (I2: counters only ever too high).
- during *commit*: PostgreSQL decides; entries in flight are confirmed or removed by recompute after looking them up.
- after *commit*, before *launch*: RUNNING frames that no host runs; host reports do not show them, and the report
  service puts them back to WAITING (I6).
- after *launch*, before *settle*: frames run and are in the database; recompute confirms their ledger entries.
"""

from __future__ import annotations

import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting import keys
from opencue_sched.accounting.ledger import BookAnswers, Ledger
from opencue_sched.accounting.show_handover import ImportedShows
from opencue_sched.coordination.board import End, LayerPermits
from opencue_sched.coordination.periodic import boot_clock
from opencue_sched.coordination.postings import Claim, ClaimRefused, ClaimRenewer, ClusterPostings, Enqueued
from opencue_sched.dispatch.commit import CommitQueue, CommitResult, commit_plan, quarantine
from opencue_sched.dispatch.cooldown import (
    EMPTY_SLEEP_SECONDS,
    FIRST_LOCKED_SECONDS,
    LONGEST_LOCKED_SECONDS,
    CapWaits,
    Cooldowns,
    LayerCooldowns,
    SkippedRow,
    cooldown_seconds,
    waits_of,
)
from opencue_sched.dispatch.failures import describe, is_missing, is_trouble
from opencue_sched.dispatch.gather import Gathered, HostFeed, gather
from opencue_sched.dispatch.launch import Refusals, Settlement, booking_of, launch_all, launch_requests
from opencue_sched.dispatch.report import (
    LONGEST_ERROR,
    PassEnd,
    PassReport,
    VerdictLog,
    after_booking,
    after_refusals,
)
from opencue_sched.domain.cluster import Cluster, LayerVerdict, Verdict
from opencue_sched.domain.farm import Host, PlannedProc
from opencue_sched.errors import HostLocked, NotReady
from opencue_sched.placement.planner import Plan, UnschedulableLayer, plan_pass, policy_for, release_plan
from opencue_sched.settings import Settings
from opencue_sched.store.booking import Environments, fetch_environments
from opencue_sched.store.pending import SkippedLayers, fetch_next_start
from opencue_sched.store.schema import SchemaFacts

log = structlog.get_logger(__name__)

FAILED_HOST_SECONDS = 5.0
"""Cooldown of a host whose RQD is at fault: PostgreSQL calls it UP for minutes, with all its cores idle."""
CONTENDED_SLEEP_SECONDS = 0.5
SHORTEST_SLEEP_SECONDS = 0.05
NOT_READY_SLEEP_SECONDS = 1.0


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
        """One pass over the posted cluster; ClaimRefused when it is gone, another worker's, asleep or trashed, or when
        the message's ``ticket`` was answered before.

        A cluster whose pass fails is cooled down, for longer each time it fails again; the error goes to the caller
        unless it is a store's. A store in trouble says nothing of the cluster.
        """
        if self.renewer.hangs and not self._database_answers():
            return ClaimRefused("no_database")
        before = boot_clock()
        claim = self.postings.claim(posting, self.owner, ttl_seconds=self.renewer.ttl_seconds, ticket=ticket)
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
            with self.runner.engine.connect():  # which asks the server first
                return True
        except SQLAlchemyError as error:
            log.warning("database_away", error=str(error))
            return False

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


@dataclass(frozen=True, slots=True)
class PassRunner:
    """Everything a pass talks to; one per process, used by several threads."""

    engine: Engine
    settings: Settings
    ledger: Ledger
    hosts: HostFeed
    permits: LayerPermits
    settlement: Settlement
    facts: SchemaFacts
    layers: LayerCooldowns
    verdicts: VerdictLog | None = None
    imported: ImportedShows | None = None
    refusals: Refusals = field(default_factory=Refusals)
    locked: Cooldowns[str] = field(
        default_factory=lambda: Cooldowns(FIRST_LOCKED_SECONDS, LONGEST_LOCKED_SECONDS, free=1)
    )
    queue: CommitQueue = field(default_factory=CommitQueue)
    cap_waits: CapWaits = field(default_factory=CapWaits)
    clock: Callable[[], float] = time.monotonic

    def run(
        self,
        cluster: Cluster,
        *,
        alive: Callable[[], bool],
        progress: Callable[[], None] = lambda: None,
        wakes: int = 0,
    ) -> PassReport:
        """One pass. ``alive`` says whether the claim on the cluster is still held; it is asked before permits are taken
        or prolonged and before the commit. ``progress`` is called after each step, none of which takes longer than a
        commit may. ``wakes``: how often the cluster has been woken so far.

        Raises nothing that concerns one job, host or frame. SQLAlchemyError and RedisError of the stores themselves
        reach the caller after everything taken was given back.
        """
        return _Pass(self, cluster, alive, progress, wakes).run()


@dataclass(slots=True)
class _Pass:
    """The state of one pass."""

    runner: PassRunner
    cluster: Cluster
    alive: Callable[[], bool]
    progress: Callable[[], None]
    wakes: int
    report: PassReport = field(init=False)
    began: float = field(init=False)
    owner: str = field(init=False)
    gathered_at: float | None = None
    asked_permits: Collection[str] = ()
    booked_layers: frozenset[str] = frozenset()
    host_changes: int = 0
    bookings_read: str = ""
    lost: frozenset[str] = frozenset()
    returned: tuple[Host, ...] = ()

    def __post_init__(self) -> None:
        self.report = PassReport(self.cluster)
        self.began = self.runner.clock()
        # One pass at a time has the cluster's claim: what a worker that died in this cluster had permits for is free.
        self.owner = f"{self.cluster.key}|{uuid.uuid4().hex}"

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        began = self.runner.clock()
        yield
        self.report.seconds[step] = self.runner.clock() - began

    def run(self) -> PassReport:
        """The pass, and what holds however it ends."""
        report, runner = self.report, self.runner
        try:
            self._steps()
        except NotReady as error:
            report.ended, report.error = PassEnd.NOT_READY, str(error)
            log.warning("pass_not_ready", cluster=self.cluster.key, error=str(error))
        finally:
            report.hosts_back_in = runner.hosts.cache.back_in()
            # After the launch, which waits for no Redis: what the pass did is done, whether or not Redis answers now.
            try:
                runner.permits.tell_booked(self.booked_layers)
                runner.permits.drop(self.owner, self.asked_permits)
            except RedisError as error:
                log.warning("permits_left_to_expire", layers=len(self.asked_permits), error=str(error))
            if self.gathered_at is not None and runner.verdicts is not None:
                runner.verdicts.record(report.verdicts, self.cluster.key, skipped=report.skipped)
            report.seconds["total"] = runner.clock() - self.began
            log.debug("pass_ended", **report.summary())
        return report

    def _steps(self) -> None:
        report, runner = self.report, self.runner
        # 1. Claim. The dispatcher holds the cluster's claim, which expires: it is asked for again before each step that
        #    only the holder of the claim may take.

        # 2. Gather: hosts first, so that what is freed while layers are read counts as a change for the next pass.
        with self._timed("gather"):
            gathered = self._gather()
        if not gathered.snapshot.jobs:
            report.ended = PassEnd.SATURATED if gathered.held_back or gathered.bad_layers else PassEnd.NO_JOBS
            self._choose_next(gathered)
            return
        report.show_name = gathered.snapshot.jobs[0].show_name
        if runner.imported is not None and not runner.imported.admits(self.cluster.show_id):
            report.ended = PassEnd.SATURATED
            log.info("show_not_imported_yet", cluster=self.cluster.key, show=self.cluster.show_id)
            return

        # 3. Permits: a layer with tags of several clusters is planned by one of them at a time. Not before the layers
        #    are known, and not after the plan, which would be made for nothing. What others booked since this pass read
        #    what waits is not granted: its frames are still WAITING in the snapshot.
        wanted = {layer.id: len(layer.frames) for job in gathered.snapshot.jobs for layer in job.layers}
        if not self.alive():
            report.ended = PassEnd.CLAIM_LOST
            return
        self.asked_permits = wanted.keys()
        granted = runner.permits.take(self.owner, wanted) - runner.permits.booked_since(self.bookings_read)
        self.progress()

        # 4. Plan, in memory. The plan holds its hosts in the process' cache until step 6 gives them back.
        with self._timed("plan"):
            report.plan = self._plan(gathered, granted)
        self.progress()

        # 5. and 6. Book in Redis, commit in PostgreSQL. The frames' environments are read before anything is booked, so
        #    that a failure costs nothing. 7. and 8. Launch and settle.
        if report.plan.procs:
            environments, result = self._book_and_commit(report.plan)
            if result.committed:
                with self._timed("launch"):
                    self._launch_and_settle(environments, result)

        # 9. What happens next to the cluster.
        if report.ended is PassEnd.NO_JOBS:
            report.ended = PassEnd.BOOKED if report.frames_booked else PassEnd.SATURATED
        if report.ended is PassEnd.SATURATED:
            runner.cap_waits.note(self.cluster.key, waits_of(report.verdicts, gathered.snapshot))
        self._choose_next(gathered, report.plan.unschedulable)

    def _gather(self) -> Gathered:
        report, runner = self.report, self.runner
        runner.layers.hosts_changed(runner.hosts.follow())
        self.progress()
        runner.layers.hosts_changed(runner.hosts.refresh(self.cluster))
        self.progress()
        # Both are read before what waits: changes and bookings of others in the meantime are then seen as such.
        self.host_changes = runner.layers.host_changes
        self.bookings_read = runner.permits.log_end()

        def skip(headroom: Mapping[str, float]) -> SkippedLayers:
            self.progress()
            skipped = runner.layers.skipped(self.cluster.key, headroom)
            report.skipped = skipped.verdicts
            return skipped.layers

        with runner.engine.connect() as connection:
            gathered = gather(connection, self.cluster, runner.settings, facts=runner.facts, skip=skip)
            connection.rollback()
        self.progress()
        self.gathered_at = runner.clock()
        report.statements += gathered.statements
        report.jobs = len(gathered.snapshot.jobs)
        report.verdicts = gathered.bad_layers
        runner.layers.skip_rows(self.cluster.key, _rows(gathered.bad_layers, gathered))
        runner.hosts.bad_rows.report(gathered.bad_rows)
        report.bad_rows = runner.hosts.bad_rows.taken_counts()
        return gathered

    def _plan(self, gathered: Gathered, granted: Collection[str]) -> Plan:
        report, runner = self.report, self.runner
        apart = runner.refusals.apart()
        policy = policy_for(runner.settings.queue, report.show_name)
        if apart:
            policy = replace(policy, admit=lambda _job, layer, host: (layer.id, host.name) not in apart)
        plan = plan_pass(
            gathered.snapshot,
            self.cluster,
            runner.hosts.cache,
            policy,
            granted_layers=granted,
            new_id=lambda: str(uuid.uuid4()),
        )
        report.verdicts = (*gathered.bad_layers, *after_refusals(plan, apart))
        placed = {proc.layer.kind for proc in plan.procs}
        runner.layers.found_no_host(self.cluster.key, plan.unschedulable, host_changes=self.host_changes, placed=placed)
        return plan

    def _book_and_commit(self, plan: Plan) -> tuple[Environments, CommitResult]:
        report, runner = self.report, self.runner
        environments: Environments = {}
        result = CommitResult()
        try:
            if not runner.settings.rqd.dry_run_mode:
                jobs, layers = {proc.job.id for proc in plan.procs}, {proc.layer.id for proc in plan.procs}
                with runner.engine.connect() as connection:
                    environments = fetch_environments(connection, jobs, layers)
                report.statements += 1
            self.progress()
            if not self.alive():  # another pass has the cluster now, and these permits
                report.ended = PassEnd.CLAIM_LOST
                return environments, result
            # A commit may have to wait for as long as its deadline: no other pass may plan frames of these layers until
            # it is over. Kept from before the booking to the end of the pass. After a death the next pass of the
            # cluster has the permits at once, and others when they expire.
            planned = {proc.layer.id for proc in plan.procs}
            runner.permits.keep(self.owner, planned, seconds=runner.settings.accounting.commit_deadline)
            self.progress()

            # 5. Book, before PostgreSQL: the counters may only ever be too high (I2). The commit's deadline counts from
            #    here, because recompute takes a booking that is too old for that of a dead process.
            booked_at = runner.clock()
            with self._timed("book"):
                answers = self._book(plan)
            self.progress()
            accepted = [proc for proc in plan.procs if proc.proc_id in answers.accepted]
            if accepted and not self.alive():
                report.ended = PassEnd.CLAIM_LOST
                self._roll_back(accepted)
                return environments, result

            # 6. Commit, and undo in Redis what PostgreSQL did not take. Not before it certainly did not: what has an
            #    unknown outcome stays booked.
            if accepted:
                with self._timed("commit"):
                    result = self._commit(accepted, answers, booked_at)
                self.progress()
            losses = {proc.proc_id: error for proc, error in (*result.lost, *result.unknown)}
            report.verdicts, report.refused, self.lost = after_booking(
                report.verdicts, plan.procs, answers.refusals, losses
            )
            self._after_commit(result)
            return environments, result
        finally:
            # What was not committed is idle again, and layers may wait for want of just that.
            committed = {proc.proc_id for proc in result.committed}
            unknown = frozenset(proc.proc_id for proc, _ in result.unknown)
            release_plan(runner.hosts.cache, plan, committed=committed, unknown=unknown)
            self.returned = given_back(plan.procs, committed | unknown)
            runner.hosts.note({host.id for host in self.returned})

    def _book(self, plan: Plan) -> BookAnswers:
        report, ledger = self.report, self.runner.ledger
        limits = {limit for proc in plan.procs for limit in proc.layer.limit_ids}
        if limits and ledger.load_caps is not None:
            # Frames of unmanaged shows under the same licences are not in the ledger: count them now.
            ledger.load_caps(sorted(keys.limit(limit) for limit in limits))
        answers = ledger.book([booking_of(proc) for proc in plan.procs])
        report.lazy_seeds += len(answers.loaded)
        report.refusals.update(refused.table for refused in answers.refusals.values())
        return answers

    def _commit(self, accepted: Sequence[PlannedProc], answers: BookAnswers, booked_at: float) -> CommitResult:
        report, runner = self.report, self.runner
        result = commit_plan(
            runner.engine,
            accepted,
            answers.caps,
            runner.settings,
            facts=runner.facts,
            booked_at=booked_at,
            clock=runner.clock,
            queue=runner.queue,
        )
        since_gathered = runner.clock() - (self.gathered_at or 0.0)
        self.booked_layers = frozenset(
            proc.layer.id for proc in (*result.committed, *(proc for proc, _ in result.unknown))
        )
        report.statements += result.statements
        report.frames_booked = len(result.committed)
        waited = (proc.frame.waited_seconds for proc in result.committed)
        report.seconds_to_book = [seconds + since_gathered for seconds in waited if seconds is not None]
        return result

    def _after_commit(self, result: CommitResult) -> None:
        """Undo in Redis what PostgreSQL did not take, and stop believing in the hosts and caps that were wrong."""
        report, runner = self.report, self.runner
        report.losses.update(error.reason for _, error in (*result.lost, *result.unknown))
        for planned, error in result.unknown:
            log.error("commit_outcome_unknown", proc=planned.proc_id, frame=planned.frame.id, error=str(error))
        if result.lost:
            self._roll_back([planned for planned, _ in result.lost])
            log.info("bookings_lost", cluster=self.cluster.key, **Counter(e.reason for _, e in result.lost))
        locked = {lost.host.id for lost, why in result.lost if isinstance(why, HostLocked)}
        seconds = {host_id: runner.locked.failed(host_id) for host_id in locked}
        for planned in result.committed:
            runner.locked.worked(planned.host.id)
        for host_id, why in {lost.host.id: str(why) for lost, why in result.lost if why.retriable}.items():
            runner.hosts.cache.invalidate(host_id, cooldown_seconds=seconds.get(host_id, 0.0), why=why)
        if result.lowered and runner.ledger.load_caps is not None:
            # A store that is away must not keep what is committed from its launch: until it is back no pass books, and
            # the next commit finds the same.
            try:
                runner.ledger.load_caps(sorted(result.lowered))
            except (NotReady, RedisError, SQLAlchemyError) as away:
                log.warning("lowered_caps_left_to_reseed", vertices=len(result.lowered), error=str(away))

    def _roll_back(self, procs: Sequence[PlannedProc]) -> None:
        """Whatever Redis answers, what is committed is launched: the recompute removes what stays booked."""
        try:
            self.runner.ledger.rollback([booking_of(proc) for proc in procs])
        except (NotReady, RedisError) as error:
            log.warning("rollback_left_to_recompute", procs=len(procs), error=str(error))

    def _launch_and_settle(self, environments: Environments, result: CommitResult) -> None:
        report, runner = self.report, self.runner
        # 7. Launch, without a lock. The time to send counts from the COMMIT: a process that was stopped since then
        #    sends nothing late, and what it does not send is undone.
        requests, impossible = launch_requests(result.committed, environments, runner.settings)
        since_commit = 0.0 if result.sent_at is None else runner.clock() - result.sent_at
        send_within = runner.settings.rqd.timeout - since_commit
        launched = launch_all(runner.settlement.channels, requests, send_within=send_within, progress=self.progress)

        # 8. Settle: see dispatch.launch for its order.
        settled = runner.settlement.settle(result.committed, [*impossible, *launched], progress=self.progress)
        report.frames_launched = len(settled.launched)
        blame = runner.refusals.blame(launched)
        for proc, error in (*settled.compensated, *settled.left_unknown):
            report.losses[error.reason] += 1
            seconds = FAILED_HOST_SECONDS if proc.host.name in blame.hosts else 0.0
            runner.hosts.cache.invalidate(proc.host.id, cooldown_seconds=seconds, why=str(error))
        runner.hosts.changed({proc.host.id for proc in result.committed})
        # Jobs for which no RunFrame can be made, or that no host takes: it would end the same way again.
        hopeless = {it.request.run_frame.job_id: str(it.error) for it in impossible}
        quarantine(runner.engine, {**blame.jobs, **hopeless}, runner.settings)

    def _choose_next(self, gathered: Gathered, hostless: Sequence[UnschedulableLayer] = ()) -> None:
        """Choose whether the cluster is dispatched again at once, which layers its next pass skips, and when it has to
        be looked at again at the latest."""
        report, no_host = self.report, {it.verdict.layer_id for it in hostless}
        got_nothing = [it for it in report.verdicts if it.layer_id not in no_host and self._got_nothing(it)]
        report.go_on, report.look_again = self.runner.layers.end_pass(
            self.cluster.key,
            wakes=self.wakes,
            more=gathered.more,
            booked=report.frames_booked > 0,
            hostless=hostless,
            got_nothing=_rows(got_nothing, gathered),
            lost=self.lost,
            returned=self.returned,
        )
        if self.runner.facts.has_start_after and not (report.frames_booked or report.go_on):
            # The cluster sleeps now, and no event tells when the next layer may start.
            report.statements += 1
            with self.runner.engine.connect() as connection:
                report.next_start = fetch_next_start(
                    connection,
                    self.cluster,
                    # A layer whose time came while the pass read what waits was not seen by it: it starts now.
                    since=self.runner.clock() - self.began,
                    within=max(EMPTY_SLEEP_SECONDS, self.runner.settings.queue.cluster_saturated_sleep),
                )

    def _got_nothing(self, verdict: LayerVerdict) -> bool:
        """Whether the layer was looked at and got nothing. One that a full plan had no place for was not looked at."""
        tried = verdict.layer_id in self.lost or verdict.layer_id in self.report.refused
        return not verdict.frames and (tried or verdict.verdict is not Verdict.FLOWING)


def _rows(verdicts: Iterable[LayerVerdict], gathered: Gathered) -> list[SkippedRow]:
    """Layers to be skipped as long as their rows are what they were in this pass."""
    return [SkippedRow(it, gathered.versions[it.layer_id]) for it in verdicts]


def given_back(procs: Sequence[PlannedProc], kept: Collection[str]) -> tuple[Host, ...]:
    """The hosts of those procs of a plan that are not ``kept`` (by id), as they were before the first of these."""
    hosts: dict[str, Host] = {}
    for proc in procs:
        if proc.proc_id not in kept:
            hosts.setdefault(proc.host.id, proc.host)
    return tuple(hosts.values())


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
