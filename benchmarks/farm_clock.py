"""When cores were booked and freed on each host of a farm: how full it was, and how long a freed core stood idle."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from benchmarks.frame_ends import RunningProc


class FarmClock:
    """Give ``booked`` and ``ended`` to `FrameEnds`. Thread-safe. Times in epoch seconds, cores in centicores.

    A freed core is refilled by the next booking on its host; the cores freed first are taken first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: list[tuple[float, int]] = []
        self._freed: dict[str, deque[tuple[float, int]]] = defaultdict(deque)
        self._refills: list[tuple[float, float, int]] = []

    def booked(self, procs: Iterable[RunningProc]) -> None:
        with self._lock:
            for proc in sorted(procs, key=lambda proc: proc.booked_at):
                self._changes.append((proc.booked_at, proc.centicores))
                self._refill(proc)

    def ended(self, procs: Iterable[RunningProc], at: float) -> None:
        with self._lock:
            for proc in procs:
                self._changes.append((at, -proc.centicores))
                self._freed[proc.host_id].append((at, proc.centicores))

    def _refill(self, proc: RunningProc) -> None:
        freed, wanted = self._freed[proc.host_id], proc.centicores
        while freed and wanted:
            at, centicores = freed.popleft()
            taken = min(wanted, centicores)
            self._refills.append((proc.booked_at, max(0.0, proc.booked_at - at), taken))
            wanted -= taken
            if centicores > taken:
                freed.appendleft((at, centicores - taken))

    def mean_cores(self, begin: float, end: float) -> float:
        """Cores in use, on average between two moments."""
        with self._lock:
            changes = sorted(self._changes)
        used = sum(centicores for at, centicores in changes if at <= begin)
        area, since = 0.0, begin
        for at, centicores in changes:
            if begin < at < end:
                area += used * (at - since)
                used, since = used + centicores, at
        area += used * (end - since)
        return area / (end - begin) / 100

    def refill_seconds(self, begin: float, end: float, *percentiles: float) -> list[float]:
        """How long cores that were booked again between two moments had stood idle, by percentile of the cores; 0 when
        none was."""
        with self._lock:
            waits = sorted((wait, cores) for at, wait, cores in self._refills if begin <= at < end)
        return [weighted_percentile(waits, percentile) for percentile in percentiles]


def weighted_percentile(values: Sequence[tuple[float, int]], percentile: float) -> float:
    """The least of the sorted (value, weight) that so many percent of all weight do not exceed; 0 of nothing."""
    wanted = sum(weight for _, weight in values) * percentile / 100
    reached = 0
    for value, weight in values:
        reached += weight
        if reached >= wanted:
            return value
    return 0.0
