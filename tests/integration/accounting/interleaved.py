"""One interleaving, two players: production code as it stands, and the way it was done before (interleaved_naive.py).

A test says who goes on up to which moment. Both players run against the same PostgreSQL and Redis, one boundary at a
time (stepping.py), and meet the same moments by name.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import psycopg2
import pytest
from sqlalchemy import Engine, text

from opencue_sched.accounting import bootstrap, keys, reconcile
from opencue_sched.accounting import caps as caps_module
from opencue_sched.accounting.bootstrap import ensure_bootstrapped, server_run_id
from opencue_sched.accounting.caps import make_ledger, reseed_limits
from opencue_sched.accounting.entries import Booking
from opencue_sched.accounting.inventory import drift, take_stock
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import recompute
from opencue_sched.accounting.sightings import Sightings
from opencue_sched.accounting.snapshot import read_snapshot
from opencue_sched.accounting.store_epoch import Epoch
from opencue_sched.coordination.permits import LayerPermits
from opencue_sched.dispatch.channels import RqdChannels
from opencue_sched.dispatch.cluster_pass import PassRunner
from opencue_sched.dispatch.commit import compensate
from opencue_sched.dispatch.hosts import HostFeed
from opencue_sched.dispatch.rest import LayerRest
from opencue_sched.dispatch.settle import Settlement
from opencue_sched.domain.cluster import Cluster, ClusterKind
from opencue_sched.domain.farm import Vertices
from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import AllocIds, JobIds, LayerSpec
from opencue_sched.operate.flip import hand_back, hand_over
from opencue_sched.placement.changes import HostChanges
from opencue_sched.settings import Settings
from opencue_sched.store.schema import check_schema
from tests.integration.accounting.stepped_store import grow_older
from tests.integration.accounting.stepping import Actor, Clock, SteppedRedis, boundary, current

BURST = 4
"""Cores of the subscription; every frame takes one."""

AGE, LONGER = 40.0, 60

# Moments. A worker: planned and about to book; accepted by the counters; its transaction is to end; its launch failed
# and what undoes it is written but not committed. A recompute: the proc table was read. A loader: caps were read.
BOOK, BOOKED, COMMIT, UNDOING, SNAPSHOT, CAPS_READ = "book", "booked", "COMMIT", "undoing", "snapshot", "caps read"

# Ways to break.
OVER_BOOKED, DRIFTED, STARVED = "more runs than the cap", "off for good", "nothing more starts although there is room"


class Figures(NamedTuple):
    """Cores of the watched vertex: what the proc table holds, each proc rounded up, and what the counter says."""

    running: int
    counted: int


@dataclass
class Watched:
    """The vertex whose figures a test looks at: a folder's, or else that of the show's subscription to ``alloc``."""

    folder: str = ""
    alloc: str = ""


def until(actor: Actor, moment: str) -> Actor:
    """Let it go on to this moment."""
    while actor.boundary != moment:
        assert actor.step(), f"{actor.name} ended before {moment!r}"
    return actor


def finish(actor: Actor) -> Any:
    """Let it go on to its end."""
    while actor.step():
        pass
    return actor.result


class Side(ABC):
    """A managed show with a subscription of BURST cores, on one large host; and who accounts for it."""

    ours: ClassVar[bool]
    zero_baseline = True
    guarded = True
    guards_caps = False

    def __init__(self, engine: Engine, client: SteppedRedis, clock: Clock, settings: Settings) -> None:
        self.engine, self.client, self.clock, self.settings = engine, client, clock, settings
        self.actors: list[Actor] = []
        self.jobs: list[JobIds] = []
        self.launches_fail = False
        with engine.begin() as connection:
            farm = Farm(connection)
            self.alloc = farm.alloc("general")
            self.show = farm.show("show")
            farm.subscription(self.show, self.alloc, size=BURST)
            self.host = farm.host(cores=64, memory_gb=256, alloc=self.alloc)
        self.watched = Watched(alloc=self.alloc.id)
        _lose_answers(engine)

    # The farm

    def submit(self, frames: int = 1, *, folder: str | None = None) -> JobIds:
        """A job of so many waiting frames of one core."""
        with self.engine.begin() as connection:
            layers = [LayerSpec(frames=frames, threadable=False)]
            name = f"job{len(self.jobs)}"
            self.jobs.append(Farm(connection).job(layers, show=self.show, name=name, folder_id=folder))
        return self.jobs[-1]

    def start(self, job: JobIds, *, cores: float = 1) -> list[str]:
        """All frames of a job run, started by somebody who tells no counter."""
        with self.engine.begin() as connection:
            return Farm(connection).run(job.frames, self.host, cores=cores)

    def run(self, frames: int, **how: Any) -> list[str]:
        """So many frames run, and are counted."""
        procs = self.start(self.submit(frames, **how))
        finish(self.load_caps())
        finish(self.recompute())
        return procs

    def folder(self, max_cores: float) -> str:
        with self.engine.begin() as connection:
            return Farm(connection).folder(self.show, f"folder{uuid.uuid4().hex[:4]}", max_cores=max_cores)

    def subscribe(self, tag: str, burst: float) -> AllocIds:
        """A subscription to another allocation."""
        with self.engine.begin() as connection:
            farm = Farm(connection)
            alloc = farm.alloc(tag)
            farm.subscription(self.show, alloc, size=burst)
        return alloc

    def set_burst(self, cores: int) -> None:
        """As somebody does it in psql: nobody is told."""
        self.sql("UPDATE subscription SET int_burst = :burst WHERE pk_alloc = :a", burst=cores * 100, a=self.alloc.id)

    def end(self, proc_id: str) -> None:
        """The proc is deleted; the word of it is another matter."""
        self.sql("DELETE FROM proc WHERE pk_proc = :id", id=proc_id)

    def set_managed(self, managed: bool) -> None:
        self.sql("UPDATE show SET b_scheduler_managed = :managed", managed=managed)

    def cuebot_fills(self) -> None:
        """A Cuebot starts whatever its own table has room for."""
        take = text("UPDATE subscription SET int_cores = int_cores + 100 WHERE int_cores + 100 <= int_burst")
        while True:
            with self.engine.begin() as connection:
                if not connection.execute(take).rowcount:
                    return
            self.start(self.submit())

    def sql(self, statement: str, **parameters: object) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement), parameters)

    def scalar(self, statement: str, **parameters: object) -> Any:
        with self.engine.begin() as connection:
            return connection.execute(text(statement), parameters).scalar_one()

    # What is seen of it

    def procs(self) -> list[str]:
        with self.engine.begin() as connection:
            return list(connection.execute(text("SELECT pk_proc FROM proc ORDER BY ts_booked")).scalars())

    def figures(self) -> Figures:
        watched = self.watched
        running = self.scalar(_RUNNING, folder=watched.folder or "%", alloc=watched.alloc or "%")
        return Figures(int(running), self.counted())

    @property
    def key(self) -> str:
        """The key of the watched vertex."""
        watched = self.watched
        return keys.folder(watched.folder) if watched.folder else keys.subscription(self.show.id, watched.alloc)

    def actor(self, name: str, work: Callable[[], object]) -> Actor:
        self.actors.append(Actor(name, work))
        return self.actors[-1]

    def check(self, *, ours: Figures, naive: Figures, breaks: str, cap: int = BURST) -> None:
        """Ours: exactly these figures, within the cap, and in the end exact. Naive: those, and broken so."""
        figures = self.figures()
        assert figures == (ours if self.ours else naive)
        self.settle_down()
        after = self.figures()
        if self.ours:
            assert figures.running <= cap
            self.check_exact()
            assert after.counted == after.running == figures.running
        elif breaks == OVER_BOOKED:
            assert figures.running > cap
        elif breaks == DRIFTED:
            assert after.counted != after.running
        else:
            self.submit()
            finish(self.worker())
            assert self.figures().running == figures.running < min(cap, ours.running)

    def check_exact(self) -> None:
        """Production code only: the ledger is the proc table, and each counter the sum of its entries."""

    # Who accounts for it

    @abstractmethod
    def worker(self) -> Actor:
        """A process that books and starts what waits."""

    @abstractmethod
    def recompute(self) -> Actor: ...

    @abstractmethod
    def load_caps(self) -> Actor:
        """The periodic reseed of all caps."""

    @abstractmethod
    def release(self, proc_id: str) -> None:
        """The word that a proc is deleted arrives."""

    @abstractmethod
    def stir(self) -> None:
        """Something is booked and given back."""

    @abstractmethod
    def hand_over(self, meanwhile: Callable[[], object]) -> None:
        """The show becomes managed; ``meanwhile`` happens before everybody knows."""

    @abstractmethod
    def hand_back(self, meanwhile: Callable[[], object]) -> None: ...

    @abstractmethod
    def refill(self, meanwhile: Callable[[], object]) -> None:
        """Redis was emptied: somebody notices, and has it filled again."""

    @abstractmethod
    def settle_down(self) -> None:
        """All is quiet, and every repair has its turn."""

    @abstractmethod
    def counted(self) -> int: ...

    @abstractmethod
    def burst(self) -> float:
        """The burst as the counters know it."""

    def pass_an_age(self) -> None:
        """So much time that no booking of before can still be committed."""


class Ours(Side):
    """Passes, recomputes, reseeds, flips and bootstraps of production code; each worker with objects of its own."""

    ours = True

    def __init__(self, engine: Engine, client: SteppedRedis, clock: Clock, settings: Settings) -> None:
        super().__init__(engine, client, clock, settings)
        client.set(keys.EPOCH, Epoch.new(server_run_id(client)).text)
        self.ledger = make_ledger(engine, client, owner="beat")
        self.sightings = Sightings(client, clock=clock.monotonic, boot="test")
        with engine.connect() as connection:
            self.facts = check_schema(connection)

    def worker(self) -> Actor:
        name = f"worker{len(self.actors)}"
        addresses = {self.host.name: "127.0.0.1:1"} if self.launches_fail else {}
        rqd = self.settings.rqd.model_copy(update={"dry_run_mode": not self.launches_fail, "addresses": addresses})
        settings = self.settings.model_copy(update={"rqd": rqd})
        cluster = Cluster(self.alloc.facility_id, self.show.id, ClusterKind.ALLOC, (self.alloc.tag,), self.alloc.id)

        def one_pass() -> object:
            channels = RqdChannels(rqd)
            try:
                return self._runner(name, channels, settings).run(cluster, alive=lambda: True)
            finally:
                channels.close()

        return self.actor(name, one_pass)

    def _runner(self, name: str, channels: RqdChannels, settings: Settings) -> PassRunner:
        ledger = make_ledger(self.engine, self.client, owner=name)
        changes = HostChanges(self.client, "cue")
        runner = PassRunner(
            self.engine,
            settings,
            ledger,
            HostFeed(self.engine, changes, settings.host_cache, instance=name),
            LayerPermits(self.client, "cue"),
            Settlement(self.engine, ledger, changes, channels, _marked(compensate, after=UNDOING)),
            self.facts,
            LayerRest(5.0),
        )
        ledger.book = _marked(ledger.book, before=BOOK, after=BOOKED)  # type: ignore[method-assign]
        return runner

    def recompute(self) -> Actor:
        return self.actor("recompute", self._recomputes)

    def _recomputes(self) -> object:
        return recompute(self.engine, self.ledger, age_seconds=AGE, sightings=self.sightings)

    def load_caps(self) -> Actor:
        return self.actor("caps", lambda: reseed_limits(self.engine, self.ledger, [self.show.id]))

    def release(self, proc_id: str) -> None:
        self.ledger.release([proc_id])

    def stir(self) -> None:
        job = self.jobs[-1]
        ids = (self.show.id, self.alloc.id, job.folder_id, job.id, job.layers[0].id, self.show.dept_id)
        booked = Booking(str(uuid.uuid4()), Vertices(*ids), 1)
        self.ledger.book([booked])
        self.ledger.rollback([booked])

    def hand_over(self, meanwhile: Callable[[], object]) -> None:
        how: dict[str, Any] = {"age_seconds": AGE, "sleep": lambda _: meanwhile()}
        hand_over(self.engine, self.ledger, self.show.id, quarantine_seconds=30, booking=True, **how)

    def hand_back(self, meanwhile: Callable[[], object]) -> None:
        how: dict[str, Any] = {"age_seconds": AGE, "sleep": lambda _: meanwhile()}
        hand_back(self.engine, self.ledger, self.show.id, settle_seconds=10, **how)

    def refill(self, meanwhile: Callable[[], object]) -> None:
        filler = self.actor("filler", lambda: self._fills(self.ledger))
        while filler.boundary != "sleep":
            assert filler.step()
        meanwhile()
        self.clock.now += LONGER
        finish(filler)

    def _fills(self, ledger: Ledger) -> object:
        return ensure_bootstrapped(self.engine, ledger, wait_age=AGE, sleep=self.clock.sleep)

    def settle_down(self) -> None:
        for _ in range(2):
            self._recomputes()
            self.pass_an_age()
        self._recomputes()

    def pass_an_age(self) -> None:
        grow_older(self.client, LONGER)
        self.clock.now += LONGER

    def counted(self) -> int:
        return int(self.client.hget(self.key, "int_cores") or 0)

    def burst(self) -> float:
        return float(self.client.hget(keys.subscription(self.show.id, self.alloc.id), "burst") or 0)

    def check_exact(self) -> None:
        stock = take_stock(self.ledger)
        assert {i: r.entry for i, r in stock.records.items()} == dict(read_snapshot(self.engine).entries)
        assert drift(stock) == {}


def mark_moments(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Make the moments inside of production code boundaries, and the clock of the bootstrap the test's."""
    monkeypatch.setattr(bootstrap, "time", clock)
    monkeypatch.setattr(reconcile, "read_snapshot", _marked(reconcile.read_snapshot, after=SNAPSHOT))
    monkeypatch.setattr(caps_module, "cap_rows_of_shows", _marked(caps_module.cap_rows_of_shows, after=CAPS_READ))


def with_deadline(settings: Settings, seconds: float) -> Settings:
    """A commit deadline that lets a test take its time, or makes PostgreSQL lose patience soon."""
    accounting = settings.accounting.model_copy(update={"commit_deadline": seconds})
    return settings.model_copy(update={"accounting": accounting})


def _marked(function: Callable[..., Any], *, before: str = "", after: str = "") -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        if before:
            boundary(before)
        result = function(*args, **kwargs)
        if after:
            boundary(after)
        return result

    return marked


def _lose_answers(engine: Engine) -> None:
    """A COMMIT of a deaf actor happens, and its connection breaks before the answer."""
    commit = engine.dialect.do_commit

    def do_commit(connection: Any) -> None:
        commit(connection)
        actor = current()
        if actor is not None and actor.deaf:
            actor.deaf = False
            raise psycopg2.OperationalError("server closed the connection unexpectedly")

    engine.dialect.do_commit = do_commit  # type: ignore[method-assign]


_RUNNING = """
    SELECT coalesce(sum((int_cores_reserved + 99) / 100), 0)
      FROM proc JOIN host USING (pk_host) JOIN job ON job.pk_job = proc.pk_job
     WHERE pk_folder LIKE :folder AND host.pk_alloc LIKE :alloc
"""
