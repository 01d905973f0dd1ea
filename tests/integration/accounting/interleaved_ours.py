"""The player of an interleaving that is production code: passes, recomputes, reseeds, flips, bootstraps."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, event

from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import ensure_bootstrapped, server_run_id
from opencue_sched.accounting.caps import make_ledger, reseed_limits
from opencue_sched.accounting.consistency import check_consistency, drift
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import read_snapshot, recompute
from opencue_sched.accounting.show_handover import ImportedShows, hand_back, hand_over
from opencue_sched.clients.lua_scripts import load_script
from opencue_sched.coordination.change_log import BacklogChanges, HostChanges
from opencue_sched.coordination.permits import FramePermits
from opencue_sched.dispatch.cluster_pass import PassRunner
from opencue_sched.dispatch.host_feed import HostFeed
from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.settings import Accounting, Settings
from opencue_sched.store.accounting import managed_show_versions
from opencue_sched.store.schema import check_schema
from tests.integration.accounting.interleaved import (
    AGE,
    BOOK,
    BOOKED,
    BURST,
    CAPS_READ,
    CORRECTION,
    JUDGED,
    LONGER,
    PLANNED,
    ROLLBACK,
    SNAPSHOT,
    UNDOING,
    Figures,
    Side,
    finish,
)
from tests.integration.accounting.stepped_store import grow_older
from tests.integration.accounting.stepping import Actor, Clock, SteppedRedis, boundary, current
from tests.kit.import_notes import pass_quarantines
from tests.kit.passes import ReadingAnew


class Ours(Side):
    """Passes, recomputes, reseeds, flips and bootstraps of production code; each worker with objects of its own."""

    ours = True

    def __init__(self, engine: Engine, client: SteppedRedis, clock: Clock, settings: Settings) -> None:
        super().__init__(engine, client, clock, settings)
        client.moments = _moments
        for script in _MARKED:
            client.script_load(load_script(script).text)  # a server that does not know it is asked twice
        client.set(keys.EPOCH, Epoch.new(server_run_id(client)).text)
        self.ledger = make_ledger(engine, client, owner="beat", accounting=Accounting())
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
                return self._runner(name, channels, settings).run([cluster], alive=lambda: True)[0]
            finally:
                channels.close()

        return self.actor(name, one_pass)

    def _runner(self, name: str, channels: RqdChannels, settings: Settings) -> PassRunner:
        ledger = make_ledger(self.engine, self.client, owner=name, accounting=Accounting())
        return PassRunner(
            self.engine,
            settings,
            ledger,
            HostFeed(self.engine, HostChanges(self.client, "cue"), settings.host_cache, instance=name),
            ReadingAnew(self.engine, settings, lambda: self.facts, BacklogChanges(self.client, "cue")),
            FramePermits(self.client, "cue"),
            channels,
            lambda: self.facts,
            imported=ImportedShows(self.engine, ledger, quarantine_seconds=0, age_seconds=AGE),
            clock=lambda: time.monotonic() + self.clock.now,
        )

    def refuse_compensations(self) -> None:
        super().refuse_compensations()
        self.sql(_REFUSE_DELETES)

    def recompute(self) -> Actor:
        return self.actor("recompute", self._recomputes)

    def _recomputes(self) -> object:
        return recompute(self.engine, self.ledger, age_seconds=AGE, clock=self.clock.monotonic)

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
        how: dict[str, Any] = {"age_seconds": AGE, "sleep": self._sleep(meanwhile)}
        hand_over(self.engine, self.ledger, self.show.id, wait_seconds=30, **how)

    def hand_back(self, meanwhile: Callable[[], object]) -> None:
        settle = self.settings.accounting.commit_deadline
        how: dict[str, Any] = {"age_seconds": AGE, "sleep": self._sleep(meanwhile)}
        hand_back(self.engine, self.ledger, self.show.id, wait_seconds=settle, **how)

    def share_a_licence(self, *, managed: bool) -> SharedLicence:
        """A limit of one frame, which runs, of another show; a layer of this show waits for it."""
        with self.engine.begin() as connection:
            farm = Farm(connection)
            limit = farm.limit("licence", 1)
            other = farm.show("other", managed=managed)
            farm.subscription(other, self.alloc, size=BURST)
            layers = [LayerSpec(threadable=False, limits=[limit])]
            running = farm.job(layers, show=other, name="holder")
            farm.run(running.frames, self.host)
            waiting = farm.job(layers, show=self.show, name="heir")
            counted = managed_show_versions(connection)
        self._recomputes()
        note_imported(self.client, counted)
        reseed_limits(self.engine, self.ledger, [self.show.id, other.id])
        where, held = keys.limit(limit), "1" if managed else "0"
        assert self.client.hmget(where, "int_foreign", "int_running") == [str(1 - int(held)), held], "one or the other"
        ids = (self.show.id, self.alloc.id, waiting.folder_id, waiting.id, waiting.layers[0].id, self.show.dept_id)
        ledger = make_ledger(self.engine, self.client, owner="heir", accounting=Accounting())
        return SharedLicence(ledger, Vertices(*ids, (limit,)), other.id)

    def managed_shows(self) -> dict[str, str]:
        """Shows with the flag set, and the version of their row."""
        with self.engine.connect() as connection:
            return managed_show_versions(connection)

    def flip(self, show_id: str, *, managed: bool) -> Actor:
        """Our command, for another show, on a farm without Cuebots."""
        change: Callable[..., object] = hand_over if managed else hand_back
        return self.actor("flip", lambda: change(self.engine, self.ledger, show_id, age_seconds=AGE, wait_seconds=0.0))

    def _sleep(self, meanwhile: Callable[[], object]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            meanwhile()
            self.clock.now += seconds
            pass_quarantines(self.client)

        return sleep

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
        super().pass_an_age()
        grow_older(self.client, LONGER)

    def counted(self) -> int:
        return int(self.client.hget(self.key, "int_cores") or 0)

    def burst(self) -> float:
        return float(self.client.hget(keys.subscription(self.show.id, self.alloc.id), "burst") or 0)

    def judge(self, figures: Figures, *, breaks: str, cap: int, room: int) -> None:
        """Within the cap; the ledger is the proc table, and each counter the sum of its entries."""
        assert figures.running <= cap
        check = check_consistency(self.ledger)
        assert {i: r.entry for i, r in check.records.items()} == dict(read_snapshot(self.engine)[1])
        assert drift(check) == {}
        assert self.counted() == figures.running


@dataclass
class SharedLicence:
    """A limit that is used up by a frame of ``show``; ``vertices`` are of a layer of another show that wants it."""

    ledger: Ledger
    vertices: Vertices
    show: str

    def taken_again(self, *, load: bool) -> bool:
        """Whether it can be booked. ``load``: then its caps are loaded, for the next who asks."""
        booked = Booking(str(uuid.uuid4()), self.vertices, 1)
        accepted = bool(self.ledger.book([booked]).accepted)
        if load and self.ledger.load_caps is not None:
            self.ledger.load_caps([keys.limit(limit) for limit in self.vertices.limit_ids])
        return accepted


_MARKED = ("book", "adjust", "lease_drop")


def _moments(call: tuple[Any, ...], answer: Any) -> tuple[str, ...]:
    """The moments to which a script call has come: before it is sent, or when it is answered."""
    book, adjust, lease_drop = (load_script(script).sha for script in _MARKED)
    if call[1] == book and "force" in call:
        return () if answer else (ROLLBACK,)
    if call[1] == book:
        unseeded = answer and answer[1] == "unseeded"  # it is sent again when the caps are there
        return () if unseeded else (BOOKED,) if answer else (PLANNED, BOOK)
    if call[1] == adjust:
        return () if answer else (CORRECTION,)
    return (JUDGED,) if call[1] == lease_drop and keys.AUDIT in call and answer is not None else ()


def mark_transactions(engine: Engine) -> None:
    """Make the ends of transactions that have deleted procs, or have read all at one moment, boundaries. For the life
    of the engine."""

    @event.listens_for(engine, "begin")
    def after_begin(connection: Connection) -> None:
        # A session keeps the count of earlier transactions for up to a second, those of an earlier test among them. Of
        # a transaction that reads at one moment the moment is its first statement: that is not asked here.
        if current() is not None and not _reads_at_one_moment(connection):
            connection.info[_DELETED_BEFORE] = _asked(connection, _DELETED)

    @event.listens_for(engine, "commit")
    def before_commit(connection: Connection) -> None:
        if current() is None:
            return
        if _reads_at_one_moment(connection):
            boundary(CAPS_READ if _asked(connection, _HAS_READ_CAPS) else SNAPSHOT)
        elif _asked(connection, _DELETED) > connection.info[_DELETED_BEFORE]:
            boundary(UNDOING)


_DELETED = "SELECT pg_stat_get_xact_tuples_deleted('proc'::regclass)"
_DELETED_BEFORE = "procs deleted before the transaction"
_HAS_READ_CAPS = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation = 'subscription'::regclass"


def _reads_at_one_moment(connection: Connection) -> bool:
    return connection.get_execution_options().get("isolation_level") == "REPEATABLE READ"


def _asked(connection: Connection, query: str) -> int:
    """What the transaction says of itself."""
    with connection.connection.cursor() as cursor:
        cursor.execute(query)
        return int((cursor.fetchone() or (0,))[0])


_REFUSE_DELETES = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$BEGIN RAISE EXCEPTION 'the server is shutting down' USING ERRCODE = '57P01'; END$$;
    CREATE TRIGGER refuse BEFORE DELETE ON proc FOR EACH STATEMENT EXECUTE FUNCTION refuse()
"""
