from __future__ import annotations

from opencue_sched.placement.planner import policy_for
from opencue_sched.settings import HostBookingStrategy, Queue


def test_the_default_keeps_cores_dense_and_memory_loose() -> None:
    expected = HostBookingStrategy(core_saturation=True, memory_saturation=False)

    assert policy_for(Queue()).strategy_of("any") == expected


def test_a_show_overrides_the_global_strategy_for_itself_only() -> None:
    preview = HostBookingStrategy(core_saturation=False, memory_saturation=False)
    queue = Queue(host_booking_strategy_by_show={"preview": preview})

    assert policy_for(queue).strategy_of("preview") == preview
    assert policy_for(queue).strategy_of("feature") == HostBookingStrategy()
