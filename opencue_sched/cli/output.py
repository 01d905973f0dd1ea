"""Tables for people, JSON for scripts."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import click
import structlog
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from opencue_sched.domain.farm import CENTICORES_PER_CORE

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts instead of a table.")

T = TypeVar("T")

_KB_PER_GIB = 1024 * 1024
_WIDE = 10_000


def log_warnings() -> None:
    """Log warnings and errors to standard error, for people. Services set up their own logging afterwards."""
    structlog.configure(
        processors=[structlog.stdlib.add_log_level, structlog.dev.ConsoleRenderer(colors=False)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


@dataclass(frozen=True, slots=True)
class Column:
    """A value of the things that a command lists: declared once for the table and for JSON.

    ``read`` is an attribute (or a mapping's key) of a thing, or a function of the thing; without it, ``key`` is the
    attribute. A column without title is in JSON only; one without key, in the table only. ``show`` gives the table's
    text of a value; None is an empty cell.
    """

    key: str
    title: str = ""
    read: str | Callable[[Any], Any] = ""
    show: Callable[[Any], str] | None = None

    def value(self, thing: Any) -> Any:
        """The value as JSON has it."""
        if callable(self.read):
            return self.read(thing)
        name = self.read or self.key
        return thing[name] if isinstance(thing, Mapping) else getattr(thing, name)

    def cell(self, value: Any) -> str:
        """The value as the table has it."""
        if value is None:
            return ""
        if self.show is not None:
            return self.show(value)
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, datetime):
            return time_text(value)
        return f"{value:g}" if isinstance(value, float) else str(value)


def show_rows(things: Iterable[Any], columns: Sequence[Column], *, as_json: bool = False) -> None:
    """Print things as a JSON list, or as a table whose columns of numbers are aligned to the right."""
    if as_json:
        show_json([json_row(thing, columns) for thing in things])
        return
    columns = [column for column in columns if column.title]
    rows = [[column.value(thing) for column in columns] for thing in things]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if any(_is_number(row[number]) for row in rows) else "left"
        table.add_column(column.title, justify=justify, no_wrap=not sys.stdout.isatty())
    for row in rows:
        table.add_row(*(Text(column.cell(value)) for column, value in zip(columns, row, strict=True)))
    _console().print(table)


def json_row(thing: Any, columns: Sequence[Column]) -> dict[str, Any]:
    """A thing as JSON has it."""
    return {column.key: column.value(thing) for column in columns if column.key}


def first(found: Sequence[T], most: int) -> Sequence[T]:
    """The first ``most`` of them. A note on standard error says if there are more."""
    if len(found) > most:
        click.echo(f"note: there are more than {most}; --most lists more", err=True)
    return found[:most]


def show_fields(fields: Mapping[str, str]) -> None:
    """Print what is known of one thing, a line each; empty values are left out."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for heading, value in fields.items():
        if value:
            table.add_row(Text(heading), Text(value))
    _console().print(table)


def show_thing(thing: Any, columns: Sequence[Column], **more: str) -> None:
    """Print all the columns' values of one thing, a line each, and ``more``."""
    titles = {it: it.title or it.key.removesuffix("_kb").replace("_", " ").title() for it in columns}
    show_fields({title: column.cell(column.value(thing)) for column, title in titles.items()} | more)


def show_json(value: Any) -> None:
    """Print one JSON document. Times are ISO 8601."""
    click.echo(json.dumps(value, indent=2, default=_json_value))


def show_report(lines: Iterable[str], document: Any, *, as_json: bool) -> None:
    """Print the lines for people, or the document for scripts."""
    if as_json:
        show_json(document)
    else:
        click.echo("\n".join(lines))


def done(text: str, *, as_json: bool = False, **fields: Any) -> None:
    """Say what was done: a line for people, the fields for scripts."""
    show_report([text], fields, as_json=as_json)


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


def in_cores(attribute: str) -> Callable[[Any], float | None]:
    """Reads an attribute that is in centicores, as cores: for a Column."""
    return lambda thing: cores(getattr(thing, attribute))


def cap_text(value: float | None) -> str:
    """A cap; 0 and below is none."""
    return "-" if value is None or value <= 0 else f"{value:g}"


def memory_text(kilobytes: float) -> str:
    """KB as GiB."""
    return f"{kilobytes / _KB_PER_GIB:.1f}G"


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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _json_value(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)
