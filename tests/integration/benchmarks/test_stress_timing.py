"""By which time the stress benchmark counts throughput, and what it calls saturated."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from benchmarks.stress import PLACEABLE, commit_span, database_clock, ours_from, seconds_to
from opencue_sched.accounting import keys
from opencue_sched.accounting.imported_shows import ImportNote
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec

HELD_SECONDS = 0.3
BOOKED_SPAN = text("SELECT extract(epoch FROM max(ts_booked) - min(ts_booked)) FROM proc WHERE pk_show = :show")


@pytest.fixture(scope="module")
def engine(engine_with_commit_times: Engine) -> Engine:
    return engine_with_commit_times


def test_upstream_measured_by_ts_booked_which_one_commit_shares(engine: Engine) -> None:
    # given a show of which four frames are booked by one commit, which takes its time
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show("timed")
        host = farm.host(cores=16)
        job = farm.job([LayerSpec(frames=8, cores=1)], show=show)
    with engine.begin() as connection:
        Farm(connection).run(job.frames[:4], host)
        connection.execute(text("SELECT pg_sleep(:s)"), {"s": HELD_SECONDS})

    # then by ts_booked no time has passed between the first frame and the last: any rate, or a division by zero
    with engine.connect() as connection:
        assert connection.execute(BOOKED_SPAN, {"show": show.id}).scalar() == 0
    # and by commit times one commit has no rate either, so the benchmark goes by its samples
    assert commit_span(engine, show.id) is None

    # when another four follow, by a commit that takes its time as well
    with engine.begin() as connection:
        Farm(connection).run(job.frames[4:], host)
        connection.execute(text("SELECT pg_sleep(:s)"), {"s": HELD_SECONDS})

    # then that is the time the benchmark counts, and there were two commits
    timed = commit_span(engine, show.id)
    assert timed is not None
    span, commits = timed
    assert commits == 2
    assert span >= HELD_SECONDS


LEFT_ALONE_SECONDS = 1_000.0
A_FEW_SECONDS = 10.0


def test_clocks_of_a_show_start_when_a_cuebot_has_forgotten_it(engine: Engine, redis_client) -> None:
    # given a show that was handed over on a Cuebot's database, which a worker has found
    with engine.begin() as connection:
        show_id = Farm(connection).show("handed-over").id
        connection.execute(text("UPDATE opencue_sched_origin SET origin = 'cuebot'"))
    due = float(redis_client.time()[0]) + LEFT_ALONE_SECONDS
    redis_client.hset(keys.IMPORTED, show_id, ImportNote("1", due).text)

    # when the benchmark asks from when on it may be booked, then that is when it is left alone no longer
    seconds = ours_from(engine, redis_client, show_id) - database_clock(engine)
    assert LEFT_ALONE_SECONDS - A_FEW_SECONDS < seconds <= LEFT_ALONE_SECONDS

    # and at once, when it is ours, or where there is no Cuebot
    redis_client.hset(keys.IMPORTED, show_id, ImportNote("1").text)
    assert ours_from(engine, redis_client, show_id) <= database_clock(engine)
    redis_client.hset(keys.IMPORTED, show_id, ImportNote("1", due).text)
    with engine.begin() as connection:
        connection.execute(text("UPDATE opencue_sched_origin SET origin = 'opencue-sched'"))
    assert ours_from(engine, redis_client, show_id) <= database_clock(engine)


def test_a_count_reaches_its_part_with_the_first_sample_that_has_it() -> None:
    samples = [(0.0, 0), (0.5, 98), (0.8, 99), (2.0, 100)]
    assert seconds_to(99, samples) == 0.8
    assert seconds_to(100, samples) == 2.0
    assert seconds_to(99, [(0.0, 0)]) == seconds_to(99, []) == 0.0


PLACEABLE_AFTER = {
    "SELECT 1": 1,
    "UPDATE subscription SET int_burst = 500": 0,
    "UPDATE subscription SET int_burst = 600": 1,
    "UPDATE job_resource SET int_max_cores = 500": 0,
    "UPDATE job_resource SET int_max_cores = 600": 1,
    "UPDATE host SET int_cores_idle = 100": 0,
    "UPDATE host SET int_mem_idle = 1000": 0,
    "UPDATE host SET str_tags = 'other'": 0,
    "UPDATE frame SET str_state = 'SUCCEEDED' WHERE str_state = 'WAITING'": 0,
}


def test_a_layer_that_waits_is_placeable_unless_a_cap_or_every_host_is_too_full_for_it(engine: Engine) -> None:
    # given a layer of 2 cores a frame of which two run and one waits
    with engine.connect() as connection:
        farm = Farm(connection)
        show, alloc = farm.show("waits"), farm.alloc("general")
        farm.subscription(show, alloc, size=100)
        job = farm.job([LayerSpec(frames=3, cores=2, tags="x | general")], show=show, max_cores=100)
        farm.run(job.frames[:2], farm.host(cores=16, alloc=alloc), cores=2)
        # when something is full, then it cannot be placed
        for full, placeable in PLACEABLE_AFTER.items():
            with connection.begin_nested() as attempt:
                connection.execute(text(full))
                assert connection.execute(PLACEABLE, {"show": show.id}).scalar() == placeable, full
                attempt.rollback()
        connection.rollback()
