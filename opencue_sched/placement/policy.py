"""What a studio may decide differently about placement, apart from the planner that carries it out.

*Admission* says which hosts a layer may use at all, *first choice* which hosts are tried before all others, the
*strategy* in which order, and a *score* replaces the strategy's order by a choice among its first candidates. Each is
one function or value; the planner knows only these signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from opencue_sched.domain.farm import Host, Job, Layer
from opencue_sched.domain.reservation import Rules
from opencue_sched.settings import HostBookingStrategy, Queue

Admission = Callable[[Job, Layer, Host], bool]
"""Whether the layer may use the host. Asked for many hosts: cheap and pure."""
FirstChoice = Callable[[str], bool]
"""Whether a host, by id, is looked at before all others."""
Score = Callable[[Layer, Host], float]
"""What placing the layer on the host costs; the lowest wins."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How one pass places frames.

    ``attempts_per_layer``: hosts that others took from meanwhile before the layer is given up for the pass.
    ``max_frames`` bounds the plan, and so the size of its commit.
    """

    rules: Rules
    strategy: HostBookingStrategy = field(default_factory=HostBookingStrategy)
    attempts_per_layer: int = 10
    max_frames: int = 500
    admit: Admission | None = None
    first: FirstChoice | None = None
    score: Score | None = None


MEM_RESERVED_MIN_KB = 250 * 1024
"""A proc reserves no less, as with Cuebot (its ``mem_reserved_min``): a frame without an estimate needs some."""


def policy_for(queue: Queue, show_name: str) -> Policy:
    """The policy the settings ask for; ``host_booking_strategy_by_show`` overrides the global strategy."""
    return Policy(
        rules=Rules(
            memory_stranded_threshold_kb=queue.memory_stranded_threshold // 1024,
            selfish_services=frozenset(queue.selfish_services),
            mem_reserved_min_kb=MEM_RESERVED_MIN_KB,
        ),
        strategy=queue.host_booking_strategy_by_show.get(show_name, queue.host_booking_strategy),
    )
