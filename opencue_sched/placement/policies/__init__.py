"""What a farm may decide differently, a module for each kind. All are pure: functions of a snapshot and of hosts.

A firm admission holds in every round of a plan. A soft one holds in the first round, while others want the host too;
what is idle after it goes to any frame that can use it. How shows and jobs follow each other is not asked host by host:
see ``order``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.verdicts import Verdict


class Refusal(NamedTuple):
    """Why a frame may not go to a host that has room for it."""

    verdict: Verdict
    detail: str
    """One sentence for an operator."""


Admission = Callable[[Job, Layer, Host, Resources], Refusal | None]
"""``admission(job, layer, host, taken)``: why a frame of the layer may not take this from the host; None if it may. The
host is as it would be with all that the plan has put on it so far, without this frame. Asked for many hosts."""

Score = Callable[[Host, Resources], float]
"""``score(host, taken)``: what it costs to take this from the host; the lowest wins. Asked for many hosts."""
