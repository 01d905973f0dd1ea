"""The scale benchmark: the drain phase of the stress farm with one worker, with two, with four.

A match is wasted when another worker took its host or frame first: it was planned and booked, and undone at the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from rich.console import Console
from sqlalchemy import text

from benchmarks.stress import ACTIVATE, ENVIRONMENT, PhaseResult, drained, run_phase
from benchmarks.workbench import workbench
from opencue_sched.embedded.farms.stress_farms import drain_farm, remove_stress_farms
from opencue_sched.errors import FrameLost, HostExhausted, HostLocked

MOST_WASTED_BY_TWO_PERCENT = 5.0

_TAKEN_BY_ANOTHER = tuple(error.reason for error in (HostLocked, HostExhausted, FrameLost))


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """All rounds of one number of workers. Rates are medians over the rounds, with their least and greatest; counts
    are sums over the rounds. Percentages are of all matches, committed or not."""

    workers: int
    rounds: int
    frames: int
    booked: int
    frames_per_second: float
    slowest_round: float
    fastest_round: float
    wasted_percent: float
    worst_round_percent: float
    lost_by_reason: str
    claim_conflicts: int
    passes: int
    deadlocks: int
    audit_failed: bool
    passed: bool

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def run_scale(
    counts: Sequence[int], *, rounds: int, scale: float, database_url: str | None, console: Console
) -> list[ScaleResult]:
    """Drain a fresh farm ``rounds`` times with each number of workers, in turn, so that noise falls on all alike."""
    results: dict[int, list[PhaseResult]] = {count: [] for count in counts}
    for number in range(1, rounds + 1):
        for count in counts:
            console.print(f"round {number} of {rounds}, {count} worker{'s' if count > 1 else ''}")
            results[count].append(_drain(count, scale, database_url, console))
    return [_summary(phases) for phases in results.values()]


def _drain(workers: int, scale: float, database_url: str | None, console: Console) -> PhaseResult:
    with workbench(ENVIRONMENT, database_url=database_url) as bench:
        with bench.engine.begin() as connection:
            remove_stress_farms(connection)
            farm = drain_farm(connection, scale)
            connection.execute(ACTIVATE, {"show": farm.show.id, "on": False})
        with bench.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))
        bench.workers(workers)
        bench.fleet.beat()
        return run_phase(bench, "drain", farm, workers, drained, console)


def wasted_percent(result: PhaseResult) -> float:
    """Matches undone because somebody else was faster, in percent of all matches."""
    taken = sum(
        int(count)
        for reason, _, count in (part.partition(" ") for part in result.lost_by_reason.split(", ") if part)
        if reason in _TAKEN_BY_ANOTHER
    )
    return 100 * taken / max(1, result.booked + result.lost_bookings)


def _summary(phases: Sequence[PhaseResult]) -> ScaleResult:
    rates = [phase.frames_per_second for phase in phases]
    wasted = [wasted_percent(phase) for phase in phases]
    workers = phases[0].workers
    enough = workers != 2 or median(wasted) <= MOST_WASTED_BY_TWO_PERCENT
    return ScaleResult(
        workers=workers,
        rounds=len(phases),
        frames=sum(phase.frames for phase in phases),
        booked=sum(phase.booked for phase in phases),
        frames_per_second=round(median(rates), 1),
        slowest_round=min(rates),
        fastest_round=max(rates),
        wasted_percent=round(median(wasted), 2),
        worst_round_percent=round(max(wasted), 2),
        lost_by_reason="; ".join(phase.lost_by_reason or "none" for phase in phases),
        claim_conflicts=sum(phase.claim_conflicts for phase in phases),
        passes=sum(phase.passes for phase in phases),
        deadlocks=sum(phase.deadlocks for phase in phases),
        audit_failed=any(phase.audit_failed for phase in phases),
        passed=enough and all(phase.passed for phase in phases),
    )
