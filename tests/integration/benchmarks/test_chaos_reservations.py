"""The chaos benchmark's witness of reserved hosts: it sees what is booked against one, and nothing else."""

from __future__ import annotations

import random

import pytest
from sqlalchemy import Engine, text

from benchmarks.chaos.holds import against_holds, hold_hosts, plant_witness
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.settings import Settings
from tests.kit.wide_farm import WideFarm


@pytest.fixture
def farm(engine: Engine, settings: Settings) -> WideFarm:
    """A host is held for the wide layer and has drained."""
    farm = WideFarm.made(engine, settings)
    with engine.begin() as connection:
        plant_witness(connection)
    farm.asks()
    for host in farm.reservations():
        farm.drained(host)
    return farm


def book(farm: WideFarm, layer: str, *, cores: int, ends_reservation: bool = False) -> None:
    (host_id,) = farm.reservations()
    (host,) = (host for host in farm.made_hosts if host.id == host_id)
    frames = farm.rows(
        "SELECT pk_frame FROM frame WHERE pk_layer = :layer AND str_state = 'WAITING' LIMIT 1", layer=layer
    )
    with farm.engine.begin() as connection:
        Farm(connection).run([frames[0].pk_frame], host, cores=cores)
        if ends_reservation:
            connection.execute(text("DELETE FROM opencue_sched_hold"))


def seen(farm: WideFarm) -> int:
    with farm.engine.connect() as connection:
        return len(against_holds(connection))


def test_a_booking_against_a_hold_is_seen(farm: WideFarm) -> None:
    book(farm, farm.narrow, cores=4)
    assert seen(farm) == 1


def test_the_owner_and_what_comes_with_it_are_right(farm: WideFarm) -> None:
    book(farm, farm.wide, cores=12)
    book(farm, farm.narrow, cores=4, ends_reservation=True)
    assert seen(farm) == 0


def test_backfill_is_right_until_it_touches_what_is_reserved(farm: WideFarm) -> None:
    farm.history(farm.narrow, 10)
    farm.execute("UPDATE opencue_sched_hold SET free_at = clock_timestamp() + interval '1 minute'")
    book(farm, farm.narrow, cores=4)
    book(farm, farm.narrow, cores=4)
    assert seen(farm) == 0
    book(farm, farm.narrow, cores=4)
    assert seen(farm) == 1


def test_hosts_are_held_for_layers_that_wait(farm: WideFarm) -> None:
    farm.execute("DELETE FROM opencue_sched_hold")
    with farm.engine.begin() as connection:
        assert hold_hosts(connection, random.Random(1))
    assert {row.pk_layer for row in farm.reservations().values()} <= {farm.wide, farm.narrow}
