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
"""The importance of a column whose value is the argument of the next command: no terminal is too narrow for it."""
HIGH, LOW = 2, 0
"""The importance of a column that is left out last, and of one that is left out first."""

_ABBREVIATIONS = {"gpu": "GPU", "gpus": "GPUs", "id": "ID", "os": "OS", "uid": "UID"}
"""How words of a key are written in a label, where a capital letter in front is not enough."""
_GAP = "  "
"""The spaces between two columns."""
_WRAPPED = 24
"""The fewest characters of a line into which a column that wraps is pressed."""
_WATCH_SECONDS = 2.0
"""The time between two lists of --watch."""
_LINES_AROUND = 5
"""Lines of a watched table that are not of its rows: the time, titles, and the columns that are left out."""


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
    """An attribute (or a mapping's key) of a thing, or a function of the thing; without it, ``key`` is the
    attribute."""
    show: Callable[[Any], str] | None = None
    """Gives the table's text of a value; a value of None is an empty cell."""
    importance: int = 1
    """How late the column is left out of a terminal that is too narrow: LOW, 1, HIGH, or NAME for never."""
    wraps: bool = False
    """Whether the column's text takes several lines before columns are left out for want of width. Only the last column
    of a table may."""

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
    """A line or lines for people, on standard output."""
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
    """The texts of a table, with what is known of each column. Lists are by column, and no caller changes them."""

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
    """Whether the last text of a line may take several lines."""

    def line(self, texts: Sequence[str]) -> str:
        """The line of the table that the texts of all columns make."""
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
        """What a command says that lists ``rows``; ``noun`` is what a row is, without it the first column's title.

        Of more than ``most`` rows the first are shown, with a note: a command reads one more than it shows.
        """
        notes = [f"note: there are more than {most}; --most lists more"] if len(rows) > most else []
        lines, documents = self.lines(rows[:most]) if rows else [], [self.document(row) for row in rows[:most]]
        return Done(lines, documents, notes, nothing=f"no {noun or self._all[0].title.lower()}s")

    def changed(self, row: Any) -> Done:
        """What a command says that created or changed ``row``: the row as it would be listed."""
        return Done(self.lines([row]), self.document(row))

    def shown(self, row: Any, key: str = "", its: Sequence[Any] = (), its_columns: Columns | None = None) -> Done:
        """What a command says that shows ``row``: a line for each column with a value, then a table of the rows that
        belong to the row: ``its``, with ``its_columns``. The JSON object of the row has ``its`` under ``key``."""
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
        """List rows anew every two seconds, until Ctrl-C. ``find`` is called with the number of rows that fit on the
        terminal, and returns them."""
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
        """The lines of a table, columns of numbers aligned to the right. A terminal gets the columns that fit, with no
        cell cut, and the titles of those that do not; a pipe gets all."""
        width = _terminal_width() if sys.stdout.isatty() else None
        table = self.lay_out(rows, width)
        yield click.style(table.line(table.titles), bold=True)
        before = _GAP.join(" " * table.widths[number] for number in table.shown[:-1]) + _GAP
        for line in map(table.line, table.cells):
            if width is not None and table.wraps and cell_len(line) > width:
                yield from textwrap.wrap(line, width, subsequent_indent=before, break_on_hyphens=False)
            else:
                yield line
        if left_out := [title for number, title in enumerate(table.titles) if number not in table.shown]:
            note = f"left out: {', '.join(left_out)}; a wider terminal, a pipe (| less -S) or --json shows them"
            yield click.style(click.wrap_text(note, _terminal_width()), dim=True)

    def lay_out(self, rows: Sequence[Any], width: int | None) -> Table:
        """The table of the columns that have a title and fit into ``width`` characters, or of all that have a title
        where ``width`` is None. A column that wraps needs 24 characters."""
        columns = self._titled
        values = [[column.value(row) for column in columns] for row in rows]
        cells = [[_one_line(column.cell(value)) for column, value in zip(columns, row, strict=True)] for row in values]
        widths = [max(map(cell_len, (column.title, *texts))) for column, *texts in zip(columns, *cells, strict=True)]
        right = [any(type(row[number]) in (int, float) for row in values) for number in range(len(columns))]
        shown = list(range(len(columns))) if width is None else self._fit(cells, widths, width + len(_GAP))
        wraps = columns[-1].wraps and shown[-1] == len(columns) - 1
        return Table([column.title for column in columns], cells, widths, right, shown, wraps)

    def _fit(self, cells: list[list[str]], widths: list[int], room: int) -> list[int]:
        """The numbers of the columns that fit into ``room`` characters, with the gap after each."""
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
    """The cores that some centicores of the database are. 0, and -1 for a cap that is none, stay as they are."""
    if centicores is None or centicores <= 0:
        return centicores
    value = centicores / CENTICORES_PER_CORE
    return int(value) if value.is_integer() else value


def in_cores(attribute: str) -> Callable[[Any], float | None]:
    """A function that reads an attribute in centicores and returns cores: ``read`` of a Column."""
    return lambda row: cores(getattr(row, attribute))


def cap_text(value: float | None) -> str:
    """The text of a cap; one of 0 or below is no cap."""
    return "-" if value is None or value <= 0 else f"{value:g}"


def time_text(moment: datetime) -> str:
    """The text of a moment, in local time."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age_text(moment: datetime | None, now: datetime | None = None) -> str:
    """The text of the time since a moment: ``45s``, ``12m``, ``3h 20m``, ``2d 4h``; empty where there is no moment."""
    if moment is None:
        return ""
    return duration_text(((now or datetime.now(UTC)) - moment).total_seconds())
