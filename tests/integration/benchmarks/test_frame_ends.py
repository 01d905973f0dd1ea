"""The benchmarks' end of frames: by the production path, each once, while others are booked."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from benchmarks.frame_ends import FrameEnds, RunningProc
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.reports.run_ends import RunVerdict
from tests.kit.polling import eventually
from tests.kit.runs import FarmView, RecordedChanges, RecordedLedger


@pytest.fixture
def view(engine_with_commit_times: Engine) -> FarmView:
    return FarmView(engine_with_commit_times)


def test_every_booked_frame_ends_once_and_its_host_is_free_and_fresh_again(view: FarmView) -> None:
    # given a host that was last heard of long ago and four frames, two of which run
    ledger, changes = RecordedLedger(), RecordedChanges()
    with view.farm() as farm:
        host = farm.host(cores=8, memory_gb=16, free_memory_gb=1, ping_age=100)
        job = farm.job([LayerSpec(frames=4)])
        procs = farm.run(job.frames[:2], host)
    booked: list[RunningProc] = []
    ended: list[RunningProc] = []

    # when they are ended after no time, one of them with a failure, and another is booked meanwhile
    with FrameEnds(
        view.engine,
        lambda _: 0.0,
        ledger=ledger,  # type: ignore[arg-type]
        changes=changes,  # type: ignore[arg-type]
        exit_status=lambda proc: 1 if proc.frame_id == job.frames[1] else 0,
        on_booked=booked.extend,
        on_ended=lambda procs, _: ended.extend(procs),
    ) as ends:
        eventually(lambda: ends.ended == 2, what="two ends")
        with view.farm() as farm:
            procs += farm.run(job.frames[2:3], host, cores=2)
        eventually(lambda: ends.ended == 3, what="the third end")
        assert ends.running == 0
        assert set(ends.outcomes) == {RunVerdict.APPLIED}

    # then each was found once and ended once, and the frames are what their exit status says
    assert sorted(proc.id for proc in booked) == sorted(proc.id for proc in ended) == sorted(procs)
    assert {proc.id: proc.centicores for proc in booked}[procs[2]] == 200
    assert view.states(job.frames) == ["SUCCEEDED", "WAITING", "SUCCEEDED", "WAITING"]
    # and the ledger and the host caches were told
    assert sorted(ledger.released) == sorted(procs)
    assert set(changes.published) == {host.id}
    # and the host has everything back, and was heard of
    view.assert_consistent()
    with view.engine.connect() as connection:
        age = connection.execute(text("SELECT extract(epoch FROM clock_timestamp() - max(ts_ping)) FROM host_stat"))
        assert float(age.scalar_one()) < 100
