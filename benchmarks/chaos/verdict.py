"""What is looked at when the faults are over: frames, results, runs, logs; and the figures of a run."""

from __future__ import annotations

import bisect
import itertools
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sqlalchemy import Connection, text

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.licences import SETTLE_WINDOW_SECONDS
from benchmarks.chaos.site import COMMIT_DEADLINE_SECONDS
from opencue_sched.embedded.rqds.simulated_host import FrameRun
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm

NAMED = 10

# A frame is booked at most a commit deadline before it starts.
_COUNTS_SECONDS = SETTLE_WINDOW_SECONDS + COMMIT_DEADLINE_SECONDS

_OF_ONE_TASK = re.compile(r"\[[0-9a-f-]{36}\].*", re.DOTALL)

_UNFINISHED = text(
    """
    SELECT f.pk_frame, f.str_name, f.str_state, f.int_exit_status, f.int_retries, j.str_name AS job,
           j.str_state AS job_state, p.pk_proc, h.str_name AS host, age(now(), f.ts_updated) AS unchanged
    FROM frame f JOIN job j USING (pk_job) LEFT JOIN proc p ON p.pk_frame = f.pk_frame LEFT JOIN host h USING (pk_host)
    WHERE f.str_state <> 'SUCCEEDED' ORDER BY f.ts_updated
    """
)
# Statuses that only a report of RQD brings; what the scheduler itself says of a lost run are others.
_REPORTED_STATUSES = (0, 1)
_RESULTS = text(
    """
    SELECT pk_frame, str_host, int_exit_status, count(*) AS times FROM frame_history
    WHERE int_ts_stopped > 0 AND int_exit_status = ANY(:statuses) GROUP BY pk_frame, str_host, int_exit_status
    """
)
_SUCCESSES = text("SELECT coalesce(sum(int_frame_success_count), 0) FROM job_usage")
_SUCCEEDED = text("SELECT pk_frame FROM frame WHERE str_state = 'SUCCEEDED'")

# A layer takes whole cores, as many as its minimum rounded up. In the order show, job, folder, limits, subscription.
# A limit of machines that is full for one host is open for another: for those that hold it, and where more do than may
# for the first of them, as many as may. ``counts_seconds``: what started later than this before a licence server was
# asked counts beside its report.
_PLACEABLE = text(
    """
    WITH wanted AS (
        SELECT l.pk_layer, j.pk_job, j.pk_folder, j.pk_show, j.str_name || '/' || l.str_name AS name, l.int_mem_min,
               ceil(l.int_cores_min / 100.0) * 100 AS cores, l.int_gpus_min AS gpus,
               string_to_array(replace(l.str_tags, ' ', ''), '|') AS tags
        FROM layer l JOIN layer_stat s USING (pk_layer) JOIN job j ON j.pk_job = l.pk_job JOIN show USING (pk_show)
        WHERE s.int_waiting_count > 0 AND j.str_state = 'PENDING' AND NOT j.b_paused AND show.b_booking_enabled
    ), used AS (
        SELECT p.pk_proc, p.pk_job, p.pk_show, p.pk_layer, j.pk_folder, h.pk_alloc, p.int_cores_reserved AS cores,
               p.int_gpus_reserved AS gpus
        FROM proc p JOIN job j USING (pk_job) JOIN host h USING (pk_host)
    ), limits AS (
        SELECT pk_limit_record, str_type = 'HOST' AS counts_machines, int_max_value AS most,
               ts_reported - make_interval(secs => :counts_seconds) AS shown_until
        FROM limit_record
    ), running AS (
        SELECT ll.pk_limit_record, p.pk_host, coalesce(p.ts_dispatched > l.shown_until, true) AS counts
        FROM proc p JOIN layer_limit ll USING (pk_layer) JOIN limits l USING (pk_limit_record)
    ), reported AS (
        SELECT held.pk_limit_record, coalesce(h.pk_host, held.str_reported_name) AS machine, held.int_tokens
        FROM limit_host held LEFT JOIN host h
          ON lower(h.str_name) = split_part(lower(held.str_reported_name), '.', 1)
    ), machines AS (
        SELECT pk_limit_record, machine, bool_or(counts) AS counts, bool_or(ours) AS ours
        FROM (SELECT pk_limit_record, pk_host AS machine, counts, true AS ours FROM running
              UNION ALL SELECT pk_limit_record, machine, true, false FROM reported) holding
        GROUP BY pk_limit_record, machine
    ), full_limits AS (
        SELECT *, most - used AS left_over FROM (
            SELECT l.*, CASE WHEN counts_machines
                THEN (SELECT count(*) FROM machines m WHERE m.pk_limit_record = l.pk_limit_record AND counts)
                ELSE (SELECT count(*) FROM running r WHERE r.pk_limit_record = l.pk_limit_record AND counts)
                     + (SELECT coalesce(sum(int_tokens), 0) FROM reported r
                        WHERE r.pk_limit_record = l.pk_limit_record) END AS used
            FROM limits l) counted
        WHERE used >= most
    ), still_open AS (
        SELECT pk_limit_record, machine FROM (
            SELECT m.*, l.left_over, count(*) FILTER (WHERE counts AND ours) OVER of_limit AS many,
                   count(*) FILTER (WHERE counts AND ours) OVER (of_limit ORDER BY machine COLLATE "C") AS number
            FROM machines m JOIN full_limits l USING (pk_limit_record) WHERE l.counts_machines
            WINDOW of_limit AS (PARTITION BY pk_limit_record)) in_order
        WHERE left_over >= 0 OR (counts AND ours AND number <= many + left_over)
    )
    SELECT w.name FROM wanted w JOIN job_resource r USING (pk_job) JOIN folder_resource f USING (pk_folder)
    WHERE (r.int_max_cores <= 0 OR r.int_max_cores >= w.cores
           + (SELECT coalesce(sum(cores), 0) FROM used WHERE used.pk_job = w.pk_job))
      AND (f.int_max_cores <= 0 OR f.int_max_cores >= w.cores
           + (SELECT coalesce(sum(cores), 0) FROM used WHERE used.pk_folder = w.pk_folder))
      AND (w.gpus = 0 OR r.int_max_gpus <= 0 OR r.int_max_gpus >= w.gpus
           + (SELECT coalesce(sum(gpus), 0) FROM used WHERE used.pk_job = w.pk_job))
      AND (w.gpus = 0 OR f.int_max_gpus <= 0 OR f.int_max_gpus >= w.gpus
           + (SELECT coalesce(sum(gpus), 0) FROM used WHERE used.pk_folder = w.pk_folder))
      AND NOT EXISTS (
          SELECT FROM layer_limit ll JOIN full_limits l USING (pk_limit_record)
          WHERE ll.pk_layer = w.pk_layer AND NOT l.counts_machines)
      AND EXISTS (
          SELECT FROM host h JOIN host_stat USING (pk_host)
          JOIN subscription s ON s.pk_alloc = h.pk_alloc AND s.pk_show = w.pk_show
          WHERE host_stat.str_state = 'UP' AND h.str_lock_state = 'OPEN'
            AND h.int_cores_idle >= w.cores AND h.int_mem_idle >= w.int_mem_min AND h.int_gpus_idle >= w.gpus
            AND string_to_array(h.str_tags, ' ') && w.tags
            AND NOT EXISTS (SELECT FROM opencue_sched_hold hold WHERE hold.pk_host = h.pk_host
                            AND hold.pk_layer <> w.pk_layer AND hold.until > now())
            AND NOT EXISTS (
                SELECT FROM layer_limit ll JOIN full_limits l USING (pk_limit_record)
                WHERE ll.pk_layer = w.pk_layer AND l.counts_machines
                  AND NOT EXISTS (SELECT FROM still_open o
                                  WHERE o.pk_limit_record = l.pk_limit_record AND o.machine = h.pk_host))
            AND s.int_burst >= w.cores + (SELECT coalesce(sum(cores), 0) FROM used
                                          WHERE used.pk_show = w.pk_show AND used.pk_alloc = h.pk_alloc))
    ORDER BY w.name
    """
)


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
    kinds_not_injected: list[str] = field(default_factory=list)
    flips: int = 0
    flips_interrupted: int = 0
    by_kind: list[FaultFigures] = field(default_factory=list)
    recovery_median: float | None = None
    recovery_longest: float | None = None
    bookings: int = 0
    jobs: int = 0
    frames: int = 0
    runs: int = 0
    samples: int = 0
    samples_per_second: float = 0.0
    median_gap_between_samples: float = 0.0
    longest_gap_between_samples: float = 0.0
    runs_the_sampler_missed: int = 0
    frames_rendered_twice: int = 0
    overlapping_runs: int = 0
    overlapping_runs_not_given_away: int = 0
    """Those of frames that no fault released silently, which gives a frame away while it runs."""
    longest_overlap: float = 0.0
    seconds_to_quiescence: float = 0.0
    audited_procs: int = 0
    licence_reports: int = 0
    licences_judged: dict[str, int] = field(default_factory=dict)
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


def placeable(connection: Connection) -> list[str]:
    """Layers whose frames wait although every cap and some host have room for one: at rest nobody may be among them."""
    return list(connection.execute(_PLACEABLE, {"counts_seconds": _COUNTS_SECONDS}).scalars())


def results_counted_wrongly(connection: Connection, farms: Sequence[SimulatedFarm]) -> list[str]:
    """Results that are not one for one those of runs: history and usage against what the hosts recorded."""
    results = {
        (row.pk_frame, row.str_host, row.int_exit_status): row.times
        for row in connection.execute(_RESULTS, {"statuses": list(_REPORTED_STATUSES)})
    }
    succeeded = set(connection.execute(_SUCCEEDED).scalars())
    counted = int(connection.execute(_SUCCESSES).scalar() or 0)
    wrong = wrong_results(results, succeeded, all_runs(farms))
    if counted != len(succeeded):
        wrong.append(f"{counted} successes are counted for {len(succeeded)} frames that succeeded")
    return wrong


def wrong_results(
    results: Mapping[tuple[str, str, int], int], succeeded: Iterable[str], runs: Iterable[FrameRun]
) -> list[str]:
    """``results``: how often (frame, host, exit status) was counted. Each must be a run of its own that ended so."""
    ended = Counter((run.frame_id, run.host_name, run.exit_status) for run in runs if run.exit_status is not None)
    good = Counter(frame_id for (frame_id, _, status), times in results.items() if status == 0 for _ in range(times))
    wrong = [f"frame {frame_id} succeeded {times} times" for frame_id, times in good.items() if times > 1]
    wrong += [
        f"frame {frame_id} has {times} results with status {status} from {host}, where {ended[frame_id, host, status]} "
        "of its runs ended so"
        for (frame_id, host, status), times in results.items()
        if times > ended[frame_id, host, status]
    ]
    wrong += [f"frame {frame_id} succeeded without a result" for frame_id in sorted(set(succeeded) - set(good))]
    return wrong


def all_runs(farms: Iterable[SimulatedFarm]) -> list[FrameRun]:
    """Every run on any host, by start."""
    return sorted((run for farm in farms for run in farm.runs()), key=lambda run: run.started)


def overlaps(runs: Iterable[FrameRun], now: float) -> list[float]:
    """Seconds for which each run of a frame ran beside an earlier one, on whatever hosts. ``now``: time.monotonic().

    Those of frames that were released silently are among them: such a release gives a frame away while it runs.
    """
    seconds = []
    latest: dict[str, float] = {}
    for run in sorted(runs, key=lambda run: run.started):
        ended = run.ended if run.ended is not None else now
        before = latest.get(run.frame_id, float("-inf"))
        if before > run.started:
            seconds.append(min(before, ended) - run.started)
        latest[run.frame_id] = max(before, ended)
    return seconds


def rendered_twice(runs: Iterable[FrameRun]) -> int:
    """Frames whose process ended well more than once: work done in vain, not results counted."""
    good = Counter(run.frame_id for run in runs if run.exit_status == 0 and not run.killed)
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


@dataclass(frozen=True, slots=True)
class SampleFigures:
    """How well the sampler saw, apart from the spans in which the database was kept from answering. Seconds."""

    count: int
    per_second: float
    median_gap: float
    longest_gap: float


def sample_figures(
    samples: Sequence[float], away: Iterable[tuple[float, float]], *, began: float, ended: float
) -> SampleFigures:
    """The figures for ``began`` to ``ended``: a sampler that stopped early has a long gap and a low rate."""
    spans = _merged(away, began, ended)
    watched = ended - began - sum(end - start for start, end in spans)
    seen = [at for at in samples if not any(start <= at <= end for start, end in spans)]
    if not seen or watched <= 0:
        return SampleFigures(0, 0.0, watched, watched)
    gaps = [
        after - before - sum(max(0.0, min(after, end) - max(before, start)) for start, end in spans)
        for before, after in itertools.pairwise([began, *samples, ended])
    ]
    return SampleFigures(len(samples), len(seen) / watched, statistics.median(gaps), max(gaps))


def _merged(spans: Iterable[tuple[float, float]], began: float, ended: float) -> list[tuple[float, float]]:
    """The same spans between ``began`` and ``ended``, without overlaps."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((max(start, began), min(end, ended)) for start, end in spans):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


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
