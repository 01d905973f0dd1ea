"""How benchmarks show their figures: one table, and JSON on request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(stderr=True)


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    """One table, figures downwards, one column a row."""
    table = Table(title=title)
    table.add_column("")
    for row in rows:
        table.add_column(" ".join(str(row[key]) for key in ("phase", "workers") if key in row), justify="right")
    for key in rows[0]:
        if key not in ("phase", "workers"):
            table.add_row(key.replace("_", " "), *(str(row[key]) for row in rows))
    Console().print(table)


def write_json(path: Path | None, value: Any) -> None:
    """Write the same figures as JSON."""
    if path is not None:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        console.print(f"written to {path}")
