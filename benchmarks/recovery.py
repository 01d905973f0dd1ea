"""How long each failure takes to be put right: of the accounting, of processes. Settings as shipped, one at a time.

Two parts make up a recovery: what a setting fixes (how often beat recomputes, how old a booking must be) and what the
machine needs then. ``at_most`` is the first, ``measured`` the second; ``whole`` was waited for in a fleet of a beat and
two workers in dry run, and begins at the worst moment, right after a recompute.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import redis
from pydantic import SecretStr
from rich.console import Console
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from benchmarks.figures import Spread
from benchmarks.pass_faults import Inject, a_crashed_booking, faults_of_others, faults_of_the_ledger
from benchmarks.workbench import environment_of
from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import StoreState, ensure_bootstrapped, store_state
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.entries import Booking
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import recompute
from opencue_sched.accounting.snapshot import entries_of
from opencue_sched.domain.errors import NotReady
from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import HostSpec, JobSpec, LayerSpec, ShowIds
from opencue_sched.embedded.fleet import Fleet
from opencue_sched.embedded.services import EmbeddedPostgres, EmbeddedRedis
from opencue_sched.operate.flip import CUEBOT_CACHE_SECONDS, flip_show
from opencue_sched.settings import Settings
from opencue_sched.store import proc_snapshot
from opencue_sched.store.engine import make_engine
from opencue_sched.store.schema import upgrade

PROCS = 2000
BURST = 4000
WORKERS = 2
ENVIRONMENT = {
    "OPENCUE_SCHED_RQD__DRY_RUN_MODE": "true",
    "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
    "OPENCUE_SCHED_COORDINATION__BEAT_METRICS_PORT": "0",
}
# So that nobody finds the frame without a proc, and runs it again.
_ENDED = text(
    "UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_frame = (SELECT pk_frame FROM proc WHERE pk_proc = :id)"
)
_POLL_SECONDS = 0.002
_WAIT_SECONDS = 300.0
_PING_SECONDS = 20.0
_STREAM_FRAMES = 600
_STREAM_SECONDS = 3.0

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Recovery:
    """One failure. Seconds; ``at_most`` is by a setting, named in ``fixed_by``."""

    phase: str
    fixed_by: str
    at_most: float
    measured: Spread | str
    whole: Spread | str
    rounds: int


class Site:
    """Stores and a fleet, and the books of one show with many procs."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        client: redis.Redis,
        postgres: EmbeddedPostgres,
        cache: EmbeddedRedis,
        fleet: Fleet,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.client = client
        self.postgres = postgres
        self.cache = cache
        self.fleet = fleet
        self.ledger: Ledger = make_ledger(engine, client, owner="benchmark")
        with engine.begin() as connection:
            farm = Farm(connection)
            self.show: ShowIds = farm.default_show()
            farm.hosts([HostSpec(cores=128, memory_gb=1024, hostname_tag=False) for _ in range(60)])
            self.big = farm.host(cores=10_000, memory_gb=100_000, hostname_tag=False)
            job = farm.job([LayerSpec(frames=PROCS)], show=self.show)
            self.procs = farm.run(job.frames, self.big, cores=1)
            self.folders = [job.folder_id, farm.folder(self.show, "aside")]
        self.sql("UPDATE subscription SET int_size = :burst, int_burst = :burst", burst=BURST * 100)
        self.job_id, self.job_key = job.id, keys.job(job.id)
        (self.sub_key,) = [keys.subscription(self.show.id, str(self.scalar("SELECT pk_alloc FROM subscription")))]

    def sql(self, statement: str, **parameters: object) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement), parameters)

    def scalar(self, statement: str, **parameters: object) -> object:
        with self.engine.connect() as connection:
            return connection.execute(text(statement), parameters).scalar()

    def hosts_report(self) -> None:
        """Nobody does in a dry run."""
        self.sql("UPDATE host_stat SET ts_ping = now()")
        self.sql("UPDATE proc SET ts_ping = now()")

    def delete(self, *, announced: bool) -> str:
        """Somebody deletes a proc; its id."""
        proc_id = self.procs.pop()
        with self.engine.begin() as connection:
            connection.execute(_ENDED, {"id": proc_id})
            if not announced:
                connection.execute(text("ALTER TABLE proc DISABLE TRIGGER opencue_sched_proc_released"))
            connection.execute(text("DELETE FROM proc WHERE pk_proc = :id"), {"id": proc_id})
            if not announced:
                connection.execute(text("ALTER TABLE proc ENABLE TRIGGER opencue_sched_proc_released"))
        return proc_id

    def booking(self) -> Booking:
        """One like those that run, under a new id."""
        with self.engine.connect() as connection:
            entry = next(iter(proc_snapshot.procs_by_id(connection, self.procs[:1])))
        packed = entries_of([entry])[entry.proc_id]
        record = next(r for r in self.ledger.records() if r.entry == packed)
        return Booking(str(uuid.uuid4()), record.booking.vertices, record.booking.cores)

    def book_as_cuebot(self) -> str:
        """Somebody else inserts a proc, without a word to the ledger; its id."""
        with self.engine.begin() as connection:
            farm = Farm(connection)
            layers = [LayerSpec()]
            spec = JobSpec(layers, show=self.show, name=f"theirs-{uuid.uuid4().hex}", os=None, paused=True)
            (job,) = farm.jobs([spec])
            return farm.run(job.frames, self.big, cores=1)[0]

    def has_entry(self, proc_id: str) -> bool:
        return bool(self.client.hexists(keys.LEDGER, proc_id))

    def cores(self) -> int:
        return int(str(self.client.hget(self.job_key, "int_cores")))

    def new_job(self, frames: int = 1) -> str:
        with self.engine.begin() as connection:
            layers = [LayerSpec(frames=frames)]
            (job,) = Farm(connection).jobs([JobSpec(layers, show=self.show, name=f"job-{uuid.uuid4().hex}", os=None)])
        return job.id

    def count(self, job_id: str) -> int:
        return int(str(self.scalar("SELECT count(*) FROM proc WHERE pk_job = :job", job=job_id)))

    def books_again(self) -> None:
        """Returns when a new job has a proc."""
        job = until(lambda: attempt(self.new_job))
        until(lambda: attempt(lambda: self.scalar("SELECT count(*) FROM proc WHERE pk_job = :job", job=job)))


def run_recovery(parts: tuple[str, ...], *, rounds: int, console: Console) -> list[Recovery]:
    """The parts asked for, one after the other on one site."""
    results: list[Recovery] = []
    with _site(console) as site:
        for part in parts:
            console.print(f"recovery: {part}")
            results += PARTS[part](site, rounds)
    return results


def events(site: Site, rounds: int) -> Iterator[Recovery]:
    """What is announced, and what a commit finds out."""

    def announced_release() -> float:
        began = time.monotonic()
        proc_id = site.delete(announced=True)
        until(lambda: not site.has_entry(proc_id))
        return time.monotonic() - began

    def cap(cores: int, *, quietly: bool = False) -> None:
        with site.engine.begin() as connection:
            if quietly:
                connection.execute(text("SET LOCAL opencue_sched.quiet_caps = 'on'"))
            connection.execute(text("UPDATE subscription SET int_burst = :burst"), {"burst": cores * 100})

    def lowered() -> float:
        began = time.monotonic()
        cap(10)
        until(lambda: site.client.hget(site.sub_key, "burst") == "10")
        seconds = time.monotonic() - began
        cap(BURST)
        return seconds

    def lowered_quietly() -> float:
        """In the middle of a job's bookings: how long after the edit's commit one is still committed."""
        job = site.new_job(_STREAM_FRAMES)
        until(lambda: site.count(job) > _STREAM_FRAMES // 5)
        cap(10, quietly=True)
        began = last = time.monotonic()
        seen = site.count(job)
        while time.monotonic() < began + _STREAM_SECONDS:
            if (now := site.count(job)) != seen:
                seen, last = now, time.monotonic()
        assert seen < _STREAM_FRAMES, "the job was over before the cap was lowered"
        cap(BURST)
        until(lambda: site.count(job) == _STREAM_FRAMES)
        return last - began

    many = max(20, rounds)
    yield recovery_of("a release, announced", "-", 0, [announced_release() for _ in range(many)])
    yield recovery_of("a cap lowered, announced", "-", 0, [lowered() for _ in range(many)])
    yield recovery_of("a cap lowered without a word", "-", 0, [lowered_quietly() for _ in range(rounds)])
    for managed, fixed_by, at_most in (
        (False, "accounting.commit_deadline", site.settings.accounting.commit_deadline),
        (True, "30 s, with Cuebots", CUEBOT_CACHE_SECONDS),
    ):
        own, whole = [], []
        for number in range(rounds):
            seconds = _flip(site, managed=managed, wait=0.0)
            own.append(seconds)
            if number < rounds - 1:
                _flip(site, managed=not managed, wait=0.0)
        _flip(site, managed=not managed, wait=0.0)
        whole.append(_flip(site, managed=managed, wait=at_most))
        yield recovery_of(f"a show flipped {'on' if managed else 'off'}", fixed_by, at_most, own, whole)
    site.books_again()


def _flip(site: Site, *, managed: bool, wait: float) -> float:
    began = time.monotonic()
    age = site.settings.accounting.in_flight_age
    flip = flip_show(site.engine, site.ledger, site.show.id, managed=managed, wait_seconds=wait, age_seconds=age)
    assert flip.changed
    return time.monotonic() - began


def passes(site: Site, rounds: int) -> Iterator[Recovery]:
    """What the recompute finds: the pass itself, and how long until beat's own pass has done it."""
    accounting = site.settings.accounting
    every, age = accounting.recompute_interval_seconds, accounting.in_flight_age
    faults = {**faults_of_the_ledger(site), **faults_of_others(site)}
    own: dict[str, list[float]] = {name: [] for name in faults}
    for name, inject in faults.items():
        for _ in range(rounds):
            right = inject()
            began = time.monotonic()
            recompute(site.engine, site.ledger, age_seconds=age)
            assert right(), name
            own[name].append(time.monotonic() - began)

    # First, because what it would have booked is made from an entry that is right.
    died = "a worker that died before its commit"
    whole = _by_beat(site, {died: a_crashed_booking(site), **faults})
    for name in faults:
        yield recovery_of(name, "recompute_interval_seconds", every, own[name], [whole[name]])
    yield recovery_of(died, "2 x the interval, and in_flight_age", 2 * every, [], [whole[died]])


def _by_beat(site: Site, injections: Mapping[str, Inject]) -> dict[str, float]:
    """All faults at once, right after a pass of the fleet's own; how long each stayed."""
    last = site.client.get(keys.RECOMPUTED_AT)
    until(lambda: site.client.get(keys.RECOMPUTED_AT) != last)
    began, waiting = {}, {}
    for name, inject in injections.items():
        waiting[name], began[name] = inject(), time.monotonic()
    seconds = {}
    while waiting:
        for name in [name for name, right in waiting.items() if right()]:
            seconds[name] = time.monotonic() - began[name]
            del waiting[name]
        assert time.monotonic() < min(began.values()) + _WAIT_SECONDS, f"not put right: {sorted(waiting)}"
        time.sleep(0.02)
    return seconds


def stores(site: Site, rounds: int) -> Iterator[Recovery]:
    """Redis and PostgreSQL go away and come back."""
    from benchmarks import takeover as killed

    age = site.settings.accounting.in_flight_age
    for name, keeping in (("Redis restarted, empty", False), ("Redis restarted with old data", True)):
        own, whole = [], []
        for _ in range(rounds):
            if keeping:
                site.client.save()
                site.client.hincrby(site.job_key, "int_cores", 3)
            began = time.monotonic()
            site.cache.restart()
            until(lambda: attempt(lambda: store_state(site.client) is StoreState.OPEN))
            opened = time.monotonic() - began
            assert site.cores() == len(site.procs), "filled with what proc says"
            site.books_again()
            own.append(opened - age)
            whole.append(time.monotonic() - began)
        yield recovery_of(name, "in_flight_age", age, own, whole)
    yield killed.fillers_killed(site, rounds)
    for mode in ("fast", "immediate"):
        whole = []
        for _ in range(rounds):
            began = time.monotonic()
            site.postgres.restart(mode)
            down = time.monotonic() - began
            site.books_again()
            whole.append(time.monotonic() - began - down)
        yield recovery_of(f"PostgreSQL restarted ({mode}), from its return", "-", 0, whole)


def takeover(site: Site, rounds: int) -> Iterator[Recovery]:
    """Processes are killed, and others go on."""
    from benchmarks import takeover as measured

    return measured.takeover(site, rounds)


PARTS: dict[str, Callable[[Site, int], Iterator[Recovery]]] = {
    "events": events,
    "passes": passes,
    "stores": stores,
    "takeover": takeover,
}


def start_beat(fleet: Fleet, name: str) -> None:
    """A beat whose instance is called as its process is."""
    fleet.beat(name, OPENCUE_SCHED_INSTANCE=name)


def recovery_of(
    phase: str, fixed_by: str, at_most: float, own: list[float], whole: list[float] | None = None
) -> Recovery:
    measured = Spread.of(own, digits=3) if own else ""
    waited = Spread.of(whole, digits=1) if whole else ""
    return Recovery(phase, fixed_by, at_most, measured, waited, max(len(own), len(whole or ())))


@contextlib.contextmanager
def _site(console: Console) -> Iterator[Site]:
    """The stores, the farm, and a fleet at its work."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opencue-sched-recovery-")))
        postgres = stack.enter_context(EmbeddedPostgres())
        cache = stack.enter_context(EmbeddedRedis())
        upgrade(postgres.url)
        urls = {"OPENCUE_SCHED_DATABASE_URL": postgres.url, "OPENCUE_SCHED_REDIS_URL": cache.url}
        with environment_of({**urls, **ENVIRONMENT}):
            settings = Settings(database_url=SecretStr(postgres.url))
        engine = make_engine(settings, application_name="opencue-sched-bench", pool_size=4)
        stack.callback(engine.dispose)
        client = redis.Redis.from_url(cache.url, decode_responses=True, socket_timeout=30)
        stack.callback(client.close)
        fleet = stack.enter_context(Fleet({**urls, **ENVIRONMENT}, directory))
        site = Site(settings, engine, client, postgres, cache, fleet)
        ensure_bootstrapped(engine, site.ledger, wait_age=0)
        for number in range(1, WORKERS + 1):
            fleet.worker(f"worker{number}")
        start_beat(fleet, "beat1")
        stack.enter_context(_reporting(site))
        site.books_again()
        console.print(f"a fleet with {PROCS} procs is at work")
        yield site


@contextlib.contextmanager
def _reporting(site: Site) -> Iterator[None]:
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(_PING_SECONDS):
            attempt(site.hosts_report)

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def attempt(work: Callable[[], _Result]) -> _Result | None:
    """What ``work`` answers; None while a store is away."""
    try:
        return work()
    except (DBAPIError, redis.RedisError, NotReady):
        return None


def until(check: Callable[[], _Result | None]) -> _Result:
    """The first answer that is not empty."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        if answer := check():
            return answer
        time.sleep(_POLL_SECONDS)
    raise TimeoutError("did not happen in time")
