"""A chaos report for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks.chaos.verdict import ChaosReport

_APART = ("by_kind", "violations", "starts_failed", "log_errors", "licences_judged")


def show_chaos(report: ChaosReport, console: Console | None = None) -> None:
    """Two tables, and the violations if there are any."""
    console = console or Console()
    faults = Table(title="faults, and seconds to the next booking")
    for column in ("fault", "count", "median", "longest"):
        faults.add_column(column, justify="left" if column == "fault" else "right")
    for line in report.by_kind:
        faults.add_row(line.kind, str(line.count), _seconds(line.median_seconds), _seconds(line.longest_seconds))
    faults.add_row(
        "all", str(report.faults), _seconds(report.recovery_median), _seconds(report.recovery_longest), style="bold"
    )
    console.print(faults)
    figures = Table(title="chaos", show_header=False)
    for name, value in report.as_dict().items():
        if name not in _APART:
            figures.add_row(name.replace("_", " "), str(value))
    for name in ("starts_failed", "log_errors", "licences_judged"):
        for event, count in getattr(report, name).items():
            figures.add_row(f"{name.replace('_', ' ')}: {event}", str(count))
    console.print(figures)
    for violation in report.violations:
        console.print(f"VIOLATION {violation}", markup=False, style="red")
    console.print("violations: none" if report.passed else f"violations: {len(report.violations)}")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
