"""Tables for people, JSON for scripts."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
import structlog
from rich.console import Console
from rich.table import Table

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts instead of a table.")


def log_warnings() -> None:
    """Log warnings and errors to standard error, for people. Services set up their own logging afterwards."""
    structlog.configure(
        processors=[structlog.stdlib.add_log_level, structlog.dev.ConsoleRenderer(colors=False)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], *, as_json: bool) -> None:
    """Print rows: as a JSON list with the rows' own keys, or as a table with ``columns`` (key -> heading)."""
    if as_json:
        show_json(list(rows))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in columns.values():
        table.add_column(heading)
    for row in rows:
        table.add_row(*("" if row.get(key) is None else str(row.get(key)) for key in columns))
    Console(file=sys.stdout).print(table)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``1 frame``, ``2 frames``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def show_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2, default=str))
