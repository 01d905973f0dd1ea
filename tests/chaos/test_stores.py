"""One fault at a time, on a fleet that works: what stops, what must not happen, and that it goes on by itself.

Redis lost (counters-open), PostgreSQL lost (follows-postgresql), processes killed or frozen in mid-pass (within-caps,
running-frames-have-procs).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from redis.exceptions import RedisError
from sqlalchemy import text

from benchmarks.chaos.site import RUN_SECONDS, Site, Witness, site
from benchmarks.chaos.verdict import results_counted_wrongly, unfinished
from benchmarks.warm_start import WarmFleet
from opencue_sched.accounting.bootstrap import StoreState, store_state
from opencue_sched.accounting.keys import EntryState
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec, ShowIds
from opencue_sched.errors import NotReady
from opencue_sched.insight.audit import run_audit
from tests.kit.polling import eventually

pytestmark = pytest.mark.long(20)

BURST = 6
# Frames that wait whenever something is to be seen at work. At most BURST run at a time, for 0.6 s on average, so they
# last for a quarter of a minute at least.
WAITING = 150
WORKERS = ("worker1", "worker2")


@pytest.fixture(scope="module")
def here() -> Iterator[Site]:
    """Two workers, a beat, two report services and twenty hosts, on stores of their own."""
    with site(workers=2, beats=1, report_seconds=(1.0, 2.0), fleet_type=WarmFleet) as found:
        found.behave(failure_ratio=0.0)
        yield found


@pytest.fixture
def witness(here: Site) -> Iterator[Witness]:
    """Samples the proc table against the caps from a process of its own; no booking may have gone above one."""
    found = Witness(here.settings.sqlalchemy_url)
    try:
        yield found
    finally:
        found.stop()
    assert found.violations == []
    assert len(found.samples) > 20


@dataclass(frozen=True)
class Work:
    """A show that always has more to do."""

    here: Site
    witness: Witness
    show: ShowIds

    def goes_on(self, *, more: int = 20) -> None:
        """Bookings go on."""
        waiting = (
            "SELECT count(*) FROM frame JOIN job USING (pk_job) WHERE pk_show = :show AND frame.str_state = 'WAITING'"
        )
        missing = WAITING - int(str(scalar(self.here, waiting, show=self.show.id)))
        if missing > 0:
            submit(self.here, self.show, missing)
        before = len(self.witness.booked)
        eventually(lambda: len(self.witness.booked) >= before + more, 60, "more bookings")


@pytest.fixture
def work(here: Site, witness: Witness, request: pytest.FixtureRequest) -> Iterator[Work]:
    """A show with more frames than it may run at once. In the end each has one result, and all agrees."""
    pids = {name: process.pid for name, process in here.crew.fleet.processes.items()}
    yield Work(here, witness, plant(here, frames=WAITING))
    now = {name: process.pid for name, process in here.crew.fleet.processes.items()}
    assert now == pids or "killed" in request.node.name, "every process stayed up"
    here.behave(run_seconds=(0.05, 0.1))
    with here.engine.begin() as connection:
        connection.execute(text("UPDATE subscription SET int_burst = 8000"))
    eventually(
        lambda: not scalar(here, "SELECT count(*) FROM job WHERE str_state <> 'FINISHED'"), 90, "every job's end"
    )
    here.behave(run_seconds=RUN_SECONDS)
    with here.engine.connect() as connection:
        assert unfinished(connection) == []
        assert results_counted_wrongly(connection, here.farms) == []
    eventually(lambda: not run_audit(here.engine, here.client, here.settings).failed, 60, "a clean audit")


def plant(here: Site, *, frames: int) -> ShowIds:
    """A show with a tight burst and one job."""
    name = f"show{uuid.uuid4().hex[:8]}"
    with here.engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show(name)
        farm.subscription(show, farm.default_alloc(), size=BURST)
    submit(here, show, frames)
    return show


def submit(here: Site, show: ShowIds, frames: int) -> None:
    with here.engine.begin() as connection:
        name = f"{show.name}-{uuid.uuid4().hex[:8]}"
        Farm(connection).job([LayerSpec(frames=frames)], show=show, name=name, os=None, max_retries=100)


def scalar(here: Site, sql: str, **parameters: object) -> object:
    with here.engine.connect() as connection:
        return connection.execute(text(sql), parameters).scalar()


def in_flight(here: Site, owner: str) -> set[str]:
    """Proc ids that an instance has booked in Redis and not confirmed."""
    records = Ledger(here.client, owner="test").records()
    return {it.proc_id for it in records if it.state is EntryState.IN_FLIGHT and it.owner == owner}


def uncommitted(here: Site, owner: str) -> set[str]:
    """Those of them whose commit did not come to be. Only while the hosts are locked: no proc can be released then."""
    booked = in_flight(here, owner)
    with here.engine.connect() as connection:
        return booked - set(connection.execute(text("SELECT pk_proc FROM proc")).scalars())


def is_open(here: Site) -> bool:
    try:
        return store_state(here.client) is StoreState.OPEN
    except (NotReady, RedisError):
        return False


@contextmanager
def a_pass_held_up(here: Site) -> Iterator[str]:
    """The name of a worker that has booked in Redis and waits, in its transaction, for the host table.

    That nothing can be released meanwhile is why there is new work, with room of its own.
    """
    with here.engine.connect() as connection:
        connection.execute(text("LOCK TABLE host IN EXCLUSIVE MODE"))
        plant(here, frames=BURST)
        yield eventually(lambda: _waiting(here), 60, "a pass that waits for the hosts")
        connection.rollback()


def _waiting(here: Site) -> str:
    """A session that waits for our lock in a booking; reports of hosts wait too, but under another name."""
    names = scalar(
        here,
        "SELECT string_agg(a.application_name, ',') FROM pg_locks l JOIN pg_stat_activity a USING (pid) "
        "WHERE NOT l.granted AND l.relation = 'host'::regclass AND a.query LIKE '%h.str_lock_state%'",
    )
    waiting = str(names or "")
    return next((name for name in WORKERS if f"opencue-sched {name}" in waiting and in_flight(here, name)), "")


def test_an_emptied_redis_stops_booking_and_is_filled_again_by_one_process(here, witness, work):
    work.goes_on()
    stopping_at = time.time()
    here.cache.restart()
    closed_at = lost_at = time.time()

    def opened() -> bool:
        nonlocal closed_at
        asked_at = time.time()
        if is_open(here):
            return True
        closed_at = asked_at
        return False

    eventually(opened, 60, "filled counters")
    opened_at = time.time()
    eventually(lambda: witness.booked and witness.booked[-1] > opened_at, 30, "the next booking")
    deadline = here.settings.accounting.commit_deadline
    assert opened_at - stopping_at > here.settings.accounting.in_flight_age
    assert [at for at in witness.booked if lost_at + deadline < at < closed_at] == []
    eventually(lambda: filled(here) >= 1 + 1, 30, "a word about it")
    assert filled(here) == 1 + 1, "one when the fleet started, one now"


def filled(here: Site) -> int:
    """How often a worker filled the counters."""
    return sum(here.crew.fleet.log(name).read_text().count('"bootstrapped"') for name in WORKERS)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_postgresql_restarts_and_the_fleet_goes_on(here, witness, work, mode):
    work.goes_on()
    here.postgres.restart(mode)
    back_at = time.time()
    eventually(lambda: witness.booked[-1] > back_at, 30, "the next booking")
    print(f"{mode}: booking again after {next(at for at in witness.booked if at > back_at) - back_at:.2f} s")


def test_a_worker_killed_in_mid_pass_leaves_nothing_behind(here, witness, work):
    work.goes_on()
    left: set[str] = set()
    while not left:  # a pass waits for a lock but for a moment: it may give up before it is killed
        with a_pass_held_up(here) as name:
            here.crew.kill(name, down_seconds=0.0)
            left = uncommitted(here, name)
        here.crew.tend()
    eventually(lambda: not (left & in_flight(here, name)), 30, "the end of what it had booked")
    assert scalar(here, "SELECT count(*) FROM proc WHERE pk_proc = ANY(:ids)", ids=list(left)) == 0
    work.goes_on()
    eventually(here.crew.all_ready, 60, "the worker is back")


def test_a_worker_frozen_in_its_commit_commits_nothing_late(here, witness, work):
    """Stopped between a statement and COMMIT until claim, commit deadline and age are over: the server ended it."""
    work.goes_on()
    name, booked = "", set()
    while not booked:
        name, booked = _freeze_in_transaction(here)
    frozen_until = time.monotonic() + here.settings.accounting.in_flight_age + 1.0
    eventually(lambda: not (booked & in_flight(here, name)), 30, "the end of what it had booked")
    eventually(lambda: time.monotonic() > frozen_until, 30)
    work.goes_on()
    log = here.crew.fleet.log(name)
    told = log.stat().st_size
    here.crew.thaw(name)
    eventually(lambda: _gave_up(log.read_bytes()[told:]), 30, "what became of the commit")
    work.goes_on()
    assert scalar(here, "SELECT count(*) FROM proc WHERE pk_proc = ANY(:ids)", ids=list(booked)) == 0
    assert not booked & {run.proc_id for farm in here.farms for run in farm.runs()}


def _freeze_in_transaction(here: Site) -> tuple[str, set[str]]:
    """A worker frozen while its transaction is open and sound, and what it had booked for it; nothing when its lock
    time-out came first."""
    with a_pass_held_up(here) as name:
        here.crew.freeze(name)
        booked = uncommitted(here, name)
    states = eventually(lambda: (found := _states(here, name)) != {"active"} and (found or {"none"}), 10, "its end")
    if booked and "idle in transaction" in states:
        return name, booked
    here.crew.thaw(name)
    return "", set()


def _states(here: Site, name: str) -> set[str]:
    query = (
        "SELECT string_agg(DISTINCT state, ',') FROM pg_stat_activity "
        "WHERE application_name = :name AND xact_start IS NOT NULL"
    )
    return set(str(scalar(here, query, name=f"opencue-sched {name}") or "").split(",")) - {""}


def _gave_up(log: bytes) -> bool:
    return b'"commit_failed"' in log or b'"pass_failed_in_a_store"' in log or b'"bookings_lost"' in log
