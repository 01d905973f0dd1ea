"""What was committed is launched, whatever becomes of the bookings that were not."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ResponseError
from sqlalchemy import Engine

from opencue_sched.accounting.ledger import Ledger
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Settings
from tests.kit.statements import listening

from .test_onto_hosts import machine, site


def test_frames_are_launched_although_redis_refuses_to_take_back_those_that_were_lost(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a job that is paused between its booking and its commit, and a Redis too busy for what comes then
    with site(engine, settings, [machine("one", cores=8, memory_gb=32)]) as here:
        kept, paused = here.job([LayerSpec(frames=2)]), here.job([LayerSpec(frames=2)])

        runs = [True]

        def pause_once_booked(*_: object) -> None:
            if runs and any(here.runner.runner.ledger.records()):
                runs.clear()
                here.execute(f"UPDATE job SET b_paused = true WHERE pk_job = '{paused.id}'")  # noqa: S608

        def refuse(*_: Any) -> None:
            raise ResponseError(
                "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."
            )

        with monkeypatch.context() as patched, listening(engine, "before_cursor_execute", pause_once_booked):
            patched.setattr(Ledger, "rollback", refuse)

            # when a pass books both
            reports = here.passes()

        # then the frames of the other are launched
        assert sum(report.frames_booked for report in reports) == 2
        assert sum(report.frames_launched for report in reports) == 2
        assert set(here.rqds.running()) == set(kept.frames)
