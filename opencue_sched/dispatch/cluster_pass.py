"""From a message to a pass over its cluster, and to what happens to the cluster next.

In this order: `Dispatcher` claims the posting and with it all that is ready of the same shard, `_Pass` goes through the
steps of one pass over all these clusters (gather, permits, plan, book, commit, launch, settle, next), and `next_state`
says in which state each claim ends. Where the process may die, and what holds then:

- after *book*, before *commit*: the bookings stay in flight in Redis without a proc; recompute removes them once they
  are too old (I2: counters only ever too high). The claims may have ended (`_Pass._end_early`).
- during *commit*: PostgreSQL decides; entries in flight are confirmed or removed by recompute after looking them up.
- after *commit*, before *launch*: RUNNING frames that no host runs; host reports do not show them, and the report
  service puts them back to WAITING (I6). The claims end in between: other passes over the clusters begin meanwhile.
- after *launch*, before *settle*: frames run and are in the database; recompute confirms their ledger entries.
"""

from __future__ import annotations

import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting import keys
from opencue_sched.accounting.ledger import BookAnswers, Ledger
from opencue_sched.accounting.show_handover import ImportedShows
from opencue_sched.coordination.board import End, LayerPermits
from opencue_sched.coordination.periodic import boot_clock
from opencue_sched.coordination.postings import Claim, ClaimEnd, ClaimRefused, ClaimRenewer, ClusterPostings, Enqueued
from opencue_sched.dispatch.commit import CommitQueue, CommitResult, commit_plan, quarantine
from opencue_sched.dispatch.cooldown import (
    EMPTY_SLEEP_SECONDS,
    FIRST_LOCKED_SECONDS,
    LONGEST_LOCKED_SECONDS,
    Cooldowns,
    LayerCooldowns,
    SkippedRow,
    cooldown_seconds,
)
from opencue_sched.dispatch.failures import describe, failure_reason, is_missing, is_trouble
from opencue_sched.dispatch.gather import GatheredCluster, HostFeed, gather
from opencue_sched.dispatch.gpu_waits import GpuWaits
from opencue_sched.dispatch.launch import Refusals, Settlement, booking_of, launch_all, launch_requests
from opencue_sched.dispatch.report import (
    LONGEST_ERROR,
    PassEnd,
    PassReport,
    VerdictLog,
    after_booking,
)
from opencue_sched.domain.cluster import Cluster, LayerVerdict, Verdict
from opencue_sched.domain.farm import PlannedProc, Snapshot
from opencue_sched.domain.frames import GpuDemand
from opencue_sched.errors import HostLocked, NotReady
from opencue_sched.placement.planner import MAX_FRAMES, Plan, plan_pass, policy_for, release_plan
from opencue_sched.placement.policies.admissions import kept_apart
from opencue_sched.placement.policies.reservations import reservations
from opencue_sched.settings import Settings
from opencue_sched.store.booking import Environments, fetch_environments
from opencue_sched.store.pending import SkippedLayers, fetch_next_starts
from opencue_sched.store.schema import SchemaFacts

log = structlog.get_logger(__name__)

_AT_CAP = (
    Verdict.OVER_FOLDER,
    Verdict.OVER_FOLDER_GPUS,
    Verdict.OVER_JOB,
    Verdict.OVER_JOB_GPUS,
    Verdict.OVER_LIMIT,
)
FAILED_HOST_SECONDS = 5.0
"""Cooldown of a host whose RQD is at fault: PostgreSQL calls it UP for minutes, with all its cores idle."""
CONTENDED_SLEEP_SECONDS = 0.1
"""Another pass has a layer, mostly for as long as it plans and commits a few frames."""
SHORTEST_SLEEP_SECONDS = 0.05
NOT_READY_SLEEP_SECONDS = 1.0
STORE_TROUBLE_SLEEP_SECONDS = 2.0
"""All clusters of a shard wait so long after a store was in trouble, each worker then asks with one pass."""


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

    def dispatch(self, posting: str, ticket: int | None = None) -> list[PassReport] | ClaimRefused:
        """One pass over the posted cluster and whatever else of its shard is ready; the posted cluster's report comes
        first. ClaimRefused when its posting is gone, another worker's, asleep or trashed, or when the message's
        ``ticket`` was answered before.

        Clusters whose pass fails are cooled down, for longer each time they fail again; the error goes to the caller
        unless it is a store's. A store in trouble says nothing of the clusters.
        """
        if self.renewer.hangs and not self._database_answers():
            return ClaimRefused("no_database")
        before = boot_clock()
        ttl_seconds = self.renewer.ttl_seconds
        claim = self.postings.claim(posting, self.owner, ttl_seconds=ttl_seconds, ticket=ticket)
        if isinstance(claim, ClaimRefused):
            return claim
        claims = [claim, *self._claim_others(claim)]
        for it in claims:
            self.renewer.keep(it, claimed_at=before)
        try:
            return self._pass(claims)
        finally:
            self._drop(claims)

    def _claim_others(self, claim: Claim) -> list[Claim]:
        """What is ready of the same shard. When Redis does not say, the pass is for the claimed cluster alone."""
        try:
            return self.postings.claim_with(claim, self.owner, ttl_seconds=self.renewer.ttl_seconds)
        except RedisError as error:
            log.warning("claimed_alone", cluster=claim.cluster.key, error=str(error))
            return []

    def _drop(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            self.renewer.drop(claim)

    def _pass(self, claims: Sequence[Claim]) -> list[PassReport]:
        """One pass over the claimed clusters, whose claims it ends. When it fails for what is in the rows of some
        cluster, each is tried by itself, so that the others have their pass."""
        ended = False

        def progress() -> None:
            for claim in claims:
                self.renewer.progress(claim)

        def end(reports: Sequence[PassReport]) -> None:
            nonlocal ended
            ended = True
            self._end(claims, reports)
            self._drop(claims)

        try:
            return self.runner.run(
                [claim.cluster for claim in claims],
                alive=lambda: all(map(self.renewer.alive, claims)),
                progress=progress,
                wakes={claim.cluster.key: claim.wake for claim in claims},
                end=end,
            )
        except Exception as error:
            in_a_store = isinstance(error, (SQLAlchemyError, RedisError))
            if in_a_store and is_trouble(error):
                log.error("pass_failed_in_a_store", cluster=claims[0].cluster.key, error=str(error))
                reports = [self._report_of(claim, error) for claim in claims]
                if not ended:
                    self._end(claims, reports, missing=is_missing(error))
                return reports
            if ended:  # what happens to the clusters is decided, and somebody else may have them by now
                raise
            if len(claims) > 1:
                log.warning("pass_tried_by_cluster", clusters=len(claims), error=describe(error))
                return self._each_by_itself(claims)
            self._fail(claims[0], error)
            if not in_a_store:
                raise
            return [self._report_of(claims[0], error)]

    def _each_by_itself(self, claims: Sequence[Claim]) -> list[PassReport]:
        """A pass over each; an error that is not a store's goes on when all have had theirs."""
        reports: list[PassReport] = []
        errors: list[Exception] = []
        for claim in claims:
            try:
                reports += self._pass([claim])
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return reports

    def _report_of(self, claim: Claim, error: Exception) -> PassReport:
        return PassReport(claim.cluster, ended=PassEnd.QUERY_ERROR, error=str(error))

    def _database_answers(self) -> bool:
        """Whether PostgreSQL answers. Asked before a claim: a process that hangs here holds no cluster up, because the
        message is sent again to others."""
        try:
            with self.runner.engine.connect():  # which asks the server first
                return True
        except SQLAlchemyError as error:
            log.warning("database_away", error=str(error))
            return False

    def _end(self, claims: Sequence[Claim], reports: Sequence[PassReport], *, missing: bool = False) -> None:
        """End the claims as ``next_state`` says of their reports. One message for all: its claim takes the others of
        the shard along."""
        saturated = self.settings.queue.cluster_saturated_sleep
        endings = []
        for claim, report in zip(claims, reports, strict=True):
            state, seconds = next_state(report, saturated, missing=missing)
            endings.append(ClaimEnd(claim, state, delay_seconds=seconds))
        try:
            tickets = self.postings.end_many(endings)
        except RedisError as error:
            log.warning("claim_left_to_expire", clusters=len(claims), cluster=claims[0].cluster.key, error=str(error))
            return
        for ending, ticket in zip(endings, tickets, strict=True):
            if ticket:
                self.send(Enqueued(ending.claim.cluster, ending.claim.uuid, ticket))
                break
        sleeps = [it.delay_seconds for it, ticket in zip(endings, tickets, strict=True) if not ticket]
        # What a store in trouble put off would be back all at once.
        if sleeps and not any(it.how == "put_off" for it in endings):
            self.look_in(min(sleeps))

    def _fail(self, claim: Claim, error: Exception) -> None:
        log.error("pass_crashed", cluster=claim.cluster.key, error=traceback.format_exc())
        if self.runner.verdicts is not None:
            self.runner.verdicts.record({claim.cluster.key: ((), {})})  # what its last good pass said holds no more
        try:
            seconds = cooldown_seconds(self.postings.failures(claim) + 1)
            reason = failure_reason(error)[:LONGEST_ERROR]
            self.postings.end(claim, "fail", delay_seconds=seconds, reason=reason, error=traceback.format_exc())
            log.warning("cluster_cooled_down", cluster=claim.cluster.key, seconds=seconds, reason=reason)
        except RedisError as problem:
            log.warning("claim_left_to_expire", cluster=claim.cluster.key, error=str(problem))


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
    at_caps: set[str] = field(default_factory=set)
    """Keys of clusters that left something waiting at a cap: see Sweeper.at_caps."""
    gpu_waits: GpuWaits | None = None
    freed: Callable[[Collection[str]], None] = lambda _: None
    """Told of hosts (ids) on which a booking came to nothing after the claims had ended."""
    committing: set[str] | None = field(default_factory=set)
    """Layers in a commit during which the next pass may begin; None where another process plans the same hosts."""
    clock: Callable[[], float] = time.monotonic

    def run(
        self,
        clusters: Sequence[Cluster],
        *,
        alive: Callable[[], bool],
        progress: Callable[[], None] = lambda: None,
        wakes: Mapping[str, int] = MappingProxyType({}),
        end: Callable[[Sequence[PassReport]], None] = lambda _: None,
    ) -> list[PassReport]:
        """One pass over clusters of one shard; a report for each, in their order. The first says what the pass took as
        a whole.

        ``alive`` says whether all claims on the clusters are still held; it is asked before permits are taken or
        prolonged and before the commit. ``progress`` is called after each step, none of which takes longer than a
        commit may. ``wakes``: how often each cluster, by its key, has been woken so far. ``end`` is called once, with
        the reports, when other passes over the clusters may begin: during the launch, which can take as long as RQDs
        do, or during the commit of a plan behind which there is more. Not when an error leaves before that.

        Raises nothing that concerns one job, host or frame. SQLAlchemyError and RedisError of the stores themselves
        reach the caller after everything taken was given back.
        """
        return _Pass(self, clusters, alive, progress, wakes, end).run()


@dataclass(slots=True)
class _Part:
    """One cluster of a pass. ``plan`` is what of the pass's plan is for it."""

    cluster: Cluster
    owner: str
    report: PassReport
    gathered: GatheredCluster | None = None
    admitted: bool = False
    plan: Plan = field(default_factory=Plan)


@dataclass(slots=True)
class _Pass:
    """The state of one pass."""

    runner: PassRunner
    clusters: Sequence[Cluster]
    alive: Callable[[], bool]
    progress: Callable[[], None]
    wakes: Mapping[str, int]
    end: Callable[[Sequence[PassReport]], None]
    parts: list[_Part] = field(init=False)
    report: PassReport = field(init=False)
    began: float = field(init=False)
    gathered_at: float | None = None
    snapshot: Snapshot | None = None
    asked_permits: dict[str, Collection[str]] = field(default_factory=dict)
    booked_layers: frozenset[str] = frozenset()
    lost_layers: frozenset[str] = frozenset()
    gave_back: bool = False
    ended: bool = False
    retries_skipped: bool = False
    left_alone: bool = False
    host_changes: int = 0
    bookings_read: str = ""

    def __post_init__(self) -> None:
        # One pass at a time has a cluster's claim: what a worker that died in this cluster had permits for is free.
        self.parts = [_Part(it, f"{it.key}|{uuid.uuid4().hex}", PassReport(it)) for it in self.clusters]
        self.report = self.parts[0].report
        self.began = self.runner.clock()

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        began = self.runner.clock()
        yield
        self.report.seconds[step] = self.runner.clock() - began

    @property
    def procs(self) -> list[PlannedProc]:
        """All that is planned, in the order of the clusters."""
        return [proc for part in self.parts for proc in part.plan.procs]

    def run(self) -> list[PassReport]:
        """The pass, and what holds however it ends."""
        report, runner = self.report, self.runner
        reports = [part.report for part in self.parts]
        with ThreadPoolExecutor(1, thread_name_prefix="launch") as launching:
            launch: Future[None] | None = None
            try:
                committed = self._steps()
                if committed is not None:
                    # At the same time as all that follows: no launch waits for a Redis that does not answer, and no
                    # pass for RQDs, which may take seconds. What is committed is nobody else's.
                    launch = launching.submit(self._launch_and_settle, *committed)
                self._choose_next()
            except NotReady as error:
                for it in reports:
                    it.ended, it.error = PassEnd.NOT_READY, str(error)
                log.warning("pass_not_ready", cluster=report.cluster.key, error=str(error))
            finally:
                # Whether or not Redis answers now: what the pass did is done. Before the claims end, because the next
                # pass asks for the same permits.
                try:
                    runner.permits.tell_booked(self.booked_layers)
                    runner.permits.drop(self.asked_permits)
                except RedisError as error:
                    log.warning("permits_left_to_expire", clusters=len(self.asked_permits), error=str(error))
                if self.ended and runner.committing is not None:
                    runner.committing.difference_update(proc.layer.id for proc in self.procs)
                if self.gathered_at is not None and runner.verdicts is not None:
                    runner.verdicts.record(
                        {part.cluster.key: (part.report.verdicts, part.report.skipped) for part in self.parts}
                    )
            back_in = runner.hosts.cache.back_in()
            for it in reports:
                it.hosts_back_in = back_in
            if not self.ended:
                self.end(reports)
            if launch is not None:
                launch.result()
        report.seconds["total"] = runner.clock() - self.began
        for it in reports:
            log.debug("pass_ended", **it.summary())
        return reports

    def _steps(self) -> tuple[Environments, CommitResult] | None:
        """The steps up to the commit; what is to be launched."""
        runner = self.runner
        committed = None
        # 1. Claim. The dispatcher holds the clusters' claims, which expire: they are asked for again before each step
        #    that only their holder may take.

        # 2. Gather: hosts first, so that what is freed while layers are read counts as a change for the next pass.
        with self._timed("gather"):
            snapshot = self.snapshot = self._gather()
        planned = [part for part in self.parts if self._may_be_planned(part)]
        if planned:
            # 3. Permits: a layer with tags of several clusters is planned by one pass at a time. Not before the layers
            #    are known, and not after the plan, which would be made for nothing. What others booked since this pass
            #    read what waits is not granted: its frames are still WAITING in the snapshot.
            if not self.alive():
                self._end_all(PassEnd.CLAIM_LOST)
                return None
            granted = self._take_permits(planned)
            self.progress()

            # 4. Plan, in memory. The plan holds its hosts in the process' cache until step 6 gives them back.
            with self._timed("plan"):
                self._plan(snapshot, planned, granted)
            self.progress()

        # 5. and 6. Book in Redis, commit in PostgreSQL. The frames' environments are read before anything is booked, so
        #    that a failure costs nothing.
        if self.procs:
            environments, result = self._book_and_commit()
            if result.committed:
                committed = environments, result

        for part in planned:
            if part.report.ended is PassEnd.NO_JOBS:
                part.report.ended = PassEnd.BOOKED if part.report.frames_booked else PassEnd.SATURATED
            if part.report.ended is PassEnd.SATURATED and any(it.verdict in _AT_CAP for it in part.report.verdicts):
                runner.at_caps.add(part.cluster.key)
        return committed

    def _gather(self) -> Snapshot:
        report, runner = self.report, self.runner
        runner.layers.hosts_changed(runner.hosts.follow())
        self.progress()
        for cluster in self.clusters:
            runner.layers.hosts_changed(runner.hosts.refresh(cluster))
            self.progress()
        # Both are read before what waits: changes and bookings of others in the meantime are then seen as such.
        self.host_changes = runner.layers.host_changes
        self.bookings_read = runner.permits.log_end()
        by_key = {part.cluster.key: part for part in self.parts}

        def skip(cluster: Cluster, headroom: Mapping[str, float]) -> SkippedLayers:
            self.progress()
            skipped = runner.layers.skipped(cluster.key, headroom)
            by_key[cluster.key].report.skipped = skipped.verdicts
            self.retries_skipped |= skipped.retries
            return skipped.layers

        with runner.engine.connect() as connection:
            gathered = gather(
                connection,
                self.clusters,
                runner.settings,
                facts=runner.facts,
                in_use=runner.ledger.cores_in_use,
                skip=skip,
                most_frames=min(MAX_FRAMES, runner.hosts.cache.idle_cores(self.clusters) + 1),
            )
            connection.rollback()
        self.progress()
        self.gathered_at = runner.clock()
        report.statements += gathered.statements
        for part, found in zip(self.parts, gathered.clusters, strict=True):
            part.gathered = found
            part.report.jobs = len(found.jobs)
            part.report.verdicts = found.bad_layers
            runner.layers.skip_rows(part.cluster.key, _rows(found.bad_layers, found))
            runner.hosts.bad_rows.report(found.bad_rows)
        report.bad_rows = runner.hosts.bad_rows.taken_counts()
        return gathered.snapshot

    def _may_be_planned(self, part: _Part) -> bool:
        """Whether the part has jobs that this fleet may book; what the pass is for it otherwise."""
        found, report = part.gathered, part.report
        assert found is not None  # noqa: S101 - set by the step before
        if not found.jobs:
            report.ended = PassEnd.SATURATED if found.held_back or found.bad_layers else PassEnd.NO_JOBS
            part.admitted = True
            return False
        report.show_name = found.jobs[0].show_name
        imported = self.runner.imported
        part.admitted = imported is None or imported.admits(part.cluster.show_id)
        if not part.admitted:
            report.ended = PassEnd.SATURATED
            log.info("show_not_imported_yet", cluster=part.cluster.key, show=part.cluster.show_id)
        return part.admitted

    def _end_all(self, ended: PassEnd) -> None:
        for part in self.parts:
            part.report.ended = ended

    def _take_permits(self, planned: Sequence[_Part]) -> frozenset[str]:
        """The layers that this pass may plan. One that several of its clusters reach is asked for by the first."""
        wanted: dict[str, dict[str, int]] = {}
        seen: set[str] = set()
        for part in planned:
            assert part.gathered is not None  # noqa: S101 - set by the gather
            found = {layer.id: len(layer.frames) for job in part.gathered.jobs for layer in job.layers}
            # One by one, because the passes that commit change the set meanwhile.
            layers = {it: frames for it, frames in found.items() if it not in (self.runner.committing or ())}
            self.left_alone |= len(layers) < len(found)
            wanted[part.owner] = {layer: frames for layer, frames in layers.items() if layer not in seen}
            seen |= layers.keys()
        self.asked_permits = {owner: layers.keys() for owner, layers in wanted.items()}
        permits = self.runner.permits
        return permits.take(wanted) - permits.booked_since(self.bookings_read)

    def _gpu_demands(self) -> Collection[GpuDemand]:
        """What waits for GPUs, on a farm that has some."""
        runner = self.runner
        if runner.gpu_waits is None or not runner.settings.queue.gpu_guard or not runner.hosts.cache.has_gpus():
            return ()
        return runner.gpu_waits.demands()

    def _plan(self, snapshot: Snapshot, planned: Sequence[_Part], granted: Collection[str]) -> None:
        runner = self.runner
        policy = policy_for(runner.settings.queue, gpu_demands=self._gpu_demands())
        # Whether or not hosts are held now: the commit keeps to holds, and so does the plan.
        admissions = [*policy.admissions, reservations(snapshot.now)]
        if apart := runner.refusals.apart():
            admissions.append(kept_apart(apart))
        # What is idle is not for whoever can use it while somebody else who could is skipped for a moment.
        if self.retries_skipped:
            admissions += policy.soft_admissions
        policy = replace(policy, admissions=tuple(admissions))
        keys_planned = {part.cluster.key for part in planned}
        plans = plan_pass(
            replace(snapshot, work=tuple(it for it in snapshot.work if it.cluster.key in keys_planned)),
            runner.hosts.cache,
            policy,
            granted_layers=granted,
            new_id=lambda: str(uuid.uuid4()),
        )
        for part, plan in zip(planned, plans, strict=True):
            part.plan = part.report.plan = plan
            part.report.verdicts = (*part.report.verdicts, *plan.verdicts)
            placed = {proc.layer.kind for proc in plan.procs}
            runner.layers.found_no_host(
                part.cluster.key, plan.unschedulable, host_changes=self.host_changes, placed=placed
            )

    def _book_and_commit(self) -> tuple[Environments, CommitResult]:
        report, runner, procs = self.report, self.runner, self.procs
        environments: Environments = {}
        result = CommitResult()
        try:
            if not runner.settings.rqd.dry_run_mode:
                jobs, layers = {proc.job.id for proc in procs}, {proc.layer.id for proc in procs}
                with runner.engine.connect() as connection:
                    environments = fetch_environments(connection, jobs, layers)
                report.statements += 1
            self.progress()
            if not self.alive():  # another pass has a cluster now, and these permits
                self._end_all(PassEnd.CLAIM_LOST)
                return environments, result
            # A commit may have to wait for as long as its deadline: no other pass may plan frames of these layers until
            # it is over. Kept from before the booking to the end of the pass. After a death the next pass of the
            # cluster has the permits at once, and others when they expire.
            booking = {proc.layer.id for proc in procs}
            keep = {owner: booking.intersection(asked) for owner, asked in self.asked_permits.items()}
            runner.permits.keep(keep, seconds=runner.settings.accounting.commit_deadline)
            self.progress()

            # 5. Book, before PostgreSQL: the counters may only ever be too high (I2). The commit's deadline counts from
            #    here, because recompute takes a booking that is too old for that of a dead process.
            booked_at = runner.clock()
            with self._timed("book"):
                answers = self._book(procs)
            self.progress()
            accepted = [proc for proc in procs if proc.proc_id in answers.accepted]
            if accepted and not self.alive():
                self._end_all(PassEnd.CLAIM_LOST)
                self._roll_back(accepted)
                return environments, result

            more = self.left_alone or any(part.plan.full for part in self.parts)
            if accepted and more and runner.committing is not None:
                runner.committing.update(proc.layer.id for proc in accepted)
                self._end_early()

            # 6. Commit, and undo in Redis what PostgreSQL did not take. Not before it certainly did not: what has an
            #    unknown outcome stays booked.
            if accepted:
                with self._timed("commit"):
                    result = self._commit(accepted, answers, booked_at)
                self.progress()
            losses = {proc.proc_id: error for proc, error in (*result.lost, *result.unknown)}
            for part in self.parts:
                part.report.verdicts, part.report.refused = after_booking(
                    part.report.verdicts, part.plan.procs, answers.refusals, losses
                )
            self.lost_layers = frozenset(proc.layer.id for proc in procs if proc.proc_id in losses)
            self._after_commit(result)
            return environments, result
        finally:
            # What was not committed is idle again, and layers may wait for want of just that.
            committed = {proc.proc_id for proc in result.committed}
            unknown = frozenset(proc.proc_id for proc, _ in result.unknown)
            release_plan(runner.hosts.cache, procs, committed=committed, unknown=unknown)
            idle_again = {proc.host.id for proc in procs if proc.proc_id not in committed | unknown}
            self.gave_back = bool(idle_again)
            runner.hosts.note(idle_again)
            if self.ended and idle_again:
                runner.freed(idle_again)

    def _end_early(self) -> None:
        """Let the next pass over these clusters begin during the commit: there is more to place right away, because the
        plan is full or left alone what another commit has.

        What is booked counts in the ledger, its hosts are taken in the cache, this process leaves its layers alone.
        Should another process claim a cluster that soon, each loses what the other has.
        """
        self.ended = True
        for part in self.parts:
            part.report.go_on = True
        self.end([part.report for part in self.parts])

    def _book(self, procs: Sequence[PlannedProc]) -> BookAnswers:
        ledger = self.runner.ledger
        limits = {limit for proc in procs for limit in proc.layer.limit_ids}
        if limits and ledger.load_caps is not None:
            # Frames of unmanaged shows under the same licences are not in the ledger: count them now.
            ledger.load_caps(sorted(keys.limit(limit) for limit in limits))
        answers = ledger.book([booking_of(proc) for proc in procs])
        part_of = self._part_of()
        for proc_id, refused in answers.refusals.items():
            part_of[proc_id].report.refusals[refused.table] += 1
        return answers

    def _part_of(self) -> dict[str, _Part]:
        """By proc id, the part for which it was planned."""
        return {proc.proc_id: part for part in self.parts for proc in part.plan.procs}

    def _commit(self, accepted: Sequence[PlannedProc], answers: BookAnswers, booked_at: float) -> CommitResult:
        runner = self.runner
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
        self.report.statements += result.statements
        part_of = self._part_of()
        for proc in result.committed:
            report = part_of[proc.proc_id].report
            report.frames_booked += 1
            if proc.frame.waited_seconds is not None:
                report.seconds_to_book.append(proc.frame.waited_seconds + since_gathered)
        return result

    def _after_commit(self, result: CommitResult) -> None:
        """Undo in Redis what PostgreSQL did not take, and stop believing in the hosts and caps that were wrong."""
        runner, part_of = self.runner, self._part_of()
        for planned, error in (*result.lost, *result.unknown):
            part_of[planned.proc_id].report.losses[error.reason] += 1
        for planned, error in result.unknown:
            log.error("commit_outcome_unknown", proc=planned.proc_id, frame=planned.frame.id, error=str(error))
        if result.lost:
            self._roll_back([planned for planned, _ in result.lost])
            reasons = Counter(error.reason for _, error in result.lost)
            log.info("bookings_lost", cluster=self.report.cluster.key, **reasons)
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
        """Steps 7 and 8, beside step 9, and maybe beside the next pass over these clusters."""
        began, runner = self.runner.clock(), self.runner
        # 7. Launch, without a lock. The time to send counts from the COMMIT: a process that was stopped since then
        #    sends nothing late, and what it does not send is undone.
        requests, impossible = launch_requests(result.committed, environments, runner.settings)
        since_commit = 0.0 if result.sent_at is None else runner.clock() - result.sent_at
        send_within = runner.settings.rqd.timeout - since_commit
        launched = launch_all(runner.settlement.channels, requests, send_within=send_within, progress=self.progress)

        # 8. Settle: see dispatch.launch for its order.
        settled = runner.settlement.settle(result.committed, [*impossible, *launched], progress=self.progress)
        part_of = self._part_of()
        for proc in settled.launched:
            part_of[proc.proc_id].report.frames_launched += 1
        blame = runner.refusals.blame(launched)
        for proc, error in (*settled.compensated, *settled.left_unknown):
            part_of[proc.proc_id].report.losses[error.reason] += 1
            seconds = FAILED_HOST_SECONDS if proc.host.name in blame.hosts else 0.0
            runner.hosts.cache.invalidate(proc.host.id, cooldown_seconds=seconds, why=str(error))
        runner.hosts.changed({proc.host.id for proc in result.committed})
        # Jobs for which no RunFrame can be made, or that no host takes: it would end the same way again.
        hopeless = {it.request.run_frame.job_id: str(it.error) for it in impossible}
        quarantine(runner.engine, {**blame.jobs, **hopeless}, runner.settings)
        self.report.seconds["launch"] = runner.clock() - began

    def _choose_next(self) -> None:
        """Step 9: choose which clusters are dispatched again at once, which layers their next passes skip, and when
        they have to be looked at again at the latest. A launch that fails changes nothing of that."""
        parts = [part for part in self.parts if part.admitted]
        for part in parts:
            self._choose_next_of(part)
        asleep = [part for part in parts if not (part.report.frames_booked or part.report.go_on)]
        if self.runner.facts.has_start_after and asleep and not self.ended:
            # These clusters sleep now, and no event tells when their next layer may start.
            self.report.statements += 1
            with self.runner.engine.connect() as connection:
                starts = fetch_next_starts(
                    connection,
                    [part.cluster for part in asleep],
                    # A layer whose time came while the pass read what waits was not seen by it: it starts now.
                    since=self.runner.clock() - self.began,
                    within=max(EMPTY_SLEEP_SECONDS, self.runner.settings.queue.cluster_saturated_sleep),
                )
            for part in asleep:
                part.report.next_start = starts.get(part.cluster.key)

    def _choose_next_of(self, part: _Part) -> None:
        report, found = part.report, part.gathered
        assert found is not None  # noqa: S101 - set by the gather
        no_host = {it.verdict.layer_id for it in part.plan.unschedulable}
        got_nothing = [it for it in report.verdicts if it.layer_id not in no_host and self._got_nothing(part, it)]
        report.go_on, report.look_again = self.runner.layers.end_pass(
            part.cluster.key,
            wakes=self.wakes.get(part.cluster.key, 0),
            # A layer without a host may have wanted one that the plan had for frames which were refused or lost: the
            # next pass reads these hosts again.
            more=found.more or (bool(no_host) and self.gave_back),
            booked=report.frames_booked > 0,
            hostless=bool(no_host),
            got_nothing=_rows(got_nothing, found),
        )
        # Another commit booked all that was found before its layers were read: nothing is known of what is behind.
        report.go_on |= found.more and not found.jobs

    def _got_nothing(self, part: _Part, verdict: LayerVerdict) -> bool:
        """Whether the layer was looked at and got nothing. One that a full plan had no place for was not looked at;
        frames that were lost may be had a moment later."""
        waits = verdict.verdict is not Verdict.FLOWING and verdict.layer_id not in self.lost_layers
        return not verdict.frames and (waits or verdict.layer_id in part.report.refused)


def _rows(verdicts: Iterable[LayerVerdict], gathered: GatheredCluster) -> list[SkippedRow]:
    """Layers to be skipped as long as their rows are what they were in this pass."""
    return [SkippedRow(it, gathered.versions[it.layer_id]) for it in verdicts]


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
        return "put_off", saturated_seconds if missing else STORE_TROUBLE_SLEEP_SECONDS
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
