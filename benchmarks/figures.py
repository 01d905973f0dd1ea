"""How benchmarks show their figures: one table, and JSON on request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from rich.console import Console
from rich.table import Table

console = Console(stderr=True)


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing: their median, the least and the greatest."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float], *, digits: int = 2) -> Self:
        return cls(*(round(figure, digits) for figure in (median(values), min(values), max(values))))

    def __str__(self) -> str:
        return f"{self.median:,g} ({self.least:,g} - {self.greatest:,g})"


def columns(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Dataclasses as ``show`` takes them; spreads stay as they are."""
    return [{name: getattr(row, name) for name in row.__dataclass_fields__} for row in rows]


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    """One table, figures downwards, one column a row."""
    table = Table(title=title)
    table.add_column("")
    for row in rows:
        table.add_column(
            " ".join(str(row[key]) for key in ("phase", "workers") if key in row), justify="right", overflow="fold"
        )
    for key in rows[0]:
        if key not in ("phase", "workers"):
            table.add_row(key.replace("_", " "), *(str(row[key]) for row in rows))
    Console().print(table)


def show_list(rows: Sequence[dict[str, Any]], title: str) -> None:
    """The same with one line a row, where there are many."""
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key.replace("_", " "), justify="left" if key == "phase" else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


def write_json(path: Path | None, value: Any) -> None:
    """Write the same figures as JSON; a run of minutes is not lost for want of a directory."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2, default=_plain) + "\n", encoding="utf-8")
        console.print(f"written to {path}")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} has no place in JSON")
