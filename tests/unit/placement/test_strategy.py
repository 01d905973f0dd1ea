from __future__ import annotations

import pytest

from opencue_sched.placement.policy import Fit, Strategy, strategy_for
from opencue_sched.settings import HostBookingStrategy, Queue


def test_the_default_keeps_cores_dense_and_memory_loose() -> None:
    assert strategy_for(Queue(), "any") == Strategy(cores=Fit.BEST, memory=Fit.WORST)


@pytest.mark.parametrize(
    ("core_saturation", "memory_saturation", "expected"),
    [
        (True, False, Strategy(Fit.BEST, Fit.WORST)),
        (True, True, Strategy(Fit.BEST, Fit.BEST)),
        (False, False, Strategy(Fit.WORST, Fit.WORST)),
        (False, True, Strategy(Fit.WORST, Fit.BEST)),
    ],
)
def test_saturation_is_best_fit_on_each_dimension(
    core_saturation: bool, memory_saturation: bool, expected: Strategy
) -> None:
    setting = HostBookingStrategy(core_saturation=core_saturation, memory_saturation=memory_saturation)

    assert strategy_for(Queue(host_booking_strategy=setting), "any") == expected


def test_a_show_overrides_the_global_strategy_for_itself_only() -> None:
    preview = HostBookingStrategy(core_saturation=False, memory_saturation=False)
    queue = Queue(host_booking_strategy_by_show={"preview": preview})

    assert strategy_for(queue, "preview") == Strategy(Fit.WORST, Fit.WORST)
    assert strategy_for(queue, "feature") == Strategy(Fit.BEST, Fit.WORST)
