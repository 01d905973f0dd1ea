"""Where recoveries are measured: stores and a fleet at its work, and the books of one show with many procs."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import redis
from pydantic import SecretStr
from rich.console import Console
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from benchmarks.figures import Spread
from benchmarks.workbench import environment_of
from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.keys import Booking, unpack_entry
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import entries_of
from opencue_sched.clients.postgres import make_engine
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobSpec, LayerSpec, ShowIds
from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.embedded.servers.services import EmbeddedPostgres, EmbeddedRedis
from opencue_sched.errors import NotReady
from opencue_sched.settings import Accounting, Settings
from opencue_sched.store import accounting
from opencue_sched.store.schema import upgrade

PROCS = 2000
BURST = 4000
WORKERS = 2
ENVIRONMENT = {
    "OPENCUE_SCHED_RQD__DRY_RUN_MODE": "true",
    "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
}
# So that nobody finds the frame without a proc, and runs it again.
_ENDED = text(
    "UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_frame = (SELECT pk_frame FROM proc WHERE pk_proc = :id)"
)
_POLL_SECONDS = 0.002
WAIT_SECONDS = 300.0
_PING_SECONDS = 20.0

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


def recovery_of(
    phase: str, fixed_by: str, at_most: float, own: list[float], whole: list[float] | None = None
) -> Recovery:
    measured = Spread.of(own, digits=3) if own else ""
    waited = Spread.of(whole, digits=1) if whole else ""
    return Recovery(phase, fixed_by, at_most, measured, waited, max(len(own), len(whole or ())))


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
        self.ledger: Ledger = make_ledger(engine, client, owner="benchmark", accounting=Accounting())
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
            (packed,) = entries_of(accounting.procs(connection, proc_ids=self.procs[:1])).values()
        record = next(r for r in self.ledger.records() if r.entry == packed)
        return replace(unpack_entry(str(uuid.uuid4()), record.entry), gpus=0)

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


@contextlib.contextmanager
def site_at_work(console: Console) -> Iterator[Site]:
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
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if answer := check():
            return answer
        time.sleep(_POLL_SECONDS)
    raise TimeoutError("did not happen in time")


def start_beat(fleet: Fleet, name: str) -> None:
    """A beat whose instance is called as its process is."""
    fleet.beat(name, OPENCUE_SCHED_INSTANCE=name)
