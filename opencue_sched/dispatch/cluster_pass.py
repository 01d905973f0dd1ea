"""One pass over one cluster: gather, plan, book, commit, launch, settle. `_Pass.run` has the steps in their order.

Where the process may die, and what holds then:

- after *book*, before *commit*: the bookings stay in flight in Redis without a proc; recompute removes them once they
  are too old (I2: counters only ever too high).
- during *commit*: PostgreSQL decides; entries in flight are confirmed or removed by recompute after looking them up.
- after *commit*, before *launch*: RUNNING frames that no host runs; host reports do not show them, and the report
  service puts them back to WAITING (I6).
- after *launch*, before *settle*: frames run and are in the database; recompute confirms their ledger entries.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting import keys
from opencue_sched.accounting.ledger import BookAnswers, Ledger
from opencue_sched.accounting.show_handover import ImportedShows
from opencue_sched.coordination.permits import LayerPermits
from opencue_sched.dispatch.commit import CommitQueue, CommitResult, commit_plan, quarantine
from opencue_sched.dispatch.cooldown import (
    EMPTY_SLEEP_SECONDS,
    FIRST_LOCKED_SECONDS,
    LONGEST_LOCKED_SECONDS,
    CapWaits,
    Cooldowns,
    LayerCooldowns,
    SkippedRow,
    waits_of,
)
from opencue_sched.dispatch.gather import BadRowLog, Gathered, gather
from opencue_sched.dispatch.hosts import HostFeed
from opencue_sched.dispatch.launch import Refusals, Settlement, booking_of, launch_all, launch_requests
from opencue_sched.dispatch.report import PassEnd, PassReport, after_booking, after_refusals, given_back
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.domain.cluster import Cluster, LayerVerdict, Verdict
from opencue_sched.domain.farm import Host, PlannedProc
from opencue_sched.errors import HostLocked, NotReady
from opencue_sched.placement.planner import Plan, UnschedulableLayer, plan_pass, release_plan
from opencue_sched.placement.policy import policy_for
from opencue_sched.settings import Settings
from opencue_sched.store.jobs import Environments, fetch_environments
from opencue_sched.store.pending import SkippedLayers, fetch_next_start
from opencue_sched.store.schema import SchemaFacts

log = structlog.get_logger(__name__)

FAILED_HOST_SECONDS = 5.0
"""Cooldown of a host whose RQD is at fault: PostgreSQL calls it UP for minutes, with all its cores idle."""


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
    first_hosts: Callable[[], Callable[[str], bool] | None] = lambda: None
    """Which hosts this instance tries before others."""
    verdicts: VerdictLog | None = None
    imported: ImportedShows | None = None
    bad_rows: BadRowLog = field(default_factory=BadRowLog)
    refusals: Refusals = field(default_factory=Refusals)
    locked: Cooldowns[str] = field(default_factory=lambda: Cooldowns(FIRST_LOCKED_SECONDS, LONGEST_LOCKED_SECONDS))
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


class _Pass:
    """The state of one pass."""

    def __init__(
        self,
        runner: PassRunner,
        cluster: Cluster,
        alive: Callable[[], bool],
        progress: Callable[[], None],
        wakes: int,
    ) -> None:
        self._runner = runner
        self._settings = runner.settings
        self._clock = runner.clock
        self._cluster = cluster
        self._alive = alive
        self._progress = progress
        self._wakes = wakes
        self._report = PassReport(cluster)
        self._began = self._clock()
        # One pass at a time has the cluster's claim: what a worker that died in this cluster had permits for is free.
        self._owner = f"{cluster.key}|{uuid.uuid4().hex}"
        self._asked_permits: Collection[str] = ()
        self._booked_layers: frozenset[str] = frozenset()
        self._gathered = False
        self._gathered_at = 0.0
        self._versions: Mapping[str, str] = {}
        self._host_changes = 0
        self._bookings_read = ""
        self._blocked: tuple[UnschedulableLayer, ...] = ()
        self._lost: frozenset[str] = frozenset()
        self._given_back: tuple[Host, ...] = ()

    def run(self) -> PassReport:
        """The pass, and what holds however it ends."""
        report, runner = self._report, self._runner
        try:
            self._steps()
        except NotReady as error:
            report.ended, report.error = PassEnd.NOT_READY, str(error)
            log.warning("pass_not_ready", cluster=self._cluster.key, error=str(error))
        finally:
            report.hosts_back_in = runner.hosts.cache.back_in()
            # After the launch, which waits for no Redis: what the pass did is done, whether or not Redis answers now.
            try:
                runner.permits.tell_booked(self._booked_layers)
                runner.permits.drop(self._owner, self._asked_permits)
            except RedisError as error:
                log.warning("permits_left_to_expire", layers=len(self._asked_permits), error=str(error))
            if self._gathered and runner.verdicts is not None:
                runner.verdicts.record(report.verdicts, self._cluster.key, skipped=report.skipped)
            report.total_seconds = self._clock() - self._began
            report.log()
        return report

    def _steps(self) -> None:
        report, runner = self._report, self._runner
        # 1. Claim. The caller holds the cluster's claim (dispatch.dispatcher), which expires: it is asked for again
        #    before each step that only the holder of the claim may take.

        # 2. Gather: hosts first, so that what is freed while layers are read counts as a change for the next pass.
        gathered = self._gather()
        if not gathered.snapshot.jobs:
            report.ended = PassEnd.SATURATED if gathered.held_back or gathered.bad_layers else PassEnd.NO_JOBS
            self._choose_next(gathered)
            return
        report.show_name = gathered.snapshot.jobs[0].show_name
        if runner.imported is not None and not runner.imported.admits(self._cluster.show_id):
            report.ended = PassEnd.SATURATED
            log.info("show_not_imported_yet", cluster=self._cluster.key, show=self._cluster.show_id)
            return

        # 3. Permits: a layer with tags of several clusters is planned by one of them at a time. Not before the layers
        #    are known, and not after the plan, which would be made for nothing. What others booked since this pass read
        #    what waits is not granted: its frames are still WAITING in the snapshot.
        wanted = {layer.id: len(layer.frames) for job in gathered.snapshot.jobs for layer in job.layers}
        if not self._alive():
            report.ended = PassEnd.CLAIM_LOST
            return
        self._asked_permits = wanted.keys()
        granted = runner.permits.take(self._owner, wanted) - runner.permits.booked_since(self._bookings_read)
        self._progress()

        # 4. Plan, in memory. The plan holds its hosts in the process' cache until step 6 gives them back.
        plan = self._plan(gathered, granted)
        self._progress()

        # 5. to 8.
        if plan.procs:
            environments, result = self._book_and_commit(plan)
            if result.committed:
                self._launch_and_settle(environments, result)

        # 9. What happens next to the cluster.
        if report.ended is PassEnd.NO_JOBS:
            report.ended = PassEnd.BOOKED if report.frames_booked else PassEnd.SATURATED
        if report.ended is PassEnd.SATURATED:
            runner.cap_waits.note(self._cluster.key, waits_of(report.verdicts, gathered.snapshot))
        self._choose_next(gathered)

    def _gather(self) -> Gathered:
        report, runner = self._report, self._runner
        began = self._clock()
        runner.layers.hosts_changed(runner.hosts.follow())
        self._progress()
        runner.layers.hosts_changed(runner.hosts.refresh(self._cluster))
        self._progress()
        # Both are read before what waits: changes and bookings of others in the meantime are then seen as such.
        self._host_changes = runner.layers.host_changes
        self._bookings_read = runner.permits.log_end()

        def skip(headroom: Mapping[str, float]) -> SkippedLayers:
            self._progress()
            skipped = runner.layers.skipped(self._cluster.key, headroom)
            report.skipped = skipped.verdicts
            return skipped.layers

        with runner.engine.connect() as connection:
            gathered = gather(connection, self._cluster, self._settings, facts=runner.facts, skip=skip)
            connection.rollback()
        self._progress()
        self._gathered, self._gathered_at = True, self._clock()
        report.gather_seconds = self._gathered_at - began
        report.statements += gathered.statements
        report.jobs = len(gathered.snapshot.jobs)
        report.verdicts = gathered.bad_layers
        self._versions = gathered.versions
        self._skip_rows(gathered.bad_layers)
        runner.bad_rows.report(gathered.bad_rows)
        report.bad_rows = runner.bad_rows.taken_counts() + runner.hosts.bad_rows.taken_counts()
        return gathered

    def _plan(self, gathered: Gathered, granted: Collection[str]) -> Plan:
        report, runner = self._report, self._runner
        began = self._clock()
        apart = runner.refusals.apart()
        policy = policy_for(self._settings.queue, report.show_name)
        policy = replace(policy, first=runner.first_hosts())
        if apart:
            policy = replace(policy, admit=lambda _job, layer, host: (layer.id, host.name) not in apart)
        plan = plan_pass(
            gathered.snapshot,
            self._cluster,
            runner.hosts.cache,
            policy,
            granted_layers=granted,
            new_id=lambda: str(uuid.uuid4()),
            limit_names={key: limit.name for key, limit in gathered.limits.items()},
        )
        report.plan_seconds = self._clock() - began
        report.planned = True
        report.frames_planned = len(plan.procs)
        report.attempts, report.scores = tuple(plan.attempts.values()), plan.scores
        report.wasted_attempts, report.layers_given_up = plan.wasted_attempts, plan.given_up
        report.cache_hits, report.cache_misses = plan.cache_hits, plan.cache_misses
        report.verdicts = (*gathered.bad_layers, *after_refusals(plan, apart))
        self._blocked = plan.unschedulable
        placed = {proc.layer.kind for proc in plan.procs}
        runner.layers.found_no_host(
            self._cluster.key, plan.unschedulable, host_changes=self._host_changes, placed=placed
        )
        return plan

    def _book_and_commit(self, plan: Plan) -> tuple[Environments, CommitResult]:
        report, runner = self._report, self._runner
        environments, result = Environments(), CommitResult()
        try:
            # The frames' environments are read before anything is booked, so that a failure costs nothing.
            environments = self._environments(plan.procs)
            self._progress()
            if not self._alive():  # another pass has the cluster now, and these permits
                report.ended = PassEnd.CLAIM_LOST
                return environments, result
            # A commit may have to wait for as long as its deadline: no other pass may plan frames of these layers until
            # it is over. Kept from before the booking to the end of the pass. After a death the next pass of the
            # cluster has the permits at once, and others when they expire.
            planned = {proc.layer.id for proc in plan.procs}
            runner.permits.keep(self._owner, planned, seconds=self._settings.accounting.commit_deadline)
            self._progress()

            # 5. Book, before PostgreSQL: the counters may only ever be too high (I2). The commit's deadline counts from
            #    here, because recompute takes a booking that is too old for that of a dead process.
            booked_at = self._clock()
            answers = self._book(plan)
            self._progress()
            accepted = [proc for proc in plan.procs if proc.proc_id in answers.accepted]
            if accepted and not self._alive():
                report.ended = PassEnd.CLAIM_LOST
                self._roll_back(accepted)
                return environments, result

            # 6. Commit, and undo in Redis what PostgreSQL did not take. Not before it certainly did not: what has an
            #    unknown outcome stays booked.
            if accepted:
                result = self._commit(accepted, answers, booked_at)
                self._progress()
            losses = {planned.proc_id: error for planned, error in (*result.lost, *result.unknown)}
            booked = after_booking(report.verdicts, plan.procs, answers.refusals, losses)
            report.verdicts, report.refused, self._lost = booked.verdicts, booked.refused, booked.lost
            self._after_commit(result)
            return environments, result
        finally:
            # What was not committed is idle again, and layers may wait for want of just that.
            committed = {proc.proc_id for proc in result.committed}
            unknown = frozenset(planned.proc_id for planned, _ in result.unknown)
            release_plan(runner.hosts.cache, plan, committed=committed, unknown=unknown)
            self._given_back = given_back(plan.procs, committed | unknown)
            runner.hosts.note({host.id for host in self._given_back})

    def _environments(self, procs: Sequence[PlannedProc]) -> Environments:
        if self._settings.rqd.dry_run_mode:
            return Environments()
        self._report.statements += 2
        with self._runner.engine.connect() as connection:
            return fetch_environments(connection, {it.job.id for it in procs}, {it.layer.id for it in procs})

    def _book(self, plan: Plan) -> BookAnswers:
        report, ledger = self._report, self._runner.ledger
        began = self._clock()
        limits = {limit for proc in plan.procs for limit in proc.layer.limit_ids}
        if limits and ledger.load_caps is not None:
            # Frames of unmanaged shows under the same licences are not in the ledger: count them now.
            ledger.load_caps(sorted(keys.limit(limit) for limit in limits))
        answers = ledger.book([booking_of(proc) for proc in plan.procs])
        report.book_seconds = self._clock() - began
        report.lazy_seeds += len(answers.loaded)
        report.refusals.update(refused.table for refused in answers.refusals.values())
        return answers

    def _commit(self, accepted: Sequence[PlannedProc], answers: BookAnswers, booked_at: float) -> CommitResult:
        report, runner = self._report, self._runner
        began = self._clock()
        result = commit_plan(
            runner.engine,
            accepted,
            answers.caps,
            self._settings,
            facts=runner.facts,
            booked_at=booked_at,
            clock=self._clock,
            queue=runner.queue,
        )
        ended = self._clock()
        booked = (*result.committed, *(planned for planned, _ in result.unknown))
        self._booked_layers = frozenset(planned.layer.id for planned in booked)
        report.commit_seconds = ended - began
        report.statements += result.statements
        report.frames_booked = len(result.committed)
        report.seconds_to_book = [
            proc.frame.waited_seconds + ended - self._gathered_at
            for proc in result.committed
            if proc.frame.waited_seconds is not None
        ]
        return result

    def _after_commit(self, result: CommitResult) -> None:
        """Undo in Redis what PostgreSQL did not take, and stop believing in the hosts and caps that were wrong."""
        report, runner = self._report, self._runner
        report.losses.update(error.reason for _, error in (*result.lost, *result.unknown))
        for planned, error in result.unknown:
            log.error("commit_outcome_unknown", proc=planned.proc_id, frame=planned.frame.id, error=str(error))
        if result.lost:
            self._roll_back([planned for planned, _ in result.lost])
            log.info("bookings_lost", cluster=self._cluster.key, **Counter(e.reason for _, e in result.lost))
        locked = {lost.host.id for lost, why in result.lost if isinstance(why, HostLocked)}
        seconds = {host_id: runner.locked.failed(host_id) for host_id in locked}
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
            self._runner.ledger.rollback([booking_of(proc) for proc in procs])
        except (NotReady, RedisError) as error:
            log.warning("rollback_left_to_recompute", procs=len(procs), error=str(error))

    def _launch_and_settle(self, environments: Environments, result: CommitResult) -> None:
        report, runner = self._report, self._runner
        began = self._clock()
        # 7. Launch, without a lock. The time to send counts from the COMMIT: a process that was stopped since then
        #    sends nothing late, and what it does not send is undone.
        requests, impossible = launch_requests(result.committed, environments, self._settings)
        since_commit = 0.0 if result.sent_at is None else began - result.sent_at
        send_within = self._settings.rqd.launch_timeout - since_commit
        launched = launch_all(runner.settlement.channels, requests, send_within=send_within, progress=self._progress)

        # 8. Settle: see dispatch.launch for its order.
        settled = runner.settlement.settle(result.committed, [*impossible, *launched], progress=self._progress)
        report.launch_seconds = self._clock() - began
        report.frames_launched = len(settled.launched)
        blame = runner.refusals.blame(launched)
        for proc, error in (*settled.compensated, *settled.left_unknown):
            report.losses[error.reason] += 1
            seconds = FAILED_HOST_SECONDS if proc.host.name in blame.hosts else 0.0
            runner.hosts.cache.invalidate(proc.host.id, cooldown_seconds=seconds, why=str(error))
        runner.hosts.changed({proc.host.id for proc in result.committed})
        # Jobs for which no RunFrame can be made, or that no host takes: it would end the same way again.
        hopeless = {it.request.run_frame.job_id: str(it.error) for it in impossible}
        quarantine(runner.engine, {**blame.jobs, **hopeless}, self._settings)

    def _choose_next(self, gathered: Gathered) -> None:
        """Choose whether the cluster is dispatched again at once, which layers its next pass skips, and when it has to
        be looked at again at the latest.

        Frames that were lost to others may be had a moment later, so their layers are looked at once more before the
        scan goes on; those that lose all of them again are skipped like the others, or twenty of them would keep
        everything waiting. Layers without a host are not skipped by the scan: they have a cooldown, and a host that
        changes for one of them is for them first. Layers that only had no host because frames of the plan had it that
        were then refused or lost are next.
        """
        report, layers, key = self._report, self._runner.layers, self._cluster.key
        lost_once = self._lost - layers.lost_again(key, self._lost)
        next_kinds = layers.given_back(key, self._given_back)
        more = gathered.more or bool(next_kinds)
        blocked = [it for it in self._blocked if it.kind not in next_kinds]
        hostless = {it.verdict.layer_id for it in self._blocked}
        in_vain = [it for it in report.verdicts if it.layer_id not in lost_once and self._got_nothing(it)]
        passed_over = self._rows([it for it in in_vain if it.layer_id not in hostless])
        if report.frames_booked or not more or not (in_vain or lost_once):
            woken = layers.end_scan(key, self._wakes)
            report.go_on = woken and not report.frames_booked
        elif passed_over or blocked:
            layers.scan_on(key, passed_over, self._wakes)
            report.go_on = True
        layers.count_pass(key, blocked, passed_over, full=more)
        report.look_again = layers.look_again(key)
        if not (report.frames_booked or report.go_on):
            self._find_next_start()

    def _got_nothing(self, verdict: LayerVerdict) -> bool:
        """Whether the layer was looked at and got nothing. One that a full plan had no place for was not looked at."""
        tried = verdict.layer_id in self._lost or verdict.layer_id in self._report.refused
        return not verdict.frames and (tried or verdict.verdict is not Verdict.FLOWING)

    def _find_next_start(self) -> None:
        """Find out when the next layer may start, should the cluster sleep now: no event tells."""
        if not self._runner.facts.has_start_after:
            return
        self._report.statements += 1
        with self._runner.engine.connect() as connection:
            self._report.next_start = fetch_next_start(
                connection,
                self._cluster,
                # A layer whose time came while the pass read what waits was not seen by it: it starts now.
                since=self._clock() - self._began,
                within=max(EMPTY_SLEEP_SECONDS, self._settings.queue.cluster_saturated_sleep),
            )

    def _rows(self, verdicts: Sequence[LayerVerdict]) -> list[SkippedRow]:
        """Layers to be skipped as long as their rows are what they were in this pass."""
        return [SkippedRow(it, self._versions[it.layer_id]) for it in verdicts]

    def _skip_rows(self, verdicts: Sequence[LayerVerdict]) -> None:
        self._runner.layers.skip_rows(self._cluster.key, self._rows(verdicts))
