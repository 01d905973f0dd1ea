"""What ran and what it took, from OpenCue's history tables: ``show report`` and ``job list --since``."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any

import click
from sqlalchemy import Connection, Row

from opencue_sched.cli.output import HIGH, LOW, NAME, Column, Columns, Done, time_text
from opencue_sched.domain.units import memory_text
from opencue_sched.store import history

SECONDS_PER_HOUR = 3600
_MOST_DAYS_BACK = 3660
"""How many days ago the earliest day is that a command takes. `report` hands the first second of each day since then to
PostgreSQL."""
_OFF = "note: history is switched off here (DISABLE_HISTORY in the table config): what has run since is not in it"

FINISHED_COLUMNS = Columns(
    Column("job", "Job", "name", importance=NAME),
    *map(Column, ("id", "show", "shot")),
    Column("user", "User"),
    Column("frames", "Frames", importance=HIGH),
    Column("succeeded", "Done", importance=HIGH),
    Column("eaten", "Eaten"),
    Column("left_over", "Left", importance=HIGH),
    Column("core_hours_succeeded", "Core-hours", lambda job: _hours(job.core_seconds_succeeded), importance=HIGH),
    Column("core_hours_failed", "Lost", lambda job: _hours(job.core_seconds_failed)),
    Column("max_rss_kb", "Memory", show=memory_text, importance=LOW),
    Column("started", importance=LOW),
    Column("stopped", "Finished", show=time_text),
)


class Day(click.ParamType[date]):
    """A day of local time as people write it: 2026-12-24, today, yesterday, or 7d (seven days ago)."""

    name = "day"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> date:
        """click's hook: the day that was typed. A day ahead, or more than ten years ago, is refused."""
        if isinstance(value, date):
            return value
        today = datetime.now().astimezone().date()
        days_back = {"today": "0", "yesterday": "1"}.get(value, value.removesuffix("d"))
        try:
            if days_back != value and days_back.isdecimal():
                day = today - timedelta(days=int(days_back))
            else:
                day = date.fromisoformat(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no day; write 2026-12-24, today, yesterday or 7d", param, ctx)
        if day > today:
            self.fail(f"{value} lies ahead", param, ctx)
        if day < today - timedelta(days=_MOST_DAYS_BACK):
            self.fail(f"{value} is more than ten years ago", param, ctx)
        return day


def first_second(day: date) -> int:
    """The first second of a day of local time, in seconds since 1970, as the history has its times."""
    return int(datetime(day.year, day.month, day.day).astimezone().timestamp())


def notes_on_history(connection: Connection) -> list[str]:
    """Notes for a person who reads figures of the history: that it is switched off, where it is."""
    return [_OFF] if history.is_off(connection) else []


def report(connection: Connection, show_id: str | None, since: date, by: str, *, as_csv: bool) -> Done:
    """Frames, core-hours and GPU-hours of the runs that ended since a day.

    ``by`` is show, user or day, and each of these has a row: days in their order, shows and users with the most
    core-hours first. The table for people ends with the sum of the rows.
    """
    today = datetime.now().astimezone().date()
    days = [since + timedelta(days=number) for number in range((today - since).days + 1)]
    found = history.runs_by(connection, by, [first_second(day) for day in days], show_id=show_id)
    if by == "day":
        rows = [_row(runs, days[int(runs.of) - 1].isoformat()) for runs in found]  # ``of`` counts the days from 1
        rows.sort(key=lambda row: row["of"])
    else:
        rows = [_row(runs, runs.of) for runs in found]
        rows.sort(key=lambda row: row["core_hours_succeeded"] + row["core_hours_failed"], reverse=True)
    columns = Columns(
        Column("of", by.capitalize(), importance=NAME),
        Column("succeeded", "Succeeded", importance=HIGH),
        Column("failed", "Failed", importance=HIGH),
        Column("core_hours_succeeded", "Core-hours", importance=HIGH),
        Column("core_hours_failed", "Lost core-hours", importance=HIGH),
        Column("gpu_hours", "GPU-hours", importance=LOW),
    )
    document = [{by: row["of"], **{key: value for key, value in row.items() if key != "of"}} for row in rows]
    notes = notes_on_history(connection)
    if as_csv:
        return Done(_csv(list(document[0]) if document else [by], document), document, notes)
    lines = list(columns.lines([*rows, _sum_of(rows)])) if rows else []
    return Done(lines, document, notes, nothing=f"no run has ended since {since}")


def _row(runs: Row[Any], of: str) -> dict[str, Any]:
    """A row of a report: what the runs of one show, user or day (``of``) took."""
    return {
        "of": of,
        "succeeded": runs.succeeded,
        "failed": runs.failed,
        "core_hours_succeeded": _hours(runs.seconds_succeeded),
        "core_hours_failed": _hours(runs.seconds_failed),
        "gpu_hours": _hours(runs.gpu_seconds),
    }


def _sum_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row that sums up the others; there must be at least one."""
    figures = [key for key in rows[0] if key != "of"]
    return {"of": "all", **{key: round(sum(row[key] for row in rows), 2) for key in figures}}


def _hours(seconds: float) -> float:
    """Core-hours of core-seconds, or GPU-hours of GPU-seconds, with two digits."""
    return round(seconds / SECONDS_PER_HOUR, 2)


def _csv(titles: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a CSV file with a line of titles; the titles are also the keys of the rows."""
    written = io.StringIO()
    writer = csv.DictWriter(written, titles, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue().splitlines()
