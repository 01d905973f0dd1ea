"""Booking strategies: best or worst fit, on each dimension by itself.

The distributed scheduler reference ("Booking Strategies") names the two flags ``core_saturation`` and
``memory_saturation``: true is best fit (fill the fullest host that still fits), false is worst fit (take the emptiest).
The setting is global with an override per show.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from opencue_sched.settings import HostBookingStrategy, Queue


class Fit(Enum):
    """Which of the hosts with enough of a resource comes first."""

    BEST = "best"
    WORST = "worst"


@dataclass(frozen=True, slots=True)
class Strategy:
    """The order in which feasible hosts are tried. The default keeps cores dense and leaves memory slack."""

    cores: Fit = Fit.BEST
    memory: Fit = Fit.WORST

    @classmethod
    def of(cls, setting: HostBookingStrategy) -> Strategy:
        """The strategy a ``host_booking_strategy`` section asks for."""
        return cls(
            cores=Fit.BEST if setting.core_saturation else Fit.WORST,
            memory=Fit.BEST if setting.memory_saturation else Fit.WORST,
        )


def strategy_for(queue: Queue, show_name: str) -> Strategy:
    """The show's own strategy if ``host_booking_strategy_by_show`` names it, else the global one."""
    return Strategy.of(queue.host_booking_strategy_by_show.get(show_name, queue.host_booking_strategy))
