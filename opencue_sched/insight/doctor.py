"""Is everything there that a scheduler needs? Each finding says what was looked at and, if it is wrong, what to do.

FAIL is what must be put right before frames are booked and launched; WARN is what somebody probably did not mean.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import redis
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting.bootstrap import StoreState, store_state
from opencue_sched.accounting.show_handover import check_release_feed
from opencue_sched.coordination.leader import ONE_REDIS
from opencue_sched.coordination.names import LeaderKeys, QueueType, beat_role
from opencue_sched.coordination.presence import list_members
from opencue_sched.dispatch.clusters import scoped_facilities
from opencue_sched.errors import SchedulerError
from opencue_sched.insight.explain import cluster_postings, cluster_words, listed
from opencue_sched.insight.stores import check_postgresql, check_redis
from opencue_sched.settings import Settings
from opencue_sched.store import waiting
from opencue_sched.store.engine import OURS
from opencue_sched.store.fences import PersistentFences
from opencue_sched.store.jobs import quarantined_jobs
from opencue_sched.store.pending import facility_ids, fetch_waiting_work, holds_of_limits, limits_meant_otherwise
from opencue_sched.store.schema import REVISION, SchemaFacts, check_schema

OLDEST_POSTGRESQL = 130_000
CLOCK_SECONDS = 2.0
"""Clocks further apart than this make ages and time-outs wrong enough to be noticed."""

RQDS_PROBED = 20
PROBE_SECONDS = 2.0

_LISTENS = "it hears its own machine only, unless OPENCUE_SCHED_RELEASE__HOST says where to listen"


class Severity(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One thing looked at. ``remedy`` is empty when nothing is to be done."""

    what: str
    level: Severity
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[HealthCheck, ...]

    @property
    def failed(self) -> bool:
        """Whether something must be put right."""
        return any(finding.level is Severity.FAIL for finding in self.findings)

    def lines(self) -> list[str]:
        """One line each; what to do on a line of its own."""
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.level.value:<5} {finding.what:<14} {finding.text}")
            if finding.remedy:
                lines.append(f"{'':<21}-> {finding.remedy}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        return {"failed": self.failed, "findings": [asdict(finding) for finding in self.findings]}


def _ok(what: str, text: str) -> HealthCheck:
    return HealthCheck(what, Severity.OK, text)


def _warn(what: str, text: str, remedy: str = "") -> HealthCheck:
    return HealthCheck(what, Severity.WARN, text, remedy)


def _fail(what: str, text: str, remedy: str = "") -> HealthCheck:
    return HealthCheck(what, Severity.FAIL, text, remedy)


def diagnose(
    engine: Engine, client: redis.Redis, settings: Settings, *, clock: Callable[[], float] = time.time
) -> Diagnosis:
    """Look at everything once. Never raises for what is wrong with the farm; what cannot be asked is a finding."""
    findings = [*_database(engine, settings, clock), *_redis(client, engine, settings, clock)]
    return Diagnosis(tuple(findings))


def _database(engine: Engine, settings: Settings, clock: Callable[[], float]) -> Iterator[HealthCheck]:
    try:
        check_postgresql(engine)
    except SchedulerError as error:
        yield _fail("PostgreSQL", str(error))
        return
    with engine.connect() as connection:
        yield from _server(connection, engine, clock)
        try:
            facts = check_schema(connection)
        except SchedulerError as error:
            yield _fail("schema", str(error))
            return
        yield _schema(facts)
        if not waiting.guard_stands(connection):
            text = "our triggers on proc are missing or disabled: a Cuebot's retries and redirects book managed shows"
            remedy = "if they are disabled, ALTER TABLE proc ENABLE TRIGGER"
            yield _warn("guard", text, remedy)
        yield from _limits(connection, facts)
        yield from _farm(connection, settings)
        yield from _quarantine(connection)
        yield from _two_redis(engine, settings)
        yield from _rqds(connection, settings)
    yield from _release_feed(engine, settings, facts)


def _server(connection: Connection, engine: Engine, clock: Callable[[], float]) -> Iterator[HealthCheck]:
    asked = clock()
    server = waiting.server(connection)
    answered = clock()
    where = engine.url.render_as_string(hide_password=True)
    version = f"{server.version // 10_000}.{server.version % 10_000}"
    if server.version < OLDEST_POSTGRESQL:
        yield _fail("PostgreSQL", f"{where} is version {version}", "PostgreSQL 13 or newer is needed")
    else:
        yield _ok("PostgreSQL", f"{where} answers, version {version}")
    if not server.client.startswith(OURS):
        text = f"knows this program as {server.client!r}: the guard on procs would refuse every booking"
        remedy = f"the connection pool in between must pass on an application_name that begins with {OURS}"
        yield _fail("PostgreSQL", text, remedy)
    yield _clock("PostgreSQL", server.now.timestamp(), asked, answered)


def _clock(whose: str, theirs: float, asked: float, answered: float) -> HealthCheck:
    """Compare a store's clock with ours. It was read between ``asked`` and ``answered`` (epoch seconds): only what lies
    outside of these is a difference."""
    what, ahead = f"clock of {whose}", max(0.0, theirs - answered) + min(0.0, theirs - asked)
    if abs(ahead) > CLOCK_SECONDS:
        side = "ahead of" if ahead > 0 else "behind"
        text = f"{abs(ahead):.1f} s {side} this machine's"
        return _warn("clocks", f"{what} is {text}", "run a time service (NTP) on all machines")
    return _ok("clocks", f"{what} agrees with this machine's")


def _schema(facts: SchemaFacts) -> HealthCheck:
    made = "made by this scheduler" if facts.origin == "opencue-sched" else "made by Cuebot"
    extra = [
        word
        for word, there in (
            ("start-after times", facts.has_start_after),
            ("queued frame history", facts.has_frame_history_queue),
            ("limits of several kinds", bool(facts.limit_columns)),
        )
        if there
    ]
    text = f"{made}" + (f", with {listed(extra)}" if extra else "")
    if facts.revision != REVISION:
        text += f"; our tables and triggers are of revision {facts.revision}, and this program is of {REVISION}"
        return _warn("schema", text, "upgrade this program as well")
    return _ok("schema", f"{text}; our tables and triggers are there")


def _limits(connection: Connection, facts: SchemaFacts) -> Iterator[HealthCheck]:
    """What a Cuebot after V47 says of limits, and this scheduler does not follow."""
    for limit in limits_meant_otherwise(connection, facts.limit_columns):
        words = listed([f"{column} {word}" for column, word in sorted(limit.says.items())])
        text = f"{limit.name} is marked {words}; here it bounds running frames, always"
        remedy = f"`opencue-sched limit set {limit.name} MAX` with a MAX that is right for frames"
        yield _warn("limits", text, remedy)
    holds = holds_of_limits(connection)
    if holds:
        text = f"a Cuebot notes in {listed(holds)} who holds a limit; frames of managed shows are not noted there"
        yield _warn("limits", text, "give managed and unmanaged shows limits of their own")


def _farm(connection: Connection, settings: Settings) -> Iterator[HealthCheck]:
    facility = settings.scheduler.facility
    if facility is not None and not facility_ids(connection, facility):
        yield _fail(
            "facility",
            f"there is no facility {facility!r}, so nothing is ever booked",
            "set OPENCUE_SCHED_SCHEDULER__FACILITY to the name of one, or leave it out",
        )
    shows = waiting.managed_shows(connection)
    if not shows:
        yield _warn(
            "shows",
            "no show is managed by this scheduler",
            "`opencue-sched show managed NAME on` hands one over",
        )
    else:
        names = [show.name for show in shows]
        yield _ok("shows", f"{len(shows)} managed by this scheduler: {listed(names)}")
    for show in shows:
        if not show.bookable:
            yield _warn("shows", f"{show.name} is managed, but paused, not active or not to be booked")
        elif show.largest_burst <= 0:
            remedy = f"`opencue-sched subscription create {show.name} ALLOCATION CORES`, or raise a burst"
            yield _warn("shows", f"{show.name} has no subscription with a burst", remedy)
    yield _hosts(waiting.hosts(connection, staleness=settings.host_cache.host_staleness_threshold))


def _hosts(hosts: waiting.Hosts) -> HealthCheck:
    text = (
        f"{hosts.total} in {hosts.allocations} allocations: {hosts.up} up, {hosts.open} of them open, "
        f"{hosts.fresh} of those heard of lately"
    )
    if not hosts.total:
        remedy = f"start `opencue-sched report-service` (or a Cuebot) and point RQDs at it; {_LISTENS}"
        return _warn("hosts", "no host has ever reported", remedy)
    if not hosts.fresh:
        remedy = f"do the RQDs reach the report service? {_LISTENS}"
        return _warn("hosts", f"{text}; none can be used", remedy)
    return _ok("hosts", text)


def _quarantine(connection: Connection) -> Iterator[HealthCheck]:
    jobs = quarantined_jobs(connection)
    if jobs:
        names = listed([job.job_name or job.job_id for job in jobs])
        remedy = "`opencue-sched explain JOB` says why; they are tried again by themselves"
        yield _warn("quarantine", f"jobs left alone for a while: {names}", remedy)


def _two_redis(engine: Engine, settings: Settings) -> Iterator[HealthCheck]:
    keys = LeaderKeys(settings.coordination.namespace, beat_role(settings.scheduler.facility))
    if PersistentFences(engine).leader(keys.name).two_redis:
        text = f"beats of two Redis want to lead in this database and namespace {keys.ns!r}; one stands by"
        yield _fail("beats", text, ONE_REDIS)


def _rqds(connection: Connection, settings: Settings) -> Iterator[HealthCheck]:
    addresses = settings.rqd.addresses
    malformed = [f"{host}={address}" for host, address in addresses.items() if _split(address) is None]
    if malformed:
        remedy = "OPENCUE_SCHED_RQD__ADDRESSES maps host names to address:port"
        yield _fail("RQD", f"not address:port: {listed(malformed)}", remedy)
    unknown = waiting.unknown_hosts(connection, list(addresses))
    if unknown:
        yield _warn("RQD", f"rqd.addresses names hosts that have never reported: {listed(unknown)}")
    if settings.rqd.dry_run_mode:
        remedy = "OPENCUE_SCHED_RQD__DRY_RUN_MODE=false for a farm that renders"
        yield _warn("RQD", "dry run: frames are booked and never launched", remedy)
        return
    names = waiting.recent_hosts(connection, RQDS_PROBED)
    if names:
        yield _probed(names, settings)


def _probed(names: list[str], settings: Settings) -> HealthCheck:
    """Whether an RQD listens at each host's address."""
    from opencue_sched.dispatch.rqd import RqdChannels  # imports grpc, which `explain` and `job list` do without

    channels = RqdChannels(settings.rqd)
    addresses = {name: channels.address(name) for name in names}
    channels.close()
    with ThreadPoolExecutor(len(names), thread_name_prefix="probe") as threads:
        answers = dict(zip(names, threads.map(_listens, addresses.values()), strict=True))
    silent = [f"{name} ({addresses[name]})" for name in names if not answers[name]]
    text = f"{len(names) - len(silent)} of {len(names)} hosts that are up accept connections"
    if not silent:
        return _ok("RQD", text)
    level = Severity.WARN if len(silent) < len(names) else Severity.FAIL
    remedy = "name resolution, firewall, or OPENCUE_SCHED_RQD__ADDRESSES / OPENCUE_SCHED_RQD__GRPC_PORT"
    return HealthCheck("RQD", level, f"{text}; not {listed(silent)}", remedy)


def _listens(address: str) -> bool:
    place = _split(address)
    if place is None:
        return False
    try:
        with socket.create_connection(place, timeout=PROBE_SECONDS):
            return True
    except OSError:
        return False


def _split(address: str) -> tuple[str, int] | None:
    """Host and port of ``address:port`` or ``[v6]:port``; None for anything else."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    return (host, int(port)) if host and port.isascii() and port.isdigit() and 0 < int(port) < 65536 else None


def _release_feed(engine: Engine, settings: Settings, facts: SchemaFacts) -> Iterator[HealthCheck]:
    feed = settings.accounting.release_feed
    check = check_release_feed(engine, feed)
    if check.misconfigured:
        remedy = "`opencue-sched migrate` adds the trigger; then OPENCUE_SCHED_ACCOUNTING__RELEASE_FEED=proc-trigger"
        yield _fail("release feed", check.message, remedy)
    elif feed == "cuebot-redis" and facts.origin == "opencue-sched":
        text = f"{feed}, but this database was made by this scheduler: no Cuebot publishes anything"
        yield _fail("release feed", text, "leave OPENCUE_SCHED_ACCOUNTING__RELEASE_FEED out")
    else:
        yield _ok("release feed", check.message)


def _redis(
    client: redis.Redis, engine: Engine, settings: Settings, clock: Callable[[], float]
) -> Iterator[HealthCheck]:
    try:
        check_redis(client, settings)
        info: Any = client.info()
        asked = clock()
        seconds, microseconds = client.time()
        answered = clock()
        state = store_state(client)
        members = list_members(client, settings.coordination.namespace)
        held = cluster_postings(client, settings).skipped()
    except (SchedulerError, redis.RedisError) as error:
        yield _fail("Redis", str(error))
        return
    yield _ok("Redis", f"version {info.get('redis_version')}, does not evict")
    if str(info.get("cluster_enabled", 0)) == "1":
        remedy = "use a single Redis, or Sentinel: counters change together or not at all"
        yield _fail("Redis", "runs in cluster mode, which the counters cannot use", remedy)
    if info.get("role") not in (None, "master"):
        remedy = "name the master, or Sentinels, in OPENCUE_SCHED_REDIS_URL"
        yield _fail("Redis", f"is a {info.get('role')}: nothing can be written", remedy)
    yield _clock("Redis", int(seconds) + int(microseconds) / 1e6, asked, answered)
    if state is StoreState.OPEN:
        yield _ok("counters", "open for booking")
    else:
        text = f"{state.value}: nothing is booked before a worker has filled them from PostgreSQL"
        yield _warn("counters", text, "start a worker: `celery -A opencue_sched worker`")
    for it in held:
        yield _warn("clusters", cluster_words(it))
    workers = members.of(QueueType.DISPATCH.value)
    if workers:
        yield _ok("workers", f"{len(workers)} alive; `opencue-sched fleet` says more")
        return
    remedy = "`celery -A opencue_sched worker` and `... beat`"
    frames = _waiting_frames(engine, settings)
    if frames:
        text = f"none is alive, and {frames} frames of managed shows wait"
        yield _fail("workers", text, remedy)
    else:
        yield _warn("workers", "none is alive", remedy)


def _waiting_frames(engine: Engine, settings: Settings) -> int:
    """Frames that wait and may be booked; 0 where that cannot be asked, which is a finding about the database."""
    try:
        with engine.connect() as connection:
            facts = check_schema(connection)
            work = fetch_waiting_work(connection, scoped_facilities(connection, settings), facts)
    except (SchedulerError, SQLAlchemyError):
        return 0
    return sum(one.frames for one in work)
