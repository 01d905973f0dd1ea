"""One pass over one cluster: gather, plan, book, commit, launch, settle (design section 3).

Where the process may die, and what holds then:

- after *book*, before *commit*: the bookings stay in flight in Redis without a proc; recompute removes them once they
  are too old (I2: counters only ever too high).
- during *commit*: PostgreSQL decides; entries in flight are confirmed or removed by recompute after looking them up.
- after *commit*, before *launch*: RUNNING frames nobody runs; host reports do not show them, and the release room puts
  them back to WAITING (I6).
- after *launch*, before *settle*: frames run and are in the database; recompute confirms their ledger entries.

Permits are kept from before *book* until the end, for the commit's deadline at most; after a death anywhere between,
the next pass of the cluster has them at once, and others after it. A commit that nobody was told of costs others what
they had read before it, nothing else.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting import keys
from opencue_sched.accounting.ledger import BookAnswers, BookingRefused, Ledger
from opencue_sched.accounting.show_handover import ImportedShows
from opencue_sched.coordination.permits import LayerPermits
from opencue_sched.coordination.queues import HostShares
from opencue_sched.dispatch.commit import CommitResult, CommittedProc, CommitTurns, commit_plan
from opencue_sched.dispatch.cooldown import EMPTY_SLEEP_SECONDS, CapWaits, LayerRest, LockedHosts, waits_of
from opencue_sched.dispatch.gather import BadRowLog, Gathered, gather
from opencue_sched.dispatch.hosts import HostFeed
from opencue_sched.dispatch.launch import launch_all, launch_requests
from opencue_sched.dispatch.report import PassEnd, PassReport
from opencue_sched.dispatch.settle import Refusals, Settlement, booking_of
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.domain.cluster import Cluster, LayerVerdict, Verdict
from opencue_sched.domain.farm import Host, PlannedProc
from opencue_sched.errors import BookingError, HostLocked, NotReady
from opencue_sched.placement.planner import Plan, plan_pass, release_plan
from opencue_sched.placement.policy import Policy, policy_for
from opencue_sched.settings import Settings
from opencue_sched.store.jobs import Environments, fetch_environments, quarantine_jobs
from opencue_sched.store.pending import LeftOut, SchemaColumns, fetch_next_start

# What becomes of a plan's verdicts when not all of it is booked.
#
# The planner says why frames wait before anybody was asked. The ledger may refuse what the snapshot had room for,
# because its counters are ahead or its caps are older, and the commit loses what others took meanwhile.

_BY_TABLE = {
    "subscription": Verdict.OVER_SUBSCRIPTION,
    "folder": Verdict.OVER_FOLDER,
    "folder_gpus": Verdict.OVER_FOLDER_GPUS,
    "job": Verdict.OVER_JOB,
    "job_gpus": Verdict.OVER_JOB_GPUS,
    "limit": Verdict.OVER_LIMIT,
    "unseeded": Verdict.FAILED,
    "error": Verdict.FAILED,
}


@dataclass(frozen=True, slots=True)
class Booked:
    """Verdicts after a booking. ``refused`` are the layers of which the ledger refused frames, ``lost`` those of which
    every frame that it took went to somebody else before the commit."""

    verdicts: tuple[LayerVerdict, ...]
    refused: frozenset[str]
    lost: frozenset[str]


def after_booking(
    verdicts: Iterable[LayerVerdict],
    procs: Iterable[PlannedProc],
    refusals: Mapping[str, BookingRefused],
    losses: Mapping[str, BookingError],
) -> Booked:
    """Take from each verdict the frames that were refused or lost, both by proc id, and say why they wait."""
    refused: dict[str, list[BookingRefused]] = {}
    lost: dict[str, list[BookingError]] = {}
    for proc in procs:
        if proc.proc_id in refusals:
            refused.setdefault(proc.layer.id, []).append(refusals[proc.proc_id])
        elif proc.proc_id in losses:
            lost.setdefault(proc.layer.id, []).append(losses[proc.proc_id])
    judged = tuple(
        _judged(verdict, refused.get(verdict.layer_id, ()), lost.get(verdict.layer_id, ())) for verdict in verdicts
    )
    return Booked(
        judged,
        frozenset(refused),
        frozenset(it.layer_id for it in judged if it.layer_id in lost and it.layer_id not in refused and not it.frames),
    )


def after_refusals(plan: Plan, apart: Mapping[tuple[str, str], str]) -> tuple[LayerVerdict, ...]:
    """The verdicts of a plan, in RQD's words where the only hosts left are kept ``apart`` from a layer: its id
    and the host's name -> what was said."""
    said: dict[str, dict[str, str]] = {}
    for (layer, host), words in apart.items():
        said.setdefault(layer, {})[host] = words
    blocked = {it.verdict.layer_id for it in plan.unschedulable}
    return tuple(
        replace(it, verdict=Verdict.BACKING_OFF, detail=_said(said[it.layer_id]))
        if it.verdict is Verdict.CAPACITY and it.layer_id in said.keys() - blocked
        else it
        for it in plan.verdicts
    )


def _said(words: Mapping[str, str]) -> str:
    hosts = "1 host" if len(words) == 1 else f"{len(words)} hosts"
    return f"{hosts} refused its frames and will be tried again: {next(iter(words.values()))}"


def given_back(procs: Iterable[PlannedProc], kept: Collection[str]) -> tuple[Host, ...]:
    """The hosts of those procs of a plan, in its order, that are not ``kept`` (by id), as they are without them."""
    hosts: dict[str, Host] = {}
    some_back = set()
    for proc in procs:
        host = hosts.setdefault(proc.host.id, proc.host)
        if proc.proc_id in kept:
            hosts[host.id] = host.less(proc.reservation, last_updated=host.last_updated)
        else:
            some_back.add(host.id)
    return tuple(host for host in hosts.values() if host.id in some_back)


def _judged(
    verdict: LayerVerdict, refused: list[BookingRefused] | tuple[()], lost: list[BookingError] | tuple[()]
) -> LayerVerdict:
    gone = len(refused) + len(lost)
    if not gone:
        return verdict
    left = replace(verdict, frames=verdict.frames - gone, waiting=verdict.waiting + gone)
    if refused:
        last = refused[-1]
        return replace(left, verdict=_BY_TABLE.get(last.table, Verdict.FLOWING), detail=_refusal(last))
    reasons = ", ".join(sorted(Counter(error.reason for error in lost)))
    return replace(left, detail=f"{gone} of its frames were lost before they were booked ({reasons}); tried again")


def _refusal(refused: BookingRefused) -> str:
    if refused.table == "unseeded":
        return f"PostgreSQL has no row with the caps of {refused.vertex}"
    if refused.table == "error":
        return f"its counters in Redis are spoilt, and put right by the next recompute: {refused.vertex}"
    if refused.table not in _BY_TABLE:
        return "its booking was taken back before it was made; tried again"
    of = refused.table.removesuffix("_gpus")
    return f"the counters have {refused.current:g} of {refused.limit:g} in use under the cap of its {of}"


# Whether a cluster goes on at once with the jobs behind those that a pass could not place (see dispatch.rest).


def walk_on(rest: LayerRest, report: PassReport, *, more: bool) -> None:
    """Decide it for a pass that is done, and what the next one leaves out. ``more``: there may be jobs behind.

    Frames that were lost to somebody else may be had a moment later, so their layers have their turn once more before
    the walk goes on; those that lose all of them again are passed over like the others, or twenty of them would keep
    everybody waiting. Those without a host are not: they rest, and a host that changes for one of them is for them
    first. Nor are those without a host only because frames that were then refused or lost had it in the plan: there is
    one for them, and they are next.

    Whatever woke the cluster in the middle of a walk, or since another process ended it, may be for those that were
    passed over: then they have their turn at once.
    """
    key = report.cluster.key
    once = report.lost - rest.lost_before(key, report.lost)
    next_ones = rest.given_back(key, report.given_back)
    blocked = [it for it in report.blocked if it.kind not in next_ones]
    hostless = {it.verdict.layer_id for it in report.blocked}
    in_vain = [it for it in report.verdicts if it.layer_id not in once and report.in_vain(it)]
    passed_over = [report.as_is(it) for it in in_vain if it.layer_id not in hostless]
    more = more or bool(next_ones)
    if report.frames_booked or not more or not (in_vain or once):
        woken = rest.walk_ends(key, report.wakes)
        report.go_on = woken and not report.frames_booked
    elif passed_over or blocked:
        rest.walk_on(key, passed_over, report.wakes)
        report.go_on = True
    rest.count_pass(key, blocked, passed_over, full=more)
    report.look_again = rest.look_again(key)


log = structlog.get_logger(__name__)

FAILED_HOST_REST_SECONDS = 5.0
"""PostgreSQL calls a host whose RQD is gone UP for minutes, with all its cores idle."""


@dataclass(frozen=True, slots=True)
class PassRunner:
    """Everything a pass talks to; one per process, used by several threads."""

    engine: Engine
    settings: Settings
    ledger: Ledger
    hosts: HostFeed
    permits: LayerPermits
    settlement: Settlement
    facts: SchemaColumns
    rest: LayerRest
    shares: HostShares | None = None
    verdicts: VerdictLog | None = None
    imported: ImportedShows | None = None
    bad_rows: BadRowLog = field(default_factory=BadRowLog)
    refusals: Refusals = field(default_factory=Refusals)
    locked: LockedHosts = field(default_factory=LockedHosts)
    turns: CommitTurns = field(default_factory=CommitTurns)
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
        or prolonged and before the commit. ``progress`` is told of each step, none of which takes longer than a commit
        may. ``wakes``: how often the cluster has been woken so far.

        Raises nothing that concerns one job, host or frame. SQLAlchemyError and RedisError of the stores themselves
        reach the caller after everything taken was given back.
        """
        report = PassReport(cluster, wakes=wakes)
        began = self.clock()
        # One pass at a time has the cluster's claim: what a worker that died in this cluster had permits for is free.
        owner = f"{cluster.key}|{uuid.uuid4().hex}"
        layers: Collection[str] = ()
        gathered: Gathered | None = None
        try:
            gathered = self._gather(cluster, report, progress)
            if not gathered.snapshot.jobs:
                waits = gathered.held_back or gathered.bad_layers
                report.ended = PassEnd.SATURATED if waits else PassEnd.NO_JOBS
                self._look_ahead(report, gathered, began)
                return report
            if self.imported is not None and not self.imported.admits(cluster.show_id):
                report.ended = PassEnd.SATURATED
                log.info("show_not_imported_yet", cluster=cluster.key, show=cluster.show_id)
                return report
            wanted = {layer.id: len(layer.frames) for job in gathered.snapshot.jobs for layer in job.layers}
            if not alive():
                report.ended = PassEnd.CLAIM_LOST
                return report
            layers = wanted.keys()
            granted = self.permits.take(owner, wanted) - self.permits.booked_since(report.log_end)
            progress()
            plan = self._plan(gathered, cluster, granted, report)
            progress()
            if plan.procs:
                self._carry_out(plan, owner, alive, progress, report)
            if report.ended is PassEnd.NO_JOBS:
                report.ended = PassEnd.BOOKED if report.frames_booked else PassEnd.SATURATED
            if report.ended is PassEnd.SATURATED:
                self.cap_waits.note(cluster.key, waits_of(report.verdicts, gathered.snapshot))
            self._look_ahead(report, gathered, began)
            return report
        except NotReady as error:
            report.ended, report.error = PassEnd.NOT_READY, str(error)
            log.warning("pass_not_ready", cluster=cluster.key, error=str(error))
            return report
        finally:
            report.hosts_back_in = self.hosts.cache.back_in()
            self._drop_permits(owner, layers, report.layers_booked)
            if gathered is not None and self.verdicts is not None:
                self.verdicts.record(report.verdicts, cluster.key, resting=report.resting)
            report.total_seconds = self.clock() - began
            report.log()

    def _look_ahead(self, report: PassReport, gathered: Gathered, began: float) -> None:
        """Choose what the next pass skips, and find out when the next layer may start, should the cluster rest now.

        A layer whose time came while the pass read what waits was not seen by it: it counts as one that starts now.
        """
        walk_on(self.rest, report, more=gathered.more)
        if report.frames_booked or report.go_on or not self.facts.has_start_after:
            return
        cluster, queue = report.cluster, self.settings.queue
        longest = max(EMPTY_SLEEP_SECONDS, queue.cluster_saturated_sleep)
        report.statements += 1
        with self.engine.connect() as connection:
            report.next_start = fetch_next_start(
                connection,
                cluster.show_id,
                cluster.facility_id,
                cluster.tags,
                since=self.clock() - began,
                within=longest,
            )

    def _drop_permits(self, owner: str, layers: Collection[str], booked: Collection[str]) -> None:
        """What the pass did is done, whether or not Redis answers now. After the launch, which waits for no Redis."""
        try:
            self.permits.tell_booked(booked)
            self.permits.drop(owner, layers)
        except RedisError as error:
            log.warning("permits_left_to_expire", layers=len(layers), error=str(error))

    def _gather(self, cluster: Cluster, report: PassReport, progress: Callable[[], None]) -> Gathered:
        began = self.clock()
        self.rest.hosts_changed(self.hosts.follow())
        progress()
        self.rest.hosts_changed(self.hosts.refresh(cluster))
        progress()
        report.roused = self.rest.roused

        def backing_off(room: Mapping[str, float]) -> LeftOut:
            progress()
            aside = self.rest.aside(cluster.key, room)
            report.resting = aside.verdicts
            return aside.left_out

        report.log_end = self.permits.log_end()
        with self.engine.connect() as connection:
            gathered = gather(connection, cluster, self.settings, facts=self.facts, backing_off=backing_off)
            connection.rollback()
        progress()
        report.gathered_at = self.clock()
        report.gather_seconds = report.gathered_at - began
        report.statements += gathered.statements
        report.jobs = len(gathered.snapshot.jobs)
        self.bad_rows.report(gathered.bad_rows)
        report.verdicts = gathered.bad_layers
        report.versions = gathered.versions
        self.rest.rest_rows(cluster.key, [report.as_is(it) for it in gathered.bad_layers])
        report.bad_rows = self.bad_rows.taken_counts() + self.hosts.bad_rows.taken_counts()
        if gathered.snapshot.jobs:
            report.show_name = gathered.snapshot.jobs[0].show_name
        return gathered

    def _policy(self, show_name: str, apart: Mapping[tuple[str, str], str]) -> Policy:
        first = None if self.shares is None else self.shares.first()
        policy = replace(policy_for(self.settings.queue, show_name), first=first)
        if not apart:
            return policy
        return replace(policy, admit=lambda _job, layer, host: (layer.id, host.name) not in apart)

    def _plan(self, gathered: Gathered, cluster: Cluster, granted: Collection[str], report: PassReport) -> Plan:
        began = self.clock()
        apart = self.refusals.apart()
        plan = plan_pass(
            gathered.snapshot,
            cluster,
            self.hosts.cache,
            self._policy(report.show_name, apart),
            granted_layers=granted,
            new_id=lambda: str(uuid.uuid4()),
            limit_names={key: limit.name for key, limit in gathered.limits.items()},
        )
        report.plan_seconds = self.clock() - began
        report.planned = True
        report.frames_planned = len(plan.procs)
        report.attempts, report.scores = tuple(plan.attempts.values()), plan.scores
        report.wasted_attempts = plan.wasted_attempts
        report.cache_hits, report.cache_misses = plan.cache_hits, plan.cache_misses
        report.verdicts = (*gathered.bad_layers, *after_refusals(plan, apart))
        placed = {proc.layer.kind for proc in plan.procs}
        self.rest.rest(cluster.key, plan.unschedulable, roused=report.roused, placed=placed)
        report.blocked = plan.unschedulable
        return plan

    def _carry_out(
        self, plan: Plan, owner: str, alive: Callable[[], bool], progress: Callable[[], None], report: PassReport
    ) -> None:
        """Book and commit, tell the pool how that ended, then launch and settle."""
        try:
            environments = self._environments(plan.procs, report)
            progress()
            if not alive():  # whoever has the cluster now has these permits
                report.ended = PassEnd.CLAIM_LOST
                self._give_back(plan, CommitResult(), report)
                return
            # A commit may have to wait: nobody is to plan frames of these layers until it is over.
            planned = {proc.layer.id for proc in plan.procs}
            self.permits.keep(owner, planned, seconds=self.settings.accounting.commit_deadline)
            progress()
        except (RedisError, SQLAlchemyError):
            self._give_back(plan, CommitResult(), report)
            raise
        result = self._book_and_commit(plan, alive, progress, report)
        if result.committed:
            self._launch(result.committed, environments, result.sent_at, progress, report)

    def _give_back(self, plan: Plan, result: CommitResult, report: PassReport) -> None:
        """Tell the pool what became of the plan's hosts. What was not committed is idle again, and layers may rest for
        want of just that."""
        committed = {it.planned.proc_id for it in result.committed}
        unknown = frozenset(planned.proc_id for planned, _ in result.unknown)
        release_plan(self.hosts.cache, plan, committed=committed, unknown=unknown)
        report.given_back = given_back(plan.procs, committed | unknown)
        self.hosts.note({host.id for host in report.given_back})

    def _judge_again(self, plan: Plan, answers: BookAnswers, result: CommitResult, report: PassReport) -> None:
        losses = {planned.proc_id: error for planned, error in (*result.lost, *result.unknown)}
        booked = after_booking(report.verdicts, plan.procs, answers.refusals, losses)
        report.verdicts, report.refused, report.lost = booked.verdicts, booked.refused, booked.lost

    def _book_and_commit(
        self, plan: Plan, alive: Callable[[], bool], progress: Callable[[], None], report: PassReport
    ) -> CommitResult:
        result = CommitResult()
        try:
            booked_at = self.clock()
            answers = self._book(plan, report)
            progress()
            accepted = [proc for proc in plan.procs if proc.proc_id in answers.accepted]
            if not accepted:
                self._judge_again(plan, answers, result, report)
                return result
            if not alive():
                report.ended = PassEnd.CLAIM_LOST
                self._roll_back(accepted)
                return result
            result = self._commit(accepted, answers, booked_at, report)
            progress()
            self._judge_again(plan, answers, result, report)
            self._after_commit(result, report)
            return result
        finally:
            self._give_back(plan, result, report)

    def _book(self, plan: Plan, report: PassReport) -> BookAnswers:
        began = self.clock()
        limits = {limit for proc in plan.procs for limit in proc.layer.limit_ids}
        if limits and self.ledger.load_caps is not None:
            # Frames of unmanaged shows under the same licences are not in the ledger: count them now.
            self.ledger.load_caps(sorted(keys.limit(limit) for limit in limits))
        answers = self.ledger.book([booking_of(proc) for proc in plan.procs])
        report.book_seconds = self.clock() - began
        report.lazy_seeds += len(answers.loaded)
        report.refusals.update(refused.table for refused in answers.refusals.values())
        return answers

    def _commit(
        self, accepted: Sequence[PlannedProc], answers: BookAnswers, booked_at: float, report: PassReport
    ) -> CommitResult:
        began = self.clock()
        result = commit_plan(
            self.engine,
            accepted,
            answers.caps,
            self.settings,
            facts=self.facts,
            booked_at=booked_at,
            clock=self.clock,
            turns=self.turns,
        )
        booked = [it.planned for it in result.committed] + [planned for planned, _ in result.unknown]
        report.layers_booked = frozenset(planned.layer.id for planned in booked)
        report.commit_seconds = self.clock() - began
        report.statements += result.statements
        report.frames_booked = len(result.committed)
        since_gather = self.clock() - report.gathered_at
        report.seconds_to_book = [
            it.planned.frame.waited_seconds + since_gather
            for it in result.committed
            if it.planned.frame.waited_seconds is not None
        ]
        return result

    def _after_commit(self, result: CommitResult, report: PassReport) -> None:
        """Undo in Redis what PostgreSQL did not take, and stop believing in the hosts and caps that were wrong."""
        report.losses.update(error.reason for _, error in (*result.lost, *result.unknown))
        for planned, error in result.unknown:
            log.error("commit_outcome_unknown", proc=planned.proc_id, frame=planned.frame.id, error=str(error))
        for job_id, reason in result.quarantined.items():
            log.error("job_quarantined", job=job_id, reason=reason)
        if result.lost:
            self._roll_back([planned for planned, _ in result.lost])
            log.info("bookings_lost", cluster=report.cluster.key, **Counter(e.reason for _, e in result.lost))
        rests = self.locked.found({lost.host.id for lost, why in result.lost if isinstance(why, HostLocked)})
        for host_id, why in {lost.host.id: str(why) for lost, why in result.lost if why.retriable}.items():
            self.hosts.cache.invalidate(host_id, rest_seconds=rests.get(host_id, 0.0), why=why)
        self._reload_caps(result.lowered)

    def _reload_caps(self, lowered: Collection[str]) -> None:
        """Load caps that are lower than Redis knew. A store that is away must not keep what is committed from its
        launch: until it is back nobody books, and the next commit finds the same."""
        if not lowered or self.ledger.load_caps is None:
            return
        try:
            self.ledger.load_caps(sorted(lowered))
        except (NotReady, RedisError, SQLAlchemyError) as error:
            log.warning("lowered_caps_left_to_reseed", vertices=len(lowered), error=str(error))

    def _roll_back(self, procs: Sequence[PlannedProc]) -> None:
        """As with ``_reload_caps``: whatever Redis answers, what is committed is launched."""
        try:
            self.ledger.rollback([booking_of(proc) for proc in procs])
        except (NotReady, RedisError) as error:
            log.warning("rollback_left_to_recompute", procs=len(procs), error=str(error))

    def _launch(
        self,
        committed: Sequence[CommittedProc],
        environments: Environments,
        committed_at: float | None,
        progress: Callable[[], None],
        report: PassReport,
    ) -> None:
        """A process that was stopped since the commit sends nothing late: what it does not send is undone."""
        began = self.clock()
        committed_at = began if committed_at is None else committed_at
        procs = [it.planned for it in committed]
        requests, impossible = launch_requests(procs, environments, self.settings)
        send_within = self.settings.rqd.launch_timeout - (self.clock() - committed_at)
        launched = launch_all(self.settlement.channels, requests, send_within=send_within, progress=progress)
        outcomes = [*impossible, *launched]
        settled = self.settlement.settle(committed, outcomes, progress=progress)
        report.launch_seconds = self.clock() - began
        report.frames_launched = len(settled.launched)
        job_of = {proc.proc_id: proc.job.id for proc in procs}
        blame = self.refusals.blame(outcomes, job_of, {proc.proc_id: proc.layer.id for proc in procs})
        for undone in (*settled.compensated, *settled.left_unknown):
            report.losses[undone.error.reason] += 1
            host = undone.planned.host
            rest = FAILED_HOST_REST_SECONDS if host.name in blame.hosts else 0.0
            self.hosts.cache.invalidate(host.id, rest_seconds=rest, why=str(undone.error))
        self.hosts.changed({it.planned.host.id for it in committed})
        self._set_aside({**blame.jobs, **{job_of[it.proc_id]: str(it.error) for it in impossible}}, report)

    def _set_aside(self, reasons: Mapping[str, str], report: PassReport) -> None:
        """Quarantine jobs for which no RunFrame can be made, or that no host takes: it would end the same way again.

        Without our table, in a database where we may add nothing, their layers rest in this process at least.
        """
        if not reasons:
            return
        for job_id, reason in reasons.items():
            log.error("job_quarantined", job=job_id, reason=reason)
        if not self.facts.has_our_objects:
            theirs = [it for it in report.verdicts if it.job_id in reasons]
            failed = (replace(it, verdict=Verdict.FAILED, detail=reasons[it.job_id]) for it in theirs)
            self.rest.rest_rows(report.cluster.key, (report.as_is(it) for it in failed))
            return
        with self.engine.begin() as connection:
            quarantine_jobs(connection, reasons, self.settings.queue.job_back_off_duration)

    def _environments(self, procs: Sequence[PlannedProc], report: PassReport) -> Environments:
        """What the frames will find in their environment; read before booking, so that a failure costs nothing."""
        if self.settings.rqd.dry_run_mode:
            return Environments()
        jobs, layers = {proc.job.id for proc in procs}, {proc.layer.id for proc in procs}
        report.statements += 2
        with self.engine.connect() as connection:
            return fetch_environments(connection, jobs, layers)
