"""What was committed is launched, whatever becomes of the bookings that were not."""

from __future__ import annotations

from sqlalchemy import Engine

from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Settings
from tests.kit.statements import listening

from .test_onto_hosts import machine, site


def test_frames_are_launched_although_redis_refuses_to_take_back_those_that_were_lost(
    engine: Engine, settings: Settings
) -> None:
    # given a job that is paused between its booking and its commit, and a Redis that takes no writes from then on
    with site(engine, settings, [machine("one", cores=8, memory_gb=32)]) as here:
        kept, paused = here.job([LayerSpec(frames=2)]), here.job([LayerSpec(frames=2)])
        ledger, client, runs = here.runner.runner.ledger, here.runner.client, [True]

        def pause_once_booked(*_: object) -> None:
            if runs and any(ledger.records()):
                runs.clear()
                here.execute(f"UPDATE job SET b_paused = true WHERE pk_job = '{paused.id}'")  # noqa: S608
                client.config_set("min-replicas-to-write", 1)

        # when a pass books both
        try:
            with listening(engine, "before_cursor_execute", pause_once_booked):
                reports = here.passes()
        finally:
            client.config_set("min-replicas-to-write", 0)

        # then the frames of the other are launched, and the bookings of the one are left to a recompute
        assert sum(report.frames_booked for report in reports) == 2
        assert sum(report.frames_launched for report in reports) == 2
        assert set(here.rqds.running()) == set(kept.frames)
        assert len(list(ledger.records())) == 4
