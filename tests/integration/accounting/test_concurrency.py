"""Many bookers, releases that come late or never, crashes, and a recompute that never stops."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace

from sqlalchemy import text

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.accounting.keys import Booking, Record
from opencue_sched.settings import Accounting, Settings
from tests.integration.accounting.stepping import check_over, interrupted, stepped
from tests.kit.world import AGE, World

BURST_CORES, JOB_CORES = 20, 12
BOOKERS, ROUNDS = 3, 60

COMMIT = text(
    """
    INSERT INTO proc (pk_proc, pk_host, pk_job, pk_show, pk_layer, pk_frame, int_cores_reserved, int_mem_reserved)
    SELECT CAST(:proc AS varchar), :host, frame.pk_job, job.pk_show, frame.pk_layer, frame.pk_frame, :centicores, 1
      FROM frame JOIN job USING (pk_job)
     WHERE pk_frame = :frame AND NOT EXISTS (SELECT 1 FROM proc WHERE proc.pk_frame = frame.pk_frame)
    ON CONFLICT (pk_frame) DO NOTHING
    """
)
RUNNING = text("SELECT coalesce(sum(int_cores_reserved), 0) / 100 FROM proc")


class Booker:
    """One worker: books, commits, settles; releases, or dies somewhere in between."""

    def __init__(self, world: World, url: str, seed: int) -> None:
        self.world, self.random = world, random.Random(seed)
        self.client = guarded_redis(url, Settings())
        self.ledger = make_ledger(world.engine, self.client, owner=f"booker{seed}", accounting=Accounting())
        self.accepted = 0

    def work(self) -> None:
        vertices = self.template
        for _ in range(ROUNDS):
            booked = Booking(str(uuid.uuid4()), vertices, self.random.randint(1, 4))
            if booked.proc_id not in self.ledger.book([booked, booked]).accepted:
                continue
            self.accepted += 1
            if self.dies():
                continue
            if not self.commit(booked):
                self.ledger.rollback([booked])
                continue
            if not self.dies():
                self.ledger.settle([booked])
            with self.world.engine.begin() as connection:
                connection.execute(text("DELETE FROM proc WHERE pk_proc = :id"), {"id": booked.proc_id})
            for _ in range(self.random.choice([0, 1, 1, 1, 2])):
                self.ledger.release([booked.proc_id])

    @property
    def template(self) -> object:
        return self.world.entry(self.world.procs[0]).vertices

    def dies(self) -> bool:
        return self.random.random() < 0.05

    def commit(self, booked: Booking) -> bool:
        frame = self.random.choice(self.world.job.layers[0].frames[10:])
        with self.world.engine.begin() as connection:
            done = connection.execute(
                COMMIT,
                {
                    "proc": booked.proc_id,
                    "host": self.world.host.id,
                    "frame": frame,
                    "centicores": booked.cores * 100,
                },
            )
        return bool(done.rowcount)


def test_no_cap_is_passed_and_everything_returns_to_the_truth(world: World, settings_url: str) -> None:
    world.sql("UPDATE subscription SET int_burst = :burst", burst=BURST_CORES * 100)
    world.sql("UPDATE job_resource SET int_max_cores = :cap", cap=JOB_CORES * 100)
    world.run(1, cores=1)
    world.recompute()
    bookers = [Booker(world, settings_url, seed) for seed in range(BOOKERS)]
    done, over, passes = threading.Event(), [], []

    def sample() -> None:
        with world.engine.begin() as connection:
            running = int(connection.execute(RUNNING).scalar_one())
        counted = world.job_cores()
        if running > JOB_CORES or counted > JOB_CORES:
            over.append((running, counted))

    def repeat(action: Callable[[], object]) -> threading.Thread:
        def loop() -> None:
            while not done.is_set():
                action()

        return threading.Thread(target=loop)

    around = [repeat(sample), repeat(lambda: passes.append(world.recompute()))]
    threads = [threading.Thread(target=booker.work) for booker in bookers]
    for thread in (*around, *threads):
        thread.start()
    for thread in threads:
        thread.join(120)
    done.set()
    for thread in around:
        thread.join(30)
    for booker in bookers:
        booker.client.close()

    assert over == []
    assert sum(booker.accepted for booker in bookers) > BOOKERS
    assert len(passes) > 1
    assert all(report.drifted == {} for report in passes), "counters never left their entries"
    for proc_id in world.store.ids():
        world.age(proc_id, 3600)
    world.recompute()
    world.now += AGE
    world.recompute()
    world.exact()


def test_a_recompute_in_the_middle_of_another_changes_nothing_twice(world: World) -> None:
    one, _two, _three = world.run(3)
    world.recompute()
    world.delete(one)
    world.run(1)
    healed: list[dict[str, Record]] = []

    def records() -> dict[str, Record]:
        return {record.proc_id: record for record in world.ledger.records()}

    def inner() -> None:
        world.recompute()
        healed.append(records())

    outer = interrupted(stepped(world).recompute, check_over(world), inner)
    assert [records()] == healed
    assert outer.causes == {"missed_release": 1, "missing": 1}, "found, but healed by the other"
    assert world.job_cores() == 6
    world.exact()


def test_stock_is_taken_by_one_process_at_a_time(world: World) -> None:
    world.run(1)
    world.recompute()
    world.store.client.set(keys.AUDIT, "somebody", px=60_000)
    world.store.client.hincrby(keys.job(world.job.id), "int_cores", 5)
    assert world.recompute().drifted == {}
    assert world.store.client.get(keys.AUDIT) == "somebody"
    world.store.client.delete(keys.AUDIT)
    assert world.recompute().drifted == {"job": 1}


def test_limits_hold_between_concurrent_bookers(world: World, settings_url: str) -> None:
    (proc,) = world.run(1)
    world.store.limit("nuke", 3)
    vertices = replace(world.entry(proc).vertices, limit_ids=("nuke",))
    accepted: list[str] = []

    def book() -> None:
        client = guarded_redis(settings_url, Settings())
        ledger = make_ledger(world.engine, client, owner="x", accounting=Accounting())
        for _ in range(10):
            accepted.extend(ledger.book([Booking(str(uuid.uuid4()), vertices, 1)]).accepted)
        client.close()

    threads = [threading.Thread(target=book) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(accepted) == world.store.running("nuke") == 3
