"""The chaos benchmark's silent changes: of what does not run, heard by nobody, seen where a booking ignores them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from sqlalchemy import Engine, text

from benchmarks.chaos.silent_changes import change_silently, plant_witness, too_small
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, JobIds, LayerSpec
from tests.kit.notifications import Listener
from tests.kit.polling import eventually

SEEDS = 30
"""Among so many each kind of change has its turn."""
IS_READ = text("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')")
CHANNELS = ("opencue_sched_backlog", "opencue_sched_caps", "opencue_sched_work")


@pytest.fixture
def job(engine: Engine) -> JobIds:
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        farm.folder(show, "shots")
        farm.limit("nuke", 1)
        plant_witness(connection)
        return farm.job([LayerSpec(frames=2)], show=show)


@pytest.fixture
def host(engine: Engine) -> HostIds:
    with engine.begin() as connection:
        return Farm(connection).host(cores=4)


def changes(engine: Engine) -> set[str]:
    """The kinds of what is changed, by their first words."""
    kinds = set()
    for seed in range(SEEDS):
        kinds.add(change_silently(engine, random.Random(seed)).partition(" for ")[0])
    return kinds - {""}


def run(engine: Engine, frame_id: str, host: HostIds, *, memory_gb: float) -> None:
    with engine.begin() as connection:
        Farm(connection).run([frame_id], host, memory_gb=memory_gb)


def seen(engine: Engine) -> int:
    with engine.connect() as connection:
        return len(too_small(connection))


def test_each_kind_of_change_is_made_and_nobody_hears_of_any(engine: Engine, job: JobIds) -> None:
    with closing(Listener(engine.url.render_as_string(hide_password=False), CHANNELS)) as listener:
        assert len(changes(engine)) == 3, "licences, folders, memory"
        assert listener.heard(engine) == {}


def test_a_change_ends_after_the_statements_that_may_know_what_was_before(engine: Engine, job: JobIds) -> None:
    # Given a statement that began before the change, and is still reading
    with ThreadPoolExecutor() as pool, engine.connect() as reading, engine.connect() as connection:
        statement = pool.submit(reading.execute, text("SELECT pg_sleep(1)"))
        eventually(lambda: connection.execute(IS_READ).scalar_one(), what="the statement")
        # When a layer is changed
        changed = changes(engine)
        # Then the statement has ended when the change has
        assert not connection.execute(IS_READ).scalar_one()
        assert len(changed) == 3
        statement.result()


def test_nothing_is_changed_of_what_runs(engine: Engine, job: JobIds, host: HostIds) -> None:
    run(engine, job.frames[0], host, memory_gb=1)
    assert changes(engine) == set()


def test_what_starts_with_less_memory_than_its_layer_asks_for_is_seen(
    engine: Engine, job: JobIds, host: HostIds
) -> None:
    run(engine, job.frames[0], host, memory_gb=1)
    assert seen(engine) == 0
    with engine.begin() as connection:
        connection.execute(text("UPDATE layer SET int_mem_min = 2 * int_mem_min"))
    assert seen(engine) == 0
    run(engine, job.frames[1], host, memory_gb=1)
    assert seen(engine) == 1
