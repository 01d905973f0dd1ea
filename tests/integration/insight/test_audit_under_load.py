"""The audit of a farm at work: bookings and releases in flight are no failure, and a real wrong is found among them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from sqlalchemy import Engine, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.accounting.keys import Booking
from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.invariants import Invariant
from opencue_sched.insight.audit import Report, Severity, run_audit
from opencue_sched.settings import Accounting, Settings
from tests.integration.accounting.conftest import settings_url, store  # noqa: F401 - fixtures
from tests.kit.counters import Store
from tests.kit.forced import force
from tests.kit.polling import eventually
from tests.kit.world import World

AUDITS, BOOKERS, AT_ONCE = 8, 2, 6
REST_SECONDS = 0.02
"""Between two bookings of a booker: an audit takes longer, so that each sees some come and go, and has a processor."""

COMMIT = text(
    """
    INSERT INTO proc (pk_proc, pk_host, pk_job, pk_show, pk_layer, pk_frame, int_cores_reserved, int_mem_reserved)
    SELECT p.id, :host, frame.pk_job, :show, frame.pk_layer, frame.pk_frame, 100, 1
      FROM unnest(CAST(:procs AS varchar[]), CAST(:frames AS varchar[])) p (id, frame_id)
      JOIN frame ON frame.pk_frame = p.frame_id
    """
)


@dataclass
class Load:
    """Bookers that book, commit, settle, delete and release dozens of times a second."""

    world: World
    vertices: Vertices
    rounds: int = 0

    def book_and_release(self, frames: list[str], url: str, done: threading.Event, failed: list[BaseException]) -> None:
        client = guarded_redis(url, Settings())
        ledger = make_ledger(self.world.engine, client, owner="booker", accounting=Accounting())
        try:
            while not done.wait(REST_SECONDS):
                booked = [Booking(str(uuid.uuid4()), self.vertices, 1) for _ in frames]
                ids = [each.proc_id for each in booked]
                assert ledger.book(booked).accepted == set(ids)
                with self.world.engine.begin() as connection:
                    host, show = self.world.host.id, self.world.show.id
                    connection.execute(COMMIT, {"host": host, "show": show, "procs": ids, "frames": list(frames)})
                ledger.settle(booked)
                self.world.sql("DELETE FROM proc WHERE pk_proc = ANY(:ids)", ids=ids)
                ledger.release(ids)
                self.rounds += 1
        except BaseException as error:
            failed.append(error)
        finally:
            client.close()

    @contextmanager
    def going(self, url: str) -> Iterator[None]:
        done, failed = threading.Event(), list[BaseException]()
        frames = self.world.job.layers[0].frames[10:]
        parts = [frames[i * AT_ONCE : (i + 1) * AT_ONCE] for i in range(BOOKERS)]
        threads = [threading.Thread(target=self.book_and_release, args=(part, url, done, failed)) for part in parts]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            done.set()
            for thread in threads:
                thread.join(30)
            assert failed == [], failed


@pytest.fixture
def load(engine: Engine, store: Store) -> Load:  # noqa: F811 - the fixture
    world = World.make(engine, store)
    (proc,) = world.run(1, cores=1)
    world.recompute()
    return Load(world, world.entry(proc).vertices)


def audit(load: Load) -> dict[str, tuple[Severity, str]]:
    report: Report = run_audit(load.world.engine, load.world.store.client, Settings())
    return {check.what: (check.level, "\n".join((check.text, *check.offenders))) for check in report.findings}


def test_many_audits_of_a_farm_at_work_all_pass(load: Load, settings_url: str) -> None:  # noqa: F811
    beside_bookings: list[bool] = []

    def audit_and_count() -> bool:
        before, said = load.world.store.seq(), audit(load)
        assert (said[Invariant.COUNTERS_MATCH_LEDGER][0], said[Invariant.LEDGER_MATCHES_PROCS][0]) == (
            Severity.OK,
            Severity.OK,
        ), said
        # How many audits a booking falls into depends on the machine: it is waited for.
        beside_bookings.append(load.world.store.seq() > before)
        return sum(beside_bookings) >= AUDITS

    with load.going(settings_url):
        eventually(lambda: load.rounds, 5, "the first bookings")
        eventually(audit_and_count, 20, f"{AUDITS} audits during which bookings went on")


def test_a_wrong_made_by_hand_is_found_while_bookings_go_on(load: Load, settings_url: str) -> None:  # noqa: F811
    stray = Booking("99999999-0000-0000-0000-000000000000", replace(load.vertices, layer_id="f" * 36), 1)
    with load.going(settings_url):
        eventually(lambda: load.rounds, 5, "the first bookings")
        load.world.store.client.hincrby(keys.job(load.world.job.id), "int_cores", 7)
        force(load.world.ledger, [stray])
        load.world.ledger.settle([stray])
        said = audit(load)
    assert said[Invariant.COUNTERS_MATCH_LEDGER][0] is Severity.FAIL
    assert said[Invariant.COUNTERS_MATCH_LEDGER][1].count("\n") == 1, "only the counter that is wrong"
    assert keys.job(load.world.job.id) in said[Invariant.COUNTERS_MATCH_LEDGER][1]
    assert said[Invariant.LEDGER_MATCHES_PROCS][0] is Severity.FAIL
    (offender,) = said[Invariant.LEDGER_MATCHES_PROCS][1].splitlines()[1:]
    assert stray.proc_id in offender
