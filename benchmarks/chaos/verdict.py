"""What is looked at when the faults are over: frames, results, runs, logs; and the figures of a run."""

from __future__ import annotations

import bisect
import itertools
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sqlalchemy import Connection, text

from benchmarks.chaos.faults import Fault
from opencue_sched.embedded.simulated_rqd import SimulatedFarm

NAMED = 10

_OF_ONE_TASK = re.compile(r"\[[0-9a-f-]{36}\].*", re.DOTALL)

_UNFINISHED = text(
    """
    SELECT f.pk_frame, f.str_name, f.str_state, f.int_exit_status, f.int_retries, j.str_name AS job,
           j.str_state AS job_state, p.pk_proc, h.str_name AS host, age(now(), f.ts_updated) AS unchanged
    FROM frame f JOIN job j USING (pk_job) LEFT JOIN proc p ON p.pk_frame = f.pk_frame LEFT JOIN host h USING (pk_host)
    WHERE f.str_state <> 'SUCCEEDED' ORDER BY f.ts_updated
    """
)
_COUNTED_TWICE = text(
    """
    SELECT pk_frame, count(*) AS times FROM frame_history
    WHERE int_ts_stopped > 0 AND int_exit_status = 0 GROUP BY pk_frame HAVING count(*) > 1
    """
)
_SUCCESSES = text("SELECT coalesce(sum(int_frame_success_count), 0) FROM job_usage")
_SUCCEEDED = text("SELECT pk_frame FROM frame WHERE str_state = 'SUCCEEDED'")


@dataclass(frozen=True, slots=True)
class FaultFigures:
    """Seconds from a fault of this kind to the next commit of a booking; of a store, from its loss."""

    kind: str
    count: int
    median_seconds: float | None
    longest_seconds: float | None


@dataclass(slots=True)
class ChaosReport:
    """``violations`` must be empty. Seconds throughout."""

    seed: int
    seconds: float
    workers: int
    faults: int = 0
    by_kind: list[FaultFigures] = field(default_factory=list)
    recovery_median: float | None = None
    recovery_longest: float | None = None
    bookings: int = 0
    jobs: int = 0
    frames: int = 0
    runs: int = 0
    samples: int = 0
    samples_per_second: float = 0.0
    longest_gap_between_samples: float = 0.0
    bookings_straddling_a_lowered_cap: int = 0
    latest_straddling: float = 0.0
    frames_rendered_twice: int = 0
    overlapping_runs: int = 0
    longest_overlap: float = 0.0
    seconds_to_quiescence: float = 0.0
    audited_procs: int = 0
    starts_failed: dict[str, int] = field(default_factory=dict)
    log_errors: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.violations

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed}


def unfinished(connection: Connection) -> list[str]:
    """Every frame that has not succeeded, with what there is to know about it."""
    return [
        f"{row.pk_frame} ({row.job}/{row.str_name}) {row.str_state} for {row.unchanged}, exit {row.int_exit_status}, "
        f"retries {row.int_retries}, job {row.job_state}, proc {row.pk_proc} on {row.host}"
        for row in connection.execute(_UNFINISHED)
    ]


def results_counted_wrongly(connection: Connection, farms: Sequence[SimulatedFarm]) -> list[str]:
    """Frames with two results, and results without a run: history and usage against what the hosts recorded."""
    wrong = [f"frame {row.pk_frame} has {row.times} results" for row in connection.execute(_COUNTED_TWICE)]
    succeeded = set(connection.execute(_SUCCEEDED).scalars())
    counted = int(connection.execute(_SUCCESSES).scalar() or 0)
    if counted != len(succeeded):
        wrong.append(f"{counted} successes are counted for {len(succeeded)} frames that succeeded")
    rendered = {run.frame_id for farm in farms for run in farm.runs() if run.exit_status == 0 and not run.killed}
    wrong += [f"frame {frame_id} succeeded without a run that did" for frame_id in sorted(succeeded - rendered)]
    return wrong


def overlaps(farms: Sequence[SimulatedFarm]) -> list[float]:
    """Seconds for which each two runs of one frame ran at once, on whatever hosts."""
    seconds = []
    latest: dict[str, float] = {}
    for run in sorted((run for farm in farms for run in farm.runs()), key=lambda run: run.started):
        ended = run.ended if run.ended is not None else float("inf")
        before = latest.get(run.frame_id, float("-inf"))
        if before > run.started:
            seconds.append(min(before, ended) - run.started)
        latest[run.frame_id] = max(before, ended)
    return seconds


def rendered_twice(farms: Sequence[SimulatedFarm]) -> int:
    """Frames whose process ended well more than once: work done in vain, not results counted."""
    good = Counter(run.frame_id for farm in farms for run in farm.runs() if run.exit_status == 0 and not run.killed)
    return sum(count > 1 for count in good.values())


def recoveries(faults: Iterable[Fault], booked: Sequence[float]) -> dict[str, list[float | None]]:
    """Per kind: seconds from each fault to the first booking committed after it; None when there was none any more."""
    commits = sorted(booked)
    found: dict[str, list[float | None]] = defaultdict(list)
    for fault in faults:
        index = bisect.bisect_right(commits, fault.over)
        found[fault.kind].append(commits[index] - fault.began if index < len(commits) else None)
    return found


def figures(found: dict[str, list[float | None]]) -> list[FaultFigures]:
    """One line per kind, the slowest to recover from first."""
    lines = []
    for kind, values in found.items():
        known = [value for value in values if value is not None]
        median = round(statistics.median(known), 2) if known else None
        lines.append(FaultFigures(kind, len(values), median, round(max(known), 2) if known else None))
    return sorted(lines, key=lambda line: -(line.longest_seconds or 0.0))


def sample_figures(samples: Sequence[float], away: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(samples a second, longest gap) apart from the spans in which the database was kept from answering."""
    gaps = []
    for before, after in itertools.pairwise(samples):
        if not any(began < after and ended > before for began, ended in away):
            gaps.append(after - before)
    if not gaps:
        return 0.0, 0.0
    return len(gaps) / sum(gaps), max(gaps)


def log_errors(directory: Path) -> dict[str, int]:
    """Events of level error and above in the logs of all processes, and tracebacks, by event."""
    found: Counter[str] = Counter()
    for path in sorted(directory.glob("*.log")):
        with path.open(encoding="utf-8", errors="replace") as log:
            for line in log:
                if line.startswith("Traceback"):
                    found["Traceback"] += 1
                elif '"level": "error"' in line or '"level": "critical"' in line:
                    found[_event(line)] += 1
    return dict(found.most_common())


def _event(line: str) -> str:
    try:
        return _OF_ONE_TASK.sub("", str(json.loads(line).get("event", "")))[:60]
    except ValueError:
        return "unreadable"
