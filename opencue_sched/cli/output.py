"""Tables for people, JSON for scripts."""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from rich.cells import cell_len

from opencue_sched.domain.units import CENTICORES_PER_CORE, duration_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def asked_for_json() -> bool:
    """Whether the command that runs was given --json."""
    return bool(click.get_current_context().params["as_json"])


NAME = 9
"""The importance of a column whose value is the argument of the next command: no terminal is too narrow for it. There
is room for others between HIGH and this."""
HIGH, LOW = 2, 0
"""The importance of a column that is left out last, and of one that is left out first."""
_MIDDLE = 1
"""The importance of a column that is left out between those of LOW and HIGH."""

_ABBREVIATIONS = {"gpu": "GPU", "gpus": "GPUs", "id": "ID", "os": "OS", "ttl": "TTL", "uid": "UID"}
"""How words of a key are written in a label, where a capital letter in front is not enough."""
_GAP = "  "
"""The spaces between two columns."""
_WRAPPED = 24
"""The least width of a column that wraps, in characters, for some words on each line. Where less is left for the
column, another is left out."""
_WATCH_SECONDS = 2.0
"""The time between two lists of --watch."""
_LINES_AROUND = 5
"""How many lines of the terminal a watched table needs besides its rows: one for the time, one for the titles, and
three for the note of the columns that are left out."""


def log_warnings() -> None:
    """Log warnings and errors to standard error, for people. Services set up their own logging afterwards."""
    import structlog

    structlog.configure(
        processors=[structlog.stdlib.add_log_level, structlog.dev.ConsoleRenderer(colors=False)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


@dataclass(frozen=True, slots=True)
class Column:
    """A value of the things that a command lists: declared once for the table and for JSON.

    On a terminal that is too narrow, columns without any value are left out, then those of the least importance, from
    the right.
    """

    key: str
    """The name in JSON; a column without one is in the table only."""
    title: str = ""
    """The title in the table; a column without one is in JSON only."""
    read: str | Callable[[Any], Any] = ""
    """The name of an attribute (or a mapping's key) of a thing, or a function of the thing that returns the value;
    empty: ``key`` is the name."""
    show: Callable[[Any], str] | None = None
    """Gives the table's text of a value; a value of None is an empty cell."""
    importance: int = _MIDDLE
    """How late the column is left out of a terminal that is too narrow: first those of LOW, last those of HIGH, never
    those of NAME."""
    wraps: bool = False
    """Whether a long text of the column is wrapped over several lines, so that fewer columns are left out. Allowed in
    the last column of a table alone."""

    def value(self, thing: Any) -> Any:
        """What the column has of a thing, as JSON shows it."""
        if callable(self.read):
            return self.read(thing)
        name = self.read or self.key
        return thing[name] if isinstance(thing, Mapping) else getattr(thing, name)

    @property
    def label(self) -> str:
        """What stands before the value where one thing is shown: the title, or the key in words."""
        words = self.key.removesuffix("_kb").split("_")
        return self.title or " ".join(_ABBREVIATIONS.get(word, word.capitalize()) for word in words)

    def cell(self, value: Any) -> str:
        """The text of a value, as the table shows it."""
        if value is None:
            return ""
        if self.show is not None:
            return self.show(value)
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, datetime):
            return time_text(value)
        return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Done:
    """What a command did or found, ready to be printed."""

    lines: str | Iterable[str]
    """A line or lines for people, on standard output. ``nothing`` takes the place of an empty text or sequence, but not
    of an iterator that gives no line."""
    document: Any
    """The document for scripts, with --json."""
    notes: Sequence[str] = ()
    """Lines for people, on standard error."""
    status: int = 0
    """The exit status of the command."""
    nothing: str = ""
    """The line for people on standard error in place of ``lines`` where these are empty."""

    def show(self, *, as_json: bool) -> None:
        """Print the lines, or the document, and the notes; then end the command if ``status`` is not 0."""
        if as_json:
            click.echo(json.dumps(self.document, indent=2, default=datetime.isoformat))
        elif self.lines:
            click.echo(self.lines if isinstance(self.lines, str) else "\n".join(self.lines))
        elif self.nothing:
            click.echo(self.nothing, err=True)
        for note in self.notes:
            click.echo(note, err=True)
        if self.status:
            raise click.exceptions.Exit(self.status)


@dataclass(frozen=True, slots=True)
class Table:
    """The texts of a table, with what is known of each column. Columns have numbers from 0. Nobody changes a list."""

    titles: list[str]
    """The title of each column."""
    cells: list[list[str]]
    """The rows, each a text for each column."""
    widths: list[int]
    """The width of each column, in characters of a terminal."""
    right: list[bool]
    """Whether each column is aligned to the right, as numbers are."""
    shown: list[int]
    """The numbers of the columns that are shown."""
    wraps: bool
    """Whether the last column is shown, and wraps where a row is wider than the terminal."""

    def line(self, texts: Sequence[str]) -> str:
        """The line that a row makes, of the texts of all columns, without the columns that are not shown."""
        return _GAP.join(
            _pad(texts[number], self.widths[number], right=self.right[number]) for number in self.shown
        ).rstrip()


class Columns:
    """The columns that a command has for the things it lists, shows or changes."""

    def __init__(self, *columns: Column) -> None:
        self._all = columns
        self._titled = [column for column in columns if column.title]

    def and_also(self, *columns: Column) -> Columns:
        """The same columns with more behind them."""
        return Columns(*self._all, *columns)

    def document(self, row: Any) -> dict[str, Any]:
        """The JSON object of a row."""
        return {column.key: column.value(row) for column in self._all if column.key}

    def listed(self, rows: Sequence[Any], noun: str = "", most: int = sys.maxsize) -> Done:
        """The outcome of a command that lists ``rows``: at most ``most`` of them, and a note where there are more. For
        that note a command reads one row more than it shows.

        ``noun`` is what one row is called, in the singular, where there is none to list; empty: by the title of the
        first column.
        """
        notes = [f"note: there are more than {most}; --most lists more"] if len(rows) > most else []
        lines, documents = self.lines(rows[:most]) if rows else [], [self.document(row) for row in rows[:most]]
        return Done(lines, documents, notes, nothing=f"no {noun or self._all[0].title.lower()}s")

    def changed(self, row: Any) -> Done:
        """The outcome of a command that created or changed ``row``: the row as it would be listed."""
        return Done(self.lines([row]), self.document(row))

    def shown(self, row: Any, key: str = "", its: Sequence[Any] = (), its_columns: Columns | None = None) -> Done:
        """The outcome of a command that shows ``row``: a line for each column with a value.

        ``its`` are the rows that belong to the row, such as the layers of a job, and ``its_columns`` are their columns.
        A table of them follows the lines; the JSON object of the row has them under ``key``.
        """
        known = {column.label: text.splitlines() for column in self._all if (text := column.cell(column.value(row)))}
        width = max(map(cell_len, known))
        lines = [
            (" " * width if number else click.style(_pad(name, width, right=False), bold=True)) + _GAP + _one_line(line)
            for name, texts in known.items()
            for number, line in enumerate(texts)
        ]
        if its_columns is None:
            return Done(lines, self.document(row))
        document = self.document(row) | {key: [its_columns.document(own) for own in its]}
        return Done([*lines, "", *its_columns.lines(its)] if its else lines, document)

    def watch(self, find: Callable[[int], Sequence[Any]]) -> None:
        """List rows anew every two seconds, until Ctrl-C. ``find`` gets the number of rows that fit on the terminal,
        and returns the rows. Raises UsageError where standard output is no terminal."""
        if not sys.stdout.isatty():
            raise click.UsageError("--watch needs a terminal")
        from rich.text import Text

        def pictures(console: Console) -> Iterator[Text]:
            while True:
                title = f"every {_WATCH_SECONDS:g} s, Ctrl-C ends: {time_text(datetime.now(UTC))}"
                lines = self.lines(find(console.height - _LINES_AROUND))
                yield Text.from_ansi("\n".join([click.style(title, dim=True), *lines]))
                time.sleep(_WATCH_SECONDS)

        live(pictures, screen=True)

    def lines(self, rows: Sequence[Any]) -> Iterator[str]:
        """The lines of a table, with columns of numbers aligned to the right.

        A terminal gets the columns that fit, no cell cut, and a line with the titles of the other columns. A pipe gets
        all columns.
        """
        width = _terminal_width() if sys.stdout.isatty() else None
        table = self.lay_out(rows, width)
        yield click.style(table.line(table.titles), bold=True)
        indent = _GAP.join(" " * table.widths[number] for number in table.shown[:-1]) + _GAP
        for line in map(table.line, table.cells):
            if width is not None and table.wraps and cell_len(line) > width:
                yield from textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
            else:
                yield line
        if left_out := [title for number, title in enumerate(table.titles) if number not in table.shown]:
            note = f"left out: {', '.join(left_out)}; a wider terminal, a pipe (| less -S) or --json shows them"
            yield click.style(click.wrap_text(note, _terminal_width()), dim=True)

    def lay_out(self, rows: Sequence[Any], width: int | None) -> Table:
        """The table of the columns that have a title and fit into ``width`` characters; None: of all that have a title.
        A column that wraps fits where _WRAPPED characters are left for it."""
        columns = self._titled
        values = [[column.value(row) for column in columns] for row in rows]
        cells = [[_one_line(column.cell(value)) for column, value in zip(columns, row, strict=True)] for row in values]
        widths = [max(map(cell_len, (column.title, *texts))) for column, *texts in zip(columns, *cells, strict=True)]
        right = [any(type(row[number]) in (int, float) for row in values) for number in range(len(columns))]
        # No gap follows the last column.
        shown = list(range(len(columns))) if width is None else self._fit(cells, widths, width + len(_GAP))
        wraps = columns[-1].wraps and shown[-1] == len(columns) - 1
        return Table([column.title for column in columns], cells, widths, right, shown, wraps)

    def _fit(self, cells: list[list[str]], widths: list[int], room: int) -> list[int]:
        """The numbers of the columns that fit into ``room`` characters, each with the gap after it. Where not all fit,
        those without any value go first, then those of the least importance, from the right."""
        least = [
            len(_GAP) + (min(width, _WRAPPED) if column.wraps else width)
            for column, width in zip(self._titled, widths, strict=True)
        ]
        shown = list(range(len(widths)))
        if cells and sum(width + len(_GAP) for width in widths) > room:
            shown = [number for number in shown if any(texts[number] for texts in cells)]
        importance = [column.importance for column in self._titled]
        optional = [number for number in shown if importance[number] < NAME]
        optional.sort(key=lambda number: (-importance[number], number))
        while optional and sum(least[number] for number in shown) > room:
            shown.remove(optional.pop())
        return shown


def _terminal_width() -> int:
    return shutil.get_terminal_size().columns


def _pad(text: str, width: int, *, right: bool) -> str:
    padding = " " * (width - cell_len(text))
    return padding + text if right else text + padding


def _one_line(text: str) -> str:
    """The text of a cell, with a space for each character that would move the cursor."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def working(text: str) -> AbstractContextManager[object]:
    """A context during which a terminal shows ``text``, which says what is being done; a pipe gets nothing."""
    from rich.console import Console

    return Console(stderr=True).status(text)


@contextmanager
def counting_down(text: str) -> Iterator[Callable[[float], None]]:
    """A context like ``working``, which gives a function that sleeps for some seconds and shows how many are left."""
    from rich.console import Console

    with Console(stderr=True).status(text) as status:

        def sleep(seconds: float) -> None:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                status.update(f"{text}: {math.ceil(left)} s left")
                time.sleep(min(left, 1.0))
            status.update(text)

        yield sleep


def live(pictures: Callable[[Console], Iterable[RenderableType]], *, screen: bool = False) -> None:
    """Show pictures (what rich can draw) on the terminal as they come, each in place of the one before; with ``screen``
    on a screen of its own, which is gone at the end."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stdout, highlight=False)
    shown = Live(console=console, screen=screen, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with shown:
        for picture in pictures(console):
            shown.update(picture, refresh=True)


def cores(centicores: int | None) -> float | None:
    """The cores that an amount of centicores in the database is. 0, None and -1 (no cap) stay as they are."""
    if centicores is None or centicores <= 0:
        return centicores
    value = centicores / CENTICORES_PER_CORE
    return int(value) if value.is_integer() else value


def in_cores(attribute: str) -> Callable[[Any], float | None]:
    """A function that reads an attribute in centicores and returns cores: ``read`` of a Column."""
    return lambda row: cores(getattr(row, attribute))


def cap_text(value: float | None) -> str:
    """The text of a cap: "-" where there is none, which None, 0 and anything below mean."""
    return "-" if value is None or value <= 0 else f"{value:g}"


def time_text(moment: datetime) -> str:
    """The text of a moment, in local time."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age_text(moment: datetime | None, now: datetime | None = None) -> str:
    """The text of the time since a moment: ``45s``, ``12m``, ``3h 20m``, ``2d 4h``; empty where there is no moment."""
    if moment is None:
        return ""
    return duration_text(((now or datetime.now(UTC)) - moment).total_seconds())
