"""One interleaving, two players: production code (interleaved_ours.py), and the way it was done before
(interleaved_naive.py).

A test says who goes on up to which moment. Both players run against the same PostgreSQL and Redis, one boundary at a
time (stepping.py), and meet the same moments by name.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import psycopg2
from sqlalchemy import Engine, text

from opencue_sched.accounting import keys
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import AllocIds, JobIds, LayerSpec
from opencue_sched.settings import Settings
from tests.integration.accounting.stepping import Actor, Clock, SteppedRedis, current
from tests.kit.sessions import end_sessions

BURST = 4
"""Cores of the subscription; every frame takes one."""

AGE, LONGER = 40.0, 60

# Moments. A worker: it has its plan; it is about to book; the counters took it; its transaction is to end; it was not
# committed, and is to be given back; its launch failed, and what undoes it is written but not committed. A recompute:
# the proc table was read; differences are found; counters that are off are to be corrected. A loader: caps were read.
PLANNED, BOOK, BOOKED, COMMIT, ROLLBACK, UNDOING = "planned", "book", "booked", "COMMIT", "rollback", "undoing"
SNAPSHOT, JUDGED, CORRECTION, CAPS_READ = "snapshot", "judged", "correction", "caps read"

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


def until(actor: Actor, *moments: str) -> Actor:
    """Let it go on to the first of these moments, then to the next."""
    for moment in moments:
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
        self.launches_fail = self.compensations_fail = False
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
        """A Cuebot starts as many frames as its own table has room for."""
        while self.scalar("SELECT int_cores < int_burst FROM subscription"):
            self.cuebot_starts()

    def cuebot_starts(self) -> None:
        """A Cuebot starts a frame and counts it in its table."""
        self.start(self.submit())
        self.sql("UPDATE subscription SET int_cores = int_cores + 100")

    def sql(self, statement: str, **parameters: object) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement), parameters)

    def scalar(self, statement: str, **parameters: object) -> Any:
        with self.engine.begin() as connection:
            return connection.execute(text(statement), parameters).scalar_one()

    def cut_transactions(self) -> None:
        """The server ends every transaction that is waiting for its client."""
        end_sessions(self.engine, self.scalar(_WAITING))

    def wait_until_cut(self) -> None:
        """The server ends the transaction of a stopped process by itself."""
        deadline = time.monotonic() + 60
        while self.scalar(_PATIENT):
            assert time.monotonic() < deadline, "it waits for ever"
            time.sleep(0.02)

    def refuse_compensations(self) -> None:
        """From now on the server refuses to undo what was committed."""
        self.compensations_fail = True

    # What is seen of it

    def procs(self) -> list[str]:
        with self.engine.begin() as connection:
            return list(connection.execute(text("SELECT pk_proc FROM proc ORDER BY ts_booked")).scalars())

    def running(self) -> int:
        watched = self.watched
        return int(self.scalar(_RUNNING, folder=watched.folder or "%", alloc=watched.alloc or "%"))

    def figures(self) -> Figures:
        return Figures(self.running(), self.counted())

    @property
    def key(self) -> str:
        """The key of the watched vertex."""
        watched = self.watched
        return keys.folder(watched.folder) if watched.folder else keys.subscription(self.show.id, watched.alloc)

    def actor(self, name: str, work: Callable[[], object]) -> Actor:
        self.actors.append(Actor(name, work))
        return self.actors[-1]

    def check(self, *, ours: Figures, naive: Figures, breaks: str, cap: int = BURST) -> None:
        """Ours: exactly these figures, within the cap, and in the end the truth. Naive: those, and broken like this."""
        figures = self.figures()
        assert figures == (ours if self.ours else naive)
        if self.ours or breaks != OVER_BOOKED:
            self.settle_down()
        self.judge(figures, breaks=breaks, cap=cap, room=ours.running)

    @abstractmethod
    def judge(self, figures: Figures, *, breaks: str, cap: int, room: int) -> None:
        """``figures`` are from before everything was repaired. ``room``: what can run."""

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
        self.clock.now += LONGER


def with_deadline(settings: Settings, seconds: float) -> Settings:
    """A commit deadline that lets a test take its time, or makes PostgreSQL lose patience soon."""
    accounting = settings.accounting.model_copy(update={"commit_deadline": seconds})
    return settings.model_copy(update={"accounting": accounting})


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
_IDLE = "FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
_WAITING = f"SELECT coalesce(array_agg(pid), '{{}}') {_IDLE}"
_PATIENT = f"SELECT count(*) {_IDLE}"
