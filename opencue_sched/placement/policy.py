"""What a studio may decide differently about placement, apart from the planner that carries it out.

*Order* says which layer is served next, *admission* which hosts a layer may use at all, the *strategy* which of those
comes first, and a *score* replaces the strategy's order by a choice among its first candidates. Each is one function
or value; the planner knows only these signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from opencue_sched.domain.farm import Host, Job, Layer, Snapshot
from opencue_sched.domain.reservation import Rules
from opencue_sched.settings import HostBookingStrategy, Queue

# Booking strategies: best or worst fit, on each dimension by itself.
#
# The distributed scheduler reference ("Booking Strategies") names the two flags ``core_saturation`` and
# ``memory_saturation``: true is best fit (fill the fullest host that still fits), false is worst fit (take the
# emptiest). The setting is global with an override per show.


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


Order = Callable[[Snapshot], Iterable[tuple[Job, Layer]]]
"""Every layer of the snapshot once, in the order in which they are served."""
Admission = Callable[[Job, Layer, Host], bool]
"""Whether the layer may use the host. Asked for many hosts: cheap and pure."""
FirstChoice = Callable[[str], bool]
"""Whether a host, by id, is looked at before all others."""
Score = Callable[[Layer, Host], float]
"""What placing the layer on the host costs; the lowest wins."""


def strict_priority(snapshot: Snapshot) -> Iterator[tuple[Job, Layer]]:
    """Jobs by priority, highest first, equal ones as the snapshot has them; their layers in dispatch order."""
    for job in sorted(snapshot.jobs, key=lambda job: -job.priority):
        for layer in sorted(job.layers, key=lambda layer: layer.dispatch_order):
            yield job, layer


def any_host(_job: Job, _layer: Layer, _host: Host) -> bool:
    """Admission without restrictions."""
    return True


@dataclass(frozen=True, slots=True)
class Policy:
    """How one pass places frames.

    ``attempts_per_layer``: hosts on which nothing could be placed after all before the layer is given up for the pass.
    ``max_frames`` bounds the plan, and so the size of its commit. ``score_candidates``: hosts a score chooses among.
    """

    rules: Rules
    strategy: Strategy = field(default_factory=Strategy)
    attempts_per_layer: int = 10
    max_frames: int = 500
    order: Order = strict_priority
    admit: Admission = any_host
    first: FirstChoice | None = None
    score: Score | None = None
    score_candidates: int = 500


def policy_for(queue: Queue, show_name: str) -> Policy:
    """The policy the settings ask for."""
    return Policy(
        rules=Rules(
            memory_stranded_threshold_kb=queue.memory_stranded_threshold // 1024,
            selfish_services=frozenset(queue.selfish_services),
            mem_reserved_min_kb=queue.mem_reserved_min // 1024,
        ),
        strategy=strategy_for(queue, show_name),
        attempts_per_layer=queue.host_candidate_attempts_per_layer,
        max_frames=queue.max_frames_per_plan,
    )
