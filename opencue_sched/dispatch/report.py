"""What a pass did, for metrics, logs and the task's result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.verdicts import LayerVerdict
from opencue_sched.placement.plan_state import Plan

LONGEST_ERROR = 500
"""How many characters of an error an answer carries, and of a verdict's detail."""


class PassEnd(StrEnum):
    """Why a pass ended (``scheduler_pass_terminated_reason_total``)."""

    BOOKED = "booked"
    """Frames were booked."""
    SATURATED = "saturated"
    """Frames wait, and none was booked."""
    NO_JOBS = "no_jobs"
    """Nothing waits that may be booked."""
    QUERY_ERROR = "query_error"
    """The pass failed: a store did, or the pass itself."""
    NOT_READY = "not_ready"
    """The counters are not open for bookings."""
    CLAIM_LOST = "claim_lost"
    """The claim ended before the pass did."""


@dataclass(slots=True)
class PassReport:
    """What a pass did in one cluster. Filled in step by step by the pass, so that one that fails half-way still says
    what it did; nobody changes it afterwards."""

    cluster: Cluster
    ended: PassEnd = PassEnd.NO_JOBS
    show_name: str = ""
    jobs: int = 0
    plan: Plan | None = None
    """What the pass planned; None when it did not get as far as looking for hosts."""
    frames_booked: int = 0
    frames_launched: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    """How many bookings Redis refused, by the cap that was in the way (BookingRefused.table)."""
    losses: Counter[str] = field(default_factory=Counter)
    """How many booked frames were not committed, by the reason of the error (BookingError.reason)."""
    verdicts: tuple[LayerVerdict, ...] = ()
    go_on: bool = False
    """Whether there is more to place right away: a bound ended the plan, or a host came free that some layer had
    wanted."""
    look_again: float | None = None
    """Seconds after which there may be something to do that no event tells of: a host that PostgreSQL or an RQD refused
    may be tried again, or a layer may start. None without either."""
    seconds_to_book: list[float] = field(default_factory=list)
    """The seconds from a frame's becoming eligible, once more after a retry, to the answer to the COMMIT, for each
    frame booked."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each step took that the pass came to: ``gather`` (follow what changed), ``plan``, ``book``, ``commit``,
    ``launch`` (and settle); and ``total``. The report of a pass's first cluster has them, for all of its clusters."""
    error: str = ""
    commit_error: str = ""
    """Why PostgreSQL took nothing of the pass's plan; empty where it took a part, or there was nothing to commit."""

    @property
    def jobs_processed(self) -> int:
        """Jobs that went through the whole pass: none when it was given up on its way."""
        return self.jobs if self.plan is not None and self.ended in (PassEnd.BOOKED, PassEnd.SATURATED) else 0

    def summary(self) -> dict[str, object]:
        """A small JSON-able answer for the task."""
        error = {"error": self.error[:LONGEST_ERROR]} if self.error else {}
        return {
            "cluster": self.cluster.key,
            "ended": self.ended.value,
            "jobs": self.jobs,
            "planned": 0 if self.plan is None else len(self.plan.procs),
            "booked": self.frames_booked,
            "launched": self.frames_launched,
            "seconds": round(self.seconds.get("total", 0.0), 4),
            **error,
        }
