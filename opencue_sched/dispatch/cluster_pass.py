"""One pass over the clusters of a shard, in steps: gather, permits, plan, book, commit, launch, settle, next.

docs/architecture.md says where the process may die, and what holds then.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import getrandbits
from types import MappingProxyType

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.ledger import BookAnswers, Ledger
from opencue_sched.accounting.show_handover import ImportedShows
from opencue_sched.clients.postgres import ask
from opencue_sched.coordination.permits import LayerPermits
from opencue_sched.dispatch.commit import CommitQueue, CommitResult, Lost, PlanSizes, commit_plan, quarantine
from opencue_sched.dispatch.cooldown import FIRST_LOCKED_SECONDS, LONGEST_LOCKED_SECONDS, Cooldowns, LayerCooldowns
from opencue_sched.dispatch.gather import GatheredCluster, GpuWaits, gather
from opencue_sched.dispatch.host_feed import HostFeed
from opencue_sched.dispatch.refusals import Refusals
from opencue_sched.dispatch.report import PassEnd, PassReport
from opencue_sched.dispatch.settle import booking_of, settle
from opencue_sched.dispatch.verdicts import VerdictLog, after_booking, not_launchable
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.frame_command import LaunchDetails
from opencue_sched.domain.frame_needs import Demand
from opencue_sched.domain.plans import PlannedProc, Snapshot
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.errors import DatabaseFailure, HostLocked, NotReady
from opencue_sched.placement.planner import MAX_FRAMES, plan_pass, policy_for
from opencue_sched.placement.policies.admissions import kept_apart
from opencue_sched.placement.policies.reservations import reservations
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.rqd.launch import launch_all, launch_requests
from opencue_sched.settings import Settings
from opencue_sched.store.booking import fetch_launch_details
from opencue_sched.store.hosts import log_bad_row
from opencue_sched.store.pending import SkippedLayers
from opencue_sched.store.schema import SchemaFacts

log = structlog.get_logger(__name__)

_AT_CAP = (
    Verdict.OVER_FOLDER,
    Verdict.OVER_FOLDER_GPUS,
    Verdict.OVER_JOB,
    Verdict.OVER_JOB_GPUS,
    Verdict.OVER_LIMIT,
)
SHORTEST_SLEEP_SECONDS = 0.05
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
    channels: RqdChannels
    facts: Callable[[], SchemaFacts]
    """What the database has, as the process read it last."""
    layers: LayerCooldowns
    verdicts: VerdictLog | None = None
    imported: ImportedShows | None = None
    refusals: Refusals = field(default_factory=Refusals)
    locked: Cooldowns[str] = field(
        default_factory=lambda: Cooldowns(FIRST_LOCKED_SECONDS, LONGEST_LOCKED_SECONDS, free=1)
    )
    queue: CommitQueue = field(default_factory=CommitQueue)
    plan_sizes: PlanSizes = field(default_factory=PlanSizes)
    at_caps: set[str] = field(default_factory=set)
    """Keys of clusters that left something waiting at a cap: see Sweeper.at_caps."""
    gpu_waits: GpuWaits | None = None
    freed: Callable[[Collection[str]], None] = lambda _: None
    """Told of hosts (ids) on which a booking came to nothing after the claims had ended."""
    committing: set[str] = field(default_factory=set)
    """Layers in a commit during which the next pass may begin."""
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
        return _Pass(self, [PassReport(it) for it in clusters], alive, progress, wakes, end, began=self.clock()).run()


class _ClaimLostError(Exception):
    """Other passes may have the clusters by now, and their permits."""


@dataclass(slots=True)
class _Pass:
    """The state of one pass."""

    runner: PassRunner
    reports: list[PassReport]
    alive: Callable[[], bool]
    progress: Callable[[], None]
    wakes: Mapping[str, int]
    end: Callable[[Sequence[PassReport]], None]
    began: float
    gathered: list[GatheredCluster] = field(default_factory=list)
    """Of each report's cluster; nothing of any before step 2 is over."""
    planned_for: dict[str, PassReport] = field(default_factory=dict)
    """By proc id."""
    gathered_at: float = 0.0
    most_frames: int = MAX_FRAMES
    """Of the plan. Set in step 2."""
    asked_permits: dict[str, Collection[str]] = field(default_factory=dict)
    booked_layers: frozenset[str] = frozenset()
    refused_layers: frozenset[str] = frozenset()
    lost_layers: frozenset[str] = frozenset()
    unfit: Mapping[str, str] = field(default_factory=dict)
    """Why no frame of a planned layer can be launched, by layer id."""
    gave_back: bool = False
    ended: bool = False
    left_alone: bool = False
    host_changes: int = 0
    bookings_read: str = ""

    @property
    def report(self) -> PassReport:
        """That of the first cluster, which says what the pass took as a whole."""
        return self.reports[0]

    @property
    def procs(self) -> list[PlannedProc]:
        """All that is planned, in the order of the clusters."""
        return [proc for report in self.reports if report.plan for proc in report.plan.procs]

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        began = self.runner.clock()
        yield
        self.report.seconds[name] = self.runner.clock() - began
        self.progress()

    def _check_claims(self) -> None:
        if not self.alive():
            raise _ClaimLostError

    def run(self) -> list[PassReport]:
        """The pass, and what holds however it ends."""
        report, runner = self.report, self.runner
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
                for it in self.reports:
                    it.ended, it.error = PassEnd.NOT_READY, str(error)
                log.warning("pass_not_ready", cluster=report.cluster.key, error=str(error))
            except _ClaimLostError:
                for it in self.reports:
                    it.ended = PassEnd.CLAIM_LOST
            finally:
                # Whether or not Redis answers now: what the pass did is done. Before the claims end, because the next
                # pass asks for the same permits.
                try:
                    runner.permits.tell_booked(self.booked_layers)
                    runner.permits.drop(self.asked_permits)
                except RedisError as error:
                    log.warning("permits_left_to_expire", clusters=len(self.asked_permits), error=str(error))
                if self.ended:
                    runner.committing.difference_update(proc.layer.id for proc in self.procs)
                if self.gathered and runner.verdicts is not None:
                    commits = {
                        it.cluster.key: it.commit_error for it in self.reports if it.frames_booked or it.commit_error
                    }
                    runner.verdicts.record({it.cluster.key: it.verdicts for it in self.reports}, commits=commits)
            if not self.ended:
                self.end(self.reports)
            if launch is not None:
                launch.result()
        report.seconds["total"] = runner.clock() - self.began
        for it in self.reports:
            log.debug("pass_ended", **it.summary())
        return self.reports

    def _steps(self) -> tuple[LaunchDetails | None, CommitResult] | None:
        """The steps up to the commit; what is to be launched."""
        # 1. Claim. The dispatcher holds the clusters' claims, which expire: they are asked for again before each step
        #    that only their holder may take.

        # 2. Gather: hosts first, so that what is freed while layers are read counts as a change for the next pass.
        with self._step("gather"):
            snapshot = self._gather()
        planned = [it for it, found in zip(self.reports, self.gathered, strict=True) if self._may_be_planned(it, found)]
        if planned:
            # 3. Permits: a layer with tags of several clusters is planned by one pass at a time. Not before the layers
            #    are known, and not after the plan, which would be made for nothing. What others booked since this pass
            #    read what waits is not granted: its frames are still WAITING in the snapshot.
            self._check_claims()
            granted = self._take_permits({report.cluster for report in planned})
            self.progress()

            # 4. Plan, in memory, and little when a show has just become ours. The plan holds its hosts in the process'
            #    cache until step 6 gives them back.
            shows = {report.cluster.show_id for report in planned}
            self.most_frames = self.runner.plan_sizes.most(self.report.cluster.shard, shows)
            with self._step("plan"):
                self._plan(snapshot, planned, granted)

        # 5. and 6. Book in Redis, commit in PostgreSQL. What the frames are launched with is read before anything is
        #    booked, so that a failure, or a layer that nobody can launch, costs nothing.
        committed = self._book_and_commit(self.procs) if self.planned_for else None

        for report in planned:
            report.ended = PassEnd.BOOKED if report.frames_booked else PassEnd.SATURATED
            if not report.frames_booked and any(it.verdict in _AT_CAP for it in report.verdicts):
                self.runner.at_caps.add(report.cluster.key)
        return committed

    def _gather(self) -> Snapshot:
        runner, clusters = self.runner, [report.cluster for report in self.reports]
        runner.layers.hosts_changed(runner.hosts.follow())
        self.progress()
        for cluster in clusters:
            runner.layers.hosts_changed(runner.hosts.refresh(cluster))
            self.progress()
        self.most_frames = runner.plan_sizes.most(self.report.cluster.shard)
        # Both are read before what waits: changes and bookings of others in the meantime are then seen as such.
        self.host_changes = runner.layers.host_changes
        self.bookings_read = runner.permits.log_end()

        def skip(cluster: Cluster, headroom: Mapping[str, float]) -> SkippedLayers:
            self.progress()
            return runner.layers.skipped(cluster.key, headroom)

        snapshot, self.gathered = ask(
            runner.engine,
            gather,
            clusters,
            runner.settings,
            facts=runner.facts(),
            in_use=runner.ledger.cores_in_use,
            skip=skip,
            most_frames=min(self.most_frames, runner.hosts.cache.idle_cores(clusters) + 1),
        )
        self.gathered_at = runner.clock()
        for report, found in zip(self.reports, self.gathered, strict=True):
            report.jobs = len(found.jobs)
            report.verdicts = found.bad_layers
            bad = {it.layer_id: found.versions[it.layer_id] for it in found.bad_layers}
            runner.layers.skip_rows(report.cluster.key, bad)
        return snapshot

    def _may_be_planned(self, report: PassReport, found: GatheredCluster) -> bool:
        """Whether there are jobs that this fleet may book; what the pass is for the cluster otherwise."""
        if not found.jobs:
            report.ended = PassEnd.SATURATED if found.held_back or found.bad_layers else PassEnd.NO_JOBS
            return False
        report.show_name = found.jobs[0].show_name
        imported = self.runner.imported
        if imported is None or imported.admits(report.cluster.show_id):
            return True
        report.ended = PassEnd.SATURATED
        self.runner.plan_sizes.forget(report.cluster.show_id)
        log.info("show_not_imported_yet", cluster=report.cluster.key, show=report.cluster.show_id)
        return False

    def _take_permits(self, planned: Collection[Cluster]) -> frozenset[str]:
        """The layers of these clusters that this pass may plan. One that several reach is asked for by the first."""
        wanted: dict[str, dict[str, int]] = {}
        seen: set[str] = set()
        token = uuid.uuid4().hex
        for cluster, jobs in ((it.cluster, it.jobs) for it in self.gathered if it.cluster in planned):
            found = {layer.id: len(layer.frames) for job in jobs for layer in job.layers}
            # One by one, because the passes that commit change the set meanwhile.
            layers = {it: frames for it, frames in found.items() if it not in self.runner.committing}
            self.left_alone |= len(layers) < len(found)
            # One pass at a time has a cluster's claim: what a worker that died in this cluster had permits for is free.
            owner = f"{cluster.key}|{token}"
            wanted[owner] = {layer: frames for layer, frames in layers.items() if layer not in seen}
            seen |= layers.keys()
        self.asked_permits = {owner: layers.keys() for owner, layers in wanted.items()}
        permits = self.runner.permits
        return permits.take(wanted) - permits.booked_since(self.bookings_read)

    def _plan(self, snapshot: Snapshot, planned: Sequence[PassReport], granted: Collection[str]) -> None:
        runner, queue = self.runner, self.runner.settings.queue
        demands: Collection[Demand] = ()
        # What waits for GPUs, on a farm that has some.
        if runner.gpu_waits is not None and queue.gpu_guard and runner.hosts.cache.has_gpus():
            demands = runner.gpu_waits.demands()
        policy = policy_for(queue, gpu_demands=demands)
        # Whether or not hosts are held now: the commit keeps to holds, and so does the plan.
        admissions = [*policy.admissions, reservations(snapshot.now)]
        if apart := runner.refusals.apart.active():
            admissions.append(kept_apart(apart))
        clusters = {report.cluster for report in planned}
        plans = plan_pass(
            replace(snapshot, work=tuple(it for it in snapshot.work if it.cluster in clusters)),
            runner.hosts.cache,
            replace(policy, admissions=tuple(admissions), max_frames=min(policy.max_frames, self.most_frames)),
            granted_layers=granted,
            # uuid4() asks the kernel, without the interpreter's lock: for each of 1,000 procs, the pass would have to
            # get it back from the other threads.
            new_id=lambda: str(uuid.UUID(int=getrandbits(128), version=4)),
        )
        for report, plan in zip(planned, plans, strict=True):
            report.plan = plan
            self.planned_for |= dict.fromkeys((proc.proc_id for proc in plan.procs), report)
            report.verdicts = (*report.verdicts, *plan.verdicts)
            runner.layers.found_no_host(report.cluster.key, plan.unschedulable, host_changes=self.host_changes)

    def _read_details(self, planned: Sequence[PlannedProc]) -> LaunchDetails | None:
        """What the planned frames are launched with; None in a dry run. Layers that cannot be launched are said so, and
        skipped by the next passes."""
        runner = self.runner
        if runner.settings.rqd.dry_run_mode:
            return None
        layers = {proc.layer.id: proc.layer for proc in planned}
        details = ask(runner.engine, fetch_launch_details, {proc.job.id for proc in planned}, layers.keys())
        self.unfit = details.unfit
        for layer_id, why in details.unfit.items():
            log_bad_row("layer", layer_id, layers[layer_id].name, why)
        for report, found in zip(self.reports, self.gathered, strict=True):
            report.verdicts = not_launchable(report.verdicts, details.unfit)
            versions = {layer: found.versions[layer] for layer in details.unfit.keys() & found.versions.keys()}
            runner.layers.skip_rows(report.cluster.key, versions)
        return details

    def _book_and_commit(self, planned: Sequence[PlannedProc]) -> tuple[LaunchDetails | None, CommitResult] | None:
        runner = self.runner
        result = CommitResult()
        try:
            details = self._read_details(planned)
            procs = [proc for proc in planned if proc.layer.id not in self.unfit]
            self.progress()
            if not procs:
                return None
            self._check_claims()
            # A commit may have to wait for as long as its deadline: no other pass may plan frames of these layers until
            # it is over. Kept from before the booking to the end of the pass. After a death the next pass of the
            # cluster has the permits at once, and others when they expire.
            booking = {proc.layer.id for proc in procs}
            keep = {owner: dict.fromkeys(booking.intersection(it), 1) for owner, it in self.asked_permits.items()}
            runner.permits.take(keep, seconds=runner.settings.accounting.commit_deadline)
            self.progress()

            # 5. Book, before PostgreSQL: the counters may only ever be too high (I2). The commit's deadline counts from
            #    here, because recompute takes a booking that is too old for that of a dead process.
            booked_at = runner.clock()
            with self._step("book"):
                answers = self._book(procs)
            accepted = [proc for proc in procs if proc.proc_id in answers.accepted]
            if accepted and not self.alive():
                self._roll_back(accepted)
                raise _ClaimLostError

            # Let the next pass over these clusters begin during the commit when there is more to place right away: what
            # is booked counts in the ledger, its hosts are taken in the cache, this process leaves its layers alone.
            # Should another process claim a cluster that soon, each loses what the other has.
            more = self.left_alone or any(report.plan and report.plan.full for report in self.reports)
            if accepted and more:
                runner.committing.update(proc.layer.id for proc in accepted)
                self.ended = True
                for report in self.reports:
                    report.go_on = True
                self.end(self.reports)

            # 6. Commit, and undo in Redis what PostgreSQL did not take. Not before it certainly did not: what has an
            #    unknown outcome stays booked.
            if accepted:
                with self._step("commit"):
                    result = commit_plan(
                        runner.engine,
                        accepted,
                        answers.caps,
                        runner.settings,
                        facts=runner.facts(),
                        booked_at=booked_at,
                        clock=runner.clock,
                        queue=runner.queue,
                    )
                if result.cancelled:
                    runner.plan_sizes.cancelled(self.report.cluster.shard, len(accepted))
                elif result.committed:
                    runner.plan_sizes.committed(self.report.cluster.shard)
                since_gathered = runner.clock() - self.gathered_at
                self._after_commit(result, since_gathered)
            losses = {proc.proc_id: error for proc, error in (*result.lost, *result.unknown)}
            for report in self.reports:
                if report.plan:
                    report.verdicts = after_booking(report.verdicts, report.plan.procs, answers.refusals, losses)
            self.refused_layers = frozenset(proc.layer.id for proc in procs if proc.proc_id in answers.refusals)
            self.lost_layers = frozenset(proc.layer.id for proc in procs if proc.proc_id in losses)
            return (details, result) if result.committed else None
        finally:
            self._settle_hosts(planned, result)

    def _settle_hosts(self, procs: Sequence[PlannedProc], result: CommitResult) -> None:
        """What was not committed is idle again, and layers may wait for want of just that. What is unknown stays taken
        until a read of the database that is late enough to know."""
        runner = self.runner
        committed = {proc.proc_id for proc in result.committed}
        unknown = {proc.proc_id for proc, _ in result.unknown}
        known = [proc for proc in procs if proc.proc_id not in unknown]
        for proc in known:
            runner.hosts.cache.settle(proc.host.id, proc.proc_id, committed=proc.proc_id in committed)
        idle_again = {proc.host.id for proc in known if proc.proc_id not in committed}
        self.gave_back = bool(idle_again)
        runner.hosts.note(idle_again)
        if self.ended and idle_again:
            runner.freed(idle_again)

    def _book(self, procs: Sequence[PlannedProc]) -> BookAnswers:
        ledger = self.runner.ledger
        limits = {limit for proc in procs for limit in proc.layer.limit_ids}
        if limits and ledger.load_caps is not None:
            # Frames of unmanaged shows under the same licences are not in the ledger: count them now.
            ledger.load_caps(sorted(keys.limit(limit) for limit in limits))
        answers = ledger.book([booking_of(proc) for proc in procs])
        for proc_id, refused in answers.refusals.items():
            self.planned_for[proc_id].refusals[refused.table] += 1
        return answers

    def _after_commit(self, result: CommitResult, since_gathered: float) -> None:
        """Count what the commit did, so many seconds after what waits was read; undo in Redis what PostgreSQL did not
        take, and stop believing in the hosts that were wrong."""
        runner = self.runner
        booked = [*result.committed, *(proc for proc, _ in result.unknown)]
        self.booked_layers = frozenset(proc.layer.id for proc in booked)
        for proc in result.committed:
            report = self.planned_for[proc.proc_id]
            report.frames_booked += 1
            if proc.frame.waited_seconds is not None:
                report.seconds_to_book.append(proc.frame.waited_seconds + since_gathered)
            runner.locked.worked(proc.host.id)
        self._count_losses((*result.lost, *result.unknown))
        for proc, error in result.lost:
            report = self.planned_for[proc.proc_id]
            if isinstance(error, DatabaseFailure) and not report.frames_booked:
                report.commit_error = str(error)
        for proc, error in result.unknown:
            log.error("commit_outcome_unknown", proc=proc.proc_id, frame=proc.frame.id, error=str(error))
        if result.lost:
            self._roll_back([proc for proc, _ in result.lost])
            reasons = Counter(error.reason for _, error in result.lost)
            log.info("bookings_lost", cluster=self.report.cluster.key, **reasons)
        for host_id, error in {proc.host.id: error for proc, error in result.lost if error.retriable}.items():
            seconds = runner.locked.failed(host_id) if isinstance(error, HostLocked) else 0.0
            runner.hosts.cache.invalidate(host_id, cooldown_seconds=seconds, why=str(error))

    def _count_losses(self, losses: Iterable[Lost]) -> None:
        for proc, error in losses:
            self.planned_for[proc.proc_id].losses[error.reason] += 1

    def _roll_back(self, procs: Sequence[PlannedProc]) -> None:
        """Whatever Redis answers, what is committed is launched: the recompute removes what stays booked."""
        try:
            self.runner.ledger.rollback([booking_of(proc) for proc in procs])
        except (NotReady, RedisError) as error:
            log.warning("rollback_left_to_recompute", procs=len(procs), error=str(error))

    def _launch_and_settle(self, details: LaunchDetails | None, result: CommitResult) -> None:
        """Steps 7 and 8, beside step 9, and maybe beside the next pass over these clusters."""
        began, runner = self.runner.clock(), self.runner
        # 7. Launch, without a lock. The time to send counts from the COMMIT: a process that was stopped since then
        #    sends nothing late, and what it does not send is undone.
        requests, impossible = launch_requests(result.committed, details, runner.settings)
        send_within = runner.settings.rqd.timeout - (runner.clock() - result.sent_at)
        launched = launch_all(runner.channels, requests, send_within=send_within)

        # 8. Settle: see dispatch.settle for its order.
        outcomes = [*impossible, *launched]
        settled = settle(runner.engine, runner.ledger, runner.channels, result.committed, outcomes)
        for proc in settled.launched:
            self.planned_for[proc.proc_id].frames_launched += 1
        not_launched = (*settled.compensated, *settled.left_unknown)
        self._count_losses(not_launched)
        blame = runner.refusals.blame(launched)
        for proc, error in not_launched:
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
        runner = self.runner
        back_in = runner.hosts.cache.back_in()
        for report, found in zip(self.reports, self.gathered, strict=True):
            no_host = {it.verdict.layer_id for it in report.plan.unschedulable} if report.plan else set()
            # What was looked at and got nothing: not what a full plan had no place for.
            tried = self.refused_layers | self.lost_layers
            got_nothing = {
                it.layer_id: found.versions[it.layer_id]
                for it in report.verdicts
                if not it.frames
                and it.layer_id not in no_host
                and it.layer_id not in self.unfit
                and (it.layer_id in tried or it.verdict is not Verdict.FLOWING)
            }
            report.go_on = runner.layers.end_pass(
                report.cluster.key,
                wakes=self.wakes.get(report.cluster.key, 0),
                # A layer without a host may have wanted one that the plan had for frames which were refused or lost:
                # the next pass reads these hosts again.
                more=found.more or (bool(no_host) and self.gave_back),
                booked=report.frames_booked > 0,
                hostless=bool(no_host),
                got_nothing=got_nothing,
                lost=self.lost_layers,
            )
            # Another commit booked all that was found before its layers were read: nothing is known of what is behind.
            report.go_on |= found.more and not found.jobs
            # What the plan had for layers that cannot be launched is there for those behind them.
            report.go_on |= not self.unfit.keys().isdisjoint(found.versions)
            # No event tells when a host may be tried again, or a layer or frame start. The database counts the seconds:
            # its clock, by which these start, is not that of the board.
            soon = [] if back_in is None or report.ended is PassEnd.NO_JOBS else [back_in]
            if found.starts_in is not None:
                soon.append(found.starts_in - (runner.clock() - self.gathered_at))
            report.look_again = max(SHORTEST_SLEEP_SECONDS, min(soon)) if soon else None
