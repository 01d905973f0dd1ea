"""By which time the stress benchmark counts throughput."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from benchmarks.stress import commit_span
from tests.farm import Farm, LayerSpec

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
