"""What `opencue-sched doctor` looks at: whether everything is there that a scheduler needs.

Each finding says what was looked at and, if that is wrong, what to do. A FAIL must be put right before frames can be
booked and launched, a WARN need not be. Nothing is written.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import redis
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting.bootstrap import StoreState, store_state
from opencue_sched.accounting.epoch import look_at_store
from opencue_sched.accounting.imported_shows import imported_shows
from opencue_sched.accounting.keys import EntryState, Record
from opencue_sched.accounting.last_recompute import Found, last_found
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.show_handover import check_release_feed
from opencue_sched.clients.postgres import OURS, ask
from opencue_sched.clients.postgres_sessions import OWN_SESSIONS, SHARED, sessions_of
from opencue_sched.coordination.keys import QueueType
from opencue_sched.coordination.postings import cluster_postings
from opencue_sched.coordination.presence import Actor, Members, WorkerState, list_members
from opencue_sched.dispatch.backlog_feed import DEAF_RESYNC_SECONDS, RESYNC_SECONDS
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.domain.names import plural
from opencue_sched.domain.states import HardwareState
from opencue_sched.domain.units import duration_text
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.errors import SchedulerError, TakesNoWrites
from opencue_sched.insight.audit import (
    Contradictions,
    Finding,
    Report,
    Severity,
    check_ready,
    compare_counters,
    compare_procs,
)
from opencue_sched.insight.breaking_hosts import find_breaking_hosts
from opencue_sched.insight.explain import cluster_words, listed, unreached_hosts
from opencue_sched.insight.health import check_redis, describe_failure
from opencue_sched.insight.limit_words import flagged_words
from opencue_sched.insight.redis_access import check_access
from opencue_sched.reports.event_receivers import receiver_of
from opencue_sched.settings import Settings
from opencue_sched.store import insight as figures
from opencue_sched.store.audit import proc_ages
from opencue_sched.store.hosts import full_names, list_hosts, names_in_two_cases
from opencue_sched.store.job_events import undelivered
from opencue_sched.store.jobs import list_jobs
from opencue_sched.store.limits import fetch_limits, flagged_limits
from opencue_sched.store.pending import facility_ids, fetch_waiting_work
from opencue_sched.store.privileges import missing_privileges, missing_tables
from opencue_sched.store.schema import (
    GUARDS,
    SchemaFacts,
    absent_backlog_triggers,
    check_schema,
    check_writable,
    triggers_of_proc,
)
from opencue_sched.store.set_based_frames import read_frames_way
from opencue_sched.store.shows import list_shows, list_subscriptions

OLDEST_POSTGRESQL = 130_000
"""The oldest version that serves, as PostgreSQL numbers its versions: 13.0."""
RQDS_PROBED = 20
"""How many RQDs are asked at once whether they answer: those of the hosts that reported last. What keeps this machine
from RQDs mostly concerns all of them, so a few tell."""
PROBE_SECONDS = 2.0
"""How long one of these RQDs has to answer."""
OLD_BACKLOG_SECONDS = 60.0
"""A worker that compared its waiting work with the database longer ago than this is a finding: several comparisons are
missing then (backlog_feed.RESYNC_SECONDS)."""
RECOMPUTES_MISSED = 2
"""After how many intervals without a recompute `doctor` reports differences that a recompute would have put right."""

_TO_REACH_RQDS = (
    "name resolution, firewall, OPENCUE_SCHED_RQD__DIAL_BY=full, or OPENCUE_SCHED_RQD__ADDRESSES / __GRPC_PORT"
)
"""Remedy: what may keep this program from RQDs."""
_TO_BE_REACHED = "it hears its own machine only, unless OPENCUE_SCHED_RELEASE__HOST says where to listen"
"""Remedy, behind words on the report service: why RQDs of other machines may not reach it."""
_TO_COMMIT = (
    "look for long transactions in pg_stat_activity and at PostgreSQL's log; all of a commit has to fit in "
    "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE, a statement in three tenths of it"
)
"""Remedy for commits that fail one after another. The share of a statement is that of dispatch/commit.py."""

_TAKES_NO_DISPATCH = (WorkerState.PAUSED, WorkerState.DRAINING)
"""The states of a worker that dispatches nothing until a person has it go on, or it ends."""

_ok = partial(Finding, Severity.OK)
_warn = partial(Finding, Severity.WARN)
_fail = partial(Finding, Severity.FAIL)


def diagnose(engine: Engine, client: redis.Redis, settings: Settings) -> Report:
    """Look at everything once. Whatever is wrong with the farm is a finding, also a store that does not answer."""
    findings: list[Finding] = []
    waiting_frames = 0
    database_answers = False
    try:
        with engine.connect() as connection:
            findings += _server(connection, settings.database_shown)
            facts = check_schema(connection)
            for look in _ON_THE_DATABASE:
                findings += look(connection, settings, facts)
            scope = settings.scheduler.facility
            facilities = None if scope is None else facility_ids(connection, scope)
            window = settings.accounting.limit_settle_window_seconds
            waiting = fetch_waiting_work(connection, facilities, facts, settle_window_seconds=window)
            waiting_frames = sum(work.frames for work in waiting)
            if left_alone := {job for work in waiting if work.why == Verdict.QUARANTINED for job in work.jobs}:
                names = listed([job.name for job in list_jobs(connection, job_ids=left_alone)])
                remedy = "`opencue-sched explain JOB` says why; they are tried again by themselves"
                findings.append(_warn("quarantine", f"jobs left alone for a while: {names}", remedy))
        database_answers = True
    except (SchedulerError, SQLAlchemyError) as error:
        # The first finding is of a server that answered: what fails after that mostly lacks something in the schema.
        findings.append(_fail("schema" if findings else "PostgreSQL", describe_failure(error, settings)))
    return Report((*findings, *_redis(client, settings, waiting_frames, engine if database_answers else None)))


def _server(connection: Connection, where: str) -> Iterator[Finding]:
    """Whether PostgreSQL is new enough, takes writes, and gives us sessions of our own. ``where`` names the database in
    findings."""
    server = figures.server(connection)
    version = f"{server.version // 10_000}.{server.version % 10_000}"
    if server.version < OLDEST_POSTGRESQL:
        yield _fail("PostgreSQL", f"{where} is version {version}", "PostgreSQL 13 or newer is needed")
    else:
        yield _ok("PostgreSQL", f"{where} answers, version {version}")
    try:
        check_writable(connection)
    except TakesNoWrites as error:
        text, _, remedy = str(error).partition(": ")
        yield _fail("PostgreSQL", text, remedy)
    sessions = sessions_of(connection.engine)
    if not sessions.own:
        yield _fail("PostgreSQL", SHARED, OWN_SESSIONS)
    in_force = figures.settings_in_force(connection, sessions.settings)
    if lost := [f"{name} {in_force[name]}" for name in in_force if in_force[name] != sessions.settings[name]]:
        text = f"this program's sessions do not keep what it sets there: {listed(lost)}"
        yield _fail("PostgreSQL", text, "the connection pool in between must leave a session as its client set it")
    if not server.client.startswith(OURS):
        text = f"knows this program as {server.client!r}: the guard on procs would refuse every booking"
        remedy = f"the connection pool in between must pass on an application_name that begins with {OURS}"
        yield _fail("PostgreSQL", text, remedy)


def _schema(connection: Connection, _settings: Settings, facts: SchemaFacts) -> Iterator[Finding]:
    """Whether our tables and triggers are there, and enabled."""
    made = "made by this scheduler" if facts.origin == "opencue-sched" else "made by Cuebot"
    if missing := missing_tables(connection):
        yield _fail("schema", f"{made}; somebody dropped {listed(missing)}", "run `opencue-sched migrate`")
    else:
        yield _ok("schema", f"{made}; our tables and triggers are there")
    if GUARDS - triggers_of_proc(connection):
        text = "our triggers on proc are missing or disabled: a Cuebot's retries and redirects book managed shows"
        yield _warn("guard", text, "if they are disabled, ALTER TABLE proc ENABLE TRIGGER")
    if absent := absent_backlog_triggers(connection):
        text = f"our triggers on the backlog are missing or disabled: {listed(absent)}"
        again = "`opencue-sched migrate --down` and `opencue-sched migrate` make what was dropped anew"
        yield _warn("backlog", text, f"if they are disabled, ALTER TABLE ... ENABLE TRIGGER; {again}")


def _frames_way(connection: Connection, _settings: Settings, facts: SchemaFacts) -> Iterator[Finding]:
    """What writes counters and history of the frames that bookings start: our statements, once for each plan, or
    Cuebot's triggers, row by row. A schema that we made has the first way only."""
    way = read_frames_way(connection)
    # Two functions of Cuebot's are changed for the first way: bookings write both counters and history, or neither.
    if facts.origin == "opencue-sched" and not way.changed:
        return
    if way.on:
        yield _ok("schema", "bookings write counters and history of their frames once a plan")
        return
    by_triggers = "Cuebot's triggers write counters and history of started frames row by row"
    if way.changed:
        put_back = f"somebody has put a function back, and only {listed(list(way.changed))} is changed"
        why = "; ".join(way.obstacles) or put_back
        again = "" if way.obstacles else "`opencue-sched migrate --set-based-frames` changes both again; "
        remedy = f"{again}`opencue-sched migrate --set-based-frames --down` puts them back"
        yield _warn("schema", f"{by_triggers}: {why}", remedy)
    else:
        why = "; ".join(way.obstacles) or "`opencue-sched migrate --set-based-frames` is not in force"
        yield _ok("schema", f"{by_triggers}: {why}")


def _privileges(connection: Connection, _settings: Settings, facts: SchemaFacts) -> Iterator[Finding]:
    """Whether the database user may do all that this program does."""
    if missing := missing_privileges(connection, facts.origin):
        remedy = "grant it: docs/tasks/database-user.md has the statements"
        yield _fail("privileges", f"the database user lacks {listed(missing)}", remedy)


def _shows(connection: Connection, _settings: Settings, facts: SchemaFacts) -> Iterator[Finding]:
    """Whether there are managed shows, and each of them may be booked."""
    all_shows = list_shows(connection)
    shows = [show for show in all_shows if show.managed]
    with_burst = {
        subscription.show_id for subscription in list_subscriptions(connection) if subscription.burst_centicores > 0
    }
    if shows:
        yield _ok("shows", f"{len(shows)} managed by this scheduler: {listed([show.name for show in shows])}")
    else:
        remedy = "`opencue-sched show managed NAME on` hands one over"
        if not all_shows:
            beside = "make one with the Cuebot, as by `cueadmin -create-show NAME`; then " + remedy
            remedy = beside if facts.origin == "cuebot" else "`opencue-sched show create NAME --managed` makes one"
        yield _warn("shows", "no show is managed by this scheduler", remedy)
    for show in shows:
        switched_off = [
            (what, remedy)
            for is_off, what, remedy in (
                (not show.active, "not active", f"`opencue-sched show active {show.name} on`"),
                (not show.booking, "not to be booked", f"`opencue-sched show booking {show.name} on`"),
                (not show.dispatch, "not to be dispatched", "set its b_dispatch_enabled in the table show"),
                (show.paused, "paused", "clear its b_paused in the table show"),
            )
            if is_off
        ]
        if switched_off:
            what, remedy = (", ".join(words) for words in zip(*switched_off, strict=True))
            yield _warn("shows", f"{show.name} is managed, but {what}", remedy)
        elif show.id not in with_burst:
            remedy = f"`opencue-sched subscription create {show.name} ALLOCATION CORES`, or raise a burst"
            yield _warn("shows", f"{show.name} has no subscription with a burst", remedy)


def _hosts(connection: Connection, settings: Settings, facts: SchemaFacts) -> Iterator[Finding]:
    """Whether hosts have reported and can be used, and each machine is one host."""
    staleness = settings.host_cache.host_staleness_threshold
    groups = figures.host_groups(connection, facility=None, staleness=staleness)
    allocs = [group for group in groups if group.name is not None]  # the other groups are the same hosts by state
    total = sum(alloc.hosts for alloc in allocs)
    locked = sum(alloc.hosts_locked for alloc in allocs)
    down = sum(alloc.hosts_down for alloc in allocs)
    usable = total - locked - down
    places = plural(sum(1 for alloc in allocs if alloc.hosts), "allocation")
    text = f"{total} in {places}: {usable} usable, {locked} locked, {down} down or silent"
    beside = facts.origin == "cuebot"
    if not total:
        serve = f"start `opencue-sched report-service` (or a Cuebot) and point RQDs at it; {_TO_BE_REACHED}"
        yield _warn("hosts", "no host has ever reported", "point RQDs at the Cuebot" if beside else serve)
    elif not usable:
        reach = "do the RQDs reach the Cuebot?" if beside else f"do the RQDs reach the report service? {_TO_BE_REACHED}"
        remedy = "`opencue-sched host unlock HOST` opens one" if locked == total else reach
        yield _warn("hosts", f"{text}; none can be used", remedy)
    else:
        yield _ok("hosts", text)
    for names in names_in_two_cases(connection):
        remedy = "`opencue-sched host delete` the one that does not report any more, once it is DOWN"
        text = f"{listed(names)} are one name in different cases, so one machine may have two rows"
        yield _warn("hosts", text, remedy)


def _broken(connection: Connection, settings: Settings, _facts: SchemaFacts) -> Iterator[Finding]:
    """Whether hosts make frames fail."""
    for host, words in find_breaking_hosts(connection, settings).items():
        remedy = f"look at the logs of the frames, then `opencue-sched host lock {host} --reason ...` if it is the host"
        yield _warn("hosts", words, remedy)


def _rqds(connection: Connection, settings: Settings, _facts: SchemaFacts) -> Iterator[Finding]:
    """Whether frames are launched, and RQDs can be reached for that."""
    if settings.rqd.dry_run_mode:
        remedy = "OPENCUE_SCHED_RQD__DRY_RUN_MODE=false for a farm that renders"
        yield _warn("RQD", "dry run: frames are booked and never launched", remedy)
    elif up := [host for host in list_hosts(connection) if host.state == HardwareState.UP]:
        up.sort(key=lambda host: host.pinged, reverse=True)
        yield _probed([host.host for host in up[:RQDS_PROBED]], settings, connection.engine)


def _probed(names: list[str], settings: Settings, engine: Engine) -> Finding:
    """Whether the RQD of each host answers. There must be at least one host."""
    # Imported here: no other check needs gRPC.
    from opencue_sched.rqd.channels import RqdChannels
    from opencue_sched.rqd.kill import RqdKiller

    with (
        RqdChannels(settings.rqd, full_name=full_names(engine), quiet=True) as channels,
        ThreadPoolExecutor(len(names), thread_name_prefix="probe") as threads,
    ):
        answers = threads.map(lambda name: RqdKiller(channels).answers(name, PROBE_SECONDS), names)
        unfit = [name for name, answered in zip(names, answers, strict=True) if not answered]
        misnamed = {name: words for name in unfit if (words := channels.misnamed(name))}
        silent = [f"{name} ({channels.address(name)})" for name in unfit if name not in misnamed]
    text = f"{len(names) - len(unfit)} of {len(names)} hosts that are up have an RQD that answers"
    if not unfit:
        return _ok("RQD", text)
    text += f"; not {listed(silent)}" if silent else ""
    text += f"; {listed([f'{name} {words}' for name, words in misnamed.items()])}" if misnamed else ""
    level = Severity.WARN if len(unfit) < len(names) else Severity.FAIL
    return Finding(level, "RQD", text, _TO_REACH_RQDS)


def _release_feed(connection: Connection, settings: Settings, facts: SchemaFacts) -> Iterator[Finding]:
    """Whether releases of procs can reach the ledger by the feed that is set."""
    feed = settings.accounting.release_feed
    misconfigured, message = check_release_feed(connection.engine, feed)
    if misconfigured:
        remedy = "`opencue-sched migrate` adds the trigger; then OPENCUE_SCHED_ACCOUNTING__RELEASE_FEED=proc-trigger"
        yield _fail("release feed", message, remedy)
    elif feed == "cuebot-redis" and facts.origin == "opencue-sched":
        text = f"{feed}, but this database was made by this scheduler: no Cuebot publishes anything"
        yield _fail("release feed", text, "leave OPENCUE_SCHED_ACCOUNTING__RELEASE_FEED out")
    else:
        yield _ok("release feed", message)


def _retries(connection: Connection, settings: Settings, _facts: SchemaFacts) -> Iterator[Finding]:
    """Whether workers count no retry after the exit statuses for which a Cuebot delays layers."""
    delayed = figures.delaying_exit_statuses(connection)
    if statuses := sorted(delayed - set(settings.queue.uncounted_exit_statuses)):
        numbers = ", ".join(map(str, statuses))
        text = f"the Cuebot delays layers for exit statuses {numbers}, after which a retry is counted here"
        value = ",".join(map(str, sorted(delayed.union(settings.queue.uncounted_exit_statuses))))
        yield _warn("retries", text, f"OPENCUE_SCHED_QUEUE__UNCOUNTED_EXIT_STATUSES={value} for every worker")


def _events(connection: Connection, settings: Settings, facts: SchemaFacts) -> Iterator[Finding]:
    """Whether the receiver of job events that the farm has set up gets them."""
    receiver = receiver_of(settings.events)
    if facts.origin == "cuebot":
        if receiver is not None:
            text = "OPENCUE_SCHED_EVENTS__URL and __COMMAND have no effect on a database made by Cuebot"
            yield _warn("events", text, "leave them out: a Cuebot has mails")
        return
    left = undelivered(connection)
    if left.refused:
        where = "" if receiver is None else f" to {receiver.shown}"
        age = duration_text(left.oldest_seconds)
        text = f"{plural(left.refused, 'event')} of jobs could not be delivered{where} since {age}: {left.last_error}"
        yield _warn("events", text, "docs/tasks/job-events.md says what a receiver must answer; they are tried again")
    if left.untried:
        remedy = (
            "the same OPENCUE_SCHED_EVENTS__URL or __COMMAND for every worker; `opencue-sched fleet`: a beat must lead"
        )
        yield _warn("events", f"nobody sends {plural(left.untried, 'event')} of jobs", remedy)
    if settings.events.command and shutil.which(settings.events.command[0]) is None:
        text = f"OPENCUE_SCHED_EVENTS__COMMAND names {settings.events.command[0]}, which is no program on this machine"
        yield _warn("events", text, "each worker's machine needs it")
    elif receiver is not None and not (left.refused or left.untried):
        yield _ok("events", f"the ends of jobs are told to {receiver.shown}")


def _limits(connection: Connection, settings: Settings, facts: SchemaFacts) -> Iterator[Finding]:
    """Whether limits count what they are meant to count, and are enforced."""
    if facts.origin == "cuebot" and (flagged := flagged_limits(connection)):
        text = f"{flagged_words(flagged)}. This Cuebot counts frames of them, so its own shows see them full earlier"
        yield _warn("limits", text, "Cuebot's migration V49 lets it count machines, too")
    window = settings.accounting.limit_settle_window_seconds
    for limit in fetch_limits(connection, window, has_holders=facts.has_limit_holders).values():
        if limit.report_is_too_old:
            age, life = duration_text(limit.report_age), duration_text(limit.ttl)
            text = f"limit {limit.name} keeps nothing from starting: its last report is {age} old, more than its {life}"
            remedy = "does the licence server answer, and does its reporter run? docs/tasks/licence-overrun.md"
            yield _warn("limits", text, remedy)


_ON_THE_DATABASE = (
    _privileges,
    _schema,
    _frames_way,
    _shows,
    _hosts,
    _broken,
    _rqds,
    _release_feed,
    _retries,
    _limits,
    _events,
)
"""The checks of PostgreSQL, in the order of their findings."""


def _redis(client: redis.Redis, settings: Settings, waiting_frames: int, engine: Engine | None) -> Iterator[Finding]:
    """Whether Redis is fit for use, and what it says about counters, clusters and workers.

    ``engine`` is None where a check of PostgreSQL ended in an error: then nothing is compared with the database.
    """
    try:
        check_redis(client, settings)
        info: Any = client.info()
        # What a replica allows is of no use: it takes no writes, which is a finding below.
        if info.get("role") == "master":
            check_access(client, settings)
        state = store_state(client)
        counters = _counters(engine, client, settings) if state is StoreState.OPEN else []
        members = list_members(client, settings.coordination.namespace)
        postings = cluster_postings(client, settings)
        skipped = postings.skipped()
        failed_commits = VerdictLog(client, settings.coordination.namespace).failed_commits(postings.posted())
    except (SchedulerError, redis.RedisError) as error:
        yield _fail("Redis", describe_failure(error, settings))
        return
    yield _ok("Redis", f"version {info.get('redis_version')}, does not evict, allows what a fleet does")
    if info.get("role") not in (None, "master"):
        remedy = "name the master, or Sentinels, in OPENCUE_SCHED_REDIS_URL"
        yield _fail("Redis", f"is a {info.get('role')}: nothing can be written", remedy)
    yield from counters
    if state is not StoreState.OPEN:
        text = f"{state.value}: nothing is booked before a worker has filled them from PostgreSQL"
        fills = state is StoreState.FILLING and members.alive
        remedy = "wait: a worker does it" if fills else "start a worker: `celery -A opencue_sched worker`"
        yield _warn("counters", text, remedy)
    for cluster in skipped:
        yield _warn("clusters", cluster_words(cluster))
    if unreached := unreached_hosts(members):
        text = f"workers do not reach hosts: {listed([f'{host}: {words}' for host, words in unreached.items()])}"
        # By instance, because a worker has a record for each type of its queues, all with the same figures.
        unnamed = {worker.instance: worker.more_unreached for worker in members.alive if worker.more_unreached}
        text += "".join(f"; worker {instance} does not reach {hosts} others" for instance, hosts in unnamed.items())
        yield _warn("RQD", text, _TO_REACH_RQDS)
    yield from _backlogs(members)
    for commits in failed_commits:
        since = datetime.fromtimestamp(commits.since).astimezone().strftime("%H:%M:%S")
        text = f"the last {commits.failures} commits of cluster {commits.cluster} failed, since {since}"
        yield _fail("clusters", f"{text} ({commits.error})", _TO_COMMIT)
    yield _workers(members.of(QueueType.DISPATCH.value), waiting_frames)


def _workers(workers: list[Actor], waiting_frames: int) -> Finding:
    """Whether a live worker dispatches."""
    waits = f", and {plural(waiting_frames, 'frame')} of managed shows wait" if waiting_frames else ""
    if not workers:
        level = Severity.FAIL if waiting_frames else Severity.WARN
        return Finding(level, "workers", f"none is alive{waits}", "`celery -A opencue_sched worker` and `... beat`")
    resting = Counter(worker.state for worker in workers if worker.state in _TAKES_NO_DISPATCH)
    if resting.total() < len(workers):
        return _ok("workers", f"{len(workers)} alive; `opencue-sched fleet` says more")
    states = ", ".join(f"{number} {state}" for state, number in sorted(resting.items()))
    return _warn("workers", f"all that are alive dispatch nothing ({states}){waits}", "`opencue-sched ctl resume`")


def _backlogs(members: Members) -> Iterator[Finding]:
    """Whether workers hear PostgreSQL's notifications of waiting work, and compare often enough to find what they did
    not hear."""
    # By instance, because a worker has a record for each type of its queues, all with the same figures.
    workers = {worker.instance: worker for worker in members.alive}
    for name, worker in workers.items():
        if worker.backlog_age_seconds > OLD_BACKLOG_SECONDS:
            age = duration_text(worker.backlog_age_seconds)
            text = f"worker {name} compared the waiting work that it keeps with the database {age} ago"
            remedy = "`backlog_not_compared` in its log says why it does not"
            yield _warn("backlog", f"{text}, and should every {RESYNC_SECONDS:g} s", remedy)
    for name, worker in workers.items():
        if worker.deaf:
            text = f"worker {name} hears none of PostgreSQL, and looks for waiting work every {DEAF_RESYNC_SECONDS:g} s"
            yield _warn("notifications", text, OWN_SESSIONS)


def _counters(engine: Engine | None, client: redis.Redis, settings: Settings) -> list[Finding]:
    """Whether open counters can be booked against, and agree with ledger and procs.

    ``engine`` None: they are not compared with procs. Raises NotReady, RedisError and SQLAlchemyError.
    """
    ready = check_ready(Ledger(client, owner="doctor"))
    if ready.level is not Severity.OK:
        return [replace(ready, what="counters")]  # an audit's finding has the name of an invariant there
    return [_ok("counters", "open for booking"), *(_unhealed(engine, client, settings) if engine is not None else [])]


def _unhealed(engine: Engine, client: redis.Redis, settings: Settings) -> list[Finding]:
    """Differences that an audit finds although a recompute has run, which should have put them right.

    Where recomputes are overdue all differences are reported, and that they are overdue. Raises NotReady, RedisError
    and SQLAlchemyError.
    """
    interval_seconds = settings.accounting.recompute_interval_seconds
    age_seconds = settings.accounting.in_flight_age
    _, seconds_since_mark = look_at_store(client)
    ledger = Ledger(client, owner="doctor")
    if seconds_since_mark is None or seconds_since_mark > RECOMPUTES_MISSED * interval_seconds:
        last = "there has been no recompute"
        if seconds_since_mark is not None:
            last = f"the last recompute was {seconds_since_mark:.0f} s ago"
        remedy = "`opencue-sched fleet`: a beat must lead, and a worker must live, for the counters to be put right"
        overdue = _warn("counters", f"{last}, and one is due every {interval_seconds:g} s", remedy)
        compared = [compare_procs(engine, ledger, age_seconds=age_seconds), compare_counters(ledger)]
        return [overdue, *_differences(compared)]
    last_recompute = last_found(client)

    def seen_by_recompute(contradictions: Contradictions) -> list[str]:
        return _seen_by_recompute(
            engine,
            client,
            contradictions,
            last_recompute,
            seconds_since_mark=seconds_since_mark,
            # A recompute judges an age by marks, of which there is one an interval.
            believed_lost_seconds=interval_seconds + age_seconds,
        )

    compared = [compare_procs(engine, ledger, age_seconds=age_seconds, select=seen_by_recompute)]
    if last_recompute.counters:
        compared.append(compare_counters(ledger, found_before=last_recompute.counters))
    remedy = "look for `recomput` in the workers' logs: a recompute saw this, and it is as it was"
    return [replace(finding, remedy=remedy) for finding in _differences(compared)]


def _differences(compared: Iterable[Finding]) -> Iterator[Finding]:
    """The findings of an audit that name offenders, as warnings of the doctor about counters."""
    for finding in compared:
        if finding.offenders:
            yield replace(finding, level=Severity.WARN, what="counters")


def _seen_by_recompute(
    engine: Engine,
    client: redis.Redis,
    contradictions: Contradictions,
    last_recompute: Found,
    *,
    seconds_since_mark: float,
    believed_lost_seconds: float,
) -> list[str]:
    """The ids of those contradictions that the last recompute saw, and left as they were.

    The recompute set its mark ``seconds_since_mark`` ago, and left what came up later to the next one. That a
    contradiction was there at the mark is known from a sign of its own for each sort:

    - A proc that the ledger lacks, or has with other amounts: the proc is older than the mark, and its show is
      imported. (The procs of any other show come into the ledger when it is imported.)
    - A ledger entry in flight that has no proc: it was booked ``believed_lost_seconds`` before the mark, or earlier. A
      recompute believes that a booking is lost only when it has seen it in flight for long.
    - Any other ledger entry that has no proc: the recompute itself found it without one (``last_recompute``), and the
      entry has not changed since. Where the recompute did not, the proc ended after the mark.
    """
    imported = imported_shows(client)
    procs = {row.pk_proc: row for row in ask(engine, proc_ages, list(contradictions))}
    redis_seconds = client.time()[0]

    def was_there(proc_id: str, record: Record | None) -> bool:
        proc = procs.get(proc_id)
        if proc is not None:
            return proc.seconds > seconds_since_mark and proc.pk_show in imported
        if record is None:
            return False
        in_flight_seconds = redis_seconds - record.booked_at if record.state is EntryState.IN_FLIGHT else 0.0
        lost = in_flight_seconds > seconds_since_mark + believed_lost_seconds
        return lost or last_recompute.entries.get(proc_id) == record.changed_seq

    return [proc_id for proc_id, (_, record) in contradictions.items() if was_there(proc_id, record)]
