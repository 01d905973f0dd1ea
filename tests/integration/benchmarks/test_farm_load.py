"""The benchmarks' farm as it is written: what waits is what the counters say, and a long layer's names are unique."""

from __future__ import annotations

import random

import pytest
from sqlalchemy import Engine

from benchmarks.farm_load import FarmLoad, JobLoad, Work, cut, workload
from tests.kit.runs import FarmView


@pytest.fixture
def view(engine: Engine) -> FarmView:
    return FarmView(engine)


def test_hosts_are_idle_and_frames_wait_and_the_counters_say_so(view: FarmView) -> None:
    # given a small farm with two shows, one with a job of one long layer
    load = FarmLoad()
    with view.engine.begin() as connection:
        load.add_hosts(connection, {16: 2, 32: 1})
        north, south = (load.add_show(connection, name, size=32, burst=64) for name in ("north", "south"))
        load.add_jobs(connection, north, cut(workload(300, random.Random(1)), 5))
        (long,) = load.add_jobs(connection, south, [JobLoad([Work(11_000, 1, 1, 5, {"tags": "other"})], priority=7)])

    # then there is what was asked for
    assert (load.cores, load.frames) == (64, 11_300)
    assert view.one("SELECT sum(int_cores_idle) AS idle, sum(int_mem_idle) AS memory FROM host") == (
        6400,
        64 * 4 * 1024 * 1024,
    )
    view.assert_consistent()
    states = view.rows("SELECT str_state, count(*) AS n FROM frame GROUP BY 1")
    assert [(row.str_state, row.n) for row in states] == [("WAITING", 11_300)]
    assert view.one("SELECT count(*) AS n FROM frame WHERE ts_eligible IS NULL").n == 0
    job = view.one(
        "SELECT str_state, int_frame_count AS frames, int_waiting_count AS waiting, int_priority AS priority"
        "  FROM job JOIN job_stat USING (pk_job) JOIN job_resource USING (pk_job) WHERE job.pk_job = :job",
        job=long.id,
    )
    assert tuple(job) == ("PENDING", 11_000, 11_000, 7)
    assert view.one("SELECT str_tags, str_range FROM layer WHERE pk_job = :job", job=long.id) == ("other", "1-11000")
    # and every layer's frames have a run time
    assert set(load.minutes) == {row.pk_layer for row in view.rows("SELECT pk_layer FROM layer")}
