"""A reservation is respected where the host's row is locked, whatever the plan knew of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from opencue_sched.domain.hosts import Reservation, Resources
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.errors import HostHeld
from opencue_sched.settings import Settings
from opencue_sched.store import booking
from opencue_sched.store import reservations as store
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import counted_statements, waiting_jobs
from tests.kit.plans import KB_PER_GB, assert_consistent, commit, hosts_of, proc_of, reasons
from tests.kit.wide_farm import WideFarm


@pytest.fixture
def farm(engine: Engine, settings: Settings) -> WideFarm:
    """The first host is reserved and has drained, and is expected to be free in four minutes all the same."""
    farm = WideFarm.made(engine, settings)
    farm.asks()
    (reserved,) = farm.reservations()
    farm.execute("UPDATE opencue_sched_hold SET pk_host = :first", first=farm.hosts[0])
    for host in {farm.hosts[0], reserved}:
        farm.drained(host)
    farm.execute("UPDATE opencue_sched_hold SET free_at = clock_timestamp() + interval '4 minutes'")
    return farm


def planned(
    farm: WideFarm, layer: str, *, frames: int = 1, cores: int = 4, run_seconds: float | None = None
) -> list[PlannedProc]:
    """Frames of the layer on the first host, in a plan that knows of no reservation."""
    with farm.engine.connect() as connection:
        jobs = waiting_jobs(connection)
        host = replace(hosts_of(connection)[0], reservation=None)
    assert host.id == farm.hosts[0]
    ((job, wanted),) = ((job, it) for job in jobs for it in job.layers if it.id == layer)
    wanted = replace(wanted, run_seconds=run_seconds)
    return [proc_of(job, wanted, number, host, Resources(cores, KB_PER_GB)) for number in range(frames)]


def reservation_for(farm: WideFarm) -> Reservation:
    with farm.engine.connect() as connection:
        begun = store.begin_task(connection, "")
    assert begun is not None
    return Reservation(farm.wide, farm.job, 12, KB_PER_GB, 0, begun.now + 600, begun.now)


def test_a_booking_against_a_reservation_is_lost(farm: WideFarm, settings: Settings) -> None:
    result = commit(farm.engine, planned(farm, farm.narrow), settings)
    assert not result.committed
    ((_, error),) = result.lost
    assert isinstance(error, HostHeld)
    assert error.retriable
    assert reasons(result) == ["host_held"]
    assert farm.reservations()
    assert_consistent(farm.engine)


@pytest.mark.parametrize(("run_seconds", "booked"), [(200.0, 2), (300.0, 0)])
def test_what_ends_before_the_host_is_expected_free_may_use_what_has_drained(
    farm: WideFarm, settings: Settings, run_seconds: float, booked: int
) -> None:
    # Twelve of sixteen cores are reserved: after two frames of four, eight are idle, and the third is refused.
    result = commit(farm.engine, planned(farm, farm.narrow, frames=4, run_seconds=run_seconds), settings)
    assert len(result.committed) == booked
    assert set(reasons(result)) == {"host_held"}
    assert farm.reservations(), "it is still reserved"
    assert_consistent(farm.engine)


def test_a_reservation_that_ran_out_or_whose_layer_is_gone_keeps_nobody(farm: WideFarm, settings: Settings) -> None:
    procs = planned(farm, farm.narrow, frames=2)
    farm.execute("UPDATE opencue_sched_hold SET until = clock_timestamp()")
    assert len(commit(farm.engine, procs[:1], settings).committed) == 1
    farm.execute("UPDATE opencue_sched_hold SET until = clock_timestamp() + interval '1 minute', pk_layer = 'gone'")
    assert len(commit(farm.engine, procs[1:], settings).committed) == 1


def test_the_transaction_that_books_the_owners_frame_ends_the_reservation(farm: WideFarm, settings: Settings) -> None:
    result = commit(farm.engine, planned(farm, farm.wide, cores=12), settings)
    assert len(result.committed) == 1
    assert not farm.reservations()


def test_what_follows_the_owners_frame_in_its_plan_is_free(farm: WideFarm, settings: Settings) -> None:
    procs = [*planned(farm, farm.wide, cores=12), *planned(farm, farm.narrow)]
    assert len(commit(farm.engine, procs, settings).committed) == 2
    assert not farm.reservations()


def test_the_reservation_of_an_owner_whose_booking_fails_stays(farm: WideFarm, settings: Settings) -> None:
    procs = planned(farm, farm.wide, cores=12)
    farm.execute("UPDATE frame SET int_version = int_version + 1 WHERE pk_layer = :wide", wide=farm.wide)
    assert reasons(commit(farm.engine, procs, settings)) == ["frame_lost"]
    assert farm.reservations()


def test_a_frame_of_the_owner_elsewhere_leaves_the_reservation(farm: WideFarm, settings: Settings) -> None:
    procs = planned(farm, farm.wide, cores=12)
    farm.execute("UPDATE opencue_sched_hold SET pk_host = :second", second=farm.hosts[1])
    assert len(commit(farm.engine, procs, settings).committed) == 1
    assert list(farm.reservations()) == [farm.hosts[1]]


def test_booking_and_granting_exclude_each_other(farm: WideFarm, settings: Settings) -> None:
    """A booking that has the host's lock keeps it from being reserved; one that comes later sees the reservation."""
    farm.execute("DELETE FROM opencue_sched_hold")
    first = farm.hosts[0]
    reservation = reservation_for(farm)
    with farm.engine.connect() as connection:
        facts = check_schema(connection)
    with farm.engine.begin() as books:
        booking.lock_frames(books, planned(farm, farm.narrow), facts)
        assert booking.lock_hosts(books, [first], wait_seconds=1)[first].hold_layer is None
        with farm.engine.begin() as grants:
            assert store.grant_reservations(grants, {first: reservation}) == frozenset()
    with farm.engine.begin() as grants:
        assert store.grant_reservations(grants, {first: reservation}) == {first}
        with farm.engine.begin() as books:
            with pytest.raises(OperationalError, match="lock timeout"):
                booking.lock_hosts(books, [first], wait_seconds=0.01)
            assert booking.lock_free_hosts(books, [first]) == {}
    with farm.engine.begin() as books:
        assert booking.lock_hosts(books, [first], wait_seconds=1)[first].hold_layer is not None


def test_a_reservation_costs_a_commit_no_statement(farm: WideFarm, settings: Settings) -> None:
    first, second = planned(farm, farm.wide, cores=12), planned(farm, farm.wide, frames=2, cores=4)[1:]
    counts = []
    for procs in (first, second):
        with counted_statements(farm.engine) as statements:
            assert len(commit(farm.engine, procs, settings).committed) == len(procs)
        counts.append(len(statements))
    assert counts[0] == counts[1]
    assert not farm.reservations()
