"""What ran and what it took, from OpenCue's history tables: ``show report`` and ``job list --since``."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any

import click
from sqlalchemy import Connection

from opencue_sched.cli.output import HIGH, LOW, NAME, Column, Columns, Done, time_text
from opencue_sched.domain.units import memory_text
from opencue_sched.store import history

SECONDS_PER_HOUR = 3600
_DAYS_BACK = 3660
"""How many days ago the earliest day is that a command takes."""
_OFF = "note: history is switched off here (DISABLE_HISTORY in the table config): what ran since then is not in it"

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
    """A day as people write it, at its first second in local time: 2026-12-24, today, yesterday, or 7d."""

    name = "day"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> date:
        """click's hook: the first second of the day that was typed."""
        if isinstance(value, date):
            return value
        today = datetime.now().astimezone().date()
        back = {"today": 0, "yesterday": 1}.get(value)
        if back is None and value.endswith("d") and value[:-1].isdecimal():
            back = int(value[:-1][:6])
        try:
            day = date.fromisoformat(value) if back is None else today - timedelta(days=back)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no day; write 2026-12-24, today, yesterday or 7d", param, ctx)
        if day > today:
            self.fail(f"{value} lies ahead", param, ctx)
        if day < today - timedelta(days=_DAYS_BACK):
            self.fail(f"{value} is more than ten years ago", param, ctx)
        return day


def first_second(day: date) -> int:
    """The first second of a day in local time, since 1970."""
    return int(datetime(day.year, day.month, day.day).astimezone().timestamp())


def notes_on_history(connection: Connection) -> list[str]:
    """What a reader of the history has to know."""
    return [_OFF] if history.is_off(connection) else []


def report(connection: Connection, show_id: str | None, since: date, by: str, *, as_csv: bool) -> Done:
    """Frames, core-hours and GPU-hours of what ended since a day, a line for each show, user or day, and their sum."""
    days = [since + timedelta(days=number) for number in range((datetime.now().astimezone().date() - since).days + 1)]
    found = history.runs_by(connection, by, [first_second(day) for day in days], show_id=show_id)
    rows = [_row(row, days[int(row.of) - 1].isoformat() if by == "day" else row.of) for row in found]
    rows.sort(key=lambda row: row["of"] if by == "day" else (-row["core_hours_succeeded"] - row["core_hours_failed"]))
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
        return Done(_csv([by, *list(rows[0])[1:]] if rows else [by], document), document, notes)
    total = {"of": "all", **{key: round(sum(row[key] for row in rows), 2) for key in list(rows[0])[1:]}} if rows else {}
    lines = list(columns.lines([*rows, total])) if rows else []
    return Done(lines, document, notes, nothing=f"no run has ended since {since}")


def _row(row: Any, of: str) -> dict[str, Any]:
    return {
        "of": of,
        "succeeded": row.succeeded,
        "failed": row.failed,
        "core_hours_succeeded": _hours(row.seconds_succeeded),
        "core_hours_failed": _hours(row.seconds_failed),
        "gpu_hours": _hours(row.gpu_seconds),
    }


def _hours(seconds: float) -> float:
    return round(seconds / SECONDS_PER_HOUR, 2)


def _csv(titles: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    written = io.StringIO()
    writer = csv.DictWriter(written, titles, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue().splitlines()
