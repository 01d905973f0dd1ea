"""What the processor time of a drain says of one frame."""

from __future__ import annotations

import pytest

from benchmarks.proc_times import Reading
from benchmarks.stress import FrameCost
from benchmarks.workbench import OUR_SESSIONS, REDIS, THE_REST, THEIR_SESSIONS, WORKERS


def test_a_frame_costs_what_workers_their_sessions_and_redis_spent_on_it() -> None:
    # given two readings, between which 1,000 frames were booked
    before = Reading({WORKERS: 5.0, THEIR_SESSIONS: 1.0, REDIS: 0.5, OUR_SESSIONS: 1.0, THE_REST: 1.0}, 20.0)
    after = Reading({WORKERS: 5.35, THEIR_SESSIONS: 1.6, REDIS: 0.55, OUR_SESSIONS: 9.0, THE_REST: 9.0}, 40.0)

    # when their difference is shared among the frames
    cost = FrameCost.of(after.since(before), 1_000)

    # then what the benchmark and the rest of the machine did counts nowhere
    assert (cost.workers_us, cost.their_postgresql_us, cost.redis_us) == pytest.approx((350, 600, 50))
    assert cost.frames_per_processor_second == pytest.approx(1_000)
