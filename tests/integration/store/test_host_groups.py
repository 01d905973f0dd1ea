"""Hosts and cores, summed by allocation and by state."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec
from opencue_sched.store.insight import host_groups

STALENESS = 50_000
CORES = ("cores", "booked", "idle", "locked", "down")


@pytest.fixture(autouse=True)
def hosts(engine: Engine) -> None:
    """Hosts in each state in one allocation, none in the next, one in a disabled one and one in another facility."""
    with engine.begin() as connection:
        farm = Farm(connection)
        some, disabled = farm.alloc(), farm.alloc("disabled")
        farm.alloc("empty")
        farm.hosts(
            [
                HostSpec(alloc=some, cores=8, idle_cores=5, ping_age=20_000),
                HostSpec(alloc=some, cores=8, idle_cores=8, ping_age=30),
                HostSpec(alloc=some, cores=16, idle_cores=4, ping_age=20_000, lock="LOCKED"),
                HostSpec(alloc=some, cores=32, ping_age=100_000),
                HostSpec(alloc=some, cores=64, ping_age=100_000, state="DOWN"),
                HostSpec(alloc=disabled, cores=128),
                HostSpec(alloc=farm.alloc("general", facility="cloud"), cores=4, idle_cores=1, ping_age=5),
            ]
        )
        connection.execute(text("UPDATE alloc SET b_enabled = false WHERE pk_alloc = :id"), {"id": disabled.id})


def test_each_enabled_allocation_has_its_hosts_and_cores(engine: Engine) -> None:
    with engine.connect() as connection:
        groups = [group for group in host_groups(connection, None, staleness=STALENESS) if group.name is not None]
    found = {
        group.name: [getattr(group, name) for name in ("hosts", "hosts_locked", "hosts_down", *CORES)]
        for group in groups
    }
    assert found == {
        "cloud.general": [1, 0, 0, 4, 3, 1, 0, 0],
        "local.general": [5, 1, 2, 128, 15, 13, 4, 96],
        "local.empty": [0, 0, 0, 0, 0, 0, 0, 0],
    }
    ages = {group.name: group.report_age for group in groups}
    assert ages["local.empty"] is None
    assert 30 <= ages["local.general"] < 20_000


def test_each_state_has_its_hosts_and_cores(engine: Engine) -> None:
    with engine.connect() as connection:
        groups = [group for group in host_groups(connection, None, staleness=STALENESS) if group.name is None]
    found = {(group.facility, group.state, group.lock_state): (group.hosts, group.cores) for group in groups}
    assert found == {
        ("cloud", "UP", "OPEN"): (1, 4),
        ("local", "UP", "OPEN"): (2, 16),
        ("local", "UP", "LOCKED"): (1, 16),
        ("local", "SILENT", "OPEN"): (1, 32),
        ("local", "DOWN", "OPEN"): (1, 64),
        ("local", None, None): (0, 0),
    }


def test_of_one_facility_there_is_nothing_of_others(engine: Engine) -> None:
    with engine.connect() as connection:
        groups = host_groups(connection, "cloud", staleness=STALENESS)
    assert [(group.facility, group.name, group.hosts) for group in groups] == [
        ("cloud", "cloud.general", 1),
        ("cloud", None, 1),
    ]
