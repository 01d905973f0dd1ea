"""How a job stands when passes decide: its show's use of its size among the shows, its place by rank and in the draw.

All by the rows as they are now; `placement.policies` says what passes make of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from opencue_sched.domain.farm import CENTICORES_PER_CORE
from opencue_sched.settings import Queue
from opencue_sched.store import insight as figures


@dataclass(frozen=True, slots=True)
class ShowShare:
    """How a show stands in one allocation. Cores; ``used`` counts what its procs take now.

    ``of_size`` is used / size, None without a size. ``place`` among the ``shows`` of ours that are subscribed there: 1
    goes first, the show that uses least of its size; those without a size come last, by cores.
    """

    allocation: str
    size: float
    burst: float
    used: int
    of_size: float | None
    place: int
    shows: int


@dataclass(frozen=True, slots=True)
class JobRank:
    """A job among the ``jobs`` of its show and facility that have frames waiting.

    ``place`` by rank: priority, then age; 1 goes first. ``drawn`` is the part of the selections that goes by draw
    instead, and ``chance`` that of coming first in one: the job's priority by the sum of all.
    """

    show: str
    shares: tuple[ShowShare, ...]
    priority: int
    place: int
    jobs: int
    drawn: float
    chance: float


def rank_of(connection: Connection, job_id: str, queue: Queue) -> JobRank | None:
    """Where the job stands; None for one that passes do not look for, or without waiting frames. Two statements."""
    job = figures.rank(connection, job_id)
    if job is None:
        return None
    shares = tuple(
        ShowShare(
            row.allocation,
            row.size_centicores / CENTICORES_PER_CORE,
            row.burst_centicores / CENTICORES_PER_CORE,
            row.used,
            row.used * CENTICORES_PER_CORE / row.size_centicores if row.size_centicores > 0 else None,
            row.place,
            row.shows,
        )
        for row in figures.shares(connection, job_id)
    )
    chance = job.weight / job.weights
    return JobRank(job.show, shares, job.priority, job.ahead + 1, job.jobs, queue.priority_draw, float(chance))


def rank_words(rank: JobRank) -> list[str]:
    """A line for each allocation of the show, and one for the job."""
    lines = []
    for share in rank.shares:
        of_size = "it has no size" if share.of_size is None else f"{share.of_size:.2f} of its size of {share.size:g}"
        where = f"{_ordinal(share.place)} of {share.shows} {'show' if share.shows == 1 else 'shows'}"
        lines.append(
            f"show {rank.show} in {share.allocation}: uses {share.used} cores, {of_size} (burst {share.burst:g}); "
            f"goes {where} there"
        )
    jobs = f"{rank.jobs} {'job' if rank.jobs == 1 else 'jobs'} of the show with frames waiting"
    draw = f"; {rank.drawn:.0%} of the selections are drawn, it comes first in {rank.chance:.1%} of these"
    return [
        *lines,
        f"the job is {_ordinal(rank.place)} of {jobs} by rank (priority {rank.priority}, then age)"
        + (draw if rank.drawn else ""),
    ]


def _ordinal(number: int) -> str:
    teens = 10 <= number % 100 <= 20
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
