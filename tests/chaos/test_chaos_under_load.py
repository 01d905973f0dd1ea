"""A minute in which everything that can break does, under load, and nothing may come of it.

The short form of ``python -m benchmarks chaos --minutes 5 --workers 4``, with the same judges (those are tested in
tests/unit/test_chaos_*.py and tests/integration/benchmarks/test_chaos_witness.py).
"""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from benchmarks.chaos.figures import show_chaos
from benchmarks.chaos.run import Plan, run_chaos
from benchmarks.warm_start import WarmFleet

SECONDS = 60.0
# The benchmark asks for 20 a second on average. Here others have the machine too: 20 are asked for in the median, and
# of the average so much that the sampler certainly did not sleep.
LEAST_AVERAGE, LARGEST_MEDIAN_GAP = 8.0, 1 / 20


class Live(io.StringIO):
    """Prints past pytest's capture, so that whoever waits for the minute sees it pass."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__()
        self._capsys = capsys

    def write(self, text: str) -> int:
        with self._capsys.disabled():
            return sys.stderr.write(text)


@pytest.mark.long(110)
def test_a_minute_of_every_fault_books_nothing_above_a_cap_and_loses_no_frame(capsys):
    plan = Plan(
        seconds=SECONDS,
        workers=2,
        waiting_frames=40,
        samples_per_second=LEAST_AVERAGE,
        report_seconds=(1.0, 2.0),
        fleet_type=WarmFleet,
    )
    report = run_chaos(plan, Console(), progress=Console(file=Live(capsys), width=120))
    show_chaos(report)
    assert report.violations == []
    assert report.kinds_not_injected == []
    assert {line.kind: line.count for line in report.by_kind if line.count == 0} == {}
    assert report.faults >= len(report.by_kind) > 20
    assert report.flips >= 2, "one show at least was handed back and over"
    assert report.bookings > 100
    assert report.runs_the_sampler_missed <= report.runs * 0.05
    assert report.samples > SECONDS * LEAST_AVERAGE
    assert report.median_gap_between_samples <= LARGEST_MEDIAN_GAP
    assert report.audited_procs > 0, "the audit at rest had something to look at"
