"""Makes one pass over the clusters of a shard, in eight steps: claim, follow, plan, book, commit, launch, settle, next.

The numbers in comments below are those of the steps. docs/architecture.md says where the process may die, and what
holds then.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import getrandbits

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.ledger import BookAnswers, Ledger
from opencue_sched.accounting.show_handover import ImportedShows
from opencue_sched.clients.postgres import ask
from opencue_sched.coordination.permits import FramePermits, Permitted
from opencue_sched.dispatch.backlog_feed import BacklogFeed
from opencue_sched.dispatch.commit import CommitQueue, CommitResult, Lost, PlanSizes, commit_plan, quarantine
from opencue_sched.dispatch.cooldown import FIRST_LOCKED_SECONDS, LONGEST_LOCKED_SECONDS, Cooldowns
from opencue_sched.dispatch.headroom import WatchedVertices, gpu_demands, read_caps, read_snapshot
from opencue_sched.dispatch.host_feed import HostFeed
from opencue_sched.dispatch.refusals import Refusals
from opencue_sched.dispatch.report import PassEnd, PassReport
from opencue_sched.dispatch.settle import booking_of, settle
from opencue_sched.dispatch.verdicts import VerdictLog, VerdictNotes, after_booking, not_launchable
from opencue_sched.dispatch.whole_layers import FEWEST_LAYERS, WholeLayers
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.frame_command import LaunchDetails
from opencue_sched.domain.plans import PlannedProc, Snapshot
from opencue_sched.domain.shards import buckets, place_of
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.errors import DatabaseFailure, FrameLost, HostLocked, LayerChanged, NotReady
from opencue_sched.placement.backlog import BacklogWork
from opencue_sched.placement.planner import Planner
from opencue_sched.placement.policies.admissions import kept_apart
from opencue_sched.placement.policies.reservations import reservations
from opencue_sched.placement.policy import MAX_FRAMES, Policy, policy_for
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.rqd.launch import launch_all, launch_requests
from opencue_sched.settings import Settings
from opencue_sched.store.booking import fetch_launch_details
from opencue_sched.store.hosts import log_bad_row
from opencue_sched.store.schema import SchemaFacts

log = structlog.get_logger(__name__)

SHORTEST_SLEEP_SECONDS = 0.05
"""The least sleep of a cluster whose next look has a time, such as the end of a cooldown."""
FAILED_HOST_SECONDS = 5.0
"""Cooldown of a host whose RQD is at fault. Until the host is marked DOWN, which takes minutes, its row says UP with
all cores idle, and each pass would book there again."""
FIRST_LOST_SECONDS, LONGEST_LOST_SECONDS = 0.05, 1.0
"""The first and the longest cooldown of a layer whose planned frames were all lost in two commits in a row. A
transaction that keeps their rows locked would otherwise cost each plan the hosts of these frames."""
_TRIES = 4
"""How many times one plan asks for permits at most. Each further time is for the frames that took the place of frames
whose permits other planners have. After the last the cluster sleeps for CONTENDED_SLEEP_SECONDS. With fewer, hosts of
refused frames more often stay idle for that time; with more, planners that meet search and ask Redis the longer for
frames that the others take, while their clusters are claimed."""
_MOST_READS = 40
"""How many times one plan reads portions of frames at most, so that a farm of layers with one frame each does not keep
the claims for ever. The next pass goes on at once. A read has the portions of up to 100 layers of each show, so ten
reads may do for a plan of a thousand such layers: more are needed where portions turn out to have fewer frames than
were expected. A read takes about a millisecond of the worker's processor time, besides the statement's."""
CONTENDED_SLEEP_SECONDS = 0.1
"""How long a cluster sleeps while another planner has its frames: about the time in which that planner commits a
few."""
LEFT_TO_OTHERS_SECONDS = 1.0
"""How long a cluster sleeps while other planners have small layers of it: about the time of a full plan and its commit.
Layers are had as a whole only where each planner has idle hosts for a whole plan, so the other planners mostly leave no
frame of these layers."""


@dataclass(frozen=True, slots=True)
class PassRunner:
    """Everything a pass talks to; one per process, used by several threads."""

    engine: Engine
    settings: Settings
    ledger: Ledger
    hosts: HostFeed
    backlog: BacklogFeed
    permits: FramePermits
    channels: RqdChannels
    facts: Callable[[], SchemaFacts]
    """What the database has, as the process read it last."""
    verdicts: VerdictNotes | VerdictLog | None = None
    """Takes the verdicts: notes that a thread writes, or the log itself."""
    imported: ImportedShows | None = None
    """Says which shows are imported, so that they may be booked; None: all may be."""
    refusals: Refusals = field(default_factory=Refusals)
    """What RQDs refused in the last minute."""
    locked: Cooldowns[str] = field(
        default_factory=lambda: Cooldowns(FIRST_LOCKED_SECONDS, LONGEST_LOCKED_SECONDS, free=1)
    )
    """Hosts (ids) whose rows are locked."""
    lost: Cooldowns[str] = field(default_factory=lambda: Cooldowns(FIRST_LOST_SECONDS, LONGEST_LOST_SECONDS, free=1))
    """Layers (ids) all of whose frames were lost."""
    watched: WatchedVertices = field(default_factory=WatchedVertices)
    """The jobs and folders whose use every pass reads."""
    queue: CommitQueue = field(default_factory=CommitQueue)
    """Has commits that lock the same rows follow each other."""
    plan_sizes: PlanSizes = field(default_factory=PlanSizes)
    """How many frames the next plan of each shard may have."""
    at_caps: set[str] = field(default_factory=set)
    """Keys of clusters that left something waiting at a cap: see Sweeper.at_caps."""
    freed: Callable[[Collection[str]], None] = lambda _: None
    """Called with the ids of hosts on which a booking came to nothing after the claims had ended."""
    follows: Callable[[Collection[Cluster]], None] = lambda _: None
    """Called with the clusters of a pass that is about to follow: the pass takes in all that was heard before."""
    launches: Callable[[], Executor] = lambda: ThreadPoolExecutor(1, thread_name_prefix="launch")
    """Makes the executor in which a pass launches its frames, beside its last steps."""
    clock: Callable[[], float] = time.monotonic

    def run(
        self,
        clusters: Sequence[Cluster],
        *,
        alive: Callable[[], bool],
        progress: Callable[[], None] = lambda: None,
        end: Callable[[Sequence[PassReport]], None] = lambda _: None,
    ) -> list[PassReport]:
        """Make one pass over clusters of one shard. Returns a report for each, in their order; the first also says what
        the pass took as a whole.

        ``alive`` says whether all claims on the clusters are still held. It is asked before permits are taken, before
        the booking and before the commit. ``progress`` is called after each step, none of which takes longer than a
        commit may.

        ``end`` is called once, with the reports, when other passes over the clusters may begin. That is after the last
        step but the launch, which can take as long as RQDs do. A full plan calls it already as its commit begins,
        unless it waited too long for the commits before it. The launch may still write to the reports then (_Pass says
        what). A pass that raises may not have called ``end``.

        Raises nothing that concerns one job, host or frame. SQLAlchemyError and RedisError of the stores themselves
        reach the caller after everything taken was given back.
        """
        return _Pass(
            self, [PassReport(cluster) for cluster in clusters], alive, progress, end, began=self.clock()
        ).run()


class _ClaimLostError(Exception):
    """A claim on a cluster ran out during the pass, so that another pass may have the cluster by now."""


@dataclass(slots=True)
class _Pass:
    """The state of one pass. The pass's own thread makes all steps but the launch, which runs in another thread at the
    same time as step 8, and reads of the pass only what was written before."""

    runner: PassRunner
    reports: list[PassReport]
    """The report of each cluster. The launch's thread writes ``frames_launched``, and adds to ``losses`` and
    ``seconds``; all else is written by the pass's thread. Whoever gets the reports by ``end`` may find them
    without the figures of what follows."""
    alive: Callable[[], bool]
    progress: Callable[[], None]
    end: Callable[[Sequence[PassReport]], None]
    began: float
    """When the pass began, by the runner's clock."""
    works: list[BacklogWork] = field(default_factory=list)
    """The waiting work of each show that may be planned."""
    work_of: dict[Cluster, BacklogWork] = field(default_factory=dict)
    """What waits in each cluster, also where nothing may start yet."""
    planner: Planner | None = None
    """Makes the plan; None until what waits was read."""
    planned_for: dict[str, PassReport] = field(default_factory=dict)
    """The report of the cluster that each proc was planned for, by proc id."""
    owner: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The name under which this pass has its permits."""
    permitted: dict[str, Permitted] = field(default_factory=dict)
    """Frames whose permits this pass has, by the ids of their procs."""
    seconds_to_import: Mapping[str, float] = field(default_factory=dict)
    """Seconds until each show is imported and may be booked, by show id; 0 where it may be."""
    left_alone: set[str] = field(default_factory=set)
    """Ids of layers that the pass does not plan."""
    whole: WholeLayers | None = None
    """The small layers that the pass has to itself; None where planners share every layer."""
    unfit: Mapping[str, str] = field(default_factory=dict)
    """Why no frame of a planned layer can be launched, by layer id."""
    contended: bool = False
    """Whether cores stay idle because other planners had the frames that this pass would have started there."""
    unread: bool = False
    """Whether the plan came to more layers than a plan reads frames of."""
    gave_back: bool = False
    """Whether hosts got back what was planned on them and not committed: layers may wait for want of just that."""
    next_may_begin: bool = False
    """Whether the next pass over the clusters was let begin during the commit, by a call of ``end``."""

    @property
    def report(self) -> PassReport:
        """The report of the first cluster, which says what the pass took as a whole."""
        return self.reports[0]

    @property
    def procs(self) -> list[PlannedProc]:
        """All that is planned, in the order of the clusters."""
        return [proc for report in self.reports if report.plan for proc in report.plan.procs]

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """Report the seconds that the step takes, and that the pass goes on after it."""
        began = self.runner.clock()
        yield
        self.report.seconds[name] = self.runner.clock() - began
        self.progress()

    def _note_verdicts(self) -> None:
        """Note why frames wait, and whether the commits of the clusters fail, whatever the outcome of the pass."""
        verdicts, commits, shortages = {}, {}, {}
        for report in self.reports:
            key = report.cluster.key
            verdicts[key] = report.verdicts
            if report.frames_booked or report.commit_error:
                commits[key] = report.commit_error
            if report.plan is not None:
                shortages[report.cluster.show_id, key] = report.plan.shortages
        if self.runner.verdicts is not None:
            self.runner.verdicts.record(verdicts, commits=commits, shortages=shortages)

    def _check_claims(self) -> None:
        """Raise _ClaimLostError if a claim on the clusters is not held any more."""
        if not self.alive():
            raise _ClaimLostError

    def run(self) -> list[PassReport]:
        """Make the pass. However it ends, verdicts are noted, and no launch is under way any more. Unless an error is
        raised, ``end`` was called."""
        report, runner = self.report, self.runner
        with runner.launches() as launching:
            launch: Future[None] | None = None
            try:
                committed = self._steps()
                if committed is not None:
                    # At the same time as all that follows: no launch waits for a Redis that does not answer, and no
                    # pass for RQDs, which may take seconds. What is committed is nobody else's.
                    launch = launching.submit(self._launch_and_settle, *committed)
                self._choose_next()
            except NotReady as error:
                for cluster_report in self.reports:
                    cluster_report.ended, cluster_report.error = PassEnd.NOT_READY, str(error)
                log.warning("pass_not_ready", cluster=report.cluster.key, error=str(error))
            except _ClaimLostError:
                for cluster_report in self.reports:
                    cluster_report.ended = PassEnd.CLAIM_LOST
            finally:
                self._note_verdicts()
            if not self.next_may_begin:
                self.end(self.reports)
            if launch is not None:
                launch.result()
        report.seconds["total"] = runner.clock() - self.began
        for cluster_report in self.reports:
            log.debug("pass_ended", **cluster_report.summary())
        return self.reports

    def _steps(self) -> tuple[LaunchDetails | None, CommitResult] | None:
        """Do the steps up to the commit. Returns what is to be launched; None if nothing was committed."""
        # 1. Claim. The dispatcher holds the clusters' claims, which expire: they are asked for again before each step
        #    that only their holder may take.

        # 2. Follow, "gather" among the seconds of a report: of hosts and waiting work, what changed is read again and
        #    nothing else.
        with self._step("gather"):
            self._follow()
            self.works = self._what_waits()
        if self.works:
            # 3. Plan, in memory. The plan holds its hosts in the process' cache until step 5 gives them back. Frames
            #    that other planners have permits of give their place to the next ones.
            try:
                with self._step("plan"):
                    self._plan()
            except BaseException:
                self._give_back()
                raise

        # 4. and 5. Book in Redis, commit in PostgreSQL. What the frames are launched with is read before anything is
        #    booked, so that a failure, or a layer that nobody can launch, costs nothing.
        committed = self._book_and_commit(self.procs) if self.planned_for else None

        for report in self.reports:
            if report.plan is None or (report.ended is PassEnd.NO_JOBS and not report.frames_booked):
                continue
            report.ended = PassEnd.BOOKED if report.frames_booked else PassEnd.SATURATED
        return committed

    def _follow(self) -> None:
        """Have the caches of hosts and of waiting work read what changed."""
        runner = self.runner
        runner.follows([report.cluster for report in self.reports])
        runner.hosts.follow()
        self.progress()
        for report in self.reports:
            runner.hosts.refresh(report.cluster)
            self.progress()
        runner.backlog.follow()
        self.progress()

    def _what_waits(self) -> list[BacklogWork]:
        """Find the waiting work of each show that the pass has clusters of and that this fleet may book.

        The reports of clusters in which something waits say SATURATED from now on, until frames are booked. The reports
        of all others keep NO_JOBS.
        """
        runner = self.runner
        by_show: defaultdict[tuple[str, str], list[PassReport]] = defaultdict(list)
        for report in self.reports:
            by_show[report.cluster.facility_id, report.cluster.show_id].append(report)
        now = runner.backlog.now()
        self.left_alone.update(runner.lost.active())
        own = buckets(runner.settings.instance, runner.hosts.division())
        waiting_works = []
        for (_, show_id), reports in by_show.items():
            clusters = [report.cluster for report in reports]
            place = place_of(clusters[0].shard, runner.hosts.division())
            work = runner.backlog.backlog.work(clusters, own=own, now=now, place=place, left_alone=self.left_alone)
            if not runner.backlog.may_book(show_id):
                continue
            # The bad layers are reported also where no other layer waits: no other pass says why they wait.
            reports[0].verdicts = tuple(runner.backlog.backlog.bad(show_id))
            self.work_of |= dict.fromkeys(clusters, work)
            waiting = [report for report in reports if work.waits(report.cluster)]
            if not waiting:
                continue
            for report in waiting:
                report.ended = PassEnd.SATURATED
            waiting_works.append(work)
        return self._imported(waiting_works)

    def _imported(self, works: Sequence[BacklogWork]) -> list[BacklogWork]:
        """The works whose shows are imported. Notes the seconds until each show is, and forgets the sizes of plans that
        were learnt of shows that are not."""
        runner = self.runner
        if runner.imported is None or not works:
            return list(works)
        self.seconds_to_import = runner.imported.seconds_left({work.clusters[0].show_id for work in works})
        ours = {show_id for show_id, seconds in self.seconds_to_import.items() if seconds == 0}
        for work in works:
            cluster = work.clusters[0]
            if cluster.show_id not in ours:
                runner.plan_sizes.forget(cluster.show_id)
                log.info("show_not_imported_yet", cluster=cluster.key, show=cluster.show_id)
        return [work for work in works if work.clusters[0].show_id in ours]

    def _plan(self) -> None:
        """Plan the frames of all clusters, and note for each cluster its plan and why layers wait."""
        runner = self.runner
        clusters = [cluster for work in self.works for cluster in work.clusters]
        idle_cores = runner.hosts.cache.idle_cores(clusters, most=MAX_FRAMES)
        snapshot = read_snapshot(runner.ledger, runner.backlog, self.works, runner.watched, idle_cores=idle_cores)
        self.progress()
        # Few frames where this process plans a show for the first time: its first commit is to come soon.
        shows = {cluster.show_id for cluster in clusters}
        policy = self._policy(snapshot, runner.plan_sizes.most(self.report.cluster.shard, shows))
        planner = self.planner = Planner(
            snapshot,
            runner.hosts.cache,
            policy,
            # uuid4() asks the kernel, without the interpreter's lock: for each of 1,000 procs, the pass would have to
            # get it back from the other threads.
            lambda: str(uuid.UUID(int=getrandbits(128), version=4)),
            idle_cores=idle_cores,
        )
        if idle_cores >= MAX_FRAMES and runner.hosts.division():
            self.whole = self._whole_layers()
        self._place(planner)
        if self.whole is not None:
            self._drop_permits(self.whole.give_up_unfinished({proc.layer.id for proc in planner.procs()}))
        for cluster, plan in zip(planner.plans, planner.judge(), strict=True):
            report = next(report for report in self.reports if report.cluster == cluster)
            report.plan = plan
            # Before anything is booked: a frame's run that ends meanwhile makes room under caps, and of the clusters
            # that wait for that it wakes those found here.
            if plan.at_cap:
                runner.at_caps.add(cluster.key)
            report.show_name = runner.backlog.show_name(cluster.show_id)
            report.jobs = len({verdict.job_id for verdict in plan.verdicts})
            report.verdicts = (*report.verdicts, *plan.verdicts)
            self.planned_for |= dict.fromkeys((proc.proc_id for proc in plan.procs), report)
            # A layer that flows now is not noted as looked at: the next plan looks again, and may find that it waits.
            waits = (verdict for verdict in plan.verdicts if verdict.verdict is not Verdict.FLOWING)
            runner.backlog.backlog.judged(verdict.layer_id for verdict in waits)

    def _whole_layers(self) -> WholeLayers | None:
        """Let the pass have small layers as a whole, so that the planners of a divided farm do not plan the same ones.
        Returns None where few small layers wait.

        For a pass whose shard has idle hosts for a whole plan (dispatch/whole_layers.py).
        """
        settings = self.runner.settings
        whole = WholeLayers(
            self.runner.permits,
            self.works,
            self.left_alone,
            self.owner,
            most_frames=settings.queue.dispatch_frames_per_layer_limit,
            seconds=settings.accounting.commit_deadline,
        )
        return whole if whole.look() >= FEWEST_LAYERS else None

    def _policy(self, snapshot: Snapshot, most_frames: int) -> Policy:
        """The rules of this plan: those of the settings, the reservations of hosts, and what RQDs refused lately."""
        runner, queue = self.runner, self.runner.settings.queue
        guards = queue.gpu_guard and runner.hosts.cache.has_gpus()
        policy = policy_for(queue, gpu_demands=gpu_demands(runner.backlog, snapshot) if guards else ())
        # Whether or not hosts are reserved now: the commit keeps to reservations, and so does the plan.
        admissions = [*policy.admissions, reservations(snapshot.now)]
        if apart := runner.refusals.apart.active():
            admissions.append(kept_apart(apart))
        return replace(policy, admissions=tuple(admissions), max_frames=min(policy.max_frames, most_frames))

    def _place(self, planner: Planner) -> None:
        """Fill the plan, and take permits of its frames. A frame at a full cap, or whose permit another planner has,
        gives its host to the next frame. Raises _ClaimLostError."""
        runner, permits, wanted = self.runner, self.runner.permits, 0
        for _ in range(_TRIES):
            self._fill(planner)
            full = False
            while unknown := planner.unknown_caps(ahead=full):
                over = planner.learn(read_caps(runner.ledger, unknown, runner.watched))
                if not over:
                    break
                # Frames at a full cap give their hosts to others, whose caps may be full as well.
                full = True
                runner.watched.refused(proc.vertices for proc in over)
                runner.backlog.backlog.settle(over)
                planner.take_back(over, again=True)
                self._fill(planner)
            # Fewer cores than before permits were refused: other frames did not get all hosts of the refused ones.
            cores = sum(proc.resources.cores for proc in planner.procs())
            self.contended, wanted = cores < wanted, max(wanted, cores)
            asked = [proc for proc in planner.procs() if proc.proc_id not in self.permitted]
            if not asked:
                return
            self._check_claims()
            frames = [(proc.frame.id, proc.frame.version) for proc in asked]
            seconds = runner.settings.accounting.commit_deadline
            granted = permits.take(frames, self.owner, seconds=seconds)
            had = [proc for proc in asked if proc.frame.id in granted]
            refused = [proc for proc in asked if proc.frame.id not in granted]
            self.permitted |= {proc.proc_id: (proc.frame.id, proc.frame.version) for proc in had}
            runner.backlog.backlog.take(had)
            if not refused:
                return
            runner.backlog.backlog.settle(refused, taken={proc.proc_id for proc in refused})
            planner.take_back(refused)
        self.contended = True

    def _give_back(self) -> None:
        """Drop the plan before anything of it was booked: its hosts are idle again, and its frames wait."""
        runner, procs = self.runner, self.planner.procs() if self.planner else []
        for proc in procs:
            runner.hosts.cache.settle(proc.host.id, proc.proc_id, committed=False)
        runner.backlog.backlog.settle(procs)
        self._drop_permits(self._permits_to_give_back(()))

    def _permits_to_give_back(self, booked: Collection[str]) -> list[Permitted]:
        """Give up the layers of which a planned frame is not booked. Returns their permits, and those of the frames
        that are not ``booked`` (ids of their procs).

        The other permits end by themselves: a booked frame has another version from now on, which they are not for.
        """
        permits = [frame for proc_id, frame in self.permitted.items() if proc_id not in booked]
        if self.whole is not None and self.planner is not None:
            layers = {proc.layer.id: True for proc in self.planner.procs()}
            layers |= {proc.layer.id: False for proc in self.planner.procs() if proc.proc_id not in booked}
            permits += self.whole.give_up_all_but([layer_id for layer_id, is_booked in layers.items() if is_booked])
        return permits

    def _drop_permits(self, permits: Sequence[Permitted]) -> None:
        """Give back permits. Where Redis does not answer they end by themselves."""
        try:
            self.runner.permits.drop(permits, self.owner)
        except RedisError as error:
            log.warning("permits_left_to_expire", permits=len(permits), error=str(error))

    def _fill(self, planner: Planner) -> None:
        """Plan until nothing more can be placed. When the plan comes to a layer, a portion of the layer's frames is
        read."""
        for _ in range(_MOST_READS):
            if not (wanted := planner.run()):
                return
            # Frames that are planned already are taken first, so that the read brings others.
            self.runner.backlog.backlog.take(planner.procs())
            if read := wanted if self.whole is None else self.whole.ask(wanted):
                self.runner.backlog.read_portions(read)
            self.progress()
        self.unread = bool(planner.run())

    def _read_details(self, planned: Sequence[PlannedProc]) -> LaunchDetails | None:
        """What the planned frames are launched with; None in a dry run. Layers that cannot be launched are logged and
        set aside, and their verdicts say why."""
        runner = self.runner
        if runner.settings.rqd.dry_run_mode:
            return None
        layers = {proc.layer.id: proc.layer for proc in planned}
        details = ask(runner.engine, fetch_launch_details, {proc.job.id for proc in planned}, layers.keys())
        self.unfit = details.unfit
        for layer_id, why in details.unfit.items():
            log_bad_row("layer", layer_id, layers[layer_id].name, why)
            runner.backlog.backlog.fail(layer_id, why)
        for report in self.reports:
            report.verdicts = not_launchable(report.verdicts, details.unfit)
        return details

    def _book_and_commit(self, planned: Sequence[PlannedProc]) -> tuple[LaunchDetails | None, CommitResult] | None:
        """Do steps 4 and 5. Returns what is to be launched; None if nothing was committed. However they end, what was
        planned on hosts and frames is settled in the caches."""
        runner = self.runner
        result = CommitResult()
        try:
            details = self._read_details(planned)
            procs = [proc for proc in planned if proc.layer.id not in self.unfit]
            self.progress()
            if not procs:
                return None
            self._check_claims()

            # 4. Book, before PostgreSQL: a counter that is too high keeps cores idle, one that is too low passes a cap.
            # The commit's deadline counts from here: a booking that is older than the deadline and has no proc is left
            # by a process that died.
            booked_at = runner.clock()
            with self._step("book"):
                answers = self._book(procs)
            accepted = [proc for proc in procs if proc.proc_id in answers.accepted]
            if accepted and not self.alive():
                self._roll_back(accepted)
                raise _ClaimLostError

            # 5. Commit, and undo in Redis the bookings that PostgreSQL certainly did not take. A booking whose outcome
            #    is unknown stays.
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
                        terms=answers.terms,
                        begins=self._let_the_next_begin,
                    )
                if result.cancelled:
                    runner.plan_sizes.cancelled(self.report.cluster.shard, len(accepted))
                elif result.committed:
                    runner.plan_sizes.committed(self.report.cluster.shard)
                self._after_commit(result)
            losses = {proc.proc_id: error for proc, error in (*result.lost, *result.unknown)}
            for report in self.reports:
                if report.plan:
                    report.verdicts = after_booking(report.verdicts, report.plan.procs, answers.refusals, losses)
            return (details, result) if result.committed else None
        finally:
            self._settle_hosts(planned, result)
            self._settle_frames(planned, result)

    def _let_the_next_begin(self) -> None:
        """Let the next pass over these clusters begin during the commit when there is more to place right away: what is
        booked counts in the ledger, its hosts are taken in the cache, its frames in the backlog.

        Not while this plan waits for the commits of others: plans behind it would be booked long before their turn, and
        the last of them run out of time.
        """
        if self.next_may_begin or not any(report.plan and report.plan.full for report in self.reports):
            return
        self.next_may_begin = True
        for report in self.reports:
            report.go_on = True
        self.end(self.reports)

    def _settle_hosts(self, procs: Sequence[PlannedProc], result: CommitResult) -> None:
        """Give hosts back what was not committed, and tell other processes, since layers may wait for want of just
        that. A proc of unknown outcome stays taken until a read of the database that is late enough to know."""
        runner = self.runner
        committed = {proc.proc_id for proc in result.committed}
        unknown = {proc.proc_id for proc, _ in result.unknown}
        known = [proc for proc in procs if proc.proc_id not in unknown]
        for proc in known:
            runner.hosts.cache.settle(proc.host.id, proc.proc_id, committed=proc.proc_id in committed)
        idle_again = {proc.host.id for proc in known if proc.proc_id not in committed}
        self.gave_back = bool(idle_again)
        runner.hosts.note(idle_again)
        if self.next_may_begin and idle_again:
            runner.freed(idle_again)

    def _settle_frames(self, procs: Sequence[PlannedProc], result: CommitResult) -> None:
        """Tell the backlog what became of frames, and give back the permits of frames that are not booked.

        Booked frames wait no more. Frames whose own rows were not as read, or locked, are lost in the backlog's sense:
        they are read again before they are planned. All others wait as before.
        """
        runner = self.runner
        booked = {proc.proc_id for proc in (*result.committed, *(proc for proc, _ in result.unknown))}
        lost = {proc.proc_id for proc, error in result.lost if isinstance(error, FrameLost | LayerChanged)}
        runner.backlog.backlog.settle(procs, booked=booked, lost=lost)
        layers = {proc.layer.id for proc in procs}
        for layer_id in layers - {proc.layer.id for proc in procs if proc.proc_id not in lost}:
            runner.lost.failed(layer_id)
        for proc in result.committed:
            runner.lost.worked(proc.layer.id)
        self._drop_permits(self._permits_to_give_back(booked))

    def _book(self, procs: Sequence[PlannedProc]) -> BookAnswers:
        """Book procs in the ledger, and count in the reports those that a cap refused."""
        ledger = self.runner.ledger
        limits = {limit for proc in procs for limit in proc.layer.limit_ids}
        if limits and ledger.load_caps is not None:
            # Frames of unmanaged shows under the same limits are not in the ledger: count them now.
            ledger.load_caps(sorted(keys.limit(limit) for limit in limits))
        answers = ledger.book([booking_of(proc) for proc in procs])
        for proc_id, refused in answers.refusals.items():
            self.planned_for[proc_id].refusals[refused.table] += 1
        self.runner.watched.refused([proc.vertices for proc in procs if proc.proc_id in answers.refusals])
        return answers

    def _after_commit(self, result: CommitResult) -> None:
        """Count what the commit did, undo in Redis what PostgreSQL did not take, and have hosts that were not as the
        cache had them read again before they are planned on."""
        runner, now = self.runner, self.runner.backlog.now()
        for proc in result.committed:
            report = self.planned_for[proc.proc_id]
            report.frames_booked += 1
            if proc.frame.waiting_since is not None:
                report.seconds_to_book.append(max(0.0, now - proc.frame.waiting_since))
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
        """Take the bookings of procs that were not committed out of the ledger.

        Does not raise where Redis fails: the other procs are committed and have to be launched. The recompute removes
        the bookings that stay.
        """
        try:
            self.runner.ledger.rollback([booking_of(proc) for proc in procs])
        except (NotReady, RedisError) as error:
            log.warning("rollback_left_to_recompute", procs=len(procs), error=str(error))

    def _launch_and_settle(self, details: LaunchDetails | None, result: CommitResult) -> None:
        """Do steps 6 and 7, beside step 8, and maybe beside the next pass over these clusters."""
        began, runner = self.runner.clock(), self.runner
        # 6. Launch, without a lock. The time to send counts from the COMMIT: a process that was stopped since then
        #    sends nothing late, and what it does not send is undone.
        requests, impossible = launch_requests(result.committed, details, runner.settings)
        send_within = runner.settings.rqd.timeout - (runner.clock() - result.sent_at)
        launched = launch_all(runner.channels, requests, send_within=send_within)

        # 7. Settle: see dispatch.settle for its order.
        outcomes = [*impossible, *launched]
        settled = settle(runner.engine, runner.ledger, runner.channels, result.committed, outcomes)
        for proc in settled.launched:
            self.planned_for[proc.proc_id].frames_launched += 1
        not_launched = (*settled.compensated, *settled.left_unknown)
        self._count_losses(not_launched)
        runner.backlog.backlog.look_again({proc.layer.id for proc, _ in not_launched})
        blame = runner.refusals.blame(launched)
        for proc, error in not_launched:
            seconds = FAILED_HOST_SECONDS if proc.host.name in blame.hosts else 0.0
            runner.hosts.cache.invalidate(proc.host.id, cooldown_seconds=seconds, why=str(error))
        runner.hosts.changed({proc.host.id for proc in result.committed})
        # Jobs for which no RunFrame can be made, or that no host takes: their next launch would end the same way.
        hopeless = {outcome.request.run_frame.job_id: str(outcome.error) for outcome in impossible}
        quarantine(runner.engine, {**blame.jobs, **hopeless}, runner.settings)
        self.report.seconds["launch"] = runner.clock() - began

    def _choose_next(self) -> None:
        """Step 8: choose which clusters are dispatched again at once, and by when the others have to be. A launch that
        fails changes neither."""
        runner = self.runner
        back_in = runner.hosts.cache.back_in()
        without_host = any(report.plan.cache_misses for report in self.reports if report.plan)
        for report in self.reports:
            # A layer without a host may have wanted one that the plan had for frames which were refused or lost: the
            # next pass reads these hosts again.
            more = self.unread or (self.gave_back and without_host)
            report.go_on = report.plan is not None and (report.plan.full or more)
            # No event tells when a host may be tried again, a show may be booked, or a layer or frame may start. All
            # are seconds from now, since the clocks differ: starts are by the database's, shows by that of Redis.
            waits = report.ended is not PassEnd.NO_JOBS
            soon = [back_in] if waits and back_in is not None else []
            if waits and (seconds_to_import := self.seconds_to_import.get(report.cluster.show_id)):
                soon.append(seconds_to_import)
            if self.contended:
                soon.append(CONTENDED_SLEEP_SECONDS)
            if self.whole is not None and self.whole.leaves_some:
                soon.append(LEFT_TO_OTHERS_SECONDS)
            work = self.work_of.get(report.cluster)
            starts_in = None if work is None else work.starts_in(report.cluster)
            if starts_in is not None:
                soon.append(starts_in)
            report.look_again = max(SHORTEST_SLEEP_SECONDS, min(soon)) if soon else None
