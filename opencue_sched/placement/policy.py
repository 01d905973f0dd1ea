"""What a studio may decide differently about placement, apart from the planner that carries it out.

*Admission* says which hosts a layer may use at all, *first choice* which hosts are tried before all others, the
*strategy* in which order, and a *score* replaces the strategy's order by a choice among its first candidates. Each is
one function or value; the planner knows only these signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from opencue_sched.domain.farm import Host, Job, Layer
from opencue_sched.domain.reservation import Rules
from opencue_sched.settings import Queue


class Fit(Enum):
    """Which of the hosts with enough of a resource comes first: the fullest (best fit) or the emptiest (worst fit).

    The settings ``core_saturation`` and ``memory_saturation`` are true for best fit (distributed scheduler reference,
    "Booking Strategies").
    """

    BEST = "best"
    WORST = "worst"


@dataclass(frozen=True, slots=True)
class Strategy:
    """The order in which feasible hosts are tried. The default keeps cores dense and leaves memory slack."""

    cores: Fit = Fit.BEST
    memory: Fit = Fit.WORST


def strategy_for(queue: Queue, show_name: str) -> Strategy:
    """The show's own strategy if ``host_booking_strategy_by_show`` names it, else the global one."""
    setting = queue.host_booking_strategy_by_show.get(show_name, queue.host_booking_strategy)
    return Strategy(
        cores=Fit.BEST if setting.core_saturation else Fit.WORST,
        memory=Fit.BEST if setting.memory_saturation else Fit.WORST,
    )


Admission = Callable[[Job, Layer, Host], bool]
"""Whether the layer may use the host. Asked for many hosts: cheap and pure."""
FirstChoice = Callable[[str], bool]
"""Whether a host, by id, is looked at before all others."""
Score = Callable[[Layer, Host], float]
"""What placing the layer on the host costs; the lowest wins."""


def any_host(_job: Job, _layer: Layer, _host: Host) -> bool:
    """Admission without restrictions."""
    return True


@dataclass(frozen=True, slots=True)
class Policy:
    """How one pass places frames.

    ``attempts_per_layer``: hosts on which nothing could be placed after all before the layer is given up for the pass.
    ``max_frames`` bounds the plan, and so the size of its commit.
    """

    rules: Rules
    strategy: Strategy = field(default_factory=Strategy)
    attempts_per_layer: int = 10
    max_frames: int = 500
    admit: Admission = any_host
    first: FirstChoice | None = None
    score: Score | None = None


MEM_RESERVED_MIN_KB = 250 * 1024
"""A proc reserves no less, as with Cuebot (its ``mem_reserved_min``): a frame without an estimate needs some."""


def policy_for(queue: Queue, show_name: str) -> Policy:
    """The policy the settings ask for."""
    return Policy(
        rules=Rules(
            memory_stranded_threshold_kb=queue.memory_stranded_threshold // 1024,
            selfish_services=frozenset(queue.selfish_services),
            mem_reserved_min_kb=MEM_RESERVED_MIN_KB,
        ),
        strategy=strategy_for(queue, show_name),
    )
