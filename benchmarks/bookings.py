"""What workers did between two readings of `Workbench.counters`: bookings, losses, passes, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, text

_LOST = "scheduler_bookings_lost_total"
_STAGES = {
    "gather": "scheduler_job_query_duration_seconds",
    "plan": "scheduler_plan_duration_seconds",
    "book": "scheduler_book_duration_seconds",
    "commit": "scheduler_commit_duration_seconds",
}
_ROWS_BY_TABLE = text(
    "SELECT relname, seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables"
    " WHERE seq_tup_read + coalesce(idx_tup_fetch, 0) > 0"
)


@dataclass(frozen=True)
class Spent:
    """The difference of two readings."""

    counters: Mapping[str, float]

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> Spent:
        return cls({key: value - before.get(key, 0) for key, value in after.items()})

    def __getitem__(self, key: str) -> float:
        return self.counters.get(key, 0)

    @property
    def booked(self) -> int:
        """Frames booked and launched."""
        return int(self["scheduler_frames_dispatched_total"])

    @property
    def lost(self) -> int:
        """Bookings planned and dropped between plan and launch, for whatever reason."""
        return int(self[_LOST])

    @property
    def lost_percent(self) -> float:
        """Of all bookings planned."""
        return 100 * self.lost / max(1, self.booked + self.lost)

    @property
    def lost_by_reason(self) -> str:
        parts = {key.partition(":")[2]: count for key, count in self.counters.items() if key.startswith(f"{_LOST}:")}
        planned = max(1, self.booked + self.lost)
        found = sorted(parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{reason} {100 * count / planned:.1f} %" for reason, count in found if count) or "none"

    @property
    def passes(self) -> int:
        return int(self["scheduler_pass_terminated_reason_total"])

    @property
    def empty_passes(self) -> int:
        """Passes that booked nothing."""
        return int(self["scheduler_frames_dispatched_per_pass_bucket:0"])

    def per_frame(self, count: float, digits: int = 1) -> float:
        """A count for each frame booked."""
        return round(count / max(1, self.booked), digits)

    def stage_ms(self) -> str:
        """Mean milliseconds of each stage of a pass, of those passes that came to it."""
        return ", ".join(f"{name} {self.mean_ms(name):.0f}" for name in _STAGES)

    def mean_ms(self, stage: str) -> float:
        """Mean milliseconds of a stage: gather, plan, book or commit."""
        return 1000 * self[f"{_STAGES[stage]}_sum"] / max(1, self[f"{_STAGES[stage]}_count"])

    def at_most_ms(self, stage: str, percentile: float) -> float:
        """A bound of a stage's milliseconds: the upper end of the histogram's bucket in which the percentile lies."""
        name = _STAGES[stage]
        wanted = self[f"{name}_count"] * percentile / 100
        prefix = f"{name}_bucket:"
        ends = sorted(
            (float(key.removeprefix(prefix)), count) for key, count in self.counters.items() if key.startswith(prefix)
        )
        return next((1000 * end for end, count in ends if count >= wanted), math.inf)


def rows_by_table(connection: Connection) -> dict[str, int]:
    """Rows that PostgreSQL has read so far from each table, by scans and by indexes."""
    return {name: int(rows) for name, rows in connection.execute(_ROWS_BY_TABLE)}
