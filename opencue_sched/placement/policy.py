"""How one pass places frames, as the settings say."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from opencue_sched.domain.frame_needs import Demand, Rules
from opencue_sched.placement.policies import Admission, Score
from opencue_sched.placement.policies.admissions import gpu_guard, layer_share
from opencue_sched.placement.policies.order import convex
from opencue_sched.settings import Queue

MAX_FRAMES = 1000
"""How many frames a plan has at most, and so a commit. They share what a pass costs whatever it books."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How one pass places frames."""

    queue: Queue
    """The settings."""
    rules: Rules
    admissions: tuple[Admission, ...] = ()
    """The rules that say which hosts a frame may use."""
    soft_admissions: tuple[Admission, ...] = ()
    """Admissions that hold in the first round of a plan only; in the second, what is idle goes to any layer."""
    score: Score | None = None
    """Chooses among the first candidates."""
    max_frames: int = MAX_FRAMES
    """The most frames of a plan, and so of its commit."""


def policy_for(queue: Queue, *, gpu_demands: Collection[Demand] = ()) -> Policy:
    """The policy the settings ask for, while this waits for GPUs."""
    return Policy(
        queue,
        Rules(queue.memory_stranded_threshold // 1024, frozenset(queue.selfish_services)),
        admissions=(gpu_guard(gpu_demands),) if queue.gpu_guard and gpu_demands else (),
        soft_admissions=(layer_share,) if queue.layer_host_share else (),
        score=convex if queue.host_score == "convex" else None,
    )
