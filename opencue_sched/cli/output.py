"""Tables for people, JSON for scripts."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click
import structlog
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from opencue_sched.domain.units import CENTICORES_PER_CORE

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts instead of a table.")

Format = Callable[[Any], str]

_KB_PER_GIB = 1024 * 1024
_WIDE = 10_000


def log_warnings() -> None:
    """Log warnings and errors to standard error, for people. Services set up their own logging afterwards."""
    structlog.configure(
        processors=[structlog.stdlib.add_log_level, structlog.dev.ConsoleRenderer(colors=False)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def show_rows(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    *,
    as_json: bool,
    formats: Mapping[str, Format] | None = None,
) -> None:
    """Print rows: as a JSON list with the rows' own keys, or as a table with ``columns`` (key -> heading).

    ``formats`` say how a column's values look in the table. Columns of numbers are aligned to the right.
    """
    if as_json:
        show_json(list(rows))
        return
    formats = formats or {}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for key, heading in columns.items():
        numbers = any(_is_number(row.get(key)) for row in rows)
        table.add_column(heading, justify="right" if numbers else "left", no_wrap=not sys.stdout.isatty())
    for row in rows:
        table.add_row(*(Text(_cell(row.get(key), formats.get(key, str))) for key in columns))
    _console().print(table)


def show_fields(fields: Mapping[str, str]) -> None:
    """Print what is known of one thing, a line each; empty values are left out."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for heading, value in fields.items():
        if value:
            table.add_row(Text(heading), Text(value))
    _console().print(table)


def show_json(value: Any) -> None:
    """Print one JSON document. Times are ISO 8601."""
    click.echo(json.dumps(value, indent=2, default=_json_value))


def done(text: str, *, as_json: bool = False, **fields: Any) -> None:
    """Say what was done: a line for people, the fields for scripts."""
    if as_json:
        show_json(fields)
    else:
        click.echo(text)


@contextmanager
def working(text: str) -> Iterator[None]:
    """While this lasts, show on a terminal what is being done, and for how long; elsewhere show nothing."""
    if not sys.stderr.isatty():
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        progress.add_task(text, total=None)
        yield


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``1 frame``, ``2 frames``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def cores(centicores: int | None) -> float | None:
    """Centicores of the database as cores; the sentinels 0 and -1 stay."""
    if centicores is None or centicores <= 0:
        return centicores
    value = centicores / CENTICORES_PER_CORE
    return int(value) if value.is_integer() else value


def cap_text(value: float | None) -> str:
    """A cap; 0 and below is none."""
    return "-" if value is None or value <= 0 else f"{value:g}"


def memory_text(kilobytes: float) -> str:
    """KB as GiB."""
    return f"{kilobytes / _KB_PER_GIB:.1f}G"


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def time_text(moment: datetime | None) -> str:
    """A moment in local time; empty when there is none."""
    return "" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age_text(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago: ``45s``, ``12m``, ``3h 20m``, ``2d 4h``."""
    if moment is None:
        return ""
    return duration_text(((now or datetime.now(UTC)) - moment).total_seconds())


def duration_text(seconds: float) -> str:
    """``45s``, ``12m``, ``3h 20m``, ``2d 4h``."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m" if minutes else f"{rest}s"


def _console() -> Console:
    """A terminal's own width; no limit, and so no wrapped lines, for a pipe or a file."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDE, highlight=False)


def _cell(value: Any, form: Format) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) and form is str:
        return yes_no(value)
    if isinstance(value, float) and form is str:
        return f"{value:g}"
    return form(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _json_value(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)
